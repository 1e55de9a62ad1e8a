"""Running the command line in tests, in process, as a user would write it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

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

    @property
    def codes(self) -> set[str]:
        """The codes of the problems that a command with ``--json`` told."""
        return {problem["code"] for problem in self.document["problems"]}


def run(*arguments: object, env: dict[str, str] | None = None) -> Ended:
    """Run ``vllm-eagle3-patch`` with these arguments."""
    result = CliRunner().invoke(cli, [str(a) for a in arguments], env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)


def on_a_terminal(
    *arguments: object,
    columns: int = 200,
    env: dict[str, str] | None = None,
    stdout: IO[bytes] | None = None,
) -> str:
    """What a terminal gets of ``vllm-eagle3-patch`` in a process of its own."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "vllm_eagle3_patch", *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), **(env or {})}
    output = b""
    with subprocess.Popen(command, stdout=stdout or theirs, stderr=theirs, env=environment):
        os.close(theirs)
        try:
            while chunk := os.read(ours, 65536):
                output += chunk
        except OSError:
            pass  # Linux answers EIO once the other side is closed.
    os.close(ours)
    return output.decode()


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
