"""Paths and messages as one line that any terminal can show, or a shell can read."""

import os
import shlex


def one_line(text: object) -> str:
    r"""A path or a program's words on one line, whatever they hold.

    What can be printed stays. Bytes that are no UTF-8 are written as ``\xff``, the rest as in a
    Python string: a newline as ``\n``.
    """
    shown = text if isinstance(text, str) else _decoded(text)
    return "".join(map(_printable, shown)) if not shown.isprintable() else shown


def _decoded(text: object) -> str:
    if isinstance(text, bytes):
        return os.fsdecode(text)
    return os.fspath(text) if isinstance(text, os.PathLike) else str(text)


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    if "\udc80" <= character <= "\udcff":  # How Python keeps a byte that is no UTF-8.
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


def shell_word(path: os.PathLike[str] | str, encoding: str = "utf-8") -> str:
    r"""A path as it can be pasted into a shell, on one line.

    Args:
        path: Whatever bytes it holds; those that cannot be shown are written as in ``$'\n'``.
        encoding: That of the stream it is printed on.
    """
    text = os.fspath(path)
    try:
        text.encode(encoding)
        if text.isprintable():
            return shlex.quote(text)
    except UnicodeEncodeError:
        pass  # Its bytes are shown instead.
    characters = os.fsencode(text).decode("latin-1")
    shown = "".join(
        c if c.isascii() and c.isprintable() and c not in "'\\" else f"\\x{ord(c):02x}"
        for c in characters
    )
    return f"$'{shown}'"
