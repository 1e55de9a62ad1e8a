"""Processes side by side in benchmarks/acceptance."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from benchmarks.acceptance.pool import Ended, Job, run_all

FAR = 60.0


def job(folder: Path, name: str, code: str, *, seconds: float = FAR, last: bool = False) -> Job:
    command = [sys.executable, "-c", code]
    return Job(name, command, dict(os.environ), folder / f"{name}.txt", seconds, last)


def run(
    jobs: list[Job], *, minutes: float = FAR, stop: bool = False, side_by_side: int = 2
) -> tuple[list[Ended], list[str], int]:
    ended: list[Ended] = []
    quiet: list[None] = []

    def note(done: Ended) -> bool:
        ended.append(done)
        return not stop

    deadline = time.monotonic() + minutes
    left = run_all(jobs, side_by_side, deadline, note, lambda: quiet.append(None))
    return ended, [one.name for one in left], len(quiet)


def test_all_run_and_their_output_is_kept(tmp_path: Path) -> None:
    jobs = [job(tmp_path, name, f"print({name!r}); raise SystemExit(3)") for name in "abc"]
    ended, left, _ = run(jobs)
    assert {(done.job.name, done.code) for done in ended} == {("a", 3), ("b", 3), ("c", 3)}
    assert not left
    assert (tmp_path / "b.txt").read_text() == "b\n"


def test_one_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    ended, left, _ = run([job(tmp_path, "a", "import time; time.sleep(60)", seconds=0.2)])
    assert [done.code for done in ended] == [None]
    assert not left


def test_what_a_process_started_is_ended_with_it(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(started)!r}).write_text(str(child.pid))\n"
    )
    run([job(tmp_path, "a", code)])
    stat = Path(f"/proc/{started.read_text()}/stat")
    for _ in range(100):
        # Its parent is gone: it may stay a zombie until whoever adopted it looks.
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("it still runs")


def test_at_the_deadline_all_end_and_are_named(tmp_path: Path) -> None:
    jobs = [job(tmp_path, name, "import time; time.sleep(60)") for name in "abc"]
    ended, left, _ = run(jobs, minutes=0.3)
    assert not ended
    assert sorted(left) == ["a", "b", "c"]


def test_stopping_names_what_is_left(tmp_path: Path) -> None:
    jobs = [job(tmp_path, name, "pass") for name in "ab"]
    ended, left, _ = run(jobs, stop=True, side_by_side=1)
    assert [done.job.name for done in ended] == ["a"]
    assert left == ["b"]


def test_what_waits_for_quiet_is_told_once_all_else_has_ended(tmp_path: Path) -> None:
    sign = tmp_path / "quiet"
    wait = (
        f"import pathlib, time\nwhile not pathlib.Path({str(sign)!r}).exists(): time.sleep(0.02)\n"
    )
    jobs = [job(tmp_path, "cost", wait, last=True), job(tmp_path, "b", "pass")]
    order: list[str] = []

    def note(done: Ended) -> bool:
        order.append(done.job.name)
        return True

    def quiet() -> None:
        order.append("quiet")
        sign.touch()

    assert not run_all(jobs, 2, time.monotonic() + FAR, note, quiet)
    assert order == ["b", "quiet", "cost"]
