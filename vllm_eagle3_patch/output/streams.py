"""What is no table: JSON, an error, and progress while something takes long."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from vllm_eagle3_patch.ground.errors import PatchError
from vllm_eagle3_patch.ground.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def print_json(document: Any) -> None:
    """One JSON document on standard output; paths that are not UTF-8 stay escaped."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=True) + "\n")


def print_error(error: PatchError) -> None:
    """One line of what is wrong, one line of what to do."""
    sys.stderr.write(f"error: {one_line(error.message)}\n  {one_line(error.hint)}\n")


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Tell on standard error what takes long: with a spinner on a terminal, else a plain line."""
    stream = sys.stderr
    if stream is not None and stream.isatty() and not os.environ.get("NO_COLOR"):
        yield from _spinner()
        return

    def tell(text: str) -> None:
        with suppress(OSError):  # Who does not read it loses nothing.
            if stream is not None:
                stream.write(f"{one_line(text)}\n")
                stream.flush()

    yield tell


def _spinner() -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.text import Text

    status = Console(stderr=True, highlight=False).status("")

    def tell(text: str) -> None:
        status.update(Text(one_line(text)))
        status.start()

    try:
        yield tell
    finally:
        with suppress(OSError):  # The terminal may be gone.
            status.stop()
