"""Fetching a release: from a small index of our own on this machine, and once from the real one."""

import base64
import hashlib
import io
import json
import os
import random
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests
from pypi_simple import PyPISimple

from tools import fetch_release
from tools.fetch_release import (
    MARKER,
    FetchError,
    IndexUnreachableError,
    RecordMismatchError,
    UnknownReleaseError,
    copy_site_packages,
    fetch,
    record_sha256,
    releases,
)

COMPILED = random.Random(0).randbytes(200_000)


def wheel(
    version: str, build: str = "first", record: dict[str, bytes] | None = None
) -> dict[str, bytes]:
    """Returns a wheel's file name and bytes.

    Args:
        version: Its version.
        build: What its WHEEL file says, to tell builds apart.
        record: Contents that RECORD is made from where they differ from the files.
    """
    dist_info = f"vllm-{version}.dist-info"
    files = {
        "vllm/__init__.py": b"__version__ = '%s'\n" % version.encode(),
        "vllm/_C.abi3.so": COMPILED,
        "vllm/config/speculative.py": b"# the configuration\r\n",
        "vllm/py.typed": b"",
        "outside.py": b"",
        f"{dist_info}/METADATA": b"Name: vllm\n",
        f"{dist_info}/WHEEL": f"Build: {build}\n".encode(),
        f"{dist_info}/licenses/LICENSE": b"Apache-2.0\n",
    }
    rows = []
    for name, content in (files | (record or {})).items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(content)}\n")
    rows.append(f"{dist_info}/RECORD,,\n")
    files[f"{dist_info}/RECORD"] = "".join(rows).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return {f"vllm-{version}-cp38-abi3-manylinux_2_31_x86_64.whl": buffer.getvalue()}


class Index(ThreadingHTTPServer):
    """A package index on this machine that can be told to misbehave."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.bytes_sent = 0
        self.statuses: list[int] = []
        self.cut_short = 0
        self.tells_sizes = True
        self.knows_ranges = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def page(self) -> bytes:
        files = []
        for name, content in self.files.items():
            size = {"size": len(content)} if self.tells_sizes else {}
            files.append({"filename": name, "url": f"/files/{name}", "hashes": {}, **size})
        version = "1.1" if self.tells_sizes else "1.0"
        document = {"meta": {"api-version": version}, "name": "vllm", "files": files}
        if self.tells_sizes:
            document["versions"] = []
        return json.dumps(document).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet an answer: two make the client wait for a delayed acknowledgement
    server: Index

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        index = self.server
        index.requests.append(f"{self.command} {self.path}")
        if index.statuses:
            self.answer(index.statuses.pop(0), b"")
        elif self.path == "/simple/vllm/":
            self.answer(200, index.page(), "application/vnd.pypi.simple.v1+json")
        elif (content := index.files.get(self.path.removeprefix("/files/"))) is None:
            self.answer(404, b"")
        elif index.knows_ranges and "Range" in self.headers:
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            self.answer(206, content[first : last + 1])
        else:
            self.answer(200, content)

    def answer(self, status: int, body: bytes, content_type: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.server.cut_short and status == 206:
            self.server.cut_short -= 1
            body = body[:-1]
            self.close_connection = True
        try:
            self.wfile.write(body)
            self.wfile.flush()
        except ConnectionError:
            self.close_connection = True  # the client has read as much as it wants
            return
        self.server.bytes_sent += len(body)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with Index() as server:
        server.files = wheel("0.17.1")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(
            fetch_release,
            "_index",
            lambda session: PyPISimple(f"{server.address}/simple/", session=session),
        )
        monkeypatch.setattr(fetch_release, "RETRY_DELAYS", (0.0, 0.0))
        monkeypatch.setattr(fetch_release, "BLOCK_SIZE", 1000)
        monkeypatch.setattr(fetch_release, "PINS", tmp_path / "no pins")
        fetch_release._wheels.cache_clear()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
    fetch_release._wheels.cache_clear()


def listing(folder: Path) -> list[str]:
    return sorted(str(it.relative_to(folder)) for it in folder.rglob("*") if it.is_file())


FETCHED = [
    MARKER,
    "vllm-0.17.1.dist-info/METADATA",
    "vllm-0.17.1.dist-info/RECORD",
    "vllm-0.17.1.dist-info/WHEEL",
    "vllm-0.17.1.dist-info/licenses/LICENSE",
    "vllm/__init__.py",
    "vllm/config/speculative.py",
]


def test_releases_are_in_order_and_without_pre_releases(index: Index) -> None:
    for version in ("0.10.0", "0.9.2", "0.8.5.post1", "0.8.5", "0.8.4", "0.18.0rc1"):
        index.files |= wheel(version)
    assert releases() == ("0.8.5", "0.8.5.post1", "0.9.2", "0.10.0", "0.17.1")


def test_second_builds_and_other_platforms_are_no_releases(index: Index) -> None:
    index.files["vllm-0.17.1-1-cp38-abi3-manylinux_2_31_x86_64.whl"] = b""
    index.files["vllm-0.17.2-cp38-abi3-manylinux_2_31_aarch64.whl"] = b""
    index.files["vllm-0.17.3-cp38-abi3-macosx_11_0_x86_64.whl"] = b""
    index.files["vllm-0.17.4.tar.gz"] = b""
    assert releases() == ("0.17.1",)


def test_fetch_gives_the_python_files_and_the_metadata(index: Index, tmp_path: Path) -> None:
    folder = fetch("0.17.1", cache=tmp_path)
    assert folder == tmp_path / "0.17.1"
    assert listing(folder) == FETCHED
    assert (folder / "vllm/config/speculative.py").read_bytes() == b"# the configuration\r\n"
    record = (folder / "vllm-0.17.1.dist-info/RECORD").read_bytes()
    assert record_sha256(folder) == hashlib.sha256(record).hexdigest()


def test_fetch_leaves_out_what_is_compiled(index: Index, tmp_path: Path) -> None:
    fetch("0.17.1", cache=tmp_path)
    assert index.bytes_sent < 10_000 < len(COMPILED)


def test_the_first_of_several_builds_is_taken(index: Index, tmp_path: Path) -> None:
    (second,) = wheel("0.17.1", build="second").values()
    files = {"vllm-0.17.1-1-cp38-abi3-manylinux_2_31_x86_64.whl": second}
    index.files = files | index.files | {next(iter(files)).replace("-1-", "-2-"): second}
    folder = fetch("0.17.1", cache=tmp_path)
    assert (folder / "vllm-0.17.1.dist-info/WHEEL").read_bytes() == b"Build: first\n"


def test_what_is_cached_needs_no_index(index: Index, tmp_path: Path) -> None:
    fetch("0.17.1", cache=tmp_path)
    index.requests.clear()
    fetch_release._wheels.cache_clear()
    assert fetch("0.17.1", cache=tmp_path) == tmp_path / "0.17.1"
    assert index.requests == []


def test_an_index_that_tells_no_sizes(index: Index, tmp_path: Path) -> None:
    index.tells_sizes = False
    assert listing(fetch("0.17.1", cache=tmp_path)) == FETCHED
    assert any(request.startswith("HEAD ") for request in index.requests)


def test_an_unknown_release(index: Index, tmp_path: Path) -> None:
    with pytest.raises(UnknownReleaseError, match=r"no x86-64 Linux wheel of vLLM 0\.99\.0"):
        fetch("0.99.0", cache=tmp_path)


@pytest.mark.parametrize(
    "record",
    [
        pytest.param({"vllm/__init__.py": b"changed\n"}, id="a file with another hash"),
        pytest.param({"vllm-0.17.1.dist-info/METADATA": b""}, id="metadata with another hash"),
    ],
)
def test_a_file_that_is_not_as_in_record(
    index: Index, tmp_path: Path, record: dict[str, bytes]
) -> None:
    index.files = wheel("0.17.1", record=record)
    with pytest.raises(RecordMismatchError, match=next(iter(record))):
        fetch("0.17.1", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_record_does_not_list(index: Index, tmp_path: Path) -> None:
    (name,) = index.files
    buffer = io.BytesIO(index.files[name])
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("vllm/extra.py", b"")
    index.files[name] = buffer.getvalue()
    with pytest.raises(RecordMismatchError, match=r"vllm/extra\.py"):
        fetch("0.17.1", cache=tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"not a zip file" * 100, id="no zip file"),
        pytest.param(b"PK\x05\x06" + bytes(18), id="no RECORD"),
    ],
)
def test_something_that_is_no_wheel(index: Index, tmp_path: Path, content: bytes) -> None:
    index.files = dict.fromkeys(index.files, content)
    with pytest.raises(RecordMismatchError, match="no wheel with a RECORD"):
        fetch("0.17.1", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def pin(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "0.17.1.toml").write_text(text)
    monkeypatch.setattr(fetch_release, "PINS", folder)


def test_the_pinned_record(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = record_sha256(fetch("0.17.1", cache=tmp_path / "once"))
    pin(tmp_path / "pins", monkeypatch, f'record_sha256 = "{found}"\n')
    assert record_sha256(fetch("0.17.1", cache=tmp_path / "again")) == found


def test_a_record_that_is_not_the_pinned_one_is_not_cached(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(tmp_path / "pins", monkeypatch, f'record_sha256 = "{"0" * 64}"\n')
    with pytest.raises(RecordMismatchError, match="pins 0000"):
        fetch("0.17.1", cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cached_record_that_is_not_the_pinned_one(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch("0.17.1", cache=tmp_path)
    pin(tmp_path / "pins", monkeypatch, f'record_sha256 = "{"0" * 64}"\n')
    with pytest.raises(RecordMismatchError, match="pins 0000"):
        fetch("0.17.1", cache=tmp_path)


def test_a_release_file_that_pins_no_record(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(tmp_path / "pins", monkeypatch, 'support = "patch"\n')
    assert listing(fetch("0.17.1", cache=tmp_path)) == FETCHED


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_short_outage_is_waited_for(index: Index, tmp_path: Path, status: int) -> None:
    index.statuses = [status, status]
    assert listing(fetch("0.17.1", cache=tmp_path)) == FETCHED


def test_an_answer_that_breaks_off_is_asked_for_again(index: Index, tmp_path: Path) -> None:
    index.cut_short = 2
    assert listing(fetch("0.17.1", cache=tmp_path)) == FETCHED


def test_an_outage_that_lasts(index: Index, tmp_path: Path) -> None:
    index.statuses = [503] * 9
    with pytest.raises(IndexUnreachableError) as caught:
        fetch("0.17.1", cache=tmp_path)
    assert str(caught.value) == (
        "could not read the list of releases from the package index (HTTP status 503): "
        "check the network, HTTPS_PROXY and REQUESTS_CA_BUNDLE, then try again"
    )
    assert len(index.requests) == 3


def test_a_refusal_is_not_tried_again(index: Index, tmp_path: Path) -> None:
    index.statuses = [403] * 9
    with pytest.raises(IndexUnreachableError, match="HTTP status 403"):
        fetch("0.17.1", cache=tmp_path)
    assert len(index.requests) == 1


def test_an_index_without_the_project(index: Index, tmp_path: Path) -> None:
    index.statuses = [404]
    with pytest.raises(IndexUnreachableError, match="NoSuchProjectError"):
        fetch("0.17.1", cache=tmp_path)


def test_an_outage_after_the_list_was_read(index: Index, tmp_path: Path) -> None:
    releases()
    index.statuses = [503] * 9
    with pytest.raises(IndexUnreachableError, match="read a part of the wheel"):
        fetch("0.17.1", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_listens(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fetch_release,
        "_index",
        lambda session: PyPISimple("http://127.0.0.1:1/simple/", session=session),
    )
    with pytest.raises(IndexUnreachableError, match="ConnectionError"):
        releases()


def test_a_server_without_ranges_is_refused_before_it_sends_everything(
    index: Index, tmp_path: Path
) -> None:
    index.files = dict.fromkeys(index.files, bytes(50_000_000))
    index.knows_ranges = False
    with pytest.raises(IndexUnreachableError, match="whole files only"):
        fetch("0.17.1", cache=tmp_path)
    assert index.bytes_sent < 50_000_000


def test_an_interrupted_fetch_leaves_nothing(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, content: bytes) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch("0.17.1", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert listing(fetch("0.17.1", cache=tmp_path)) == FETCHED


def test_two_fetches_at_once(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extract = fetch_release._extract

    def while_another_fetches(*args: object) -> None:
        monkeypatch.setattr(fetch_release, "_extract", extract)
        fetch("0.17.1", cache=tmp_path)
        extract(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(fetch_release, "_extract", while_another_fetches)
    assert listing(fetch("0.17.1", cache=tmp_path)) == FETCHED
    assert [it.name for it in tmp_path.iterdir()] == ["0.17.1"]


def test_something_else_in_the_place_of_the_cache(index: Index, tmp_path: Path) -> None:
    (tmp_path / "0.17.1" / "vllm").mkdir(parents=True)
    with pytest.raises(FetchError, match=r"in the way: .*0\.17\.1: remove it"):
        fetch("0.17.1", cache=tmp_path)
    assert [it.name for it in tmp_path.iterdir()] == ["0.17.1"]


def test_a_copy_is_a_site_packages_of_its_own(index: Index, tmp_path: Path) -> None:
    destination = copy_site_packages("0.17.1", tmp_path / "site", cache=tmp_path / "cache")
    assert destination == tmp_path / "site"
    assert listing(destination) == sorted({*FETCHED, "vllm-0.17.1.dist-info/INSTALLER"} - {MARKER})
    assert (destination / "vllm-0.17.1.dist-info/INSTALLER").read_bytes() == b"pip\n"
    copied = destination / "vllm/__init__.py"
    copied.write_bytes(b"changed\n")
    cached = tmp_path / "cache/0.17.1/vllm/__init__.py"
    assert cached.read_bytes() == b"__version__ = '0.17.1'\n"


def test_a_copy_beside_other_packages(index: Index, tmp_path: Path) -> None:
    (tmp_path / "site/torch").mkdir(parents=True)
    copy_site_packages("0.17.1", tmp_path / "site", cache=tmp_path / "cache")
    names = {it.name for it in (tmp_path / "site").iterdir()}
    assert names == {"torch", "vllm", "vllm-0.17.1.dist-info"}


def test_no_copy_over_another_vllm(index: Index, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    with pytest.raises(FileExistsError, match="holds a vLLM already"):
        copy_site_packages("0.17.1", tmp_path, cache=tmp_path / "cache")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vllm-eagle3-patch/releases"


def test_the_command_prints_where_the_release_is(
    index: Index, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch_release.main(["0.17.1"]) == 0
    assert capsys.readouterr().out == f"{own_cache / '0.17.1'}\n"


def test_the_command_copies(
    index: Index, own_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch_release.main(["0.17.1", "--into", str(tmp_path / "site")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'site'}\n"
    assert (tmp_path / "site/vllm/__init__.py").is_file()


def test_the_command_lists_the_releases(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    index.files |= wheel("0.16.0")
    assert fetch_release.main([]) == 0
    assert capsys.readouterr().out == "0.16.0\n0.17.1\n"


def test_the_command_fails_in_one_line(
    index: Index, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index.statuses = [403]
    assert fetch_release.main(["0.17.1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: could not read the list of releases")
    assert captured.err.count("\n") == 1


def test_the_cache_without_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert fetch_release.default_cache() == Path("/home/someone/.cache/vllm-eagle3-patch/releases")


def test_reading_anywhere_gives_the_bytes_of_the_file(index: Index) -> None:
    (name,) = index.files
    content = index.files[name]
    with requests.Session() as session:
        remote = fetch_release.RemoteFile(f"{index.address}/files/{name}", len(content), session)
        for start, size in ((0, 10), (995, 10), (500, 3000), (len(content) - 5, 50), (0, -1)):
            remote.seek(start)
            expected = content[start:] if size < 0 else content[start : start + size]
            assert remote.read(size) == expected
            assert remote.tell() == start + len(expected)
        remote.seek(-22, os.SEEK_END)
        assert remote.read() == content[-22:]
        assert remote.read() == b""


def test_a_real_release() -> None:
    assert "0.17.1" in releases()
    folder = fetch("0.17.1")
    model = folder / "vllm/model_executor/models/deepseek_v2.py"
    assert hashlib.sha256(model.read_bytes()).hexdigest() == (
        "25e9bc662a6d096b4e4302374333919ecab1e3e66b1f814701a8dbf8f27d966b"
    )
