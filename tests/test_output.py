"""What is printed can be pasted and parsed, and what cannot be printed changes nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import fake_environments as fake
from command_line import on_a_terminal, run, snapshot
from conftest import small_copy
from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.ground.text import shell_word

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = f"{shlex.quote(sys.executable)} -m vllm_eagle3_patch"


def in_bash(line: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a line in bash; ``TOOL`` in it is the program."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line.replace("TOOL", PROGRAM)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )


def pasted(stdout: str) -> str:
    """The command that a report ends with."""
    line = stdout.splitlines()[-1]
    assert line.startswith("  vllm-eagle3-patch "), line
    return line.replace("vllm-eagle3-patch", "TOOL", 1)


# Commands to paste


def test_the_next_command_repeats_what_selects(site_packages: Path) -> None:
    given = ["--unpinned", "--interface-only", "--harden"]
    given += ["--only", "deepseek-v2", "--only", "eagle3-allowlist", "--skip", "eagle3-allowlist"]
    checked = run("check", "--site-packages", site_packages, *given)
    assert checked.exit_code == 1
    assert pasted(checked.stdout) == f"  TOOL apply --site-packages {site_packages} " + " ".join(
        given
    )
    assert in_bash(pasted(checked.stdout)).returncode == 0


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        (b"a b'c", "utf-8"),
        (b"line\nfeed", "utf-8"),
        (b"tab\tand \\ and '", "utf-8"),
        (b"\xff not UTF-8", "utf-8"),
        ("日本".encode(), "utf-8"),
        ("日本".encode(), "ascii"),
    ],
)
def test_the_next_command_can_be_pasted(tmp_path: Path, name: bytes, encoding: str) -> None:
    folder = small_copy("0.17.1", tmp_path / os.fsdecode(name))
    before = snapshot(folder)
    check = f"TOOL check --site-packages {shell_word(folder)}"
    checked = in_bash(check, PYTHONIOENCODING=encoding)
    assert checked.returncode == 1, checked.stderr
    applied = in_bash(pasted(checked.stdout), PYTHONIOENCODING=encoding)
    assert applied.returncode == 0, applied.stderr
    assert snapshot(folder) != before
    assert in_bash(pasted(applied.stdout)).returncode == 0
    assert snapshot(folder) == before


def test_an_active_environment_that_was_passed_over_is_not_what_apply_is_told_to_use(
    tmp_path: Path,
) -> None:
    empty = fake.make_venv(tmp_path / "empty").parent.parent
    python = fake.make_venv(tmp_path / "full")
    small_copy("0.17.1", fake.site_packages_of(python.parent.parent))
    # No candidate but this one, whatever the tests themselves run in.
    path = f"{python.parent}:{os.environ['PATH']}"
    (python.parent / "vllm").write_text(f"#!{python}\n")
    (python.parent / "vllm").chmod(0o755)
    done = in_bash("TOOL check", VIRTUAL_ENV=str(empty), PATH=path)
    assert done.returncode == 1, done.stderr
    assert pasted(done.stdout) == f"  TOOL apply --python {python}"


def test_a_terminal_does_not_break_the_command(tmp_path: Path) -> None:
    folder = small_copy("0.17.1", tmp_path / ("a long name " * 12).strip())
    output = on_a_terminal("check", "--site-packages", folder, columns=60)
    assert f"vllm-eagle3-patch apply --site-packages {shell_word(folder)}" in output


# Streams that refuse


@pytest.mark.parametrize(
    ("redirection", "told"),
    [
        (">&-", "Bad file descriptor"),
        (">/dev/full", "No space left"),
        (">/dev/full 2>&1", None),
        (">&- 2>&-", None),
    ],
)
@pytest.mark.parametrize("more", ["", "--json"])
def test_an_apply_whose_report_cannot_be_written_is_done(
    site_packages: Path, redirection: str, told: str | None, more: str
) -> None:
    where = f"--site-packages {site_packages} {more}"
    done = in_bash(f"TOOL apply {where} {redirection}")
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert told is None or f"error: cannot write the report: {told}" in done.stderr
    assert run("check", "--site-packages", site_packages).exit_code == 0


@pytest.mark.parametrize(
    "start", ["import runpy; runpy.run_module(NAME, run_name='__main__')", "CONSOLE"]
)
def test_an_interruption_while_modules_are_imported_shows_no_traceback(
    tmp_path: Path, start: str
) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt\n")
    (line,) = re.findall(r"vllm-eagle3-patch = (.*):main", (ROOT / "setup.cfg").read_text())
    script = start.replace("NAME", "'vllm_eagle3_patch'")
    script = script.replace("CONSOLE", f"import sys\nfrom {line} import main\nsys.exit(main())")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    told = "interrupted; no file was left half-changed\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", told)


@pytest.mark.parametrize("more", ["", "--json"])
def test_a_check_whose_report_cannot_be_written_is_no_success(
    site_packages: Path, more: str
) -> None:
    where = f"--site-packages {site_packages} {more}"
    assert in_bash(f"TOOL check {where} >/dev/full").returncode == 1
    assert in_bash(f"TOOL apply {where}").returncode == 0
    assert in_bash(f"TOOL check {where} | true").returncode == 0
    assert in_bash(f"TOOL check {where} >/dev/full").returncode == 7
    assert in_bash(f"TOOL apply --dry-run {where} >/dev/full").returncode == 7


def test_a_reader_that_leaves_is_not_told(site_packages: Path) -> None:
    script = f"TOOL diff --site-packages {site_packages}; echo $? >&2"
    done = in_bash(f"{{ {script}; }} | true")
    assert done.stderr == "1\n"


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize(
    ("arguments", "code"), [("check --site-packages /none", 3), ("check --none", 2)]
)
def test_an_error_that_cannot_be_told_keeps_its_code(
    arguments: str, code: int, redirection: str
) -> None:
    done = in_bash(f"TOOL {arguments} {redirection}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.parametrize("arguments", ["--help", "--version", "check --help", "matrix"])
def test_no_traceback_where_nothing_can_be_printed(arguments: str) -> None:
    for redirection in (">/dev/full", ">&-"):
        done = in_bash(f"TOOL {arguments} {redirection}")
        assert "Traceback" not in done.stderr
    full = in_bash(f"TOOL {arguments} >/dev/full")
    assert full.returncode == 7
    assert "cannot write" in full.stderr


def test_a_fault_while_the_report_is_made_is_one_line_and_70(
    site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_eagle3_patch.output.report._report_blocks", lambda _: 1 / 0)
    ended = run("check", "--site-packages", site_packages)
    assert ended.exit_code == 70
    assert ended.stderr.startswith("error: internal error: ZeroDivisionError")


# Names that are too long


def test_a_release_of_300_digits_is_wrong_usage() -> None:
    ended = run("matrix", "--release", "1" * 300)
    assert ended.exit_code == 2
    assert "no release 111" in ended.stderr
    assert run("matrix", "--release", "").exit_code == 2


def test_a_version_of_300_digits_is_known_by_content(site_packages: Path) -> None:
    (info,) = site_packages.glob("*.dist-info")
    metadata = info / "METADATA"
    metadata.write_text(
        metadata.read_text().replace("Version: 0.17.1\n", f"Version: {'1' * 300}\n", 1)
    )
    ended = run("check", "--json", "--site-packages", site_packages)
    assert (ended.exit_code, ended.document["release"]["name"]) == (1, "0.17.1")


def test_every_column_of_the_matrix_has_a_name_of_its_own() -> None:
    for names in ([m.columns.matrix for m in FAMILY], [m.columns.narrow for m in FAMILY]):
        assert sorted({*names}) == sorted(names)


def test_a_fault_in_the_matrix_is_told_without_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_eagle3_patch.ground.matrix.oldest_first", lambda: 1 / 0)
    ended = run("matrix", "--json")
    assert ended.exit_code == 70
    assert ended.document["command"] == "matrix"


# JSON


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_an_error_of_a_command_that_writes_says_what_was_changed(
    command: str, tmp_path: Path
) -> None:
    ended = run(command, "--json", "--site-packages", tmp_path)
    assert (ended.exit_code, ended.document["changed"]) == (3, [])
    assert run(command, "--json", "--none").document["changed"] == []
    planned = run(command, "--json", "--dry-run", "--site-packages", tmp_path)
    assert planned.document["dry_run"] is True


@pytest.mark.parametrize(
    ("raised", "code", "named"),
    [
        (KeyboardInterrupt(), 130, "interrupted-by-user"),
        (RuntimeError("a\nb"), 70, "internal-error"),
    ],
)
def test_what_ends_a_command_early_is_one_document(
    site_packages: Path,
    monkeypatch: pytest.MonkeyPatch,
    raised: BaseException,
    code: int,
    named: str,
) -> None:
    def end(*_: object) -> None:
        raise raised

    monkeypatch.setattr("vllm_eagle3_patch.commands.apply.classify", end)
    ended = run("apply", "--json", "--site-packages", site_packages)
    assert (ended.exit_code, ended.document["exit_code"]) == (code, code)
    assert [problem["code"] for problem in ended.document["problems"]] == [named]
    assert ended.document["changed"] == []


@pytest.mark.parametrize(
    ("arguments", "env", "hint"),
    [
        (["check", "--none"], {"VLLM_EAGLE3_PATCH_CHECK_JSON": "1"}, " check --help"),
        (["check", "--none", "--json"], {}, " check --help"),
        (["--json"], {}, " --help"),
        (["none", "--json"], {}, " --help"),
    ],
)
def test_wrong_usage_is_one_document(
    arguments: list[str], env: Mapping[str, str], hint: str
) -> None:
    ended = run(*arguments, env=dict(env))
    assert (ended.exit_code, ended.document["exit_code"]) == (2, 2)
    assert ended.document["problems"][0]["hint"] == f"see vllm-eagle3-patch{hint}"


@pytest.mark.parametrize("value", ["0", "maybe"])
def test_wrong_usage_is_no_document_where_none_was_asked_for(value: str) -> None:
    ended = run("check", "--none", env={"VLLM_EAGLE3_PATCH_CHECK_JSON": value})
    assert (ended.exit_code, ended.stdout) == (2, "")


# What may not be read


def test_a_record_that_may_not_be_read_is_7(
    site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "RECORD":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    before = snapshot(site_packages)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    ended = run("apply", "--json", "--site-packages", site_packages)
    monkeypatch.undo()
    assert ended.exit_code == 7
    assert ended.document["problems"][0]["code"] == "unreadable"
    assert "RECORD: Permission denied" in ended.stderr
    assert snapshot(site_packages) == before


def test_a_record_with_a_broken_row_is_read_without_it(site_packages: Path) -> None:
    (record,) = site_packages.glob("*.dist-info/RECORD")
    row = "vllm/unlisted.py,sha256=日本,1\nvllm/short.py,sha256=a,1\n".encode()
    record.write_bytes(row + record.read_bytes())
    assert run("check", "--site-packages", site_packages).exit_code == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
@pytest.mark.parametrize("command", ["check", "apply"])
def test_a_folder_that_may_not_be_read_is_3(site_packages: Path, command: str) -> None:
    script = """
import os, sys
from vllm_eagle3_patch.assess import classify
from vllm_eagle3_patch.cli import termination
from vllm_eagle3_patch.commands import apply
from vllm_eagle3_patch.installation import find
from vllm_eagle3_patch.output import report
from vllm_eagle3_patch.cli.program import cli
os.setuid(54321)
cli(sys.argv[1:])
"""
    arguments = [command, "--site-packages", str(site_packages)]
    site_packages.chmod(0o300)
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith(f"error: cannot read {site_packages}")
    json_too = subprocess.run(
        [sys.executable, "-c", script, *arguments, "--json"], capture_output=True, check=False
    )
    assert json.loads(json_too.stdout)["exit_code"] == 3


@pytest.mark.parametrize("option", ["--site-packages", "--python"])
def test_an_empty_path_is_wrong_usage(option: str) -> None:
    ended = run("check", option, "")
    assert ended.exit_code == 2
    assert "an empty path" in ended.stderr


# diff


def test_a_diff_that_cannot_be_made_prints_nothing_for_patch(site_packages: Path) -> None:
    file = site_packages / "vllm/model_executor/models/deepseek_v2.py"
    file.write_bytes(file.read_bytes() + b"\n# edited\n")
    ended = run("diff", "--site-packages", site_packages)
    assert (ended.exit_code, ended.stdout) == (5, "")
    assert "modified" in ended.stderr
    told = run("diff", "--json", "--site-packages", site_packages)
    assert told.document["exit_code"] == 5
