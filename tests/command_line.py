"""Running the command line in tests, in process, as a user would write it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from vllm_eagle3_patch.cli.program import cli


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on standard output."""
        document = json.loads(self.stdout)
        assert isinstance(document, dict)
        return document


def run(*arguments: object, env: dict[str, str] | None = None) -> Ended:
    """Run ``vllm-eagle3-patch`` with these arguments."""
    result = CliRunner().invoke(cli, [str(a) for a in arguments], env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)


@dataclass(frozen=True)
class Entry:
    """One file, folder or link of a tree."""

    kind: str
    content: bytes | str
    mode: int
    owner: tuple[int, int]
    modified: int


def snapshot(root: Path) -> dict[str, Entry]:
    """Every file of a tree: bytes, mode, owner, and time of change in nanoseconds.

    A folder's own time is left out: a file that comes and goes again moves it.
    """
    tree = {}
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder) / name
            status = path.lstat()
            if path.is_symlink():
                kind, content, modified = "link", str(path.readlink()), status.st_mtime_ns
            elif path.is_dir():
                kind, content, modified = "folder", b"", 0
            else:
                kind, content, modified = "file", path.read_bytes(), status.st_mtime_ns
            owner = (status.st_uid, status.st_gid)
            relative = str(path.relative_to(root))
            tree[relative] = Entry(kind, content, status.st_mode, owner, modified)
    return tree
