"""A real engine in this process, and what is written down of it while it runs.

Everything is recorded from outside, by wrapping the model's classes and by forward hooks, so that
the same code watches a patched and an unpatched vLLM, of any release.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import torch

MAX_BATCHED_TOKENS = 64
"""Tokens in one forward, at most: a longer prompt comes in chunks."""

LENGTHS = (3, 17, 90, 200)
"""Of the prompts: unequal, and two longer than what one forward takes."""

NEW_TOKENS = 8


def prepare_environment(cache: Path) -> None:
    """Set what vLLM reads when it is imported: one process, no network, caches of its own.

    Args:
        cache: A folder for everything that is compiled.
    """
    cache = cache.resolve()  # the compiler is started elsewhere
    os.environ.update(
        # float32 runs on the CPU with ordinary attention only (the MLA backend wants bfloat16).
        VLLM_MLA_DISABLE="1",
        VLLM_USE_V1="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        VLLM_HOST_IP="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
        HF_HUB_OFFLINE="1",
        HF_HOME=str(cache / "huggingface"),
        VLLM_CACHE_ROOT=str(cache / "vllm"),
        TORCHINDUCTOR_CACHE_DIR=str(cache / "inductor"),
        TORCHINDUCTOR_FX_GRAPH_CACHE="1",
    )


@dataclass
class Forward:
    """One forward of the target model.

    Attributes:
        positions: ``[num_tokens]``.
        streams: The residual stream by layer id, ``[num_tokens, hidden_size]`` each, as forward
            hooks saw it: id ``k`` entering layer ``k``, id ``n`` before the last norm.
        states: What the model returned beside its hidden states.
        final: The hidden states that it returned.
    """

    positions: torch.Tensor
    streams: dict[int, torch.Tensor]
    states: list[torch.Tensor] | None = None
    final: torch.Tensor | None = None


@dataclass
class Recording:
    """What happened since the recording was started."""

    forwards: list[Forward] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


class Watched:
    """An engine whose target model is watched.

    Args:
        folder: The target model.
        eager: Whether nothing is compiled.
        layer_ids: Aux layers set before the engine compiles or profiles anything, as the model
            runner does it; later ones by :meth:`capture`.
    """

    def __init__(
        self, folder: Path, *, eager: bool, layer_ids: tuple[int, ...] = (), hooks: bool = True
    ) -> None:
        from vllm import LLM

        self.recording = Recording()
        self.layer_ids = layer_ids
        self._watch_class()
        self.llm = LLM(
            os.fspath(folder),
            dtype="float32",
            enforce_eager=eager,
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            enable_chunked_prefill=True,
            enable_prefix_caching=False,
            seed=0,
        )
        if hooks:
            self._hook()

    def capture(self, layer_ids: tuple[int, ...]) -> None:
        """Tell the running model which residual streams to return."""
        self.model.set_aux_hidden_state_layers(layer_ids)

    def off(self) -> None:
        """Make the running model return its hidden states alone, as it does without EAGLE-3."""
        self.model.model.aux_hidden_state_layers = ()

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Write down what happens inside."""
        self.recording = Recording()
        try:
            yield self.recording
        finally:
            self.recording = Recording()

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS
    ) -> list[list[int]]:
        """Greedy tokens for each prompt."""
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(requests, parameters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _watch_class(self) -> None:
        from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM

        watched = self
        plain_forward = DeepseekV2ForCausalLM.forward
        plain_logits = DeepseekV2ForCausalLM.compute_logits
        plain_load = DeepseekV2ForCausalLM.load_weights

        def load_weights(self: Any, *given: Any, **named: Any) -> Any:
            watched.model = self
            loaded = plain_load(self, *given, **named)
            if watched.layer_ids:
                watched.capture(watched.layer_ids)
            return loaded

        def forward(self: Any, input_ids: Any, positions: Any, *given: Any, **named: Any) -> Any:
            import torch

            forwards = watched.recording.forwards
            forwards.append(Forward(positions.clone(), {}))
            result = plain_forward(self, input_ids, positions, *given, **named)
            if isinstance(result, torch.Tensor):
                forwards[-1].final = result.clone()
                return result
            final, states = result
            forwards[-1].final = final.clone()
            # Not cloned: that they are not overwritten later is a part of what is shown.
            forwards[-1].states = list(states)
            return final

        def compute_logits(self: Any, *given: Any, **named: Any) -> Any:
            logits = plain_logits(self, *given, **named)
            if logits is not None:
                watched.recording.logits.append(logits.clone())
            return logits

        DeepseekV2ForCausalLM.forward = forward
        DeepseekV2ForCausalLM.compute_logits = compute_logits
        DeepseekV2ForCausalLM.load_weights = load_weights

    def _hook(self) -> None:
        inner = self.model.model
        for layer_id, layer in enumerate(inner.layers):
            layer.register_forward_pre_hook(self._entering(layer_id), with_kwargs=True)
        last = self._entering(len(inner.layers))
        # The last norm has no positions before its two arguments.
        inner.norm.register_forward_pre_hook(lambda module, given: last(module, (None, *given), {}))

    def _entering(self, layer_id: int) -> Any:
        def hook(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            values = [*given, *named.values()]
            hidden_states, residual = values[1], values[2] if len(values) > 2 else None
            stream = hidden_states.clone() if residual is None else hidden_states + residual
            self.recording.forwards[-1].streams[layer_id] = stream

        return hook


def prompts() -> list[list[int]]:
    """Token ids for prompts of each length."""
    return [
        [(7 * i * number + 3 * i) % 500 + 2 for i in range(length)]
        for number, length in enumerate(LENGTHS, start=1)
    ]
