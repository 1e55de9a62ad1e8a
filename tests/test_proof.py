"""The proof's own functions, in this process, on a small vLLM; test_verify.py runs it in others."""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_vllm
from fake_vllm import INIT, MODELS, PLATFORMS, RUNNER, install
from vllm_eagle3_patch.verify import proof

DEEPSEEK, KIMI = f"{MODELS}/deepseek_v2.py", f"{MODELS}/kimi_k25.py"
CONFIG, PROPOSER = "vllm/config.py", "vllm/v1/spec_decode/eagle.py"
INTERFACES = f"{MODELS}/interfaces.py"

TEXT = {"architecture": "DeepseekV2ForCausalLM", "text_types": ["deepseek_v2"]}
OUTER = "vllm.model_executor.models.deepseek_v2:DeepseekV2ForCausalLM"
WRAPPER = {
    "architecture": "KimiK25ForConditionalGeneration",
    "text_types": ["kimi_k2", "deepseek_v3"],
    "language_model": OUTER,
    "image_token": "target_model.config.media_placeholder_token_id",
}
DOTS = {
    "architecture": "Dots3NoteForCausalLM",
    "text_types": [],
    "language_model": OUTER,
    "image_token": None,
}
CLASS_CHECKS = ("interface", "methods", "aux-hidden-states")
EDGES = ("vllm.model_executor.models.deepseek_v2",)

Change = tuple[str, str, str]
Prove = Callable[..., dict[str, dict[str, Any]]]


def forget() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in ("torch", "vllm"):
            del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def prove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prove]:
    """Prove one model of a small vLLM with some changes: its checks by name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(
        model: dict[str, Any], *changes: Change, edges: tuple[str, ...] = ()
    ) -> dict[str, dict[str, Any]]:
        install(tmp_path, *changes)
        forget()
        document = proof.prove([model], edges)
        assert document["error"] is None, document
        json.dumps(document)
        (result,) = document["models"]
        assert result["architecture"] == model["architecture"]
        return {check["name"]: check for check in result["checks"]}

    yield run
    forget()


def verdicts(checks: dict[str, dict[str, Any]]) -> dict[str, bool | None]:
    return {name: check["ok"] for name, check in checks.items()}


def test_the_source_can_be_read_by_python_3_9_in_any_locale() -> None:
    source = Path(proof.__file__).read_text(encoding="ascii")
    ast.parse(source, feature_version=(3, 9))


def test_a_text_model_passes(prove: Prove) -> None:
    checks = prove(TEXT)
    names = ("import", *CLASS_CHECKS, "allowlist")
    assert verdicts(checks) == dict.fromkeys(names, True)
    detail = "ids 2, 4, 5 of 8 layers: the streams that entered"
    assert checks["aux-hidden-states"]["detail"] == detail
    assert checks["allowlist"]["detail"] == "admits deepseek_v2"


def test_ids_0_and_n_are_asked_of_what_we_wrote(prove: Prove) -> None:
    checks = prove(TEXT, edges=EDGES)
    detail = "ids 2, 4, 5 of 8 layers, with 0 and 8: the streams that entered"
    assert checks["aux-hidden-states"]["detail"] == detail


def test_a_wrapper_passes(prove: Prove) -> None:
    checks = prove(WRAPPER, edges=EDGES)
    names = ("import", *CLASS_CHECKS, "allowlist", "image-token")
    assert verdicts(checks) == dict.fromkeys(names, True)
    detail = "is read from target_model.config.media_placeholder_token_id"
    assert checks["image-token"]["detail"] == detail


def test_a_wrapper_may_hold_the_bare_inner_model(prove: Prove) -> None:
    checks = prove(
        WRAPPER,
        (KIMI, "make_language_model(config)", "DeepseekV2Model(config)"),
        (
            DEEPSEEK,
            "        self.aux_hidden_state_layers = layers",
            "        self.aux_hidden_state_layers = layers\n\n"
            "    def get_eagle3_aux_hidden_state_layers(self):\n        return (2, 4, 5)",
        ),
    )
    assert checks["aux-hidden-states"]["ok"] is True


def test_a_class_may_name_the_class_of_its_layers(prove: Prove) -> None:
    changes = (DEEPSEEK, "SupportsEagle3):\n", "SupportsEagle3):\n    model_cls = Layers\n\n")
    other = (DEEPSEEK, "class DeepseekV2Model", "class Layers")
    assert prove(TEXT, changes, other)["aux-hidden-states"]["ok"] is True


SET_UP = "self.aux_hidden_state_layers: tuple = ()"


def test_a_constructor_may_set_up_the_ids(prove: Prove) -> None:
    checks = prove(
        TEXT,
        (DEEPSEEK, "    aux_hidden_state_layers = ()\n", ""),
        (
            DEEPSEEK,
            "        raise",
            "        self.aux_hidden_state_layers: tuple = ()\n        raise",
        ),
    )
    assert checks["aux-hidden-states"]["ok"] is True


def test_a_constructor_that_does_not_is_found_out(prove: Prove) -> None:
    checks = prove(TEXT, (DEEPSEEK, "    aux_hidden_state_layers = ()\n", ""))
    assert checks["aux-hidden-states"]["ok"] is False
    assert "no attribute 'aux_hidden_state_layers'" in checks["aux-hidden-states"]["detail"]


NO_BASE = (DEEPSEEK, "nn.Module, SupportsEagle3", "nn.Module")
OTHER_NAME = (DEEPSEEK, "def get_eagle3_aux", "def get_eagle3_other")
OTHER_METHOD = "    def _verify_args(self): ...\n\n    def more(self):"
SETTER = "        self.model.set_aux_hidden_state_layers(layers)"
DEFAULT = "        return (2, count // 2, count - 3)"
KEEP = """            if number in self.aux_hidden_state_layers:
                collected.append(
                    hidden_states.clone() if residual is None else hidden_states + residual
                )
"""
LAST = "append(hidden_states + residual)\n        hidden"
CALL = "            hidden_states, residual = layer(positions, hidden_states, residual)\n"
RETURN = "return (hidden_states, collected) if collected else hidden_states"
ID = "number in self.aux_hidden_state_layers"


def before_keeping(statement: str) -> str:
    return KEEP.replace("collected.append(\n", f"{statement}\n                collected.append(\n")


FAILURES: dict[str, tuple[str, Change, str]] = {
    "no interface": ("interface", (DEEPSEEK, "nn.Module, SupportsEagle3", "nn.Module"), "is false"),
    "nobody to ask for it": (
        "interface",
        (INTERFACES, "def supports_eagle3", "def other"),
        "and no supports_eagle3 to ask",
    ),
    "it ends Python": (
        "aux-hidden-states",
        (DEEPSEEK, RETURN, "raise SystemExit(0)"),
        "SystemExit: 0",
    ),
    "no method": (
        "methods",
        (DEEPSEEK, "def get_eagle3_aux", "def get_eagle3_other"),
        "does nothing",
    ),
    "the protocol's own": (
        "methods",
        (DEEPSEEK, f"    def set_aux_hidden_state_layers(self, layers):\n{SETTER}\n", ""),
        "set_aux_hidden_state_layers does nothing",
    ),
    "a method that does nothing": ("methods", (DEEPSEEK, SETTER, "        pass"), "does nothing"),
    "default ids": (
        "aux-hidden-states",
        (DEEPSEEK, DEFAULT, "        return (1, 3, 4)"),
        "gives (1, 3, 4) for 8 layers; vLLM's default is (2, 4, 5)",
    ),
    "after the layer": (
        "aux-hidden-states",
        (DEEPSEEK, KEEP + CALL, CALL + KEEP),
        "id 2 gives the stream entering layer 3",
    ),
    "without the residual": (
        "aux-hidden-states",
        (DEEPSEEK, "else hidden_states + residual\n", "else hidden_states\n"),
        "id 2 gives no stream of the model",
    ),
    "a larger type": (
        "aux-hidden-states",
        (DEEPSEEK, RETURN, RETURN.replace("collected)", "[s.double() for s in collected])")),
        "id 2 gives torch.float64, where the stream is torch.float32",
    ),
    "not a list": (
        "aux-hidden-states",
        (DEEPSEEK, RETURN, RETURN.replace("collected)", "set(collected))")),
        "the aux hidden states are a set, not a list",
    ),
    "it changes what it collects": (
        "aux-hidden-states",
        (DEEPSEEK, KEEP, before_keeping("hidden_states.add_(hidden_states)")),
        "collecting changes the stream that enters layer 2",
    ),
    "it changes what it collects, without the residual": (
        "aux-hidden-states",
        (DEEPSEEK, KEEP, before_keeping("residual = residual + residual")),
        "collecting changes the stream that enters layer 2",
    ),
    "too few": (
        "aux-hidden-states",
        (DEEPSEEK, ID, f"{ID} and number != 5"),
        "2 aux hidden states for ids (2, 4, 5)",
    ),
    "none": (
        "aux-hidden-states",
        (DEEPSEEK, RETURN, "return hidden_states"),
        "returns no (hidden_states, aux_hidden_states)",
    ),
    "always": (
        "aux-hidden-states",
        (DEEPSEEK, RETURN, "return hidden_states, collected"),
        "does not return a plain tensor",
    ),
    "it disturbs": (
        "aux-hidden-states",
        (DEEPSEEK, RETURN, f"hidden_states = hidden_states.clone()\n        {RETURN}"),
        "",
    ),
    "not every layer": (
        "aux-hidden-states",
        (DEEPSEEK, "enumerate(self.layers)", "enumerate(self.layers[1:])"),
        "forward entered 7 of 8 layers",
    ),
    "a type": ("allowlist", (CONFIG, '"deepseek_v2", ', ""), "deepseek_v2 is refused: ValueError"),
    "all are refused": ("allowlist", (CONFIG, '"llama", ', ""), "could not be asked: llama is"),
    "all are admitted": (
        "allowlist",
        (CONFIG, "raise ValueError", "return str"),
        "could not be asked: no_such_model_type is admitted",
    ),
    "no such method": (
        "allowlist",
        (CONFIG, "_verify_args", "_check_args"),
        "could not be asked: SpeculativeConfig has no _verify_args",
    ),
    "the test is elsewhere": (
        "allowlist",
        (
            CONFIG,
            "    def _verify_args(self):",
            "    def _verify_args(self): ...\n\n    def more(self):",
        ),
        "could not be asked: the test is not in _verify_args",
    ),
    "the runner names no method": (
        "methods",
        (RUNNER, "self.get_eagle3_aux_hidden_state_layers()", "()"),
        "",
    ),
}
HARMLESS = {"it disturbs", "the runner names no method"}


@pytest.mark.parametrize("name", FAILURES)
def test_what_is_wrong_is_found_out(name: str, prove: Prove) -> None:
    check, change, detail = FAILURES[name]
    found = prove(TEXT, change)[check]
    assert found["ok"] is (name in HARMLESS), found
    assert detail in found["detail"]


def test_collecting_that_changes_the_result_is_found_out(prove: Prove) -> None:
    disturbed = f"if collected:\n            hidden_states.fill_(7.0)\n        {RETURN}"
    found = prove(TEXT, (DEEPSEEK, RETURN, disturbed))["aux-hidden-states"]
    assert found["ok"] is False
    assert found["detail"] == "collecting changes the hidden states that forward returns"


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (
            ("hidden_states.clone() if", "hidden_states if"),
            "id 0 gives the stream entering layer 8",
        ),
        (
            (LAST, LAST.replace("hidden_states + residual", "residual")),
            "id 8 gives no stream of the model",
        ),
        (("if len(self.layers) in", "if False and len(self.layers) in"), "4 aux hidden states"),
    ],
)
def test_an_edge_that_fails_is_found_out_where_it_is_asked_for(
    change: tuple[str, str], detail: str, prove: Prove
) -> None:
    assert prove(TEXT, (DEEPSEEK, *change))["aux-hidden-states"]["ok"] is True
    found = prove(TEXT, (DEEPSEEK, *change), edges=EDGES)["aux-hidden-states"]
    assert found["ok"] is False
    assert detail in found["detail"]


def test_a_wrapper_that_hands_nothing_on_is_found_out(prove: Prove) -> None:
    handed = "self.language_model.set_aux_hidden_state_layers(layers)"
    found = prove(WRAPPER, (KIMI, handed, "self.layers = layers"))["aux-hidden-states"]
    assert found["ok"] is False
    assert "returns no (hidden_states, aux_hidden_states)" in found["detail"]


def test_no_class_for_the_layers(prove: Prove) -> None:
    found = prove(TEXT, (DEEPSEEK, "class DeepseekV2Model", "class Other"))["aux-hidden-states"]
    assert found["ok"] is False
    assert found["detail"] == "DeepseekV2ForCausalLM names no class for its layers"


def test_the_runner_and_the_protocol_may_both_leave_the_method_open(prove: Prove) -> None:
    name = "get_eagle3_aux_hidden"
    found = prove(TEXT, (RUNNER, name, "other"), (INTERFACES, name, "other"))["methods"]
    assert found["ok"] is False
    assert "cannot tell which method" in found["detail"]


def test_the_newer_method_is_asked_for_where_the_runner_asks_for_it(prove: Prove) -> None:
    newer = "get_eagle3_default_aux_hidden_state_layers"
    renamed = (RUNNER, "get_eagle3_aux_hidden_state_layers", newer)
    found = prove(TEXT, renamed)
    assert found["methods"]["detail"] == f"DeepseekV2ForCausalLM has no {newer}"
    also = (DEEPSEEK, "get_eagle3_aux_hidden_state_layers", newer)
    assert prove(TEXT, renamed, also)["methods"]["ok"] is True


# What does not apply


def test_without_a_protocol_the_methods_alone_count(prove: Prove) -> None:
    checks = prove(
        TEXT,
        (INTERFACES, "def supports_eagle3", "def other"),
        (INTERFACES, "class SupportsEagle3", "class Other"),
        (INTERFACES, "isinstance(model, SupportsEagle3)", "False"),
        (DEEPSEEK, "import SupportsEagle3", "import Other as SupportsEagle3"),
    )
    assert checks["interface"]["ok"] is None
    assert "no protocol" in checks["interface"]["detail"]
    assert checks["aux-hidden-states"]["ok"] is True


def test_without_an_allowlist(prove: Prove) -> None:
    found = prove(TEXT, (CONFIG, fake_vllm.CONFIG, WITHOUT_LIST))["allowlist"]
    assert (found["ok"], found["detail"]) == (None, "this release has no allowlist")


WITHOUT_LIST = "class SpeculativeConfig:\n    def _verify_args(self):\n        return self\n"


def test_a_validator_that_is_wrapped_is_unwrapped(prove: Prove) -> None:
    wrapper = (
        "class Validator:\n    def __init__(self, wrapped):\n        self.wrapped = wrapped\n\n\n"
    )
    checks = prove(
        TEXT,
        (CONFIG, "\nclass", f"{wrapper}class"),
        (CONFIG, "    def _verify", "    @Validator\n    def _verify"),
    )
    assert checks["allowlist"]["ok"] is True


def test_a_model_for_another_platform_is_not_run(prove: Prove) -> None:
    checks = prove(DOTS)
    assert verdicts(checks) == {
        **dict.fromkeys(("import", *CLASS_CHECKS, "allowlist"), None),
        "image-token": True,
    }
    assert "vllm.models.dots3_note cannot be imported on this" in checks["import"]["detail"]
    assert checks["methods"]["detail"] == "its class was not loaded"


def test_a_model_for_this_platform_fails_if_it_cannot_be_imported(prove: Prove) -> None:
    found = prove(DOTS, (PLATFORMS, "False", "True"))["import"]
    assert (found["ok"], found["detail"]) == (False, "ImportError: needs CUDA")


@pytest.mark.parametrize(
    "change", [("vllm/models/dots3_note.py", "", "no_such_name\n"), (DEEPSEEK, "", "1 / 0\n")]
)
def test_what_is_wrong_with_the_code_itself_is_no_matter_of_the_platform(
    change: Change, prove: Prove
) -> None:
    assert prove(DOTS, change)["import"]["ok"] is False


def test_what_the_environment_lacks_is_not_held_against_the_source(prove: Prove) -> None:
    found = prove(WRAPPER, (KIMI, "", "import no_such_vision_library\n"))["import"]
    assert found["ok"] is None
    assert "needs no_such_vision_library" in found["detail"]


def test_what_vllm_itself_lacks_is(prove: Prove) -> None:
    found = prove(WRAPPER, (KIMI, "", "from vllm.config import NoSuchConfig\n"))
    assert found["import"]["ok"] is False
    assert found["image-token"]["ok"] is True


@pytest.mark.parametrize(
    "line",
    ["import vllm.no_such_module\n", "no_such_name\n", "raise SystemExit\n"],
)
def test_a_broken_file_of_the_models_is_told_of_each(line: str, prove: Prove) -> None:
    found = prove(TEXT, (DEEPSEEK, "", line))
    assert found["import"]["ok"] is False
    assert found["allowlist"]["ok"] is True


def test_what_the_registry_does_not_have(prove: Prove) -> None:
    found = prove({"architecture": "Other", "text_types": []})["import"]
    assert (found["ok"], found["detail"]) == (None, "not in this release's registry")


# image-token

BRANCH = '== "KimiK25ForConditionalGeneration"'


SETS = "self.model.config.image_token_index = (\n"


@pytest.mark.parametrize(
    ("old", "new", "detail"),
    [
        (BRANCH, '== "Other"', "is not read from target_model.config.media_placeholder"),
        (SETS, SETS.replace("= (", "= 7, ("), "is copied"),
        ("if supports_multimodal(target_model)", "if True", "could not be asked"),
        ("def load_model", "def other", "no proposer with a load_model was found"),
    ],
    ids=["branch", "value", "surroundings", "method"],
)
def test_an_image_token_that_is_not_copied(old: str, new: str, detail: str, prove: Prove) -> None:
    found = prove(WRAPPER, (PROPOSER, old, new))["image-token"]
    assert found["ok"] is False
    assert detail in found["detail"]


def test_a_proposer_that_copies_no_image_token(prove: Prove) -> None:
    nothing = "class EagleProposer:\n    def load_model(self, target_model):\n        pass\n"
    found = prove(WRAPPER, (PROPOSER, fake_vllm.PROPOSER, nothing))["image-token"]
    assert (found["ok"], found["detail"]) == (
        None,
        "this release's proposer copies no image token",
    )


def test_the_image_token_of_a_plain_assignment(prove: Prove) -> None:
    plain = (
        "def supports_multimodal(model): ...\n\n\nclass EagleProposer:\n"
        "    def load_model(self, target_model):\n"
        "        if supports_multimodal(target_model):\n"
        "            self.model.config.image_token_index = target_model.config.image_token_index\n"
    )
    change = (PROPOSER, fake_vllm.PROPOSER, plain)
    assert prove(WRAPPER, change)["image-token"]["ok"] is False
    assert prove(DOTS, change)["image-token"]["ok"] is True


def test_a_target_keeps_its_token_in_one_place_only() -> None:
    target = proof._target("A", "target_model.config.vision_config.image_token_id")
    assert type(target).__name__ == "A"
    assert target.config.vision_config.image_token_id == proof.TOKEN_ID
    assert not hasattr(target.config, "image_token_id")


# The import


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            ("torch/__init__.py", "", 'raise OSError("libtorch.so: cannot open shared object")\n'),
            "shared-library",
            "torch: OSError: libtorch.so: cannot open shared object",
        ),
        ((INIT, "", "import no_such_thing\n"), "missing-module", "vllm: ModuleNotFoundError: No"),
        (
            (DEEPSEEK, "", 'raise ImportError("undefined symbol: x")\n'),
            "shared-library",
            "vllm.model_executor.models.deepseek_v2: ImportError: undefined symbol: x",
        ),
        ((INIT, "", 'raise RuntimeError("a\\nb")\n'), "error", "vllm: RuntimeError: a b"),
        ((INIT, "", "raise SystemExit(3)\n"), "error", "vllm: SystemExit: 3"),
        ((INIT, "", f"raise ValueError('{'x' * 999}')\n"), "error", "xxx..."),
    ],
)
def test_what_keeps_vllm_from_being_imported(
    change: Change, kind: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path, change)))
    forget()
    document = proof.prove([TEXT], ())
    forget()
    assert document["error"]["kind"] == kind
    assert message in document["error"]["message"]
    assert document["models"] == []
    assert document["gpu_context"] is False


def test_a_gpu_context_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ("torch/__init__.py", "lambda: False", "lambda: True")
    monkeypatch.syspath_prepend(str(install(tmp_path, made)))
    forget()
    document = proof.prove([], ())
    assert document["gpu_context"] is True
    sys.modules["torch"].cuda = None  # type: ignore[attr-defined]
    assert proof._has_gpu_context(sys.modules["torch"]) is False
    forget()


def test_the_answer_stands_between_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path)))
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    forget()
    answer = proof.answer("nonce", json.dumps({"models": [TEXT], "edges": []})).decode("ascii")
    forget()
    assert "" not in sys.path
    assert answer.startswith("\nbegin-nonce{")
    assert answer.endswith("}end-nonce\n")
    document = json.loads(answer[len("\nbegin-nonce") : -len("end-nonce\n")])
    assert document["package"] == f"{tmp_path}/vllm"


def test_all_is_written_when_the_system_takes_it_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    written = bytearray()

    def take_three(descriptor: int, data: bytes) -> int:
        assert descriptor == 1
        written.extend(data[:3])
        return len(data[:3])

    monkeypatch.setattr(os, "write", take_three)
    proof.write(b"0123456789")
    monkeypatch.undo()
    assert written == b"0123456789"
