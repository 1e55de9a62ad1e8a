"""Fetches the Python files of a published vLLM release without downloading its wheel.

A wheel is a zip file of some 400 MB, nearly all of it compiled code. Its table of contents and the
members that are wanted are read through HTTP Range requests: a few MB, about a second. Every file
is checked against the wheel's own RECORD, and RECORD against the sha256 that the project pins.
"""

import argparse
import base64
import csv
import errno
import functools
import hashlib
import io
import os
import shutil
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeVar
from uuid import uuid4

import requests
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pypi_simple import (
    DistributionPackage,
    NoSuchProjectError,
    PyPISimple,
    UnsupportedContentTypeError,
)

from vllm_eagle3_patch.ground.errors import PatchError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = "vllm"
OLDEST = Version("0.8.5")
PLATFORM = "x86_64"
MARKER = ".record-sha256"
BLOCK_SIZE = 1 << 20
RETRY_DELAYS = (0.5, 1.0, 2.0)
TRANSIENT_STATUS = (408, 429, 500, 502, 503, 504)
TIMEOUT = (10.0, 60.0)
FETCH_AGAIN = "fetch it again; if it stays so, the index does not serve what was published"
PINS = Path(__file__).resolve().parent.parent / "patches" / "releases"

_Result = TypeVar("_Result")


class FetchError(PatchError):
    """A release could not be fetched; reads as one line that says what to do, too."""

    default_code = "fetch"

    def __str__(self) -> str:
        return f"{self.message}: {self.hint}"


class IndexUnreachableError(FetchError):
    """The package index did not answer, or not with what was asked for."""


class UnknownReleaseError(FetchError):
    """The index has no x86-64 Linux wheel of this version."""


class RecordMismatchError(FetchError):
    """A file is not what RECORD says, or RECORD is not the one that is pinned."""


class RemoteFile(io.RawIOBase):
    """A file on a web server, read in blocks that are kept.

    Args:
        url: Where it is.
        size: Its length in bytes.
        session: What sends the requests.

    Raises:
        IndexUnreachableError: On reading, when a block could not be had.
    """

    def __init__(self, url: str, size: int, session: requests.Session) -> None:
        super().__init__()
        self.url = url
        self.size = size
        self.session = session
        self.position = 0
        self.blocks: dict[int, bytes] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, "seek before the start of the file")
        self.position = start + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            size = self.size
        end = min(self.position + size, self.size)
        parts = []
        while self.position < end:
            number, start = divmod(self.position, BLOCK_SIZE)
            part = self._block(number)[start : start + end - self.position]
            parts.append(part)
            self.position += len(part)
        return b"".join(parts)

    def _block(self, number: int) -> bytes:
        if number not in self.blocks:
            self.blocks[number] = _with_retries(
                "read a part of the wheel", lambda: self._get(number)
            )
        return self.blocks[number]

    def _get(self, number: int) -> bytes:
        first = number * BLOCK_SIZE
        last = min(first + BLOCK_SIZE, self.size) - 1
        headers = {"Range": f"bytes={first}-{last}", "Accept-Encoding": "identity"}
        # Streaming, so that a server that ignores Range does not send the whole wheel first.
        with self.session.get(self.url, headers=headers, timeout=TIMEOUT, stream=True) as response:
            response.raise_for_status()
            if response.status_code != requests.codes.partial_content:
                raise IndexUnreachableError(
                    "the package index sends whole files only, no parts of them",
                    "use an index or a proxy that supports HTTP Range requests",
                )
            content = response.content
        if len(content) != last - first + 1:
            raise requests.ConnectionError(f"got {len(content)} bytes of {last - first + 1}")
        return content


def releases() -> tuple[str, ...]:
    """Returns the releases from 0.8.5 on that have an x86-64 wheel, oldest first.

    Pre-releases are left out, and a second build of a release is not a release of its own.

    Raises:
        IndexUnreachableError: The index could not be read.
    """
    versions = sorted(map(Version, _wheels()))
    return tuple(str(it) for it in versions if it >= OLDEST and not it.is_prerelease)


def fetch(version: str, *, cache: Path | None = None) -> Path:
    """Returns a folder shaped like a site-packages with a release's Python files.

    It holds `vllm/**/*.py` and `vllm-<version>.dist-info/**`. What is in the cache is returned as
    it is: do not write there (see `copy_site_packages`).

    Args:
        version: As on the index, such as "0.17.1". Of several builds the first is taken, so that
            what a version means does not change.
        cache: The folder that holds one folder a version; by default in the user's cache.

    Raises:
        IndexUnreachableError: It is not in the cache and the index could not be read.
        UnknownReleaseError: The index has no such release.
        RecordMismatchError: A file or the whole release is not what it should be.
    """
    folder = (default_cache() if cache is None else cache) / version
    if not (folder / MARKER).is_file():
        _fill(folder, version)
    _check_pin(version, record_sha256(folder))
    return folder


def record_sha256(folder: Path) -> str:
    """Returns the sha256 of the RECORD of a fetched release."""
    return (folder / MARKER).read_text(encoding="ascii").strip()


def copy_site_packages(version: str, destination: Path, *, cache: Path | None = None) -> Path:
    """Copies a release into a folder, to be changed at will, and returns that folder.

    Args:
        version: As for `fetch`.
        destination: The folder to become a site-packages; must not hold a vLLM already.
        cache: As for `fetch`.

    Raises:
        FileExistsError: The destination holds a vLLM.
        FetchError: As `fetch`.
    """
    if (destination / PROJECT).exists():
        raise FileExistsError(f"{destination} holds a vLLM already")
    folder = fetch(version, cache=cache)
    shutil.copytree(folder, destination, ignore=shutil.ignore_patterns(MARKER), dirs_exist_ok=True)
    installer = destination / _dist_info(version) / "INSTALLER"
    if not installer.exists():
        installer.write_bytes(b"pip\n")
    return destination


def default_cache() -> Path:
    """Returns the folder in the user's cache that holds the releases."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vllm-eagle3-patch" / "releases"


def _dist_info(version: str) -> str:
    return f"{PROJECT}-{version}.dist-info"


def _index(session: requests.Session) -> PyPISimple:
    return PyPISimple(session=session)


@functools.cache
def _wheels() -> dict[str, DistributionPackage]:
    """Returns the first build of each version's x86-64 Linux wheel."""
    what = "read the list of releases"
    try:
        with requests.Session() as session, _index(session) as index:
            page = _with_retries(what, lambda: index.get_project_page(PROJECT, timeout=TIMEOUT))
    except (NoSuchProjectError, UnsupportedContentTypeError) as error:
        raise _unreachable(what, error) from error
    builds = []
    for package in page.packages:
        try:
            _, version, build, tags = parse_wheel_filename(package.filename)
        except (InvalidWheelFilename, InvalidVersion):
            continue  # a source archive, or a name that no installer would accept
        if any("linux" in tag.platform and PLATFORM in tag.platform for tag in tags):
            builds.append((build, str(version), package))
    builds.sort(key=lambda it: it[0], reverse=True)
    return {version: package for _, version, package in builds}


def _with_retries(what: str, get: Callable[[], _Result]) -> _Result:
    """Calls a function that uses the network; what may pass is tried again after a pause."""
    delays = iter(RETRY_DELAYS)
    while True:
        try:
            return get()
        except requests.RequestException as error:
            delay = next(delays, None) if _may_pass(error) else None
            if delay is None:
                raise _unreachable(what, error) from error
        time.sleep(delay)


def _may_pass(error: requests.RequestException) -> bool:
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return error.response.status_code in TRANSIENT_STATUS
    return not isinstance(error, requests.exceptions.SSLError)


def _unreachable(what: str, error: Exception) -> IndexUnreachableError:
    reason = type(error).__name__
    if isinstance(error, requests.HTTPError) and error.response is not None:
        reason = f"HTTP status {error.response.status_code}"
    return IndexUnreachableError(
        f"could not {what} from the package index ({reason})",
        "check the network, HTTPS_PROXY and REQUESTS_CA_BUNDLE, then try again",
    )


def _fill(folder: Path, version: str) -> None:
    """Extracts a release beside the folder and renames it into place when it is complete."""
    package = _wheels().get(version)
    if package is None:
        raise UnknownReleaseError(
            f"the package index has no x86-64 Linux wheel of vLLM {version}",
            "python -m tools.fetch_release lists the releases that it has",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{version}-{uuid4().hex}")
    try:
        with requests.Session() as session:
            wheel = RemoteFile(package.url, _size(package, session), session)
            _extract(wheel, version, unfinished)
        _check_pin(version, record_sha256(unfinished))
        try:
            unfinished.rename(folder)
        except OSError as error:
            # Another process may have been quicker.
            if not (folder / MARKER).is_file():
                raise FetchError(
                    f"something that is no fetched release is in the way: {folder}", "remove it"
                ) from error
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise RecordMismatchError(
            f"what the package index sent for vLLM {version} is no wheel with a RECORD", FETCH_AGAIN
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _size(package: DistributionPackage, session: requests.Session) -> int:
    if package.size is not None:
        return package.size

    def content_length() -> int:
        headers = {"Accept-Encoding": "identity"}
        with session.head(
            package.url, headers=headers, allow_redirects=True, timeout=TIMEOUT
        ) as response:
            response.raise_for_status()
            return int(response.headers["Content-Length"])

    return _with_retries("read the size of the wheel", content_length)


def _extract(wheel: RemoteFile, version: str, destination: Path) -> None:
    """Writes the wanted members of a wheel, each as RECORD lists it, and the marker."""
    dist_info = _dist_info(version)
    record_name = f"{dist_info}/RECORD"
    with zipfile.ZipFile(wheel) as archive:
        record = archive.read(record_name)
        rows = csv.reader(io.StringIO(record.decode("utf-8"), newline=""))
        listed = {row[0]: row[1] for row in rows}
        # In the order of the file, so that each block is asked for once and in turn.
        for member in sorted(archive.infolist(), key=lambda member: member.header_offset):
            path = PurePosixPath(member.filename)
            if member.is_dir() or not _is_wanted(path, dist_info):
                continue
            content = archive.read(member)
            if member.filename != record_name and listed.get(member.filename) != _digest(content):
                raise RecordMismatchError(
                    f"{member.filename} of vLLM {version} is not as its RECORD lists it",
                    FETCH_AGAIN,
                )
            target = destination / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    (destination / MARKER).write_text(hashlib.sha256(record).hexdigest() + "\n", encoding="ascii")


def _is_wanted(path: PurePosixPath, dist_info: str) -> bool:
    if ".." in path.parts:
        return False
    return path.parts[0] == dist_info or (path.parts[0] == PROJECT and path.suffix == ".py")


def _digest(content: bytes) -> str:
    """Returns a file's hash as RECORD writes it."""
    encoded = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return "sha256=" + encoded.decode("ascii").rstrip("=")


def _check_pin(version: str, found: str) -> None:
    """Compares a RECORD with the one that the project's matrix pins, where it pins one."""
    path = PINS / f"{version}.toml"
    if not path.is_file():
        return
    pinned = tomllib.loads(path.read_text(encoding="utf-8")).get("record_sha256")
    if pinned is not None and pinned != found:
        raise RecordMismatchError(
            f"the RECORD of vLLM {version} has sha256 {found}, but {path} pins {pinned}",
            f"remove {version} from the cache and fetch again, or correct the pin",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.fetch_release",
        description="Fetches a release's Python files and prints the folder that holds them.",
    )
    parser.add_argument("version", nargs="?", help="such as 0.17.1; without it, list the releases")
    parser.add_argument("--into", type=Path, metavar="DIR", help="copy it there, writable")
    options = parser.parse_args(arguments)
    try:
        if options.version is None:
            print("\n".join(releases()))
        elif options.into is None:
            print(fetch(options.version))
        else:
            print(copy_site_packages(options.version, options.into))
    except (FetchError, FileExistsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
