"""``make test-pythons``: the tests on every Python from 3.10 to 3.14 that this machine has.

Each Python gets an environment of its own, ``.venv-3.X``. What takes long and depends little on the
Python is left out, and said; ``make test`` runs it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
RELEASES = ("0.11.0", "0.17.1", "0.33.0")
"""The first and the last to patch, and the last native one."""

FEWEST = 2


@dataclass(frozen=True)
class Outcome:
    """What the tests did on one Python.

    Attributes:
        python: Its version in full.
        passed: Whether every test that ran passed.
        summary: pytest's closing line, or what went wrong before the tests.
        seconds: How long it took, the environment included.
    """

    python: str
    passed: bool
    summary: str
    seconds: float


def main(arguments: list[str]) -> int:
    """Run the tests on the versions named, or on all; 0 if each Python that was found passed."""
    chosen = [v for v in VERSIONS if v in arguments] if arguments else list(VERSIONS)
    if len(chosen) < len(arguments):
        print(f"there are {', '.join(VERSIONS)}", file=sys.stderr)
        return 2
    print(
        f"Left out here, and run by make test: releases of vLLM other than {', '.join(RELEASES)},\n"
        "where a test is about one release; what was tried to make it lose a file (make safety).\n"
        "Left out by both: real vLLM (make test-runtime)."
    )
    outcomes: dict[str, Outcome | None] = {}
    for version in chosen:
        python = find_python(version)
        outcomes[version] = None if python is None else run_tests(version, python)
    print()
    for version, outcome in outcomes.items():
        if outcome is None:
            print(f"Python {version}: not on this machine")
        else:
            verdict = "passed" if outcome.passed else "failed"
            print(f"Python {outcome.python}: {verdict}: {outcome.summary}")
    found = [outcome for outcome in outcomes.values() if outcome is not None]
    if len(found) < min(FEWEST, len(chosen)):
        print(f"only {len(found)} of these Pythons found; {FEWEST} are wanted", file=sys.stderr)
        return 1
    return 0 if all(outcome.passed for outcome in found) else 1


def find_python(version: str) -> str | None:
    """The interpreter of a version, on PATH, of uv, or of pyenv; None if there is none."""
    done = _uv(
        "python", "find", "--system", "--no-python-downloads", version, environment=_with_pyenv()
    )
    return done.stdout.strip() or None if done.returncode == 0 else None


def run_tests(version: str, python: str) -> Outcome:
    """The tests on one Python, in an environment that is made or brought up to date for it."""
    began = time.monotonic()
    environment = ROOT / f".venv-{version}"
    for step in (
        ("venv", "--quiet", "--allow-existing", "--python", python, str(environment)),
        ("pip", "install", "--quiet", "--python", str(environment), "--editable", ".[test]"),
    ):
        done = _uv(*step)
        if done.returncode != 0:
            summary = (done.stderr.strip() or "uv failed").splitlines()[-1]
            return Outcome(version, False, summary, time.monotonic() - began)
    interpreter = environment / "bin" / "python"
    full = subprocess.run(
        [interpreter, "-c", "import platform; print(platform.python_version())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    print(f"\n== Python {full} ==", flush=True)
    command = [str(interpreter), "-m", "pytest", "--numprocesses", "auto", "--dist", "worksteal"]
    command += ["--quiet", "-m", "not safety", f"--releases={','.join(RELEASES)}"]
    last = "no output"
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    summary = re.sub(r"^=+ | =+$", "", last)
    return Outcome(full, tests.returncode == 0, summary, time.monotonic() - began)


def _uv(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("uv")), *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def _with_pyenv() -> dict[str, str]:
    """The environment with pyenv's Pythons on PATH, and not its shims, which stand for none."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    folders = [f for f in os.environ.get("PATH", "").split(os.pathsep) if f != f"{pyenv}/shims"]
    folders += [str(folder) for folder in sorted(pyenv.glob("versions/3.*/bin"))]
    return {**os.environ, "PATH": os.pathsep.join(folders)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
