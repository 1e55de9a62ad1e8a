"""Which vLLM is meant, and what its metadata says of it. vLLM itself is never imported."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from vllm_eagle3_patch.ground.errors import (
    BrokenVllmError,
    NotReadableError,
    PatchError,
    VllmNotFoundError,
    VllmRemovedError,
)
from vllm_eagle3_patch.ground.text import one_line, shell_word
from vllm_eagle3_patch.installation.distribution import distribution_of, read_record
from vllm_eagle3_patch.installation.site_packages import (
    PACKAGE,
    Lookup,
    absolute,
    is_package,
    look_in,
    unreadable_is_not_found,
)

_CHOOSE = "name the one to act on with --python PATH or --site-packages DIR"
ACTIVE = ("VIRTUAL_ENV", "CONDA_PREFIX")
"""The variables that name an active environment."""


@dataclass(frozen=True)
class Installation:
    """A vLLM that was found.

    Attributes:
        root: The folder that holds the package folder: site-packages, dist-packages, a checkout.
        version: By the metadata or the package's own version file, if any.
        distribution: The name of the distribution that provides the package.
        python: The interpreter, as the user would call it; None where none was started.
        installer: The program that installed it, such as ``uv``.
        editable: Whether the package is a checkout that Python imports in place.
        chosen_by: What led here, such as ``--python`` or ``VIRTUAL_ENV``.
        shadowed: Other package folders on the same path, which are not imported.
        skipped: Candidates that were passed over, each ``candidate: why``.
        dist_info: The folder of the distribution's metadata.
    """

    root: Path
    version: str | None
    distribution: str | None
    python: str | None
    installer: str | None
    editable: bool
    chosen_by: str
    shadowed: tuple[Path, ...]
    skipped: tuple[str, ...]
    dist_info: Path | None

    @property
    def package(self) -> Path:
        """The package folder."""
        return self.root / PACKAGE

    def document(self) -> dict[str, Any]:
        """As the JSON of a report has it."""
        return {
            "version": self.version,
            "distribution": self.distribution,
            "location": str(self.package),
            "python": self.python,
            "installer": self.installer,
            "editable": self.editable,
            "chosen_by": self.chosen_by,
            "skipped": list(self.skipped),
            "shadowed": [str(package) for package in self.shadowed],
        }

    @cached_property
    def record(self) -> Mapping[str, str]:
        """The sha256 of each file as it was installed, by its path from ``root``.

        Empty for a checkout, and where the installer wrote no RECORD.

        Raises:
            NotReadableError: RECORD cannot be read.
            VllmNotFoundError: RECORD is broken.
        """
        if self.editable or self.dist_info is None:
            return MappingProxyType({})
        try:
            if not (self.dist_info / "RECORD").is_file():
                return MappingProxyType({})
            return MappingProxyType(read_record(self.dist_info, self.root))
        except (OSError, ValueError) as error:
            raise _broken_metadata(self.root, error) from error


class Where(NamedTuple):
    """Which vLLM, as the user named it."""

    site_packages: Path | None = None
    python: Path | None = None

    def find(self, *, writing: bool = False) -> Installation:
        """As the function ``find`` does."""
        return find(site_packages=self.site_packages, python=self.python, writing=writing)


def find(
    *,
    site_packages: Path | None = None,
    python: Path | None = None,
    writing: bool = False,
    environ: Mapping[str, str] | None = None,
    timeout: float = 20.0,
) -> Installation:
    """Find the vLLM that a command acts on.

    Args:
        site_packages: The folder to look in; then no interpreter is started.
        python: The interpreter to ask, or a venv's folder.
        writing: For a command that writes: an active environment without vLLM is not passed over.
        environ: The environment variables that the server would have; by default our own.
        timeout: Seconds to wait for an interpreter's answer.

    Raises:
        VllmNotFoundError: There is none, or the interpreter does not work.
        NotReadableError: There is one whose metadata this user cannot read.
    """
    if site_packages is not None:
        return _in_folder(absolute(site_packages))
    from vllm_eagle3_patch.installation.interpreter import interpreter_at

    environ = os.environ if environ is None else environ
    if python is not None:
        return _of_interpreter(interpreter_at(python, environ), "--python", environ, timeout)
    asked: set[Path] = set()
    skipped: list[str] = []
    for chosen_by, locate in _candidates(environ):
        try:
            interpreter = locate()
            if interpreter not in asked:
                asked.add(interpreter)
                found = _of_interpreter(interpreter, chosen_by, environ, timeout)
                return replace(found, skipped=tuple(skipped))
        except VllmNotFoundError as error:
            if writing and isinstance(error, VllmRemovedError):
                raise
            if writing and chosen_by in ACTIVE:
                raise VllmNotFoundError(f"{chosen_by}: {error.message}", _CHOOSE) from error
            skipped.append(f"{chosen_by}: {error.message}")
    raise VllmNotFoundError(f"no vLLM found ({'; '.join(skipped)})", _CHOOSE)


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Callable[[], Path]]]:
    from vllm_eagle3_patch.installation.interpreter import (
        interpreter_at,
        interpreter_of_program,
        program_on_path,
    )

    for variable in ACTIVE:
        if environ.get(variable):
            yield (
                variable,
                partial(interpreter_at, absolute(Path(environ[variable])), environ),
            )
    yield "this interpreter", partial(_this_interpreter, environ)
    yield "vllm on PATH", lambda: interpreter_of_program(program_on_path("vllm", environ), environ)
    yield "python3 on PATH", partial(program_on_path, "python3", _beside_this_tool(environ))


def _beside_this_tool(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The same environment with a PATH that leaves out the environment that only runs this tool.

    ``uvx`` and ``pipx run`` put that first.
    """
    if sys.prefix == sys.base_prefix:
        return environ
    own = os.path.realpath(Path(sys.prefix, "bin"))
    folders = environ.get("PATH", os.defpath).split(os.pathsep)
    others = [folder for folder in folders if os.path.realpath(folder) != own]
    return {**environ, "PATH": os.pathsep.join(others)}


def _this_interpreter(environ: Mapping[str, str]) -> Path:
    as_a_server = environ is os.environ and not (
        sys.flags.isolated or sys.flags.ignore_environment or sys.flags.no_user_site
    )
    # Without it on this path, a fresh process has none either: that saves starting one.
    if not sys.executable or (as_a_server and find_spec(PACKAGE) is None):
        raise VllmNotFoundError(f"{one_line(sys.executable)} has no package vllm", _CHOOSE)
    return Path(sys.executable)


@unreadable_is_not_found()
def _of_interpreter(
    python: Path, chosen_by: str, environ: Mapping[str, str], timeout: float
) -> Installation:
    from vllm_eagle3_patch.installation.interpreter import ask

    lookup = ask(python, environ, timeout)
    return _installation(lookup, chosen_by, os.fspath(python), f"{one_line(python)} has")


@unreadable_is_not_found()
def _in_folder(folder: Path) -> Installation:
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise VllmNotFoundError(f"{one_line(folder)} {what}", _CHOOSE)
    try:
        return _installation(look_in(folder), "--site-packages", None, f"{one_line(folder)} holds")
    except VllmNotFoundError as error:
        is_vllm = folder.name == PACKAGE and is_package(folder)
        nearby = folder.parent if is_vllm else _site_packages_below(folder)
        if nearby is None:
            raise
        raise VllmNotFoundError(
            error.message, f"name the folder that holds it: --site-packages {shell_word(nearby)}"
        ) from error


def _site_packages_below(folder: Path) -> Path | None:
    patterns = ("*-packages", "python3*/*-packages", "lib/python3*/*-packages")
    found = (path for pattern in patterns for path in sorted(folder.glob(pattern)))
    return next((path for path in found if is_package(path / PACKAGE)), None)


def _installation(lookup: Lookup, chosen_by: str, python: str | None, who: str) -> Installation:
    package = lookup.package
    if package is not None and package.is_symlink():
        # What is changed is where the link leads: no link is followed below the root.
        package = Path(os.path.realpath(package))
    for folder in (*lookup.remnants[:1], *([package] if package else [])):
        if _is_compiled_only(folder):
            raise VllmNotFoundError(
                f"{one_line(folder)} holds compiled files only, and what is patched are sources",
                "install a vLLM with its source files",
            )
    if package is None:
        raise _not_found(lookup, who)
    if package.name != PACKAGE or not is_package(package):
        raise VllmNotFoundError(
            f"{one_line(package)}, imported as vllm, is not a package folder of that name",
            "install vLLM so that its source files lie in a folder called vllm",
        )
    root = package.parent
    try:
        provider = distribution_of(root, lookup.path)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise _broken_metadata(root, error) from error
    is_checkout = any((root / name).is_file() for name in ("pyproject.toml", "setup.py"))
    return Installation(
        root=root,
        version=provider.version or _version_in_source(package),
        distribution=provider.name,
        python=python,
        installer=provider.installer,
        editable=provider.editable or (is_checkout and not provider.recorded),
        chosen_by=chosen_by,
        shadowed=lookup.others,
        skipped=(),
        dist_info=provider.info,
    )


def _not_found(lookup: Lookup, who: str) -> VllmNotFoundError:
    message, hint = f"{who} no package vllm", _CHOOSE
    if lookup.remnants:
        remnant = one_line(lookup.remnants[0])
        message = f"{remnant} holds no __init__.py: it is what is left of a vLLM"
        if lookup.others:
            message += f", and it hides {one_line(lookup.others[0])}"
        hint = "remove that folder, or install vLLM again"
    from vllm_eagle3_patch.transaction.state.layout import FOLDER

    for folder in (*(remnant.parent for remnant in lookup.remnants), *lookup.path):
        if (folder / FOLDER).is_dir():
            return VllmRemovedError(
                f"{message}; {one_line(folder / FOLDER)} is left of one that was patched",
                f"to remove what is left: vllm-eagle3-patch revert --site-packages "
                f"{shell_word(folder)}",
                folder,
            )
    return VllmNotFoundError(message, hint)


def _is_compiled_only(package: Path) -> bool:
    """Whether Python imports a package without its sources."""
    if is_package(package) or not package.is_dir():
        return False
    names = (entry.name for entry in package.iterdir())
    return any(re.fullmatch(r"__init__\.(.*\.)?(pyc|so)", name) for name in names)


def _version_in_source(package: Path) -> str | None:
    for name in ("_version.py", "version.py"):
        if (package / name).is_file():
            found = re.search(
                rb"""^(?:__version__|version)\b[^=\n]*=(?:\s*version\s*=)?\s*['"]([^'"\n]+)['"]""",
                (package / name).read_bytes(),
                re.MULTILINE,
            )
            if found:
                return one_line(found[1].decode(errors="replace"))
    return None


def _broken_metadata(root: Path, error: Exception) -> PatchError:
    if isinstance(error, OSError):
        return NotReadableError(
            f"cannot read {one_line(error.filename or root)}: {error.strerror or error}",
            "run this as the user who installed vLLM, or make that readable",
        )
    return BrokenVllmError(
        f"cannot read what the metadata in {one_line(root)} says of vLLM: {one_line(error)}",
        "install vLLM again; if it was patched, revert works all the same",
        root,
    )
