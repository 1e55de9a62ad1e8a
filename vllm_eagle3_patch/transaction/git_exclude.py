"""Keep our state folder out of ``git status`` where the installation is a checkout.

A block of two lines is added to the ``info/exclude`` that git reads for it, and exactly that
block is taken out again.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_eagle3_patch.ground import filesystem
from vllm_eagle3_patch.ground.folder import GONE, Attributes, Folder, passing_over
from vllm_eagle3_patch.transaction.state.layout import FOLDER

BLOCK = f"\n# vllm-eagle3-patch keeps the original files there\n/{FOLDER}*/\n".encode()
_STAGED = "exclude.vllm-eagle3-patch"


def add_exclude(root: Folder) -> None:
    """List our folders as excluded, if the root is that of a git working tree."""
    with _info_folder(root) as info:
        if info is not None and _may_be_written(info):
            data = _content(info)
            if data is None or BLOCK not in data:
                _write(info, (data or b"") + BLOCK)
                filesystem.sync_directory(info)


def remove_exclude(root: Folder) -> None:
    """Take out what ``add_exclude`` added; a file left empty by that is removed."""
    with _info_folder(root) as info:
        if info is not None and _may_be_written(info):
            filesystem.remove(info, _STAGED)
            data = _content(info)
            if data is not None and BLOCK in data:
                rest = data.replace(BLOCK, b"", 1)
                if rest:
                    _write(info, rest)
                else:
                    filesystem.remove(info, "exclude")
            # Also where a run that was interrupted had taken it out already.
            filesystem.sync_directory(info)


def _may_be_written(info: Folder) -> bool:
    """Whether ``exclude`` is a file or not there: no link leads us, and no pipe stops us."""
    status = info.status("exclude")
    return status is None or stat.S_ISREG(status.st_mode)


def _content(info: Folder) -> bytes | None:
    return None if info.status("exclude") is None else info.snapshot("exclude").data


def _write(info: Folder, data: bytes) -> None:
    there = info.status("exclude")
    attributes = info.snapshot("exclude").attributes if there else Attributes(0o644)
    filesystem.remove(info, _STAGED)
    filesystem.write_new_file(info, _STAGED, data, Attributes(attributes.mode, attributes.owner))
    filesystem.replace(info, _STAGED, info, "exclude")


@contextmanager
def _info_folder(root: Folder) -> Iterator[Folder | None]:
    """Open the folder that holds git's ``exclude``, None if there is no such folder.

    What is said in a ``.git`` file is followed only to a git directory of the checkout's own
    owner: nobody is to lead root elsewhere.
    """
    place = _git_directory(root)
    owner = os.fstat(root.descriptor).st_uid
    folder = None
    with passing_over(GONE):
        folder = None if place is None else Folder.at(place)
    if folder is None:
        yield None
        return
    with folder:
        info = folder.status("info")
        ours = os.fstat(folder.descriptor).st_uid == owner and folder.status("HEAD") is not None
        if ours and info is not None and stat.S_ISDIR(info.st_mode):
            with folder.below("info") as opened:
                yield opened
        else:
            yield None


def _git_directory(root: Folder) -> Path | None:
    """The directory that working trees of one repository share."""
    status = root.status(".git")
    if status is None or stat.S_ISLNK(status.st_mode):
        return None
    if stat.S_ISDIR(status.st_mode):
        return root.path / ".git"
    text = _path_in(root, ".git") or ""
    if not text.startswith("gitdir:"):
        return None
    directory = root.path / text.removeprefix("gitdir:").strip()
    with passing_over(GONE), Folder.at(directory) as folder:
        common = _path_in(folder, "commondir")
        return directory if common is None else directory / common
    return None


def _path_in(folder: Folder, name: str) -> str | None:
    """The path that a file of git's holds, None if there is none."""
    with passing_over(GONE):
        text = os.fsdecode(folder.snapshot(name, limit=2**16).data).strip()
        return None if "\0" in text else text
    return None
