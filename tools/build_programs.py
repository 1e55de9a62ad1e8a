"""Builds the single-file programs: one a platform tag, each for every Python that is supported.

A target host has some Python, and LibCST is compiled for each, so a file holds the wheels of all
of them; pex takes those that fit when it starts. Nothing is compiled here: only wheels are taken.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.tags import compatible_tags, cpython_tags

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MINORS = (10, 11, 12, 13, 14)
"""The Pythons 3.x that a program runs on."""

GLIBC = 28
"""The oldest glibc, 2.x, that LibCST's wheels are built for."""

OLDEST_TAG = 17
MACHINES = ("x86_64", "aarch64")


def program_name(version: str, machine: str) -> str:
    """Returns the file name of a program, which ends with its platform tag."""
    return f"vllm-eagle3-patch-{version}-manylinux_2_{GLIBC}_{machine}.pyz"


def platform(machine: str, minor: int) -> dict[str, object]:
    """Returns pex's description of a CPython on a Linux machine: its tags and its markers."""
    tags = [f"manylinux_2_{number}_{machine}" for number in range(GLIBC, OLDEST_TAG - 1, -1)]
    tags += [f"manylinux2014_{machine}", f"linux_{machine}"]
    python = (3, minor)
    accepted = [*cpython_tags(python, platforms=tags)]
    accepted += compatible_tags(python, f"cp3{minor}", tags)
    return {
        "path": None,
        "compatible_tags": [str(tag) for tag in accepted],
        "marker_environment": {
            "implementation_name": "cpython",
            "implementation_version": f"3.{minor}.0",
            "os_name": "posix",
            "platform_machine": machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"3.{minor}.0",
            "python_version": f"3.{minor}",
            "sys_platform": "linux",
        },
    }


def build(wheel: Path, folder: Path) -> Iterator[Path]:
    """Builds the programs of a wheel of ours into a folder, and returns each.

    Raises:
        subprocess.CalledProcessError: pex failed, and has said why.
    """
    version = wheel.name.split("-")[1]
    for machine in MACHINES:
        program = folder / program_name(version, machine)
        with tempfile.TemporaryDirectory() as temporary:
            platforms = []
            for minor in MINORS:
                described = Path(temporary) / f"cp3{minor}.json"
                described.write_text(json.dumps(platform(machine, minor)), encoding="utf-8")
                platforms.append(f"--complete-platform={described}")
            subprocess.run(
                [
                    *(sys.executable, "-m", "pex", *platforms, "--no-build", "--use-pip-config"),
                    # What runs the program may be the interpreter that has vLLM: `check` looks
                    # there first, so its own packages stay visible, after those of the program.
                    "--inherit-path=fallback",
                    *("--no-compile", "--python-shebang=/usr/bin/env python3"),
                    *("--script=vllm-eagle3-patch", f"--output-file={program}", str(wheel)),
                ],
                check=True,
            )
        yield program


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.build_programs",
        description="Builds the single-file programs beside the one wheel in a folder.",
    )
    parser.add_argument("folder", type=Path, help="such as dist")
    folder = parser.parse_args(arguments).folder
    wheels = sorted(folder.glob("vllm_eagle3_patch-*.whl"))
    if len(wheels) != 1:
        print(f"error: {folder} holds {len(wheels)} wheels of ours, not one", file=sys.stderr)
        return 1
    for program in build(wheels[0], folder):
        print(f"{program}: {program.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
