"""Tiny models with random weights in the layout of published checkpoints.

The target is a DeepSeek-V3 of eight layers with everything that the big one has: multi-head latent
attention with a query projection of low rank, one dense layer, then mixtures of experts in groups
with a shared expert. Random weights are useless for comparing acceptance, and good for comparing
tensors.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

NUM_LAYERS = 8
HIDDEN_SIZE = 256
VOCABULARY = 512
AUX_LAYERS = 3
MEDIA_PLACEHOLDER = 500

_ROUTING = {
    # transformers implies these; vLLM reads them (deepseek_v2.py, 0.8.5 on).
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
}


def write_target(folder: Path, seed: int = 0) -> None:
    """Write a DeepSeek-V3 with random float32 weights, and a tokenizer whose words are numbers."""
    from transformers import DeepseekV3ForCausalLM

    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(target_config()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder)
    _edit_config(folder, **_ROUTING)
    _write_tokenizer(folder)


def target_config() -> Any:
    """The target's config, as transformers has it."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=128,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )


def write_draft(folder: Path, layer_ids: tuple[int, ...], *, nested: bool = False) -> None:
    """Write a one-layer EAGLE-3 draft model with random weights, as SpecForge lays one out.

    Args:
        folder: Where.
        layer_ids: Its aux layers, as vLLM counts them.
        nested: Whether they stand under ``eagle_config``, as in published drafts for Kimi.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    key = "eagle_aux_hidden_state_layer_ids"
    named = {"eagle_config": {key: list(layer_ids)}} if nested else {key: list(layer_ids)}
    config = {
        # Every release makes Eagle3LlamaForCausalLM of it (transformers_utils/configs/eagle.py).
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
        **named,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "fc.weight": (HIDDEN_SIZE, AUX_LAYERS * HIDDEN_SIZE),
        "midlayer.self_attn.q_proj.weight": (256, 2 * HIDDEN_SIZE),
        "midlayer.self_attn.k_proj.weight": (256, 2 * HIDDEN_SIZE),
        "midlayer.self_attn.v_proj.weight": (256, 2 * HIDDEN_SIZE),
        "midlayer.self_attn.o_proj.weight": (HIDDEN_SIZE, 256),
        "midlayer.mlp.gate_proj.weight": (512, HIDDEN_SIZE),
        "midlayer.mlp.up_proj.weight": (512, HIDDEN_SIZE),
        "midlayer.mlp.down_proj.weight": (HIDDEN_SIZE, 512),
        "lm_head.weight": (VOCABULARY, HIDDEN_SIZE),
    }
    weights = {
        name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()
    }
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm"):
        weights[f"{name}.weight"] = torch.ones(HIDDEN_SIZE)
    weights["midlayer.post_attention_layernorm.weight"] = torch.ones(HIDDEN_SIZE)
    save_file(weights, folder / "model.safetensors")


def _edit_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    # It asks for a layer of multi-token prediction that these weights do not have.
    config.pop("num_nextn_predict_layers", None)
    file.write_text(json.dumps({**config, **values}, indent=1))


def _write_tokenizer(folder: Path) -> None:
    """Releases up to 0.9.2 need one even where prompts are given as ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="0", eos_token="1", unk_token="0"
    )
    fast.save_pretrained(folder)


_IMAGE_PROCESSOR = """
from transformers import BaseImageProcessor


class TinyImageProcessor(BaseImageProcessor):
    num_frames_per_chunk = 4
    media_tokens_calculator = None
"""


def write_kimi_k25(folder: Path) -> None:
    """Write the config of a tiny Kimi-K2.5: the target above beside a vision tower of one layer.

    There are no weights: vLLM's dummy loader makes some up. A checkpoint brings code for its
    images; the code here knows the two names that vLLM asks for (kimi_k25.py in its models).
    """
    folder.mkdir(parents=True)
    text_config = {**target_config().to_dict(), **_ROUTING, "model_type": "kimi_k2"}
    text_config.pop("num_nextn_predict_layers", None)
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "media_placeholder_token_id": MEDIA_PLACEHOLDER,
        "text_config": text_config,
        "vision_config": {
            "model_type": "kimi_k25_vision",
            "num_hidden_layers": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 4,
        },
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    processor = {
        "auto_map": {"AutoImageProcessor": "tiny_images.TinyImageProcessor"},
        # Newer releases have a processor of their own, which wants these.
        "media_proc_cfg": {
            "patch_size": 14,
            "merge_kernel_size": 2,
            "temporal_merge_kernel_size": 4,
            "in_patch_limit": 1024,
            "patch_limit_on_one_side": 512,
            "fixed_output_tokens": None,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "tiny_images.py").write_text(_IMAGE_PROCESSOR)
    _write_tokenizer(folder)
