"""Running a test's steps where mounts of its own are seen by nobody else."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def mount(*arguments: object) -> None:
    """Mount something; only in a namespace of one's own."""
    subprocess.run(["mount", *map(str, arguments)], check=True)


def in_private(steps: Callable[[Path], None], folder: Path) -> None:
    """Call a function of a test module in a process whose mounts end with it.

    Skips the test where the system refuses that.
    """
    module = Path(inspect.getfile(steps)).stem
    script = (
        f"import sys, pathlib, {module} as steps\n"
        f"steps.{steps.__name__}(pathlib.Path(sys.argv[1]))\n"
    )
    path = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        tried = subprocess.run(
            ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", folder],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("there is no program unshare for mounts of one's own")
    if tried.returncode != 0:
        pytest.skip(f"mounts of one's own are refused here: {tried.stderr.strip()}")
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", script, folder],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
