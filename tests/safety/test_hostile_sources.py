"""Files of vLLM, metadata and folders that are not what they should be."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from other_users import let_in

from command_line import run, snapshot
from safety_table import Tried
from vllm_eagle3_patch.ground.processes import running_with
from vllm_eagle3_patch.output.blocks import print_diff

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


# Every other file that is changed on 0.17.1: each is spoilt in two of the ways.
FILES = (
    "vllm/config/speculative.py",
    "vllm/model_executor/models/deepseek_ocr.py",
    "vllm/model_executor/models/deepseek_ocr2.py",
    "vllm/model_executor/models/deepseek_vl2.py",
    "vllm/model_executor/models/kimi_k25.py",
    "vllm/model_executor/models/kimi_vl.py",
    "vllm/model_executor/models/pixtral.py",
    "vllm/v1/attention/selector.py",
    "vllm/v1/spec_decode/eagle.py",
    "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
    "vllm/v1/worker/gpu_model_runner.py",
    "vllm/v1/worker/gpu_ubatch_wrapper.py",
)
SPREAD = [
    (path, list(REFUSED)[(2 * index + more) % len(REFUSED)])
    for index, path in enumerate(FILES)
    for more in (0, 1)
]


@pytest.mark.parametrize(("path", "kind"), SPREAD)
def test_no_other_file_may_be_spoilt_either(
    site_packages: Path, path: str, kind: str, tried: Tried
) -> None:
    file = site_packages / path
    content = file.read_bytes()
    file.unlink()
    REFUSED[kind](file, content)
    before = file.lstat()
    for command in (("check",), ("apply",), ("apply", "--unpinned")):
        ended = run(*command, "--site-packages", site_packages)
        assert ended.exit_code in {4, 5, 7}, (command, ended)
    assert (file.lstat().st_ino, file.lstat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not list(site_packages.glob(".vllm*"))
    tried(
        GROUP,
        "any of the other files of 0.17.1 that is no source",
        how="each in two of the ways above; check, apply and apply --unpinned",
        count=3,
        result="refused (4, 5 or 7); nothing written",
    )


def tabs(content: bytes) -> bytes:
    return re.sub(rb"(?m)^(?:    )+", lambda indent: b"\t" * (len(indent[0]) // 4), content)


def test_a_git_checkout_in_other_layouts_is_patched_and_restored(
    checkout: Path, tried: Tried
) -> None:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", checkout, "-c", "user.name=t", "-c", "user.email=t@t", *arguments],
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    ways = [*KEPT.values(), tabs]
    for index, path in enumerate(FILES):
        file = checkout / path
        file.write_bytes(ways[index % len(ways)](file.read_bytes()))
    next(checkout.glob("*.dist-info")).rename(checkout.parent / "elsewhere")
    (checkout / "pyproject.toml").write_text("[project]\nname = 'vllm'\n")
    git("init", "-q")
    git("config", "core.autocrlf", "false")
    git("add", "-A")
    git("commit", "-qm", "as it was")
    where = ("--site-packages", checkout)
    before = snapshot(checkout / "vllm")
    assert run("apply", *where).exit_code == 4
    assert git("status", "--porcelain") == ""
    ended = run("apply", "--unpinned", *where)
    assert ended.exit_code == 0, ended
    changed = {line[3:] for line in git("status", "--porcelain").splitlines()}
    assert changed == {*FILES, DEEPSEEK}
    for line in git("diff", "--numstat").splitlines():
        assert int(line.split()[1]) <= 12, line
    assert run("revert", *where).exit_code == 0
    assert snapshot(checkout / "vllm") == before
    assert git("status", "--porcelain", "--ignored") == ""
    tried(
        GROUP,
        "a git checkout whose files have a byte order mark, CRLF, tabs, latin-1 or no last newline",
        how="every file of 0.17.1 in one of these ways, with --unpinned",
        count=len(FILES),
        result="patched, git shows only the patched lines; revert leaves git nothing to say",
    )


@pytest.mark.parametrize("path", [DEEPSEEK, "vllm/config/speculative.py", "RECORD", "METADATA"])
def test_what_a_user_may_not_read_is_named(site_packages: Path, path: str, tried: Tried) -> None:
    file = site_packages / path
    if "/" not in path:
        (file,) = site_packages.glob(f"*.dist-info/{path}")
    let_in(site_packages)
    file.chmod(0)
    before = {found: found.lstat().st_mtime_ns for found in site_packages.rglob("*")}
    where = ("--site-packages", site_packages)
    for command in (("check",), ("diff",), ("apply",), ("apply", "--force", "--unpinned")):
        code, told = in_a_child(*command, *where, user=54321)
        error, hint = told.splitlines()
        assert code == 7, (command, told)
        assert error.startswith("error: ")
        assert file.name in error
        assert hint.startswith("  ")
    assert {found: found.lstat().st_mtime_ns for found in site_packages.rglob("*")} == before
    tried(
        GROUP,
        "a file that the user may not read",
        how="a source, RECORD or METADATA; check, diff, apply and apply --force, as another user",
        count=4,
        result="not readable (7), named, with a hint; nothing written",
    )


def in_a_child(*arguments: object, user: int | None = None) -> tuple[int, str]:
    """Run a command that may hang, or as another user; returns its code and standard error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)
            if user is not None and os.geteuid() == 0:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            ended = run(*arguments)
            os.write(writing, ended.stderr.encode())
            os._exit(ended.exit_code)
        except BaseException as error:
            os.write(writing, repr(error).encode())
        finally:
            os._exit(99)
    os.close(writing)
    with os.fdopen(reading) as told:
        text = told.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


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
    monkeypatch.setattr("vllm_eagle3_patch.ground.processes.PROC", proc)
    assert running_with(tmp_path / "lib/python3.12/site-packages") == ()


def test_folders_in_place_of_compiled_files(site_packages: Path, tried: Tried) -> None:
    cache = (site_packages / DEEPSEEK).parent / "__pycache__"
    for name in ("deepseek_v2.cpython-312.pyc", "deepseek_v2.cpython-312.opt-1.pyc"):
        (cache / name).mkdir(parents=True)
    (cache / "deepseek_v2.cpython-312.pyc/kept").touch()
    before = snapshot(site_packages)
    only = ("--only", "deepseek-v2")
    assert run("apply", *only, "--site-packages", site_packages).exit_code == 0
    assert run("revert", "--site-packages", site_packages).exit_code == 0
    assert snapshot(site_packages) == before
    tried(
        GROUP,
        "folders in place of compiled files",
        how="in __pycache__ beside a source; apply and revert",
        count=2,
        result="left as they are",
    )


@pytest.mark.parametrize("kind", ["commondir", "exclude", "info", "HEAD"])
def test_a_pipe_in_place_of_what_git_keeps(site_packages: Path, kind: str, tried: Tried) -> None:
    git = site_packages.parent / "elsewhere"
    (git / "info").mkdir(parents=True)
    (git / "HEAD").touch()
    (site_packages / ".git").write_text(f"gitdir: {git}\n")
    place = git / {"exclude": "info/exclude"}.get(kind, kind)
    if kind == "info":
        place.rmdir()
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    before = snapshot(site_packages)
    for command in ("apply --only eagle3-allowlist", "revert"):
        code, told = in_a_child(*command.split(), "--site-packages", site_packages)
        assert code == 0, told
    assert snapshot(site_packages) == before
    assert stat.S_ISFIFO(place.lstat().st_mode)
    tried(
        GROUP,
        "a pipe in place of what git keeps for a checkout",
        how="commondir, HEAD, info and info/exclude of the folder that .git names",
        count=2,
        result="passed over, without waiting",
    )


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"dir_info": ' * 50_000,
        '{"dir_info": 7}',
        "[]",
        '{"dir_info": {"editable": 1}}',
    ],
)
def test_where_an_editable_installation_lies_is_nonsense(
    checkout: Path, text: str, tried: Tried
) -> None:
    (info,) = checkout.glob("*.dist-info")
    (info / "direct_url.json").write_text(text)
    before = snapshot(checkout)
    for command in ("check", "apply"):
        ended = run(command, "--site-packages", checkout)
        assert ended.exit_code in {3, 4}, ended
    assert snapshot(checkout) == before
    tried(
        GROUP,
        "a direct_url.json nested too deeply, or of other types",
        how="check and apply",
        count=2,
        result="not found (3) or not pinned (4), one line and a hint; nothing written",
    )
