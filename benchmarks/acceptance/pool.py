"""Processes side by side, each bounded in time and ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

POLL = 0.1


@dataclass
class Job:
    """A process to run.

    Attributes:
        name: For whoever reads of it.
        command: What to run.
        environment: Its whole environment.
        log: Where its output goes, both streams.
        seconds: After how many it is ended.
        last: Whether it waits, once started, until nothing else runs.
    """

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    log: Path
    seconds: float
    last: bool = False


@dataclass
class Ended:
    """How a job ended: its exit code, none if it was ended for its time, and its seconds."""

    job: Job
    code: int | None
    seconds: float


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    started: float = field(default_factory=time.monotonic)


def run_all(
    jobs: Sequence[Job],
    side_by_side: int,
    deadline: float,
    ended: Callable[[Ended], bool],
    quiet: Callable[[], None],
) -> list[Job]:
    """Run the jobs in their order, several at a time.

    Args:
        jobs: What to run.
        side_by_side: How many at a time.
        deadline: When to end all, on the monotonic clock.
        ended: Called as each job ends by itself or by its own limit; says whether to go on.
        quiet: Called once only jobs are left that wait for it.

    Returns:
        The jobs that were not run to their end.
    """
    waiting, running = list(jobs), list[_Running]()
    told = False
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < side_by_side:
                running.append(_start(waiting.pop(0)))
            for one in list(running):
                done = _look(one)
                if done is not None:
                    running.remove(one)
                    if not ended(done):
                        return [other.job for other in running] + waiting
            if not told and not waiting and all(one.job.last for one in running):
                quiet()
                told = True
            time.sleep(POLL)
        return [one.job for one in running] + waiting
    finally:
        for one in running:
            _end(one)


def _start(job: Job) -> _Running:
    output = job.log.open("wb")
    process = subprocess.Popen(
        job.command,
        env=job.environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return _Running(job, process, output)


def _look(one: _Running) -> Ended | None:
    code = one.process.poll()
    seconds = time.monotonic() - one.started
    if code is None and seconds < one.job.seconds:
        return None
    _end(one)
    return Ended(one.job, code, round(seconds, 1))


def _end(one: _Running) -> None:
    """End the process and what it started: a server's workers outlive it otherwise."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.process.pid, signal.SIGKILL)
    one.process.wait()
    one.output.close()
