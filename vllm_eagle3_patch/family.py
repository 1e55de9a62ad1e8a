"""The DeepSeek-V2 family: what vLLM's registry calls its models, and what each one needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FamilyModel:
    """A target model of the family.

    Attributes:
        architecture: The name in a checkpoint's ``architectures`` and in vLLM's registry.
        model_types: The ``model_type`` values of the configs that name this architecture.
        text_types: What vLLM compares with its EAGLE-3 allowlist: ``hf_text_config.model_type``.
        requires: The names of the patches whose postconditions all hold where EAGLE-3 works.
        sparse: Whether it uses DeepSeek Sparse Attention.
    """

    architecture: str
    model_types: tuple[str, ...]
    text_types: tuple[str, ...]
    requires: tuple[str, ...]
    sparse: bool = False


_TEXT = ("deepseek-v2", "eagle3-allowlist")

FAMILY: tuple[FamilyModel, ...] = (
    FamilyModel("DeepseekV2ForCausalLM", ("deepseek_v2",), ("deepseek_v2",), _TEXT),
    FamilyModel(
        "DeepseekV3ForCausalLM", ("deepseek_v3", "kimi_k2"), ("deepseek_v3", "kimi_k2"), _TEXT
    ),
    FamilyModel("DeepseekV32ForCausalLM", ("deepseek_v32",), ("deepseek_v32",), _TEXT, sparse=True),
    FamilyModel("GlmMoeDsaForCausalLM", ("glm_moe_dsa",), ("glm_moe_dsa",), _TEXT, sparse=True),
    # Mistral-Large-3 carries DeepSeek-V3's model type (vllm/model_executor/models/
    # mistral_large_3.py, 0.12.0: the class derives from DeepseekV3ForCausalLM).
    FamilyModel("MistralLarge3ForCausalLM", ("deepseek_v3",), ("deepseek_v3",), _TEXT),
    FamilyModel(
        "KimiK25ForConditionalGeneration",
        ("kimi_k25",),
        ("kimi_k2", "deepseek_v3"),
        (*_TEXT, "kimi-k25", "multimodal-image-token"),
    ),
    FamilyModel(
        "KimiVLForConditionalGeneration",
        ("kimi_vl",),
        ("deepseek_v2", "deepseek_v3"),
        (*_TEXT, "kimi-vl", "multimodal-image-token"),
    ),
    FamilyModel(
        "DeepseekVLV2ForCausalLM",
        ("deepseek_vl_v2",),
        ("deepseek_v2",),
        (*_TEXT, "deepseek-vl2", "multimodal-image-token"),
    ),
)

MODEL_TYPES: tuple[str, ...] = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "kimi_k2",
    "kimi_k25",
    "kimi_vl",
    "deepseek_vl_v2",
    "glm_moe_dsa",
)
"""Every model type of the family. Never ``deepseek`` (DeepSeek V1): most contain it."""


def select_models(names: tuple[str, ...]) -> tuple[FamilyModel, ...]:
    """The models that an architecture or a model type names; all of them without names.

    Raises:
        KeyError: A name that belongs to no model of the family.
    """
    for name in names:
        if not any(name == m.architecture or name in m.model_types for m in FAMILY):
            raise KeyError(name)
    if not names:
        return FAMILY
    return tuple(
        m for m in FAMILY if m.architecture in names or any(t in names for t in m.model_types)
    )
