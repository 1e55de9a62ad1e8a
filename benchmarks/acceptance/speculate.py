"""One run of vLLM, without or with EAGLE-3, as JSON.

Run as ``python -m benchmarks.acceptance.speculate``, one run a process: vLLM does not give back
all that it takes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.acceptance.counting import Counts

NAMED = "eagle_aux_hidden_state_layer_ids"
CONVENTION = f"{NAMED}_convention"
"""What the ids count. Our patch reads it; vLLM itself takes all ids for boundaries."""


def draft_with_ids(
    draft: Path, folder: Path, layer_ids: Sequence[int], place: str, convention: str = ""
) -> Path:
    """A copy of a draft model whose config names other layer ids, at another place, or none."""
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    for key in (NAMED, CONVENTION, "eagle_config"):
        config.pop(key, None)
    named: dict[str, Any] = {NAMED: list(layer_ids)}
    if convention:
        named[CONVENTION] = convention
    if place == "top":
        config |= named
    elif place == "nested":
        config["eagle_config"] = {**named, "use_aux_hidden_state": True}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    shutil.copy2(draft / "model.safetensors", folder)
    return folder


def speculation(draft: Path, ahead: int) -> dict[str, Any]:
    """vLLM's speculative config."""
    return {"method": "eagle3", "model": str(draft), "num_speculative_tokens": ahead}


def engine(options: argparse.Namespace, draft: Path | None, requests: int) -> dict[str, Any]:
    """The arguments of ``LLM``, which those of ``vllm serve`` are named after."""
    compilation: dict[str, Any] = {}
    if options.device == "cpu":
        # vLLM's CPU kernel rotates a query of several heads wrongly where these are a dimension of
        # their own, as in DeepSeek's attention. PyTorch's way is right.
        compilation["custom_ops"] = ["all", "-rotary_embedding"]
    if options.only_graphs:
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    arguments: dict[str, Any] = {
        "dtype": options.dtype,
        "seed": 0,
        "enforce_eager": not (options.graphs or options.only_graphs),
        "max_model_len": 512,
        "max_num_seqs": requests,
        "max_num_batched_tokens": 4096,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": 2**30 if options.device == "cuda" else None,
        "speculative_config": None if draft is None else speculation(draft, options.ahead),
        "compilation_config": compilation,
    }
    return arguments | json.loads(options.engine)


def load(options: argparse.Namespace, draft: Path | None, requests: int) -> Any:
    """The engine in this process."""
    from vllm import LLM

    return LLM(
        model=str(options.target),
        skip_tokenizer_init=True,
        disable_log_stats=False,
        **engine(options, draft, requests),
    )


def answer(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy tokens for each prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def generate(options: argparse.Namespace, draft: Path | None) -> dict[str, Any]:
    """Load vLLM, generate, and read its counters."""
    started = time.perf_counter()
    import vllm
    from vllm.config import SpeculativeConfig

    prompts: list[list[int]] = json.loads(options.prompts.read_text(encoding="utf-8"))
    llm = load(options, draft, len(prompts))
    loaded = time.perf_counter()
    tokens = answer(llm, prompts, options.max_tokens)
    return {
        "vllm": vllm.__version__,
        # What aux-layer-ids, of our patches, puts there.
        "patched": hasattr(SpeculativeConfig, "eagle3_aux_hidden_state_layers"),
        "tokens": tokens,
        "counts": read_counts(llm.get_metrics()).to_json(),
        "seconds_to_load": round(loaded - started, 1),
        "seconds_to_generate": round(time.perf_counter() - loaded, 1),
    }


def read_counts(metrics: Sequence[Any]) -> Counts:
    """Pick the counters of speculation out of vLLM's metrics; all zero without speculation."""
    prefix = "vllm:spec_decode_num_"
    found = {m.name.removeprefix(prefix): m for m in metrics if m.name.startswith(prefix)}
    if not found:
        return Counts()
    return Counts(
        drafts=int(found["drafts"].value),
        draft_tokens=int(found["draft_tokens"].value),
        accepted=int(found["accepted_tokens"].value),
        accepted_per_position=[int(value) for value in found["accepted_tokens_per_pos"].values],
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="without it, no speculation")
    parser.add_argument("--ids", default="", help="layer ids, as in 2,4,5")
    parser.add_argument("--place", choices=("top", "nested", "none"), default="top")
    parser.add_argument("--convention", choices=("boundary", "output"), default="boundary")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON, lists of token ids")
    parser.add_argument("--ahead", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    # "auto" would make bfloat16 of a float32 checkpoint.
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--graphs", action="store_true", help="compile and use CUDA graphs")
    parser.add_argument(
        "--only-graphs", action="store_true", help="CUDA graphs of whole forwards, not compiled"
    )
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.1)
    parser.add_argument("--engine", default="{}", help="further arguments of LLM, as JSON")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


def run(
    arguments: Sequence[str] | None,
    what: Callable[[argparse.Namespace, Path | None], dict[str, Any]],
) -> None:
    """Do something with the draft model that the options ask for, and write what it returns."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        draft = options.draft
        if draft is not None:
            ids = [int(layer_id) for layer_id in options.ids.split(",") if layer_id]
            draft = draft_with_ids(draft, Path(folder), ids, options.place, options.convention)
        result = what(options, draft)
    options.out.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(None, generate)
