"""The Python files of one installation: each read, hashed and parsed once."""

from __future__ import annotations

import os
import stat
import warnings
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from vllm_eagle3_patch.ground.digest import sha256
from vllm_eagle3_patch.ground.errors import NotReadableError, UnsupportedError
from vllm_eagle3_patch.ground.folder import LARGEST_FILE

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import libcst


class Sources:
    """The files below the directory that holds the package folder ``vllm``.

    Args:
        root: That directory, site-packages for an ordinary installation.
        overlay: Contents that replace what is on disk, by path relative to ``root``: what an
            installation would be with them in place.
    """

    def __init__(self, root: Path, overlay: Mapping[str, bytes] | None = None) -> None:
        self.root = root
        self._overlay = dict(overlay or {})
        self._contents: dict[str, bytes | None] = {}
        self._digests: dict[str, str | None] = {}
        self._texts: dict[str, Text] = {}

    def with_overlay(self, overlay: Mapping[str, bytes]) -> Sources:
        """The same installation with other contents of some files."""
        changed = Sources(self.root, {**self._overlay, **overlay})
        changed._contents = {p: c for p, c in self._contents.items() if p not in overlay}
        changed._texts = {p: t for p, t in self._texts.items() if p not in overlay}
        return changed

    def read(self, path: str) -> bytes | None:
        """The content of a file, or None if there is no such file.

        Raises:
            NotReadableError: The file cannot be read.
            UnsupportedError: It is too large to be vLLM's, or no regular file.
        """
        if path in self._overlay:
            return self._overlay[path]
        if path not in self._contents:
            self._contents[path] = _read_file(self.root / path, path)
        return self._contents[path]

    def exists(self, path: str) -> bool:
        """Whether there is such a file; it is not read for this."""
        return path in self._overlay or (self.root / path).is_file()

    def digest(self, path: str) -> str | None:
        """The sha256 of a file in hexadecimal, or None if there is no such regular file."""
        if path not in self._digests:
            try:
                content = self.read(path)
            except UnsupportedError:
                content = None
            self._digests[path] = None if content is None else sha256(content)
        return self._digests[path]

    def module(self, path: str) -> ast.Module:
        """The parsed file.

        Raises:
            UnsupportedError: There is no such file, or it is not Python.
        """
        return self.text(path).module

    def text(self, path: str) -> Text:
        """The file's content, with what it was parsed to.

        Raises:
            UnsupportedError: There is no such file.
        """
        if path not in self._texts:
            content = self.read(path)
            if content is None:
                raise UnsupportedError(
                    f"{path} is missing", "reinstall vLLM, or name another installation"
                )
            self._texts[path] = Text(content, path)
        return self._texts[path]


MOST_OPERANDS = 1000
"""Of one ``and`` or ``or``; vLLM's longest has about ten."""


class Text:
    """A file's content, parsed by Python once at most.

    Args:
        content: Its bytes.
        path: What to call it in an error.
    """

    def __init__(self, content: bytes, path: str) -> None:
        self.content = content
        self.path = path

    def __eq__(self, other: object) -> bool:
        """Whether it is the same content of the same file."""
        if not isinstance(other, Text):
            return NotImplemented
        return (self.path, self.content) == (other.path, other.content)

    def __hash__(self) -> int:
        return hash((self.path, self.content))

    @cached_property
    def module(self) -> ast.Module:
        """As Python parses it.

        Raises:
            UnsupportedError: It is not Python.
        """
        return parse(self.content, self.path)

    def tree(self) -> libcst.Module:
        """As LibCST parses it: some hundred times as large, so it is not kept.

        Raises:
            UnsupportedError: LibCST cannot parse it, or cannot reproduce it exactly.
        """
        import ast

        import libcst

        path = self.path
        # LibCST's parser calls itself for each, and where its stack ends it ends the process.
        if any(
            isinstance(node, ast.BoolOp) and len(node.values) > MOST_OPERANDS
            for node in ast.walk(self.module)
        ):
            raise too_deep(path)
        try:
            tree = libcst.parse_module(self.content)
        except (libcst.ParserSyntaxError, UnicodeDecodeError, LookupError) as error:
            raise UnsupportedError(
                f"{path} cannot be parsed by LibCST", "reinstall vLLM", code="not-python"
            ) from error
        if tree.bytes != self.content:
            raise UnsupportedError(
                f"{path} cannot be reproduced exactly by LibCST",
                "the file has unusual white space (a form feed?); it is left alone",
                code="not-reproducible",
            )
        return tree


def parse(content: bytes, path: str, feature_version: tuple[int, int] | None = None) -> ast.Module:
    """Parse a file's content with Python's own parser.

    Args:
        content: The bytes of the file, any encoding that Python accepts.
        path: What to call the file in an error.
        feature_version: Accept only the grammar of this Python version.

    Raises:
        UnsupportedError: It is not Python.
    """
    import ast

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(content, path, feature_version=feature_version)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UnsupportedError(
            f"{path} cannot be parsed as Python: {reason}",
            "the file is damaged or not vLLM's; reinstall vLLM",
            code="not-python",
        ) from error


def too_deep(path: str) -> UnsupportedError:
    """The error for a file that is nested deeper than can be read."""
    return UnsupportedError(
        f"{path} is nested too deeply to be read",
        "the file is not vLLM's; reinstall vLLM",
        code="not-python",
    )


@contextmanager
def not_too_deep(path: str) -> Iterator[None]:
    """Refuse a file that is nested so deeply that Python gives up on going through it.

    Raises:
        UnsupportedError: It is.
    """
    try:
        yield
    except RecursionError as error:
        raise too_deep(path) from error


def _read_file(file: Path, path: str) -> bytes | None:
    try:
        # Not blocking: a pipe in the file's place must not stop us.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            with os.fdopen(descriptor, "rb", closefd=False) as opened:
                content = opened.read(LARGEST_FILE + 1)
            if len(content) <= LARGEST_FILE:
                return content
        raise UnsupportedError(
            f"{path} is no file of vLLM's: not a regular file, or larger than {LARGEST_FILE} bytes",
            "reinstall vLLM",
            code="not-python",
        )
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)


def _unreadable(path: str, error: OSError) -> NotReadableError:
    return NotReadableError(
        f"{path} cannot be read: {error.strerror or error}",
        "run this as a user who may read the installation",
    )
