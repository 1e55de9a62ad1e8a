"""Everything that a tree of files is, compared before and after."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from command_line import run

STATE = ".vllm-eagle3-patch"


@dataclass(frozen=True)
class Node:
    """One name of a tree.

    Attributes:
        content: A file's bytes, or where a link leads.
        mode: Its kind and permissions.
        owner: Its user and group.
        modified: When it was changed, in nanoseconds; 0 for a folder, which a file that comes and
            goes again moves.
        inode: The file itself, whatever its name.
        names: How many names a file has.
        extended: Its extended attributes, access lists included.
    """

    content: bytes
    mode: int
    owner: tuple[int, int]
    modified: int
    inode: int
    names: int
    extended: tuple[tuple[str, bytes], ...]


def whole_tree(root: Path) -> dict[str, Node]:
    """Every name below a folder, and the folder itself."""
    return {str(path.relative_to(root)): _node(path) for path in (root, *root.rglob("*"))}


def without_inodes(tree: dict[str, Node]) -> dict[str, Node]:
    """The same where the files may be others with the same content and attributes."""
    return {name: replace(node, inode=0, names=0) for name, node in tree.items()}


def _node(path: Path) -> Node:
    status = path.lstat()
    content = b""
    if stat.S_ISLNK(status.st_mode):
        content = os.fsencode(path.readlink())
    elif stat.S_ISREG(status.st_mode):
        content = path.read_bytes()
    is_folder = stat.S_ISDIR(status.st_mode)
    return Node(
        content=content,
        mode=status.st_mode,
        owner=(status.st_uid, status.st_gid),
        modified=0 if is_folder else status.st_mtime_ns,
        inode=status.st_ino,
        names=0 if is_folder else status.st_nlink,
        extended=_extended(path),
    )


def _extended(path: Path) -> tuple[tuple[str, bytes], ...]:
    names = os.listxattr(path, follow_symlinks=False) if hasattr(os, "listxattr") else []
    return tuple((n, os.getxattr(path, n, follow_symlinks=False)) for n in sorted(names))


def check_apply_check_diff(*where: object, env: dict[str, str] | None = None) -> tuple[str, ...]:
    """Patch what is not patched yet, with a look before and after; returns the changed files."""
    assert run("check", *where, env=env).exit_code == 1
    applied = run("apply", *where, "--json", env=env)
    assert (applied.exit_code, applied.document["state"]) == (0, "patched"), applied.stderr
    assert run("check", *where, env=env).exit_code == 0
    shown = run("diff", *where, env=env)
    assert shown.exit_code == 1
    changed = tuple(applied.document["changed"])
    assert changed
    assert all(f"+++ b/{path}\n" in shown.stdout for path in changed)
    return changed


def revert_and_check(*where: object, env: dict[str, str] | None = None) -> None:
    """Bring the originals back, with a look afterwards."""
    assert run("revert", *where, env=env).exit_code == 0
    assert run("check", *where, env=env).exit_code == 1
