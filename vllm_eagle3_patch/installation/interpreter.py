"""Running a script of ours in another Python interpreter, first of all to find its vLLM."""

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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_eagle3_patch.ground.errors import VllmNotFoundError
from vllm_eagle3_patch.ground.text import one_line, shell_word
from vllm_eagle3_patch.installation.site_packages import (
    PACKAGE,
    Lookup,
    absolute,
    unique,
    unreadable_is_not_found,
)

OLDEST_PYTHON = (3, 9)
_PROBE = Path(__file__).with_name("probe.py")
_NO_PYTHON = "does not answer as Python does"
_NO_FOLDER = "/"  # on a read-only system: any folder does, as none is on the path
_PAUSE, _TRIES = 0.01, 50  # seconds; half a second in all
_HINT = "name the interpreter that runs the server, or its venv folder, with --python PATH"


@dataclass(frozen=True)
class Question:
    """What an interpreter is asked, and how long.

    Attributes:
        script: The file that it runs.
        purpose: When it happens, in the words of an error, such as ``when asked for vllm``.
        timeout: Seconds to wait for the answer.
        hint: What a user can do if there is none.
        largest_output: Bytes; more is not an answer.
        private: Environment variables that are to name a folder in the temporary folder.
        code: The problem code of a failure, if it has one of its own.
        timeout_code: The same where there was no answer in time.
        timeout_hint: What a user can do then, if that is something else.
    """

    script: Path
    purpose: str
    timeout: float
    hint: str = _HINT
    largest_output: int = 4 * 1024 * 1024
    private: tuple[str, ...] = ()
    code: str | None = None
    timeout_code: str | None = None
    timeout_hint: str | None = None

    def failed(self, message: str) -> VllmNotFoundError:
        """The error for an interpreter that gives no answer."""
        return VllmNotFoundError(message, self.hint, code=self.code)

    @contextlib.contextmanager
    def understood(self, python: Path) -> Iterator[None]:
        """Turn what is wrong with an answer, whoever wrote it, into the error for none.

        Raises:
            VllmNotFoundError: The answer is not what our script would write.
        """
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self.failed(f"{one_line(python)} {_NO_PYTHON}") from error


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
        if not os.path.isfile(program):  # noqa: PTH113  a pipe would be waited for
            raise OSError("it is not a file")
        with program.open("rb") as file:
            first, second = (os.fsdecode(file.readline(4096)).strip() for _ in range(2))
        words = shlex.split(first.removeprefix("#!")) if first.startswith("#!") else []
        if words and Path(words[0]).name == "sh" and second.startswith("'''exec'"):
            # pip and uv write this where a path is too long for the first line, or holds a blank.
            if "dirname" in second:  # uv's relocatable environments
                name = re.search(r"/'?(python[\w.]*)", second)
                words = [str(Path(os.path.realpath(program)).parent / name[1])] if name else []
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
    question = Question(_PROBE, "when asked for vllm", timeout)
    document = answer_to(question, python, environ)
    with question.understood(python):
        version = tuple(map(int, document["version"]))
        error = document["error"]
        package = None if document["package"] is None else as_path(document["package"])
        candidates, remnants, path = (
            tuple(map(as_path, document[key])) for key in ("candidates", "remnants", "path")
        )
    if version < OLDEST_PYTHON:
        raise VllmNotFoundError(
            f"{one_line(python)} is Python {'.'.join(map(str, version))}, too old for vLLM", _HINT
        )
    if error is not None:
        raise VllmNotFoundError(
            f"{one_line(python)} cannot import vllm: {one_line(error)}",
            f"see what is in the way: {shell_word(python)} -c 'import vllm'",
        )
    return Lookup(
        package=package,
        remnants=remnants,
        others=tuple(unique([*([package] if package else []), *candidates])[1:]),
        path=path,
    )


def answer_to(
    question: Question, python: Path, environ: Mapping[str, str], *arguments: str
) -> dict[str, Any]:
    """Run one of our scripts in an interpreter, from an empty folder that is removed again.

    The script has a session of its own; whatever it started is killed with it, however this ends.

    Args:
        question: What to run.
        python: The interpreter, as the user would call it.
        environ: The environment that the server would have.
        *arguments: What the script is given.

    Returns:
        The JSON document that it wrote between its marks.

    Raises:
        VllmNotFoundError: It cannot be run or does not answer.
        NotWritableError: The temporary folder takes nothing more.
    """
    nonce = secrets.token_hex(16)
    begin, end = f"begin-{nonce}".encode(), f"end-{nonce}".encode()
    source = question.script.read_text(encoding="ascii")
    command = [os.fspath(python), "-B", "-c", source, nonce, *arguments]
    output = _run(command, environment_for(environ), end, question)
    with question.understood(python):
        document = json.loads(output.rpartition(begin)[2].rpartition(end)[0])
        if not isinstance(document, dict):
            raise TypeError("no object")
    return document


def as_path(text: str) -> Path:
    """A path as the scripts write it: its bytes, one character each.

    Raises:
        ValueError: No path can be written so.
    """
    if "\0" in text:
        raise ValueError("a path with a NUL byte")
    return Path(os.fsdecode(text.encode("latin-1")))


@contextlib.contextmanager
def _empty_folder() -> Iterator[str]:
    try:
        # What someone else still writes there does not change what was answered.
        folder = tempfile.TemporaryDirectory(
            prefix="vllm-eagle3-patch-", ignore_cleanup_errors=True
        )
    except OSError:
        yield _NO_FOLDER
    else:
        with folder as name:
            yield name


def _make_folders(places: Iterable[str]) -> None:
    from vllm_eagle3_patch.ground.os_errors import explained  # `check` needs none of it.

    with explained():
        for place in places:
            Path(place).mkdir()


def _run(command: list[str], environment: dict[str, str], end: bytes, question: Question) -> bytes:
    """Run until ``end`` was printed, and return the standard output."""
    name = one_line(command[0])
    with _empty_folder() as folder:
        private = {key: str(Path(folder, key.lower())) for key in question.private}
        if private and folder != _NO_FOLDER:
            _make_folders(private.values())
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**environment, **private},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise question.failed(f"cannot run {name}: {error.strerror}") from error
        with process:
            try:
                return _read_until(process, end, time.monotonic() + question.timeout, question)
            except TimeoutError as error:
                raise VllmNotFoundError(
                    f"{name} gave no answer in {question.timeout:g} s{_after(question)}",
                    question.timeout_hint or question.hint,
                    code=question.timeout_code,
                ) from error
            finally:
                _kill_group(process)


def _after(question: Question) -> str:
    return f" {question.purpose}" if question.timeout_code else ""


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started: a child would hold the pipes open, and live on.

    It was not waited for yet, so that its number cannot be another group's by now.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # The others end on their own time, and may write into the folder until they do.
    for _ in range(_TRIES):
        try:
            os.killpg(process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(_PAUSE)


def _read_until(
    process: subprocess.Popen[bytes], end: bytes, deadline: float, question: Question
) -> bytes:
    name = one_line(process.args[0])  # type: ignore[index]
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
                    if len(output) > question.largest_output:
                        raise question.failed(f"{name} {_NO_PYTHON}")
    code = _exit_code(process, deadline)
    if code == 0:
        silent = f"exited with code 0 and no answer{_after(question)}"
        how = silent if _after(question) else _NO_PYTHON
        raise question.failed(f"{name} {how}")
    how = f"exited with code {code}" if code > 0 else f"was killed by signal {-code}"
    lines = complaint.decode(errors="replace").strip().splitlines()
    why = f": {one_line(lines[-1].strip())}" if lines else ""
    raise question.failed(f"{name} {how} {question.purpose}{why}")


def _exit_code(process: subprocess.Popen[bytes], deadline: float) -> int:
    """How a process ended, negative for a signal; it is not reaped, see ``_kill_group``.

    Raises:
        TimeoutError: It has closed its streams and does not end.
    """
    while True:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(_PAUSE)
