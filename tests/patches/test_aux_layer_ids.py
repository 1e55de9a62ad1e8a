"""``aux-layer-ids`` on look-alikes: before and after, what it decides, and the log."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from aux_layer_ids_sources import (
    CONFIG,
    FACTORS,
    FILES,
    LATER_CONFIG,
    METHOD_BEFORE,
    NEWER_RUNNER,
    PATCHED_CONFIG,
    PATCHED_LATER_CONFIG,
    PATCHED_NEWER_RUNNER,
    PATCHED_OLD_RUNNER,
    PATCHED_RUNNER,
    RUNNER,
    OnFile,
)
from patch_checks import (
    LAYOUTS,
    Change,
    Layout,
    changed,
    check_patched,
    check_tabs,
    check_unchanged,
)

from layer_ids_table import (
    BOUNDARIES,
    CONVENTION,
    DEFAULT,
    IN_EFFECT,
    KEY,
    OTHER_METHODS,
    OUTPUTS,
    REFUSED,
    Config,
    DraftConfig,
    nested,
    run,
    top,
)
from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.patches import aux_layer_ids
from vllm_eagle3_patch.patches.aux_layer_ids import AuxLayerIds
from vllm_eagle3_patch.vllm_source.paths import RUNNER as RUNNER_PATH
from vllm_eagle3_patch.vllm_source.paths import SPECULATIVE_CONFIG
from vllm_eagle3_patch.vllm_source.sources import Sources

every_file = pytest.mark.parametrize(("patch", "before", "after"), FILES.values(), ids=FILES)


@every_file
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_whole_change(patch: OnFile, before: str, after: str, layout: Layout) -> None:
    check_patched(patch, layout(before), layout(after))


@every_file
def test_a_file_indented_with_tabs(patch: OnFile, before: str, after: str) -> None:
    check_tabs(patch, before, after)


@every_file
def test_patched_already_is_left_alone(patch: OnFile, before: str, after: str) -> None:
    check_unchanged(patch, after)


RENAMED = [
    ("            layer_ids = getattr", "            aux_ids = getattr"),
    ("if layer_ids is", "if aux_ids is"),
    ("tuple(layer_ids)", "tuple(aux_ids)"),
]
PARAMETER = ("    spec_config: SpeculativeConfig,\n", "    config: SpeculativeConfig,\n")

OTHER_LAYOUTS: dict[str, tuple[str, list[Change], list[Change]]] = {
    "key hashed on one line": (
        "config",
        [("(str(factors).encode(),\n                               ", "(str(factors).encode(), ")],
        [],
    ),
    "another hash function": ("config", [("hash_str = hashlib.md5", "hash_str = safe_hash")], []),
    "more factors": (
        "config",
        [(FACTORS, f"{FACTORS}        factors.append(self.other)\n")],
        [],
    ),
    "comment above compute_hash": (
        "config",
        [(f"\n{METHOD_BEFORE}", f"\n    # the key\n{METHOD_BEFORE}")],
        [],
    ),
    "the ids under another name": (
        "config that hashes the top level",
        RENAMED,
        [("layer_ids = self.eagle3", "aux_ids = self.eagle3")],
    ),
    "the ids read on one line": (
        "config that hashes the top level",
        [
            ("getattr(\n                self", "getattr(self"),
            ("hf_config,\n                ", "hf_config, "),
            (f'"{KEY}",\n                None,\n            )', f"'{KEY}', None)"),
        ],
        [],
    ),
    "reader without a docstring": (
        "runner",
        [('        """The layer ids of the draft model\'s config."""\n', "")],
        [],
    ),
    "blank line below the docstring": (
        "runner",
        [('config."""\n', 'config."""\n\n')],
        [],
    ),
    "reader with another guard": (
        "runner",
        [(" and self.speculative_config.draft_model_config):", "):")],
        [],
    ),
    "no question for the protocol": (
        "runner without a reader",
        [("if supports_eagle3(self.model):", "if True:")],
        [],
    ),
    "layers set on one line": (
        "runner without a reader",
        [("layers(\n                    ", "layers(")],
        [],
    ),
    "parameter under another name": (
        "newer runner",
        [PARAMETER],
        [
            ("if spec_config and spec_config.method", "if config and config.method"),
            ("return spec_config.eagle3", "return config.eagle3"),
        ],
    ),
    "another parameter": (
        "newer runner",
        [(PARAMETER[0], f"{PARAMETER[0]}    use_pp: bool = False,\n")],
        [],
    ),
}


@pytest.mark.parametrize(("file", "changes", "more"), OTHER_LAYOUTS.values(), ids=OTHER_LAYOUTS)
def test_other_layouts_are_patched(file: str, changes: list[Change], more: list[Change]) -> None:
    """What comes out has the same changes as what goes in, and ``more``."""
    patch, before, after = FILES[file]
    before, after = changed(before, *changes), changed(after, *changes, *more)
    check_patched(patch, before.encode(), after.encode())


CONFIGS = {
    "earlier": Config(PATCHED_CONFIG.encode()),
    "later": Config(PATCHED_LATER_CONFIG.encode()),
}
STOCK = {"earlier": Config(CONFIG.encode()), "later": Config(LATER_CONFIG.encode())}
each_config = pytest.mark.parametrize("which", CONFIGS)


@pytest.mark.parametrize(("hf_config", "expected"), IN_EFFECT.values(), ids=IN_EFFECT)
def test_ids_in_effect(hf_config: object, expected: tuple[int, ...] | None) -> None:
    layers = CONFIGS["earlier"].layers(hf_config)
    assert layers == expected
    assert layers is None or all(type(layer) is int for layer in layers)


@pytest.mark.parametrize(("hf_config", "named"), REFUSED.values(), ids=REFUSED)
def test_config_refused(hf_config: object, named: str) -> None:
    with pytest.raises(ValueError, match="it must be") as caught:
        CONFIGS["earlier"].layers(hf_config)
    message = str(caught.value)
    assert message.startswith(f"{named} in the draft model's config is ")
    assert "\n" not in message
    if named == CONVENTION:
        assert message.endswith('it must be "boundary" or "output"')


@pytest.mark.parametrize(("method", "hf_config"), OTHER_METHODS.values(), ids=OTHER_METHODS)
@each_config
def test_other_methods_are_not_concerned(which: str, method: str, hf_config: object) -> None:
    config = CONFIGS[which]
    assert config.layers(hf_config, method) is None
    assert config.hash(hf_config, method) == STOCK[which].hash(hf_config, method)


def test_no_draft_model() -> None:
    assert CONFIGS["earlier"].layers(None) is None


@each_config
def test_key_is_as_ever_where_the_default_is_used(which: str) -> None:
    for hf_config in (DraftConfig(), nested([]), None):
        assert CONFIGS[which].hash(hf_config) == STOCK[which].hash(hf_config)


@each_config
def test_key_follows_the_ids_in_effect(which: str) -> None:
    config = CONFIGS[which]
    by_layers: dict[object, set[str]] = {}
    for hf_config, layers in IN_EFFECT.values():
        by_layers.setdefault(layers, set()).add(config.hash(hf_config))
    assert all(len(keys) == 1 for keys in by_layers.values()), "other keys for the same layers"
    assert len(set.union(*by_layers.values())) == len(by_layers), "one key for other layers"


def test_later_key_of_boundaries_at_the_top_level_is_as_ever() -> None:
    assert CONFIGS["later"].hash(top(BOUNDARIES)) == STOCK["later"].hash(top(BOUNDARIES))


def test_log_says_once_what_is_used_and_why() -> None:
    config = Config(PATCHED_CONFIG.encode())
    for _ in range(2):
        config.layers(nested(OUTPUTS))
        config.hash(nested(OUTPUTS))
    (message,) = config.logger.messages
    for part in ("(2, 30, 58)", "[1, 29, 57]", f"eagle_config.{KEY}", "'output'", CONVENTION):
        assert part in message
    config.layers(top(BOUNDARIES))
    assert f": {KEY} in the draft model's config is [2, 30, 58]" in config.logger.messages[1]
    assert "'boundary'" in config.logger.messages[1]


def test_log_says_that_the_default_is_used() -> None:
    config = Config(PATCHED_CONFIG.encode())
    config.layers(DraftConfig())
    (message,) = config.logger.messages
    assert KEY in message
    assert "default" in message


def test_log_is_silent_for_other_methods() -> None:
    config = Config(PATCHED_CONFIG.encode())
    config.hash(top([1, 2, 3]), "extract_hidden_states")
    assert config.logger.messages == []


def stand_in(hf_config: object, method: str = "eagle3") -> Any:
    return CONFIGS["earlier"].stand_in(hf_config, method)


READ: dict[str, tuple[object, tuple[int, ...] | None]] = {
    "outputs, nested": (stand_in(nested(OUTPUTS)), (2, 30, 58)),
    "outputs, top level": (stand_in(top(OUTPUTS)), (2, 30, 58)),
    "none": (stand_in(DraftConfig()), None),
    "no draft model": (stand_in(None), None),
    "no speculative config": (None, None),
    "another method": (stand_in(top([1, 2, 3]), "extract_hidden_states"), (1, 2, 3)),
}
each_reading = pytest.mark.parametrize(("config", "expected"), READ.values(), ids=READ)


def defined_in(source: str, name: str) -> Any:
    """What a source defines under a name, when run."""
    namespace: dict[str, Any] = {"supports_eagle3": lambda model: True, "get_model": Model}
    run(ast.parse(source).body, namespace)
    return namespace[name]


class Model:
    """A target model that keeps what is set."""

    def __init__(self) -> None:
        self.layers: object = None

    def set_aux_hidden_state_layers(self, layers: object) -> None:
        self.layers = layers

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return DEFAULT


@each_reading
def test_runner_uses_what_the_config_says(config: object, expected: tuple[int, ...] | None) -> None:
    runner = defined_in(PATCHED_RUNNER, "GPUModelRunner")()
    runner.speculative_config = config
    assert runner._get_eagle3_aux_layers_from_config() == expected


@each_reading
def test_newer_runner_uses_what_the_config_says(
    config: object, expected: tuple[int, ...] | None
) -> None:
    read = defined_in(PATCHED_NEWER_RUNNER, "get_eagle3_aux_layers_from_config")
    assert read(config) == expected


@pytest.mark.parametrize(("hf_config", "expected"), IN_EFFECT.values(), ids=IN_EFFECT)
def test_runner_without_a_reader_sets_what_the_config_says(
    hf_config: object, expected: tuple[int, ...] | None
) -> None:
    runner = defined_in(PATCHED_OLD_RUNNER, "GPUModelRunner")()
    runner.speculative_config = stand_in(hf_config)
    runner.use_aux_hidden_state_outputs = True
    runner.load_model()
    assert runner.model.layers == (expected or DEFAULT)


def test_files_concerned(tmp_path: Path) -> None:
    assert AuxLayerIds().paths(Sources(tmp_path)) == ()
    config, runner, newer = CONFIG.encode(), RUNNER.encode(), NEWER_RUNNER.encode()
    old = Sources(tmp_path, {"vllm/config.py": config, RUNNER_PATH: runner})
    assert AuxLayerIds().paths(old) == ("vllm/config.py", RUNNER_PATH)
    new = {
        "vllm/config/__init__.py": b"from vllm.config.speculative import SpeculativeConfig\n",
        "vllm/config/speculative.py": config,
        RUNNER_PATH: runner,
        aux_layer_ids.NEWER_LAYER_IDS: newer,
    }
    expected = ("vllm/config/speculative.py", RUNNER_PATH, aux_layer_ids.NEWER_LAYER_IDS)
    assert AuxLayerIds().paths(Sources(tmp_path, new)) == expected
    without = {**new, RUNNER_PATH: b"# no EAGLE-3\n"}
    assert RUNNER_PATH not in AuxLayerIds().paths(Sources(tmp_path, without))


def test_each_file_has_its_codemod() -> None:
    assert [AuxLayerIds().codemod(path).__name__ for path in (*SPECULATIVE_CONFIG, "")] == [
        "ConfigCodemod"
    ] * 4
    assert AuxLayerIds().codemod(RUNNER_PATH) is aux_layer_ids.RunnerCodemod
    assert AuxLayerIds().codemod(aux_layer_ids.NEWER_LAYER_IDS) is aux_layer_ids.NewerRunnerCodemod


def test_goes_along_with_what_makes_a_model_ready() -> None:
    patch = AuxLayerIds()
    assert patch.companion
    assert not any(patch.name in model.requires for model in FAMILY)
