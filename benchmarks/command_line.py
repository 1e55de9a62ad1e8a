"""How long ``check`` and ``apply`` take, against importing what any such tool imports.

Run as ``make bench``. The figures are medians of ten runs, taken in turn so that a slow moment of
the machine falls on all of them alike.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.fetch_release import copy_site_packages

RELEASE = "0.17.1"
RUNS = 10
BASE = [sys.executable, "-c", "import click, rich.table"]
AIMS = {"check": 2, "check --json": 2, "apply": 15}


def main() -> None:
    """Measure and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        site_packages = copy_site_packages(RELEASE, Path(folder) / "site-packages")
        here = ["--site-packages", str(site_packages)]
        tool = [sys.executable, "-m", "vllm_eagle3_patch"]
        steps: dict[str, tuple[Sequence[str], Callable[[], object]]] = {
            "import click, rich.table": (BASE, lambda: None),
            "check": ([*tool, "check", *here], lambda: None),
            "check --json": ([*tool, "check", *here, "--json"], lambda: None),
            "apply": ([*tool, "apply", *here], lambda: _run([*tool, "revert", *here])),
        }
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for command, after in steps.values():
            _run(command)
            after()
        for _ in range(RUNS):
            for name, (command, after) in steps.items():
                taken[name].append(_seconds(command))
                after()
    base = statistics.median(taken["import click, rich.table"])
    print(f"vLLM {RELEASE}, Python {sys.version.split()[0]}, medians of {RUNS} runs")
    print(f"{'command':28}{'median':>10}{'ratio':>8}{'aim':>8}")
    for name, seconds in taken.items():
        median = statistics.median(seconds)
        aim = f"{AIMS[name]}x" if name in AIMS else ""
        print(f"{name:28}{median * 1000:7.0f} ms{median / base:7.2f}x{aim:>8}")


def _seconds(command: Sequence[str]) -> float:
    start = time.perf_counter()
    _run(command)
    return time.perf_counter() - start


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode > 1:
        raise SystemExit(done.stderr.decode())


if __name__ == "__main__":
    main()
