"""What is on disk after a loss of power is never torn or mixed, whatever had not been synced yet.

Nothing here loses power: the model in ``durable`` follows the points that every change goes
through, and what it says would have survived is put in the place of the installation.
"""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from durable import NEVER_SYNCED, Disk, Survivors

from fault_injection import in_memory, stepping
from safety_table import Tried
from small_installation import (
    LINKED,
    OLD,
    PATHS,
    SYMLINK,
    contents,
    make_installation,
    revert,
    tree,
)
from test_interrupted_runs import (
    EXCLUDE,
    LAST_COPIES,
    OTHER_RUNS,
    PLAIN_RUNS,
    REINSTALLED,
    RUN,
    SAID,
    STATE,
    Action,
    Contents,
    apply_old_to_new,
    kept_contents,
    leftovers_of_a_run,
    reinstall_after_apply,
    without_ours,
)
from vllm_eagle3_patch.ground.filesystem import Moment, Step
from vllm_eagle3_patch.transaction.recovery import recover
from vllm_eagle3_patch.transaction.state import lock
from vllm_eagle3_patch.transaction.state.journal import unfinished
from vllm_eagle3_patch.transaction.state.lock import held_by
from vllm_eagle3_patch.transaction.state.lock_holder import this_process

Point = tuple[str, Disk]

__all__ = ["in_memory"]  # a fixture

LOSSES: dict[str, Callable[[Disk], Survivors]] = {
    "nothing that was not synced survives": Disk.nothing_unsynced,
    "all names survive, files that were not synced are empty": Disk.names_without_data,
    "a seeded mixture of what was synced and what was not": lambda disk: disk.mixture(CHANCE),
}
CHANCE = random.Random(0)
SWAPPED = f"site-packages/{LINKED}"


@pytest.fixture(autouse=True)
def _only_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts as synced is what the points say; the holder of the lock ran before the loss."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(
        lock, "this_process", lambda: replace(this_process(), boot="before the power failed")
    )


@pytest.fixture
def place(in_memory: Path) -> Path:
    return in_memory / "place"


def prepared(place: Path, prepare: Action) -> Path:
    """A small installation in a checkout; returns its root."""
    root = make_installation(place)
    (root / ".git/info").mkdir(parents=True)
    (root / ".git/HEAD").write_bytes(b"ref: refs/heads/main\n")
    (root / ".git/info/exclude").write_bytes(EXCLUDE)
    prepare(root)
    return root


def as_seen(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file but ours: its mode, time and bytes. Inodes are not those that there were."""
    return {
        name: (mode, changed, data)
        for name, (mode, _, changed, data) in without_ours(tree(root)).items()
        if not name.startswith(lock.FOLDER)
    }


def disks_of(
    place: Path,
    action: Callable[[], object],
    disk: Disk | None = None,
    noted: Callable[[], bool] = lambda: True,
) -> list[Point]:
    """Do an action; return the disk as it was at first and after each change, with its name.

    What happens later is durable or not by what ``disk`` says was durable at first. With ``noted``
    only some changes are returned, and the end.
    """
    disk = disk or Disk(place)
    points = [("at first", disk.moment())]

    def step(moment: str, operation: str, path: Path) -> None:
        disk.step(moment, operation, path)
        if moment == "after" and noted():
            points.append((f"{operation} {path.relative_to(place)}", disk.moment()))

    with stepping(step):
        action()
    points.append(("at the end", disk.moment()))
    return points


def assert_whole(root: Path, before: Contents, after: Contents, where: str) -> None:
    """No file is torn, and where files are mixed a journal says so."""
    found = contents(root)
    for path, data in found.items():
        assert data in (before[path], after[path]), where
    assert unfinished(root) is not None or found in (before, after), where
    assert held_by(root) is None, where


def assert_ended(root: Path, before: Contents, after: Contents, where: str) -> None:
    """All files are as before or all as after the run, and nothing is left of it."""
    assert contents(root) in (before, after), where
    assert unfinished(root) is None, where
    assert not leftovers_of_a_run(root), where


def assert_reverts(root: Path, original: dict[str, tuple[int, int, bytes]], where: str) -> None:
    revert(root, force=True)
    assert as_seen(root) == original, where
    assert (root / LINKED).samefile(root.parent / "cache/linked.py"), where
    if (root / STATE).exists():
        assert {path.name for path in (root / STATE).iterdir()} == {"README", "edited"}, where
    else:
        assert (root / ".git/info/exclude").read_bytes() == EXCLUDE, where


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(RUN, PLAIN_RUNS + OTHER_RUNS)
def test_power_lost_at_any_point(
    place: Path,
    prepare: Action,
    run: Action,
    before: Contents,
    after: Contents,
    loss: str,
    tried: Tried,
) -> None:
    original = as_seen(prepared(place, lambda root: None))
    root = place / "site-packages"
    prepare(root)
    as_before = as_seen(root)
    ends = []
    points = disks_of(place, partial(run, root))
    for number, (change, disk) in enumerate(points):
        where = f"{number} {change}"
        disk.restore(LOSSES[loss](disk))
        assert_whole(root, before, after, where)
        recover(root)
        assert_ended(root, before, after, where)
        ends.append(contents(root) == after)
        if not ends[-1]:
            assert as_seen(root) == as_before
            if number % 3 == 0:
                run(root)
                assert_ended(root, after, after, where)
        assert_reverts(root, original, where)
    assert not ends[0]
    assert ends[-1]
    tried(
        "Power loss",
        f"{SAID[run]}, the power fails after any change: {loss}",
        how="a model of what was synced follows every change; what survives is put on disk",
        count=len(points),
        result="wholly undone or wholly done; revert gets every original back",
    )


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("run", "after"), LAST_COPIES)
def test_power_lost_where_a_last_copy_is_moved(
    place: Path, run: Action, after: Contents, loss: str
) -> None:
    root = prepared(place, reinstall_after_apply)
    points = disks_of(place, partial(run, root))
    for number, (change, disk) in enumerate(points):
        disk.restore(LOSSES[loss](disk))
        kept = kept_contents(root, "originals", "copies", "edited")
        assert kept >= {*OLD.values()}, f"{number} {change}"
        recover(root)
        kept = kept_contents(root, "originals", "copies", "edited")
        assert kept >= {*OLD.values()}, f"{number} {change}"
        assert contents(root) in (REINSTALLED, after)
    assert kept_contents(root, "edited") == {*OLD.values()}


class KilledError(BaseException):
    """Everything that changes anything raises this from one point on, as if it were killed."""


@pytest.mark.parametrize(RUN, PLAIN_RUNS + OTHER_RUNS[:1])
def test_power_lost_during_the_recovery_of_a_killed_run(
    place: Path, prepare: Action, run: Action, before: Contents, after: Contents, tried: Tried
) -> None:
    """What the killed run had not synced is not taken for durable by the recovery."""
    losses = 0
    chance = random.Random(1)
    original = as_seen(prepared(place, lambda root: None))
    root = place / "site-packages"
    prepare(root)
    at_first = Disk(place)
    changes = len(disks_of(place, partial(run, root))) - len(("at first", "at the end"))
    for number in range(changes):
        at_first.restore(at_first.nothing_unsynced())
        disk = Disk(place)
        with pytest.raises(KilledError), stepping(killing(disk, number)):
            run(root)
        moments = disks_of(place, partial(recover, root), disk, lambda: chance.random() < 0.1)
        for point, moment in (chance.choice(moments), moments[-1]):
            where = f"killed at {number}, then power lost after {point}"
            survivors = (moment.nothing_unsynced(), moment.mixture(chance))
            moment.restore(chance.choice(survivors))
            assert_whole(root, before, after, where)
            recover(root)
            assert_ended(root, before, after, where)
            losses += 1
        assert_reverts(root, original, where)
    tried(
        "Power loss",
        f"{SAID[run]} is killed at any change, then the power fails during the recovery",
        how="as above, at the end of the recovery and at one of its changes",
        count=losses,
        result="wholly undone or wholly done; revert gets every original back",
    )


def killing(disk: Disk, number: int) -> Step:
    passed = count()

    def step(moment: Moment, operation: str, path: Path) -> None:
        if moment == "before" and next(passed) >= number:
            raise KilledError
        disk.step(moment, operation, path)

    return step


@pytest.mark.parametrize("loss", LOSSES)
def test_installed_a_moment_ago_and_not_synced(place: Path, loss: str, tried: Tried) -> None:
    """What is kept is synced before anything is swapped, whoever wrote it."""
    root = prepared(place, lambda root: None)
    disk = Disk(place)
    for path in PATHS:
        disk.inode((root / path).resolve()).durable_content = NEVER_SYNCED
    points = disks_of(place, partial(apply_old_to_new, root), disk)
    first = next(number for number, (where, _) in enumerate(points) if where == f"rename {SWAPPED}")
    for where, moment in points[first:]:
        moment.restore(LOSSES[loss](moment))
        recover(root)
        revert(root)
        (place / "cache/symlink.py").write_bytes(OLD[SYMLINK])
        assert contents(root) == OLD, where
    tried(
        "Power loss",
        f"apply to files that their installer never synced: {loss}",
        how="as above, after each change from the first replaced file on",
        count=len(points) - first,
        result="revert gets every original back",
    )
