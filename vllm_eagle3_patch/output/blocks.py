"""Lines, tables and diffs on standard output: with rich on a terminal, else as plain text.

Without a terminal or with NO_COLOR rich is not imported: a script need not wait for it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NamedTuple

from vllm_eagle3_patch.ground.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Line(NamedTuple):
    """One line of text; a command is never wrapped, so that it can be copied whole."""

    text: str
    bold: bool = False
    command: bool = False


class Columns(NamedTuple):
    """A table: names of columns, and rows of words; perhaps a narrower one with the same rows."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    narrow: Columns | None = None


class Diff(NamedTuple):
    """A unified diff, shown byte for byte."""

    text: str


Block = Line | Columns | Diff

BLANK = Line("")


def print_blocks(blocks: Iterable[Block]) -> None:
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        _show_on_terminal(blocks)
    else:
        import shutil

        _show_plain(blocks, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)


def print_diff(text: str) -> None:
    """A diff on standard output, byte for byte; a terminal is shown what it would obey."""
    if sys.stdout.isatty():
        for line in text.removesuffix("\n").split("\n"):
            sys.stdout.write("\t".join(map(one_line, line.split("\t"))) + "\n")
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
    sys.stdout.buffer.flush()


def _show_on_terminal(blocks: Iterable[Block]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for block in blocks:
        match block:
            case Line(text, bold, command):
                style = "bold" if bold else ""
                console.print(Text(one_line(text), style=style), soft_wrap=command)
            case Columns():
                fitting = _fitting(block, console.width)
                if fitting is None:
                    for line in _as_records(block):
                        console.print(Text(line))
                    continue
                table = Table(*fitting.header, box=None, pad_edge=False, header_style="bold")
                for row in fitting.rows:
                    table.add_row(*(Text(one_line(w), _COLORS.get(w, "")) for w in row))
                console.print(table)
            case Diff(text):
                print_diff(text)


def _show_plain(blocks: Iterable[Block], width: int | None) -> None:
    """On a terminal of this width, or where there is none."""
    for block in blocks:
        match block:
            case Line(text):
                sys.stdout.write(f"{one_line(text)}\n")
            case Columns():
                fitting = block if width is None else _fitting(block, width)
                lines = _as_records(block) if fitting is None else _aligned(fitting)
                sys.stdout.writelines(f"{line}\n" for line in lines)
            case Diff(text):
                print_diff(text)


def _fitting(table: Columns, width: int) -> Columns | None:
    """A table, or its narrower form, if it fits a terminal."""
    forms = (table, table.narrow)
    return next((f for f in forms if f is not None and max(map(len, _aligned(f))) <= width), None)


def _as_records(table: Columns) -> Iterator[str]:
    """A table that is too wide: a paragraph a row, without what does not apply."""
    _, *names = table.header
    for first, *words in table.rows:
        yield one_line(first)
        for name, word in zip(names, words, strict=True):
            if word != "-":
                yield f"  {name}: {one_line(word)}"


def _aligned(table: Columns) -> Iterator[str]:
    words = [[one_line(word) for word in row] for row in (table.header, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*words, strict=True)]
    for row in words:
        yield "  ".join(w.ljust(width) for w, width in zip(row, widths, strict=True)).rstrip()


_COLORS = {
    "native": "green",
    "patch": "cyan",
    "iface": "yellow",
    "interface": "yellow",
    "unsupported": "red",
    "yes": "green",
    "no": "red",
    "patched": "green",
    "modified": "red",
    "missing": "red",
    "passed": "green",
    "failed": "red",
    "not run": "yellow",
    "error": "red",
    "warning": "yellow",
}
