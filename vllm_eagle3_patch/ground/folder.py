"""Open folders and what is read in them; nothing here changes anything.

Names are looked up from open folders, and no link is followed below the first, so that nobody who
swaps a folder for a link meanwhile can have something read, or changed, elsewhere.
"""

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

NOT_SUPPORTED = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
# What says that no file can be read under a name: nothing is there, or something else.
GONE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENAMETOOLONG, errno.EFBIG}
)
LARGEST_FILE = 2 * 1024 * 1024
"""Bytes. The largest Python file of any release is 0.5 MB; more is not vLLM's source."""
_PIECE = 256 * 1024
# They hold a hash or a signature of the content, which is what changes; and nobody is to get root
# to give a file capabilities, as little as a set-user-id mode.
NOT_COPIED = {"security.ima", "security.evm", "security.capability"}


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an ``OSError`` name this path, not just a name within an open folder."""
    try:
        yield
    except OSError as error:
        error.filename = os.fspath(path)
        raise


@contextmanager
def passing_over(numbers: set[int] | frozenset[int]) -> Iterator[None]:
    """Let an ``OSError`` with one of these numbers be; the rest of the block is left out."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


@dataclass(frozen=True)
class Attributes:
    """What a file has besides its bytes; what is None is left as the system makes it."""

    mode: int
    owner: tuple[int, int] | None = None
    times: tuple[int, int] | None = None
    """Last access and last change, in nanoseconds."""
    extended: Mapping[str, bytes] | None = None


@dataclass(frozen=True)
class Snapshot:
    """A file's bytes and attributes, read through one open file."""

    data: bytes
    attributes: Attributes
    status: os.stat_result = field(repr=False)


class Folder:
    """An open folder, to be used in a ``with`` statement.

    Args:
        descriptor: Its file descriptor, which the object then owns.
        path: How to name it in messages.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor = descriptor
        self.path = path

    @classmethod
    def at(cls, path: Path) -> "Folder":
        """Open a folder by its path, following links."""
        return cls(os.open(path, os.O_RDONLY | os.O_DIRECTORY), path)

    def below(self, relative: str) -> "Folder":
        """Open a folder below this one; a symbolic link on the way is an ``OSError``."""
        folder = Folder(os.dup(self.descriptor), self.path)
        for name in filter(None, relative.split("/")):
            with folder, naming(folder.path / name):
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                descriptor = os.open(name, flags, dir_fd=folder.descriptor)
            folder = Folder(descriptor, folder.path / name)
        return folder

    def __enter__(self) -> "Folder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close it."""
        os.close(self.descriptor)

    def names(self) -> list[str]:
        """The names in it, sorted."""
        return sorted(os.listdir(self.descriptor))  # noqa: PTH208  an open folder has no path

    def status(self, name: str) -> os.stat_result | None:
        """The status of a name itself, not of what it links to; None if it is not there."""
        with naming(self.path / name):
            try:
                return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            except FileNotFoundError:
                return None

    def link_text(self, name: str) -> str | None:
        """Where a symbolic link leads, None if the name is no symbolic link."""
        status = self.status(name)
        if status is None or not stat.S_ISLNK(status.st_mode):
            return None
        with naming(self.path / name):
            return os.readlink(name, dir_fd=self.descriptor)

    def snapshot(self, name: str, *, follow: bool = False, limit: int = LARGEST_FILE) -> Snapshot:
        """Read a regular file; with ``follow``, also through a symbolic link.

        Raises:
            OSError: It cannot be read, is not a regular file or is larger than ``limit``.
        """
        with naming(self.path / name):
            flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
            descriptor = os.open(name, flags, dir_fd=self.descriptor)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.EINVAL, "is not a regular file")
                attributes = Attributes(
                    mode=stat.S_IMODE(status.st_mode),
                    owner=(status.st_uid, status.st_gid),
                    times=(status.st_atime_ns, status.st_mtime_ns),
                    extended=extended_attributes(descriptor),
                )
                data = _read(descriptor, limit + 1)
                if len(data) > limit:
                    raise OSError(errno.EFBIG, f"is larger than {limit} bytes")
                return Snapshot(data, attributes, status)
            finally:
                os.close(descriptor)


def _read(descriptor: int, most: int) -> bytes:
    # In pieces: to ask for all at once would take that much memory, however small the file is.
    data = bytearray()
    while piece := os.read(descriptor, min(_PIECE, most - len(data))):
        data += piece
    return bytes(data)


@contextmanager
def parent_of(folder: Folder, path: str) -> Iterator[tuple[Folder, str]]:
    """Open the folder of a path below a folder; yields it and the last name."""
    parent, _, name = path.rpartition("/")
    with folder.below(parent) as opened:
        yield opened, name


def is_there(folder: Folder, relative: str) -> bool:
    """Whether anything has a path below a folder, no link followed."""
    with passing_over(GONE), parent_of(folder, relative) as (parent, name):
        return parent.status(name) is not None
    return False


def extended_attributes(descriptor: int) -> dict[str, bytes]:
    """The extended attributes of an open file that may be read and copied."""
    found: dict[str, bytes] = {}
    if hasattr(os, "listxattr"):
        with passing_over(NOT_SUPPORTED):
            for name in set(os.listxattr(descriptor)) - NOT_COPIED:
                with passing_over({errno.ENODATA, errno.EPERM, errno.EACCES}):
                    found[name] = os.getxattr(descriptor, name)
    return found
