"""``aux-layer-ids`` on every release: its own code, patched, taken out and run, and the doctor."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from doctor_models import KIMI_K2, LLAMA_DRAFT, SPECULATORS_V3, changed, findings, situation

from layer_ids_table import (
    DEFAULT,
    IN_EFFECT,
    KEY,
    MEANINGS,
    OTHER_METHODS,
    REFUSED,
    Case,
    Config,
    run,
)
from tools.fetch_release import fetch
from vllm_eagle3_patch.ground import matrix
from vllm_eagle3_patch.patches.aux_layer_ids import (
    NEWER_READER,
    READER,
    SPECULATIVE_CONFIG,
    AuxLayerIds,
)
from vllm_eagle3_patch.vllm_source import runner, syntax
from vllm_eagle3_patch.vllm_source.paths import NEWER_LAYER_IDS, RUNNER
from vllm_eagle3_patch.vllm_source.sources import Sources, parse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vllm_eagle3_patch.doctor.situation import Situation

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
        patched = self.patched.read(self.paths[0])
        assert patched is not None
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
    def patched(self) -> Sources:
        """The files as patched, the runner cut down."""
        before = {path: (self.root / path).read_bytes() for path in self.paths}
        before[RUNNER] = self.cut_runner
        return Sources(
            self.root, {path: PATCH.apply(content, path) for path, content in before.items()}
        )

    @cached_property
    def cut_runner(self) -> bytes:
        """The runner's class with what the patch reads and nothing else."""
        content = (self.root / RUNNER).read_bytes()
        return cut(content, READER if READER.encode() in content else "load_model")

    @cached_property
    def runner(self) -> tuple[ast.Module, ast.Module]:
        """The stock runner and the patched one, cut down to what the patch reads."""
        return parse(self.cut_runner, RUNNER), self.patched.module(RUNNER)

    @cached_property
    def readers(self) -> list[tuple[Read, Read]]:
        """Each runner's reader of layer ids, stock and patched, as functions of a config."""
        found = []
        if syntax.find_function(self.runner[1], READER):
            found.append((reader_of_runner(self.runner[0]), reader_of_runner(self.runner[1])))
        if NEWER_LAYER_IDS in self.paths:
            both = (Sources(self.root), self.patched)
            stock, patched = (reader_of_newer(files.module(NEWER_LAYER_IDS)) for files in both)
            found.append((stock, patched))
        return found

    def readings(self, config: object, *, patched: bool) -> list[tuple[int, ...] | None]:
        """What each runner reads, None where it takes the target's default."""
        if not syntax.find_function(self.runner[1], READER):
            layers = layers_set(self.runner[patched], config)
            return [None if layers == DEFAULT else layers]
        return [both[patched](config) for both in self.readers]


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


def reader_of_newer(module: ast.Module) -> Read:
    """The reader of the runner under ``vllm/v1/worker/gpu``."""
    namespace: dict[str, Any] = {}
    run([syntax.find_function(module, NEWER_READER)], namespace)
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


def layers_set(module: ast.Module, config: object) -> Any:
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
        if layers is None:
            assert config.hash(draft) == stock.hash(draft)
        else:
            by_layers.setdefault(layers, set()).add(config.hash(draft))
    assert all(len(keys) == 1 for keys in by_layers.values()), "other keys for the same layers"
    assert len(set.union(*by_layers.values())) == len(by_layers), "one key for other layers"
    for method, draft in OTHER_METHODS.values():
        assert config.hash(draft, method) == stock.hash(draft, method)


def test_runners_use_what_the_config_decides(release: Release) -> None:
    _, config = release.configs
    for draft, expected in IN_EFFECT.values():
        readings = release.readings(config.stand_in(draft), patched=True)
        assert set(readings) == {expected}


def test_runners_read_as_ever_for_other_methods(release: Release) -> None:
    _, config = release.configs
    for stock, read in release.readers:
        assert read(None) is None
        for method, draft in OTHER_METHODS.values():
            stand_in = config.stand_in(draft, method)
            assert read(stand_in) == stock(stand_in), method


@pytest.mark.parametrize("target", ["llama", "gpt_oss", "deepseek", None])
def test_other_targets_are_as_released(release: Release, target: str | None) -> None:
    stock, config = release.configs
    config.logger.messages.clear()
    drafts = [*IN_EFFECT.values(), *REFUSED.values()]
    # vLLM itself, 0.17.0 on, cannot hash a top-level 0.
    for draft in [draft for draft, _ in drafts if getattr(draft, KEY, None) != 0]:
        given = (draft, "eagle3", target)
        assert config.layers(*given) is None
        assert config.hash(*given) == stock.hash(*given)
        stand_in = config.stand_in(*given)
        as_released = release.readings(stock.stand_in(*given), patched=False)
        assert release.readings(stand_in, patched=True) == as_released
    assert not config.logger.messages


def doctors(release: Release, case: Case, *, patched: bool, newer: bool) -> Situation | None:
    """The doctor's view of a case; None where the speculators format loses the ids."""
    draft = changed(LLAMA_DRAFT, **case.config)
    if case.place == "speculators":
        draft = changed(SPECULATORS_V3, **case.config)
    judged = situation(KIMI_K2, draft, release=release.name)
    if case.place == "speculators" and KEY not in (judged.engine.speculators_keys or ()):
        return None
    config = release.patched.module(release.paths[0])
    decides = runner.config_decides_layers(config, release.patched)
    return replace(
        judged,
        engine=replace(judged.engine, decides_layers=patched and decides),
        options=replace(judged.options, newer_runner=newer),
    )


@pytest.mark.parametrize("case", MEANINGS.values(), ids=MEANINGS)
@pytest.mark.parametrize("patched", [False, True], ids=["as released", "patched"])
def test_a_list_means_the_same_to_vllm_and_to_the_doctor(
    release: Release, case: Case, patched: bool
) -> None:
    """Hardened is patched: of both sets this patch makes the same of its files."""
    config = release.configs[patched].stand_in(case.hf_config)
    for newer, read in enumerate(release.readings(config, patched=patched)):
        assert read == case.patched if patched else read in (case.ids, None)
        judged = doctors(release, case, patched=patched, newer=bool(newer))
        if judged is None:
            continue
        used = read or (2, 30, 58)
        assert judged.layers.document == {
            "configured": list(case.ids),
            "where": "eagle_config" if case.place == "nested" else "top",
            "used": list(used),
            "outputs_of": [layer - 1 for layer in used],
            "convention": case.convention or "boundary",
        }
        said = {f.code: f.severity for f in findings(judged) if f.code.startswith("aux-layers-")}
        differs, doubtful = used != case.patched, case.warned
        expected = "warning" if differs else "info" if doubtful else None
        assert said.get("aux-layers-convention") == (expected if read else None)
        # [1, 29, 57], not read: the default is right if they are outputs.
        ignored = "warning" if differs and not doubtful else "info"
        assert said.get("aux-layers-ignored") == (None if read else ignored)
        assert ("look like outputs" in judged.layers.sentence) is doubtful


def test_ids_that_look_like_outputs_are_warned_of_once(release: Release) -> None:
    _, config = release.configs
    for case in MEANINGS.values():
        config.logger.warnings.clear()
        for _ in range(2):
            config.layers(case.hf_config)
        assert len(config.logger.warnings) == case.warned
        assert all(f'"{KEY}_convention": "output"' in text for text in config.logger.warnings)
