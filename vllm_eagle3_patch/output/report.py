"""A command's report as a person reads it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from vllm_eagle3_patch.assess.grounds import UNPROVEN
from vllm_eagle3_patch.ground.text import shell_word
from vllm_eagle3_patch.installation.find import ACTIVE
from vllm_eagle3_patch.output.blocks import BLANK, Block, Columns, Diff, Line, print_blocks
from vllm_eagle3_patch.output.verification import verification_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm_eagle3_patch.assess.assessment import Assessment, FileStatus, Problem
    from vllm_eagle3_patch.assess.model_facts import ModelFacts
    from vllm_eagle3_patch.commands.report import Report


_CLOSING = {
    ("check", 0): "EAGLE-3 is ready for: {ready}.",
    ("check", 1): "To make EAGLE-3 ready for {candidates}:",
    ("check", UNPROVEN): "To prove that EAGLE-3 works for {unproven}:",
    ("apply", 0): "Done. To undo it:",
    ("apply", 1): "Nothing was written. The same command without --dry-run or --diff applies this.",
    ("revert", 0): "Every file is as it was before.",
    ("revert", 1): "Nothing was written. The same command without --dry-run reverts these.",
    ("verify", 0): "Proven by running it, for: {proven}.",
    ("verify", 1): "To make EAGLE-3 ready for {candidates}:",
    ("verify", UNPROVEN): "Not proven: {unproven}.",
    ("verify", 3): "Nothing is proven: no model could be run.",
    ("verify", 6): "What should work does not: see what failed above.",
}

_NOTHING = {
    "apply": "Nothing to do: what was selected is in place already.",
    "revert": "Nothing to revert.",
}

_NEXT = {
    ("check", 1): "apply",
    ("check", UNPROVEN): "verify",
    ("verify", 1): "apply",
    ("apply", 0): "revert",
}


def print_report(report: Report) -> None:
    """A report as a person reads it."""
    print_blocks(_report_blocks(report))


def _report_blocks(report: Report) -> Iterator[Block]:
    if report.installation is not None:
        yield from _installation_blocks(report)
    if report.assessment is not None and report.command != "verify":
        said_below = {problem.message for problem in report.problems}
        yield from _model_blocks(report.assessment, _facts(report), said_below)
        yield from _file_blocks(_files(report))
    for path in report.changed:
        verb = "would change" if report.dry_run else "changed"
        yield Line(f"{verb}: {path}")
    if report.diff:
        yield BLANK
        yield Diff(report.diff)
    if report.verification is not None:
        if report.changed:
            yield BLANK
        yield from verification_blocks(report.verification)
    yield from _problem_blocks(report)
    for note in report.notes:
        yield Line(f"note: {note}")
    yield from _closing(report)


def _closing(report: Report) -> Iterator[Line]:
    """What it comes to, and on a line of its own the command to type next."""
    if report.exit_code == 0 and not report.changed and report.command in _NOTHING:
        yield Line(_NOTHING[report.command], bold=True)
        return
    unproven = any(problem.code == UNPROVEN for problem in report.problems)
    how = UNPROVEN if unproven and report.exit_code == 1 else report.exit_code
    ending = (report.command, how)
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
        unproven=", ".join(f.architecture for f in facts if f.ground == UNPROVEN),
    )
    yield Line(closing, bold=True)
    if ending in _NEXT:
        words = ["vllm-eagle3-patch", _NEXT[ending], *_where(report, _NEXT[ending])]
        words += report.options
        yield Line(f"  {' '.join(words)}", bold=True, command=True)


def _where(report: Report, command: str) -> tuple[str, ...]:
    """The option that leads a command to this installation again, unless none does as well."""
    installation = report.installation
    if installation is None:
        return ()
    encoding = sys.stdout.encoding or "utf-8"
    if installation.chosen_by == "--site-packages" and command == "verify":
        return ("--python", "PATH")
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
    yield BLANK


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
        ("model", "model types", "ready", "ground", "missing", "patched by"),
        tuple(
            (
                facts.architecture,
                ", ".join(facts.model_types),
                "yes" if facts.ready else "no",
                facts.ground or "-",
                ", ".join(facts.missing) or "-",
                ", ".join(patched_by(assessment, facts)) or "-",
            )
            for facts in models
        ),
    )
    yield BLANK
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
    yield BLANK
    yield Columns(
        ("file", "state", "patches"),
        tuple((status.path, status.state, ", ".join(status.patches) or "-") for status in files),
    )
    yield BLANK


def _problem_blocks(report: Report) -> Iterator[Block]:
    """Each problem, and below those that ask for the same thing what to do."""
    by_hint: dict[str, list[Problem]] = {}
    for problem in report.problems:
        by_hint.setdefault(problem.hint, []).append(problem)
    for hint, problems in by_hint.items():
        for problem in dict.fromkeys(problems):
            yield Line(f"{problem.code}: {problem.message}")
        yield Line(f"  {hint}")
