"""Ending a process, or failing a call, at any change it makes to the file system."""

import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from vllm_eagle3_patch.ground import filesystem
from vllm_eagle3_patch.ground.filesystem import Moment, Step

Point = tuple[Moment, str, Path]
EACH: tuple[Moment, ...] = ("before", "after")
BEFORE: tuple[Moment, ...] = ("before",)


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system in memory where there is one: for thousands of small changes."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="vllm-eagle3-patch-", dir=memory) as folder:
        yield Path(folder)


@contextmanager
def stepping(step: Step) -> Iterator[None]:
    """Have this called before and after each change to the file system."""
    filesystem.step = step
    try:
        yield
    finally:
        filesystem.step = filesystem.go_on


def points_of(action: Callable[[], object]) -> list[Point]:
    """The points at which an action could be interrupted, doing it."""
    points: list[Point] = []
    with stepping(lambda *point: points.append(point)):
        action()
    return points


def killed_at(
    number: int, action: Callable[[], object], moments: Collection[Moment] = EACH
) -> bool:
    """Do an action in a child process that is killed at a point.

    Args:
        number: Which of the points.
        action: What to do.
        moments: The points that count. What is on disk after one change and before the next is the
            same: where ``before`` alone counts, no state is left out.

    Returns:
        Whether it was killed; False if the action has fewer points.
    """
    child = os.fork()
    if child == 0:
        _kill_self_at(number, action, moments)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, f"the child failed with status {status}"
    return killed


def _kill_self_at(number: int, action: Callable[[], object], moments: Collection[Moment]) -> None:
    passed = count()

    def step(moment: Moment, operation: str, path: Path) -> None:
        if moment in moments and next(passed) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        with stepping(step):
            action()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@contextmanager
def failing_at(
    number: int,
    error: BaseException,
    moments: Collection[Moment] = EACH,
    *,
    lasting: bool = False,
) -> Iterator[list[Point]]:
    """Have one point raise an error, or all from there on; yields a list of those that did."""
    passed = count()
    failed: list[Point] = []

    def step(moment: Moment, operation: str, path: Path) -> None:
        if (moment in moments and next(passed) == number) or (lasting and failed):
            failed.append((moment, operation, path))
            raise error

    with stepping(step):
        yield failed
