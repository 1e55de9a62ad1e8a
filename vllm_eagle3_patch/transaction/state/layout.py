"""Our folder beside the package: its layout, and opening it without being led elsewhere.

It holds::

    README               how to restore by hand
    manifest.json        what was changed
    journal.json         only during a run, or after an interrupted one
    verified.json        what verify showed, by the contents that it ran
    concluded.json       the journal once the run is done but for tidying up
    originals/<run>/...  the original inodes (or symbolic links), by the run that replaced them
    copies/<run>/...     plain copies of the originals' bytes
    previous/<run>/...   only during a run: what it replaces that is not an original
    edited/<run>/...     what was overwritten although someone had edited it, and last copies of
                         originals that vLLM was installed over
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_eagle3_patch.ground import filesystem
from vllm_eagle3_patch.ground.errors import StateCorruptError, UnsafeStateError
from vllm_eagle3_patch.ground.folder import GONE, Folder, passing_over
from vllm_eagle3_patch.ground.os_errors import user_name
from vllm_eagle3_patch.ground.text import one_line

LARGEST_DOCUMENT = 16 * 2**20
FOLDER = ".vllm-eagle3-patch"
MANIFEST = "manifest.json"
VERIFIED = "verified.json"
JOURNAL = "journal.json"
CONCLUDED = "concluded.json"
ORIGINALS, COPIES, PREVIOUS, EDITED = "originals", "copies", "previous", "edited"

RESTORE = (
    f"restore the files by hand as {FOLDER}/README says, or reinstall vLLM; then remove that folder"
)


def document_in(state: Folder, name: str) -> bytes | None:
    """The bytes of a document in the state folder, None if it is not there.

    Raises:
        StateCorruptError: It is no regular file, or absurdly large.
    """
    try:
        return state.snapshot(name, limit=LARGEST_DOCUMENT).data
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EINVAL, errno.EFBIG}:
            raise StateCorruptError(
                f"{one_line(state.path / name)} is damaged: {error.strerror}", RESTORE
            ) from error
        raise


@contextmanager
def opened(root: Path) -> Iterator[Folder | None]:
    """Open the state folder of an installation; None if there is none.

    Raises:
        UnsafeStateError: It is not a folder of ours.
    """
    try:
        folder = Folder.at(root)
    except FileNotFoundError:
        yield None
        return
    with folder:
        if folder.status(FOLDER) is None:
            yield None
            return
        with opened_in(folder) as state:
            yield state


def opened_in(root: Folder) -> Folder:
    """Open the state folder, which is there, in an open root folder.

    Raises:
        UnsafeStateError: It, or what is to be a folder in it, is a link or no folder; or, where we
            are root, it belongs to somebody who is neither root nor the owner of the installation.
    """
    status = root.status(FOLDER)
    path = one_line(root.path / FOLDER)
    if status is None or not stat.S_ISDIR(status.st_mode):
        raise UnsafeStateError(f"{path} is not a folder", "look at what it is, then remove it")
    state = root.below(FOLDER)
    try:
        user, owner = os.geteuid(), os.fstat(state.descriptor).st_uid
        if user == 0 and owner not in {0, os.fstat(root.descriptor).st_uid}:
            raise UnsafeStateError(
                f"{path} belongs to {user_name(owner)}, who does not own the installation",
                f"run it as {user_name(owner)}, or look at the folder and give it to root",
            )
        for shelf in (ORIGINALS, COPIES, PREVIOUS, EDITED):
            status = state.status(shelf)
            if status is not None and not stat.S_ISDIR(status.st_mode):
                raise UnsafeStateError(f"{path}/{shelf} is not a folder", RESTORE)
    except BaseException:
        state.close()
        raise
    return state


def files_on(state: Folder, shelf: str) -> Iterator[str]:
    """The path, relative to a shelf, of everything on it that is no folder."""
    status = state.status(shelf)
    if status is None:
        return
    if not stat.S_ISDIR(status.st_mode):
        yield ""
        return
    with state.below(shelf) as folder:
        for name in folder.names():
            for rest in files_on(folder, name):
                yield f"{name}/{rest}".rstrip("/")


def folder_mode(root: Folder) -> int:
    """The mode of our folders: who may read the installation may read the state."""
    return stat.S_IMODE(os.fstat(root.descriptor).st_mode) & 0o755 | 0o700


@contextmanager
def made_parent(root: Folder, state: Folder, path: str) -> Iterator[Folder]:
    """Open the folder of a path in the state folder; what is missing of it is made."""
    mode = folder_mode(root)
    folder = state.below("")
    for name in path.split("/")[:-1]:
        with folder:
            if folder.status(name) is None:
                filesystem.make_directory(folder, name, mode)
                filesystem.sync_directory(folder)
            inner = folder.below(name)
        folder = inner
    with folder:
        yield folder


def discard(state: Folder, relative: str) -> None:
    """Remove a file from the state folder, and the folders that are empty then.

    That is on disk when this returns, but for what is removed from the state folder itself.
    """
    parent, _, name = relative.rpartition("/")
    with passing_over(GONE), state.below(parent) as folder:
        filesystem.remove(folder, name)
    while parent:
        outer, _, inner = parent.rpartition("/")
        with passing_over(GONE), state.below(outer) as folder:
            if not filesystem.remove_directory(folder, inner) and folder.status(inner):
                with folder.below(inner) as rest:
                    filesystem.sync_directory(rest)
                return
        parent = outer
