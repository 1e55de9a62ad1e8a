"""Other layer ids, same cache folder: the compiled graph must be another one.

Run in a process of its own for each draft model, all with one cache folder, as a server is that is
started again. vLLM's key for compiled graphs is made of its configs and of the traced files; the
layer ids are in neither up to 0.16.0 (vllm/config/speculative.py, ``compute_hash``), and a graph
compiled for other ids returns their states without an error.

The CPU backend would compile without vLLM's own cache, so the mode that GPUs have is set by hand.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from in_target.engine import prepare_environment

NUM_TOKENS = 11
VLLM_COMPILE = 3
"""The mode of ``CompilationConfig`` with vLLM's backend; its field was ``level`` up to 0.11.0."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--ahead-of-time", choices=("0", "1"), required=True)
    parser.add_argument("--report", type=Path, required=True)
    given = parser.parse_args()
    prepare_environment(given.cache)
    # Releases that know it keep the whole compiled forward, under a key of their own.
    os.environ["VLLM_USE_AOT_COMPILE"] = given.ahead_of_time
    given.report.write_text(json.dumps(run(given.target, given.draft)))


def run(target: Path, draft: Path) -> dict[str, Any]:
    """Compile the target for a draft model's ids; compare its states with those run eagerly."""
    import torch
    from in_target import bare_model, draft_model

    bare_model.name_absent_operators()
    vllm_config = bare_model.config(target, enforce_eager=False)
    _compile_as_on_a_gpu(vllm_config.compilation_config)
    vllm_config.speculative_config = draft_model.speculative_config(vllm_config, draft)
    model = bare_model.load(vllm_config)
    layer_ids = vllm_config.speculative_config.eagle3_aux_hidden_state_layers()
    model.set_aux_hidden_state_layers(layer_ids)
    inner = model.model
    tokens, positions = torch.arange(2, 2 + NUM_TOKENS), torch.arange(NUM_TOKENS)
    with draft_model.forward_context(vllm_config, NUM_TOKENS), torch.no_grad():
        _, compiled = inner(tokens, positions, None, None)
    with draft_model.forward_context(vllm_config, NUM_TOKENS), torch.no_grad():
        _, eager = type(inner).forward(inner, tokens, positions, None, None)
    differences = [
        ((one - other).abs().max() / other.abs().max()).item()
        for one, other in zip(compiled, eager, strict=True)
    ]
    return {
        "layer_ids": list(layer_ids),
        "hash": vllm_config.speculative_config.compute_hash(),
        "tensors": len(differences),
        "largest_difference": max(differences),
    }


def _compile_as_on_a_gpu(config: Any) -> None:
    name = "mode" if hasattr(config, "mode") else "level"
    setattr(config, name, type(getattr(config, name))(VLLM_COMPILE))
    config.backend = "inductor"
    config.compile_sizes = config.compile_sizes or []
    config.splitting_ops = config.splitting_ops or []


if __name__ == "__main__":
    main()
