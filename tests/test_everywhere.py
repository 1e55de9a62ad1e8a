"""``check --all``: every installation that lies in a usual place, a row each."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import run, snapshot
from vllm_eagle3_patch import __version__
from vllm_eagle3_patch.assess.decision import Options
from vllm_eagle3_patch.commands import check_all as checking
from vllm_eagle3_patch.commands.check_all import check_all
from vllm_eagle3_patch.installation.site_packages import Lookup


@pytest.fixture
def home(tmp_path: Path, site_packages: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with nothing on it but what a test puts into its home.

    What a test copies from was fetched before: its cache is in the real home.
    """
    folder = tmp_path / "home"
    folder.mkdir()
    for name in ("WORKON_HOME", "PIPX_HOME", "UV_TOOL_DIR", "PYENV_ROOT", "CONDA_EXE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(checking, "_SYSTEM", ())
    monkeypatch.setattr(checking.sys, "prefix", str(tmp_path / "no-prefix"))
    monkeypatch.setattr("vllm_eagle3_patch.ground.processes.PROC", tmp_path / "no-proc")
    return folder


def environment(prefix: Path, site_packages: Path | None) -> Path:
    """A venv as far as files tell, with a copy of an installation in it."""
    folder = prefix / "lib/python3.12/site-packages"
    folder.parent.mkdir(parents=True)
    (prefix / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (prefix / "bin").mkdir()
    (prefix / "bin/python").symlink_to(sys.executable)
    if site_packages is None:
        folder.mkdir()
    else:
        shutil.copytree(site_packages, folder)
    return prefix


def test_none(home: Path) -> None:
    environment(home / ".virtualenvs/empty", None)
    ended = run("check", "--all")
    assert (ended.exit_code, ended.stderr) == (3, "")
    assert "No vLLM was found" in ended.stdout
    assert run("check", "--all", "--json").document == {
        "schema": 1,
        "tool": __version__,
        "command": "check",
        "all": True,
        "exit_code": 3,
        "installations": [],
    }


def test_each_usual_place_is_a_row_and_nothing_is_written_or_started(
    home: Path, tmp_path: Path, site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = (
        ".virtualenvs/a",
        ".local/share/uv/tools/vllm",
        ".local/share/pipx/venvs/vllm",
        ".pyenv/versions/3.12.1",
        "miniforge3/envs/b",
    )
    places = [environment(home / place, site_packages) for place in usual]
    listed = environment(tmp_path / "elsewhere", site_packages)
    (home / ".conda").mkdir()
    (home / ".conda/environments.txt").write_text(f"{listed}\n\n/no/such\n")
    active = environment(tmp_path / "active", site_packages)
    monkeypatch.setenv("VIRTUAL_ENV", str(active))
    on_path = environment(tmp_path / "on-path", site_packages)
    (on_path / "bin/python3.12").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(on_path / "bin"))
    user = home / ".local/lib/python3.12/site-packages"
    shutil.copytree(site_packages, user)
    before = snapshot(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an interpreter was started")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    ended = run("check", "--all", "--json")
    assert ended.exit_code == 1
    assert snapshot(tmp_path) == before
    found = {document["vllm"]["location"] for document in ended.document["installations"]}
    prefixes = (*places, listed, active, on_path)
    expected = {f"{prefix}/lib/python3.12/site-packages/vllm" for prefix in prefixes}
    assert found == {*expected, f"{user}/vllm"}
    assert len(ended.document["installations"]) == len(found)
    first = ended.document["installations"][0]
    assert first["vllm"]["chosen_by"] == "VIRTUAL_ENV"
    assert first["vllm"]["python"] == str(active / "bin/python")
    assert first["state"] == "patchable"
    alone = run("check", "--site-packages", active / "lib/python3.12/site-packages", "--json")
    assert {**first, "vllm": None} == {**alone.document, "vllm": None}


def test_the_exit_code_is_the_highest_and_an_error_is_a_row(
    home: Path, site_packages: Path
) -> None:
    ready = environment(home / ".virtualenvs/ready", site_packages)
    folder = ready / "lib/python3.12/site-packages"
    run("apply", "--site-packages", folder, "--json")
    assert run("check", "--all").exit_code == 0
    environment(home / ".virtualenvs/patchable", site_packages)
    assert run("check", "--all").exit_code == 1
    edited = environment(home / ".virtualenvs/edited", site_packages)
    file = edited / "lib/python3.12/site-packages/vllm/config/speculative.py"
    file.write_bytes(file.read_bytes() + b"# by hand\n")
    left = environment(home / ".virtualenvs/left", None)
    (left / "lib/python3.12/site-packages/vllm").mkdir()
    ended = run("check", "--all")
    assert ended.exit_code == 5
    lines = ended.stdout.splitlines()
    assert lines[0].split() == ["version", "location", "interpreter", "state", "exit", "code"]
    assert sorted(line.split()[-2:] for line in lines[1:5]) == [
        ["error", "3"],
        ["modified", "5"],
        ["patchable", "1"],
        ["patched", "0"],
    ]
    assert "it is what is left of a vLLM" in lines[5]


def test_one_by_several_names_is_one_row(
    home: Path, site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = environment(home / ".virtualenvs/one", site_packages)
    (home / ".virtualenvs/link").symlink_to(prefix)
    (prefix / "lib64").symlink_to("lib")
    monkeypatch.setenv("PYTHONPATH", str(prefix / "lib/python3.12/site-packages"))
    other = environment(home / ".virtualenvs/editable", None)
    points = other / "lib/python3.12/site-packages/checkout.pth"
    points.write_text(f"{prefix}/lib/python3.12/site-packages\n")
    assert len(check_all(Options(), (prefix, home)).reports) == 1


def test_search_finds_environments_and_plain_folders(
    home: Path, tmp_path: Path, site_packages: Path
) -> None:
    environment(tmp_path / "named/team/project/.venv", site_packages)
    shutil.copytree(site_packages, tmp_path / "named/image/packages")
    environment(tmp_path / "named/1/2/3/4/too-deep", site_packages)
    ended = run("check", "--all", "--search", tmp_path / "named", "--json")
    locations = [d["vllm"]["location"] for d in ended.document["installations"]]
    assert len(locations) == 2
    assert not any("too-deep" in location for location in locations)
    assert run("check", "--all").exit_code == 3


def test_what_may_not_be_read_is_a_row(
    home: Path, site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(home / ".virtualenvs/a", site_packages)

    def refused(folder: Path) -> Lookup:
        """As for a user who may not, which root always may."""
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr(checking, "look_in", refused)
    ended = run("check", "--all", "--json")
    assert ended.exit_code == 3
    assert ended.document["installations"][0]["problems"][0]["code"] == "unreadable"


def test_a_running_process_leads_to_its_installation(
    home: Path, tmp_path: Path, site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = tmp_path / "proc/12"
    (process / "ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    for folder in (process, tmp_path / "proc/self"):
        (folder / "ns/mnt").symlink_to("mnt:[1]")
    library = f"{site_packages}/vllm/_C.abi3.so"
    (process / "maps").write_text(f"7f00-7f01 r--p 00000000 00:1 1    {library}\n7f02 [heap]\n")
    prefix = environment(tmp_path / "served", site_packages)
    (process / "cmdline").write_bytes(f"{prefix}/bin/python\0-m\0vllm.x\0".encode())
    monkeypatch.setattr("vllm_eagle3_patch.ground.processes.PROC", tmp_path / "proc")
    reports = check_all(Options()).reports
    found = {str(r.installation.package) for r in reports if r.installation is not None}
    assert found == {
        f"{site_packages}/vllm",
        f"{prefix}/lib/python3.12/site-packages/vllm",
    }
    assert {r.installation.chosen_by for r in reports if r.installation} == {"a running process"}


def running(proc: Path, number: int, command: bytes, maps: str = "") -> None:
    """A process of the same mount namespace, as Linux shows it."""
    process = proc / str(number)
    for folder in (process, proc / "self"):
        if not (folder / "ns").exists():
            (folder / "ns").mkdir(parents=True)
            (folder / "ns/mnt").symlink_to("mnt:[1]")
    (process / "cmdline").write_bytes(command)
    (process / "maps").write_text(maps)


def test_the_interpreter_of_a_running_process_is_named(
    home: Path, tmp_path: Path, site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that it was started by, or its environment's where it hides that."""
    proc = tmp_path / "proc"
    idle, served, renamed = (
        environment(tmp_path / name, site_packages) for name in ("idle", "served", "renamed")
    )
    running(proc, 1, f"{idle}/bin/python\0-c\0input()".encode())
    running(proc, 2, f"{served}/bin/python\0{served}/bin/vllm\0serve".encode())
    library = f"{renamed}/lib/python3.12/site-packages/vllm/_C.abi3.so"
    running(proc, 3, b"VLLM::EngineCore\0", f"7f00-7f01 r--p 00000000 00:1 1    {library}\n")
    running(proc, 4, b"")
    monkeypatch.setattr("vllm_eagle3_patch.ground.processes.PROC", proc)
    installations = [report.installation for report in check_all(Options()).reports]
    assert {found.python for found in installations if found} == {
        f"{prefix}/bin/python" for prefix in (idle, served, renamed)
    }


def test_venvs_in_the_home_and_in_the_current_directory(
    home: Path, tmp_path: Path, site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = ("venv", ".venv", "venvs/a", ".venvs/b", "project/.venv", "other/venv", "named")
    places = [environment(home / place, site_packages) for place in usual]
    here = environment(tmp_path / "here/.venv", site_packages)
    environment(home / "a/b/venv", site_packages)
    no_venv = environment(home / "x/y", site_packages)
    shutil.copytree(no_venv / "lib", home / "plain/lib")
    monkeypatch.chdir(tmp_path / "here")
    installations = [report.installation for report in check_all(Options()).reports]
    assert sorted(found.python or "" for found in installations if found) == sorted(
        f"{prefix}/bin/python" for prefix in (*places, here)
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--all", "--site-packages", "x"),
        ("--all", "--python", "x"),
        ("--search", "x"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    ended = run("check", *arguments, "--json")
    assert ended.exit_code == 2
    assert "--all" in ended.stderr
    assert json.loads(ended.stdout)["problems"][0]["code"] == "usage"


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_neither_waited_for_nor_read(
    kind: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".conda").mkdir()
    (tmp_path / "programs").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    for place in (home / ".conda/environments.txt", tmp_path / "programs/vllm"):
        if kind == "pipe":
            os.mkfifo(place, 0o755)
        elif kind == "device":
            place.symlink_to("/dev/zero")
        else:
            place.mkdir()
    program = [sys.executable, "-m", "vllm_eagle3_patch", "check"]
    for arguments in (["--all"], []):
        ended = subprocess.run(
            [*program, *arguments], capture_output=True, timeout=60, check=False, text=True
        )
        assert ended.returncode in {0, 1, 3}, ended.stderr
        assert "internal error" not in ended.stderr
