"""``aux-layer-ids`` on every release: its own code, patched, taken out and run."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from layer_ids_table import DEFAULT, IN_EFFECT, OTHER_METHODS, REFUSED, Config, run
from tools.fetch_release import fetch
from vllm_eagle3_patch.ground import matrix
from vllm_eagle3_patch.patches.aux_layer_ids import (
    NEWER_READER,
    READER,
    SPECULATIVE_CONFIG,
    AuxLayerIds,
)
from vllm_eagle3_patch.vllm_source import syntax
from vllm_eagle3_patch.vllm_source.paths import NEWER_LAYER_IDS, RUNNER
from vllm_eagle3_patch.vllm_source.sources import Sources, parse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Read = Callable[[object], "tuple[int, ...] | None"]

PATCH = AuxLayerIds()


@dataclass
class Release:
    """One release's files, as published and patched."""

    name: str
    root: Path

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The files that the patch concerns."""
        return PATCH.paths(Sources(self.root))

    @cached_property
    def configs(self) -> tuple[Config, Config]:
        """The stock config and the patched one."""
        content = (self.root / self.paths[0]).read_bytes()
        patched = PATCH.apply(content, self.paths[0])
        oldest = re.search(r">=\s*3\.(\d+)", self.pins.requires_python)
        assert oldest is not None
        parse(patched, self.paths[0], feature_version=(3, int(oldest[1])))
        return Config(content), Config(patched)

    @cached_property
    def pins(self) -> matrix.Release:
        """What the matrix says of it."""
        pins = matrix.load(self.name)
        assert pins is not None
        return pins

    @cached_property
    def runner(self) -> tuple[ast.Module, ast.Module]:
        """The stock runner's class and the patched one, cut down to what the patch reads."""
        content = (self.root / RUNNER).read_bytes()
        name = READER if READER.encode() in content else "load_model"
        small = cut(content, name)
        return parse(small, RUNNER), parse(PATCH.apply(small, RUNNER), RUNNER)

    @cached_property
    def readers(self) -> list[tuple[Read, Read]]:
        """Each runner's reader of layer ids, stock and patched, as functions of a config."""
        found = []
        if syntax.find_function(self.runner[1], READER):
            found.append((reader_of_runner(self.runner[0]), reader_of_runner(self.runner[1])))
        if NEWER_LAYER_IDS in self.paths:
            content = (self.root / NEWER_LAYER_IDS).read_bytes()
            patched = PATCH.apply(content, NEWER_LAYER_IDS)
            found.append((reader_of_newer(content), reader_of_newer(patched)))
        return found


def cut(content: bytes, function: str) -> bytes:
    """The one class that has a method of this name, with nothing but that method."""
    module = parse(content, "")
    (owner, method) = next(
        (node, syntax.find_method(node, function))
        for node in module.body
        if isinstance(node, ast.ClassDef) and syntax.find_method(node, function)
    )
    assert method is not None
    lines = content.splitlines(keepends=True)[method.lineno - 1 : method.end_lineno]
    return f"class {owner.name}:\n".encode() + b"".join(lines)


def reader_of_runner(module: ast.Module) -> Read:
    """The V1 runner's reader."""
    namespace: dict[str, Any] = {}
    run([syntax.find_function(module, READER)], namespace)
    return lambda config: namespace[READER](SimpleNamespace(speculative_config=config))


def reader_of_newer(content: bytes) -> Read:
    """The reader of the runner under ``vllm/v1/worker/gpu``."""
    namespace: dict[str, Any] = {}
    run([syntax.find_function(parse(content, NEWER_LAYER_IDS), NEWER_READER)], namespace)
    read: Read = namespace[NEWER_READER]
    return read


class Model:
    """A target model that keeps what is set."""

    def __init__(self) -> None:
        self.layers: object = None

    def set_aux_hidden_state_layers(self, layers: object) -> None:
        self.layers = layers

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return DEFAULT


def layers_set(module: ast.Module, config: object) -> object:
    """What ``load_model`` sets on the model in a release without a reader."""
    load_model = syntax.find_function(module, "load_model")
    assert load_model is not None
    (block,) = [
        node
        for node in ast.walk(load_model)
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "self.use_aux_hidden_state_outputs"
    ]
    runner = SimpleNamespace(
        use_aux_hidden_state_outputs=True, speculative_config=config, model=Model()
    )
    run([block], {"self": runner, "supports_eagle3": lambda model: True})
    return runner.model.layers


@pytest.fixture(scope="module", params=matrix.names())
def release(request: pytest.FixtureRequest) -> Release:
    """A release."""
    return Release(request.param, fetch(request.param))


def test_files_concerned(release: Release) -> None:
    config, runner, *newer = release.paths
    assert config in SPECULATIVE_CONFIG
    assert runner == RUNNER
    assert newer == [NEWER_LAYER_IDS] * (release.root / NEWER_LAYER_IDS).exists()


def test_config_decides(release: Release) -> None:
    _, config = release.configs
    decided = {case: config.layers(draft) for case, (draft, _) in IN_EFFECT.items()}
    assert decided == {case: expected for case, (_, expected) in IN_EFFECT.items()}
    for draft, named in REFUSED.values():
        with pytest.raises(ValueError, match=re.escape(f"{named} in the draft model's config")):
            config.layers(draft)
    assert config.logger.messages


def test_key_follows_the_ids_in_effect_and_nothing_else(release: Release) -> None:
    stock, config = release.configs
    by_layers: dict[object, set[str]] = {}
    for draft, layers in IN_EFFECT.values():
        by_layers.setdefault(layers, set()).add(config.hash(draft))
    assert all(len(keys) == 1 for keys in by_layers.values()), "other keys for the same layers"
    assert len(set.union(*by_layers.values())) == len(by_layers), "one key for other layers"
    default, _ = IN_EFFECT["none"]
    assert config.hash(default) == stock.hash(default)
    for method, draft in OTHER_METHODS.values():
        assert config.hash(draft, method) == stock.hash(draft, method)


def test_runners_use_what_the_config_decides(release: Release) -> None:
    _, config = release.configs
    for draft, expected in IN_EFFECT.values():
        for _, read in release.readers:
            assert read(config.stand_in(draft)) == expected
        if not syntax.find_function(release.runner[1], READER):
            assert layers_set(release.runner[0], config.stand_in(draft)) == DEFAULT
            assert layers_set(release.runner[1], config.stand_in(draft)) == (expected or DEFAULT)


def test_runners_read_as_ever_for_other_methods(release: Release) -> None:
    _, config = release.configs
    for stock, read in release.readers:
        assert read(None) is None
        for method, draft in OTHER_METHODS.values():
            stand_in = config.stand_in(draft, method)
            assert read(stand_in) == stock(stand_in), method
