"""What every patch does around its codemod, and which patches there are."""

import ast
import re
from pathlib import Path

import pytest

from vllm_eagle3_patch import patches
from vllm_eagle3_patch.codemod.patch import Patch
from vllm_eagle3_patch.ground.errors import UnsupportedError, VerificationError
from vllm_eagle3_patch.ground.family import FAMILY, select_models
from vllm_eagle3_patch.patches import _discovery
from vllm_eagle3_patch.patches._discovery import all_patches, chosen_patches
from vllm_eagle3_patch.vllm_source.sources import Sources

HERE = Path(__file__).parent
CONFIG = "vllm/config/speculative.py"
NARROW = b"""types = ["llama"]
if not any(name in config.hf_text_config.model_type for name in types):
    raise ValueError(f"Eagle3 is only supported for {types}")
"""


def allowlist() -> Patch:
    return next(patch for patch in all_patches() if patch.name == "eagle3-allowlist")


def test_a_file_that_is_not_python() -> None:
    with pytest.raises(UnsupportedError) as caught:
        allowlist().apply(b"def f(:\n", CONFIG)
    assert caught.value.code == "not-python"
    assert CONFIG in caught.value.message


def test_a_file_in_a_grammar_newer_than_libcst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_eagle3_patch.vllm_source.sources.parse", lambda *_: ast.parse(""))
    with pytest.raises(UnsupportedError) as caught:
        allowlist().apply(b"x = a ?? b\n", CONFIG)
    assert caught.value.code == "not-python"
    assert caught.value.message == f"{CONFIG} cannot be parsed by LibCST"


@pytest.mark.parametrize(
    "content",
    [b"\x0c" + NARROW, NARROW + b"if 1:\n    x\n\\\n    y\n"],
    ids=["form feed", "empty line with a backslash"],
)
def test_a_file_that_libcst_would_not_give_back_is_left_alone(content: bytes) -> None:
    with pytest.raises(UnsupportedError) as caught:
        allowlist().apply(content, CONFIG)
    assert caught.value.code == "not-reproducible"
    assert CONFIG in caught.value.message


def test_a_form_feed_does_no_harm_where_nothing_is_to_be_done() -> None:
    content = b"\x0c" + allowlist().apply(NARROW, CONFIG)
    assert allowlist().apply(content, CONFIG) == content


def test_a_result_without_the_postcondition_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = allowlist()
    monkeypatch.setattr(patch, "holds", lambda *_, **__: False)
    with pytest.raises(VerificationError) as caught:
        patch.apply(NARROW, CONFIG)
    assert caught.value.exit_code == 6
    assert caught.value.code == "postcondition"
    assert patch.name in caught.value.message


def test_a_model_lacks_a_patch_whose_postcondition_does_not_hold_for_it(tmp_path: Path) -> None:
    (kimi,), (glm,) = (select_models((name,)) for name in ("kimi_k25", "glm_moe_dsa"))
    for_kimi = NARROW.replace(b'"llama"', b'"kimi_k2", "deepseek_v3"')
    sources = Sources(tmp_path, {CONFIG: for_kimi})
    assert not allowlist().missing(sources, kimi)
    assert allowlist().missing(sources, glm)


def test_no_model_lacks_a_patch_without_a_file(tmp_path: Path) -> None:
    """As the allowlist in vLLM 0.22.0 and later."""
    sources = Sources(tmp_path, {CONFIG: b"types = []\n"})
    assert not any(allowlist().missing(sources, model) for model in FAMILY)


def test_all_patches_by_name() -> None:
    names = [patch.name for patch in all_patches()]
    assert names == sorted(set(names))
    assert {"deepseek-v2", "eagle3-allowlist", "kimi-k25", "multimodal-image-token"} <= {*names}


@pytest.mark.parametrize("patch", all_patches(), ids=lambda patch: patch.name)
def test_each_patch_explains_itself(patch: Patch) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", patch.name)
    assert patch.title
    assert patch.upstream
    assert patch.codemod().patch == patch.name


@pytest.mark.parametrize("module", sorted(Path(patches.__path__[0]).glob("[a-z]*.py")))
def test_each_module_says_why_and_has_tests(module: Path) -> None:
    docstring = ast.get_docstring(ast.parse(module.read_bytes())) or ""
    name = module.stem.replace("_", "-")
    assert docstring.startswith(f"``{name}``: ")
    assert "vllm/" in docstring or "hf_" in docstring
    assert (HERE / f"test_{module.stem}.py").is_file()


class Choice:
    """As much of a patch as choosing it needs."""

    def __init__(self, name: str, *, harden: bool = False, companion: bool = False) -> None:
        self.name = name
        self.harden = harden
        self.companion = companion


TEXT = ("deepseek-v2", "wrapper")
"""What the models of a patchable release lack."""


@pytest.mark.parametrize(
    ("lacking", "options", "expected"),
    [
        (TEXT, {}, ["companion", "deepseek-v2", "wrapper"]),
        (TEXT, {"harden": True}, ["bounds", "companion", "deepseek-v2", "wrapper"]),
        (TEXT, {"skip": ("wrapper",)}, ["companion", "deepseek-v2"]),
        (TEXT, {"skip": ("companion",)}, ["deepseek-v2", "wrapper"]),
        (TEXT, {"only": ("wrapper",)}, ["wrapper"]),
        (TEXT, {"only": ("companion",)}, ["companion"]),
        (TEXT, {"only": ("bounds",)}, ["bounds"]),
        (TEXT, {"only": ("wrapper", "bounds"), "skip": ("bounds",)}, ["wrapper"]),
        (TEXT, {"harden": True, "only": ("wrapper",)}, ["wrapper"]),
        (("wrapper",), {}, ["wrapper"]),
        (("wrapper",), {"harden": True}, ["bounds", "companion", "wrapper"]),
        ((), {}, []),
        ((), {"in_place": ("deepseek-v2",)}, ["companion", "deepseek-v2"]),
        ((), {"in_place": ("bounds",), "skip": ("bounds",)}, ["bounds"]),
    ],
    ids=str,
)
def test_the_options_choose(
    lacking: tuple[str, ...],
    options: dict[str, object],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choices = (
        Choice("bounds", harden=True),
        Choice("companion", companion=True),
        Choice("deepseek-v2"),
        Choice("wrapper"),
    )
    monkeypatch.setattr(_discovery, "all_patches", lambda: choices)
    chosen = chosen_patches(lacking, **options)  # type: ignore[arg-type]
    assert [patch.name for patch in chosen] == expected
