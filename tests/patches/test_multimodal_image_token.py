"""``multimodal-image-token`` on look-alikes of each layout of the proposer's branches."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
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

from vllm_eagle3_patch.ground.family import FAMILY, select_models
from vllm_eagle3_patch.patches.multimodal_image_token import (
    ImageTokenCodemod,
    MultimodalImageToken,
    wanted,
)
from vllm_eagle3_patch.vllm_source.image_tokens import image_tokens
from vllm_eagle3_patch.vllm_source.sources import Sources, parse

PATCH = MultimodalImageToken()
MODELS = select_models(
    (
        *("kimi_k25", "kimi_vl", "deepseek_vl_v2", "deepseek_ocr", "deepseek_ocr2"),
        *("unlimited-ocr", "pixtral"),
    )
)

# As in vLLM 0.15.0.
BEFORE = '''"""A proposer look-alike."""


class Proposer:
    def load_model(self, target_model):
        if supports_multimodal(target_model):
            # handle multimodality
            if self.get_model_name(target_model) in [
                "SomeVLForConditionalGeneration",
                "OtherVLForConditionalGeneration",
            ]:
                self.model.config.image_token_index = target_model.config.image_token_id
            elif self.get_model_name(target_model) == "PixtralForConditionalGeneration":
                self.model.config.image_token_index = (
                    target_model.config.vision_config.image_token_id
                )
            else:
                self.model.config.image_token_index = (
                    target_model.config.image_token_index
                )
            target_language_model = target_model.get_language_model()
        else:
            target_language_model = target_model
        return target_language_model
'''

KIMI = """\
            # vllm-eagle3-patch: multimodal-image-token
            elif self.get_model_name(target_model) in (
                "KimiK25ForConditionalGeneration",
                "KimiVLForConditionalGeneration",
            ):
                self.model.config.image_token_index = target_model.config.media_placeholder_token_id
"""
KIMI_VL = """\
            # vllm-eagle3-patch: multimodal-image-token
            elif self.get_model_name(target_model) == "KimiVLForConditionalGeneration":
                self.model.config.image_token_index = target_model.config.media_placeholder_token_id
"""
DEEPSEEK = """\
            # vllm-eagle3-patch: multimodal-image-token
            elif self.get_model_name(target_model) in (
                "DeepseekVLV2ForCausalLM",
                "DeepseekOCRForCausalLM",
                "DeepseekOCR2ForCausalLM",
                "UnlimitedOCRForCausalLM",
            ):
                self.model.config.image_token_index = target_model.image_token_id
"""
BY_HAND = """\
            elif self.get_model_name(target_model) == "KimiK25ForConditionalGeneration":
                self.model.config.image_token_index = (
                    target_model.config.media_placeholder_token_id
                )
"""
ELSE = """\
            else:
                self.model.config.image_token_index = (
                    target_model.config.image_token_index
                )
"""
LISTED = """\
            if self.get_model_name(target_model) in [
                "SomeVLForConditionalGeneration",
                "OtherVLForConditionalGeneration",
            ]:
"""
PIXTRAL = """\
            elif self.get_model_name(target_model) == "PixtralForConditionalGeneration":
                self.model.config.image_token_index = (
                    target_model.config.vision_config.image_token_id
                )
"""
EQUAL = """\
            if (
                self.get_model_name(target_model)
                == "SomeVLForConditionalGeneration"
            ):
"""
BRANCHES = KIMI + DEEPSEEK
AFTER = changed(BEFORE, (ELSE, BRANCHES + ELSE))


# As from 0.9.2 to 0.11.0: one assignment for every class, and no method for a class's name.
ALONE = '''"""A proposer look-alike."""


class Proposer:
    def load_model(self, target_model):
        if supports_multimodal(target_model):
            # handle multimodality
            self.model.config.image_token_index = (
                target_model.config.image_token_index)
            target_language_model = target_model.get_language_model()
        else:
            target_language_model = target_model
        return target_language_model
'''
ALONE_STATEMENT = """\
            self.model.config.image_token_index = (
                target_model.config.image_token_index)
"""
ALONE_BRANCHES = """\
            # vllm-eagle3-patch: multimodal-image-token
            if type(target_model).__name__ == "KimiVLForConditionalGeneration":
                self.model.config.image_token_index = target_model.config.media_placeholder_token_id
            # vllm-eagle3-patch: multimodal-image-token
            elif type(target_model).__name__ == "DeepseekVLV2ForCausalLM":
                self.model.config.image_token_index = target_model.image_token_id
            else:
                self.model.config.image_token_index = (
                    target_model.config.image_token_index)
"""
ALONE_AFTER = changed(ALONE, (ALONE_STATEMENT, ALONE_BRANCHES))
ALONE_MODELS = select_models(("kimi_vl", "deepseek_vl_v2"))


class TestBeforeAndAfter(CodemodTest):
    TRANSFORM = ImageTokenCodemod

    def test_a_list_and_a_branch(self) -> None:
        self.assertCodemod(BEFORE, AFTER, models=MODELS)

    def test_one_assignment_for_all(self) -> None:
        self.assertCodemod(ALONE, ALONE_AFTER, models=ALONE_MODELS)


K25 = select_models(("kimi_k25",))

HOLDS = {
    "by a branch, as vLLM does from 0.18.0 on": [(ELSE, BY_HAND + ELSE)],
    "by a branch for two classes": [
        (ELSE, BY_HAND.replace('== "KimiK25', 'in ("KimiK3", "KimiK25').replace('":', '"):') + ELSE)
    ],
}


@pytest.mark.parametrize("changes", HOLDS.values(), ids=HOLDS)
def test_a_proposer_that_knows_the_wrapper_is_left_alone(changes: list[Change]) -> None:
    check_unchanged(PATCH, changed(BEFORE, *changes), K25)


def test_a_branch_that_reads_a_key_its_config_lacks_does_not_hold() -> None:
    """Kimi-K2.5's config has no ``image_token_id``: a server with it does not start."""
    listed = changed(BEFORE, ('"OtherVLFor', '"KimiK25For'))
    anchor = "branch for KimiK25ForConditionalGeneration that reads its image token"
    assert refusal(PATCH, listed, K25) == (anchor, "load_model", 0)


def test_models_that_need_no_branch_are_left_alone() -> None:
    check_unchanged(PATCH, BEFORE, select_models(("DeepseekV3ForCausalLM",)))


PATCHED = {
    "one branch by name, as in 0.11.1": [(LISTED, EQUAL)],
    "an assertion and a cast, as in 0.16.0": [
        (LISTED, f'            assert hasattr(target_model, "config")\n{LISTED}'),
        ("target_model.get_language", "cast(SupportsMultiModal, target_model).get_language"),
    ],
    "another branch": [(PIXTRAL, PIXTRAL + PIXTRAL.replace("Pixtral", "Brick"))],
    "fallback on one line": [
        (
            ELSE,
            "            else:\n                self.model.config.image_token_index"
            " = target_model.config.image_token_index\n",
        )
    ],
    "comments": [
        (
            ELSE,
            ELSE.replace("            else:", "            # all others\n            else:  # ?"),
        ),
        (PIXTRAL, f"{PIXTRAL[:-1]}  # pixels\n                # and bricks\n"),
    ],
}


@pytest.mark.parametrize("changes", PATCHED.values(), ids=PATCHED)
def test_other_layouts_are_patched(changes: list[Change]) -> None:
    before, after = (changed(source, *changes).encode() for source in (BEFORE, AFTER))
    check_patched(PATCH, before, after, MODELS)


def test_one_branch_and_no_other_before_it() -> None:
    """As in 0.11.1, where nothing is said of Pixtral yet."""
    models = [model for model in MODELS if model.architecture != "PixtralForConditionalGeneration"]
    before, after = (changed(source, (PIXTRAL, ""), (LISTED, EQUAL)) for source in (BEFORE, AFTER))
    check_patched(PATCH, before.encode(), after.encode(), models)


def test_only_wrappers_that_are_shipped_get_a_branch() -> None:
    branch = DEEPSEEK.replace('                "DeepseekOCR2ForCausalLM",\n', "")
    branch = branch.replace('                "UnlimitedOCRForCausalLM",\n', "")
    models = select_models(("deepseek_v3", "deepseek_ocr", "kimi_vl", "deepseek_vl_v2"))
    after = changed(BEFORE, (ELSE, KIMI_VL + branch + ELSE))
    check_patched(PATCH, BEFORE.encode(), after.encode(), models)


def test_one_that_vllm_knows_gets_no_second_branch() -> None:
    """As from 0.18.0 on."""
    before = changed(BEFORE, (ELSE, BY_HAND + ELSE))
    after = changed(before, (ELSE, KIMI_VL + DEEPSEEK + ELSE))
    check_patched(PATCH, before.encode(), after.encode(), MODELS)


def test_one_with_a_branch_of_ours_and_a_new_one_beside_it() -> None:
    """As after an older version of this tool."""
    for kept in (KIMI, DEEPSEEK):
        before = changed(BEFORE, (ELSE, kept + ELSE))
        added = BRANCHES.replace(kept, "")
        after = changed(before, (ELSE, added + ELSE))
        check_patched(PATCH, before.encode(), after.encode(), MODELS)


ALONE_LAYOUTS = {
    "on one line": (
        [
            (
                ALONE_STATEMENT,
                "            self.model.config.image_token_index ="
                " target_model.config.image_token_index\n",
            )
        ],
        [
            (
                "(\n                    target_model.config.image_token_index)",
                "target_model.config.image_token_index",
            )
        ],
    ),
    "a comment beside it": (
        [("image_token_index)\n", "image_token_index)  # ?\n")],
        [("image_token_index)\n", "image_token_index)  # ?\n")],
    ),
    "no comment above it": (
        [("            # handle multimodality\n", "")],
        [("            # handle multimodality\n", "")],
    ),
}


@pytest.mark.parametrize(("before", "after"), ALONE_LAYOUTS.values(), ids=ALONE_LAYOUTS)
def test_other_layouts_of_one_assignment(before: list[Change], after: list[Change]) -> None:
    patched = changed(ALONE_AFTER, *after).encode()
    check_patched(PATCH, changed(ALONE, *before).encode(), patched, ALONE_MODELS)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_bytes_around_one_assignment_are_kept(layout: Layout) -> None:
    check_patched(PATCH, layout(ALONE), layout(ALONE_AFTER), ALONE_MODELS)


def test_two_assignments_are_refused() -> None:
    again = f"        if supports_multimodal(target_model):\n{ALONE_STATEMENT}        return target"
    twice = changed(ALONE, ("        return target", again))
    anchor = "one target_model.config.image_token_index"
    assert refusal(PATCH, twice, ALONE_MODELS) == (anchor, "load_model", 2)


def test_an_assignment_that_is_not_the_first_is_refused() -> None:
    moved = changed(ALONE, (ALONE_STATEMENT, f"            warn()\n{ALONE_STATEMENT}"))
    anchor = "branch before target_model.config.image_token_index"
    assert refusal(PATCH, moved, ALONE_MODELS) == (anchor, "load_model", 0)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_bytes_around_the_change_are_kept(layout: Layout) -> None:
    check_patched(PATCH, layout(BEFORE), layout(AFTER), MODELS)


def test_a_file_indented_with_tabs() -> None:
    check_tabs(PATCH, BEFORE, AFTER, MODELS)


ANCHOR = ("branch before target_model.config.image_token_index", "load_model")

REFUSED = {
    "fallback gone": ([(ELSE, "")], (*ANCHOR, 0)),
    "fallback of another key": (
        [("target_model.config.image_token_index", "target_model.config.image_token_id_2")],
        (*ANCHOR, 0),
    ),
    "fallback of another model": (
        [("target_model.config.image_token_index", "other_model.config.image_token_index")],
        (*ANCHOR, 0),
    ),
    "more in the fallback": ([(ELSE, f"{ELSE}                warn()\n")], (*ANCHOR, 0)),
    "no branch before it": (
        [
            (LISTED, f"            if False:\n                pass\n{ELSE}{LISTED}"),
            (PIXTRAL + ELSE, ""),
        ],
        (*ANCHOR, 0),
    ),
    "more in the branch before it": (
        [(PIXTRAL, f"{PIXTRAL}                warn()\n")],
        (*ANCHOR, 0),
    ),
    "token renamed": (
        [(ELSE, ELSE.replace("model.config.image_token_index = (", "image_token = ("))],
        (*ANCHOR, 0),
    ),
    "two proposers": ([(ELSE, f"{ELSE}{PIXTRAL.replace('elif', 'if')}{ELSE}")], (*ANCHOR, 2)),
}


@pytest.mark.parametrize(("changes", "expected"), REFUSED.values(), ids=REFUSED)
def test_unknown_source_is_refused(changes: list[Change], expected: tuple[str, str, int]) -> None:
    assert refusal(PATCH, changed(BEFORE, *changes)) == expected


TOKENS = {
    "KimiK25ForConditionalGeneration": 163605,
    "KimiVLForConditionalGeneration": 163605,
    "DeepseekVLV2ForCausalLM": 128815,
    "UnlimitedOCRForCausalLM": 128815,
    "SomeVLForConditionalGeneration": 1,
    "PixtralForConditionalGeneration": 2,
    "OneMoreForConditionalGeneration": 3,
}


def token_of(content: bytes, wrapper: str) -> int:
    """What a patched proposer copies for a model of this class."""
    names = {"supports_multimodal": lambda model: True}
    exec(content, names)
    config = SimpleNamespace(
        media_placeholder_token_id=163605,
        image_token_id=1,
        vision_config=SimpleNamespace(image_token_id=2),
        image_token_index=3,
    )
    kind = type(wrapper, (SimpleNamespace,), {})
    target = kind(config=config, image_token_id=128815, get_language_model=lambda: None)
    proposer = names["Proposer"]()  # type: ignore[operator]
    proposer.model = SimpleNamespace(config=SimpleNamespace())
    proposer.get_model_name = lambda model: type(model).__name__
    proposer.load_model(target)
    token = proposer.model.config.image_token_index
    assert isinstance(token, int)
    return token


@pytest.mark.parametrize(("wrapper", "token"), TOKENS.items())
def test_the_patched_proposer_reads_each_classes_own_key(wrapper: str, token: int) -> None:
    assert token_of(PATCH.apply(BEFORE.encode(), "eagle.py"), wrapper) == token


@pytest.mark.parametrize(
    ("wrapper", "token"),
    [
        ("KimiVLForConditionalGeneration", 163605),
        ("DeepseekVLV2ForCausalLM", 128815),
        ("OneMoreForConditionalGeneration", 3),
    ],
)
def test_the_patched_proposer_of_0_9_2_does_too(wrapper: str, token: int) -> None:
    patched = PATCH.apply(ALONE.encode(), "eagle.py", ALONE_MODELS)
    assert token_of(patched, wrapper) == token


def test_classes_with_a_branch() -> None:
    assert set(image_tokens(parse(AFTER.encode(), ""))) == {
        "SomeVLForConditionalGeneration",
        "OtherVLForConditionalGeneration",
        *wanted(MODELS),
    }
    elsewhere = b'if name == "KimiK25ForConditionalGeneration":\n    config.other = 1\n'
    assert image_tokens(parse(elsewhere, "")) == {}


def test_a_wrapper_whose_config_has_the_index_needs_no_branch() -> None:
    """Dots3-Note's constructor sets it."""
    assert wanted(select_models(("dots3_note",))) == {}
    assert PATCH.holds(parse(BEFORE.encode(), ""), select_models(("dots3_note",)))


def test_a_model_that_is_not_shipped_needs_no_branch() -> None:
    assert PATCH.holds(parse(BEFORE.encode(), ""), [FAMILY[0]._replace(architecture="Other")])
    others = [model._replace(architecture="Other") for model in FAMILY]
    assert not PATCH.holds(parse(AFTER.encode(), ""), others)


def test_the_file_that_handles_the_token(tmp_path: Path) -> None:
    old, new = "vllm/v1/spec_decode/eagle.py", "vllm/v1/spec_decode/llm_base_proposer.py"
    moved = {old: b"from .llm_base_proposer import *\n", new: BEFORE.encode()}
    assert PATCH.paths(Sources(tmp_path)) == ()
    assert PATCH.paths(Sources(tmp_path, {old: BEFORE.encode()})) == (old,)
    assert PATCH.paths(Sources(tmp_path, moved)) == (new,)


KIMI_NAME = "KimiK25ForConditionalGeneration"

TRUE_FOR_A_CLASS = {
    "equal": f'name == "{KIMI_NAME}"',
    "the other way round": f'"{KIMI_NAME}" == name',
    "one of a list": f'name in ["Other", "{KIMI_NAME}"]',
    "part of the name": f'"{KIMI_NAME}" in name',
    "either of two": f'name == "Other" or name in ("{KIMI_NAME}",)',
}
NOT_TRUE_FOR_IT = {
    "not equal": f'name != "{KIMI_NAME}"',
    "none of a list": f'name not in ["{KIMI_NAME}"]',
    "is": f'name is "{KIMI_NAME}"',
    "not": f'not name == "{KIMI_NAME}"',
    "and": f'name == "{KIMI_NAME}" and self.ready',
    "two comparisons": f'"Other" == name == "{KIMI_NAME}"',
    "a call": f'name.startswith("{KIMI_NAME}")',
    "the string alone": f'"{KIMI_NAME}"',
    "either of two that may be another": f'name == "{KIMI_NAME}" or name != "Other"',
}


@pytest.mark.parametrize("test", TRUE_FOR_A_CLASS.values(), ids=TRUE_FOR_A_CLASS)
def test_a_test_that_is_true_for_a_class(test: str) -> None:
    assert image_tokens(copied_if(test))[KIMI_NAME] == "token"


@pytest.mark.parametrize("test", NOT_TRUE_FOR_IT.values(), ids=NOT_TRUE_FOR_IT)
def test_a_test_that_may_say_something_else(test: str) -> None:
    assert image_tokens(copied_if(test)) == {}


def copied_if(test: str) -> ast.Module:
    return parse(f"if {test}:\n    config.image_token_index = token\n".encode(), "")


@pytest.mark.parametrize("operator", ["!=", "not in", "is"])
def test_a_branch_by_hand_that_asks_something_else_is_refused(operator: str) -> None:
    models = select_models(("kimi_k25",))
    by_hand = changed(BEFORE, (ELSE, BY_HAND + ELSE))
    assert PATCH.holds(parse(by_hand.encode(), ""), models)
    inverted = changed(BEFORE, (ELSE, changed(BY_HAND, ("==", operator)) + ELSE))
    anchor = f"branch for {KIMI_NAME} that reads its image token"
    assert refusal(PATCH, inverted, models) == (anchor, "load_model", 0)
