"""One run at a time, and no dead one in the way for ever.

The stand-in for a network file system that does not share kernel locks between hosts is a local
folder with ``flock`` refused, and processes that call themselves by other hosts' names.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from fault_injection import BEFORE, failing_at, killed_at, points_of, stepping
from vllm_eagle3_patch.ground.errors import (
    BusyError,
    NotReadableError,
    NotWritableError,
    UnsafeStateError,
)
from vllm_eagle3_patch.ground.folder import Folder
from vllm_eagle3_patch.transaction.state import lock, lock_holder
from vllm_eagle3_patch.transaction.state.lock import FOLDER, exclusive, held_by
from vllm_eagle3_patch.transaction.state.lock_holder import (
    LONGEST_RUN_NS,
    UNKNOWN,
    Holder,
    this_process,
)

NO_PROCESS = 2**22 + 1
"""A number above what Linux gives to processes."""


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def hold_once(root: Path) -> None:
    with exclusive(root):
        pass


def assert_busy(root: Path, who: str) -> None:
    before = names(root)
    with pytest.raises(BusyError) as caught, exclusive(root):
        pass
    assert (caught.value.exit_code, caught.value.code) == (7, "busy")
    assert who in caught.value.message
    assert FOLDER in caught.value.hint
    assert names(root) == before


def assert_free(root: Path) -> None:
    """Nobody holds it, it can be taken, and nothing is left then."""
    assert held_by(root) is None
    hold_once(root)
    assert names(root) == []


def leave_lock(root: Path, holder: Holder | bytes, age_ns: int = 0) -> Path:
    """Leave a lock behind as a process would that did not come to remove it."""
    (root / FOLDER).mkdir()
    record = root / FOLDER / "0123456789abcdef"
    record.write_bytes(holder if isinstance(holder, bytes) else holder.encoded())
    changed = record.stat().st_mtime_ns - age_ns
    os.utime(record, ns=(changed, changed))
    return record


@pytest.fixture
def without_kernel_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


@contextmanager
def another_process(root: Path) -> Iterator[int]:
    """Have another process hold the lock; yields its number."""
    (held, says), (may_end, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        with exclusive(root):
            os.write(says, b"!")
            os.read(may_end, 1)
        os._exit(0)
    assert os.read(held, 1) == b"!"
    try:
        yield child
    finally:
        for descriptor in (held, says, may_end, end):
            os.close(descriptor)
        assert os.waitpid(child, 0)[1] == 0


def test_a_clean_run_leaves_nothing(tmp_path: Path) -> None:
    with exclusive(tmp_path) as hold:
        hold.confirm()
        assert held_by(tmp_path) == this_process()
    assert names(tmp_path) == []


def test_a_failing_run_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), exclusive(tmp_path):
        raise KeyError
    assert names(tmp_path) == []


def test_looking_writes_nothing(tmp_path: Path) -> None:
    leave_lock(tmp_path, replace(this_process(), pid=NO_PROCESS))
    assert points_of(lambda: held_by(tmp_path)) == []


def test_a_missing_installation_is_not_held(tmp_path: Path) -> None:
    assert held_by(tmp_path / "nowhere") is None
    with pytest.raises(NotReadableError, match="No such file"):
        hold_once(tmp_path / "nowhere")


def test_another_process_waits_its_turn(tmp_path: Path) -> None:
    with another_process(tmp_path) as pid:
        holder = held_by(tmp_path)
        assert holder is not None
        assert holder.pid == pid
        assert_busy(tmp_path, f"process {pid} on")
    assert_free(tmp_path)


def test_another_process_waits_its_turn_without_kernel_locks(
    tmp_path: Path, without_kernel_locks: None
) -> None:
    with another_process(tmp_path) as pid:
        assert_busy(tmp_path, f"process {pid} on")
    assert_free(tmp_path)


def test_the_same_process_cannot_hold_it_twice(tmp_path: Path) -> None:
    with exclusive(tmp_path):
        assert_busy(tmp_path, f"process {os.getpid()} on")


def test_killed_anywhere_it_is_not_in_the_way(tmp_path: Path) -> None:
    for number in count():
        if not killed_at(number, partial(hold_once, tmp_path)):
            break
        assert_free(tmp_path)
    assert number > 10


def test_killed_anywhere_without_kernel_locks_it_is_not_in_the_way(
    tmp_path: Path, without_kernel_locks: None
) -> None:
    for number in count():
        root = tmp_path / str(number)
        root.mkdir()
        if not killed_at(number, partial(hold_once, root), BEFORE):
            break
        assert held_by(root) is None
        hold_once(root)
        # Only a record that is not complete may stay for a while: nobody knows whose it is.
        assert not [name for name in names(root) if FOLDER + "/" in name]
    assert number > 5


def test_failing_anywhere_it_can_be_taken_again_by_the_same_process(tmp_path: Path) -> None:
    for number in count():
        with failing_at(number, OSError(errno.EIO, "failed")) as failed:
            try:
                hold_once(tmp_path)
            except NotWritableError as error:
                assert error.code == "io-error"
        if not failed:
            break
        assert_free(tmp_path)
    assert number > 10


@pytest.mark.parametrize(
    "who",
    [
        pytest.param({"pid": NO_PROCESS}, id="ended"),
        pytest.param({"started": "1"}, id="number used again"),
        pytest.param({"boot": "another"}, id="host started again"),
        pytest.param({"boot": "another", "namespace": "x", "pid": 1}, id="container of old boot"),
        pytest.param({"namespace": "pid:[1]"}, id="ended in a container"),
        pytest.param({"host": "renamed", "pid": NO_PROCESS}, id="host renamed"),
    ],
)
def test_a_dead_holder_is_not_in_the_way(tmp_path: Path, who: dict[str, object]) -> None:
    leave_lock(tmp_path, replace(this_process(), **who))  # type: ignore[arg-type]
    assert_free(tmp_path)


def test_a_living_process_is_in_the_way_even_if_its_kernel_lock_is_not(tmp_path: Path) -> None:
    parent = os.getppid()
    started = lock_holder.started_at(parent)
    leave_lock(tmp_path, replace(this_process(), pid=parent, started=started))
    assert held_by(tmp_path) is not None
    assert_busy(tmp_path, f"process {parent} on")


@pytest.mark.parametrize(
    "who",
    [
        pytest.param({"host": "other", "boot": "another"}, id="another host"),
        pytest.param({"namespace": "pid:[1]"}, id="another container"),
        pytest.param(None, id="record not complete"),
    ],
)
def test_elsewhere_without_kernel_locks_only_age_tells(
    tmp_path: Path, without_kernel_locks: None, who: dict[str, object] | None
) -> None:
    holder = b"{" if who is None else replace(this_process(), **who)  # type: ignore[arg-type]
    record = leave_lock(tmp_path, holder, LONGEST_RUN_NS - 60 * 10**9)
    expected = UNKNOWN if who is None else holder
    assert held_by(tmp_path) == expected
    assert_busy(tmp_path, str(expected))
    record.unlink()
    (tmp_path / FOLDER).rmdir()
    leave_lock(tmp_path, holder, LONGEST_RUN_NS + 60 * 10**9)
    assert_free(tmp_path)


def test_another_host_is_in_the_way_for_an_hour_even_with_kernel_locks(tmp_path: Path) -> None:
    holder = replace(this_process(), host="other", boot="another")
    leave_lock(tmp_path, holder)
    assert_busy(tmp_path, "on 'other'")


@pytest.mark.parametrize("data", [b"", b"{", b"null", b'{"schema": 1, "host": 1}'])
def test_a_record_that_nobody_completed_is_not_in_the_way(tmp_path: Path, data: bytes) -> None:
    leave_lock(tmp_path, data)
    assert_free(tmp_path)


def test_a_lock_that_may_not_be_looked_into_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(root: Folder, name: str) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(Folder, "below", refuse)
    assert held_by(tmp_path) is UNKNOWN


def test_a_record_that_vanishes_while_it_is_looked_at_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FOLDER).mkdir()
    monkeypatch.setattr(Folder, "names", lambda folder: ["gone"])
    assert held_by(tmp_path) is None


def test_an_empty_lock_is_free(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    assert_free(tmp_path)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_something_else_in_its_place_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "root").mkdir()
    place = tmp_path / "root" / FOLDER
    place.touch() if kind == "file" else place.symlink_to(tmp_path)
    before = names(tmp_path)
    with pytest.raises(UnsafeStateError, match="is not a folder"):
        hold_once(tmp_path / "root")
    assert names(tmp_path) == before


def test_what_others_prepare_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / f"{FOLDER}.notes").write_bytes(b"mine")
    (tmp_path / f"{FOLDER}.link").symlink_to(tmp_path)
    before = names(tmp_path)
    hold_once(tmp_path)
    assert names(tmp_path) == before


def during(
    operation: str, name: Callable[[Path], bool], act: Callable[[], None]
) -> Callable[..., None]:
    """A step that does something once, before an operation of the process itself."""
    done: list[str] = []

    def step(moment: str, what: str, path: Path) -> None:
        if not done and (moment, what) == ("before", operation) and name(path):
            done.append(what)
            act()

    return step


def test_two_that_break_a_dead_lock_do_not_both_get_it(tmp_path: Path) -> None:
    """The slower one has judged the record dead, but the faster one took the lock since."""
    leave_lock(tmp_path, replace(this_process(), pid=NO_PROCESS))
    faster = []

    def take() -> None:
        faster.append(another_process(tmp_path))
        faster[0].__enter__()

    is_record = lambda path: path.parent.name == FOLDER  # noqa: E731
    try:
        with stepping(during("unlink", is_record, take)):
            assert_busy_for_a_slower_one(tmp_path)
    finally:
        faster[0].__exit__(None, None, None)
    assert_free(tmp_path)


def assert_busy_for_a_slower_one(root: Path) -> None:
    with pytest.raises(BusyError) as caught, exclusive(root):
        pass
    assert caught.value.code == "busy"
    assert held_by(root) is not None


def test_one_whose_preparation_is_swept_away_prepares_again(tmp_path: Path) -> None:
    def sweep() -> None:
        child = os.fork()
        if child == 0:
            lock.filesystem.step = lock.filesystem.go_on
            (claim,) = tmp_path.glob(FOLDER + ".*")
            for record in claim.iterdir():
                record.unlink()
            claim.rmdir()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    for operation in ("create", "write", "rename"):
        with stepping(during(operation, lambda path: True, sweep)):
            hold_once(tmp_path)
        assert names(tmp_path) == []


def test_an_answer_that_was_lost_on_the_way_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rename

    def rename(*arguments: object, **folders: object) -> None:
        real(*arguments, **folders)  # type: ignore[arg-type]
        raise FileNotFoundError(errno.ENOENT, "the server did it twice")

    monkeypatch.setattr(os, "rename", rename)
    with exclusive(tmp_path) as hold:
        assert hold.is_ours
        monkeypatch.undo()
    assert names(tmp_path) == []


def test_a_lock_that_cannot_be_had_is_given_up_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock.Hold, "is_ours", False)
    monkeypatch.setattr(lock, "_clear", lambda root, now: None)
    with pytest.raises(BusyError, match="an unknown process"):
        hold_once(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("kernel_locks", [True, False])
def test_many_at_once_are_never_two(
    tmp_path: Path, request: pytest.FixtureRequest, kernel_locks: bool
) -> None:
    if not kernel_locks:
        request.getfixturevalue("without_kernel_locks")
    leave_lock(tmp_path, replace(this_process(), pid=NO_PROCESS))
    inside = tmp_path / "inside"

    def work() -> int:
        times = 0
        while times < 25:
            try:
                with exclusive(tmp_path):
                    inside.mkdir()
                    inside.rmdir()
                    times += 1
            except BusyError:
                pass
        return 0

    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            os._exit(work())
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert names(tmp_path) == []


def test_without_proc_the_host_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_kernel_locks: None
) -> None:
    monkeypatch.setattr(lock_holder, "PROC", tmp_path / "none")
    assert this_process().boot == ""
    root = tmp_path / "root"
    root.mkdir()
    leave_lock(root, replace(this_process(), pid=os.getppid(), started=None))
    assert_busy(root, f"process {os.getppid()} on")


def test_a_lost_lock_is_noticed(tmp_path: Path) -> None:
    with exclusive(tmp_path) as hold:
        for record in (tmp_path / FOLDER).iterdir():
            record.unlink()
        with pytest.raises(BusyError, match="another run took over"):
            hold.confirm()
        (tmp_path / FOLDER).rmdir()
        assert not hold.is_ours
    assert names(tmp_path) == []
