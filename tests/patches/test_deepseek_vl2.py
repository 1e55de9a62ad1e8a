"""``deepseek-vl2`` on look-alikes of its two shapes, before and after, and run."""

from typing import Any

import pytest
from libcst.codemod import CodemodTest
from patch_checks import LAYOUTS, Layout, changed, check_patched, check_unchanged, refusal
from wrapper_runs import DeepseekV2ForCausalLM, build

from vllm_eagle3_patch.patches.wrappers import PATCHES

PATCH = PATCHES["deepseek-vl2"]()
OWNER = "DeepseekVLV2ForCausalLM"

METHODS = """\
    # vllm-eagle3-patch: deepseek-vl2
    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.language_model.set_aux_hidden_state_layers(layers)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.language_model.get_eagle3_aux_hidden_state_layers()

"""

# From vLLM 0.8.5 to 0.11.0, in yapf's layout.
OLD = '''"""A DeepSeek-VL2 look-alike."""
from torch import nn

from .interfaces import MultiModalEmbeddings, SupportsMultiModal, SupportsPP
from .utils import (AutoWeightsLoader, WeightsMapper,
                    init_vllm_registered_model)


class DeepseekVLV2ForCausalLM(nn.Module, SupportsMultiModal, SupportsPP):

    hf_to_vllm_mapper = dict({
        "language.": "language_model.",
    })

    def __init__(self, *, vllm_config, prefix: str = ""):
        super().__init__()
        self.image_token_id = vllm_config.vocab["<image>"]
        if vllm_config.topk_method == "noaux_tc":
            architectures = ["DeepseekV3ForCausalLM"]
        elif not vllm_config.use_mla:
            architectures = ["DeepseekForCausalLM"]
        else:
            architectures = ["DeepseekV2ForCausalLM"]

        self.language_model = init_vllm_registered_model(
            vllm_config=vllm_config,
            prefix=prefix,
            architectures=architectures,
        )

    def get_language_model(self):
        return self.language_model

    def forward(self,
                input_ids,
                **kwargs: object):
        return self.language_model(input_ids)
'''
OLD_AFTER = changed(
    OLD,
    ("import MultiModalEmbeddings, ", "import MultiModalEmbeddings, SupportsEagle3, "),
    ("SupportsPP):", "SupportsPP, SupportsEagle3):"),
    ("    def forward(self,", f"{METHODS}    def forward(self,"),
)

# From 0.15.0 on; 0.33.0 imports one name a line.
NEW = '''"""A DeepSeek-VL2 look-alike."""

from torch import nn

from .interfaces import (
    MultiModalEmbeddings,
    SupportsLoRA,
    SupportsMultiModal,
    SupportsPP,
)


class DeepseekVLV2ForCausalLM(
    nn.Module, SupportsMultiModal, SupportsPP, SupportsLoRA
):
    def __init__(self, *, vllm_config, prefix: str = ""):
        super().__init__()
        self.image_token_id: int = vllm_config.vocab["<image>"]
        with self._mark_tower_model(vllm_config, "image"):
            self.vision = None
        with self._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(
                vllm_config=vllm_config,
                prefix=prefix,
            )

    def forward(self, input_ids, **kwargs: object):
        return self.language_model(input_ids)
'''
NEW_AFTER = changed(
    NEW,
    ("    SupportsMultiModal,\n", "    SupportsEagle3,\n    SupportsMultiModal,\n"),
    ("SupportsPP, SupportsLoRA\n", "SupportsPP, SupportsLoRA, SupportsEagle3\n"),
    ("    def forward(self,", f"{METHODS}    def forward(self,"),
)

SHAPES = {"0.8.5": (OLD, OLD_AFTER), "0.15.0": (NEW, NEW_AFTER)}


class TestBeforeAndAfter(CodemodTest):
    TRANSFORM = PATCHES["deepseek-vl2"].kind

    def test_the_old_layout(self) -> None:
        self.assertCodemod(OLD, OLD_AFTER)

    def test_the_language_model_inside_a_with(self) -> None:
        self.assertCodemod(NEW, NEW_AFTER)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("before", "after"), SHAPES.values(), ids=SHAPES)
def test_bytes_around_the_change_are_kept(before: str, after: str, layout: Layout) -> None:
    check_patched(PATCH, layout(before), layout(after))


def test_without_the_protocol_the_methods_are_all() -> None:
    result = PATCH.apply(OLD.encode(), "deepseek_vl2.py", protocol=False).decode()
    assert result == changed(OLD, ("    def forward(self,", f"{METHODS}    def forward(self,"))


@pytest.mark.parametrize(("before", "after"), SHAPES.values(), ids=SHAPES)
def test_as_we_write_it_is_left_alone(before: str, after: str) -> None:
    check_unchanged(PATCH, after)


def test_a_language_model_elsewhere_is_refused() -> None:
    moved = changed(NEW, ("self.language_model = init", "self.text_model = init"))
    anchor = "self.language_model = ...(...)"
    assert refusal(PATCH, moved) == (anchor, f"{OWNER}.__init__", 0)


def run(source: str, **config: object) -> Any:
    options = {"vocab": {"<image>": 128815}, "topk_method": "greedy", "use_mla": True, **config}
    return build(source, OWNER, **options)


@pytest.mark.parametrize(("before", "after"), SHAPES.values(), ids=SHAPES)
def test_ids_go_to_the_language_model(before: str, after: str) -> None:
    wrapper = run(after)
    assert wrapper.get_eagle3_aux_hidden_state_layers() == (2, 30, 58)
    wrapper.set_aux_hidden_state_layers((0, 3))
    assert wrapper.get_language_model().model.captured == (0, 3)
    assert isinstance(wrapper.get_language_model(), DeepseekV2ForCausalLM)
    assert wrapper.image_token_id == 128815, "what multimodal-image-token reads"


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        ({"topk_method": "noaux_tc"}, "DeepseekV3ForCausalLM"),
        ({"use_mla": False}, "DeepseekForCausalLM"),
    ],
)
def test_the_constructor_chooses_as_it_did(config: dict[str, object], architecture: str) -> None:
    assert run(OLD_AFTER, **config).language_model.architectures == [architecture]
