"""Reading JSON that anybody may have damaged or forged: every field is checked before use."""

import json
import os
import re
from collections.abc import Iterator
from typing import Any

from vllm_eagle3_patch.ground.errors import StateCorruptError

SCHEMA = 1
LARGEST_NUMBER = 2**63 - 1
LATEST_TIME_NS = LARGEST_NUMBER * 10**9
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PATH = re.compile(r"vllm(/[^/\0]+)+")


def safe_path(path: str) -> bool:
    """Whether a path is relative, in the package folder and without ``.`` and ``..``."""
    return bool(_PATH.fullmatch(path)) and not {".", ".."} & set(path.split("/"))


def encode(document: dict[str, object]) -> bytes:
    """The bytes of a document; equal documents give equal bytes."""
    return json.dumps(document, indent=1, sort_keys=True).encode("ascii") + b"\n"


def decode(data: bytes, where: str, restore: str) -> "Fields":
    """Read a document that ``encode`` wrote, of a schema that this version knows.

    Errors call it ``where``, and say with ``restore`` what to do if it cannot be read.

    Raises:
        StateCorruptError: It is no such document, or a newer version wrote it.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StateCorruptError(f"{where} is damaged: it is not valid JSON", restore) from error
    fields = Fields(value, where, restore)
    schema = fields.number("schema")
    if schema > SCHEMA:
        raise StateCorruptError(
            f"{where} was written by a newer version of this tool (schema {schema})",
            "use that version, or a newer one",
            code="state-newer",
        )
    if schema < 1:
        raise fields.wrong("schema")
    return fields


def _has_bytes(text: str) -> bool:
    """Whether the system has bytes for a text: not for each half of a surrogate pair."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


class Fields:
    """A JSON object whose fields are checked as they are taken.

    Each method raises ``StateCorruptError`` for a field that is missing or not as it must be.
    """

    def __init__(self, value: object, where: str, restore: str) -> None:
        self._where = where
        self._restore = restore
        if not isinstance(value, dict):
            raise StateCorruptError(f"{where} is damaged: no object where one must be", restore)
        self._value: dict[str, Any] = value

    def wrong(self, key: str) -> StateCorruptError:
        """The error that says that a field is not as it must be."""
        return StateCorruptError(f"{self._where} is damaged: {key!a}", self._restore)

    def text(self, key: str) -> str:
        """A string that could be the name of a file."""
        value = self._value.get(key)
        if not isinstance(value, str) or "\0" in value or not _has_bytes(value):
            raise self.wrong(key)
        return value

    def optional_text(self, key: str) -> str | None:
        """A string, or None where null is written."""
        if key in self._value and self._value[key] is None:
            return None
        return self.text(key)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._value.get(key)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.wrong(key)
        return tuple(value)

    def optional_texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; an empty one where an earlier version wrote none."""
        return self.texts(key) if key in self._value else ()

    def one_of(self, key: str, *known: str) -> str:
        """A string that is one of those known."""
        if self.text(key) not in known:
            raise self.wrong(key)
        return self.text(key)

    def digest(self, key: str) -> str:
        """A SHA-256 digest in hex."""
        if not _DIGEST.fullmatch(self.text(key)):
            raise self.wrong(key)
        return self.text(key)

    def optional_digest(self, key: str) -> str | None:
        """A SHA-256 digest in hex, or None where null is written."""
        return None if self.optional_text(key) is None else self.digest(key)

    def digests(self, key: str) -> dict[str, str]:
        """An object of SHA-256 digests by the paths of files in the package folder."""
        inner = self.inner(key)
        if not all(map(safe_path, inner._value)):
            raise self.wrong(key)
        return {path: inner.digest(path) for path in inner._value}

    def path(self, key: str) -> str:
        """The path of a file in the package folder."""
        if not safe_path(self.text(key)):
            raise self.wrong(key)
        return self.text(key)

    def number(self, key: str, largest: int = LARGEST_NUMBER) -> int:
        """A whole number from 0 to ``largest``."""
        value = self._value.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
            raise self.wrong(key)
        return value

    def time(self, key: str) -> int:
        """Nanoseconds since 1970, or before it, that a system can give to a file."""
        value = self._value.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or abs(value) > LATEST_TIME_NS:
            raise self.wrong(key)
        return value

    def flag(self, key: str) -> bool:
        value = self._value.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key)
        return value

    def inner(self, key: str) -> "Fields":
        """An object within this one."""
        return Fields(self._value.get(key), self._where, self._restore)

    def optional_inner(self, key: str) -> "Fields | None":
        """An object within this one, or None where null is written."""
        return None if key in self._value and self._value[key] is None else self.inner(key)

    def each(self, key: str) -> Iterator["Fields"]:
        """The objects of a list."""
        value = self._value.get(key)
        if not isinstance(value, list):
            raise self.wrong(key)
        return (Fields(item, self._where, self._restore) for item in value)
