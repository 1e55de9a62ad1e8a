"""Runs that are killed, or fail, before or after any change they make to the file system."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from fault_injection import BEFORE, EACH, failing_at, in_memory, killed_at, points_of, stepping
from safety_table import Tried
from small_installation import (
    LINKED,
    NEW,
    NEWER,
    OLD,
    PATHS,
    PLAIN,
    Entry,
    apply,
    change,
    contents,
    make_installation,
    new,
    newer,
    old,
    revert,
    tree,
)
from vllm_eagle3_patch import __version__
from vllm_eagle3_patch.commands.revert import revert as revert_command
from vllm_eagle3_patch.ground.digest import sha256
from vllm_eagle3_patch.ground.errors import BlockedError, NotWritableError
from vllm_eagle3_patch.installation.find import Where
from vllm_eagle3_patch.transaction.recovery import recover
from vllm_eagle3_patch.transaction.revert import Origins
from vllm_eagle3_patch.transaction.state.journal import unfinished
from vllm_eagle3_patch.transaction.state.lock import held_by
from vllm_eagle3_patch.transaction.state.verified import Verified, read_verified
from vllm_eagle3_patch.transaction.verdicts import record_verification

__all__ = ["in_memory"]  # a fixture

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


def delete_after_apply(root: Path) -> None:
    apply(root)
    (root / LINKED).unlink()


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
STRIDE = 7
"""How far apart the points are at which a recovery and then another one are killed."""
SAID = {
    apply_old_to_new: "apply",
    undo: "revert",
    apply_new_to_newer: "apply over an earlier version's patch",
    apply_over_an_edit: "apply --force over a file edited since",
    undo_by_force: "revert --force over a file edited since",
}


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

    def assert_recovers(self, root: Path, before: Contents, after: Contents) -> None:
        """Nothing is torn, and one more recovery ends the run."""
        self.assert_whole(root, before, after)
        recover(root)
        self.assert_ended(root, before, after)


def without_ours(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Leave out our state, and git's exclude file, which is compared by itself."""
    ours = (STATE, ".git/info/exclude")
    return {name: entry for name, entry in entries.items() if not name.startswith(ours)}


def leftovers_of_a_run(root: Path) -> list[str]:
    known = ("README", "manifest.json", "verified.json", "originals", "copies", "edited")
    in_state = [name for name in tree(root / STATE) if not name.startswith(known)]
    return in_state + [
        name
        for name in tree(root)
        if "vllm-eagle3-patch" in name and not (name == STATE or name.startswith(STATE + "/"))
    ]


@pytest.mark.parametrize(RUN, PLAIN_RUNS + OTHER_RUNS)
def test_killed_anywhere(
    in_memory: Path, prepare: Action, run: Action, before: Contents, after: Contents, tried: Tried
) -> None:
    case = Case(in_memory, prepare)
    ends = set()
    for number in count():
        root = case.fresh()
        if not killed_at(number, partial(run, root)):
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
    tried(
        "Killed",
        f"{SAID[run]} is killed at any change to the file system",
        how="SIGKILL before and after each; the recovery that follows is killed too",
        count=number,
        result="wholly undone or wholly done; revert gets the original tree back",
    )


@pytest.mark.parametrize(RUN, PLAIN_RUNS)
def test_recovery_killed_anywhere(
    in_memory: Path, prepare: Action, run: Action, before: Contents, after: Contents, tried: Tried
) -> None:
    case = Case(in_memory, prepare)
    root = case.fresh()
    swaps = [
        number
        for number, (moment, operation, path) in enumerate(points_of(partial(run, root)))
        if (moment, operation) == ("after", "rename")
        and (path.name == "concluded.json" or str(path.relative_to(root)) in PATHS)
    ]
    once = twice = 0
    for interrupted in swaps[-2:]:
        for number in count():
            root = case.fresh()
            assert killed_at(interrupted, partial(run, root))
            if not killed_at(number, partial(recover, root)):
                break
            once += 1
            case.assert_recovers(root, before, after)
            if number % STRIDE:
                continue
            for second in count(number // STRIDE % STRIDE, STRIDE):
                root = case.fresh()
                assert killed_at(interrupted, partial(run, root))
                assert killed_at(number, partial(recover, root))
                if not killed_at(second, partial(recover, root)):
                    break
                twice += 1
                case.assert_recovers(root, before, after)
        assert number > 20
    for times, number in (("", once), ("twice in a row ", twice)):
        tried(
            "Killed",
            f"the recovery of a killed {SAID[run]} is killed {times}at any change",
            how="SIGKILL before and after each" + (f", at every {STRIDE}th" if times else ""),
            count=number,
            result="the next recovery ends it: wholly undone or wholly done",
        )


@pytest.mark.parametrize(RUN, PLAIN_RUNS + OTHER_RUNS)
def test_one_change_failing(
    in_memory: Path, prepare: Action, run: Action, before: Contents, after: Contents
) -> None:
    case = Case(in_memory, prepare)
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
    in_memory: Path, prepare: Action, run: Action, before: Contents, after: Contents, tried: Tried
) -> None:
    case = Case(in_memory, prepare)
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
    tried(
        "A change that fails",
        f"{SAID[run]}: from one change on every one fails, so that it cannot be undone either",
        how="an error from each change on, one of six in turn",
        count=number,
        result="no torn file; once writing works again the next run recovers",
    )


@pytest.mark.parametrize(RUN, PLAIN_RUNS)
def test_interrupted_from_the_keyboard(
    in_memory: Path, prepare: Action, run: Action, before: Contents, after: Contents, tried: Tried
) -> None:
    case = Case(in_memory, prepare)
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
    tried(
        "Killed",
        f"{SAID[run]} is interrupted with Ctrl-C at any change to the file system",
        how="KeyboardInterrupt before each",
        count=number,
        result="wholly undone or wholly done at once",
    )


def test_a_revert_that_puts_a_deleted_file_back_killed_anywhere(in_memory: Path) -> None:
    case = Case(in_memory, delete_after_apply)
    for number in count():
        root = case.fresh()
        if number % 2:
            # Then it comes from the copy, staged beside its place.
            (root / STATE / "originals/1" / LINKED).unlink()
        if not killed_at(number, partial(undo, root), BEFORE):
            break
        killed_at(number % 20, partial(recover, root), BEFORE)
        recover(root)
        assert unfinished(root) is None
        assert not leftovers_of_a_run(root)
        found = (root / LINKED).read_bytes() if (root / LINKED).exists() else None
        assert found in (None, OLD[LINKED])
        undo(root)
        assert contents(root) == OLD
        assert not (root / STATE).exists()
    assert number > 60
    assert contents(root) == OLD


@pytest.mark.parametrize(
    ("stop", "said"), [(LINKED, "undone"), (f"{STATE}/concluded.json", "but for tidying up")]
)
def test_the_note_of_an_interrupted_run_says_what_became_of_it(
    tmp_path: Path, stop: str, said: str
) -> None:
    root = interrupted_after(tmp_path, stop)
    (note, *_) = revert_command(Where(site_packages=root)).notes
    assert note.startswith("an interrupted apply was found")
    assert said in note


def test_the_note_of_an_interrupted_run_names_what_it_left_alone(tmp_path: Path) -> None:
    root = interrupted_after(tmp_path, LINKED)
    (root / LINKED).unlink()
    (root / LINKED).write_bytes(b"edited")
    notes = revert_command(Where(site_packages=root)).notes
    assert any("meanwhile" in note and LINKED in note for note in notes)


def interrupted_after(folder: Path, path: str) -> Path:
    """An installation whose ``apply`` was killed after it had renamed a file to this path."""
    points = points_of(partial(apply, make_installation(folder / "tried")))
    (number,) = (
        number
        for number, (moment, operation, where) in enumerate(points)
        if (moment, operation) == ("after", "rename")
        and where == folder / "tried/site-packages" / path
    )
    root = make_installation(folder / "killed")
    assert killed_at(number, partial(apply, root))
    (root / "vllm/__init__.py").touch()
    return root


def reinstall_after_apply(root: Path) -> None:
    """Patched while it was an unpublished build, and then another release installed over it."""
    apply(root, published=set())
    for path in PATHS:
        (root / path).unlink()
        (root / path).write_bytes(REINSTALLED[path])


def apply_after_reinstall(root: Path) -> object:
    changes = [change(path, REINSTALLED[path], newer(path)) for path in PATHS]
    return apply(root, *changes, stale=PATHS, published=set())


def revert_after_reinstall(root: Path) -> object:
    return revert(root, Origins({sha256(data) for data in REINSTALLED.values()}))


REINSTALLED = {path: f"the next release's {path}".encode() for path in PATHS}
LAST_COPIES = [
    pytest.param(apply_after_reinstall, NEWER, id="apply"),
    pytest.param(revert_after_reinstall, REINSTALLED, id="revert"),
]


def kept_contents(root: Path, *shelves: str) -> set[bytes]:
    """What is kept of files on these shelves of the state folder."""
    files = (file for shelf in shelves for file in (root / STATE / shelf).rglob("*.py"))
    return {file.read_bytes() for file in files if file.is_file()}


@pytest.mark.parametrize(("run", "after"), LAST_COPIES)
def test_the_last_copy_survives_a_run_killed_anywhere(
    in_memory: Path, run: Action, after: Contents, tried: Tried
) -> None:
    ends = set()
    for number in count():
        root = make_installation(in_memory / str(number))
        reinstall_after_apply(root)
        if not killed_at(number, partial(run, root)):
            break
        assert kept_contents(root, "originals", "copies", "edited") >= {*OLD.values()}
        killed_at(number % 20, partial(recover, root), BEFORE)
        assert kept_contents(root, "originals", "copies", "edited") >= {*OLD.values()}
        recover(root)
        assert contents(root) in (REINSTALLED, after)
        done = not (root / STATE / "originals/1").exists()
        assert kept_contents(root, "edited" if done else "copies") == {*OLD.values()}
        ends.add(done)
    assert ends == {True, False}
    assert kept_contents(root, "edited") == {*OLD.values()}
    assert not (root / STATE / "originals/1").exists()
    assert not (root / STATE / "copies/1").exists()
    tried(
        "Killed",
        f"{run.__name__.split('_')[0]} over a reinstalled vLLM, where the last copy of an "
        "unpublished build is kept, is killed at any change",
        how="SIGKILL before and after each; the recovery that follows is killed too",
        count=number,
        result="that copy is where it was, or in edited/",
    )


def test_keeping_what_verify_showed_killed_anywhere(in_memory: Path) -> None:
    ends = set()
    for number in count():
        root = make_installation(in_memory / str(number))
        before = tree(root)
        result = Verified("A", "proven", {PLAIN: sha256(old(PLAIN))})
        if not killed_at(number, partial(record_verification, root, [result])):
            break
        recover(root)
        assert not leftovers_of_a_run(root)
        found = read_verified(root, __version__)
        assert found in ((), (result,))
        ends.add(bool(found))
        revert(root)
        assert tree(root) == before
    assert ends == {True, False}


def refusal(number: int) -> OSError:
    error = ERRORS[number % len(ERRORS)]
    return OSError(error, os.strerror(error))


def succeeds(run: Callable[[], object]) -> bool:
    try:
        run()
    except BlockedError as error:
        assert "\n" not in error.message + error.hint
        return False
    return True


def test_revert_removes_what_a_run_killed_at_its_lock_left(tmp_path: Path) -> None:
    root = make_installation(tmp_path)
    before = tree(root)
    for number in count():
        assert killed_at(number, lambda: apply(root))
        if (root / STATE).exists():
            break
        revert(root)
        assert tree(root) == before
    assert number > 0


@pytest.mark.parametrize("stuck", PATHS)
def test_a_file_that_cannot_be_undone_does_not_keep_the_others_from_it(
    stuck: str, tmp_path: Path
) -> None:
    root = make_installation(tmp_path)
    before = tree(root)

    failing = False

    def fail(moment: str, operation: str, path: Path) -> None:
        # From the last swap on, nothing can be changed any more that has to do with one file.
        nonlocal failing
        last = operation == "rename" and path == root / PATHS[-1] and not failing
        failing = failing or last
        if last or (failing and Path(stuck).name in path.name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with stepping(fail), pytest.raises(NotWritableError) as caught:
        apply(root)
    assert caught.value.code == "rollback-failed"
    for path in PATHS:
        content = (root / path).read_bytes()
        assert content == old(path) or (path == stuck and content == new(path))
    recover(root)
    assert tree(root) == before
