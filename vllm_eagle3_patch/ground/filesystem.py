"""Every change that this tool makes to a file system, one system call at a time.

Nothing else in the package writes, renames, links, removes or syncs. ``step`` is called before
and after each such call, so that a test can count them, fail one or end the process there.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from vllm_eagle3_patch.ground.folder import (
    NOT_SUPPORTED,
    Attributes,
    Folder,
    extended_attributes,
    naming,
    passing_over,
)

Moment = Literal["before", "after"]
Step = Callable[[Moment, str, Path], None]

LINK_REFUSED = NOT_SUPPORTED | {errno.EPERM, errno.EXDEV, errno.EMLINK}


def go_on(moment: Moment, operation: str, path: Path) -> None:
    """Let the operation happen."""


step: Step = go_on


@contextmanager
def _operation(name: str, path: Path) -> Iterator[None]:
    with naming(path):
        step("before", name, path)
        yield
        step("after", name, path)


def make_directory(folder: Folder, name: str, mode: int) -> None:
    """Make a directory of exactly this mode, whatever the umask."""
    with _operation("mkdir", folder.path / name):
        # To change the mode afterwards would be to change that of whatever has the name by then.
        umask = os.umask(0)
        try:
            os.mkdir(name, mode, dir_fd=folder.descriptor)
        finally:
            os.umask(umask)


def create_file(folder: Folder, name: str) -> int:
    """Create a file that must not be there, and return its descriptor, open for writing."""
    descriptor = None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with _operation("create", folder.path / name):
            descriptor = os.open(name, flags, 0o600, dir_fd=folder.descriptor)
    except BaseException:
        if descriptor is not None:
            os.close(descriptor)
        raise
    return descriptor


def write_new_file(folder: Folder, name: str, data: bytes, attributes: Attributes) -> None:
    """Create a file that must not be there; its bytes are on disk when this returns.

    An owner that may not be given and extended attributes that may not be set are passed over.
    """
    descriptor = create_file(folder, name)
    try:
        fill_file(descriptor, data, attributes, folder.path / name)
    finally:
        os.close(descriptor)


def fill_file(descriptor: int, data: bytes, attributes: Attributes, path: Path) -> None:
    """Write all bytes to a new file, set its attributes and have both on disk."""
    rest = memoryview(data)
    while rest:
        with _operation("write", path):
            rest = rest[os.write(descriptor, rest) :]
    if attributes.owner is not None:
        _give_to(descriptor, *attributes.owner, path)
    # No set-user-id: nobody is to get root to make him such a file.
    mode = attributes.mode & 0o777
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:
        with _operation("fchmod", path):
            os.fchmod(descriptor, mode)
    if attributes.extended is not None:
        _set_extended_attributes(descriptor, attributes.extended, path)
    if attributes.times is not None:
        with _operation("utimensat", path):
            os.utime(descriptor, ns=attributes.times)
    with _operation("fsync", path):
        os.fsync(descriptor)


def link(folder: Folder, name: str, other: Folder, new: str) -> None:
    """Give a file, or a symbolic link itself, a second name in another folder."""
    with _operation("link", other.path / new):
        os.link(
            name,
            new,
            src_dir_fd=folder.descriptor,
            dst_dir_fd=other.descriptor,
            follow_symlinks=False,
        )


def copy_symlink(folder: Folder, name: str, other: Folder, new: str) -> None:
    """Make a symbolic link in another folder like this one, with its times and owner."""
    status = os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False)
    path = other.path / new
    with _operation("symlink", path):
        os.symlink(os.readlink(name, dir_fd=folder.descriptor), new, dir_fd=other.descriptor)
    with naming(path):
        made = os.open(new, os.O_PATH | os.O_NOFOLLOW, dir_fd=other.descriptor)
    try:
        _make_link_like(made, status, path)
    finally:
        os.close(made)


def _make_link_like(made: int, like: os.stat_result, path: Path) -> None:
    """Give a symbolic link, opened with ``O_PATH``, the owner and the times of another one."""
    status = os.fstat(made)
    # A file with a second name may be anybody's: it is not the one that was just made.
    if not stat.S_ISLNK(status.st_mode) or status.st_nlink != 1:
        raise OSError(errno.EINVAL, "was replaced by someone else meanwhile", os.fspath(path))
    # The kernel's name for what is open: no name in a folder is looked up, no link followed.
    opened = f"/proc/self/fd/{made}"
    owner = (like.st_uid, like.st_gid)
    if (status.st_uid, status.st_gid) != owner:
        refused = {errno.EPERM, errno.EINVAL, errno.ENOENT}
        with passing_over(refused), _operation("fchown", path):
            os.chown(opened, *owner)
    with passing_over({errno.ENOENT}), _operation("utimensat", path):
        os.utime(opened, ns=(like.st_atime_ns, like.st_mtime_ns))


def replace(folder: Folder, name: str, other: Folder, new: str) -> None:
    """Move a name to another folder, replacing what has the new name, at one moment.

    Two names of one inode are both left as they are: the system does nothing then.
    """
    with _operation("rename", other.path / new):
        os.rename(name, new, src_dir_fd=folder.descriptor, dst_dir_fd=other.descriptor)


def remove(folder: Folder, name: str) -> bool:
    """Remove a name that is no directory; return whether it was there."""
    if folder.status(name) is None:
        return False
    with _operation("unlink", folder.path / name):
        os.unlink(name, dir_fd=folder.descriptor)
    return True


def remove_directory(folder: Folder, name: str) -> bool:
    """Remove an empty directory; return False if it is not there or not empty."""
    with passing_over({errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST}):
        with folder.below(name) as inner:
            if inner.names():
                return False
        with _operation("rmdir", folder.path / name):
            os.rmdir(name, dir_fd=folder.descriptor)
        return True
    return False


def remove_tree(folder: Folder, name: str) -> bool:
    """Remove a name with all that is in it, if it is a directory; return whether it was there."""
    status = folder.status(name)
    if status is None or not stat.S_ISDIR(status.st_mode):
        return remove(folder, name)
    with folder.below(name) as inner:
        for inner_name in inner.names():
            remove_tree(inner, inner_name)
    return remove_directory(folder, name)


def sync_file(folder: Folder, name: str) -> None:
    """Have the bytes of a regular file on disk when this returns."""
    with naming(folder.path / name):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(name, flags, dir_fd=folder.descriptor)
    try:
        with _operation("fsync", folder.path / name):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(folder: Folder) -> None:
    """Have the names in a directory on disk when this returns, where the system can."""
    with passing_over(NOT_SUPPORTED | {errno.EINVAL}), _operation("fsync", folder.path):
        os.fsync(folder.descriptor)


def _give_to(descriptor: int, user: int, group: int, path: Path) -> None:
    # Who may not give a file away may still give it to one of his groups.
    for new_user in (user, -1):
        status = os.fstat(descriptor)
        if status.st_gid != group or new_user not in {-1, status.st_uid}:
            with passing_over({errno.EPERM, errno.EINVAL}), _operation("fchown", path):
                os.fchown(descriptor, new_user, group)


def _set_extended_attributes(descriptor: int, wanted: Mapping[str, bytes], path: Path) -> None:
    present = extended_attributes(descriptor)
    refused = NOT_SUPPORTED | {errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENODATA}
    for name in sorted(present.keys() - wanted.keys()):
        with passing_over(refused), _operation("removexattr", path):
            os.removexattr(descriptor, name)
    for name in sorted(wanted):
        if present.get(name) != wanted[name]:
            with passing_over(refused), _operation("setxattr", path):
                os.setxattr(descriptor, name, wanted[name])
