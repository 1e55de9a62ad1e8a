"""Whether this tool has left anything beside a package: the cheap question, asked first."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PREFIX = ".vllm-eagle3-patch"
"""What the names of our state folder and of our lock begin with."""


def has_traces(root: Path) -> bool:
    """Whether there is a state folder or a lock of ours, whole or not."""
    try:
        return any(name.startswith(PREFIX) for name in os.listdir(root))  # noqa: PTH208  no Path needed
    except OSError:
        return True  # Whoever opens it next says what is wrong.
