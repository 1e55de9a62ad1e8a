"""How a command ends: its report or its error is printed, and the exit code says how it went.

What the streams refuse (closed, full, nobody reads them) does not change what was done. The exit
code of a command that wrote is about that; one that only tells, and cannot, did not succeed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
from functools import partial
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from vllm_eagle3_patch.ground.errors import NotWritableError, PatchError
from vllm_eagle3_patch.ground.text import one_line
from vllm_eagle3_patch.output.blocks import print_diff
from vllm_eagle3_patch.output.report import print_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType
    from typing import TextIO

    from vllm_eagle3_patch.commands.report import Report

INTERNAL_ERROR = 70
INTERRUPTED = 130
_ENDING = (signal.SIGHUP, signal.SIGTERM)  # a lost connection, and what asks it to end

_PROGRAM = "vllm-eagle3-patch"
_WRITING = ("apply", "revert")
_UNHARMED = "no file was left half-changed"


class Ending(NamedTuple):
    """How a command ended.

    Attributes:
        document: Makes its JSON document.
        show: Prints it for a person.
        for_stderr: Whether a person gets it on standard error, as standard output is for a program.
    """

    exit_code: int
    document: Callable[[], dict[str, Any]]
    show: Callable[[], None]
    for_stderr: bool = False

    @classmethod
    def of(cls, report: Report) -> Ending:
        """Of a command that made a report; of ``diff`` only a diff goes to standard output."""
        if report.command == "diff" and report.diff is not None:
            return cls(report.exit_code, report.document, partial(print_diff, report.diff))
        show = partial(print_report, report)
        return cls(report.exit_code, report.document, show, for_stderr=report.command == "diff")


class EndedBySignalError(KeyboardInterrupt):
    """The system asks us to end: that is undone and tidied up as an interruption is."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


@contextlib.contextmanager
def _raising_signals() -> Iterator[None]:
    """Let the signals that would end us at once raise instead, the first of them only.

    One that is ignored, as under ``nohup``, stays so.
    """

    def end(number: int, _: FrameType | None) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise EndedBySignalError(number)

    before: list[signal.Signals] = []
    try:
        with contextlib.suppress(ValueError):  # Only the main thread may, and only it is told.
            for number in _ENDING:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, end)
                    before.append(number)
        yield
    finally:
        for number in before:
            signal.signal(number, signal.SIG_DFL)


def run_to_end(
    run: Callable[[], Ending], *, command: str, as_json: bool, debug: bool, dry_run: bool = False
) -> NoReturn:
    """Run a command, print how it ended, and exit with its code."""

    def print_problem(code: int, name: str, message: str, hint: str, **more: object) -> None:
        if as_json:
            _print_problem(command, code, name, message, hint, dry_run=dry_run, **more)

    try:
        with _raising_signals():
            ending = run()
        code = ending.exit_code
        wrote = command in _WRITING and not dry_run
        if as_json:
            code = _print_json(ending.document(), code, wrote=wrote)
        elif ending.for_stderr:
            _tell(ending.show)
        else:
            code = _print(ending.show, code, wrote=wrote)
    except PatchError as error:
        code = error.exit_code
        if debug:
            _tell_traceback()
        print_problem(code, error.code, error.message, error.hint, **error.document)
        _tell_line(f"error: {one_line(error.message)}\n  {one_line(error.hint)}")
    except KeyboardInterrupt as interruption:
        code = getattr(interruption, "exit_code", INTERRUPTED)
        print_problem(code, "interrupted-by-user", f"interrupted; {_UNHARMED}", "run it again")
        _tell_line(f"interrupted; {_UNHARMED}")
    except click.ClickException:
        raise
    except Exception as error:
        code = INTERNAL_ERROR
        message = one_line(f"internal error: {type(error).__name__}: {error}")
        print_problem(code, "internal-error", message, "run it with --debug and report it")
        if debug:
            _tell_traceback()
        _tell_line(f"error: {message}\n  run it with --debug and report it")
    sys.exit(code)


def end_of_usage_error(error: click.ClickException, given: Sequence[str]) -> int:
    """Say what is wrong with the command line, in JSON too where that was asked for."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    if "--json" in given or _asked_for_json_by_environment(context):
        command = context.info_name if context is not None and context.parent is not None else None
        see = f"see {_PROGRAM} {command} --help" if command else f"see {_PROGRAM} --help"
        message = one_line(error.format_message())
        _print_problem(command or _PROGRAM, error.exit_code, "usage", message, see)
    usage = ""
    if context is not None:
        usage = f"{context.get_usage()}\nTry '{context.command_path} --help' for help.\n\n"
    # As click shows it, but for what the message quotes of the user's own words.
    _tell_line(f"{_lines(usage)}Error: {one_line(error.format_message())}")
    return error.exit_code


def end_of_abort(given: Sequence[str]) -> int:
    """Say that the user interrupted it before a command began."""
    if "--json" in given:
        message = f"interrupted; {_UNHARMED}"
        _print_problem(_PROGRAM, INTERRUPTED, "interrupted-by-user", message, "run it again")
    _tell_line(f"interrupted; {_UNHARMED}")
    return INTERRUPTED


def end_of_unwritten_output(error: OSError, exit_code: int, *, wrote: bool = False) -> int:
    """Tell on standard error why standard output lacks something, unless its reader left.

    Args:
        error: What the system said.
        exit_code: How the command ended.
        wrote: Whether that says what became of files.

    Returns:
        How the program ends.
    """
    _drop(sys.stdout)
    if error.errno == errno.EPIPE:
        return exit_code
    why = error.strerror or str(error)
    _tell_line(
        f"error: cannot write the report: {why}\n"
        f"  what was asked for ended with exit code {exit_code} all the same"
    )
    return exit_code if wrote else exit_code or NotWritableError.exit_code


def _asked_for_json_by_environment(context: click.Context | None) -> bool:
    if context is None or context.auto_envvar_prefix is None:
        return False
    try:
        value = os.environ.get(f"{context.auto_envvar_prefix}_JSON", "")
        return bool(value) and bool(click.BOOL.convert(value, None, None))
    except click.UsageError:
        return False  # The usage error told is then about this very value.


def _print_problem(
    command: str,
    exit_code: int,
    code: str,
    message: str,
    hint: str,
    *,
    dry_run: bool = False,
    **more: object,
) -> None:
    from vllm_eagle3_patch.assess.assessment import Problem
    from vllm_eagle3_patch.commands.report import Report

    problems = (Problem(code, message, hint),)
    report = Report(command, exit_code, problems=problems, dry_run=dry_run)
    _print_json({**report.document(), **more}, exit_code)


def _print_json(document: dict[str, Any], exit_code: int, *, wrote: bool = False) -> int:
    """One JSON document on standard output; paths that are not UTF-8 stay escaped."""
    text = json.dumps(document, indent=2, ensure_ascii=True)
    return _print(lambda: sys.stdout.write(f"{text}\n"), exit_code, wrote=wrote)


def _print(write: Callable[[], object], exit_code: int, *, wrote: bool = False) -> int:
    """Write to standard output; returns the exit code (see ``end_of_unwritten_output``)."""
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        write()
        sys.stdout.flush()
    except OSError as error:
        return end_of_unwritten_output(error, exit_code, wrote=wrote)
    return exit_code


def _tell(write: Callable[[], object]) -> None:
    """Write to standard error, as far as there is one."""
    if sys.stderr is None:
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            write()
        sys.stderr.flush()
    except OSError:
        _drop(sys.stderr)  # There is nowhere left to say so.


def _tell_line(text: str) -> None:
    _tell(lambda: sys.stderr.write(f"{text}\n"))


def _tell_traceback() -> None:
    """Show the error that is being handled: it may quote what files hold."""
    import traceback

    _tell_line(_lines(traceback.format_exc().rstrip()))


def _lines(text: str) -> str:
    """Several lines as any terminal can show them, whatever they quote."""
    return "\n".join("\t".join(map(one_line, line.split("\t"))) for line in text.split("\n"))


def _drop(stream: TextIO | None) -> None:
    """Let what a stream still holds go nowhere: Python would fail on it again at its end."""
    if stream is None:
        return
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return  # It is not one of the system's, so it can refuse nothing.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
