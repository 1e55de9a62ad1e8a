"""One run at a time in an installation, on one host or on a file system that hosts share.

The lock is a folder beside the state folder, ``.vllm-eagle3-patch.lock``, that holds one file: a
record of its holder, named by a random token. Two operations, each done at one moment by whatever
serves the file system, are all that it rests on:

* taking it is renaming a folder prepared with one's own record to the lock's name, which fails
  while a folder that is not empty is there;
* breaking a dead holder's lock is removing the record of that token, which cannot hit the record
  of anyone who took the lock meanwhile.

When a holder counts as dead is told in ``lock_holder``; no run takes nearly as long as the hour
that counts there. A run that was suspended makes sure before each file it replaces that the lock
is still its own. One suspended for more than an hour just between making sure and replacing would
replace one file late.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_eagle3_patch.ground import filesystem
from vllm_eagle3_patch.ground.errors import BusyError, NotReadableError, UnsafeStateError
from vllm_eagle3_patch.ground.folder import Attributes, Folder, passing_over
from vllm_eagle3_patch.ground.os_errors import explained, refused
from vllm_eagle3_patch.ground.text import one_line
from vllm_eagle3_patch.transaction.state.lock_holder import (
    UNKNOWN,
    Holder,
    living,
    living_holder,
    this_process,
)

FOLDER = ".vllm-eagle3-patch.lock"
_ATTEMPTS = 100
_TO_WITHDRAW = 2
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR}
_NOT_OURS = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM}


@dataclass(frozen=True)
class Hold:
    """The lock, held."""

    root: Folder
    token: str

    @property
    def claim(self) -> str:
        """The name of the folder that is prepared to become the lock."""
        return f"{FOLDER}.{self.token}"

    @property
    def is_ours(self) -> bool:
        """Whether nobody took the lock for that of a dead run meanwhile."""
        try:
            with self.root.below(FOLDER) as lock:
                return lock.status(self.token) is not None
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise
            return False

    def confirm(self) -> None:
        """Make sure that the lock is still ours.

        Raises:
            BusyError: Another run took it for that of a dead run.
            OSError: That cannot be told.
        """
        if not self.is_ours:
            raise BusyError(
                "another run took over while this one was suspended",
                "run check to see what it did",
            )


def held_by(root: Path) -> Holder | None:
    """Who holds the lock of an installation, None if nobody alive does.

    Nothing is written.

    Raises:
        NotReadableError: It cannot be read, and not because somebody keeps it from being read.
    """
    try:
        with Folder.at(root) as folder, folder.below(FOLDER) as lock:
            return living_holder(lock, time.time_ns())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise refused(error, NotReadableError) from error
        return UNKNOWN


def leftovers(root: Folder) -> bool:
    """Whether there is a lock, or what was prepared to become one. Nothing is written."""
    return any(name == FOLDER or name.startswith(FOLDER + ".") for name in root.names())


@contextmanager
def exclusive(root: Path) -> Iterator[Hold]:
    """Hold the lock of an installation.

    Raises:
        BusyError: Another run holds it.
        NotReadableError: The installation cannot be opened.
        NotWritableError: It cannot be written.
    """
    with explained(NotReadableError):
        opened = Folder.at(root)
    with explained(), opened as folder:
        with _descriptors_to_spare(folder) as spare:
            hold, record = _take(folder, spare)
        try:
            yield hold
        finally:
            try:
                _withdraw(hold)
            finally:
                os.close(record)


@contextmanager
def _descriptors_to_spare(root: Folder) -> Iterator[ExitStack]:
    """Have some open, to be closed where what was begun needs them to be undone."""
    with ExitStack() as spare:
        for _ in range(_TO_WITHDRAW):
            spare.callback(os.close, os.dup(root.descriptor))
        yield spare


def _take(root: Folder, spare: ExitStack) -> tuple[Hold, int]:
    for _ in range(_ATTEMPTS):
        hold = Hold(root, os.urandom(8).hex())
        with ExitStack() as undo:
            undo.callback(_withdraw, hold)
            undo.callback(spare.close)
            now = time.time_ns()
            with passing_over(_TAKEN):
                record = _prepare(hold)
                undo.callback(os.close, record)
                now = os.fstat(record).st_mtime_ns
                filesystem.replace(root, hold.claim, root, FOLDER)
            # The answer of a file server may be lost: what is there counts, not what it said.
            if hold.is_ours:
                _sweep(root, now)
                undo.pop_all()
                return hold, record
            _clear(root, now)
    raise _busy(root, UNKNOWN)


def _prepare(hold: Hold) -> int:
    """Write our record into a folder of its own; its descriptor has the kernel's lock."""
    filesystem.make_directory(hold.root, hold.claim, 0o755)
    with hold.root.below(hold.claim) as claim:
        record = filesystem.create_file(claim, hold.token)
        try:
            with suppress(OSError):  # Not every file system has it: the record tells then.
                fcntl.flock(record, fcntl.LOCK_EX)
            data = this_process().encoded()
            filesystem.fill_file(record, data, Attributes(0o644), claim.path / hold.token)
        except BaseException:
            os.close(record)
            raise
    return record


def _withdraw(hold: Hold) -> None:
    # How the run itself ended counts more: what cannot be removed now, the next run removes.
    for name in (FOLDER, hold.claim):
        with suppress(OSError):
            with hold.root.below(name) as folder:
                filesystem.remove(folder, hold.token)
            filesystem.remove_directory(hold.root, name)


def _clear(root: Folder, now: int) -> None:
    """Remove the lock if its holder is dead.

    Raises:
        BusyError: He is alive.
        UnsafeStateError: There is something else in its place.
    """
    status = root.status(FOLDER)
    if status is not None and not stat.S_ISDIR(status.st_mode):
        path = one_line(root.path / FOLDER)
        raise UnsafeStateError(f"{path} is not a folder", "look at what it is, then remove it")
    with passing_over({errno.ENOENT}):
        with root.below(FOLDER) as lock:
            holder = living_holder(lock, now)
            if holder is not None:
                raise _busy(root, holder)
        _remove_dead(root, FOLDER, now)


def _sweep(root: Folder, now: int) -> None:
    """Remove what dead runs prepared. A living one whose folder vanishes prepares another."""
    for name in root.names():
        if name.startswith(FOLDER + "."):
            with passing_over(_NOT_OURS):
                _remove_dead(root, name, now)


def _remove_dead(root: Folder, name: str, now: int) -> None:
    with root.below(name) as folder:
        for token in folder.names():
            if living(folder, token, now) is None:
                filesystem.remove(folder, token)
    filesystem.remove_directory(root, name)


def _busy(root: Folder, holder: Holder) -> BusyError:
    path = one_line(root.path / FOLDER)
    return BusyError(
        f"another run is at work here: {holder}",
        f"wait until it has ended; if it is gone for certain, remove {path}",
    )
