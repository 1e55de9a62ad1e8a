"""Write ``docs/man``: a page for the program and one for each command, from what --help shows."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vllm_eagle3_patch import __version__
from vllm_eagle3_patch.cli.program import cli

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "man"
README = ROOT / "README.md"
PROGRAM = "vllm-eagle3-patch"

FILES = (
    (
        ".vllm-eagle3-patch/",
        "Beside the package vllm: what apply changed, and the originals, which revert puts back. "
        "A README there says how to do that by hand.",
    ),
)


def pages() -> dict[str, str]:
    """Every page by its file name."""
    context = click.Context(cli, info_name=PROGRAM, **cli.context_settings)
    written = {f"{PROGRAM}.1": _program_page(context)}
    for name, command in cli.commands.items():
        inner = click.Context(command, info_name=name, parent=context)
        written[f"{PROGRAM}-{name}.1"] = _command_page(inner, name)
    return written


def _program_page(context: click.Context) -> str:
    what = "make EAGLE-3 work on the vLLM that is installed"
    lines = [*_head(PROGRAM, what), *_synopsis(context), *_description(context.command)]
    lines += _options(context)
    lines.append(".SH COMMANDS")
    for name, command in cli.commands.items():
        page = f"{_bold(f'{PROGRAM}-{name}')}(1)"
        lines += [".TP", page, _text(command.get_short_help_str(200))]
    lines += [".SH EXIT STATUS"]
    for code, meaning in exit_codes():
        lines += [".TP", _bold(code), _text(meaning)]
    lines += [
        ".SH ENVIRONMENT",
        ".TP",
        _bold("VLLM_EAGLE3_PATCH_<COMMAND>_<OPTION>"),
        "The value of a command's option that is not on the command line.",
        ".TP",
        _bold("VIRTUAL_ENV, CONDA_PREFIX"),
        _text("Where vLLM is looked for first, if neither --site-packages nor --python is given."),
        ".TP",
        _bold("NO_COLOR"),
        "Plain text on a terminal too.",
        ".SH FILES",
    ]
    for name, meaning in FILES:
        lines += [".TP", f"\\fI{_escaped(name)}\\fR", _text(meaning)]
    lines += [*_examples(context.command), *_see_also(f"{PROGRAM}-{name}" for name in cli.commands)]
    return "\n".join(lines) + "\n"


def _command_page(context: click.Context, name: str) -> str:
    command = context.command
    title = f"{PROGRAM}-{name}"
    what = command.get_short_help_str(200).rstrip(".")
    lines = [*_head(title, what[:1].lower() + what[1:]), *_synopsis(context)]
    lines += [*_description(command), *_options(context), *_exit_status(command)]
    with_value = [p for p in command.params if isinstance(p, click.Option) and p.name != "help"]
    if with_value:
        prefix = f"VLLM_EAGLE3_PATCH_{name.upper()}_"
        example = f"{prefix}{str(with_value[0].name).upper()}"
        lines += [
            ".SH ENVIRONMENT",
            f"Each option can be set by a variable: {_bold(example)} is that of "
            f"{_escaped(with_value[0].opts[0])}.",
        ]
    lines += [*_examples(command), *_see_also([PROGRAM])]
    return "\n".join(lines) + "\n"


def exit_codes() -> list[tuple[str, str]]:
    """The rows of the README's table of exit codes."""
    _, _, section = README.read_text(encoding="utf-8").partition("\n## Exit codes\n")
    section, _, _ = section.partition("\n## ")
    rows = re.findall(r"^\| ([\d, ]+) \| (.+) \|$", section, flags=re.MULTILINE)
    assert rows, "README.md has no table of exit codes"
    return rows


def _head(title: str, what: str) -> list[str]:
    return [
        ".\\\" Written by `make docs` from the program's help; do not edit.",
        f'.TH {_escaped(title.upper())} 1 "" "{_escaped(PROGRAM)} {__version__}" "User Commands"',
        ".SH NAME",
        f"{_escaped(title)} \\- {_escaped(what)}",
    ]


def _synopsis(context: click.Context) -> list[str]:
    pieces = " ".join(context.command.collect_usage_pieces(context))
    return [".SH SYNOPSIS", f"{_bold(context.command_path)} {_escaped(pieces)}"]


def _paragraphs(text: str | None) -> list[str]:
    return re.split(r"\n\s*\n", inspect.cleandoc(text or "").strip())


def _is_about_exit_codes(paragraph: str) -> bool:
    return paragraph.startswith("Exit code:")


def _description(command: click.Command) -> list[str]:
    lines = [".SH DESCRIPTION"]
    for paragraph in _paragraphs(command.help):
        if not _is_about_exit_codes(paragraph):
            lines += [".PP", _text(paragraph)]
    return lines


def _exit_status(command: click.Command) -> list[str]:
    lines = []
    for paragraph in _paragraphs(command.help):
        if _is_about_exit_codes(paragraph):
            lines += [".SH EXIT STATUS", _text(paragraph.removeprefix("Exit code:"))]
    return lines


def _options(context: click.Context) -> list[str]:
    lines = [".SH OPTIONS"]
    for parameter in context.command.get_params(context):
        record = parameter.get_help_record(context)
        if not isinstance(parameter, click.Option) or record is None:
            continue
        names = ", ".join(sorted(parameter.opts, key=len))
        value = record[0].removeprefix(names).strip()
        shown = f"{_bold(names)} \\fI{_escaped(value)}\\fR" if value else _bold(names)
        lines += [".TP", shown, _text(record[1])]
    return lines


def _examples(command: click.Command) -> list[str]:
    title, *examples = (command.epilog or "").removeprefix("\b\n").splitlines()
    heading = title.rstrip(":").upper()
    return [f".SH {heading}", ".nf", *(_line(line[2:]) for line in examples), ".fi"]


def _see_also(names: Iterable[str]) -> list[str]:
    listed = ",\n".join(f"{_bold(name)}(1)" for name in names)
    return [".SH SEE ALSO", listed]


def _bold(text: str) -> str:
    return f"\\fB{_escaped(text)}\\fR"


def _text(text: str) -> str:
    """Running text: one line, words in backquotes bold."""
    escaped = _line(" ".join(text.split()))
    return re.sub(r"`([^`]+)`", r"\\fB\1\\fR", escaped)


def _line(text: str) -> str:
    """One line of text; a dot or quote at its beginning would be a request."""
    escaped = _escaped(text)
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def _escaped(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-")


def main() -> int:
    """Write the pages, and remove those of commands that are gone."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    written = pages()
    for stale in FOLDER.glob("*.1"):
        if stale.name not in written:
            stale.unlink()
    for name, page in written.items():
        (FOLDER / name).write_text(page, encoding="utf-8")
        print(FOLDER / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
