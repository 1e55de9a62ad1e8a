"""The states of a running engine against transformers' hidden states, for the same weights.

transformers' ``output_hidden_states[k]`` is the residual stream entering layer ``k``; its last
entry is taken after the last norm, so the stream leaving the last layer is had by a forward hook.

Two faults of the CPU builds' own kernels are in the way, and are stepped around:

- vLLM's ``rotary_embedding`` leaves most heads of a query with three dimensions as they are, and
  DeepSeek's has three without multi-head latent attention (0.9.2 to 0.32.0). States then differ by
  as much as they are large, from layer 1 on. ``forward_native`` of the same layer is right.
- Up to 0.11.0 Intel's extension for PyTorch routes tokens otherwise than DeepSeek-V3: it weights
  experts by scores with the correction bias in them, and ranks groups by their best expert, not by
  their best two. Without bias and groups both models do the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch
    from in_target.engine import Watched


def compare(watched: Watched, target: Path, prompts: Sequence[list[int]]) -> dict[str, float]:
    """The largest difference of each layer's states, relative to the largest value in them."""
    import torch

    reference = Reference(target)
    _step_around(watched.model, reference.model)
    layer_ids = tuple(range(reference.num_layers + 1))
    watched.capture(layer_ids)
    worst = dict.fromkeys(map(str, layer_ids), 0.0)
    for prompt in prompts:
        with watched.record() as recording:
            watched.generate([prompt], new_tokens=1)
        expected = reference.streams(prompt)
        for layer_id in layer_ids:
            chunks = [forward.states[layer_id] for forward in recording.forwards if forward.states]
            states = torch.cat(chunks)[: len(prompt)]
            difference = (states - expected[layer_id]).abs().max() / expected[layer_id].abs().max()
            worst[str(layer_id)] = max(worst[str(layer_id)], difference.item())
    return worst


class Reference:
    """The target in transformers.

    Args:
        target: Its folder.
    """

    def __init__(self, target: Path) -> None:
        import torch
        from transformers import DeepseekV3ForCausalLM

        self.model = DeepseekV3ForCausalLM.from_pretrained(
            target, torch_dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.num_layers = self.model.config.num_hidden_layers
        self._last: torch.Tensor | None = None
        self.model.model.norm.register_forward_pre_hook(self._keep)

    def streams(self, prompt: Sequence[int]) -> list[torch.Tensor]:
        """The residual stream by layer id, ``[num_tokens, hidden_size]`` each."""
        import torch

        with torch.no_grad():
            outputs = self.model(torch.tensor([list(prompt)]), output_hidden_states=True)
        entering = [states[0] for states in outputs.hidden_states[: self.num_layers]]
        assert self._last is not None
        return [*entering, self._last[0]]

    def _keep(self, _: Any, given: tuple[torch.Tensor, ...]) -> None:
        self._last = given[0].clone()


def _step_around(served: Any, reference: Any) -> None:
    import torch

    for module in served.modules():
        if hasattr(module, "is_neox_style"):
            module._forward_method = module.forward_native
    if not any(_is_routed_by_extension(module) for module in served.modules()):
        return
    for model in (served, reference):
        for module in model.modules():
            for name in ("n_group", "num_expert_group", "topk_group"):
                if hasattr(module, name):
                    setattr(module, name, 1)
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                with torch.no_grad():
                    value.zero_()


def _is_routed_by_extension(module: Any) -> bool:
    """Whether these are experts that vLLM hands to Intel's extension (cpu_fused_moe.py)."""
    return type(getattr(module, "cpu_fused_moe", None)).__name__ == "IPEXFusedMOE"
