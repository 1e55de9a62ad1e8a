"""``deepseek-v32``: each platform's file has to collect, and says so if it does not."""

from pathlib import Path

import pytest
from patch_checks import PATH, Change, changed, check_unchanged, refusal

from vllm_eagle3_patch.ground.family import select_models
from vllm_eagle3_patch.patches.deepseek_v32 import DeepseekV32, not_collecting
from vllm_eagle3_patch.vllm_source.paths import DEEPSEEK_V32, REGISTRY
from vllm_eagle3_patch.vllm_source.sources import Sources, parse

PATCH = DeepseekV32()
NVIDIA = "vllm/models/deepseek_v32/nvidia/model.py"
AMD = "vllm/models/deepseek_v32/amd/model.py"

COLLECTS = """\
            if idx in self.aux_hidden_state_layers:
                aux_hidden_states.append(hidden_states + residual)
"""
RETURNS = """\
        if len(aux_hidden_states) > 0:
            return hidden_states, aux_hidden_states
"""
MODEL_CLS = "    model_cls = DeepseekV32Model\n"
# As in vLLM 0.27.0, and in 0.31.0 on AMD.
SOURCE = f'''"""A look-alike of a platform's DeepSeek-V3.2."""

import torch
from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM


class DeepseekV32Model(torch.nn.Module):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        self.aux_hidden_state_layers = tuple[int, ...]()

    def forward(self, input_ids, positions, intermediate_tensors=None):
        hidden_states = self.embed_input_ids(input_ids)
        residual = None
        aux_hidden_states = []
        for idx, layer in enumerate(
            islice(self.layers, self.start_layer, self.end_layer),
            start=self.start_layer,
        ):
{COLLECTS}\
            hidden_states, residual = layer(positions, hidden_states, residual)
        hidden_states, _ = fused_allreduce_rms_norm(hidden_states, residual, self.norm)
{RETURNS}\
        return hidden_states


class DeepseekV32ForCausalLM(DeepseekV2ForCausalLM):
    """Serves V3.2 and GLM."""

{MODEL_CLS}\
'''
ANCHOR = (
    "a forward that collects aux hidden states, as in every published release",
    "DeepseekV32ForCausalLM with DeepseekV32Model",
    0,
)

LACKING: dict[str, list[Change]] = {
    "never collects": [(COLLECTS, ""), (RETURNS, "")],
    "collects and drops": [(RETURNS, "")],
    "returns what it never collects": [(COLLECTS, "")],
    "collects after the loop": [
        (COLLECTS, ""),
        (RETURNS, COLLECTS.replace("    " * 3, "    " * 2)),
    ],
    "model split off": [("class DeepseekV32Model(", "class DeepseekV32Backbone(")],
    "outer class with another model": [(MODEL_CLS, "    model_cls = DeepseekV2Model\n")],
    "outer class with no model of its own": [(MODEL_CLS, "    pass\n")],
    "outer class without the interface": [
        ("ForCausalLM(DeepseekV2ForCausalLM)", "ForCausalLM(torch.nn.Module)")
    ],
    "no outer class": [("class DeepseekV32ForCausalLM(", "class DeepseekV33ForCausalLM(")],
}


def test_a_file_that_collects_is_left_alone() -> None:
    check_unchanged(PATCH, SOURCE)


def test_one_that_allows_for_no_residual_too() -> None:
    """As on NVIDIA from 0.28.0 on."""
    value = "hidden_states if residual is None else hidden_states + residual"
    check_unchanged(PATCH, changed(SOURCE, ("append(hidden_states + residual", f"append({value}")))


@pytest.mark.parametrize("changes", LACKING.values(), ids=LACKING)
def test_a_file_that_does_not_collect_is_refused(changes: list[Change]) -> None:
    assert refusal(PATCH, changed(SOURCE, *changes)) == ANCHOR


def test_the_error_names_the_platforms_file() -> None:
    with pytest.raises(Exception, match=r"deepseek_v32/amd/model\.py") as caught:
        PATCH.apply(b"class Other: pass\n", AMD)
    assert "deepseek-v32" in str(caught.value)


# Which files are asked

LEGACY = '_MODELS = {"DeepseekV32ForCausalLM": ("deepseek_v2", "DeepseekV3ForCausalLM")}\n'
MOVED = (
    '_MODELS = {"DeepseekV32ForCausalLM": ("vllm.models.deepseek_v32", "DeepseekV32ForCausalLM")}\n'
)
ONLY_DRAFT = '_MODELS = {"DeepseekV32MTPModel": ("vllm.models.deepseek_v32", "DeepseekV32MTP")}\n'
NVIDIA_ONLY = """
if current_platform.is_cuda():
    from .nvidia.model import DeepseekV32ForCausalLM
    from .nvidia.model import DeepseekV32ForCausalLM as GlmMoeDsaForCausalLM
    from .nvidia.mtp import DeepseekV32MTP
else:
    from vllm.model_executor.models.deepseek_v2 import (
        DeepseekV3ForCausalLM as DeepseekV32ForCausalLM,
    )
"""
BOTH = (
    NVIDIA_ONLY
    + "if current_platform.is_rocm():\n    from .amd.model import DeepseekV32ForCausalLM\n"
)
DOTS3_NOTE = "vllm/models/dots3_note/nvidia/model.py"
NOTE = """
from vllm.models.deepseek_v32.nvidia.model import (
    DeepseekV32DecoderLayer,
    DeepseekV32ForCausalLM,
    DeepseekV32Model,
)
"""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({REGISTRY: LEGACY}, ()),
        ({REGISTRY: LEGACY, DEEPSEEK_V32: NVIDIA_ONLY}, ()),
        ({REGISTRY: ONLY_DRAFT, DEEPSEEK_V32: NVIDIA_ONLY}, ()),
        ({REGISTRY: MOVED}, ()),
        ({REGISTRY: MOVED, DEEPSEEK_V32: NVIDIA_ONLY}, (NVIDIA,)),
        ({REGISTRY: MOVED, DEEPSEEK_V32: BOTH}, (NVIDIA, AMD)),
        ({REGISTRY: LEGACY, DEEPSEEK_V32: BOTH, DOTS3_NOTE: NOTE}, (NVIDIA,)),
        ({REGISTRY: MOVED, DEEPSEEK_V32: BOTH, DOTS3_NOTE: NOTE}, (NVIDIA, AMD)),
    ],
    ids=[
        "no registry",
        "before 0.25.0",
        "0.25.0: there, and not registered",
        "only the draft model is registered",
        "registered, and not there",
        "0.29.0: NVIDIA only, whatever else is there",
        "0.31.0: both",
        "0.28.0: only Dots3-Note uses it",
        "Dots3-Note uses what is asked already",
    ],
)
def test_the_files_that_a_model_is_taken_from(
    tmp_path: Path, files: dict[str, str], expected: tuple[str, ...]
) -> None:
    sources = Sources(tmp_path, {path: text.encode() for path, text in files.items()})
    assert PATCH.paths(sources) == expected


@pytest.mark.parametrize("lacking", [NVIDIA, AMD])
def test_a_model_is_ready_only_where_every_platform_collects(tmp_path: Path, lacking: str) -> None:
    files = {REGISTRY: MOVED, DEEPSEEK_V32: BOTH, NVIDIA: SOURCE, AMD: SOURCE}
    (v32,) = select_models(("deepseek_v32",))
    sources = Sources(tmp_path, {path: text.encode() for path, text in files.items()})
    assert not PATCH.missing(sources, v32)
    broken = changed(SOURCE, (COLLECTS, ""))
    without = sources.with_overlay({lacking: broken.encode()})
    assert PATCH.missing(without, v32)
    assert not_collecting(without, v32) == (lacking,)


def test_only_the_files_that_a_model_is_taken_from_count(tmp_path: Path) -> None:
    """GLM's variant is not registered there here, and Dots3-Note uses NVIDIA's only."""
    broken = changed(SOURCE, (COLLECTS, ""))
    files = {REGISTRY: MOVED, DEEPSEEK_V32: BOTH, DOTS3_NOTE: NOTE, NVIDIA: SOURCE, AMD: broken}
    sources = Sources(tmp_path, {path: text.encode() for path, text in files.items()})
    names = ("deepseek_v32", "glm_moe_dsa", "dots3_note")
    lacking = [PATCH.missing(sources, select_models((name,))[0]) for name in names]
    assert lacking == [True, False, False]


def test_no_model_lacks_it_where_there_are_no_such_files(tmp_path: Path) -> None:
    (glm,) = select_models(("glm_moe_dsa",))
    assert not PATCH.missing(Sources(tmp_path, {REGISTRY: LEGACY.encode()}), glm)


def test_an_empty_file_does_not_hold() -> None:
    assert not PATCH.holds(parse(b"", PATH))
