"""Compiled files of a source that was replaced: removed, for every interpreter.

Most would be found out of date by their own header, but unchecked ones are used whatever the
source holds.
"""

import os
import re
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from vllm_eagle3_patch import filesystem
from vllm_eagle3_patch.folder import Folder

_UNCHECKED = 0b01


def remove_bytecode(root: Folder, path: str) -> None:
    """Remove the compiled files of a source, also below ``PYTHONPYCACHEPREFIX`` if that is set.

    One that may not be removed stays if an interpreter compares it with its source.

    Args:
        root: The folder that holds the package.
        path: The source, relative to it.

    Raises:
        OSError: One that would be used unchecked may not be removed.
    """
    parent, _, name = path.rpartition("/")
    compiled = re.compile(re.escape(name.removesuffix(".py")) + r"\.[^.]+(\.opt-[^.]+)?\.pyc")
    for folder in _caches(root, parent):
        with folder:
            for cached in filter(compiled.fullmatch, folder.names()):
                if _is_folder(folder, cached):
                    continue  # Python cannot have written it, and does not read it.
                try:
                    filesystem.remove(folder, cached)
                except PermissionError:
                    if _is_used_unchecked(folder, cached):
                        raise


def _caches(root: Folder, parent: str) -> Iterator[Folder]:
    openings = [partial(root.below, f"{parent}/__pycache__")]
    prefix = os.environ.get("PYTHONPYCACHEPREFIX")
    if prefix:
        source = root.path.absolute() / parent
        places = sorted({source, Path(os.path.realpath(source))})
        openings += [partial(Folder.at, Path(prefix, *place.parts[1:])) for place in places]
    for opening in openings:
        try:
            folder = opening()
        except (FileNotFoundError, NotADirectoryError):
            continue  # No interpreter that we know of keeps anything there.
        yield folder


def _is_folder(folder: Folder, name: str) -> bool:
    status = folder.status(name)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _is_used_unchecked(folder: Folder, name: str) -> bool:
    flags = folder.snapshot(name).data[4:8]
    return int.from_bytes(flags, "little") == _UNCHECKED
