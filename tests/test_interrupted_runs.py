"""Runs that are killed, or fail, before or after any change they make to the file system."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from fault_injection import BEFORE, EACH, failing_at, killed_at, points_of
from small_installation import (
    LINKED,
    NEW,
    NEWER,
    OLD,
    PATHS,
    Entry,
    apply,
    change,
    contents,
    make_installation,
    new,
    newer,
    tree,
)
from vllm_eagle3_patch.errors import NotWritableError
from vllm_eagle3_patch.lock import held_by
from vllm_eagle3_patch.transaction import recover, revert, unfinished

Action = Callable[[Path], object]
Contents = dict[str, bytes]

STATE = ".vllm-eagle3-patch"
EXCLUDE = b"# mine, and no newline at the end\n*.o"
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EMFILE, errno.EDQUOT)


def nothing(root: Path) -> None:
    pass


def apply_old_to_new(root: Path) -> None:
    apply(root)


def apply_new_to_newer(root: Path) -> None:
    apply(root, *(change(path, new(path), newer(path)) for path in PATHS))


def apply_over_an_edit(root: Path) -> None:
    apply(root, change(LINKED, b"edited", newer(LINKED), keep_aside=True))


def edit_after_apply(root: Path) -> None:
    apply(root)
    (root / LINKED).unlink()
    (root / LINKED).write_bytes(b"edited")


def undo(root: Path) -> None:
    revert(root)


def undo_by_force(root: Path) -> None:
    revert(root, force=True)


EDITED = NEW | {LINKED: b"edited"}
PLAIN_RUNS = [
    pytest.param(nothing, apply_old_to_new, OLD, NEW, id="apply"),
    pytest.param(apply_old_to_new, undo, NEW, OLD, id="revert"),
]
OTHER_RUNS = [
    pytest.param(apply_old_to_new, apply_new_to_newer, NEW, NEWER, id="apply again"),
    pytest.param(
        edit_after_apply, apply_over_an_edit, EDITED, NEW | {LINKED: newer(LINKED)}, id="apply over"
    ),
    pytest.param(edit_after_apply, undo_by_force, EDITED, OLD, id="revert over an edit"),
]
RUN = ("prepare", "run", "before", "after")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that it wrote, synced or not."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Case:
    """Fresh copies of one installation, in a checkout, and what they must come back to."""

    def __init__(self, folder: Path, prepare: Action) -> None:
        self.folder = folder
        self.prepare = prepare
        self.number = 0

    def fresh(self) -> Path:
        self.number += 1
        root = make_installation(self.folder / str(self.number))
        (root / ".git/info").mkdir(parents=True)
        (root / ".git/HEAD").write_bytes(b"ref: refs/heads/main\n")
        (root / ".git/info/exclude").write_bytes(EXCLUDE)
        self.original = without_ours(tree(root))
        self.prepare(root)
        self.before = without_ours(tree(root))
        return root

    def assert_whole(self, root: Path, before: Contents, after: Contents) -> None:
        """Every file, each by itself, is as before or as after the run; nothing is torn."""
        for path, data in contents(root).items():
            assert data in (before[path], after[path])

    def assert_ended(self, root: Path, before: Contents, after: Contents) -> None:
        """The run is wholly undone or wholly done, nothing is left of it, revert gets back."""
        assert unfinished(root) is None
        assert not leftovers_of_a_run(root)
        if contents(root) == before:
            assert without_ours(tree(root)) == self.before
        assert contents(root) in (before, after)
        if contents(root) == OLD and not (root / STATE / "edited").exists():
            assert not (root / STATE).exists()
        revert(root, force=True)
        assert without_ours(tree(root)) == self.original
        if (root / STATE).exists():
            assert {path.name for path in (root / STATE).iterdir()} == {"README", "edited"}
        else:
            assert (root / ".git/info/exclude").read_bytes() == EXCLUDE


def without_ours(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Leave out our state, and git's exclude file, which is compared by itself."""
    ours = (STATE, ".git/info/exclude")
    return {name: entry for name, entry in entries.items() if not name.startswith(ours)}


def leftovers_of_a_run(root: Path) -> list[str]:
    known = ("README", "manifest.json", "originals", "copies", "edited")
    in_state = [name for name in tree(root / STATE) if not name.startswith(known)]
    return in_state + [
        name
        for name in tree(root)
        if "vllm-eagle3-patch" in name and not (name == STATE or name.startswith(STATE + "/"))
    ]


@pytest.mark.parametrize(RUN, PLAIN_RUNS + OTHER_RUNS)
def test_killed_anywhere(
    tmp_path: Path, prepare: Action, run: Action, before: Contents, after: Contents
) -> None:
    case = Case(tmp_path, prepare)
    moments = EACH if run is apply_old_to_new else BEFORE
    ends = set()
    for number in count():
        root = case.fresh()
        if not killed_at(number, partial(run, root), moments):
            break
        case.assert_whole(root, before, after)
        assert held_by(root) is None
        mixed = contents(root) not in (before, after)
        journal = unfinished(root)
        assert journal is not None or not mixed
        # The recovery is killed too, somewhere, and then started again.
        killed_at(number % 20, partial(recover, root), BEFORE)
        case.assert_whole(root, before, after)
        recover(root)
        ends.add(contents(root) == after)
        case.assert_ended(root, before, after)
    assert number > 60
    assert ends == {True, False}
    assert contents(root) == after
    case.assert_ended(root, before, after)


@pytest.mark.parametrize(RUN, PLAIN_RUNS)
def test_recovery_killed_anywhere(
    tmp_path: Path, prepare: Action, run: Action, before: Contents, after: Contents
) -> None:
    case = Case(tmp_path, prepare)
    root = case.fresh()
    swaps = [
        number
        for number, (moment, operation, path) in enumerate(points_of(partial(run, root)))
        if (moment, operation) == ("after", "rename")
        and (path.name == "concluded.json" or str(path.relative_to(root)) in PATHS)
    ]
    for interrupted in swaps[-2:]:
        for number in count():
            root = case.fresh()
            assert killed_at(interrupted, partial(run, root))
            if not killed_at(number, partial(recover, root), BEFORE):
                break
            case.assert_whole(root, before, after)
            recover(root)
            case.assert_ended(root, before, after)
        assert number > 10


@pytest.mark.parametrize(RUN, PLAIN_RUNS + OTHER_RUNS)
def test_one_change_failing(
    tmp_path: Path, prepare: Action, run: Action, before: Contents, after: Contents
) -> None:
    case = Case(tmp_path, prepare)
    moments = EACH if run in (apply_old_to_new, undo) else BEFORE
    for number in count():
        root = case.fresh()
        with failing_at(number, refusal(number), moments) as failed:
            done = succeeds(partial(run, root))
        if not failed:
            break
        assert contents(root) == (after if done else before)
        assert unfinished(root) is None
        recover(root)
        case.assert_ended(root, before, after)
    assert number > 60


@pytest.mark.parametrize(RUN, PLAIN_RUNS)
def test_every_change_failing_from_one_on(
    tmp_path: Path, prepare: Action, run: Action, before: Contents, after: Contents
) -> None:
    case = Case(tmp_path, prepare)
    for number in count():
        root = case.fresh()
        with failing_at(number, refusal(number), BEFORE, lasting=True) as failed:
            done = succeeds(partial(run, root))
        if not failed:
            break
        case.assert_whole(root, before, after)
        assert not done or contents(root) == after
        recover(root)
        case.assert_ended(root, before, after)
    assert number > 60


@pytest.mark.parametrize(RUN, PLAIN_RUNS)
def test_interrupted_from_the_keyboard(
    tmp_path: Path, prepare: Action, run: Action, before: Contents, after: Contents
) -> None:
    case = Case(tmp_path, prepare)
    for number in count():
        root = case.fresh()
        with failing_at(number, KeyboardInterrupt(), BEFORE) as failed, suppress(KeyboardInterrupt):
            run(root)
        if not failed:
            break
        assert unfinished(root) is None
        recover(root)
        case.assert_ended(root, before, after)
    assert number > 60


def refusal(number: int) -> OSError:
    error = ERRORS[number % len(ERRORS)]
    return OSError(error, os.strerror(error))


def succeeds(run: Callable[[], object]) -> bool:
    try:
        run()
    except NotWritableError as error:
        assert "\n" not in error.message + error.hint
        return False
    return True
