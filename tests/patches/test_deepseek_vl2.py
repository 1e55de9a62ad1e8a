"""``deepseek-vl2`` on look-alikes of its two shapes, before and after, and run."""

from typing import Any

import pytest
from patch_checks import changed, check_patched
from wrapper_runs import build

from vllm_eagle3_patch.patches.wrappers import PATCHES, WRAPPERS

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


@pytest.mark.parametrize(("before", "after"), SHAPES.values(), ids=SHAPES)
def test_before_and_after(before: str, after: str) -> None:
    check_patched(PATCH, before.encode(), after.encode())


def run(source: str, **config: object) -> Any:
    options = {"vocab": {"<image>": 128815}, "topk_method": "greedy", "use_mla": True, **config}
    return build(source, OWNER, **options)


@pytest.mark.parametrize("after", [OLD_AFTER, NEW_AFTER], ids=SHAPES)
def test_the_image_token_is_where_its_patch_looks(after: str) -> None:
    assert WRAPPERS["deepseek-vl2"].image_token == "target_model.image_token_id"
    assert run(after).image_token_id == 128815


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        ({"topk_method": "noaux_tc"}, "DeepseekV3ForCausalLM"),
        ({"use_mla": False}, "DeepseekForCausalLM"),
    ],
)
def test_the_constructor_chooses_as_it_did(config: dict[str, object], architecture: str) -> None:
    assert run(OLD_AFTER, **config).language_model.architectures == [architecture]
