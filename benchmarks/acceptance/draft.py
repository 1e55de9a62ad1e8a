"""An EAGLE-3 draft model of one layer, trained on the target's states.

It is laid out as vLLM's ``Eagle3LlamaForCausalLM`` loads it: ``fc``, ``midlayer``, ``norm`` and
``lm_head``; the embedding is the target's. From the states at position ``j`` and token ``j + 1`` it
foresees token ``j + 2``. What it hands to its own next step stands in for the states at ``j + 1``,
which the target has not computed yet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from benchmarks.acceptance.language import HEADER, Language
from benchmarks.acceptance.target import boundaries_and_logits, side_by_side

HEADS = 4
KEY_VALUE_HEADS = 2
ROPE_THETA = 10000.0
EPSILON = 1e-6
BATCH = 16
LENGTH = 64
UNROLLED = 3
"""How many steps the draft model runs on its own output in training."""

Cache = list[tuple[Tensor, Tensor]]


class Attention(nn.Module):
    """Grouped-query attention over the concatenation of embedding and state.

    It computes one step of many chains at once. Chain ``j`` starts at position ``j``, so its
    step ``s`` is at position ``j + s``. It sees the first step of all chains up to ``j``, where
    the states are the target's, and its own steps after that: exactly the cache of a draft model
    that was started at ``j``.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.head_size = hidden_size // HEADS
        self.q_proj = nn.Linear(2 * hidden_size, HEADS * self.head_size, bias=False)
        self.k_proj = nn.Linear(2 * hidden_size, KEY_VALUE_HEADS * self.head_size, bias=False)
        self.v_proj = nn.Linear(2 * hidden_size, KEY_VALUE_HEADS * self.head_size, bias=False)
        self.o_proj = nn.Linear(HEADS * self.head_size, hidden_size, bias=False)

    def forward(self, inputs: Tensor, cache: Cache) -> Tensor:
        """Compute a step of all chains and add it to the cache.

        Args:
            inputs: ``[batch, chains, 2 * hidden_size]``.
            cache: Keys and values of the steps before, each ``[batch, heads, chains, head_size]``.

        Returns:
            ``[batch, chains, hidden_size]``.
        """
        step, chains = len(cache), inputs.shape[1]
        positions = torch.arange(step, step + chains, device=inputs.device)
        query = rotate(self._heads(self.q_proj(inputs)), positions)
        key = rotate(self._heads(self.k_proj(inputs)), positions)
        value = self._heads(self.v_proj(inputs))
        group = HEADS // KEY_VALUE_HEADS
        cache.append((key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)))

        (first_key, first_value), *own = cache
        later = torch.ones(chains, chains, dtype=torch.bool, device=inputs.device).triu(1)
        scores = (query @ first_key.transpose(-1, -2)).masked_fill(later, float("-inf"))
        own_scores = [(query * own_key).sum(-1, keepdim=True) for own_key, _ in own]
        scores = torch.cat([scores, *own_scores], dim=-1) * self.head_size**-0.5
        weights = scores.float().softmax(-1).to(inputs.dtype)
        mixed = weights[..., :chains] @ first_value
        for number, (_, own_value) in enumerate(own):
            mixed = mixed + weights[..., chains + number, None] * own_value
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, flat: Tensor) -> Tensor:
        return flat.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


def rotate(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding, the two halves of a head paired: ``[batch, heads, length, head_size]``."""
    half = heads.shape[-1] // 2
    steps = torch.arange(half, device=heads.device, dtype=torch.float32) / half
    angles = positions[:, None].float() * ROPE_THETA**-steps
    cosine, sine = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    left, right = heads[..., :half], heads[..., half:]
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)


class Mlp(nn.Module):
    """Llama's gated feed-forward network."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.down_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(inputs)) * self.up_proj(inputs))


class Layer(nn.Module):
    """The one decoder layer."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=EPSILON)
        self.hidden_norm = nn.RMSNorm(hidden_size, eps=EPSILON)
        self.self_attn = Attention(hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=EPSILON)
        self.mlp = Mlp(hidden_size)

    def forward(self, state: Tensor, embedding: Tensor, cache: Cache) -> Tensor:
        """``[batch, chains, hidden_size]`` each, the result too."""
        inputs = torch.cat([self.input_layernorm(embedding), self.hidden_norm(state)], dim=-1)
        state = state + self.self_attn(inputs, cache)
        return state + self.mlp(self.post_attention_layernorm(state))


class Draft(nn.Module):
    """The draft model, without the embedding that it shares with the target."""

    def __init__(self, hidden_size: int, vocabulary: int, layer_ids: Sequence[int]) -> None:
        super().__init__()
        self.layer_ids = tuple(layer_ids)
        self.fc = nn.Linear(len(self.layer_ids) * hidden_size, hidden_size, bias=False)
        self.midlayer = Layer(hidden_size)
        self.norm = nn.RMSNorm(hidden_size, eps=EPSILON)
        self.lm_head = nn.Linear(hidden_size, vocabulary, bias=False)

    def forward(self, state: Tensor, embedding: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """One step of all chains.

        Args:
            state: ``[batch, chains, hidden_size]``: at the first step ``fc`` of the target's
                states, then what the step before returned.
            embedding: Of the token that follows, ``[batch, chains, hidden_size]``.
            cache: Of the steps before; empty at the first one.

        Returns:
            The state for the next step and the logits, ``[batch, chains, vocabulary]``.
        """
        state = self.midlayer(state, embedding, cache)
        return state, self.lm_head(self.norm(state))


def train(
    target: Any,
    language: Language,
    layer_ids: Sequence[int],
    stops: Sequence[int],
    device: str,
) -> list[dict[str, Tensor]]:
    """Train a draft model on the target's states, and keep its weights at each of ``stops``.

    As in EAGLE-3's training-time test, the model runs several steps on its own output. Tokens are
    the text's, labels the target's answers, which are what a draft is verified against.
    """
    torch.manual_seed(1)
    config = target.config
    draft = Draft(config.hidden_size, config.vocab_size, layer_ids).to(device)
    embed = target.get_input_embeddings()
    optimizer = torch.optim.AdamW(draft.parameters(), lr=2e-3, betas=(0.9, 0.95))
    kept = []
    for step in range(1, max(stops) + 1):
        tokens = torch.tensor(language.texts(10_000 + step, BATCH, LENGTH), device=device)
        boundaries, logits = boundaries_and_logits(target, tokens)
        states = side_by_side(boundaries, layer_ids)
        labels = logits.argmax(-1)
        embeddings = embed(tokens).detach().float()
        chains = LENGTH - 1 - UNROLLED
        state, cache = draft.fc(states[:, :chains].float()), Cache()
        loss = torch.zeros((), device=device)
        for ahead in range(1, UNROLLED + 1):
            state, answers = draft(state, embeddings[:, ahead : ahead + chains], cache)
            # What comes within the header cannot be foreseen.
            wanted = labels[:, HEADER - 2 + ahead : ahead + chains]
            loss = loss + cross_entropy(answers[:, HEADER - 2 :].flatten(0, 1), wanted.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step in stops:
            right = (answers[:, HEADER - 2 :].argmax(-1) == wanted).float().mean()
            print(f"draft {layer_ids}: step {step}, loss {loss:.3f}, last {right:.2%}", flush=True)
        if step in stops:
            kept.append({name: weight.clone() for name, weight in draft.state_dict().items()})
    return kept


def save(weights: dict[str, Tensor], folder: Path, target: Any, layer_ids: Sequence[int]) -> None:
    """Write ``config.json`` and the weights, in the target's type."""
    folder.mkdir(parents=True, exist_ok=True)
    config = target.config
    described = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": 2 * config.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "head_dim": config.hidden_size // HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(target.dtype).removeprefix("torch."),
        "eagle_aux_hidden_state_layer_ids": list(layer_ids),
    }
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    typed = {name: weight.to(target.dtype).contiguous() for name, weight in weights.items()}
    save_file(typed, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, device: str, dtype: torch.dtype | None = None) -> Draft:
    """Read a saved draft model, in the type that it was saved in or another one."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layer_ids = config["eagle_aux_hidden_state_layer_ids"]
    draft = Draft(config["hidden_size"], config["vocab_size"], layer_ids)
    weights = load_file(folder / "model.safetensors")
    draft.load_state_dict(weights)
    return draft.to(device, dtype or weights["fc.weight"].dtype).eval()
