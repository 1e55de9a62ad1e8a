"""Files of vLLM, metadata and folders that are not what they should be."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import run, snapshot
from safety_table import Tried
from vllm_eagle3_patch.processes import running_with
from vllm_eagle3_patch.render import print_diff

GROUP = "Hostile or bad input"
DEEPSEEK = "vllm/model_executor/models/deepseek_v2.py"
Spoil = Callable[[Path, bytes], object]


def listen(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        folder = os.open(file.parent, os.O_PATH)  # a socket's path may not be long
        opened.bind(f"/proc/self/fd/{folder}/{file.name}")
        os.close(folder)


KEPT: dict[str, Callable[[bytes], bytes]] = {
    "a byte order mark": lambda content: b"\xef\xbb\xbf" + content,
    "CRLF": lambda content: content.replace(b"\n", b"\r\n"),
    "no final newline": lambda content: content.rstrip(b"\n"),
    "a latin-1 coding line": lambda content: b"# coding: latin-1\n# \xe9\n" + content,
}
REFUSED: dict[str, Spoil] = {
    "a syntax error": lambda file, content: file.write_bytes(content + b"\ndef (:\n"),
    "a NUL byte": lambda file, content: file.write_bytes(content + b"\0"),
    "invalid UTF-8": lambda file, content: file.write_bytes(content + b"# \xff\n"),
    "an unknown coding": lambda file, content: file.write_bytes(b"# coding: none\n" + content),
    "10 MB": lambda file, content: file.write_bytes(content + b"x = 1\n" * 1_700_000),
    "nothing in it": lambda file, content: file.write_bytes(b""),
    "a folder": lambda file, content: file.mkdir(),
    "a pipe": lambda file, content: os.mkfifo(file),
    "a socket": lambda file, content: listen(file),
    "a link to /dev/zero": lambda file, content: file.symlink_to("/dev/zero"),
    "a dangling link": lambda file, content: file.symlink_to("/nowhere"),
    "a link to itself": lambda file, content: file.symlink_to(file),
}


@pytest.fixture
def checkout(site_packages: Path) -> Path:
    """The same files without a RECORD that lists them."""
    (record,) = site_packages.glob("*.dist-info/RECORD")
    record.unlink()
    return site_packages


@pytest.mark.parametrize("kind", KEPT)
def test_a_layout_is_kept(checkout: Path, kind: str, tried: Tried) -> None:
    file = checkout / DEEPSEEK
    file.write_bytes(KEPT[kind](file.read_bytes()))
    before, tree = file.read_bytes(), snapshot(checkout)
    where = ("--site-packages", checkout)
    only = ("--only", "deepseek-v2")
    assert run("apply", *only, *where).exit_code == 4
    assert snapshot(checkout) == tree
    assert run("apply", "--unpinned", *only, *where).exit_code == 0
    old, new = before.splitlines(keepends=True), file.read_bytes().splitlines(keepends=True)
    assert sum(line in new for line in old) >= len(old) - 8
    assert (b"\r\n" in before) == all(line.endswith(b"\r\n") for line in new[:-1])
    assert file.read_bytes()[:3] == before[:3]
    assert before.endswith(b"\n") == file.read_bytes().endswith(b"\n")
    assert run("revert", *where).exit_code == 0
    assert snapshot(checkout) == tree
    tried(
        GROUP,
        f"a source with {kind}",
        how="in an installation without RECORD, with --unpinned",
        result="patched, every other line as it was; revert brings all back",
    )


@pytest.mark.parametrize("recorded", [True, False], ids=["RECORD", "no RECORD"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_source_is_refused(
    site_packages: Path, kind: str, recorded: bool, tried: Tried
) -> None:
    if not recorded:
        next(site_packages.glob("*.dist-info/RECORD")).unlink()
    file = site_packages / DEEPSEEK
    content = file.read_bytes()
    file.unlink()
    REFUSED[kind](file, content)
    before = file.lstat()
    where = ("--unpinned", "--site-packages", site_packages)
    started = time.monotonic()
    for command in (("check",), ("diff",), ("apply",), ("apply", "--force")):
        ended = run(*command, *where)
        assert ended.exit_code in {4, 5, 7}, (command, ended)
        assert "Traceback" not in ended.stderr
    assert time.monotonic() - started < 60
    assert (file.lstat().st_ino, file.lstat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not list(site_packages.glob(".vllm*"))
    tried(
        GROUP,
        f"a source that is {kind}" if kind.startswith("a ") else f"a source with {kind}",
        how="check, diff, apply and apply --force, with --unpinned, with and without RECORD",
        count=4,
        result="refused (4, 5 or 7) with a line and a hint; nothing written",
    )


def only_compiled(folder: Path) -> None:
    (folder / "vllm/__pycache__").mkdir(parents=True)


def other_project(folder: Path) -> None:
    (folder / "vllm/model_executor/models").mkdir(parents=True)
    (folder / "vllm/__init__.py").touch()
    (folder / "vllm/model_executor/models/registry.py").write_text("plants = {'fern': 1}\n")


FOREIGN: dict[str, tuple[Callable[[Path], object], int]] = {
    "an empty folder": (lambda folder: (folder / "vllm").mkdir(), 3),
    "compiled files only": (only_compiled, 3),
    "a module": (lambda folder: (folder / "vllm.py").touch(), 3),
    "another project": (other_project, 4),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_vllm_is_left_alone(tmp_path: Path, kind: str, tried: Tried) -> None:
    make, code = FOREIGN[kind]
    make(tmp_path)
    before = snapshot(tmp_path)
    for command in (("check",), ("diff",), ("apply", "--unpinned"), ("apply", "--force")):
        ended = run(*command, "--site-packages", tmp_path)
        assert ended.exit_code == code, (command, ended)
    assert run("revert", "--site-packages", tmp_path).exit_code in {0, 3}
    assert snapshot(tmp_path) == before
    tried(
        GROUP,
        f"what is called vllm is {kind}",
        how="check, diff, apply, apply --force and revert",
        count=5,
        result="not found (3) or unsupported (4); nothing written",
    )


def test_control_characters_never_reach_a_terminal(
    site_packages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (metadata,) = site_packages.glob("*.dist-info/METADATA")
    text = metadata.read_text()
    evil = "0.17.1\x1b]0;x\x07\0\x9b31m"
    metadata.write_text(text.replace("Version: 0.17.1\n", f"Version: {evil}\n", 1))
    for command in ("check", "apply", "revert"):
        ended = run(command, "--site-packages", site_packages)
        assert ended.exit_code in {0, 1}
        assert all(c.isprintable() or c == "\n" for c in ended.stdout + ended.stderr)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_diff("+a\tb\x1b[31m\r\n")
    assert capsys.readouterr().out == "+a\tb\\x1b[31m\\r\n"


@pytest.mark.parametrize("text", ["gitdir: \0\n", "gitdir: x\0y", "gitdir: " + "n" * 5000, "\0"])
def test_a_git_file_that_names_nothing_changes_nothing(
    site_packages: Path, text: str, tried: Tried
) -> None:
    (site_packages / ".git").write_text(text)
    before = snapshot(site_packages)
    assert run("apply", "--site-packages", site_packages).exit_code == 0
    assert run("revert", "--site-packages", site_packages).exit_code == 0
    assert snapshot(site_packages) == before
    tried(
        GROUP,
        "a .git file with NUL bytes or an endless name",
        how="apply and revert",
        result="passed over",
    )


def test_what_is_beside_the_package_is_not_waited_for(site_packages: Path, tried: Tried) -> None:
    os.mkfifo(site_packages / "a.pth")
    (site_packages / "b.pth").mkdir()
    (site_packages / "c.pth").write_text("import __editable___x_finder\n")
    hook = site_packages / "__editable___x_finder.py"
    assert run("check", "--site-packages", site_packages).exit_code == 1
    hook.write_text("MAPPING = {'vllm': " + "-" * 50_000 + "1}\n")
    ended = run("check", "--site-packages", site_packages)
    assert ended.exit_code == 3
    assert "cannot read the editable installation" in ended.stderr
    tried(
        GROUP,
        "a pipe, a folder and a file nested too deeply for editable installations",
        how="beside the package",
        count=3,
        result="passed over, or not found (3) with a line that names it",
    )


def test_a_process_whose_name_leads_in_a_circle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    proc = tmp_path / "proc"
    for pid in ("self", "7"):
        (proc / pid / "ns").mkdir(parents=True)
        (proc / pid / "ns/mnt").symlink_to("mnt:[1]")
    (proc / "7/maps").touch()
    (proc / "7/cmdline").write_bytes(os.fsencode(tmp_path / "loop/bin/vllm") + b"\0")
    monkeypatch.setattr("vllm_eagle3_patch.processes.PROC", proc)
    assert running_with(tmp_path / "lib/python3.12/site-packages") == ()
