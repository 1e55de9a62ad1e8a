"""The release's own draft model beside a running target: loaded by its proposer, fed with states.

The CPU backend refuses to speculate before 0.20.0, so the engine itself runs without; the
speculative config, the proposer and the draft model are the release's, built as its model runner
builds them (vllm/v1/worker/gpu_model_runner.py).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from in_target.bare_model import name_absent_operators

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from in_target.engine import Watched


def speculative_config(vllm_config: Any, draft: Path, tokens: int = 3) -> Any:
    """The release's own ``SpeculativeConfig``, checks and all, for an EAGLE-3 draft model."""
    from vllm.config import SpeculativeConfig

    return SpeculativeConfig(
        method="eagle3",
        model=str(draft),
        num_speculative_tokens=tokens,
        target_model_config=vllm_config.model_config,
        target_parallel_config=vllm_config.parallel_config,
        **_needed(SpeculativeConfig),
    )


def _needed(kind: Any) -> dict[str, Any]:
    """What releases up to 0.11.0 want to be told beside that."""
    fields = getattr(kind, "__dataclass_fields__", {})
    return {
        name: False for name in ("enable_chunked_prefill", "disable_log_stats") if name in fields
    }


def load(vllm_config: Any, draft: Path, target: Any) -> Any:
    """Load the draft model through the proposer's ``load_model``; returns the proposer.

    Args:
        vllm_config: The target's.
        draft: The draft model's folder.
        target: The target model.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.v1.spec_decode.eagle import EagleProposer

    name_absent_operators()
    vllm_config.speculative_config = speculative_config(vllm_config, draft)
    with set_current_vllm_config(vllm_config):
        proposer = EagleProposer(vllm_config, torch.device("cpu"))
        proposer.load_model(target)
    return proposer


def feed(
    watched: Watched, draft: Path, layer_ids: Sequence[int], prompt: list[int]
) -> dict[str, Any]:
    """Load the draft model beside the running target and run it on the target's states.

    Returns:
        ``difference``: of what ``fc`` gave from a plain matrix product of the concatenated states,
        relative to the largest value; ``shape``: of what the draft model returned.
    """
    import torch

    vllm_config = watched.llm.llm_engine.vllm_config
    proposer = load(vllm_config, draft, watched.model)
    drafter = proposer.model
    watched.capture(tuple(layer_ids))
    with watched.record() as recording:
        watched.generate([prompt], new_tokens=1)
    (forward,) = recording.forwards
    assert forward.states is not None
    states = torch.cat(forward.states, dim=-1)
    combined = drafter.combine_hidden_states(states)
    expected = torch.nn.functional.linear(states, _weights(draft)["fc.weight"])
    # Before the draft model runs, whose norms write into what they are given.
    difference = ((combined - expected).abs().max() / expected.abs().max()).item()
    positions = forward.positions
    # Without metadata the attention layers only shape their output, as in vLLM's profile run.
    with forward_context(vllm_config, len(positions)), torch.no_grad():
        output = drafter(torch.tensor(prompt), positions, combined)
    final = output[0] if isinstance(output, tuple) else output
    return {
        "drafter": type(drafter).__name__,
        "states": list(states.shape),
        "difference": difference,
        "shape": list(final.shape),
        "logits": list(drafter.compute_logits(final, *_sampling(drafter)).shape),
        "shares_embedding": _embedding(drafter) is _embedding(watched.model),
    }


def _embedding(model: Any) -> Any:
    return model.model.embed_tokens


def _sampling(drafter: Any) -> tuple[None, ...]:
    """Up to 0.10.2 ``compute_logits`` also takes sampling metadata, which it does not read."""
    parameters = drafter.compute_logits.__code__.co_varnames[
        : drafter.compute_logits.__code__.co_argcount
    ]
    return (None,) if "sampling_metadata" in parameters else ()


def _weights(draft: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(draft / "model.safetensors")


def forward_context(vllm_config: Any, num_tokens: int) -> Any:
    module = importlib.import_module("vllm.forward_context")
    return module.set_forward_context(None, vllm_config, num_tokens=num_tokens)
