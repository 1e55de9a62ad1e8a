"""``wrappers``: what holds for every wrapper of the family's table, on a small source made from it.

A new wrapper needs its row in ``NAMES``. What one has of its own, such as a bare language model, is
in ``test_kimi_k25.py`` and its like.
"""

from pathlib import Path

import pytest
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
from wrapper_runs import build

from vllm_eagle3_patch.ground.errors import UnsupportedError
from vllm_eagle3_patch.ground.family import FAMILY, FamilyModel, LanguageModel
from vllm_eagle3_patch.patches._discovery import all_patches
from vllm_eagle3_patch.patches.multimodal_image_token import MultimodalImageToken
from vllm_eagle3_patch.patches.wrappers import PATCHES, WRAPPERS
from vllm_eagle3_patch.vllm_source.paths import INTERFACES, REGISTRY
from vllm_eagle3_patch.vllm_source.registry import Registry
from vllm_eagle3_patch.vllm_source.sources import Sources, parse
from vllm_eagle3_patch.vllm_source.target_classes import Targets

# What each imports and is, as in the last release that lacks the interface.
NAMES = {
    "deepseek-ocr": "SupportsLoRA, SupportsMultiModal, SupportsPP",
    "deepseek-ocr2": "MultiModalEmbeddings, SupportsLoRA, SupportsMultiModal, SupportsPP",
    "deepseek-vl2": "MultiModalEmbeddings, SupportsMultiModal, SupportsPP",
    "dots3-note": "MultiModalEmbeddings, SupportsMultiModal, SupportsPP",
    "kimi-k25": "SupportsMultiModal, SupportsPP",
    "kimi-vl": "SupportsLoRA, SupportsMultiModal, SupportsPP",
    "pixtral": "MultiModalEmbeddings, SupportsLoRA, SupportsMultiModal, SupportsPP",
}

LANGUAGE_MODEL = (
    "        self.language_model = init_vllm_registered_model(vllm_config=vllm_config)\n"
)
SOURCE = (
    """from vllm.model_executor.models.interfaces import (
    {imports},
)


class {owner}({bases}):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
"""
    + LANGUAGE_MODEL
    + """
{methods}    def forward(self, input_ids):
        return self.language_model(input_ids)
"""
)
METHODS = """\
    # vllm-eagle3-patch: {patch}
    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.language_model.set_aux_hidden_state_layers(layers)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.language_model.get_eagle3_aux_hidden_state_layers()

"""


def source(patch: str, *, base: bool = False, methods: bool = False) -> str:
    """A look-alike of one wrapper, with what the patch adds or without."""
    names = NAMES[patch].split(", ")
    bases = ["nn.Module", *(name for name in names if name != "MultiModalEmbeddings")]
    if base:
        names.insert(names.index("SupportsMultiModal"), "SupportsEagle3")
        bases.append("SupportsEagle3")
    return SOURCE.format(
        imports=",\n    ".join(names),
        owner=WRAPPERS[patch].owner,
        bases=", ".join(bases),
        methods=METHODS.format(patch=patch) if methods else "",
    )


def before(patch: str) -> str:
    return source(patch)


def after(patch: str) -> str:
    return source(patch, base=True, methods=True)


def test_every_wrapper_is_tested_here() -> None:
    assert set(NAMES) == set(WRAPPERS), "a row in NAMES for each wrapper of ground/family.py"


# Its class


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("patch", NAMES)
def test_before_and_after(patch: str, layout: Layout) -> None:
    check_patched(PATCHES[patch](), layout(before(patch)), layout(after(patch)))


@pytest.mark.parametrize("patch", NAMES)
def test_a_file_indented_with_tabs(patch: str) -> None:
    check_tabs(PATCHES[patch](), before(patch), after(patch))


@pytest.mark.parametrize("patch", NAMES)
def test_as_vllm_does_it_itself_is_left_alone(patch: str) -> None:
    """As Pixtral from 0.19.0 on: it asks its language model first."""
    first = "        self._require_language_model_eagle3()\n"
    setter = "        self.language_model.set_aux"
    marker = f"    # vllm-eagle3-patch: {patch}\n"
    native = changed(after(patch), (setter, first + setter), (marker, ""))
    check_unchanged(PATCHES[patch](), native)


@pytest.mark.parametrize("patch", NAMES)
def test_without_the_protocol_the_methods_are_all(patch: str) -> None:
    """As up to 0.10.0, where the model runner calls them by name."""
    expected = source(patch, methods=True).encode()
    for content in (before(patch).encode(), expected):
        assert PATCHES[patch]().apply(content, "wrapper.py", protocol=False) == expected


@pytest.mark.parametrize("patch", NAMES)
def test_half_of_the_patch_done_by_hand_is_refused(patch: str) -> None:
    refusal(PATCHES[patch](), source(patch, base=True))
    refusal(PATCHES[patch](), source(patch, methods=True))


NO_IMPORT = ("import of SupportsMultiModal without SupportsEagle3", "the module", 0)
ONE_LANGUAGE_MODEL = ("self.language_model = ...(...)", "{owner}.__init__")
FORWARD = "    def forward("

REFUSED: dict[str, tuple[Change, tuple[str, str, int]]] = {
    "import gone": (("    SupportsMultiModal,\n", "    SupportsQuant,\n"), NO_IMPORT),
    "protocol beside it renamed": (("Modal,\n", "Media,\n"), NO_IMPORT),
    "class renamed": (("class ", "class Other"), ("class {owner}", "the module", 0)),
    "class split": (
        (FORWARD, f"\nclass Runner(Other):\n{FORWARD}"),
        ("def forward", "{owner}", 0),
    ),
    "constructor inherited": (
        ("    def __init__(", "    def setup("),
        ("def __init__", "{owner}", 0),
    ),
    "language model elsewhere": (
        ("self.language_model = init", "self.text_model = init"),
        (*ONE_LANGUAGE_MODEL, 0),
    ),
    "language model twice": ((LANGUAGE_MODEL, LANGUAGE_MODEL * 2), (*ONE_LANGUAGE_MODEL, 2)),
}


@pytest.mark.parametrize(("change", "expected"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("patch", NAMES)
def test_unknown_source_is_refused(
    patch: str, change: Change, expected: tuple[str, str, int]
) -> None:
    anchor, where, found = expected
    owner = WRAPPERS[patch].owner
    assert refusal(PATCHES[patch](), changed(before(patch), change)) == (
        *(anchor.format(owner=owner), where.format(owner=owner), found),
    )


@pytest.mark.parametrize("patch", NAMES)
def test_ids_go_to_the_language_model(patch: str) -> None:
    wrapper = build(after(patch), WRAPPERS[patch].owner)
    assert wrapper.get_eagle3_aux_hidden_state_layers() == (2, 30, 58)
    wrapper.set_aux_hidden_state_layers((7,))
    assert wrapper.language_model.model.captured == (7,)


def test_a_file_without_the_class_does_not_hold() -> None:
    assert not any(patch().holds(parse(b"class Other: pass", "")) for patch in PATCHES.values())


def test_the_interface_on_a_wrapper_without_a_constructor_holds() -> None:
    inherited = changed(after("kimi-k25"), ("    def __init__(", "    def setup("))
    assert PATCHES["kimi-k25"]().holds(parse(inherited.encode(), ""))


# Its entry


@pytest.mark.parametrize("patch", NAMES)
def test_the_file_where_there_is_one_and_its_language_model(patch: str, tmp_path: Path) -> None:
    """Pixtral is older than Mistral-Large-3, the one language model of the family it can hold."""
    path, inner = WRAPPERS[patch].path, WRAPPERS[patch].language_model.path
    found = [
        PATCHES[patch]().paths(Sources(tmp_path, dict.fromkeys(files, b"")))
        for files in ((), (path,), (inner,), (path, inner))
    ]
    assert found == [(), (), (), (path,)]


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
    deepseek = {patch.wrapper.language_model.path: b""}
    path = patch.wrapper.path
    stock = Sources(tmp_path, {path: before("deepseek-ocr").encode(), **deepseek})
    assert patch.missing(stock, unlimited)
    protocol = {INTERFACES: b"class SupportsEagle3(Protocol):"}
    done = Sources(tmp_path, {path: after("deepseek-ocr").encode(), **deepseek, **protocol})
    assert not patch.missing(done, unlimited)


MODELS = {model.architecture: model for model in FAMILY if model.wrapper is not None}

PROTOCOL = """
class SupportsEagle3(Protocol):
    def set_aux_hidden_state_layers(self, layers):
        self.layers = layers
    def get_eagle3_aux_hidden_state_layers(self):
        return (2, 30, 58)
"""


def around(language_model: LanguageModel, name: str, bases: str, architecture: str) -> Sources:
    """An installation that ships a wrapper around a language model with this name and bases."""
    dotted = language_model.path.removesuffix(".py").replace("/", ".")
    wrapper = f"class Wrapper(SupportsMultiModal):\n    inner = '{dotted}'\n"
    files = {
        REGISTRY: f"_MODELS = {{'{architecture}': ('vllm.wrapper', 'Wrapper')}}\n",
        INTERFACES: PROTOCOL,
        "vllm/wrapper.py": wrapper,
        language_model.path: f"class {name}({bases}): pass\n",
    }
    return Sources(Path("/nowhere"), {path: text.encode() for path, text in files.items()})


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_doctor_reads_the_language_model_of_the_entry(model: FamilyModel) -> None:
    assert model.wrapper is not None
    place = model.wrapper.language_model
    for bases, expected in (("SupportsEagle3", True), ("Module", False)):
        sources = around(place, place.name, bases, model.architecture)
        found = Targets(sources, Registry(sources)).read(model.architecture)
        assert found is not None
        assert (found.wrapper, found.language_model) == (True, expected)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_language_model_that_is_not_where_the_entry_says_is_an_error(model: FamilyModel) -> None:
    assert model.wrapper is not None
    place = model.wrapper.language_model
    sources = around(place, "Renamed", "SupportsEagle3", model.architecture)
    with pytest.raises(UnsupportedError, match=f"{place.path} has no class {place.name}, "):
        Targets(sources, Registry(sources)).read(model.architecture)


# Its image token

PROPOSER = """class Proposer:
    def load_model(self, target_model):
        if self.get_model_name(target_model) == "SomeVL":
            self.model.config.image_token_index = target_model.config.image_token_id
{branch}        else:
            self.model.config.image_token_index = target_model.config.image_token_index
"""
BRANCH = """\
        # vllm-eagle3-patch: multimodal-image-token
        elif self.get_model_name(target_model) == "{architecture}":
            self.model.config.image_token_index = {image_token}
"""


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_proposer_reads_its_image_token_where_the_entry_says(model: FamilyModel) -> None:
    assert model.wrapper is not None
    token = model.wrapper.image_token
    stock = PROPOSER.format(branch="")
    if token is None:
        check_unchanged(MultimodalImageToken(), stock, [model])
        return
    branch = BRANCH.format(architecture=model.architecture, image_token=token)
    expected = PROPOSER.format(branch=branch).encode()
    check_patched(MultimodalImageToken(), stock.encode(), expected, [model])
