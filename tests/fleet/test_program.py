"""The single-file program in an empty environment: no network, no packages, no home of ours."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from command_line import snapshot
from conftest import small_copy
from fleet.conftest import DIST
from tools.build_programs import MACHINES, MINORS, program_name
from vllm_eagle3_patch import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

STATE = ".vllm-eagle3-patch"
TIMEOUT = 120.0


def interpreters() -> list[Path]:
    """The Pythons of this machine that the program is for, one a version."""
    found: dict[str, Path] = {}
    candidates = [
        *Path.home().glob(".pyenv/versions/3.*/bin/python3"),
        *(Path("/usr/local/bin") / f"python3.{minor}" for minor in MINORS),
        *(Path("/usr/bin") / f"python3.{minor}" for minor in MINORS),
        Path(sys.executable).resolve(),
    ]
    for python in candidates:
        if python.exists():
            asked = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
            version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
            found.setdefault(version.strip(), python)
    return [python for version, python in sorted(found.items()) if version in SUPPORTED]


SUPPORTED = {f"3.{minor}" for minor in MINORS}


class Bare:
    """An environment with nothing in it.

    Args:
        folder: Where its home and temporary folder are.
        program: The single file.
        read_only: Its home cannot be written to.
    """

    def __init__(self, folder: Path, program: Path, *, read_only: bool = False) -> None:
        self.home, self.temporary = folder / "home", folder / "tmp"
        self.home.mkdir(parents=True)
        self.temporary.mkdir()
        self._program, self._read_only = program, read_only

    def run(
        self, python: Path, *arguments: object, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the program there, without the site packages of this interpreter."""
        given = {"HOME": str(self.home), "TMPDIR": str(self.temporary), **environ}
        command = [
            *("env", "-i", *(f"{name}={value}" for name, value in given.items())),
            *(str(python), "-I", "-S", str(self._program), *map(str, arguments)),
        ]
        home = shlex.quote(str(self.home))
        mount = f"mount --bind {home} {home} && mount -o remount,bind,ro {home} && "
        script = f"{mount if self._read_only else ''}exec {shlex.join(command)}"
        return subprocess.run(
            ["unshare", "--net", "--mount", "--propagation=private", "sh", "-c", script],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )

    def document(self, python: Path, *arguments: object, **environ: str) -> dict[str, Any]:
        """Run it with ``--json``; nothing may be said beside the document."""
        ended = self.run(python, *arguments, "--json", **environ)
        assert ended.stderr == ""
        document: dict[str, Any] = json.loads(ended.stdout)
        assert document["exit_code"] == ended.returncode
        return document


@pytest.fixture
def python() -> Path:
    """The newest of these Pythons."""
    return interpreters()[-1]


def test_this_machine_has_more_than_one_python_to_try() -> None:
    assert len(interpreters()) > 1


@pytest.mark.parametrize("python", interpreters(), ids=lambda python: python.resolve().name)
def test_it_needs_only_a_python(python: Path, program: Path, tmp_path: Path) -> None:
    bare = Bare(tmp_path, program)
    root = small_copy("0.17.1", tmp_path / "site-packages")
    before = snapshot(root)
    where = ("--site-packages", root)
    assert bare.document(python, "check", *where)["state"] == "patchable"
    assert snapshot(root) == before
    applied = bare.document(python, "apply", *where)
    assert (applied["exit_code"], applied["state"]) == (0, "patched")
    assert bare.document(python, "revert", *where)["changed"] == applied["changed"]
    after = {path: entry for path, entry in snapshot(root).items() if not path.startswith(STATE)}
    assert after == before
    # Where docs/fleet.md says it unpacks itself, and nowhere else.
    assert [path.name for path in bare.home.iterdir()] == [".cache"]
    assert [path.name for path in (bare.home / ".cache").iterdir()] == ["pex"]
    assert list(bare.temporary.iterdir()) == []


def test_it_unpacks_itself_where_it_is_told(python: Path, program: Path, tmp_path: Path) -> None:
    bare = Bare(tmp_path, program)
    root = small_copy("0.17.1", tmp_path / "site-packages")
    unpacked = tmp_path / "unpacked"
    bare.document(python, "check", "--site-packages", root, PEX_ROOT=str(unpacked))
    assert list(bare.home.iterdir()) == list(bare.temporary.iterdir()) == []
    sizes = sum(path.lstat().st_size for path in unpacked.rglob("*") if path.is_file())
    assert 40e6 < sizes < 120e6


def test_a_read_only_home_is_no_hindrance(python: Path, program: Path, tmp_path: Path) -> None:
    bare = Bare(tmp_path, program, read_only=True)
    root = small_copy("0.17.1", tmp_path / "site-packages")
    ended = bare.run(python, "check", "--site-packages", root, "--json")
    assert json.loads(ended.stdout)["exit_code"] == ended.returncode == 1
    assert "un-writeable, falling back to a temporary PEX_ROOT" in ended.stderr
    assert list(bare.home.iterdir()) == list(bare.temporary.iterdir()) == []
    told = tmp_path / "unpacked"
    assert bare.document(python, "check", "--site-packages", root, PEX_ROOT=str(told))


def test_an_older_python_is_refused_in_words(program: Path, tmp_path: Path) -> None:
    old = sorted(Path.home().glob(".pyenv/versions/3.9.*/bin/python3"))
    if not old:
        pytest.skip("there is no Python 3.9 here")
    for python in old:
        ended = Bare(tmp_path, program).run(python, "check")
        assert ended.returncode == 1
        assert "python requirement of >=3.10" in ended.stderr


def test_it_finds_the_vllm_of_the_python_that_starts_it(program: Path, tmp_path: Path) -> None:
    python = Path(sys.executable).resolve()
    venv = [str(python), "-m", "venv", "--without-pip", str(tmp_path / "venv")]
    subprocess.run(venv, check=True)
    (site_packages,) = (tmp_path / "venv/lib").glob("*/site-packages")
    small_copy("0.16.0", site_packages)
    started = tmp_path / "venv/bin/python"
    ended = subprocess.run(
        [str(started), str(program), "check", "--json"],
        env={"HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(ended.stdout)["vllm"]
    assert (found["version"], found["chosen_by"]) == ("0.16.0", "this interpreter")
    assert Path(found["python"]).parent == started.parent


def names(machine: str) -> Iterator[str]:
    """The wheels in a program."""
    with zipfile.ZipFile(DIST / program_name(__version__, machine)) as archive:
        yield from {name.split("/")[1] for name in archive.namelist() if ".whl/" in name}


@pytest.mark.parametrize("machine", MACHINES)
def test_it_holds_the_compiled_wheels_of_every_python(machine: str) -> None:
    libcst = [name for name in names(machine) if name.startswith("libcst-")]
    assert len(libcst) == len(MINORS)
    for minor in MINORS:
        (wheel,) = [name for name in libcst if f"-cp3{minor}-" in name]
        assert wheel.endswith(f"_{machine}.whl")


@pytest.mark.parametrize("machine", MACHINES)
def test_nothing_in_it_is_for_another_machine(machine: str) -> None:
    assert [
        name for name in names(machine) if not name.endswith((f"{machine}.whl", "any.whl"))
    ] == []
