"""What the commands cost, as ratios taken in one run: ``make bench``.

Every figure is a median of runs taken in turns, so that a slow moment of the machine falls on all
of them alike; time is what the processors spent on a command and what it started. What asking vLLM
itself costs is measured where ``VLLM_PYTHON`` names an interpreter that has vLLM.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.fetch_release import copy_site_packages
from vllm_eagle3_patch.ground import matrix

RELEASE = "0.17.1"
RUNS = 7
MANY = 100
SIZES = (1, 2, 4, 8)
MODEL = "vllm/model_executor/models/deepseek_v2.py"
TOOL = [sys.executable, "-m", "vllm_eagle3_patch"]
NOTHING = "python -c pass"
IMPORT = 'python -c "import click"'
AIMS = {"check --json": 2.0, "apply": 15.0}
QUESTION = (
    "from vllm.model_executor.models.registry import ModelRegistry as r; r.get_supported_archs()"
)


class Spent(NamedTuple):
    """What a process and its children took, in seconds: of the processors, and by the clock."""

    processor: float
    elapsed: float


class Step(NamedTuple):
    """One command to measure, and what brings back the state before it."""

    command: Sequence[str]
    after: Callable[[], object] = lambda: None
    folder: Path | None = None


def main() -> None:
    """Measure and print the tables."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        here = copy_site_packages(RELEASE, folder / "site-packages")
        _print_commands(here, folder)
        _print_many(here, folder)
        _print_growth(here, folder)


def _tool(command: str, site_packages: Path, *options: str) -> list[str]:
    return [*TOOL, command, "--site-packages", str(site_packages), *options]


def _print_commands(here: Path, folder: Path) -> None:
    patched = folder / "patched"
    shutil.copytree(here, patched)
    _run(_tool("apply", patched))
    diff = folder / "patch.diff"
    diff.write_bytes(_run(_tool("diff", here)))
    steps = {
        NOTHING: Step([sys.executable, "-c", "pass"]),
        IMPORT: Step([sys.executable, "-c", "import click"]),
        "check --json": Step(_tool("check", here, "--json")),
        "check": Step(_tool("check", here)),
        "check --json, patched": Step(_tool("check", patched, "--json")),
        "diff": Step(_tool("diff", here)),
        "apply": Step(_tool("apply", here), lambda: _run(_tool("revert", here))),
        "revert": Step(_tool("revert", patched), lambda: _run(_tool("apply", patched))),
    }
    if shutil.which("patch"):
        gnu = ["patch", "-p1", "--silent", "-i", str(diff)]
        steps["GNU patch -p1, same diff"] = Step(gnu, lambda: _run([*gnu, "-R"], here), here)
    python = os.environ.get("VLLM_PYTHON")
    if python:
        steps["asking vLLM itself"] = Step([python, "-c", QUESTION])
    taken = _in_turns(steps)
    nothing, imported = (_median(taken[name]) for name in (NOTHING, IMPORT))
    print(f"vLLM {RELEASE}, Python {sys.version.split()[0]}, medians of {RUNS} runs in turns")
    print(
        f"{'':28}{'time':>9}{'to pass':>9}{'to import':>11}{'aim':>6}{'memory':>9}{'elapsed':>10}"
    )
    for name, spent in taken.items():
        median = _median(spent)
        aim = f"{AIMS[name]:.0f}x" if name in AIMS else ""
        elapsed = statistics.median(one.elapsed for one in spent)
        memory = _memory(steps[name])
        print(
            f"{name:28}{median * 1000:6.0f} ms{median / nothing:8.1f}x{median / imported:10.1f}x"
            f"{aim:>6}{memory:5.0f} MiB{elapsed * 1000:7.0f} ms"
        )
    if python:
        ratio = _median(taken["asking vLLM itself"]) / _median(taken["check --json"])
        print(f"check --json is {ratio:.0f} times as fast as asking vLLM itself (aim: 20)")
    else:
        print("asking vLLM itself: not measured (set VLLM_PYTHON to an interpreter that has it)")


def _print_many(here: Path, folder: Path) -> None:
    """A check of each of many installations, one process after another."""
    copies = [_few_files(here, folder / f"installation-{number}") for number in range(MANY)]
    taken = [_spent(Step(_tool("check", copy, "--json"))).processor for copy in copies]
    one = statistics.median(
        _spent(Step(_tool("check", copies[0], "--json"))).processor for _ in "x" * RUNS
    )
    print(
        f"\ncheck --json of {MANY} installations, a process each, one after another: "
        f"{sum(taken):.1f} s, {sum(taken) / one:.0f} times one"
    )


def _print_growth(here: Path, folder: Path) -> None:
    """An apply to a file that no release has, as long as it is and longer."""
    print(f"\napply --unpinned --only deepseek-v2, {MODEL} made longer")
    first = 0.0
    source = (here / MODEL).read_text()
    _, _, methods = source.partition("class DeepseekV2MLP(")
    methods, _, _ = methods.partition("\nclass ")
    for size in SIZES:
        site_packages = folder / f"longer-{size}"
        _few_files(here, site_packages, metadata=False)
        copies, text = 0, f"{source}\n# a local build\n"
        while len(text) < size * len(source):
            copies += 1
            text += f"\n\nclass Padding{copies}({methods}"
        (site_packages / MODEL).unlink()
        (site_packages / MODEL).write_text(text)
        command = _tool("apply", site_packages, "--unpinned", "--only", "deepseek-v2")
        spent = _spent(Step(command))
        first = first or spent.processor
        print(
            f"{size}x ({len(text) // 1024:4} KiB){spent.processor * 1000:8.0f} ms"
            f"{spent.processor / first:6.2f}x"
        )


def _few_files(here: Path, copy: Path, *, metadata: bool = True) -> Path:
    """An installation of the files that the matrix names, each a link, and its metadata."""
    release = matrix.load(RELEASE)
    assert release is not None
    paths = {*release.files, *release.evidence, "vllm/__init__.py", "vllm/_version.py"}
    if metadata:
        (info,) = here.glob("*.dist-info")
        paths |= {str(file.relative_to(here)) for file in info.rglob("*") if file.is_file()}
    for path in paths:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        os.link(here / path, copy / path)
    return copy


def _in_turns(steps: dict[str, Step]) -> dict[str, list[Spent]]:
    taken: dict[str, list[Spent]] = {name: [] for name in steps}
    for turn in range(RUNS + 1):
        for name, step in steps.items():
            spent = _spent(step)
            step.after()
            if turn:  # The first fills the caches.
                taken[name].append(spent)
    return taken


def _median(spent: Sequence[Spent]) -> float:
    return statistics.median(one.processor for one in spent)


def _spent(step: Step) -> Spent:
    start = time.perf_counter()
    with tempfile.TemporaryFile() as complaint:
        process = subprocess.Popen(
            step.command, cwd=step.folder, stdout=subprocess.DEVNULL, stderr=complaint
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in {0, 1}:
            complaint.seek(0)
            raise SystemExit(f"{step.command}: {complaint.read().decode()}")
    elapsed = time.perf_counter() - start
    return Spent(usage.ru_utime + usage.ru_stime, elapsed)


def _memory(step: Step) -> float:
    """The most memory that a command has at a time, in MiB.

    It is started by a small process, since the figure begins with what its parent has.
    """
    starter = (
        "import os, sys\n"
        "out = os.dup(1)\n"
        "os.dup2(os.open(os.devnull, os.O_WRONLY), 1)\n"
        "pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)\n"
        "os.write(out, str(os.wait4(pid, 0)[2].ru_maxrss).encode())\n"
    )
    program = shutil.which(step.command[0])
    assert program is not None
    command = [sys.executable, "-S", "-c", starter, program, *step.command[1:]]
    kibibytes = int(_run(command, step.folder))
    step.after()
    return kibibytes / 1024


def _run(command: Sequence[str], folder: Path | None = None) -> bytes:
    done = subprocess.run(command, capture_output=True, check=False, cwd=folder)
    if done.returncode > 1:
        raise SystemExit(done.stderr.decode())
    return done.stdout


if __name__ == "__main__":
    main()
