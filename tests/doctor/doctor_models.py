"""Checkpoints for the doctor's tests: configs written from public facts, and tiny weights.

Keys and values only, as the models' public configs have them; nothing is copied from a file. The
safetensors files hold a header and no data.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_eagle3_patch.doctor.checkpoint import Checkpoint, Weights
from vllm_eagle3_patch.doctor.finding import Finding, judged
from vllm_eagle3_patch.doctor.serve_options import ServeOptions, parse_serve
from vllm_eagle3_patch.doctor.situation import Situation
from vllm_eagle3_patch.ground import matrix
from vllm_eagle3_patch.vllm_source.engine import Engine

IDS = "eagle_aux_hidden_state_layer_ids"
Config = dict[str, Any]


def yarn(factor: float) -> Config:
    """Kimi's and DeepSeek's rotary embedding: YaRN from 4096 positions."""
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


DEEPSEEK_V3: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": yarn(40),
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
DEEPSEEK_V32: Config = {
    **DEEPSEEK_V3,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_topk": 2048,
}
GLM_5: Config = {
    **DEEPSEEK_V3,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
    "rope_scaling": None,
    "index_topk": 2048,
}
KIMI_K2: Config = {
    **DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "vocab_size": 163840,
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.827,
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
    "rope_scaling": yarn(32),
}
KIMI_K2_THINKING: Config = {
    **KIMI_K2,
    "max_position_embeddings": 262144,
    "rope_scaling": yarn(64),
    "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
}
KIMI_K25: Config = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "media_placeholder_token_id": 163605,
    "torch_dtype": "bfloat16",
    "text_config": {k: v for k, v in KIMI_K2_THINKING.items() if k != "torch_dtype"},
    "vision_config": {"model_type": "kimi_k25_vision", "patch_size": 14},
}
KIMI_K26: Config = {**KIMI_K25, "quantization_config": {"quant_method": "modelopt_fp4"}}
LLAMA_8B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
TINY: Config = {
    **DEEPSEEK_V3,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rope_scaling": None,
    "quantization_config": None,
}

LLAMA_DRAFT: Config = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "vocab_size": 163840,
    "draft_vocab_size": 32000,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def nested(*ids: int, **more: Any) -> Config:
    """An ``eagle_config`` as SpecForge writes it."""
    return {"eagle_config": {IDS: list(ids), "use_aux_hidden_state": True, **more}}


# AQ-MedAI/Kimi-K2-Instruct-eagle3 and Kimi-K25-eagle3.
AQ_K2: Config = {**LLAMA_DRAFT, **nested(2, 30, 58)}
AQ_K25: Config = {**AQ_K2, "max_position_embeddings": 262144}
# lightseekorg/kimi-k2.5-eagle3: its ids were not seen.
LIGHTSEEK_K25: Config = {**LLAMA_DRAFT, "max_position_embeddings": 262144}
# A Kimi-K2.7-Code draft model of SpecForge.
K27_CODE: Config = {**LLAMA_DRAFT, "max_position_embeddings": 262144, **nested(1, 29, 57)}
# SpecForge's template for DeepSeek-V3.
SPECFORGE_V3: Config = {
    **LLAMA_DRAFT,
    "vocab_size": 129280,
    "num_attention_heads": 56,
    "num_key_value_heads": 8,
    "max_position_embeddings": 163840,
    "torch_dtype": "float16",
    **nested(1, 29, 57),
}
MLA_DRAFT: Config = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "max_position_embeddings": 262144,
    "rope_theta": 50000.0,
    "rope_scaling": yarn(64),
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# Kimi-K2.5-Eagle3, and lightseekorg/kimi-k2.5-eagle3-mla.
MLA_K25: Config = {**MLA_DRAFT, **nested(2, 30, 58)}
# lightseekorg/kimi-k2.6-eagle3.1-mla.
MLA_31: Config = {**MLA_DRAFT, **nested(1, 29, 57), "fc_norm": True, "norm_output": True}
# nvidia/Kimi-K2-Thinking-Eagle3 as a checkpoint of type deepseek_v3.
NVIDIA: Config = {
    **MLA_DRAFT,
    "model_type": "deepseek_v3",
    "eagle_config": {
        IDS: [2, 30, 58],
        "use_aux_hidden_state": True,
        "use_last_layernorm": True,
        "use_input_layernorm_in_first_layer": True,
    },
}
# amd/Kimi-K2.5-Eagle3-FP8.
AMD_FP8: Config = {**AQ_K25, "quantization_config": {"quant_method": "quark"}}
# The speculators format.
SPECULATORS_V3: Config = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "deepseek-ai/DeepSeek-V3", "architectures": []},
    },
    "draft_vocab_size": 32000,
    "norm_before_residual": True,
    IDS: [2, 30, 58],
    "transformer_layer_config": {
        "model_type": "llama",
        "hidden_size": 7168,
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    },
}
# A draft model that says what its ids count: nothing is left to guess.
STATED: Config = {**LLAMA_DRAFT, IDS: [2, 30, 58], f"{IDS}_convention": "boundary"}

WEIGHTS: dict[str, tuple[int, ...]] = {
    "fc.weight": (7168, 3 * 7168),
    "lm_head.weight": (32000, 7168),
    "midlayer.hidden_norm.weight": (7168,),
    "norm.weight": (7168,),
    "d2t": (32000,),
    "t2d": (163840,),
}
INTEGERS = ("d2t", "t2d")


def changed(config: Config, **changes: Any) -> Config:
    """A config with other values; None takes a key out."""
    new = copy.deepcopy(config)
    for key, value in changes.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = value
    return new


def engine(release: str, *, patched: bool = False) -> Engine:
    """What the matrix holds of a release, or of a release after ``apply``."""
    table, changes = matrix.load_doctor(release)
    assert table
    stock = Engine.of_table(table)
    return stock.with_changes(changes) if patched else stock


def checkpoint(
    config: Config, role: str = "target model", weights: dict[str, tuple[int, ...]] | None = None
) -> Checkpoint:
    """A checkpoint that is on no disk."""
    found = None
    if weights is not None:
        kinds = {name: "I64" if name in INTEGERS else "BF16" for name in weights}
        found = Weights(weights, kinds, ("model.safetensors",))
    given = f"example/{role.partition(' ')[0]}"
    return Checkpoint(role, given, Path("config.json"), None, config, found)


def situation(
    target: Config = KIMI_K2,
    draft: Config = STATED,
    *,
    release: str = "0.18.0",
    patched: bool = False,
    serve: str | None = None,
    weights: dict[str, tuple[int, ...]] | None = None,
    convention: str | None = None,
) -> Situation:
    """A situation; without changes a healthy one."""
    options = ServeOptions() if serve is None else parse_serve(f"vllm serve X {serve}")
    if serve is not None and "speculative" not in serve:
        options = replace(options, speculates=None)
    return Situation(
        checkpoint(target),
        checkpoint(draft, "draft model", weights),
        options,
        engine(release, patched=patched),
        f"vLLM {release}",
        convention,
    )


def grave(judgement: Situation) -> dict[str, str]:
    """The codes of the errors and warnings of a situation, each with its gravest severity."""
    found: dict[str, str] = {}
    for finding in findings(judgement):
        if finding.severity != "info":
            found.setdefault(finding.code, finding.severity)
    return found


def findings(judgement: Situation) -> tuple[Finding, ...]:
    """Every finding of a situation."""
    return judged(judgement)


def verdict(codes: dict[str, str]) -> str:
    """The verdict that such codes make."""
    if "error" in codes.values():
        return "broken"
    return "risky" if codes else "ok"


def safetensors(tensors: dict[str, tuple[int, ...]], more: dict[str, Any] | None = None) -> bytes:
    """A safetensors file with a header and no data."""
    header: dict[str, Any] = dict(more or {})
    for name, shape in tensors.items():
        kind = "I64" if name in INTEGERS else "BF16"
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [0, 0]}
    content = json.dumps(header).encode()
    return len(content).to_bytes(8, "little") + content


def write(folder: Path, config: Config, tensors: dict[str, tuple[int, ...]] | None = None) -> Path:
    """A checkpoint's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if tensors is not None:
        (folder / "model.safetensors").write_bytes(safetensors(tensors))
    return folder
