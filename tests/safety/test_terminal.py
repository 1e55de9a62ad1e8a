"""What others wrote, and what the user typed, never reaches a terminal as it is."""

from __future__ import annotations

import json
import os
import pty
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from command_line import run, snapshot
from conftest import small_copy
from safety_table import Tried
from vllm_eagle3_patch.cli.program import cli

GROUP = "Hostile or bad input"
STATE = ".vllm-eagle3-patch"
DEEPSEEK = "vllm/model_executor/models/deepseek_v2.py"
# Sets the title, moves the cursor, is a C1 control, a bell, a reversed text, a new line of its own.
EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\u202eevil\rdone\nok: all is well"
IN_FIELD = EVIL.replace("\n", "").replace("\r", "")
OURS = re.compile(r"\x1b\[[0-9;]*m")
"""What rich writes: colours, and nothing else."""


def on_terminal(*arguments: object, code: int) -> str:
    """What a terminal gets of a command; that it ends as expected and is harmless is asserted."""
    child, terminal = pty.fork()
    if child == 0:
        try:
            os.environ.update(TERM="xterm", COLUMNS="200")
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            cli([str(argument) for argument in arguments], prog_name="vllm-eagle3-patch")
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(int(end.code or 0))
        finally:
            os._exit(99)
    output = b""
    with suppress(OSError):  # Linux answers EIO once the other side is closed.
        while chunk := os.read(terminal, 65536):
            output += chunk
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    text = output.decode().replace("\r\n", "\n")
    assert os.waitstatus_to_exitcode(status) == code, text
    bad = {c for c in OURS.sub("", text) if not (c.isprintable() or c in "\n\t")}
    assert not bad, text
    assert not any(line.startswith("ok: all is well") for line in text.splitlines()), text
    return text


@pytest.fixture
def evil_installation(tmp_path: Path) -> Path:
    """Control characters in the installation's path, its metadata and one of its files."""
    folder = small_copy("0.17.1", tmp_path / EVIL)
    (info,) = folder.glob("*.dist-info")
    metadata = info / "METADATA"
    text = metadata.read_text().replace("Version: 0.17.1\n", f"Version: 0.17.1{IN_FIELD}\n", 1)
    metadata.write_text(text.replace("Name: vllm\n", f"Name: vllm{IN_FIELD}\n", 1))
    (info / "INSTALLER").write_text(EVIL)
    return folder


def test_an_installation_full_of_control_characters(evil_installation: Path, tried: Tried) -> None:
    where = ("--site-packages", evil_installation)
    before = snapshot(evil_installation)
    next(evil_installation.glob("*.dist-info/RECORD")).rename(evil_installation / "RECORD")
    file = evil_installation / DEEPSEEK
    whole = file.read_bytes()
    file.write_bytes(
        whole.replace(
            b"\nclass DeepseekV2Model(", b"\n# " + IN_FIELD.encode() + (b"\nclass DeepseekV2Model(")
        )
    )
    assert "\\x1b[2J" in on_terminal("check", "--unpinned", *where, code=1)
    only = ("--unpinned", "--only", "deepseek-v2", *where)
    on_terminal("apply", "--diff", *only, code=1)
    on_terminal("apply", *only, code=0)
    on_terminal("revert", *where, code=0)
    file.write_bytes(whole + b"\ndef (: # " + IN_FIELD.encode() + b"\n")
    for more in ((), ("--debug",)):
        on_terminal("apply", *only, *more, code=4)
    assert set(snapshot(evil_installation)) == {*before, "RECORD"} - {
        path for path in before if path.endswith("/RECORD")
    }
    tried(
        GROUP,
        "control characters in an installation's path, metadata and sources",
        how="check, apply --diff, apply, revert and an error, also with --debug, on a "
        "terminal: titles, cursor movements, C1, reversed text, carriage returns, new lines",
        count=6,
        result="shown escaped; the terminal gets nothing but colours",
    )


def named(document: dict[str, object]) -> None:
    document.update(tool=EVIL, vllm=EVIL, release=EVIL)


def patched(document: dict[str, object]) -> None:
    for entry in document["files"]:  # type: ignore[attr-defined]
        entry.update(patches=[EVIL])


def renamed(document: dict[str, object]) -> None:
    document["files"][0].update(path=f"vllm/{EVIL}")  # type: ignore[index]


def linked(document: dict[str, object]) -> None:
    document["files"][0].update(symlink=EVIL)  # type: ignore[index]


@pytest.mark.parametrize("how", [named, patched, renamed, linked])
def test_a_manifest_full_of_control_characters(
    site_packages: Path, how: Callable[[dict[str, object]], None], tried: Tried
) -> None:
    where = ("--site-packages", site_packages)
    assert run("apply", *where).exit_code == 0
    manifest = site_packages / STATE / "manifest.json"
    document = json.loads(manifest.read_bytes())
    how(document)
    manifest.write_text(json.dumps(document))
    unclaimed = site_packages / STATE / "originals/1/vllm" / EVIL
    unclaimed.write_text("")
    for command in ("check", "revert --dry-run", "apply --dry-run --skip deepseek-v2"):
        ended = run(*command.split(), *where)
        assert ended.exit_code in {0, 1, 4, 5}
        on_terminal(*command.split(), *where, code=ended.exit_code)
    tried(
        GROUP,
        "control characters in the manifest, and in names of files beside it",
        how="the versions, patches, a path and a link; check, apply and revert on a terminal",
        count=3,
        result="shown escaped; the terminal gets nothing but colours",
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["check", f"--{EVIL}"], 2),
        ([EVIL], 2),
        (["check", EVIL], 2),
        (["check", "--model", EVIL], 2),
        (["check", "--only", EVIL], 2),
        (["matrix", "--release", EVIL], 2),
        (["verify", "--timeout", EVIL], 2),
        (["check", "--site-packages", EVIL], 3),
        (["check", "--python", EVIL], 3),
        (["check", "--python", f"/{EVIL}", "--debug"], 3),
        (["doctor", EVIL, EVIL], 2),
        (["doctor", EVIL, EVIL, "--serve", f"vllm serve {EVIL}"], 2),
        (["doctor", "--metrics", EVIL], 2),
        (["doctor", "--metrics", f"http://{EVIL}/", "--debug"], 2),
    ],
)
def test_the_words_of_the_command_line(arguments: list[str], code: int, tried: Tried) -> None:
    on_terminal(*arguments, code=code)
    tried(
        GROUP,
        "control characters in the words of the command line",
        how="options, commands, names, paths and addresses, on a terminal, also with --debug",
        result="shown escaped in the error (2 or 3)",
    )


def test_an_interpreters_path_and_complaint(tmp_path: Path, tried: Tried) -> None:
    python = tmp_path / EVIL
    python.write_text(f"#!/bin/sh\nprintf '{IN_FIELD}' >&2\nexit 4\n")
    python.chmod(0o755)
    for more in ((), ("--debug",)):
        on_terminal("check", "--python", python, *more, code=3)
    tried(
        GROUP,
        "control characters in an interpreter's path and in what it complains",
        how="check on a terminal, also with --debug",
        count=2,
        result="shown escaped in the error (3)",
    )
