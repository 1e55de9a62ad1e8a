"""A diagnosis as a person reads it: the verdict, the layers, the findings, what to type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_eagle3_patch.doctor.diagnosis import IN_WORDS
from vllm_eagle3_patch.doctor.situation import as_option
from vllm_eagle3_patch.output.blocks import Block, Columns, Line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_eagle3_patch.doctor.diagnosis import Diagnosis
    from vllm_eagle3_patch.doctor.draft_config import Written
    from vllm_eagle3_patch.doctor.finding import Finding

_BLANK = Line("")


def blocks(diagnosis: Diagnosis, counted: str | None = None) -> Iterator[Block]:
    """The blocks of a diagnosis.

    Args:
        diagnosis: What the configs show.
        counted: The verdict on a server's counters, where that is the graver one.
    """
    situation = diagnosis.situation
    by = ""
    if counted is not None:
        yield Line(f"{counted}: by the server's counters, below", bold=True)
        by = "by the configs "
    yield Line(f"{by}{diagnosis.verdict}: {IN_WORDS[diagnosis.verdict]}", bold=True)
    if diagnosis.with_patch is not None:
        yield Line(diagnosis.with_patch.sentence, bold=True)
    elif not diagnosis.known and situation.family is not None:
        yield Line("what apply would change is not known: this is no release of the matrix")
    yield _BLANK
    release = f" {diagnosis.release}" if diagnosis.release else ""
    yield Line(f"vLLM{release} ({diagnosis.where})")
    target, draft = situation.target, situation.draft
    layers = "?" if situation.num_layers is None else str(situation.num_layers)
    yield Line(f"target model {target.given}: {target.architecture}, {layers} layers")
    yield Line(f"draft model {draft.given}: {draft.architecture}")
    yield _BLANK
    yield Line(f"layers: {situation.layers.sentence}.")
    yield _BLANK
    if diagnosis.findings:
        yield Columns(
            ("severity", "finding", "evidence"),
            tuple((f.severity, f.code, f.evidence) for f in diagnosis.findings),
        )
        yield _BLANK
    for finding in diagnosis.findings:
        yield from _finding_blocks(finding)
    assumed = "; ".join(f"{name} {value}" for name, value in diagnosis.assumed.items())
    if assumed:
        yield Line(f"assumed: {assumed}")
        yield _BLANK
    yield Line("to serve it:", bold=True)
    yield Line(f"  {as_option(diagnosis.speculative_config)}", bold=True, command=True)


def _finding_blocks(finding: Finding) -> Iterator[Block]:
    yield Line(f"{finding.severity} {finding.code}: {finding.message}")
    yield Line(f"  then: {finding.consequence}")
    if finding.fix:
        yield Line(f"  fix: {finding.fix}", command=True)
    yield Line(f"  source: {finding.source}")
    yield _BLANK


def written_blocks(written: Written) -> Iterator[Block]:
    """What was written as the corrected copy."""
    yield _BLANK
    yield Line(f"wrote {written.folder}", bold=True)
    for change in written.changes or ("nothing was to be corrected",):
        yield Line(f"  {change}")
    for note in written.notes:
        yield Line(f"  note: {note}")
