"""Compiled files of a source that was replaced: removed, for every interpreter.

Most would be found out of date by their own header, but unchecked ones are used whatever the
source holds.
"""

import errno
import importlib.util
import os
import re
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from vllm_eagle3_patch.ground import filesystem
from vllm_eagle3_patch.ground.folder import GONE, Folder, Snapshot, parent_of, passing_over

_UNCHECKED = 0b01
_HEADER = 16
_UNREADABLE = GONE | {errno.EACCES, errno.EPERM}


def remove_bytecode(root: Folder, path: str) -> None:
    """Remove the compiled files of a source, also below ``PYTHONPYCACHEPREFIX`` if that is set.

    One that may not be removed stays if an interpreter compares it with its source.

    Raises:
        OSError: One that would be used unchecked may not be removed.
    """
    for folder, cached in _compiled(root, path):
        try:
            filesystem.remove(folder, cached)
        except PermissionError:
            if _is_used_unchecked(folder.snapshot(cached).data):
                raise


def outdated_unchecked(root: Path, path: str) -> tuple[Path, ...]:
    """Compiled files that an interpreter uses in place of a source that they were not made from.

    Of an interpreter of another version than this one's, those that are older than the source.
    What this user may not read is passed over. Nothing is written.
    """
    found = []
    with passing_over(_UNREADABLE), Folder.at(root) as folder:
        with parent_of(folder, path) as (parent, name):
            source = parent.snapshot(name, follow=True)
        for place, cached in _compiled(folder, path):
            compiled = place.snapshot(cached)
            if _is_used_unchecked(compiled.data) and not _is_made_from(source, compiled):
                found.append(place.path / cached)
    return tuple(found)


def _is_made_from(source: Snapshot, compiled: Snapshot) -> bool:
    if compiled.data.startswith(importlib.util.MAGIC_NUMBER):
        return compiled.data[8:_HEADER] == importlib.util.source_hash(source.data)
    return compiled.status.st_mtime_ns >= source.status.st_mtime_ns


def _compiled(root: Folder, path: str) -> Iterator[tuple[Folder, str]]:
    parent, _, name = path.rpartition("/")
    compiled = re.compile(re.escape(name.removesuffix(".py")) + r"\.[^.]+(\.opt-[^.]+)?\.pyc")
    for folder in _caches(root, parent):
        with folder:
            for cached in filter(compiled.fullmatch, folder.names()):
                # A folder is nothing that Python has written, and nothing that it reads.
                if not _is_folder(folder, cached):
                    yield folder, cached


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


def _is_used_unchecked(compiled: bytes) -> bool:
    return int.from_bytes(compiled[4:8], "little") == _UNCHECKED
