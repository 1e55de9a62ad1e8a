"""The project as users get it: from a wheel, from an sdist, and editable."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from vllm_eagle3_patch.ground import matrix

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it and not from the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run_from(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the tool from a folder, with what else is installed here but not this checkout."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-P", "-m", "vllm_eagle3_patch", *arguments]
    if sys.version_info < (3, 11):
        command.remove("-P")
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )


def test_wheel_from_the_sdist_holds_patches_and_matrix_and_runs(
    built: Path, tmp_path: Path, site_packages: Path
) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    for module in (ROOT / "patches").glob("*.py"):
        assert f"vllm_eagle3_patch/patches/{module.name}" in names
    for release in matrix.names():
        assert f"vllm_eagle3_patch/patches/releases/{release}.toml" in names
    for page in (ROOT / "docs" / "man").glob("*.1"):
        assert [name for name in names if name.endswith(f".data/data/share/man/man1/{page.name}")]
    assert not [name for name in names if name.startswith(("patches/", "tests/", "tools/"))]
    installed = tmp_path / "installed"
    where = run_from(installed, "matrix", "--json")
    assert where.returncode == 0, where.stderr
    applied = run_from(installed, "apply", "--site-packages", str(site_packages))
    assert applied.returncode == 0, applied.stderr
    reverted = run_from(installed, "revert", "--site-packages", str(site_packages))
    assert reverted.returncode == 0, reverted.stderr


def test_sdist_holds_the_licence_and_the_changelog(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "setup.cfg", "pyproject.toml"} <= names


def test_console_script_and_module_are_the_same_program() -> None:
    script = Path(sys.executable).with_name("vllm-eagle3-patch")
    module = [sys.executable, "-m", "vllm_eagle3_patch"]
    outputs = [
        subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
        for command in ([str(script)], module)
    ]
    assert outputs[0] == outputs[1]
