"""Render: reports for people, with rich; without a terminal or with NO_COLOR plain text.

A report becomes a sequence of lines and tables; one function shows those on a terminal, another as
plain text, so that a command in a script need not import rich.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_eagle3_patch.installation.find import ACTIVE
from vllm_eagle3_patch.installation.site_packages import shell_word

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from vllm_eagle3_patch.assess.classify import Assessment, FileStatus, Problem
    from vllm_eagle3_patch.assess.model_facts import ModelFacts
    from vllm_eagle3_patch.commands.check_all import Everywhere
    from vllm_eagle3_patch.commands.report import Report
    from vllm_eagle3_patch.ground.errors import PatchError
    from vllm_eagle3_patch.ground.matrix import Release
    from vllm_eagle3_patch.verify.verification import Verification

_SHORT = {
    "DeepseekV2ForCausalLM": "V2",
    "DeepseekV3ForCausalLM": "V3,K2",
    "DeepseekV32ForCausalLM": "V3.2",
    "GlmMoeDsaForCausalLM": "GLM",
    "MistralLarge3ForCausalLM": "ML3",
    "KimiK25ForConditionalGeneration": "K2.5",
    "KimiVLForConditionalGeneration": "KimiVL",
    "DeepseekVLV2ForCausalLM": "VL2",
    "DeepseekOCRForCausalLM": "OCR",
    "DeepseekOCR2ForCausalLM": "OCR2",
    "UnlimitedOCRForCausalLM": "UOCR",
    "PixtralForConditionalGeneration": "ML3-VL",
    "Dots3NoteForCausalLM": "Dots3",
}

_CLOSING = {
    ("check", 0): "EAGLE-3 is ready for: {ready}.",
    ("check", 1): "To make EAGLE-3 ready for {candidates}:",
    ("apply", 0): "Done. To undo it:",
    ("apply", 1): "Nothing was written. The same command without --dry-run or --diff applies this.",
    ("revert", 0): "Every file is as it was before.",
    ("revert", 1): "Nothing was written. The same command without --dry-run reverts these.",
    ("verify", 0): "Proven by running it, for: {proven}.",
    ("verify", 1): "To make EAGLE-3 ready for {candidates}:",
    ("verify", 3): "Nothing is proven: no model could be run.",
    ("verify", 6): "What should work does not: see what failed above.",
}

_NOTHING = {
    "apply": "Nothing to do: what was selected is in place already.",
    "revert": "Nothing to revert.",
}

_NEXT = {("check", 1): "apply", ("verify", 1): "apply", ("apply", 0): "revert"}


def print_json(document: Any) -> None:
    """One JSON document on standard output; paths that are not UTF-8 stay escaped."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=True) + "\n")


def print_diff(text: str) -> None:
    """A diff on standard output, byte for byte; a terminal is shown what it would obey."""
    if sys.stdout.isatty():
        for line in text.removesuffix("\n").split("\n"):
            sys.stdout.write("\t".join(map(printable, line.split("\t"))) + "\n")
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
    sys.stdout.buffer.flush()


def print_error(error: PatchError) -> None:
    """One line of what is wrong, one line of what to do."""
    sys.stderr.write(f"error: {printable(error.message)}\n  {printable(error.hint)}\n")


def printable(text: object) -> str:
    """One line that any terminal can show, whatever bytes a path holds."""
    shown = str(text).encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


class Line(NamedTuple):
    """One line of text; a command is never wrapped, so that it can be copied whole."""

    text: str
    bold: bool = False
    command: bool = False


class Columns(NamedTuple):
    """A table: names of columns, and rows of words; perhaps a narrower one with the same rows."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    narrow: Columns | None = None


class Diff(NamedTuple):
    """A unified diff, shown byte for byte."""

    text: str


Block = Line | Columns | Diff

_BLANK = Line("")


def print_report(report: Report) -> None:
    """A report as a person reads it."""
    _show(_report_blocks(report))


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
                stream.write(f"{printable(text)}\n")
                stream.flush()

    yield tell


def _spinner() -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.text import Text

    status = Console(stderr=True, highlight=False).status("")

    def tell(text: str) -> None:
        status.update(Text(printable(text)))
        status.start()

    try:
        yield tell
    finally:
        with suppress(OSError):  # The terminal may be gone.
            status.stop()


def print_matrix(releases: Sequence[Release]) -> None:
    """A row a release, a column a model."""
    _show(_matrix_blocks(releases))


def print_release(release: Release) -> None:
    """One release: its models, and its files with their pins."""
    _show(_release_blocks(release))


def print_blocks(blocks: Iterable[Block]) -> None:
    """Lines and tables that another module made."""
    _show(blocks)


def print_everywhere(found: Everywhere) -> None:
    """A row an installation, and what is wrong with those that could not be read."""
    _show(_everywhere_blocks(found))


def _everywhere_blocks(found: Everywhere) -> Iterator[Block]:
    if not found.reports:
        yield Line("No vLLM was found. To look elsewhere too: --search DIR")
        return
    header = ("version", "location", "interpreter", "state", "exit code")
    yield Columns(header, tuple(map(_everywhere_row, found.reports)))
    for report in found.reports:
        if report.installation is None or report.state is None:
            for problem in report.problems:
                yield Line(f"{printable(problem.code)}: {printable(problem.message)}")


def _everywhere_row(report: Report) -> tuple[str, ...]:
    installation = report.installation
    shown = ("-", "-", "-")
    if installation is not None:
        place = printable(installation.package)
        shown = (installation.version or "-", place, printable(installation.python or "-"))
    return (*shown, report.state or "error", str(report.exit_code))


def _show(blocks: Iterable[Block]) -> None:
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        _show_on_terminal(blocks)
    else:
        import shutil

        _show_plain(blocks, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)


def _show_on_terminal(blocks: Iterable[Block]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for block in blocks:
        match block:
            case Line(text, bold, command):
                style = "bold" if bold else ""
                console.print(Text(printable(text), style=style), soft_wrap=command)
            case Columns() if _fitting(block, console.width) is None:
                for line in _as_records(block):
                    console.print(Text(printable(line)))
            case Columns():
                header, rows = _fitting(block, console.width) or ((), ())
                table = Table(*header, box=None, pad_edge=False, header_style="bold")
                for row in rows:
                    table.add_row(*(Text(printable(w), _COLORS.get(w, "")) for w in row))
                console.print(table)
            case Diff(text):
                print_diff(text)


def _show_plain(blocks: Iterable[Block], width: int | None) -> None:
    for block in blocks:
        match block:
            case Line(text):
                sys.stdout.write(f"{printable(text)}\n")
            case Columns() if width is not None and _fitting(block, width) is None:
                for line in _as_records(block):
                    sys.stdout.write(f"{printable(line)}\n")
            case Columns():
                fitting = _fitting(block, width) if width is not None else None
                header, rows = fitting or (block.header, block.rows)
                for line in _aligned([header, *rows]):
                    sys.stdout.write(f"{line}\n")
            case Diff(text):
                print_diff(text)


def _width_of(table: Columns) -> int:
    """The columns of a terminal that a table needs."""
    return max(map(len, _aligned([table.header, *table.rows])))


def _fitting(
    table: Columns, width: int
) -> tuple[tuple[str, ...], Sequence[tuple[str, ...]]] | None:
    """The header and rows of a table, or of its narrower form, that fit a terminal."""
    for form in (table, table.narrow):
        if form is not None and _width_of(form) <= width:
            return form.header, form.rows
    return None


def _as_records(table: Columns) -> Iterator[str]:
    """A table that is too wide: a paragraph a row, without what does not apply."""
    _, *names = table.header
    for first, *words in table.rows:
        yield first
        for name, word in zip(names, words, strict=True):
            if word != "-":
                yield f"  {name}: {word}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    words = [[printable(word) for word in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*words, strict=True)]
    for row in words:
        yield "  ".join(w.ljust(width) for w, width in zip(row, widths, strict=True)).rstrip()


_COLORS = {
    "native": "green",
    "patch": "cyan",
    "iface": "yellow",
    "interface": "yellow",
    "unsupported": "red",
    "yes": "green",
    "no": "red",
    "patched": "green",
    "modified": "red",
    "missing": "red",
    "passed": "green",
    "failed": "red",
    "not run": "yellow",
    "error": "red",
    "warning": "yellow",
}


def _report_blocks(report: Report) -> Iterator[Block]:
    if report.installation is not None:
        yield from _installation_blocks(report)
    if report.assessment is not None and report.command != "verify":
        said_below = {problem.message for problem in report.problems}
        yield from _model_blocks(report.assessment, _facts(report), said_below)
        yield from _file_blocks(_files(report))
    for path in report.changed or ():
        verb = "would change" if report.dry_run else "changed"
        yield Line(f"{verb}: {path}")
    if report.diff:
        yield _BLANK
        yield Diff(report.diff)
    if report.verification is not None and report.assessment is not None:
        if report.changed:
            yield _BLANK
        yield from _verification_blocks(report.verification, report.assessment)
    yield from _problem_blocks(report)
    for note in report.notes:
        yield Line(f"note: {note}")
    yield from _closing(report)


_RESULTS = {True: "passed", False: "failed", None: "not run"}


def _verification_blocks(verification: Verification, assessment: Assessment) -> Iterator[Block]:
    """What was proven of each model, what failed that should not, and what could not be run."""
    from vllm_eagle3_patch.verify.verification import unexpected

    if not verification.models:
        return
    results = [(model, _RESULTS[model.ok]) for model in verification.models]
    yield Columns(
        ("model", "result", "proven", "failed"),
        tuple(
            (
                model.architecture,
                result,
                ", ".join(check.name for check in model.proven) or "-",
                ", ".join(check.name for check in model.failed) or "-",
            )
            for model, result in results
        ),
        narrow=Columns(
            ("model", "result", "proven"),
            tuple(
                (
                    model.architecture,
                    result,
                    f"{len(model.proven)} of {len(model.applicable)}",
                )
                for model, result in results
            ),
        ),
    )
    yield _BLANK
    failed: dict[str, list[str]] = {}
    for model, check in unexpected(verification, assessment):
        failed.setdefault(f"{check.name}: {check.detail}", []).append(model.architecture)
    not_run: dict[str, list[str]] = {}
    loaded = [model.architecture for model in verification.models if model.loaded]
    for model in verification.models:
        # What could not be imported has no other check that is worth a word.
        for check in model.checks if model.loaded else model.checks[:1]:
            if check.ok is None:
                not_run.setdefault(f"{check.name}: {check.detail}", []).append(model.architecture)
    for found, verbs in ((failed, ("failed", "failed")), (not_run, ("not run", "does not apply"))):
        for what, architectures in found.items():
            which = "" if architectures == loaded else f" ({', '.join(architectures)})"
            yield Line(f"{verbs[not what.startswith('import:')]}: {what}{which}")
    context = "a GPU context was made" if verification.gpu_context else "no GPU context was made"
    yield Line(
        f"took {verification.seconds:.1f} s, of which importing vLLM "
        f"{verification.import_seconds:.1f} s; {context}"
    )


def _closing(report: Report) -> Iterator[Line]:
    """What it comes to, and on a line of its own the command to type next."""
    if report.exit_code == 0 and not report.changed and report.command in _NOTHING:
        yield Line(_NOTHING[report.command], bold=True)
        return
    ending = (report.command, report.exit_code)
    if ending not in _CLOSING or report.assessment is None:
        return
    facts = _facts(report)
    models = report.verification.models if report.verification is not None else ()
    closing = _CLOSING[ending].format(
        proven=", ".join(m.architecture for m in models if m.ok),
        ready=", ".join(f.architecture for f in facts if f.ready) or "what was selected",
        candidates=", ".join(
            f.architecture for f in facts if f.architecture in report.candidates and not f.ready
        )
        or "what was selected",
    )
    yield Line(closing, bold=True)
    if ending in _NEXT:
        words = ["vllm-eagle3-patch", _NEXT[ending], *_where(report), *report.options]
        yield Line(f"  {' '.join(words)}", bold=True, command=True)


def _where(report: Report) -> tuple[str, ...]:
    """The option that leads to this installation again, unless none does as well."""
    installation = report.installation
    if installation is None:
        return ()
    encoding = sys.stdout.encoding or "utf-8"
    if installation.chosen_by == "--site-packages":
        return ("--site-packages", shell_word(installation.root, encoding))
    # A command that writes does not pass over an active environment, as check does.
    passed_over = any(skipped.partition(":")[0] in ACTIVE for skipped in installation.skipped)
    if installation.python is not None and (passed_over or installation.chosen_by == "--python"):
        return ("--python", shell_word(installation.python, encoding))
    return ()


def _installation_blocks(report: Report) -> Iterator[Block]:
    installation, assessment = report.installation, report.assessment
    assert installation is not None
    name = installation.distribution or "vllm"
    version = installation.version or "of unknown version"
    yield Line(f"{name} {version} in {installation.package}", bold=True)
    python = f", {installation.python}" if installation.python else ""
    yield Line(f"  chosen by {installation.chosen_by}{python}")
    for skipped in installation.skipped:
        yield Line(f"  passed over {skipped}")
    if assessment is not None and assessment.release is not None:
        release = assessment.release
        pinned = "every file is known" if assessment.pinned else "not every file is known"
        yield Line(f"  release {release.name} by content, {pinned}; support: {release.support}")
    elif assessment is not None:
        yield Line("  of no release in the matrix, by content")
    yield _BLANK


def _facts(report: Report) -> tuple[ModelFacts, ...]:
    """Of the models that were named, or of all if none was."""
    assert report.assessment is not None
    facts = report.assessment.facts
    return tuple(f for f in facts if f.architecture in report.named) if report.named else facts


def _model_blocks(
    assessment: Assessment, models: Sequence[ModelFacts], said_below: set[str]
) -> Iterator[Block]:
    if not models:
        return
    from vllm_eagle3_patch.assess.limit_messages import message
    from vllm_eagle3_patch.commands.report import patched_by, patches_in_place

    yield Columns(
        ("model", "model types", "ready", "missing", "patched by"),
        tuple(
            (
                facts.architecture,
                ", ".join(facts.model_types),
                "yes" if facts.ready else "no",
                ", ".join(facts.missing) or "-",
                ", ".join(patched_by(assessment, facts)) or "-",
            )
            for facts in models
        ),
    )
    yield _BLANK
    for reason in dict.fromkeys(facts.reason for facts in models if facts.reason):
        if reason not in said_below:
            yield Line(f"not possible: {reason}")
    limited: dict[str, list[str]] = {}
    possible = [facts for facts in models if facts.reason is None]
    for facts in possible:
        for code in facts.limits:
            limited.setdefault(code, []).append(facts.architecture)
    in_place = patches_in_place(assessment)
    for code, architectures in limited.items():
        everyone = len(architectures) == len(possible)
        which = "" if everyone else f" ({', '.join(architectures)})"
        yield Line(f"limit {code}{which}: {message(code, in_place)}")


def _files(report: Report) -> tuple[FileStatus, ...]:
    """Those that the named models need, and those in the way; all if no model was named."""
    assert report.assessment is not None
    files = report.assessment.files
    if not report.named:
        return files
    from vllm_eagle3_patch.ground.family import FAMILY

    named = [model for model in FAMILY if model.architecture in report.named]
    needed = {name for model in named for name in model.requires}
    of_others = {name for model in FAMILY for name in model.requires} - needed
    wrappers = {model.wrapper.path for model in FAMILY if model.wrapper is not None}
    wrappers -= {model.wrapper.path for model in named if model.wrapper is not None}
    return tuple(
        status
        for status in files
        if status.state in ("modified", "missing")
        or not (status.path in wrappers or (status.patches and of_others >= {*status.patches}))
    )


def _file_blocks(files: Sequence[FileStatus]) -> Iterator[Block]:
    if not files:
        return
    yield _BLANK
    yield Columns(
        ("file", "state", "patches"),
        tuple((status.path, status.state, ", ".join(status.patches) or "-") for status in files),
    )
    yield _BLANK


def _problem_blocks(report: Report) -> Iterator[Block]:
    """Each problem, and below those that ask for the same thing what to do."""
    by_hint: dict[str, list[Problem]] = {}
    for problem in report.problems:
        by_hint.setdefault(problem.hint, []).append(problem)
    for hint, problems in by_hint.items():
        for problem in dict.fromkeys(problems):
            yield Line(f"{problem.code}: {problem.message}")
        yield Line(f"  {hint}")


_SHORTEST = ("V2", "V3", "32", "GLM", "ML", "K2", "KV", "VL", "O", "O2", "UO", "MV", "D3")
"""The same columns for a terminal that is too narrow, where cells are first letters."""

_CELLS = {"native": "native", "patch": "patch", "interface": "iface", "unsupported": "no"}


def _matrix_blocks(releases: Sequence[Release]) -> Iterator[Block]:
    reasons: dict[str, list[str]] = {}
    rows = []
    for release in releases:
        support = {model.architecture: _CELLS[model.support] for model in release.models}
        rows.append((release.name, *(support.get(name, "-") for name in _SHORT)))
        for model in release.models:
            if model.reason is not None:
                reasons.setdefault(model.reason, []).append(release.name)
    letters = tuple((name, *(cell[:1] for cell in cells)) for name, *cells in rows)
    narrow = Columns(("release", *_SHORTEST), letters)
    yield Columns(("release", *_SHORT.values()), tuple(rows), narrow)
    yield _BLANK
    yield Line(f"columns: {', '.join(_SHORT)}")
    yield Line("native: vLLM has it. patch: apply makes it work. -: not shipped.")
    yield Line(
        "iface: the interface can be added (--interface-only), but the engine cannot use it."
    )
    for reason, names in reasons.items():
        first, last = names[0], names[-1]
        yield Line(f"{first} to {last}: {reason}" if first != last else f"{first}: {reason}")


def _release_blocks(release: Release) -> Iterator[Block]:
    yield Line(f"vLLM {release.name}: {release.support}", bold=True)
    yield Columns(
        ("model", "support", "patches", "limits once ready"),
        tuple(
            (
                model.architecture,
                model.support,
                ", ".join(model.missing) or "-",
                ", ".join(model.limits_patched) or "-",
            )
            for model in release.models
        ),
    )
    for reason in dict.fromkeys(model.reason for model in release.models if model.reason):
        yield Line(f"reason: {reason}")
    yield _BLANK
    yield Columns(
        ("file", "sha256 as published", "sha256 patched"),
        tuple(
            (path, pin.original, pin.patched if pin.patched != pin.original else "unchanged")
            for path, pin in release.files.items()
        ),
    )
