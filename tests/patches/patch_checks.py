"""What the tests of every patch ask, of small sources of our own shaped like vLLM's."""

from __future__ import annotations

import difflib
import io
import tokenize
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from vllm_eagle3_patch.ground.errors import AnchorNotFoundError
from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.vllm_source.sources import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_eagle3_patch.codemod.patch import Patch
    from vllm_eagle3_patch.ground.family import FamilyModel

PATH = "vllm/some/file.py"

Change = tuple[str, str]
Layout = Callable[[str], bytes]

LAYOUTS: dict[str, Layout] = {
    "as it is": str.encode,
    "CRLF": lambda source: source.replace("\n", "\r\n").encode(),
    "CRLF on the last line only": lambda source: source[:-1].encode() + b"\r\n",
    "no newline at the end": lambda source: source.rstrip("\n").encode(),
    "byte order mark": lambda source: b"\xef\xbb\xbf" + source.encode(),
    "latin-1": lambda source: f"# coding: latin-1\n# \xe9\n{source}".encode("latin-1"),
    "UTF-8 beyond ASCII": lambda source: f"# 残差\n{source}".encode(),
    "blanks at line ends": lambda source: f"import os  \n    \n{source}    \n\n".encode(),
}
"""Ways to write the same source down: a patch keeps each, byte for byte."""


def changed(source: str, *changes: Change) -> str:
    """The source with the first string of each change, found exactly once, replaced."""
    for old, new in changes:
        assert source.count(old) == 1, f"{source.count(old)} times: {old!r}"
        source = source.replace(old, new)
    return source


def check_patched(
    patch: Patch, before: bytes, after: bytes, models: Sequence[FamilyModel] = FAMILY
) -> None:
    """The patch makes ``after`` of ``before``, and everything that a patch promises holds."""
    assert not patch.holds(parse(before, PATH), models)
    result = patch.apply(before, PATH, models)
    assert result == after, difference(after, result)
    assert patch.holds(parse(result, PATH), models)
    assert patch.apply(result, PATH, models) == result
    compile(result, PATH, "exec")
    assert lines_without_replacement(before, result) == []
    others = iter(comments(result))
    assert all(comment in others for comment in comments(before)), "a comment is lost or moved"


def check_tabs(
    patch: Patch, before: str, after: str, models: Sequence[FamilyModel] = FAMILY
) -> None:
    """A file indented with tabs: blocks of ours are too."""
    result = patch.apply(before.replace("    ", "\t").encode(), PATH, models)
    spaces = result.replace(b"\t", b"    ")
    assert spaces == after.encode(), difference(after.encode(), spaces)
    assert not [line for line in result.splitlines() if line.startswith(b" ")]
    compile(result, PATH, "exec")


def check_unchanged(patch: Patch, source: str, models: Sequence[FamilyModel] = FAMILY) -> None:
    """The postcondition holds already, whoever wrote it: not one byte changes."""
    for layout in LAYOUTS.values():
        content = layout(source)
        assert patch.holds(parse(content, PATH), models)
        assert patch.apply(content, PATH, models) == content


def refusal(
    patch: Patch, source: str, models: Sequence[FamilyModel] = FAMILY
) -> tuple[str, str, int]:
    """The anchor that the patch did not find, where it looked, and how often it found it."""
    assert not patch.holds(parse(source.encode(), PATH), models)
    with pytest.raises(AnchorNotFoundError) as caught:
        patch.apply(source.encode(), PATH, models)
    error = caught.value
    assert (error.patch, error.path, error.exit_code) == (patch.name, PATH, 4)
    for part in (error.patch, error.path, error.anchor, error.where):
        assert part in error.message
    assert "\n" not in error.message + error.hint
    return error.anchor, error.where, error.found


def lines_without_replacement(before: bytes, after: bytes) -> list[bytes]:
    """Lines that are gone and have nothing in their place."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    gone = [(first, last) for tag, first, last, _, _ in matcher.get_opcodes() if tag == "delete"]
    return [line for first, last in gone for line in old[first:last]]


def comments(content: bytes) -> list[str]:
    """The comments of a source, in order."""
    tokens = tokenize.tokenize(io.BytesIO(content).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def difference(expected: bytes, result: bytes) -> str:
    """What a person needs to see when two sources are not the same."""
    lines = [
        [ascii(line) for line in text.splitlines(keepends=True)] for text in (expected, result)
    ]
    return "\n".join(["", *difflib.unified_diff(*lines, "expected", "result", lineterm="")])
