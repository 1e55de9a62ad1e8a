"""Asking another Python interpreter what ``import vllm`` would give there."""

import contextlib
import json
import os
import re
import secrets
import selectors
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm_eagle3_patch.errors import VllmNotFoundError
from vllm_eagle3_patch.site_folder import (
    PACKAGE,
    Lookup,
    absolute,
    one_line,
    shell_word,
    unique,
    unreadable_is_not_found,
)

OLDEST_PYTHON = (3, 9)
_OUTPUT_LIMIT = 4 * 1024 * 1024
_HINT = "name the interpreter that runs the server, or its venv folder, with --python PATH"


@unreadable_is_not_found()
def interpreter_at(path: Path, environ: Mapping[str, str]) -> Path:
    """The interpreter that a user means by a path: itself, a venv's folder, a program's name.

    Symbolic links are kept: a venv's interpreter is one.

    Raises:
        VllmNotFoundError: There is nothing that can be run.
    """
    if len(path.parts) == 1 and not path.is_absolute() and not os.path.lexists(path):
        return program_on_path(os.fspath(path), environ)
    path = absolute(path)
    if path.is_dir():
        for name in ("python", "python3"):
            if os.path.lexists(path / "bin" / name):
                path = path / "bin" / name
                break
        else:
            raise VllmNotFoundError(
                f"no interpreter bin/python in {one_line(path)}",
                f"to act on this folder: --site-packages {shell_word(path)}"
                if (path / PACKAGE).is_dir()
                else _HINT,
            )
    if not path.exists():
        if path.is_symlink():
            target = one_line(path.readlink())
            raise VllmNotFoundError(
                f"{one_line(path)} is a broken link to {target}",
                "create that environment again, or name another interpreter with --python PATH",
            )
        raise VllmNotFoundError(f"no interpreter {one_line(path)}", _HINT)
    return path


def program_on_path(name: str, environ: Mapping[str, str]) -> Path:
    """The program that a shell would start.

    Raises:
        VllmNotFoundError: There is none.
    """
    found = shutil.which(name, path=environ.get("PATH", os.defpath))
    if found is None:
        raise VllmNotFoundError(f"no program {one_line(name)} on PATH", _HINT)
    return absolute(Path(found))


def interpreter_of_program(program: Path, environ: Mapping[str, str]) -> Path:
    """The interpreter that a console script starts with.

    Raises:
        VllmNotFoundError: Its first lines name no Python.
    """
    try:
        with program.open("rb") as file:
            first, second = (os.fsdecode(file.readline(4096)).strip() for _ in range(2))
        words = shlex.split(first.removeprefix("#!")) if first.startswith("#!") else []
        if words and Path(words[0]).name == "sh" and second.startswith("'''exec'"):
            # pip and uv write this where a path is too long for the first line, or holds a blank.
            if "dirname" in second:  # uv's relocatable environments
                name = re.search(r"/'?(python[\w.]*)", second)
                words = [str(program.resolve().parent / name[1])] if name else []
            else:
                words = shlex.split(second)[1:]
    except (OSError, ValueError) as error:
        raise VllmNotFoundError(
            f"cannot read {one_line(program)}: {one_line(error)}", _HINT
        ) from error
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    if not words or not re.match(r"python|pypy", Path(words[0]).name):
        raise VllmNotFoundError(f"{one_line(program)} names no Python in its first line", _HINT)
    return interpreter_at(Path(words[0]), environ)


def environment_for(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that a server started here would have, for a process in another folder."""
    environment = {**environ, "PYTHONDONTWRITEBYTECODE": "1"}
    entries = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if entries:
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, entries))
    if "PWD" in environ:
        environment.setdefault("PYENV_DIR", environ["PWD"])  # pyenv chooses by folder
    return environment


def ask(python: Path, environ: Mapping[str, str], timeout: float) -> Lookup:
    """Ask an interpreter where it would import vLLM from; vLLM is not imported.

    Args:
        python: The interpreter, as the user would call it.
        environ: The environment that the server would have.
        timeout: Seconds to wait for an answer.

    Raises:
        VllmNotFoundError: It cannot be run, does not answer, or is too old.
    """
    nonce = secrets.token_hex(16)
    begin, end = f"begin-{nonce}".encode(), f"end-{nonce}".encode()
    source = Path(__file__).with_name("probe.py").read_text(encoding="ascii")
    command = [os.fspath(python), "-B", "-c", source, nonce]
    output = _run(command, environment_for(environ), end, timeout)
    document = json.loads(output.rpartition(begin)[2].rpartition(end)[0])
    version = tuple(document["version"])
    if version < OLDEST_PYTHON:
        raise VllmNotFoundError(
            f"{one_line(python)} is Python {'.'.join(map(str, version))}, too old for vLLM", _HINT
        )
    if document["error"] is not None:
        raise VllmNotFoundError(
            f"{one_line(python)} cannot import vllm: {one_line(document['error'])}",
            f"see what is in the way: {shell_word(python)} -c 'import vllm'",
        )
    package = None if document["package"] is None else _as_path(document["package"])
    candidates = map(_as_path, document["candidates"])
    return Lookup(
        package=package,
        remnants=tuple(map(_as_path, document["remnants"])),
        others=tuple(unique([*([package] if package else []), *candidates])[1:]),
        path=tuple(map(_as_path, document["path"])),
    )


def _as_path(text: str) -> Path:
    return Path(os.fsdecode(text.encode("latin-1")))


@contextlib.contextmanager
def _empty_folder() -> Iterator[str]:
    try:
        folder = tempfile.TemporaryDirectory(prefix="vllm-eagle3-patch-")
    except OSError:
        yield "/"  # a read-only system: any folder does, as none is on the path
    else:
        with folder as name:
            yield name


def _run(command: list[str], environment: dict[str, str], end: bytes, timeout: float) -> bytes:
    """Run until ``end`` was printed, and return the standard output."""
    name = one_line(command[0])
    with _empty_folder() as folder:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise VllmNotFoundError(f"cannot run {name}: {error.strerror}", _HINT) from error
        with process:
            try:
                return _read_until(process, end, time.monotonic() + timeout, name)
            except TimeoutError as error:
                raise VllmNotFoundError(f"{name} gave no answer in {timeout:g} s", _HINT) from error
            finally:
                if process.returncode is None:
                    # The whole group: a wrapper's child would hold the pipes open.
                    os.killpg(process.pid, signal.SIGKILL)


def _read_until(process: subprocess.Popen[bytes], end: bytes, deadline: float, name: str) -> bytes:
    output, complaint = bytearray(), b""
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            for key, _ in selector.select(remaining):
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stderr:
                    complaint = (complaint + chunk)[-4096:]
                else:
                    output += chunk
                    if end in output[-len(chunk) - len(end) :]:
                        return bytes(output)
                    if len(output) > _OUTPUT_LIMIT:
                        raise VllmNotFoundError(f"{name} does not answer as Python does", _HINT)
    try:
        code = process.wait(max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired as error:
        raise TimeoutError from error
    if code == 0:
        raise VllmNotFoundError(f"{name} does not answer as Python does", _HINT)
    how = f"exited with code {code}" if code > 0 else f"was killed by signal {-code}"
    lines = complaint.decode(errors="replace").strip().splitlines()
    why = f": {one_line(lines[-1].strip())}" if lines else ""
    raise VllmNotFoundError(f"{name} {how} when asked for vllm{why}", _HINT)
