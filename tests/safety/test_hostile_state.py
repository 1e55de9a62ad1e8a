"""What was kept is corrupted, cut off, swapped or forged; through the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import Ended, run, snapshot
from conftest import small_copy
from safety_table import Tried

GROUP = "Hostile or bad input"
STATE = ".vllm-eagle3-patch"
SPECULATIVE = "vllm/config/speculative.py"
EAGLE = "vllm/v1/spec_decode/eagle.py"
Spoil = Callable[[Path], object]


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation that was patched; not to be changed."""
    root = small_copy("0.17.1", tmp_path_factory.mktemp("patched") / "site-packages")
    assert run("apply", "--site-packages", root).exit_code == 0
    return root


@pytest.fixture
def root(patched: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it: the original inodes are then not the ones that were installed."""
    root = tmp_path / "site-packages"
    shutil.copytree(patched, root, symlinks=True)
    yield root
    shutil.rmtree(root)


def kept(root: Path, shelf: str, path: str = SPECULATIVE) -> Path:
    return root / STATE / shelf / "1" / path


def overwrite(file: Path, content: bytes) -> None:
    file.chmod(0o600)
    file.write_bytes(content)


def each(shelves: tuple[str, ...], change: Callable[[bytes], bytes]) -> Spoil:
    def spoil(root: Path) -> None:
        for shelf in shelves:
            file = kept(root, shelf)
            overwrite(file, change(file.read_bytes()))

    return spoil


def swapped(*shelves: str) -> Spoil:
    def spoil(root: Path) -> None:
        for shelf in shelves:
            one, other = kept(root, shelf), kept(root, shelf, EAGLE)
            first, second = one.read_bytes(), other.read_bytes()
            overwrite(one, second)
            overwrite(other, first)

    return spoil


def gone(root: Path) -> None:
    for shelf in ("originals", "copies"):
        kept(root, shelf).unlink()


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    return content[:100] + bytes([content[100] ^ 1]) + content[101:]


ONE = {
    "an original with a bit flipped": each(("originals",), flipped),
    "a copy cut off": each(("copies",), cut),
    "originals swapped with each other": swapped("originals"),
    "copies swapped with each other": swapped("copies"),
}
BOTH = {
    "an original and its copy with a bit flipped": each(("originals", "copies"), flipped),
    "an original and its copy cut off": each(("originals", "copies"), cut),
    "an original and its copy with nothing in them": each(("originals", "copies"), lambda _: b""),
    "originals and copies swapped with each other": swapped("originals", "copies"),
    "an original and its copy that are gone": gone,
}


@pytest.mark.parametrize("kind", ONE)
def test_where_one_of_the_two_is_spoilt_the_other_serves(
    root: Path, kind: str, tried: Tried
) -> None:
    where = ("--site-packages", root)
    pristine = {
        path: kept(root, "copies", path).read_bytes()
        for path in (SPECULATIVE, EAGLE)
        if kept(root, "copies", path).exists()
    }
    ONE[kind](root)
    before = snapshot(root)
    assert run("check", *where).exit_code == 0
    assert run("diff", *where).exit_code == 1
    assert snapshot(root) == before
    assert run("revert", *where).exit_code == 0
    assert {path: (root / path).read_bytes() for path in pristine} == pristine
    assert not (root / STATE).exists()
    tried(
        GROUP,
        kind,
        how="check, diff and revert",
        count=3,
        result="the other of the two serves; revert brings every byte back",
    )


@pytest.mark.parametrize("kind", BOTH)
def test_where_both_are_spoilt_nothing_is_written(root: Path, kind: str, tried: Tried) -> None:
    BOTH[kind](root)
    before = snapshot(root)
    where = ("--site-packages", root)
    assert run("check", *where).exit_code == 0
    assert run("apply", *where).exit_code == 0  # nothing to do
    for command in ("diff", "revert", "revert --force"):
        refused(run(*command.split(), *where))
        assert snapshot(root) == before, command
    edit(root)
    before = snapshot(root)
    refused(run("apply", "--force", *where))
    assert snapshot(root) == before
    tried(
        GROUP,
        kind,
        how="check, diff, apply, revert, revert --force, and apply --force on an edited file",
        count=6,
        result="state-corrupt (5) with a line and a hint where it is needed; nothing written",
    )


def edit(root: Path) -> None:
    """Undo the patch of a file as an editor would, so that its original is needed."""
    content = (root / SPECULATIVE).read_bytes()
    edited = content.replace(b'"deepseek_v3"', b'"deepseek_v4"')
    assert edited != content
    (root / SPECULATIVE).write_bytes(edited)


def refused(ended: Ended) -> None:
    """It ended with an error of ours: one line and a hint."""
    assert ended.exit_code == 5, ended
    error, hint = ended.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("  ")


def forged(**fields: Any) -> Callable[[Path], None]:
    def forge(document: Path) -> None:
        content = json.loads(document.read_bytes())
        content["files"][0].update(fields)
        document.write_text(json.dumps(content))

    return forge


def huge(document: Path) -> None:
    document.write_bytes(document.read_bytes() + b" " * 2**24)


DOCUMENTS: dict[str, Spoil] = {
    "above 16 MB": huge,
    "with NaN for a number": forged(mode=float("nan")),
    "with a number of 5000 digits": lambda document: document.write_text(
        document.read_text().replace('"kept": 1', '"kept": ' + "9" * 5000)
    ),
    "nested 100000 deep": lambda document: document.write_text("[" * 100_000),
}


@pytest.mark.parametrize("name", ["manifest.json", "journal.json"])
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_document_that_no_run_wrote(root: Path, name: str, kind: str, tried: Tried) -> None:
    document = root / STATE / name
    if name == "journal.json":
        shutil.copy(root / STATE / "manifest.json", document)
    DOCUMENTS[kind](document)
    edit(root)
    before = document.stat()
    tree = snapshot_without(root, document)
    where = ("--site-packages", root)
    for command in ("check", "diff", "apply --force", "revert --force"):
        ended = run(*command.split(), *where)
        assert ended.exit_code == 5, (command, ended)
        assert f"{name} is damaged: " in ended.stdout + ended.stderr
    assert snapshot_without(root, document) == tree
    after = document.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        before.st_ino,
        before.st_size,
        before.st_mtime_ns,
    )
    tried(
        GROUP,
        f"a {name.removesuffix('.json')} {kind}",
        how="where a file was edited: check, diff, apply --force and revert --force",
        count=4,
        result="state-corrupt (5) with a line and a hint; nothing written",
    )


def snapshot_without(root: Path, document: Path) -> dict[str, object]:
    """The tree without a document, which may be too large to read."""
    aside = root.parent / "aside"
    document.rename(aside)
    try:
        return dict(snapshot(root))
    finally:
        aside.rename(document)
