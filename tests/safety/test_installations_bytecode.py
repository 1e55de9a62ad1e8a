"""Compiled files beside a patched source: what Python imports in the end."""

from __future__ import annotations

import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from whole_tree import check_apply_check_diff, whole_tree

import fake_environments as fake
from command_line import run
from safety_table import Tried
from small_installation import PLAIN, apply, change, make_installation, revert

GROUP = "Installations as they are"
SPECULATIVE = "vllm/config/speculative.py"
Mode = py_compile.PycInvalidationMode
BEFORE, AFTER = b"WHO = 'original'\n", b"WHO = 'patched '\n"


def compiled(file: Path, mode: Mode, to: Path | None = None) -> Path:
    """Compile a source for the interpreter of the tests."""
    made = py_compile.compile(
        str(file), None if to is None else str(to), doraise=True, invalidation_mode=mode
    )
    return Path(made)


def imported(root: Path, **environment: str) -> str:
    """What a real interpreter finds in the module."""
    command = [sys.executable, "-S", "-c", "import vllm.plain; print(vllm.plain.WHO.strip())"]
    return subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("mode", list(Mode))
def test_python_imports_what_is_in_the_source(
    mode: Mode, prefix: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Tried
) -> None:
    root = make_installation(tmp_path)
    (root / PLAIN).write_bytes(BEFORE)
    (root / "vllm/__init__.py").touch()
    os.utime(root / PLAIN, ns=(10**18, 10**18))
    beside = compiled(root / PLAIN, mode)
    compiled(root / PLAIN, mode, root / "vllm/plain.pyc")  # As old Pythons had it: never used.
    environment = {}
    if prefix:
        environment["PYTHONPYCACHEPREFIX"] = str(tmp_path / "prefix")
        monkeypatch.setenv("PYTHONPYCACHEPREFIX", environment["PYTHONPYCACHEPREFIX"])
        elsewhere = tmp_path.joinpath("prefix", *(root / "vllm").parts[1:])
        elsewhere.mkdir(parents=True)
        shutil.copy(beside, elsewhere)
    assert imported(root, **environment) == "original"
    before = (root / PLAIN).read_bytes()
    apply(root, change(PLAIN, BEFORE, AFTER))
    if mode is Mode.UNCHECKED_HASH:
        # It would be found otherwise, whatever the source holds.
        assert not beside.exists()
    # The same size, and the old time: only the removal can tell.
    os.utime(root / PLAIN, ns=(10**18, 10**18))
    assert imported(root, **environment) == "patched"
    compiled(root / PLAIN, mode)
    if prefix:
        shutil.copy(beside, elsewhere)
    revert(root)
    assert (root / PLAIN).read_bytes() == before
    assert imported(root, **environment) == "original"
    tried(
        GROUP,
        f"compiled files: {mode.name.lower().replace('_', ' ')}",
        how="a real interpreter imports the module before, patched, and after revert; beside the "
        "source and below `PYTHONPYCACHEPREFIX`",
        result="it imports what is in the source each time",
    )


def test_an_unchecked_compiled_file_that_came_after_apply(
    site_packages: Path, tmp_path: Path, tried: Tried
) -> None:
    here = ("--site-packages", site_packages)
    original = tmp_path / "original.py"
    shutil.copy2(site_packages / SPECULATIVE, original)
    check_apply_check_diff(*here)
    cache = site_packages / "vllm/config/__pycache__"
    tag = sys.implementation.cache_tag
    mine = compiled(original, Mode.UNCHECKED_HASH, cache / f"speculative.{tag}.pyc")
    other = cache / "speculative.cpython-38.pyc"
    other.write_bytes(b"\x55\x0d\x0d\x0a" + mine.read_bytes()[4:])
    os.utime(other, (1, 1))
    before = whole_tree(site_packages)
    for command, code in (("check", 0), ("diff", 1)):
        ended = run(command, *here, "--json")
        assert ended.exit_code == code
        told = [p for p in ended.document["problems"] if p["code"] == "outdated-bytecode"]
        assert sorted(p["message"].partition(",")[0].rpartition(" ")[2] for p in told) == sorted(
            map(str, (mine, other))
        )
    assert whole_tree(site_packages) == before
    ended = run("apply", *here, "--json")
    assert (ended.exit_code, ended.document["changed"]) == (0, [])
    assert any("removed compiled files" in note for note in ended.document["notes"])
    assert "outdated-bytecode" not in ended.codes
    assert not (mine.exists() or other.exists())
    # What was compiled from the patched source is as good as the source.
    compiled(site_packages / SPECULATIVE, Mode.UNCHECKED_HASH)
    assert "outdated-bytecode" not in run("check", *here, "--json").codes
    assert run("apply", *here).exit_code == 0
    assert mine.exists()
    assert run("revert", *here).exit_code == 0
    assert not mine.exists()
    tried(
        GROUP,
        "an unchecked compiled file of the original turns up after apply",
        how="put there for this Python and for another one; check, diff, apply, revert",
        result="check and diff name it as `outdated-bytecode`, apply removes it",
    )


@pytest.mark.parametrize("how", ["by folder", "by interpreter"])
def test_an_installation_of_compiled_files_only(how: str, tmp_path: Path, tried: Tried) -> None:
    fake.make_venv(tmp_path / "venv")
    site = fake.site_packages_of(tmp_path / "venv")
    fake.install_vllm(site, "0.17.1")
    for file in (site / "vllm").rglob("*.py"):
        compiled(file, Mode.UNCHECKED_HASH, file.with_suffix(".pyc"))
        file.unlink()
    before = whole_tree(tmp_path)
    where = ("--site-packages", site) if how == "by folder" else ("--python", tmp_path / "venv")
    for command in ("check", "apply", "revert", "diff"):
        ended = run(command, *where)
        assert ended.exit_code == 3
        assert "holds compiled files only" in ended.stderr
        assert "remove" not in ended.stderr, "it works as it is"
    assert whole_tree(tmp_path) == before
    tried(
        GROUP,
        "a vLLM of compiled files only",
        how="every source replaced by its `.pyc`, found by folder and by interpreter",
        result="exit 3, which says that there are no sources to patch; nothing is written",
    )


def test_a_source_that_is_there_compiled_only(site_packages: Path, tried: Tried) -> None:
    file = site_packages / SPECULATIVE
    compiled(file, Mode.UNCHECKED_HASH, file.with_suffix(".pyc"))
    file.unlink()
    before = whole_tree(site_packages)
    for command in ("check", "apply"):
        ended = run(command, "--site-packages", site_packages, "--json")
        assert ended.exit_code == 5
        assert "missing" in ended.codes
    assert whole_tree(site_packages) == before
    tried(
        GROUP,
        "a file to patch that is there compiled only",
        how="one source replaced by its `.pyc`",
        result="exit 5 names the missing source; nothing is written",
    )
