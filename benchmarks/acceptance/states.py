"""Are the states that vLLM hands to the draft model those that enter the target's layers?

Run as ``python -m benchmarks.acceptance.states``, with the options of ``speculate``. Hooks on the
target's layers write down what enters them, independently of the patch.

- Eager: the hooks of the same forward; the states must be equal, bit for bit.
- ``--only-graphs``: the hooks' own writes are captured into the CUDA graph with the forward and
  replayed with it; equal, bit for bit. Such a forward runs no Python, which tells that it was one.
- ``--graphs``: what is compiled runs no hooks. After each forward the same layers run once more on
  the same inputs, eagerly and with hooks. Fused arithmetic rounds otherwise, and where two experts
  are nearly as good another one may be taken: so it is told how many tensors are nearer to their
  own boundary than to any other, and by how much they differ from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.acceptance import speculate

MOST_TOKENS = 4096


class Watch:
    """Follows the target of a model runner.

    Args:
        runner: The runner, with its models loaded.
        rerun: Whether the layers run again for the hooks, after each forward.
    """

    def __init__(self, runner: Any, *, rerun: bool) -> None:
        import torch

        self.torch = torch
        self.runner = runner
        self.rerun = rerun
        self.inner = runner.get_model().model
        self.ids = sorted(self.inner.aux_hidden_state_layers)
        self.hooks_run = 0
        self.differences: list[float] = []
        self.found: dict[str, Any] = {
            "ids": self.ids,
            "forwards": 0,
            "without_python": 0,
            "tensors": 0,
            "identical": 0,
            "nearest": 0,
            "median_difference": 0.0,
            "largest_difference": 0.0,
            "least_to_others": None,
        }
        weight = next(self.inner.norm.parameters())
        # Written in place, so that a replayed graph writes them too.
        self.buffers = torch.zeros(
            (len(self.inner.layers) + 1, MOST_TOKENS, weight.shape[0]),
            dtype=weight.dtype,
            device=weight.device,
        )
        if not rerun:
            self._hook()

    def follow(self) -> None:
        """Compare after each forward of the target from now on."""
        plain = self.runner._model_forward

        def forward(*given: Any, **named: Any) -> Any:
            before = self.hooks_run
            result = plain(*given, **named)
            kept = [state.clone() for state in result[1]]
            self.found["without_python"] += self.hooks_run == before
            if self.rerun:
                handles = self._hook()
                self._run_again(*given, **named)
                for handle in handles:
                    handle.remove()
            self._compare(kept)
            return result

        self.runner._model_forward = forward

    def _hook(self) -> list[Any]:
        layers = list(self.inner.layers)
        # A layer is called with the positions first, the last norm without.
        entered = [*((layer, 1) for layer in layers), (self.inner.norm, 0)]
        return [
            module.register_forward_pre_hook(self._entering(number, first), with_kwargs=True)
            for number, (module, first) in enumerate(entered)
        ]

    def _entering(self, number: int, first: int) -> Callable[..., None]:
        def hook(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            values = [*given, *named.values()][first:]
            residual = values[1] if len(values) > 1 else None
            stream = values[0] if residual is None else values[0] + residual
            self.buffers[number, : stream.shape[0]].copy_(stream)
            self.hooks_run += 1

        return hook

    def _run_again(
        self,
        input_ids: Any = None,
        positions: Any = None,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **_: Any,
    ) -> None:
        """The uncompiled forward on the same inputs: it writes the same keys to the same places."""
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        kept = context.cudagraph_runtime_mode, getattr(context, "moe_layer_index", 0)
        context.cudagraph_runtime_mode, context.moe_layer_index = CUDAGraphMode.NONE, 0
        type(self.inner).forward(
            self.inner, input_ids, positions, intermediate_tensors, inputs_embeds
        )
        context.cudagraph_runtime_mode, context.moe_layer_index = kept

    def _compare(self, states: list[Any]) -> None:
        tokens = actual_tokens()
        if tokens is None:
            return
        if len(states) != len(self.ids):
            raise SystemExit(f"{len(states)} states came back for the ids {self.ids}")
        found = self.found
        found["forwards"] += 1
        streams = self.buffers[:, :tokens]
        for layer_id, padded in zip(self.ids, states, strict=True):
            state = padded[:tokens]
            found["tensors"] += 1
            found["identical"] += self.torch.equal(state, streams[layer_id])
            differences = [self._relative(state, stream) for stream in streams]
            own = differences.pop(layer_id)
            found["nearest"] += own < min(differences)
            self.differences.append(own)
            found["median_difference"] = median(self.differences)
            found["largest_difference"] = max(self.differences)
            least = min([*differences, found["least_to_others"] or float("inf")])
            found["least_to_others"] = least

    def _relative(self, state: Any, stream: Any) -> float:
        norm = self.torch.linalg.vector_norm
        return float(norm(state.float() - stream.float()) / norm(stream.float()))


def actual_tokens() -> int | None:
    """How many tokens of the current forward are no padding; none in a dummy run."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict) or not metadata:
        return None
    return int(next(iter(metadata.values())).num_actual_tokens)


def model_runner(llm: Any) -> Any:
    """The model runner of an engine that runs in this process."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def watch_when_loaded(watches: list[Watch]) -> None:
    """Put the hooks on as soon as the models are loaded, so that they are captured with them."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    plain = GPUModelRunner.load_model

    def load_model(self: Any, *given: Any, **named: Any) -> Any:
        loaded = plain(self, *given, **named)
        watches.append(Watch(self, rerun=False))
        return loaded

    GPUModelRunner.load_model = load_model


def watch(options: argparse.Namespace, draft: Path | None) -> dict[str, Any]:
    """Generate under watch."""
    import vllm

    prompts: list[list[int]] = json.loads(options.prompts.read_text(encoding="utf-8"))
    watches: list[Watch] = []
    if options.only_graphs:
        watch_when_loaded(watches)
    llm = speculate.load(options, draft, len(prompts))
    watched = watches[-1] if watches else Watch(model_runner(llm), rerun=options.graphs)
    watched.follow()
    tokens = speculate.answer(llm, prompts, options.max_tokens)
    return {"vllm": vllm.__version__, "tokens": tokens, "states": watched.found}


if __name__ == "__main__":
    speculate.run(None, watch)
