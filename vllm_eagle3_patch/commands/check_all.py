"""Every vLLM on this host: where environments usually lie, read without starting a Python."""

# As in site_packages, what may not be read is passed over or told, and pathlib raises.
# ruff: noqa: PTH110, PTH112, PTH113, PTH114

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm_eagle3_patch.assess.assessment import Problem
from vllm_eagle3_patch.commands.check import check_installation
from vllm_eagle3_patch.commands.report import Everywhere, Report
from vllm_eagle3_patch.ground.errors import PatchError, VllmNotFoundError
from vllm_eagle3_patch.ground.text import one_line
from vllm_eagle3_patch.installation.find import ACTIVE, find
from vllm_eagle3_patch.installation.site_packages import PACKAGE, absolute, is_package, look_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from vllm_eagle3_patch.assess.decision import Options

_DEPTH = 4
"""How far below a folder that the user names environments are looked for."""

_HOMES = (
    ("WORKON_HOME", ".virtualenvs/*"),
    ("PIPX_HOME", ".local/share/pipx/venvs/*"),
    ("PIPX_HOME", ".local/pipx/venvs/*"),
    ("UV_TOOL_DIR", ".local/share/uv/tools/*"),
    ("PYENV_ROOT", ".pyenv/versions/*"),
)
_BELOW_VARIABLE = {"PIPX_HOME": "venvs/*", "PYENV_ROOT": "versions/*"}
_VENVS = ("*", "*/.venv", "*/venv", "venvs/*", ".venvs/*")
"""Below the home. ``*`` matches hidden folders too: ``~/.venv`` itself, and ``~/.local/venv``."""
_CONDA_ROOTS = ("miniconda3", "miniforge3", "mambaforge", "anaconda3", "micromamba")
_PACKAGES = ("lib/python3*/*-packages", "lib64/python3*/*-packages")
_SYSTEM = (
    "usr/lib/python3*/dist-packages",
    "usr/local/lib/python3*/dist-packages",
    "usr/lib*/python3*/site-packages",
    "usr/local/lib*/python3*/site-packages",
)


class Place(NamedTuple):
    """A folder that may hold packages, with its environment's interpreter, and what led there."""

    folder: Path
    python: Path | None
    found_by: str


def check_all(
    options: Options, search: Sequence[Path] = (), environ: Mapping[str, str] | None = None
) -> Everywhere:
    """Check every installation that is found. Never writes, never starts an interpreter.

    Environments are looked for below the folders of ``search`` too.
    """
    reports = []
    seen: set[str] = set()
    for place in places(os.environ if environ is None else environ, search):
        folder = os.path.realpath(place.folder)
        if folder not in seen:
            seen.add(folder)
            report = _checked(place, options, seen)
            if report is not None:
                reports.append(report)
    return Everywhere(tuple(reports))


def _checked(place: Place, options: Options, seen: set[str]) -> Report | None:
    """What ``check`` says of one folder; None if it holds no vLLM, or one that was seen."""
    installation = None
    try:
        try:
            lookup = look_in(place.folder)
        except OSError as error:
            raise VllmNotFoundError(
                f"cannot read {one_line(place.folder)}: {error.strerror}",
                "run this as a user who may",
                code="unreadable",
            ) from error
        if lookup.package is None and not lookup.remnants:
            return None
        package = f"{os.path.realpath(lookup.package or lookup.remnants[0])}{os.sep}"
        if package in seen:
            return None
        seen.add(package)
        python = None if place.python is None else os.fspath(place.python)
        found = find(site_packages=place.folder)
        installation = replace(found, python=python, chosen_by=place.found_by)
        return check_installation(installation, options)
    except PatchError as error:
        problem = Problem.of(error)
        return Report("check", error.exit_code, None, installation, problems=(problem,))


def places(environ: Mapping[str, str], search: Sequence[Path] = ()) -> Iterator[Place]:
    """Where packages may lie, most likely first; some are the same by another name."""
    for prefix, found_by in _prefixes(environ, search):
        pythons = (prefix / "bin/python", prefix / "bin/python3")
        python = next((p for p in pythons if os.path.exists(p)), None)
        for pattern in _PACKAGES:
            for folder in _glob(prefix, pattern):
                yield Place(folder, python, found_by)
    for named in search:
        for folder in _below(absolute(named), _DEPTH):
            if is_package(folder / PACKAGE):
                yield Place(folder, None, f"--search {one_line(named)}")
    for pattern in _SYSTEM:
        for folder in _glob(Path("/"), pattern):
            yield Place(folder, None, "the system's packages")
    for folder in _glob(_home(environ), ".local/lib/python3*/site-packages"):
        yield Place(folder, None, "the user's packages")
    for entry in environ.get("PYTHONPATH", "").split(os.pathsep):
        if entry and os.path.isdir(entry):
            yield Place(Path(entry), None, "PYTHONPATH")
    from vllm_eagle3_patch.ground.processes import roots_in_use

    for root, python in roots_in_use().items():
        yield Place(root, python, "a running process")


def _prefixes(environ: Mapping[str, str], search: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    for variable in ACTIVE:
        if environ.get(variable):
            yield Path(environ[variable]), variable
    yield Path(sys.prefix), "this interpreter"
    yield from _on_path(environ)
    home = _home(environ)
    for variable, usual in _HOMES:
        folder, pattern = home, usual
        if environ.get(variable):
            folder, pattern = Path(environ[variable]), _BELOW_VARIABLE.get(variable, "*")
        for prefix in _glob(folder, pattern):
            yield prefix, os.fspath(folder / pattern)
    for prefix in _of_conda(environ, home):
        yield prefix, "conda"
    with suppress(OSError):  # The current directory may be gone.
        yield absolute(Path(".venv")), "the current directory's .venv"
    yield from _environments_at(home, _VENVS, "~")
    yield from _environments_at(Path("/opt"), ("*", "*/*"), "/opt")
    for folder in search:
        for prefix in _below(absolute(folder), _DEPTH):
            if _is_environment(prefix):
                yield prefix, f"--search {one_line(folder)}"


def _environments_at(
    folder: Path, patterns: Iterable[str], name: str
) -> Iterator[tuple[Path, str]]:
    for pattern in patterns:
        for prefix in _glob(folder, pattern):
            if _is_environment(prefix):
                yield prefix, f"{name}/{pattern}"


def _on_path(environ: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """The environments of each ``vllm`` and ``python3*`` on PATH; links may lead elsewhere."""
    from vllm_eagle3_patch.installation.interpreter import interpreter_of_program

    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        for program in _glob(Path(folder or "."), "vllm"):
            with suppress(VllmNotFoundError):
                python = interpreter_of_program(program, environ)
                yield python.parent.parent, "vllm on PATH"
        for python in _glob(Path(folder or "."), "python3*"):
            for found in dict.fromkeys((python, Path(os.path.realpath(python)))):
                yield found.parent.parent, "python3 on PATH"


def _of_conda(environ: Mapping[str, str], home: Path) -> Iterator[Path]:
    listed = home / ".conda/environments.txt"
    with suppress(OSError):
        # A pipe would never end, and a device neither.
        for line in listed.read_bytes().splitlines() if os.path.isfile(listed) else ():
            if line.strip():
                yield Path(os.fsdecode(line.strip()))
    roots = [*(home / name for name in _CONDA_ROOTS), Path("/opt/conda")]
    if environ.get("CONDA_EXE"):
        roots.insert(0, Path(environ["CONDA_EXE"]).parent.parent)
    for root in roots:
        if _is_environment(root):
            yield root
        yield from _glob(root, "envs/*")


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """A folder and those in it, but not those in an environment or a package folder's parent."""
    yield folder
    if depth and not _is_environment(folder) and not is_package(folder / PACKAGE):
        for inner in _glob(folder, "*"):
            if os.path.isdir(inner) and not os.path.islink(inner):
                yield from _below(inner, depth - 1)


def _is_environment(prefix: Path) -> bool:
    return os.path.isfile(prefix / "pyvenv.cfg") or os.path.isdir(prefix / "conda-meta")


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HOME") or "/nonexistent")


def _glob(folder: Path, pattern: str) -> Iterable[Path]:
    """What matches, hidden folders included; nothing where it may not be read."""
    with suppress(OSError):
        return sorted(folder.glob(pattern))
    return ()
