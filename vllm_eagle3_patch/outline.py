"""Outline: a file without the bodies of the functions that no codemod looks into.

Parsing with LibCST takes as long as a file is, and what a patch changes is a small part of it. The
bodies that are left out are put back as they were, byte for byte. Nothing here understands Python:
functions are found by their lines and their indentation, which is quick and may be wrong about an
odd file. So what comes of an outline counts only where its sha256 is known beforehand (see
``compose``).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

_HEAD = re.compile(
    rb"^(?P<indent>[ \t]*)(?:async[ \t]+)?def[ \t]+(?P<function>\w+)|^class[ \t]+(?P<owner>\w+)",
    re.MULTILINE,
)
_END_OF_SIGNATURE = re.compile(rb"^[^#\n]*:[ \t]*(?:#[^\n]*)?\r?\n", re.MULTILINE)
_DEFINES = re.compile(rb"^[ \t]*(?:async[ \t]+)?def[ \t]", re.MULTILINE)
_CODE_LINE = re.compile(rb"^[ \t]*(?=[^\s#])", re.MULTILINE)
_QUOTES = (b'"""', b"'''")
_NAME = b"_vllm_eagle3_patch_body_%d_"
_PLACEHOLDER = re.compile(rb"_vllm_eagle3_patch_body_(\d+)_")


class Outline(NamedTuple):
    """A file with a name in the place of each body that was left out.

    Attributes:
        content: What is left.
        bodies: What was left out, in order.
    """

    content: bytes
    bodies: tuple[bytes, ...]

    def restored(self, changed: bytes) -> bytes | None:
        """What became of the outline, with the bodies put back; None if one of them is lost."""
        parts = _PLACEHOLDER.split(changed)
        if [int(number) for number in parts[1::2]] != [*range(len(self.bodies))]:
            return None
        parts[1::2] = self.bodies
        return b"".join(parts)


def outline(content: bytes, looked_into: Collection[str]) -> Outline | None:
    """Leave out the bodies of a file's functions.

    Args:
        content: The file's bytes.
        looked_into: The functions that stay whole: ``function``, also of any class, or
            ``Class.method``.

    Returns:
        The outline; None if the file holds names like those that stand in for bodies.
    """
    if _PLACEHOLDER.search(content):
        return None
    kept: list[bytes] = []
    bodies: list[bytes] = []
    owner, done, position = "", 0, 0
    while head := _HEAD.search(content, position):
        position = head.end()
        if head["owner"] is not None:
            owner = head["owner"].decode()
            continue
        body = _body(content, head)
        if body is None:
            continue
        start, end = body
        position = end
        name = head["function"].decode()
        owner = owner if head["indent"] else ""
        if name in looked_into or f"{owner}.{name}" in looked_into:
            continue
        kept += [content[done:start], _NAME % len(bodies)]
        bodies.append(content[start:end])
        done = end
    return Outline(b"".join((*kept, content[done:])), tuple(bodies))


def _body(content: bytes, head: re.Match[bytes]) -> tuple[int, int] | None:
    """From the first to the last character of a function's code; None if it is on odd lines."""
    signature = _END_OF_SIGNATURE.search(content, head.start())
    if signature is None or _DEFINES.search(content, head.end(), signature.end()):
        return None  # On one line, or with the colon of its head somewhere unusual.
    first = _CODE_LINE.search(content, signature.end())
    width = len(head["indent"])
    if first is None or first.end() - first.start() <= width:
        return None
    after = re.compile(rb"^[ \t]{0,%d}(?=[^\s#])" % width, re.MULTILINE)
    position = first.end()
    while following := after.search(content, position):
        if not _within_string(content, first.end(), following.start()):
            return first.end(), _end_of_code(content, first.end(), following.start())
        position = following.end()
    if _within_string(content, first.end(), len(content)):
        return None
    return first.end(), _end_of_code(content, first.end(), len(content))


def _within_string(content: bytes, start: int, end: int) -> bool:
    """Whether a string of several lines that begins in a part of a file is open at its end."""
    return any(content.count(quote, start, end) % 2 for quote in _QUOTES)


def _end_of_code(content: bytes, start: int, end: int) -> int:
    """Where the last line ends that is neither empty nor a comment."""
    while True:
        line = max(content.rfind(b"\n", start, end - 1) + 1, start)
        text = content[line:end].rstrip()
        if line == start or text.lstrip()[:1] not in {b"", b"#"}:
            return line + len(text)
        end = line
