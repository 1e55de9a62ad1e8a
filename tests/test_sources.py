"""Reading, hashing and parsing an installation's files."""

import ast
import hashlib
import os
from pathlib import Path

import pytest

from fake_package import write_package
from vllm_eagle3_patch.ground.digest import sha256
from vllm_eagle3_patch.ground.errors import NotReadableError, UnsupportedError
from vllm_eagle3_patch.vllm_source import sources as module_under_test
from vllm_eagle3_patch.vllm_source.sources import Sources, parse

FILE = "vllm/a.py"


def test_a_file_is_its_bytes(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbfx = 1\r\n\x00"
    sources = write_package(tmp_path, {"a.py": content})
    assert sources.root == tmp_path
    assert sources.read(FILE) == content
    assert sources.exists(FILE)
    assert sources.digest(FILE) == hashlib.sha256(content).hexdigest() == sha256(content)


@pytest.mark.parametrize("path", ["vllm/none.py", "none/a.py", "vllm/a.py/b.py"])
def test_no_such_file(tmp_path: Path, path: str) -> None:
    sources = write_package(tmp_path, {"a.py": b""})
    assert sources.read(path) is None
    assert sources.digest(path) is None
    assert not sources.exists(path)
    with pytest.raises(UnsupportedError) as caught:
        sources.module(path)
    assert caught.value.message == f"{path} is missing"


def test_a_file_is_read_and_parsed_once(tmp_path: Path) -> None:
    sources = write_package(tmp_path, {"a.py": b"x = 1\n"})
    before = sources.read(FILE), sources.digest(FILE), sources.module(FILE)
    (tmp_path / FILE).write_bytes(b"x = 2\n")
    assert (sources.read(FILE), sources.digest(FILE)) == before[:2]
    assert sources.module(FILE) is before[2]
    assert Sources(tmp_path).read(FILE) == b"x = 2\n"


def test_that_there_is_no_file_is_remembered_too(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    assert (sources.read(FILE), sources.digest(FILE)) == (None, None)
    write_package(tmp_path, {"a.py": b""})
    assert (sources.read(FILE), sources.digest(FILE)) == (None, None)


def test_a_file_is_not_read_to_see_whether_it_is_there(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    write_package(tmp_path, {"a.py": b"x = 1\n"})
    assert sources.exists(FILE)
    (tmp_path / FILE).write_bytes(b"x = 2\n")
    assert sources.read(FILE) == b"x = 2\n"


def test_a_link_is_the_file_behind_it(tmp_path: Path) -> None:
    sources = write_package(tmp_path, {"a.py": b"x = 1\n"})
    (tmp_path / "vllm/b.py").symlink_to("a.py")
    (tmp_path / "vllm/c.py").symlink_to("nowhere.py")
    assert sources.read("vllm/b.py") == b"x = 1\n"
    assert sources.read("vllm/c.py") is None


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir(parents=True)
    sources = Sources(tmp_path)
    assert not sources.exists(FILE)
    with pytest.raises(UnsupportedError) as caught:
        sources.read(FILE)
    assert caught.value.message.startswith(f"{FILE} is no file of vLLM's: not a regular file")


def test_a_file_too_large_to_be_vllms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "LARGEST_FILE", 3)
    sources = write_package(tmp_path, {"a.py": b"123", "b.py": b"1234"})
    assert sources.read(FILE) == b"123"
    with pytest.raises(UnsupportedError, match="larger than 3 bytes"):
        sources.read("vllm/b.py")


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError("odd")])
def test_a_file_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def refuse(*_: object) -> int:
        raise error

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(NotReadableError) as caught:
        Sources(tmp_path).read(FILE)
    assert caught.value.code == "unreadable"
    assert caught.value.message == f"{FILE} cannot be read: {error.strerror or 'odd'}"


# Contents in place of the files'


def test_an_overlay_replaces_a_file_and_adds_one(tmp_path: Path) -> None:
    write_package(tmp_path, {"a.py": b"x = 1\n", "b.py": b"y = 1\n"})
    sources = Sources(tmp_path, {FILE: b"x = 2\n", "vllm/new.py": b"z = 1\n"})
    assert sources.read(FILE) == b"x = 2\n"
    assert sources.digest(FILE) == sha256(b"x = 2\n")
    assert ast.unparse(sources.module(FILE)) == "x = 2"
    assert sources.read("vllm/b.py") == b"y = 1\n"
    assert sources.exists("vllm/new.py")
    assert not (tmp_path / "vllm/new.py").exists()


def test_with_an_overlay_nothing_of_the_old_content_is_left(tmp_path: Path) -> None:
    sources = write_package(tmp_path, {"a.py": b"x = 1\n", "b.py": b"y = 1\n"})
    old = sources.read(FILE), sources.digest(FILE), sources.module(FILE)
    untouched = sources.module("vllm/b.py")
    changed = sources.with_overlay({FILE: b"x = 2\n"})
    assert changed.read(FILE) == b"x = 2\n"
    assert changed.digest(FILE) == sha256(b"x = 2\n")
    assert ast.unparse(changed.module(FILE)) == "x = 2"
    assert changed.module("vllm/b.py") is untouched
    assert (sources.read(FILE), sources.digest(FILE), sources.module(FILE)) == old


def test_overlays_lie_on_one_another(tmp_path: Path) -> None:
    first = write_package(tmp_path, {"a.py": b"x = 1\n"}).with_overlay({FILE: b"x = 2\n"})
    assert ast.unparse(first.module(FILE)) == "x = 2"
    second = first.with_overlay({"vllm/b.py": b"y = 1\n"}).with_overlay({FILE: b"x = 3\n"})
    assert second.read(FILE) == b"x = 3\n"
    assert second.read("vllm/b.py") == b"y = 1\n"
    assert ast.unparse(second.module(FILE)) == "x = 3"


def test_what_is_in_an_overlay_may_change_afterwards(tmp_path: Path) -> None:
    overlay = {FILE: b"x = 1\n"}
    sources = Sources(tmp_path, overlay)
    overlay[FILE] = b"x = 2\n"
    assert sources.read(FILE) == b"x = 1\n"


# Parsing


@pytest.mark.parametrize(
    "content",
    [
        b"x = '\xc3\xa9'\r\n",
        b"\xef\xbb\xbfx = '\xc3\xa9'\n",
        b"# coding: latin-1\nx = '\xe9'\n",
        b"x = '\xc3\xa9'",
    ],
    ids=["CRLF", "byte order mark", "latin-1", "no newline at the end"],
)
def test_any_encoding_that_python_accepts(content: bytes) -> None:
    assert ast.unparse(parse(content, FILE)) == "x = 'é'"


@pytest.mark.parametrize(
    "content",
    [
        b"def f(:\n",
        b"x = '\xff'\n",
        b"# coding: no-such-codec\n",
        b"x = 1\x00\n",
        b"if x:\n\ty\n        z\n",
        b"(" * 1000,
    ],
    ids=["syntax", "not UTF-8", "unknown codec", "null byte", "mixed indentation", "too deep"],
)
def test_what_is_not_python_is_named(content: bytes) -> None:
    with pytest.raises(UnsupportedError) as caught:
        parse(content, FILE)
    assert caught.value.code == "not-python"
    assert caught.value.message.startswith(f"{FILE} cannot be parsed as Python: ")
    assert "\n" not in caught.value.message


def test_a_module_that_is_not_python(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot be parsed"):
        write_package(tmp_path, {"a.py": b"def f(:\n"}).module(FILE)


def test_warnings_of_a_source_are_its_own_business() -> None:
    parse(b"x = '\\d'\ny = 1 is 1\n", FILE)


def test_the_grammar_of_an_older_python() -> None:
    content = b"match x:\n    case 1: pass\n"
    parse(content, FILE)
    with pytest.raises(UnsupportedError, match=r"3\.10"):
        parse(content, FILE, feature_version=(3, 9))
