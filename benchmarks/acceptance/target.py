"""The target: a tiny DeepSeek-V3 that has learned the language, as a folder that vLLM loads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from benchmarks.acceptance.language import HEADER, VOCABULARY, Language

LAYERS = 8
BATCH = 16
LENGTH = 64
STEPS = 400

# vLLM's MLA kernels are made for DeepSeek's own sizes, and its routed experts count 2.5 times.
# Ordinary attention takes smaller ones.
SHAPES: dict[str, dict[str, Any]] = {
    "mla": {
        "hidden_size": 256,
        "num_attention_heads": 16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "routed_scaling_factor": 2.5,
    },
    "plain": {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "routed_scaling_factor": 1.0,
    },
}


def configuration(attention: str) -> DeepseekV3Config:
    """A DeepSeek-V3 of eight layers, the first dense and the others mixtures of experts."""
    shape = SHAPES[attention]
    return DeepseekV3Config(
        vocab_size=VOCABULARY,
        intermediate_size=2 * shape["hidden_size"],
        moe_intermediate_size=shape["hidden_size"] // 2,
        num_hidden_layers=LAYERS,
        num_key_value_heads=shape["num_attention_heads"],
        q_lora_rank=None,
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        num_nextn_predict_layers=0,
        max_position_embeddings=512,
        initializer_range=0.05,
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=None,
        # vLLM reads these; transformers only keeps them.
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_layer_freq=1,
        **shape,
    )


def train(
    language: Language, attention: str, device: str, steps: int = STEPS, rate: float = 4e-3
) -> Any:
    """Train a target in float32 on what follows the header."""
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(configuration(attention)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
    for step in range(steps):
        tokens = torch.tensor(language.texts(step + 1, BATCH, LENGTH), device=device)
        logits = model(input_ids=tokens, use_cache=False).logits[:, HEADER - 1 : -1]
        following = tokens[:, HEADER:]
        loss = cross_entropy(logits.flatten(0, 1), following.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            right = (logits.argmax(-1) == following).float().mean()
            print(f"target: step {step + 1}, loss {loss:.4f}, right {right:.2%}", flush=True)
    return model.eval()


@torch.no_grad()
def share_right(model: Any, language: Language, device: str) -> float:
    """How many of its answers are right on texts that it has not seen."""
    tokens = torch.tensor(language.texts(2_000_000, 4 * BATCH, LENGTH), device=device)
    answers = model(input_ids=tokens, use_cache=False).logits[:, HEADER - 1 : -1].argmax(-1)
    return float((answers == tokens[:, HEADER:]).float().mean())


def save(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write the configs, a tokenizer, and the weights in the type that vLLM is to compute in."""
    model.to(dtype).save_pretrained(folder)
    words = {f"w{token}": token for token in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    for name, content in (("tokenizer", tokenizer), ("tokenizer_config", named)):
        text = json.dumps(content, indent=2) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


def load(folder: Path, device: str, dtype: Any = "auto") -> Any:
    """Read a saved target, in the type that it was saved in or another one."""
    return DeepseekV3ForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()


@torch.no_grad()
def boundaries_and_logits(model: Any, tokens: Tensor) -> tuple[list[Tensor], Tensor]:
    """What the target holds between its layers, and what it answers.

    Boundary ``k`` is the residual stream entering layer ``k``; number ``LAYERS`` is the stream
    entering the last norm. transformers' own ``output_hidden_states`` lacks that last one.

    Args:
        model: The target.
        tokens: ``[batch, length]``.

    Returns:
        The boundaries, each ``[batch, length, hidden_size]``, and the logits,
        ``[batch, length, vocabulary]``.
    """
    seen: list[Tensor] = []

    def keep(_module: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    handles = [
        module.register_forward_pre_hook(keep, with_kwargs=True)
        for module in (*model.model.layers, model.model.norm)
    ]
    try:
        logits = model(input_ids=tokens, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return seen, logits


def side_by_side(boundaries: Sequence[Tensor], layer_ids: Sequence[int]) -> Tensor:
    """The states at some boundaries, ``[batch, length, len(layer_ids) * hidden_size]``."""
    return torch.cat([boundaries[layer_id] for layer_id in layer_ids], dim=-1)
