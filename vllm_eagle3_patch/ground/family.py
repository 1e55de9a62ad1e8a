"""The DeepSeek-V2 family: what vLLM's registry calls its models, and what each one needs.

A model belongs to it if its class is ``DeepseekV2ForCausalLM`` or derives from it, or holds such a
class (or a bare ``DeepseekV2Model``) as its language model. Not in it, although they come near:

- draft models (``Eagle...``, ``...MTP``), which are no targets, and the embedding model
  ``DeepseekV3BidirectionalModel`` (0.29.0 on), which does not generate;
- models that take over single layers and have a model class of their own: ``Glm4MoeLite``,
  ``AXK1``, ``LongcatFlash``, ``HYV4``, ``Glm5Next``, ``KimiLinear``, ``DeepseekV4``;
- DeepSeek V1 (``DeepseekForCausalLM``): ``deepseek.py`` up to 0.11.0, and a subclass since. In
  those releases DeepSeek-VL2 checkpoints with ``use_mla: false`` hold it as their language model;
- wrappers that take whatever language model a config names (LLaVA, InternVL, Mistral 3 and others):
  nothing in vLLM names one of the family there, except for Pixtral (below).
"""

from __future__ import annotations

from typing import NamedTuple

MODELS = "vllm/model_executor/models"


class LanguageModel(NamedTuple):
    """The class of a wrapper's language model, patched or native.

    Attributes:
        path: Its file, without which a release does not ship the combination.
        name: The class.
    """

    path: str
    name: str


class Wrapper(NamedTuple):
    """A multimodal model around a language model of the family.

    Attributes:
        patch: The name of the patch that makes its class implement the interface.
        owner: The class that is patched: the architecture's own, or the one that it derives from.
        path: That class's file.
        language_model: What it hands the calls on to.
        image_token: Where it keeps its image token's id, for the proposer, which knows it as
            ``target_model``; None if ``target_model.config.image_token_index`` is right.
    """

    patch: str
    owner: str
    path: str
    language_model: LanguageModel
    image_token: str | None


class Columns(NamedTuple):
    """What a model's column is called.

    Attributes:
        readme: In README's support table; models of one name share a column.
        matrix: On the screen of ``matrix``.
        narrow: The same in a terminal that is too narrow, where cells are first letters.
    """

    readme: str
    matrix: str
    narrow: str


class FamilyModel(NamedTuple):
    """A target model of the family.

    Attributes:
        architecture: The name in a checkpoint's ``architectures`` and in vLLM's registry.
        columns: What its columns are called.
        model_types: The ``model_type`` values of the configs that name this architecture.
        text_types: What vLLM compares with its EAGLE-3 allowlist: ``hf_text_config.model_type``.
            Empty for a model that no release with an allowlist ships.
        requires: The names of the patches whose postconditions all hold where EAGLE-3 works.
        sparse: Whether it uses DeepSeek Sparse Attention.
        wrapper: What is patched beside the language model, for a multimodal model.
    """

    architecture: str
    columns: Columns
    model_types: tuple[str, ...]
    text_types: tuple[str, ...]
    requires: tuple[str, ...]
    sparse: bool = False
    wrapper: Wrapper | None = None


_TEXT = ("deepseek-v2", "draft-attention-metadata", "eagle3-allowlist")
_SPARSE = (*_TEXT, "deepseek-v32")

_DEEPSEEK_V2 = LanguageModel(f"{MODELS}/deepseek_v2.py", "DeepseekV2ForCausalLM")


def _wrapping(
    architecture: str,
    columns: Columns,
    model_types: tuple[str, ...],
    text_types: tuple[str, ...],
    wrapper: Wrapper,
    *,
    sparse: bool = False,
) -> FamilyModel:
    """A multimodal model: it needs what its language model needs, and the interface itself."""
    token = () if wrapper.image_token is None else ("multimodal-image-token",)
    needs = (*(_SPARSE if sparse else _TEXT), wrapper.patch, *token)
    return FamilyModel(architecture, columns, model_types, text_types, needs, sparse, wrapper)


_DEEPSEEK_OCR = Wrapper(
    "deepseek-ocr",
    "DeepseekOCRForCausalLM",
    f"{MODELS}/deepseek_ocr.py",
    _DEEPSEEK_V2,
    "target_model.image_token_id",
)

FAMILY: tuple[FamilyModel, ...] = (
    FamilyModel(
        "DeepseekV2ForCausalLM",
        Columns("DeepSeek-V2, V3, R1, Kimi-K2", "V2", "V2"),
        ("deepseek_v2",),
        ("deepseek_v2",),
        _TEXT,
    ),
    FamilyModel(
        "DeepseekV3ForCausalLM",
        Columns("DeepSeek-V2, V3, R1, Kimi-K2", "V3,K2", "V3"),
        ("deepseek_v3", "kimi_k2"),
        ("deepseek_v3", "kimi_k2"),
        _TEXT,
    ),
    FamilyModel(
        "DeepseekV32ForCausalLM",
        Columns("DeepSeek-V3.2", "V3.2", "32"),
        ("deepseek_v32",),
        ("deepseek_v32",),
        _SPARSE,
        sparse=True,
    ),
    FamilyModel(
        "GlmMoeDsaForCausalLM",
        Columns("GLM (DSA)", "GLM", "GLM"),
        ("glm_moe_dsa",),
        ("glm_moe_dsa",),
        _SPARSE,
        sparse=True,
    ),
    # Mistral-Large-3 carries DeepSeek-V3's model type (vllm/model_executor/models/
    # mistral_large_3.py, 0.12.0: the class derives from DeepseekV3ForCausalLM).
    FamilyModel(
        "MistralLarge3ForCausalLM",
        Columns("Mistral-Large-3", "ML3", "ML"),
        ("deepseek_v3",),
        ("deepseek_v3",),
        _TEXT,
    ),
    _wrapping(
        "KimiK25ForConditionalGeneration",
        Columns("Kimi-K2.5", "K2.5", "K2"),
        ("kimi_k25",),
        ("kimi_k2", "deepseek_v3"),
        Wrapper(
            "kimi-k25",
            "KimiK25ForConditionalGeneration",
            f"{MODELS}/kimi_k25.py",
            _DEEPSEEK_V2,
            "target_model.config.media_placeholder_token_id",
        ),
    ),
    _wrapping(
        "KimiVLForConditionalGeneration",
        Columns("Kimi-VL, DeepSeek-VL2", "KimiVL", "KV"),
        ("kimi_vl",),
        ("deepseek_v2", "deepseek_v3"),
        Wrapper(
            "kimi-vl",
            "KimiVLForConditionalGeneration",
            f"{MODELS}/kimi_vl.py",
            _DEEPSEEK_V2,
            "target_model.config.media_placeholder_token_id",
        ),
    ),
    _wrapping(
        "DeepseekVLV2ForCausalLM",
        Columns("Kimi-VL, DeepSeek-VL2", "VL2", "VL"),
        ("deepseek_vl_v2",),
        ("deepseek_v2",),
        # The config has no id of the token: the tokenizer gives it (deepseek_vl2.py, __init__).
        Wrapper(
            "deepseek-vl2",
            "DeepseekVLV2ForCausalLM",
            f"{MODELS}/deepseek_vl2.py",
            _DEEPSEEK_V2,
            "target_model.image_token_id",
        ),
    ),
    # The OCR models' checkpoints have plain multi-head attention; DeepseekV2Model builds that too.
    _wrapping(
        "DeepseekOCRForCausalLM",
        Columns("DeepSeek-OCR, OCR 2, Unlimited-OCR", "OCR", "O"),
        ("deepseek_ocr",),
        ("deepseek_v2",),
        _DEEPSEEK_OCR,
    ),
    _wrapping(
        "DeepseekOCR2ForCausalLM",
        Columns("DeepSeek-OCR, OCR 2, Unlimited-OCR", "OCR2", "O2"),
        ("deepseek_ocr2",),
        ("deepseek_v2",),
        Wrapper(
            "deepseek-ocr2",
            "DeepseekOCR2ForCausalLM",
            f"{MODELS}/deepseek_ocr2.py",
            _DEEPSEEK_V2,
            "target_model.image_token_id",
        ),
    ),
    # Derives from DeepseekOCRForCausalLM and adds nothing to it (unlimited_ocr.py, 0.25.0).
    _wrapping(
        "UnlimitedOCRForCausalLM",
        Columns("DeepSeek-OCR, OCR 2, Unlimited-OCR", "UOCR", "UO"),
        ("unlimited-ocr",),
        ("deepseek_v2",),
        _DEEPSEEK_OCR,
    ),
    # Mistral-Large-3 with its vision encoder, as it is published. Pixtral takes any language
    # model; here only that one counts (transformers_utils/configs/mistral.py, 0.12.0 on).
    _wrapping(
        "PixtralForConditionalGeneration",
        Columns("Mistral-Large-3 with vision", "ML3-VL", "MV"),
        ("pixtral",),
        ("deepseek_v3",),
        Wrapper(
            "pixtral",
            "PixtralForConditionalGeneration",
            f"{MODELS}/pixtral.py",
            LanguageModel(f"{MODELS}/mistral_large_3.py", "MistralLarge3ForCausalLM"),
            "target_model.config.vision_config.image_token_id",
        ),
    ),
    # Its language model derives from NVIDIA's DeepseekV32ForCausalLM on every platform
    # (vllm/models/dots3_note/nvidia/model.py, 0.28.0 on; there is no allowlist any more).
    _wrapping(
        "Dots3NoteForCausalLM",
        Columns("Dots3-Note", "Dots3", "D3"),
        ("dots3_note",),
        (),
        Wrapper(
            "dots3-note",
            "Dots3NoteForCausalLM",
            "vllm/models/dots3_note/nvidia/multimodal.py",
            LanguageModel(
                "vllm/models/dots3_note/nvidia/model.py", "Dots3NoteLanguageModelForCausalLM"
            ),
            None,
        ),
        sparse=True,
    ),
)

TEXT_TYPES: tuple[str, ...] = tuple(
    sorted({text_type for m in FAMILY for text_type in m.text_types or m.model_types})
)
"""Every type of their text models; Dots3-Note's config is its text model's too."""


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
