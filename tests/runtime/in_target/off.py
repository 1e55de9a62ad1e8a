"""Off means off: what the engine computes with EAGLE-3 off, for a comparison before and after.

Run twice, before and after the patch; the second run compares with the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

from in_target.engine import Watched, prepare_environment, prompts

REPEATS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--mode", choices=("eager", "compiled"), required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--tensors", type=Path, required=True, help="written first, then compared")
    parser.add_argument("--report", type=Path, required=True)
    given = parser.parse_args()
    prepare_environment(given.cache)
    report = run(given.target, given.mode, given.tensors)
    given.report.write_text(json.dumps(report))


def run(target: Path, mode: str, tensors: Path) -> dict[str, object]:
    import torch

    watched = Watched(target, eager=mode == "eager", hooks=False)
    with watched.record() as recording:
        tokens = watched.generate(prompts())
    assert all(forward.states is None for forward in recording.forwards)
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        watched.generate(prompts())
        seconds.append(time.perf_counter() - start)
    now = {"tokens": tokens, "logits": recording.logits}
    report: dict[str, object] = {
        "forwards": len(recording.forwards),
        "median_seconds": statistics.median(seconds),
        "graphs": _graphs(),
    }
    if not tensors.exists():
        torch.save(now, tensors)
        return report
    before = torch.load(tensors)
    pairs = list(zip(before["logits"], now["logits"], strict=True))
    return {
        **report,
        "same_tokens": before["tokens"] == tokens,
        "tensors": len(pairs),
        "identical": sum(torch.equal(one, other) for one, other in pairs),
        "largest_difference": max((one - other).abs().max().item() for one, other in pairs),
    }


def _graphs() -> list[str]:
    """The names of all compiled graphs, which are hashes of what was traced."""
    cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    return sorted(
        str(folder.relative_to(cache))
        for kind in ("aotautograd", "fxgraph")
        for folder in (cache / kind).glob("*/*")
    )


if __name__ == "__main__":
    main()
