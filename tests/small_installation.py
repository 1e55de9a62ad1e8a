"""A tiny installation whose files are installed in the three ways that installers have."""

import os
from collections.abc import Callable
from pathlib import Path

from vllm_eagle3_patch.ground.digest import sha256
from vllm_eagle3_patch.transaction.change import Change
from vllm_eagle3_patch.transaction.commit import commit
from vllm_eagle3_patch.transaction.recovery import recover_in
from vllm_eagle3_patch.transaction.revert import Origins, RevertResult, planned_revert
from vllm_eagle3_patch.transaction.revert import revert as put_back
from vllm_eagle3_patch.transaction.state.journal import KeptAside
from vllm_eagle3_patch.transaction.state.lock import exclusive

LINKED, SYMLINK, PLAIN = "vllm/config/linked.py", "vllm/config/symlink.py", "vllm/plain.py"
PATHS = (LINKED, SYMLINK, PLAIN)

NO_ORIGINS = Origins()

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
    check: Callable[[], None] = lambda: None,
    stale: tuple[str, ...] = (),
    published: set[str] | None = None,
    tool: str = "1.0",
) -> tuple[KeptAside, ...]:
    """Commit these changes, or the ordinary ones, as the command does."""
    with exclusive(root) as hold:
        recover_in(hold.root)
        return commit(
            hold,
            changes or [change(path) for path in PATHS],
            tool_version=tool,
            vllm_version="0.17.1",
            release="0.17.1",
            check=check,
            stale=stale,
            published=PUBLISHED if published is None else published,
        )


def revert(
    root: Path, origins: Origins = NO_ORIGINS, *, force: bool = False, dry_run: bool = False
) -> RevertResult:
    """Put the originals back, as the command does."""
    if dry_run:
        return planned_revert(root, origins, force=force)
    with exclusive(root) as hold:
        recover_in(hold.root)
        return put_back(hold, origins, force=force)


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
