"""``kimi-k25`` on look-alikes of its two shapes, and what every wrapper patch does."""

from pathlib import Path

import pytest
from kimi_k25_sources import (
    AFTER,
    BARE_AFTER,
    BARE_BEFORE,
    BARE_CLASS,
    BARE_IMPORT,
    BASE,
    BEFORE,
    FORWARD,
    LANGUAGE_MODEL,
    LM_HEAD,
    METHODS,
    SHARED,
    SHARING,
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

from vllm_eagle3_patch.patches.wrappers import PATCHES
from vllm_eagle3_patch.vllm_source.sources import Sources, parse

PATCH = PATCHES["kimi-k25"]()


class TestBeforeAndAfter(CodemodTest):
    TRANSFORM = PATCHES["kimi-k25"].kind

    def test_a_language_model_with_its_head(self) -> None:
        self.assertCodemod(BEFORE, AFTER)

    def test_a_bare_language_model(self) -> None:
        self.assertCodemod(BARE_BEFORE, BARE_AFTER)


def test_as_vllm_does_it_itself_is_left_alone() -> None:
    native = changed(
        BEFORE,
        (
            "    SupportsMultiModal,\n",
            "    SupportsEagle,\n    SupportsEagle3,\n    SupportsMultiModal,\n",
        ),
        ("SupportsMultiModal, SupportsPP", "SupportsMultiModal, SupportsEagle3, SupportsPP"),
        *METHODS,
    )
    check_unchanged(PATCH, native)


def test_a_bare_language_model_patched_by_hand_is_left_alone() -> None:
    check_unchanged(PATCH, changed(BARE_BEFORE, *BASE, *METHODS, *SHARING))


HALVES = {
    "base only": BASE,
    "methods only": METHODS,
    "sharing only": SHARING,
    "all but the sharing": (*BASE, *METHODS),
    "all but the base": (*METHODS, *SHARING),
    "all but the methods": (*BASE, *SHARING),
    "sharing of the head only": (
        *BASE,
        *METHODS,
        (
            SHARING[0][0],
            SHARING[0][1].replace('object.__setattr__(self.language_model, "model"', "f(0"),
        ),
    ),
}


@pytest.mark.parametrize("changes", HALVES.values(), ids=HALVES)
def test_half_of_the_patch_done_by_hand_is_refused(changes: tuple[Change, ...]) -> None:
    refusal(PATCH, changed(BARE_BEFORE, *changes))


SET = "        self.language_model.set_aux_hidden_state_layers(layers)\n"
GET = "        return self.language_model.get_eagle3_aux_hidden_state_layers()\n"

INCOMPLETE = {
    "the protocol not imported": ("import SupportsEagle3, ", "import "),
    "a setter that passes": (SET, "        pass\n"),
    "a setter of dots": (SET, "        ...\n"),
    "a setter with a docstring only": (SET, '        """Set them."""\n'),
    "a getter that returns nothing": (GET, GET.replace("return ", "")),
}


@pytest.mark.parametrize("change", INCOMPLETE.values(), ids=INCOMPLETE)
def test_by_hand_with_a_part_that_does_nothing_is_refused(change: Change) -> None:
    refusal(PATCH, changed(changed(BARE_BEFORE, *BASE, *METHODS, *SHARING), change))


PATCHED = {
    "head without a condition": (
        [(LM_HEAD, "        self.lm_head = ParallelLMHead(vllm_config)\n")],
        None,
    ),
    "head inside a with": (
        [(LM_HEAD, "        with mark():\n            self.lm_head = ParallelLMHead(1)\n")],
        None,
    ),
    "language model inside a with": (
        [
            (
                LANGUAGE_MODEL,
                "        with mark():\n            self.language_model = DeepseekV2Model(1)\n",
            )
        ],
        None,
    ),
    "comments at the head": (
        [(LM_HEAD, f"        # logits\n{LM_HEAD[:-1]}  # elsewhere\n        # scale\n")],
        [
            (
                LM_HEAD + SHARED,
                f"        # logits\n{LM_HEAD[:-1]}  # elsewhere\n{SHARED}        # scale\n",
            )
        ],
    ),
    "head before the language model": (
        [(LANGUAGE_MODEL + LM_HEAD, LM_HEAD + LANGUAGE_MODEL)],
        [(LANGUAGE_MODEL + LM_HEAD, LM_HEAD + LANGUAGE_MODEL)],
    ),
    "comment above the forward": (
        [(FORWARD, f"    # text and images\n{FORWARD}")],
        None,
    ),
    "bases one a line": (
        [
            (
                BARE_CLASS,
                BARE_CLASS.replace("(", "(\n    ").replace(", ", ",\n    ").replace(")", ",\n)"),
            )
        ],
        [
            (
                BARE_CLASS.replace("PP)", "PP, SupportsEagle3)"),
                "class KimiK25ForConditionalGeneration(\n    nn.Module,\n    SupportsMultiModal,\n"
                "    SupportsPP,\n    SupportsEagle3,\n):\n",
            )
        ],
    ),
    "import of one name": (
        [(BARE_IMPORT, "from vllm.interfaces import SupportsMultiModal\n")],
        [
            (
                BARE_IMPORT.replace("import ", "import SupportsEagle3, "),
                "from vllm.interfaces import SupportsEagle3, SupportsMultiModal\n",
            )
        ],
    ),
}


@pytest.mark.parametrize(("before", "after"), PATCHED.values(), ids=PATCHED)
def test_other_layouts_are_patched(before: list[Change], after: list[Change] | None) -> None:
    """No changes for ``after`` of its own: the same ones as for ``before``."""
    expected = changed(BARE_AFTER, *(before if after is None else after))
    check_patched(PATCH, changed(BARE_BEFORE, *before).encode(), expected.encode())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_bytes_around_the_change_are_kept(layout: Layout) -> None:
    check_patched(PATCH, layout(BEFORE), layout(AFTER))
    check_patched(PATCH, layout(BARE_BEFORE), layout(BARE_AFTER))


def test_a_file_indented_with_tabs() -> None:
    check_tabs(PATCH, BEFORE, AFTER)
    check_tabs(PATCH, BARE_BEFORE, BARE_AFTER)


WRAPPER = "KimiK25ForConditionalGeneration"
NO_IMPORT = ("import of SupportsMultiModal without SupportsEagle3", "the module")
CONSTRUCTOR = f"{WRAPPER}.__init__"

REFUSED = {
    "import gone": ([(BARE_IMPORT, "from .interfaces import SupportsPP\n")], (*NO_IMPORT, 0)),
    "protocol beside it renamed": (
        [(BARE_IMPORT, BARE_IMPORT.replace("Modal", "Media"))],
        (*NO_IMPORT, 0),
    ),
    "class renamed": (
        [(BARE_CLASS, BARE_CLASS.replace("K25", "K26"))],
        (f"class {WRAPPER}", "the module", 0),
    ),
    "class split": (
        [(FORWARD, f"\nclass KimiK25Runner({WRAPPER}):\n{FORWARD}")],
        ("def forward", WRAPPER, 0),
    ),
    "constructor inherited": (
        [("    def __init__(", "    def setup(")],
        ("def __init__", WRAPPER, 0),
    ),
    "language model elsewhere": (
        [("self.language_model = DeepseekV2Model(", "self.text_model = DeepseekV2Model(")],
        ("self.language_model = ...(...)", CONSTRUCTOR, 0),
    ),
    "language model twice": (
        [(LANGUAGE_MODEL, LANGUAGE_MODEL * 2)],
        ("self.language_model = ...(...)", CONSTRUCTOR, 2),
    ),
    "no head": (
        [(LM_HEAD, "")],
        ("self.lm_head = ParallelLMHead(...)", CONSTRUCTOR, 0),
    ),
    "another kind of head": (
        [("self.lm_head = ParallelLMHead(", "self.lm_head = Head(")],
        ("self.lm_head = ParallelLMHead(...)", CONSTRUCTOR, 0),
    ),
    "head twice": (
        [(LM_HEAD, LM_HEAD * 2)],
        ("self.lm_head = ParallelLMHead(...)", CONSTRUCTOR, 2),
    ),
}


@pytest.mark.parametrize(("changes", "expected"), REFUSED.values(), ids=REFUSED)
def test_unknown_source_is_refused(changes: list[Change], expected: tuple[str, str, int]) -> None:
    assert refusal(PATCH, changed(BARE_BEFORE, *changes)) == expected


def test_the_postcondition_without_the_class_does_not_hold() -> None:
    assert not PATCH.holds(parse(b"class Other: pass", ""))


def test_the_interface_on_a_wrapper_without_a_constructor_holds() -> None:
    inherited = changed(AFTER, ("    def __init__(", "    def setup("))
    assert PATCH.holds(parse(inherited.encode(), ""))


def test_the_file_where_there_is_one_and_its_language_model(tmp_path: Path) -> None:
    path = "vllm/model_executor/models/kimi_k25.py"
    deepseek = "vllm/model_executor/models/deepseek_v2.py"
    assert PATCH.paths(Sources(tmp_path)) == ()
    assert PATCH.paths(Sources(tmp_path, {path: b""})) == ()
    assert PATCH.paths(Sources(tmp_path, {deepseek: b""})) == ()
    assert PATCH.paths(Sources(tmp_path, {path: b"", deepseek: b""})) == (path,)
