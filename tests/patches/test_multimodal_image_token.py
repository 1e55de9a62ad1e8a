"""``multimodal-image-token`` on look-alikes of each layout of the proposer's branches."""

from dataclasses import replace
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

from vllm_eagle3_patch.family import FAMILY, select_models
from vllm_eagle3_patch.patches import multimodal_image_token
from vllm_eagle3_patch.patches.multimodal_image_token import (
    ImageTokenCodemod,
    MultimodalImageToken,
    image_tokens,
)
from vllm_eagle3_patch.sources import Sources, parse

PATCH = MultimodalImageToken()

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
            elif self.get_model_name(target_model) == "PixelForConditionalGeneration":
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

BRANCH = """\
            # vllm-eagle3-patch: multimodal-image-token
            elif self.get_model_name(target_model) == "KimiK25ForConditionalGeneration":
                self.model.config.image_token_index = target_model.config.media_placeholder_token_id
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
PIXEL = """\
            elif self.get_model_name(target_model) == "PixelForConditionalGeneration":
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
AFTER = changed(BEFORE, (ELSE, BRANCH + ELSE))


class TestBeforeAndAfter(CodemodTest):
    TRANSFORM = ImageTokenCodemod

    def test_two_branches(self) -> None:
        self.assertCodemod(
            """
            class Proposer:
                def load_model(self, target_model):
                    if self.get_model_name(target_model) == "SomeVL":
                        self.model.config.image_token_index = target_model.config.image_token_id
                    else:
                        self.model.config.image_token_index = (
                            target_model.config.image_token_index
                        )
            """,
            """
            class Proposer:
                def load_model(self, target_model):
                    if self.get_model_name(target_model) == "SomeVL":
                        self.model.config.image_token_index = target_model.config.image_token_id
                    # vllm-eagle3-patch: multimodal-image-token
                    elif self.get_model_name(target_model) == "KimiK25ForConditionalGeneration":
                        self.model.config.image_token_index = target_model.config.media_placeholder_token_id
                    else:
                        self.model.config.image_token_index = (
                            target_model.config.image_token_index
                        )
            """,
        )

    def test_a_list_and_a_branch(self) -> None:
        self.assertCodemod(BEFORE, AFTER)


HOLDS = {
    "by a branch, as vLLM does from 0.18.0 on": [(ELSE, BY_HAND + ELSE)],
    "by a branch for two classes": [
        (ELSE, BY_HAND.replace('== "KimiK25', 'in ("KimiK3", "KimiK25').replace('":', '"):') + ELSE)
    ],
}


@pytest.mark.parametrize("changes", HOLDS.values(), ids=HOLDS)
def test_a_proposer_that_knows_the_wrapper_is_left_alone(changes: list[Change]) -> None:
    check_unchanged(PATCH, changed(BEFORE, *changes))


def test_a_branch_that_reads_a_key_its_config_lacks_does_not_hold() -> None:
    """Kimi-K2.5's config has no ``image_token_id``: a server with it does not start."""
    listed = changed(BEFORE, ('"OtherVLFor', '"KimiK25For'))
    assert not PATCH.holds(parse(listed.encode(), ""))


def test_models_that_need_no_branch_are_left_alone() -> None:
    check_unchanged(PATCH, BEFORE, select_models(("DeepseekV3ForCausalLM",)))


PATCHED = {
    "two branches, one by name, as in 0.11.1": [(LISTED, EQUAL), (PIXEL, "")],
    "an assertion and a cast, as in 0.16.0": [
        (LISTED, f'            assert hasattr(target_model, "config")\n{LISTED}'),
        ("target_model.get_language", "cast(SupportsMultiModal, target_model).get_language"),
    ],
    "another branch": [(PIXEL, PIXEL + PIXEL.replace("Pixel", "Brick"))],
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
        (PIXEL, f"{PIXEL[:-1]}  # pixels\n                # and bricks\n"),
    ],
}


@pytest.mark.parametrize("changes", PATCHED.values(), ids=PATCHED)
def test_other_layouts_are_patched(changes: list[Change]) -> None:
    check_patched(PATCH, changed(BEFORE, *changes).encode(), changed(AFTER, *changes).encode())


def test_several_wrappers_get_a_branch_each_in_the_familys_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = multimodal_image_token.IMAGE_TOKENS
    monkeypatch.setitem(tokens, "KimiVLForConditionalGeneration", "target_model.config.other_id")
    monkeypatch.setitem(tokens, "NotOfThisVllm", "target_model.config.third_id")
    other = BRANCH.replace("KimiK25", "KimiVL").replace("media_placeholder_token_id", "other_id")
    after = changed(BEFORE, (ELSE, BRANCH + other + ELSE))
    check_patched(PATCH, BEFORE.encode(), after.encode())
    one_there = changed(BEFORE, (ELSE, BY_HAND + ELSE))
    check_patched(PATCH, one_there.encode(), changed(one_there, (ELSE, other + ELSE)).encode())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_bytes_around_the_change_are_kept(layout: Layout) -> None:
    check_patched(PATCH, layout(BEFORE), layout(AFTER))


def test_a_file_indented_with_tabs() -> None:
    check_tabs(PATCH, BEFORE, AFTER)


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
            (PIXEL + ELSE, ""),
        ],
        (*ANCHOR, 0),
    ),
    "more in the branch before it": ([(PIXEL, f"{PIXEL}                warn()\n")], (*ANCHOR, 0)),
    "token renamed": (
        [(ELSE, ELSE.replace("model.config.image_token_index = (", "image_token = ("))],
        (*ANCHOR, 0),
    ),
    "two proposers": ([(ELSE, f"{ELSE}{PIXEL.replace('elif', 'if')}{ELSE}")], (*ANCHOR, 2)),
}


@pytest.mark.parametrize(("changes", "expected"), REFUSED.values(), ids=REFUSED)
def test_unknown_source_is_refused(changes: list[Change], expected: tuple[str, str, int]) -> None:
    assert refusal(PATCH, changed(BEFORE, *changes)) == expected


@pytest.mark.parametrize(
    ("wrapper", "token"),
    [
        ("KimiK25ForConditionalGeneration", 163605),
        ("SomeVLForConditionalGeneration", 1),
        ("PixelForConditionalGeneration", 2),
        ("OneMoreForConditionalGeneration", 3),
    ],
)
def test_the_patched_proposer_reads_each_classes_own_key(wrapper: str, token: int) -> None:
    names = {"supports_multimodal": lambda model: True}
    exec(PATCH.apply(BEFORE.encode(), "eagle.py"), names)
    config = SimpleNamespace(
        media_placeholder_token_id=163605,
        image_token_id=1,
        vision_config=SimpleNamespace(image_token_id=2),
        image_token_index=3,
    )
    proposer = names["Proposer"]()  # type: ignore[operator]
    proposer.model = SimpleNamespace(config=SimpleNamespace())
    proposer.get_model_name = lambda model: wrapper
    proposer.load_model(SimpleNamespace(config=config, get_language_model=lambda: None))
    assert proposer.model.config.image_token_index == token


def test_classes_with_a_branch() -> None:
    assert set(image_tokens(parse(AFTER.encode(), ""))) == {
        "SomeVLForConditionalGeneration",
        "OtherVLForConditionalGeneration",
        "PixelForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
    }
    elsewhere = b'if name == "KimiK25ForConditionalGeneration":\n    config.other = 1\n'
    assert image_tokens(parse(elsewhere, "")) == {}


def test_every_class_with_a_token_is_one_of_the_family() -> None:
    architectures = {model.architecture for model in FAMILY}
    assert multimodal_image_token.IMAGE_TOKENS.keys() <= architectures


def test_a_model_that_is_not_shipped_needs_no_branch() -> None:
    others = [replace(model, architecture="Other") for model in FAMILY]
    assert PATCH.holds(parse(BEFORE.encode(), ""), others)


def test_the_file_that_handles_the_token(tmp_path: Path) -> None:
    old, new = "vllm/v1/spec_decode/eagle.py", "vllm/v1/spec_decode/llm_base_proposer.py"
    moved = {old: b"from .llm_base_proposer import *\n", new: BEFORE.encode()}
    assert PATCH.paths(Sources(tmp_path)) == ()
    assert PATCH.paths(Sources(tmp_path, {old: BEFORE.encode()})) == (old,)
    assert PATCH.paths(Sources(tmp_path, moved)) == (new,)
