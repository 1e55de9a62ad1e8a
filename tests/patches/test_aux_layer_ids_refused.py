"""What ``aux-layer-ids`` refuses, naming the anchor, and what is no more than half of it."""

import pytest
from aux_layer_ids_sources import (
    CONFIG_HASHED,
    FACTORS,
    FILES,
    HASH,
    LATER_HASHED,
    LATER_READ,
    METHOD_BEFORE,
    NEWER_ASKS,
    OLD_ASKS,
    OLD_DEFAULT,
    OLD_SETS,
    RUNNER,
    RUNNER_ASKS,
    RUNNER_GUARD,
)
from patch_checks import Change, changed, refusal

from layer_ids_table import KEY
from vllm_eagle3_patch.vllm_source.sources import parse

CLASS = "class SpeculativeConfig:\n"
TWO_READERS = (
    f"{RUNNER}\n\nclass Another:\n    def _get_eagle3_aux_layers_from_config(self):\n        pass\n"
)
SETTING = "self.model.set_aux_hidden_state_layers("

FIRST = "a SpeculativeConfig as the first parameter"
READER_HEAD = "    def _get_eagle3_aux_layers_from_config(self)"

REFUSED_SOURCES: dict[str, tuple[str, list[Change], tuple[str, str, int]]] = {
    "no logger": (
        "config",
        [("logger = init_logger(__name__)\n", "")],
        ("logger = init_logger(...)", "the module", 0),
    ),
    "class renamed": (
        "config",
        [(CLASS, "class SpeculationConfig:\n")],
        ("class SpeculativeConfig", "the module", 0),
    ),
    "no compute_hash": (
        "config",
        [('    def compute_hash(self) -> str:\n        "', '    def key(self) -> str:\n        "')],
        ("def compute_hash", "SpeculativeConfig", 0),
    ),
    "factors hashed another way": (
        "config",
        [("(str(factors)", "(repr(factors)")],
        ("str(factors)", "SpeculativeConfig.compute_hash", 0),
    ),
    "factors hashed twice": (
        "config",
        [(FACTORS, f"{FACTORS}        seed = str(factors)\n")],
        ("str(factors)", "SpeculativeConfig.compute_hash", 2),
    ),
    "ids read twice": (
        "config that hashes the top level",
        [(LATER_READ, f'{LATER_READ}            layer_ids = getattr(self, "{KEY}", None)\n')],
        (f'... = getattr(..., "{KEY}", ...)', "SpeculativeConfig.compute_hash", 2),
    ),
    "ids read and not hashed": (
        "config that hashes the top level",
        [("factors.append(tuple(layer_ids))", "pass")],
        ("factors.append(tuple(layer_ids))", "SpeculativeConfig.compute_hash", 0),
    ),
    "the method, and not in the key": (
        "config",
        [
            (
                METHOD_BEFORE,
                f"    def eagle3_aux_hidden_state_layers(self):\n        pass\n\n{METHOD_BEFORE}",
            )
        ],
        ("class SpeculativeConfig without eagle3_aux_hidden_state_layers", "the module", 0),
    ),
    "in the key, and no method": (
        "config",
        [(HASH, f"{CONFIG_HASHED}{HASH}")],
        ("class SpeculativeConfig without eagle3_aux_hidden_state_layers", "the module", 0),
    ),
    "reader that throws the answer away": (
        "runner",
        [(RUNNER_GUARD, f"        eagle3_aux_hidden_state_layers()\n{RUNNER_GUARD}")],
        (
            "_get_eagle3_aux_layers_from_config without eagle3_aux_hidden_state_layers",
            "the module",
            0,
        ),
    ),
    "reader renamed, model set by it": (
        "runner",
        [
            ("    def _get_eagle3_aux_layers_from_config", "    def _aux_layers"),
            ("self._get_eagle3_aux_layers_from_config()", "self._aux_layers()"),
        ],
        (
            "....set_aux_hidden_state_layers(....get_eagle3_aux_hidden_state_layers())",
            "load_model",
            0,
        ),
    ),
    "two readers": (
        "runner",
        [("    def execute_model(self):\n        pass\n", TWO_READERS[len(RUNNER) :])],
        ("class with def _get_eagle3_aux_layers_from_config", "the module", 2),
    ),
    "load_model elsewhere": (
        "runner without a reader",
        [("    def load_model(self):", "    def load(self):")],
        ("class with def load_model", "the module", 0),
    ),
    "layers set another way": (
        "runner without a reader",
        [(OLD_DEFAULT, "(2, 30, 58))")],
        (
            "....set_aux_hidden_state_layers(....get_eagle3_aux_hidden_state_layers())",
            "load_model",
            0,
        ),
    ),
    "layers set twice": (
        "runner without a reader",
        [("        self.loaded = True\n", f"        {SETTING}{OLD_DEFAULT}\n")],
        (
            "....set_aux_hidden_state_layers(....get_eagle3_aux_hidden_state_layers())",
            "load_model",
            2,
        ),
    ),
    "asked, and the default set all the same": (
        "runner without a reader",
        [(OLD_SETS, OLD_ASKS + OLD_SETS)],
        ("load_model without eagle3_aux_hidden_state_layers", "the module", 0),
    ),
    "function renamed": (
        "newer runner",
        [("def get_eagle3_aux_layers_from_config(", "def aux_layers_of(")],
        ("def get_eagle3_aux_layers_from_config", "the module", 0),
    ),
    "function without a parameter": (
        "newer runner",
        [("    spec_config: SpeculativeConfig,\n", "")],
        (FIRST, "get_eagle3_aux_layers_from_config", 0),
    ),
    "function of something else": (
        "newer runner",
        [("    spec_config: SpeculativeConfig,\n", "    model: nn.Module,\n")],
        (FIRST, "get_eagle3_aux_layers_from_config", 0),
    ),
    "reader without self": (
        "runner",
        [(READER_HEAD, READER_HEAD.replace("self", "config"))],
        ("self", "_get_eagle3_aux_layers_from_config", 0),
    ),
    "static reader": (
        "runner",
        [(READER_HEAD, f"    @staticmethod\n{READER_HEAD}")],
        (
            "def _get_eagle3_aux_layers_from_config without a decorator",
            "_get_eagle3_aux_layers_from_config",
            0,
        ),
    ),
}


@pytest.mark.parametrize(
    ("file", "changes", "expected"), REFUSED_SOURCES.values(), ids=REFUSED_SOURCES
)
def test_refused(file: str, changes: list[Change], expected: tuple[str, str, int]) -> None:
    patch, before, _ = FILES[file]
    assert refusal(patch, changed(before, *changes)) == expected


HALVES: dict[str, tuple[str, list[Change]]] = {
    "method, and the key without it": ("config", [(CONFIG_HASHED, "")]),
    "method that looks in one place": (
        "config",
        [('getattr(hf_config, "eagle_config", None)', "None")],
    ),
    "later key without it": ("config that hashes the top level", [(LATER_HASHED, "")]),
    "reader that does not ask": ("runner", [(RUNNER_ASKS, "")]),
    "reader that throws the answer away": (
        "runner",
        [
            (
                "            return self.speculative_config.eagle3",
                "            self.speculative_config.eagle3",
            )
        ],
    ),
    "default set all the same": (
        "runner without a reader",
        [(f"aux_layers or {OLD_DEFAULT}", OLD_DEFAULT)],
    ),
    "default set without asking": ("runner without a reader", [(OLD_ASKS, "")]),
    "function that does not ask": ("newer runner", [(NEWER_ASKS, "")]),
}


@pytest.mark.parametrize(("file", "changes"), HALVES.values(), ids=HALVES)
def test_half_of_it_does_not_hold(file: str, changes: list[Change]) -> None:
    patch, _, after = FILES[file]
    assert patch.holds(parse(after.encode(), ""))
    assert not patch.holds(parse(changed(after, *changes).encode(), ""))
