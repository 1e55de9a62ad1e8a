"""A tiny installation whose files are installed in the three ways that installers have."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from vllm_eagle3_patch.transaction.change import Change
from vllm_eagle3_patch.transaction.commit import CommitResult, commit

LINKED, SYMLINK, PLAIN = "vllm/config/linked.py", "vllm/config/symlink.py", "vllm/plain.py"
PATHS = (LINKED, SYMLINK, PLAIN)

Entry = tuple[int, int, int, bytes]


def make_installation(folder: Path) -> Path:
    """Install one file as a hard link, one as a symbolic link into a cache, and one plainly."""
    root, cache = folder / "site-packages", folder / "cache"
    (root / "vllm/config").mkdir(parents=True)
    cache.mkdir()
    for number, path in enumerate(PATHS):
        stored = cache / Path(path).name
        stored.write_bytes(old(path))
        stored.chmod(0o640 + number)
        os.utime(stored, ns=(10**18 + number, 10**18 + 1000 + number))
    (root / LINKED).hardlink_to(cache / "linked.py")
    (root / SYMLINK).symlink_to(cache / "symlink.py")
    (cache / "plain.py").rename(root / PLAIN)
    (root / "vllm/untouched.py").write_bytes(b"untouched\n")
    return root


def old(path: str) -> bytes:
    return f"old {path}\r\n".encode()


def new(path: str) -> bytes:
    return f"new {path}\r\n".encode()


def newer(path: str) -> bytes:
    return f"newer {path}".encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def change(
    path: str, before: bytes | None = None, after: bytes | None = None, *, keep_aside: bool = False
) -> Change:
    """A change of a file from its old content to its new one, or as given."""
    return Change(
        path,
        sha256(old(path) if before is None else before),
        new(path) if after is None else after,
        ("a-patch",),
        keep_aside,
    )


def apply(
    root: Path,
    *changes: Change,
    check: Callable[[], None] | None = None,
    stale: tuple[str, ...] = (),
    published: set[str] | None = None,
) -> CommitResult:
    """Commit these changes, or the ordinary ones."""
    return commit(
        root,
        changes or [change(path) for path in PATHS],
        tool_version="1.0",
        vllm_version="0.17.1",
        release="0.17.1",
        check=check,
        stale=stale,
        published=PUBLISHED if published is None else published,
    )


def tree(folder: Path) -> dict[str, Entry]:
    """Every name below a folder with its mode, inode, time and content or link."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        if path.is_symlink():
            content = os.fsencode(path.readlink())
        else:
            content = b"" if path.is_dir() else path.read_bytes()
        # A directory's time changes whenever a name in it does.
        changed = 0 if path.is_dir() else status.st_mtime_ns
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_ino, changed, content)
    return found


def contents(root: Path) -> dict[str, bytes]:
    return {path: (root / path).read_bytes() for path in PATHS}


OLD = {path: old(path) for path in PATHS}
NEW = {path: new(path) for path in PATHS}
NEWER = {path: newer(path) for path in PATHS}
PUBLISHED = {sha256(data) for data in OLD.values()}
