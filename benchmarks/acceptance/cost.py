"""What the patch costs with EAGLE-3 off: the same generated unpatched and patched, in turn.

``python -m benchmarks.acceptance.cost`` starts an engine of each interpreter, eager and with CUDA
graphs, loads them side by side, waits until nothing else runs (until the file that it is given
exists), and lets one after the other generate. ``worker`` is such an engine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROUNDS = 12


def ratios(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Patched against unpatched by mode, and how far unpatched rounds are from each other.

    Args:
        seconds: By ``variant mode``, as ``stock eager``; the first round, a warm-up, left out.
    """
    found = {}
    for name in seconds:
        variant, mode = name.split()
        if variant != "stock":
            continue
        unpatched, patched = seconds[name], seconds[f"patched {mode}"]
        found[mode] = {
            "ratio": round(statistics.median(patched) / statistics.median(unpatched), 4),
            "spread": round(max(unpatched) / min(unpatched), 4),
            "seconds": round(statistics.median(unpatched), 4),
        }
    return found


def worker(arguments: Sequence[str]) -> None:
    """Load an engine, say so, and generate once for each line that comes; say how long it took."""
    from benchmarks.acceptance import speculate

    options = speculate.parse(arguments)
    prompts: list[list[int]] = json.loads(options.prompts.read_text(encoding="utf-8"))
    llm = speculate.load(options, None, len(prompts))
    print("loaded", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        speculate.answer(llm, prompts, options.max_tokens)
        print(f"seconds {time.perf_counter() - started:.6f}", flush=True)


def _said(process: subprocess.Popen[str], word: str) -> str:
    """What follows the word, in the next line that begins with it; vLLM prints others."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return line.removeprefix(word).strip()
    raise SystemExit(f"a worker ended before it said {word!r}")


def compare(options: argparse.Namespace, others: Sequence[str]) -> dict[str, Any]:
    """Let the four take turns."""
    interpreters = {"stock": options.stock, "patched": options.patched}
    workers: dict[str, subprocess.Popen[str]] = {}
    for mode, flags in (("eager", []), ("graphs", ["--graphs"])):
        for variant, python in interpreters.items():
            command = [python, "-m", "benchmarks.acceptance.cost", "worker", *others, *flags]
            workers[f"{variant} {mode}"] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
    for process in workers.values():
        _said(process, "loaded")
    while not options.quiet.exists():
        time.sleep(0.2)
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for number in range(ROUNDS + 1):
        turns = list(workers.items())
        for name, process in turns if number % 2 else reversed(turns):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            taken = float(_said(process, "seconds"))
            if number:
                seconds[name].append(taken)
    for process in workers.values():
        process.kill()
    return {"cost": ratios(seconds), "rounds": ROUNDS, "seconds_each": seconds}


def main() -> None:
    """Run as a worker, or start four."""
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stock", required=True, help="interpreter with the unpatched vLLM")
    parser.add_argument("--patched", required=True)
    parser.add_argument("--quiet", type=Path, required=True, help="exists once nothing else runs")
    options, others = parser.parse_known_args()
    out = Path(others[others.index("--out") + 1])
    out.write_text(json.dumps(compare(options, others)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
