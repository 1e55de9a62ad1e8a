"""``wrappers``: every wrapper of the family's table has a patch, before and after."""

from pathlib import Path

import pytest
from patch_checks import check_patched, check_unchanged
from wrapper_runs import build

from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.patches._discovery import all_patches
from vllm_eagle3_patch.patches.wrappers import PATCHES, WRAPPERS
from vllm_eagle3_patch.vllm_source.sources import Sources, parse

SOURCE = """from vllm.model_executor.models.interfaces import (
    {imports},
)


class {owner}({bases}):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        self.language_model = init_vllm_registered_model(vllm_config=vllm_config)

{methods}    def forward(self, input_ids):
        return self.language_model(input_ids)
"""
METHODS = """\
    # vllm-eagle3-patch: {patch}
    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.language_model.set_aux_hidden_state_layers(layers)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.language_model.get_eagle3_aux_hidden_state_layers()

"""

# What each imports and is, as in the last release that lacks the interface.
NAMES = {
    "deepseek-ocr": "SupportsLoRA, SupportsMultiModal, SupportsPP",
    "deepseek-ocr2": "MultiModalEmbeddings, SupportsLoRA, SupportsMultiModal, SupportsPP",
    "deepseek-vl2": "MultiModalEmbeddings, SupportsMultiModal, SupportsPP",
    "dots3-note": "MultiModalEmbeddings, SupportsMultiModal, SupportsPP",
    "kimi-k25": "SupportsMultiModal, SupportsPP",
    "kimi-vl": "SupportsMultiModal",
    "pixtral": "MultiModalEmbeddings, SupportsLoRA, SupportsMultiModal, SupportsPP",
}


def sources(patch: str) -> tuple[str, str]:
    """A look-alike of one wrapper, before and after."""
    names = NAMES[patch].split(", ")
    place = names.index("SupportsMultiModal")
    with_ours = [*names[:place], "SupportsEagle3", *names[place:]]
    bases = ["nn.Module", *(name for name in names if name != "MultiModalEmbeddings")]
    owner = WRAPPERS[patch].owner
    before = SOURCE.format(
        imports=",\n    ".join(names), owner=owner, bases=", ".join(bases), methods=""
    )
    after = SOURCE.format(
        imports=",\n    ".join(with_ours),
        owner=owner,
        bases=", ".join([*bases, "SupportsEagle3"]),
        methods=METHODS.format(patch=patch),
    )
    return before, after


def test_every_wrapper_is_tested_here() -> None:
    assert set(NAMES) == set(WRAPPERS) == set(PATCHES)


@pytest.mark.parametrize("patch", NAMES)
def test_before_and_after(patch: str) -> None:
    before, after = sources(patch)
    # One name alone has no separator to copy: it stays on its line.
    if patch == "kimi-vl":
        after = after.replace("SupportsEagle3,\n    Supp", "SupportsEagle3, Supp")
    check_patched(PATCHES[patch](), before.encode(), after.encode())
    check_unchanged(PATCHES[patch](), after)


@pytest.mark.parametrize("patch", NAMES)
def test_ids_go_to_the_language_model(patch: str) -> None:
    wrapper = build(sources(patch)[1], WRAPPERS[patch].owner)
    assert wrapper.get_eagle3_aux_hidden_state_layers() == (2, 30, 58)
    wrapper.set_aux_hidden_state_layers((7,))
    assert wrapper.language_model.model.captured == (7,)


def test_each_patch_is_registered_by_its_name() -> None:
    registered = {patch.name: type(patch) for patch in all_patches()}
    for name, kind in PATCHES.items():
        assert registered[name] is kind
        assert kind.kind.patch == name
        assert WRAPPERS[name].owner in kind.title


def test_a_model_needs_its_own_wrappers_patch_and_branch() -> None:
    for model in FAMILY:
        if model.wrapper is None:
            assert not set(model.requires) & set(WRAPPERS)
            continue
        assert model.wrapper.patch in model.requires
        branch = model.wrapper.image_token is not None
        assert ("multimodal-image-token" in model.requires) == branch


def test_a_model_without_a_class_of_its_own_shares_its_bases_patch(tmp_path: Path) -> None:
    """Unlimited-OCR's class only derives from DeepSeek-OCR's."""
    ocr, unlimited = (
        next(model for model in FAMILY if model.architecture == name)
        for name in ("DeepseekOCRForCausalLM", "UnlimitedOCRForCausalLM")
    )
    assert ocr.wrapper == unlimited.wrapper
    patch = PATCHES["deepseek-ocr"]()
    before, after = (source.encode() for source in sources("deepseek-ocr"))
    deepseek = {"vllm/model_executor/models/deepseek_v2.py": b""}
    path = "vllm/model_executor/models/deepseek_ocr.py"
    assert patch.missing(Sources(tmp_path, {path: before, **deepseek}), unlimited)
    interfaces = {"vllm/model_executor/models/interfaces.py": b"class SupportsEagle3(Protocol):"}
    assert not patch.missing(Sources(tmp_path, {path: after, **deepseek, **interfaces}), unlimited)


def test_pixtral_counts_only_where_mistral_large_3_is(tmp_path: Path) -> None:
    """Up to 0.11.2 it can hold no language model of the family."""
    path, inner = PATCHES["pixtral"].wrapper.path, "vllm/model_executor/models/mistral_large_3.py"
    deepseek = "vllm/model_executor/models/deepseek_v2.py"
    patch = PATCHES["pixtral"]()
    assert patch.paths(Sources(tmp_path, {path: b"", deepseek: b""})) == ()
    assert patch.paths(Sources(tmp_path, {path: b"", deepseek: b"", inner: b""})) == (path,)


def test_as_vllm_does_it_itself_for_pixtral_is_left_alone() -> None:
    """As from 0.19.0 on: it asks its language model first."""
    _, after = sources("pixtral")
    native = after.replace(
        "        self.language_model.set_aux",
        "        self._require_language_model_eagle3()\n        self.language_model.set_aux",
    )
    check_unchanged(PATCHES["pixtral"](), native)


def test_a_file_without_the_class_does_not_hold() -> None:
    assert not any(patch().holds(parse(b"class Other: pass", "")) for patch in PATCHES.values())
