"""Outline: a file without the functions and classes that no codemod looks into.

LibCST takes as long as a file is, and what a patch changes is a small part of it. What is left out
is put back as it was, byte for byte. Nothing here understands Python: definitions are found by
their lines and indentation, which is quick and may be wrong about an odd file. So what comes of an
outline counts only where its sha256 is known beforehand (see ``compose``).
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

_DEFINITION = rb"(?:(?:async[ \t]+)?def|(?P<is_class>class))[ \t]+(?P<name>\w+)"
_HEAD = re.compile(rb"^(?P<indent>[ \t]*)(?:@|%s)" % _DEFINITION, re.MULTILINE)
_END_OF_SIGNATURE = re.compile(rb"^[^#\n]*:[ \t]*(?:#[^\n]*)?\r?\n", re.MULTILINE)
_OTHER_DEFINITION = re.compile(rb"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]", re.MULTILINE)
_CODE_LINE = re.compile(rb"^[ \t]*(?=[^\s#])", re.MULTILINE)
_NO_CODE = re.compile(rb"(?:\s|#[^\n]*\n)*")
_QUOTES = (b'"""', b"'''")
_STAND_IN = re.compile(rb"_vllm_eagle3_patch_left_out_(\d+)_")


class Outline(NamedTuple):
    """A file with a name in the place of each part that was left out.

    Attributes:
        content: What is left.
        left_out: The parts, in order.
    """

    content: bytes
    left_out: tuple[bytes, ...]

    def restored(self, changed: bytes) -> bytes | None:
        """What became of the outline, with the parts put back; None if one of them is lost."""
        parts = _STAND_IN.split(changed)
        if [int(number) for number in parts[1::2]] != [*range(len(self.left_out))]:
            return None
        parts[1::2] = self.left_out
        return b"".join(parts)


class _Part(NamedTuple):
    """A definition: where its decorators, its head and its body begin, and where it ends."""

    indent: bytes
    name: str
    is_class: bool
    start: int
    body: int
    end: int


def outline(content: bytes, looked_into: Collection[str]) -> Outline | None:
    """Leave out what no codemod looks into.

    Args:
        content: The file's bytes.
        looked_into: The functions that stay: ``function``, also one of a class, or
            ``Class.method``. So do the heads of their classes, and what is no definition.

    Returns:
        The outline; None if the file holds names like those that stand in for what is left out.
    """
    if _STAND_IN.search(content):
        return None
    cuts: list[tuple[int, int]] = []
    mergeable = b""  # The indentation of the last cut, if it was a whole definition.
    owner, first, position = "", False, 0
    while head := _HEAD.search(content, position):
        part = _part(content, head)
        if part is None:
            position = head.end()
            continue
        at_top = not part.indent
        if at_top:
            owner = ""
        if at_top and part.is_class and _holds_one(content, part, looked_into):
            owner, first = part.name, True
            position = content.rindex(b"\n", 0, part.body) + 1
            continue
        position = part.end
        if part.name in looked_into or f"{owner}.{part.name}" in looked_into:
            first = False
        elif owner and first:
            # What comes first in a class may decide how something is put above it.
            first, mergeable = False, b"-"
            cuts.append((part.body, part.end))
        elif (
            cuts
            and mergeable == part.indent
            and _NO_CODE.fullmatch(content, cuts[-1][1], part.start)
        ):
            cuts[-1] = (cuts[-1][0], part.end)
        else:
            mergeable = part.indent
            cuts.append((part.start, part.end))
    return _without(content, cuts)


def _without(content: bytes, cuts: list[tuple[int, int]]) -> Outline:
    kept: list[bytes] = []
    done = 0
    for number, (start, end) in enumerate(cuts):
        kept += (content[done:start], b"_vllm_eagle3_patch_left_out_%d_" % number)
        done = end
    left_out = tuple(content[start:end] for start, end in cuts)
    return Outline(b"".join((*kept, content[done:])), left_out)


def _holds_one(content: bytes, owner: _Part, looked_into: Collection[str]) -> bool:
    """Whether a class has one of the functions, or may have."""
    return any(
        name.startswith(f"{owner.name}.")
        or re.compile(
            rb"^[ \t]+(?:async[ \t]+)?def[ \t]+%s\b" % name.encode(), re.MULTILINE
        ).search(content, owner.body, owner.end)
        for name in looked_into
    )


def _part(content: bytes, head: re.Match[bytes]) -> _Part | None:
    """What a head belongs to; None if that is on odd lines."""
    indent, start = head["indent"], head.start() + len(head["indent"])
    if head["name"] is None:
        found = _definition_at(indent).search(content, head.end())
        if found is None:
            return None
        head = found
    signature = _END_OF_SIGNATURE.search(content, head.start())
    if signature is None or _OTHER_DEFINITION.search(content, head.end(), signature.end()):
        return None  # On one line, or with the colon of its head somewhere unusual.
    first = _CODE_LINE.search(content, signature.end())
    if first is None or first.end() - first.start() <= len(indent):
        return None
    body = first.end()
    end = _end(content, body, len(indent))
    if end is None:
        return None
    return _Part(indent, head["name"].decode(), head["is_class"] is not None, start, body, end)


@cache
def _definition_at(indent: bytes) -> re.Pattern[bytes]:
    return re.compile(rb"^%s%s" % (indent, _DEFINITION), re.MULTILINE)


@cache
def _code_up_to(width: int) -> re.Pattern[bytes]:
    return re.compile(rb"^[ \t]{0,%d}(?=[^\s#])" % width, re.MULTILINE)


def _end(content: bytes, body: int, width: int) -> int | None:
    """Where the last line of a body ends that is neither empty nor a comment."""
    position = body
    while following := _code_up_to(width).search(content, position):
        if not _within_string(content, body, following.start()):
            return _end_of_code(content, body, following.start())
        position = following.end() + 1
    if _within_string(content, body, len(content)):
        return None
    return _end_of_code(content, body, len(content))


def _within_string(content: bytes, start: int, end: int) -> bool:
    """Whether a string of several lines that begins in a part of a file is open at its end."""
    return any(content.count(quote, start, end) % 2 for quote in _QUOTES)


def _end_of_code(content: bytes, start: int, end: int) -> int:
    while True:
        line = max(content.rfind(b"\n", start, end - 1) + 1, start)
        text = content[line:end].rstrip()
        if line == start or text.lstrip()[:1] not in {b"", b"#"}:
            return line + len(text)
        end = line
