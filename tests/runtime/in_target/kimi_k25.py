"""A tiny Kimi-K2.5 goes through the proposer's ``load_model``, and its states come through.

The model is built by vLLM's own loader with made-up weights, without an engine: an engine would
want the checkpoint's own processor for images, which is code from the checkpoint.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from in_target.engine import prepare_environment

NUM_TOKENS = 11


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--layer-ids", required=True, help="separated by commas")
    parser.add_argument("--report", type=Path, required=True)
    given = parser.parse_args()
    prepare_environment(given.cache)
    layer_ids = tuple(map(int, given.layer_ids.split(",")))
    given.report.write_text(json.dumps(run(given.target, given.draft, layer_ids)))


def run(target: Path, draft: Path, layer_ids: tuple[int, ...]) -> dict[str, Any]:
    import torch
    from in_target import bare_model, draft_model
    from vllm.model_executor.models.interfaces import supports_eagle3

    vllm_config = bare_model.config(
        target,
        enforce_eager=True,
        load_format="dummy",
        limit_mm_per_prompt={"image": 0, "video": 0, "vision_chunk": 0},
    )
    model = bare_model.load(vllm_config)
    language_model = model.get_language_model()
    proposer = draft_model.load(vllm_config, draft, model)
    model.set_aux_hidden_state_layers(layer_ids)
    inner = getattr(language_model, "model", language_model)
    streams: dict[int, torch.Tensor] = {}
    for layer_id in layer_ids:
        inner.layers[layer_id].register_forward_pre_hook(_entering(streams, layer_id))
    tokens = torch.arange(2, 2 + NUM_TOKENS)
    with draft_model.forward_context(vllm_config, NUM_TOKENS), torch.no_grad():
        hidden_states, states = model(input_ids=tokens, positions=torch.arange(NUM_TOKENS))
    return {
        "architecture": type(model).__name__,
        "language_model": type(language_model).__name__,
        "supports_eagle3": supports_eagle3(model),
        "image_token_index": proposer.model.config.image_token_index,
        "shares_embedding": proposer.model.model.embed_tokens is inner.embed_tokens,
        "tensors": len(states),
        "identical": sum(
            torch.equal(state, streams[layer_id])
            for layer_id, state in zip(sorted(layer_ids), states, strict=True)
        ),
        "finite": bool(torch.isfinite(hidden_states).all()),
    }


def _entering(streams: dict[int, Any], layer_id: int) -> Any:
    def hook(_: Any, given: tuple[Any, ...]) -> None:
        hidden_states, residual = given[1], given[2]
        streams[layer_id] = hidden_states.clone() if residual is None else hidden_states + residual

    return hook


if __name__ == "__main__":
    main()
