"""What is going on, on standard error, while something takes long."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from vllm_eagle3_patch.ground.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """What tells it: with a spinner on a terminal, else a plain line each time."""
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
