"""``draft-attention-backend`` on look-alikes of each layout of vLLM's attention selector."""

import enum
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from draft_attention_backend_sources import (
    ARGUMENT,
    ARGUMENT_AFTER,
    BY_KIND,
    ENVIRONMENT,
    ENVIRONMENT_AFTER,
    LAYOUTS_OF_VLLM,
)
from libcst.codemod import CodemodTest
from patch_checks import (
    LAYOUTS,
    Change,
    Layout,
    changed,
    check_patched,
    check_tabs,
    check_unchanged,
    refusal,
)

from vllm_eagle3_patch.patches.draft_attention_backend import (
    DraftAttentionBackend,
    DraftAttentionBackendCodemod,
)
from vllm_eagle3_patch.vllm_source.paths import CUDA
from vllm_eagle3_patch.vllm_source.sources import Sources, parse

PATCH = DraftAttentionBackend()
READ = "vllm_config.attention_config.backend"
PASSED = f"own_backend_of_draft_model({READ}, use_mla)"


class TestBeforeAndAfter(CodemodTest):
    TRANSFORM = DraftAttentionBackendCodemod

    def test_what_the_config_says_goes_through_the_function(self) -> None:
        self.assertCodemod(ARGUMENT, ARGUMENT_AFTER)

    def test_what_the_environment_says_goes_through_the_function(self) -> None:
        self.assertCodemod(ENVIRONMENT, ENVIRONMENT_AFTER)


@pytest.mark.parametrize(("before", "after"), LAYOUTS_OF_VLLM.values(), ids=LAYOUTS_OF_VLLM)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_bytes_around_the_change_are_kept(before: str, after: str, layout: Layout) -> None:
    check_patched(PATCH, layout(before), layout(after))


@pytest.mark.parametrize(("before", "after"), LAYOUTS_OF_VLLM.values(), ids=LAYOUTS_OF_VLLM)
def test_a_file_indented_with_tabs(before: str, after: str) -> None:
    check_tabs(PATCH, before, after)


def test_a_decision_under_another_name_is_left_alone() -> None:
    check_unchanged(PATCH, ARGUMENT_AFTER.replace("own_backend_of_draft_model", "backend_for"))


HALVES: dict[str, list[Change]] = {
    "the function is there but not asked": [(PASSED, READ)],
    "it is not told whether the layer has MLA": [(PASSED, PASSED.replace("use_mla", "False"))],
    "another one is asked, which knows nothing of MLA": [
        (PASSED, PASSED.replace("own_backend_of_draft_model", "get_mamba_attn_backend"))
    ],
    "another one is asked, which gives everything back": [
        (PASSED, PASSED.replace("own_backend_of_draft_model", "same")),
        ("@cache", "def same(backend, use_mla):\n    print(use_mla)\n    return backend\n\n@cache"),
    ],
    "it is asked in one of two places": [
        ("    # The platform", f"    print({READ})\n    # The platform")
    ],
}


@pytest.mark.parametrize("changes", HALVES.values(), ids=HALVES)
def test_half_of_it_does_not_hold_and_is_not_made_whole(changes: list[Change]) -> None:
    half = changed(ARGUMENT_AFTER, *changes)
    assert refusal(PATCH, half) == (
        "the module without own_backend_of_draft_model",
        "the module",
        0,
    )


ANCHOR = ("the attention backend that is set, read in a function told use_mla", "the module")

REFUSED = {
    "read under another name": ([(READ, "vllm_config.attention.backend")], (*ANCHOR, 0)),
    "another setting": ([(READ, "vllm_config.attention_config.version")], (*ANCHOR, 0)),
    "the layer does not say whether it has MLA": (
        [("size, use_mla=False", "size, mla=False"), ("size, use_mla)", "size, mla)")],
        (*ANCHOR, 0),
    ),
    "read twice": ([(READ, f"{READ} or {READ}")], (*ANCHOR, 2)),
    "read by another function": (
        [
            (f"backend={READ}", "backend=read()"),
            ("@cache", f"def read():\n    return {READ}\n\n@cache"),
        ],
        (*ANCHOR, 0),
    ),
}


@pytest.mark.parametrize(("changes", "expected"), REFUSED.values(), ids=REFUSED)
def test_unknown_source_is_refused(changes: list[Change], expected: tuple[str, str, int]) -> None:
    assert refusal(PATCH, changed(ARGUMENT, *changes)) == expected


class Backend(enum.Enum):
    FLASHMLA = "FLASHMLA"
    FLASH_ATTN = "FLASH_ATTN"


class Selector:
    """Asks a patched selector, under one config, what it hands to the platform for a layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logged: list[str] = []
        self.current: object = None
        config, logger = ModuleType("vllm.config"), ModuleType("vllm.logger")
        vars(config)["get_current_vllm_config"] = lambda: self.current
        vars(logger)["init_logger"] = lambda name: SimpleNamespace(
            info_once=lambda message, *values: self.logged.append(message % values)
        )
        for module in (ModuleType("vllm"), config, logger):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def __call__(
        self,
        source: str,
        *,
        layer: bool,
        backend: str | None,
        target: bool = True,
        method: str | None = "eagle3",
        own: str | None = None,
    ) -> object:
        """The backend for a layer with or without MLA, of a target with or without MLA."""
        chosen = Backend[backend] if backend else None
        options = {"attention_backend": Backend[own]} if own else {}
        self.current = SimpleNamespace(
            attention_config=SimpleNamespace(backend=chosen, backend_per_kind={}),
            speculative_config=SimpleNamespace(method=method, **options) if method else None,
            model_config=SimpleNamespace(use_mla=target),
        )
        platform = SimpleNamespace(get_attn_backend_cls=lambda *given: given)
        names: dict[str, Any] = {
            "__name__": "selector",
            "envs": SimpleNamespace(VLLM_ATTENTION_BACKEND=backend),
            "AttentionBackendEnum": Backend,
            "forced_attn_backend": None,
            "current_platform": platform,
        }
        exec(PATCH.apply(source.encode(), "selector.py"), names)
        result, _, use_mla = names["get_attn_backend"](128, use_mla=layer)
        assert use_mla is layer
        return result


@pytest.fixture
def select(monkeypatch: pytest.MonkeyPatch) -> Selector:
    return Selector(monkeypatch)


SOURCES = [before for before, _ in LAYOUTS_OF_VLLM.values()]


@pytest.mark.parametrize("source", SOURCES, ids=LAYOUTS_OF_VLLM)
def test_a_draft_model_without_mla_is_built_with_no_backend_set(
    select: Selector, source: str
) -> None:
    assert select(source, layer=False, backend="FLASHMLA") is None
    (message,) = select.logged
    assert "the draft model chooses its own attention backend" in message
    assert "FLASHMLA" in message


UNCHANGED: dict[str, dict[str, Any]] = {
    "the target, or a draft model with MLA": {"layer": True, "backend": "FLASHMLA"},
    "no backend set": {"layer": False, "backend": None},
    "a backend that is not for MLA": {"layer": False, "backend": "FLASH_ATTN"},
    "a target without MLA": {"layer": False, "backend": "FLASHMLA", "target": False},
    "another way of drafting": {"layer": False, "backend": "FLASHMLA", "method": "mtp"},
    "no draft model": {"layer": False, "backend": "FLASHMLA", "method": None},
}


@pytest.mark.parametrize("situation", UNCHANGED.values(), ids=UNCHANGED)
@pytest.mark.parametrize("source", SOURCES, ids=LAYOUTS_OF_VLLM)
def test_all_else_gets_the_backend_that_is_set(
    select: Selector, source: str, situation: dict[str, Any]
) -> None:
    name = situation["backend"]
    assert select(source, **situation) is (Backend[name] if name else None)
    assert select.logged == []


@pytest.mark.parametrize("own", ["FLASH_ATTN", "FLASHMLA"])
def test_a_backend_set_for_the_draft_model_is_taken(select: Selector, own: str) -> None:
    """Also where its runner does not read that option, and if the platform will refuse it."""
    assert select(BY_KIND, layer=False, backend="FLASHMLA", own=own) is Backend[own]
    assert select.logged == []


def test_the_file_is_concerned_where_a_backend_that_does_not_fit_is_refused(
    tmp_path: Path,
) -> None:
    old, new = "vllm/attention/selector.py", "vllm/v1/attention/selector.py"
    refuses = b'raise ValueError(f"Selected backend {selected_backend} is not valid for ")'
    assert PATCH.paths(Sources(tmp_path)) == ()
    assert PATCH.paths(Sources(tmp_path, {old: ENVIRONMENT.encode(), CUDA: b""})) == ()
    assert PATCH.paths(Sources(tmp_path, {old: ENVIRONMENT.encode(), CUDA: refuses})) == (old,)
    moved = {old: b"from vllm.v1.attention.selector import *\n", new: ARGUMENT.encode()}
    assert PATCH.paths(Sources(tmp_path, {**moved, CUDA: refuses})) == (new,)


def test_it_goes_along_with_the_models_patch() -> None:
    assert PATCH.companion
    assert not PATCH.harden
    assert PATCH.holds(parse(ENVIRONMENT_AFTER.encode(), ""))
