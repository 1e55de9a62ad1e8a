"""What the patch costs where EAGLE-3 is off: ``make bench-runtime``.

A real engine on the CPU generates for the same prompts, unpatched and patched in turn, each in a
process of its own. The ratio of the medians is printed beside how far unpatched runs are from each
other: a cost is measurable only if it is more than that.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from runtime.environment import Environment
from runtime.releases import RELEASES

ROUNDS = 5


def main() -> None:
    """Make an environment, unless one is given, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", type=Path, help="one with the release in it, unpatched")
    parser.add_argument("--release", default="0.17.1")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    release = next(release for release in RELEASES if release.version == given.release)
    with tempfile.TemporaryDirectory(prefix="vllm-eagle3-patch-cost-") as folder:
        environment = Environment(given.environment or Path(folder) / "environment", release)
        if given.environment is None:
            environment.make(Path(folder) / "cache")
        print(_compare(environment, Path(folder), given.rounds))


def _compare(environment: Environment, work: Path, rounds: int) -> str:
    environment.measure("write_models", work / "models.json", folder=work, drafts="{}")
    unpatched, patched = [], []
    for _ in range(rounds):
        unpatched.append(_median_seconds(environment, work))
        environment.tool("apply", *environment.release.apply)
        patched.append(_median_seconds(environment, work))
        environment.tool("revert")
    ratio = statistics.median(patched) / statistics.median(unpatched)
    spread = max(unpatched) / min(unpatched)
    return (
        f"vLLM {environment.release.version}, eager, EAGLE-3 off, {rounds} processes each: "
        f"patched / unpatched = {ratio:.3f} (medians); "
        f"slowest / quickest unpatched = {spread:.3f}"
    )


def _median_seconds(environment: Environment, work: Path) -> float:
    tensors = work / "tensors.pt"
    tensors.unlink(missing_ok=True)
    report = environment.measure(
        "off",
        work / "off.json",
        target=work / "target",
        mode="eager",
        cache=work / "cache",
        tensors=tensors,
    )
    return float(report["median_seconds"])


if __name__ == "__main__":
    main()
