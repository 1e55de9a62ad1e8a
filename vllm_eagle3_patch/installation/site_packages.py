"""What Python would import as vLLM from a site-packages folder, read without starting Python."""

# As the import system, os.path passes over what may not be read; pathlib raises.
# ruff: noqa: PTH112, PTH113

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from vllm_eagle3_patch.ground.errors import VllmNotFoundError
from vllm_eagle3_patch.ground.text import one_line

PACKAGE = "vllm"


class Lookup(NamedTuple):
    """What ``import vllm`` would find.

    Attributes:
        package: The package folder that would be imported.
        remnants: Folders of that name without ``__init__.py`` that would be imported instead.
        others: Package folders that lose.
        path: The folders that are searched.
    """

    package: Path | None
    remnants: tuple[Path, ...]
    others: tuple[Path, ...]
    path: tuple[Path, ...]


def absolute(path: Path) -> Path:
    """The path as the user wrote it, from the root on: symbolic links are kept."""
    return Path(os.path.abspath(path))  # noqa: PTH100  resolve() follows links


@contextmanager
def unreadable_is_not_found() -> Iterator[None]:
    """Turn what the system refuses into our error.

    Raises:
        VllmNotFoundError: A file or folder could not be read.
    """
    try:
        yield
    except OSError as error:
        raise VllmNotFoundError(
            f"cannot read {one_line(error.filename)}: {error.strerror}",
            "run this as the user that runs the server",
        ) from error


def look_in(folder: Path) -> Lookup:
    """Find vLLM as Python would with this folder as its site-packages.

    Follows its ``.pth`` files and the import hooks of editable installations; those are read,
    never run.

    Raises:
        OSError: The folder cannot be read.
        VllmNotFoundError: An import hook in it cannot be understood.
    """
    lines = list(_pth_lines(folder))
    path = tuple(dict.fromkeys([folder, *_added_folders(folder, lines)]))
    candidates = [entry / PACKAGE for entry in path]
    importable = [package for package in candidates if is_package(package)]
    remnants = [package for package in candidates if os.path.isdir(package)]
    hooked = [package for package in _hooked_packages(folder, lines) if is_package(package)]
    if not importable and remnants:
        # Python asks the path before the hooks, and takes such a folder for a namespace package.
        return Lookup(None, tuple(remnants), tuple(hooked), path)
    found = unique([*importable, *hooked])
    return Lookup(found[0] if found else None, (), tuple(found[1:]), path)


def is_package(folder: Path) -> bool:
    """Whether Python would import it as a package with sources, not as a bare folder."""
    return os.path.isfile(folder / "__init__.py")


def unique(folders: Iterable[Path]) -> list[Path]:
    """The folders without those that are another name of an earlier one, as lib64 is of lib."""
    by_real_path: dict[str, Path] = {}
    for folder in folders:
        by_real_path.setdefault(os.path.realpath(folder), folder)
    return list(by_real_path.values())


def _pth_lines(folder: Path) -> Iterator[str]:
    for file in sorted(folder.iterdir()):
        # Python passes over what is no file, and would wait for a pipe.
        if file.suffix == ".pth" and not file.name.startswith(".") and os.path.isfile(file):
            for line in file.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines():
                yield os.fsdecode(line.rstrip())


def _added_folders(folder: Path, lines: Iterable[str]) -> Iterator[Path]:
    for line in lines:
        if line and not line.startswith(("#", "import ", "import\t")):
            added = Path(os.path.normpath(folder / line))
            if os.path.isdir(added):
                yield added


def _hooked_packages(folder: Path, lines: Iterable[str]) -> Iterator[Path]:
    for line in lines:
        if line.startswith(("import ", "import\t")):
            for name in dict.fromkeys(re.findall(r"__editable___\w+_finder", line)):
                hook = folder / f"{name}.py"
                if os.path.isfile(hook):
                    yield from _mapped_package(hook)


def _mapped_package(hook: Path) -> Iterator[Path]:
    import ast

    source = hook.read_bytes()
    if PACKAGE.encode() not in source:
        return
    try:
        for node in ast.parse(source).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "MAPPING" for target in targets):
                mapping = ast.literal_eval(node.value)
                if PACKAGE in mapping:
                    yield Path(mapping[PACKAGE])
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise VllmNotFoundError(
            f"cannot read the editable installation in {one_line(hook)}: {one_line(error)}",
            "install the checkout again, or name the checkout itself with --site-packages",
        ) from error
