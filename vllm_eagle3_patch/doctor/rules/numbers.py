"""How numbers are held: types, float16's scaling, quantization."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_eagle3_patch.doctor.finding import ERROR, INFO, WARNING, Finding, report, rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm_eagle3_patch.doctor.situation import Situation

_ROTATING = ("quarot", "spinquant", "rotation", "hadamard", "flatquant")


@rule("dtype", reports=(18, 28))
def dtype(situation: Situation) -> Iterator[Finding]:
    """The draft model was saved in another type than the target is served in; an FP8 KV cache.

    Reports 18 and 28. vLLM loads a draft model in the target's type (SpeculativeConfig).
    """
    served, own = situation.dtype, situation.draft.dtype
    if situation.eagle3 and served and own and served != own:
        yield Finding(
            "dtype",
            WARNING,
            f"the draft model was saved in {own}, and the target is served in {served}",
            f"vLLM loads the draft model in {served}: float16 and bfloat16 do not hold the same "
            "numbers, and other engines stop with an error on the mixture",
            f"use a draft model saved in {served}, or correct its config if that is what it holds",
            "dtype (torch_dtype) of both configs",
            report(18, "https://github.com/sgl-project/SpecForge/issues/348"),
        )
    cache = situation.options.kv_cache_dtype or ""
    if situation.eagle3 and cache.startswith("fp8") and situation.engine.one_page_size:
        yield Finding(
            "dtype",
            WARNING,
            f"the KV cache is {cache}, and {situation.release} gives the draft model another type",
            "an error on the draft model's KV cache",
            "use vLLM 0.11.0 or later, or --kv-cache-dtype auto",
            "--kv-cache-dtype",
            report(28, "https://github.com/vllm-project/vllm/pull/24505"),
        )


@rule("float16-scaling", reports=())
def float16_scaling(situation: Situation) -> Iterator[Finding]:
    """In float16 DeepSeek's layers scale their residual stream, and the captured states with it.

    DeepseekV2DecoderLayer.forward (vllm/model_executor/models/deepseek_v2.py): divided by
    ``routed_scaling_factor`` against overflow. No report; read in the source.
    """
    kind = situation.target_class
    scaled = kind is not None and kind.float16_scaling
    if not situation.eagle3 or not scaled or situation.dtype != "float16":
        return
    factor = situation.target.value("routed_scaling_factor")
    if factor in (None, 1, 1.0):
        return
    yield Finding(
        "float16-scaling",
        WARNING,
        f"in float16 the target divides its residual stream by routed_scaling_factor ({factor})",
        "the draft model is fed states that are smaller than those that it was trained on",
        "--dtype bfloat16",
        "--dtype, dtype of the target's config",
        "vllm/model_executor/models/deepseek_v2.py, DeepseekV2DecoderLayer.forward",
    )


@rule("quantization", reports=(47,))
def quantization(situation: Situation) -> Iterator[Finding]:
    """The target is rotated by its quantization, or the draft model gets the target's.

    Report 47; the draft model's own quantization is used from 0.11.1 on (get_draft_quant_config).
    """
    if not situation.eagle3:
        return
    config, own = situation.target.quantization, situation.draft.quantization
    if config:
        rotated = _rotated(config)
        yield Finding(
            "quantization",
            WARNING if rotated else INFO,
            f"the target is quantized ({_named(config)})"
            + (f" with a rotation of its hidden states ({rotated})" if rotated else ""),
            "a draft model that was trained on plain states gets rotated ones: length 1.07 instead "
            "of 3.09"
            if rotated
            else "none is known: NVFP4, MXFP4, INT4 and FP8 targets of this family accept well "
            "(reports, table b)",
            "use a draft model that was trained on this quantized target" if rotated else "",
            "quantization_config of the target's config",
            report(47, "https://github.com/vllm-project/vllm-ascend/pull/7038"),
        )
    kind = situation.draft_class
    if kind is None or kind.own_quantization or _named(config) == _named(own):
        return
    yield Finding(
        "quantization",
        ERROR,
        f"the target is {_named(config)} and the draft model {_named(own)}, but "
        f"{situation.release} builds the draft model's layers as the target is",
        "the draft model's weights have no place, or scales are missing: the load fails",
        "use vLLM 0.11.1 or later",
        "quantization_config of both configs",
        "get_draft_quant_config in vllm/model_executor/models/utils.py (0.11.1 on)",
    )


def _named(config: Mapping[str, object]) -> str:
    return str(config.get("quant_method", "quantized"))[:40] if config else "not quantized"


def _rotated(config: Mapping[str, object]) -> str | None:
    text = str(config).lower()
    return next((name for name in _ROTATING if name in text), None)
