"""``kimi-k25`` on look-alikes of its two shapes, and what a bare language model asks for."""

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
    check_patched(PATCH, layout(BARE_BEFORE), layout(BARE_AFTER))


def test_a_file_indented_with_tabs() -> None:
    check_tabs(PATCH, BARE_BEFORE, BARE_AFTER)


CONSTRUCTOR = "KimiK25ForConditionalGeneration.__init__"

REFUSED = {
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
def test_an_unknown_head_is_refused(changes: list[Change], expected: tuple[str, str, int]) -> None:
    assert refusal(PATCH, changed(BARE_BEFORE, *changes)) == expected
