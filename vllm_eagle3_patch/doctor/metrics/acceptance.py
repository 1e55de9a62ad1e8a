"""The metrics reader of ``doctor``: what a running server's counters say of its draft model.

``read`` takes one scrape, or two for the figures of the interval between them, and returns a
``MetricsReport``, which tells itself as JSON data and as blocks for ``render.py``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_eagle3_patch.doctor.metrics.causes import causes_of
from vllm_eagle3_patch.doctor.metrics.figures import (
    Change,
    Counts,
    change_of,
    counts_of,
    interval,
    seconds_between,
)
from vllm_eagle3_patch.doctor.metrics.source import (
    STANDARD_INPUT,
    TIME_LIMIT,
    MetricsError,
    is_url,
    read_source,
    with_path,
)
from vllm_eagle3_patch.doctor.metrics.text import parse
from vllm_eagle3_patch.doctor.metrics.verdict import (
    CAVEAT,
    CLASSES,
    EXIT_CODES,
    HEALTHY,
    IMPOSSIBLE,
    NO_DATA,
    PUBLISHED,
    REPORTED,
    STRUCTURAL,
    UNSEEN,
    Judgement,
    judge,
)
from vllm_eagle3_patch.ground.text import one_line, shell_word
from vllm_eagle3_patch.output.blocks import Columns, Line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm_eagle3_patch.doctor.metrics.causes import Cause, Diagnosis
    from vllm_eagle3_patch.doctor.metrics.text import Scrape, Series
    from vllm_eagle3_patch.output.blocks import Block

__all__ = ["TIME_LIMIT", "EngineFigures", "MetricsError", "MetricsReport", "ModelFigures", "read"]

BAR_WIDTH = 40
"""Characters of a bar for a share of 1."""

_DIGITS = 6
_FULL = "\N{FULL BLOCK}"
_PARTS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"
"""Eighths of a character, none to seven."""


@dataclass(frozen=True)
class EngineFigures:
    """One engine of one model.

    Attributes:
        engine: The label ``engine``; None where there is none.
        counts: What it counted, since it started or in the interval.
        reset: Whether it started again within the interval; the counts are since then.
        new: Whether the previous scrape does not have it; the counts are since it started.
    """

    engine: str | None
    counts: Counts
    judgement: Judgement
    reset: bool = False
    new: bool = False

    @property
    def name(self) -> str:
        """How a person is told of it."""
        return "no label" if self.engine is None else self.engine


@dataclass(frozen=True)
class ModelFigures:
    """One model: its engines, and all of them together.

    Attributes:
        model_name: The label ``model_name``: the name it is served under; None without one.
        total: Their counts added up.
        judgement: The worse of what the total means and of what one engine alone shows.
    """

    model_name: str | None
    engines: tuple[EngineFigures, ...]
    total: Counts
    judgement: Judgement

    @property
    def name(self) -> str:
        """How a person is told of it."""
        return "(no label model_name)" if self.model_name is None else self.model_name


@dataclass(frozen=True)
class MetricsReport:
    """What one scrape says, or two.

    Attributes:
        source: What was read: a path, a URL or ``-``.
        previous: What was read as the earlier scrape.
        judgement: The worst of theirs, or why there are none.
        notes: What else to know, a sentence each.
        seconds: The length of the interval, where the samples have timestamps.
    """

    source: str
    previous: str | None
    models: tuple[ModelFigures, ...]
    judgement: Judgement
    notes: tuple[str, ...] = ()
    seconds: float | None = None

    @property
    def verdict(self) -> str:
        """In one word, as in ``metrics_verdict.CLASSES``."""
        return self.judgement.verdict

    @property
    def exit_class(self) -> str:
        """``ok``, ``risky`` or ``broken``, as ``doctor`` puts it."""
        return CLASSES[self.verdict]

    @property
    def exit_code(self) -> int:
        """0, 1 or 4."""
        return EXIT_CODES[self.exit_class]

    def causes(self, diagnosis: Diagnosis | None = None) -> tuple[Cause, ...]:
        """The likely causes, the likeliest first.

        Args:
            diagnosis: What the static part found: each of its ``findings`` has a ``code``.
        """
        return causes_of(self.judgement, diagnosis, interval=self._interval_command())

    def document(self, diagnosis: Diagnosis | None = None) -> dict[str, Any]:
        """As JSON data."""
        return {
            "source": self.source,
            "previous": self.previous,
            "interval_seconds": self.seconds,
            "verdict": self.verdict,
            "exit_class": self.exit_class,
            "exit_code": self.exit_code,
            "reason": self.judgement.reason,
            "message": self.judgement.message,
            "models": [_model_document(model) for model in self.models],
            "causes": [cause.document() for cause in self.causes(diagnosis)],
            "reported_lengths": {task: list(lengths) for task, lengths in REPORTED.items()},
            "caveat": CAVEAT,
            "notes": list(self._all_notes()),
        }

    def blocks(
        self, diagnosis: Diagnosis | None = None, *, block_elements: bool | None = None
    ) -> Iterator[Block]:
        """For ``render.py``.

        Args:
            diagnosis: As for ``causes``.
            block_elements: Whether bars may hold block elements; by default on a terminal whose
                encoding has them.
        """
        fine = _shows_block_elements() if block_elements is None else block_elements
        for model in self.models:
            yield from _model_blocks(model, fine=fine, interval=self.previous is not None)
        if not self.models:
            yield Line(f"{self.verdict}: {self.judgement.message}", bold=True)
        yield from _cause_lines(self.causes(diagnosis))
        for note in self._all_notes():
            yield Line(f"note: {note}")
        if self.models:
            yield Line(f"note: {CAVEAT}")
            yield Line(f"note: {PUBLISHED}")

    def _all_notes(self) -> tuple[str, ...]:
        return (*self.notes, UNSEEN) if self.verdict == HEALTHY else self.notes

    def _interval_command(self) -> str:
        """What takes the figures of an interval, to paste into a shell."""
        encoding = sys.stdout.encoding or "utf-8" if sys.stdout is not None else "utf-8"
        url, earlier = "http://localhost:8000/metrics", "before.txt"
        if is_url(self.source):
            url = shell_word(with_path(self.source), encoding)
        elif self.source != STANDARD_INPUT:
            earlier = shell_word(self.source, encoding)
        ask = f"vllm-eagle3-patch doctor --metrics {url} --previous {earlier}"
        is_there = earlier != "before.txt"
        return ask if is_there else f"curl -s {url} -o before.txt; sleep 300; {ask}"


def read(source: str, previous: str | None = None, timeout: float = TIME_LIMIT) -> MetricsReport:
    """Read a scrape, or what happened between two.

    Args:
        source: A file, ``-`` for standard input, or the http or https URL of the user's server.
        previous: An earlier scrape of the same server, given likewise.
        timeout: Seconds that a server has to answer in full.

    Raises:
        MetricsError: One of them cannot be read or is not what vLLM writes.
    """
    if source == STANDARD_INPUT == previous:
        message = "both scrapes cannot come from standard input"
        raise MetricsError(message, "give a file or a URL for one of them", "metrics-address")
    now = parse(read_source(source, timeout), _named(source))
    before = None if previous is None else parse(read_source(previous, timeout), _named(previous))
    notes: list[str] = []
    models = _models(now, before, notes)
    if models:
        judgement = max((model.judgement for model in models), key=lambda j: j.severity)
    else:
        judgement = _nothing_counted(now)
    if now.v0_models and models:
        names = ", ".join(now.v0_models)
        notes.append(f"the V0 engine serves {names}, which is not judged: it counts no drafts")
    seconds = None if before is None else seconds_between(now, before)
    return MetricsReport(source, previous, models, judgement, tuple(notes), seconds)


def _named(source: str) -> str:
    return "standard input" if source == STANDARD_INPUT else one_line(source)


def _nothing_counted(scrape: Scrape) -> Judgement:
    if scrape.v0_models:
        message = (
            "no verdict: the V0 engine counts no drafts and counts as accepted also tokens behind "
            "one that was rejected (vLLM 0.9.0 to 0.9.2)"
        )
        return Judgement(NO_DATA, "v0-engine", message)
    if scrape.diffusion:
        message = "no verdict: a diffusion model is served, which has no draft model"
        return Judgement(NO_DATA, "diffusion", message)
    message = (
        "no counters of speculative decoding: this server was started without it, or Ray serves "
        "it and it has not speculated yet"
    )
    return Judgement(NO_DATA, "not-speculating", message)


def _models(now: Scrape, before: Scrape | None, notes: list[str]) -> tuple[ModelFigures, ...]:
    engines: dict[tuple[str | None, str | None], list[Change]] = {}
    for key, series in now.series.items():
        label = (series.label("model_name"), series.label("engine"))
        engines.setdefault(label, []).append(_change(series, before, key))
    for (model, engine), changes in engines.items():
        if len(changes) > 1:
            notes.append(
                f"{_place(model, engine)}: the counters of {len(changes)} processes are added up"
            )
    if before is not None:
        gone = [series for key, series in before.series.items() if key not in now.series]
        for series in gone:
            place = _place(series.label("model_name"), series.label("engine"))
            notes.append(f"{place} is only in the previous scrape and is left out")
    by_model: dict[str | None, list[EngineFigures]] = {}
    for (model, engine), changes in engines.items():
        counts = sum((change.counts for change in changes), Counts())
        figures = EngineFigures(
            engine,
            counts,
            judge(counts),
            reset=any(change.reset for change in changes),
            new=any(change.new for change in changes) and before is not None,
        )
        by_model.setdefault(model, []).append(figures)
        notes.extend(_interval_notes(_place(model, engine), figures))
    return tuple(
        _model(model, tuple(sorted(by_model[model], key=_engine_order)))
        for model in sorted(by_model, key=lambda name: name or "")
    )


def _change(
    series: Series, before: Scrape | None, key: tuple[tuple[tuple[str, str], ...], bool]
) -> Change:
    if before is None:
        return Change(counts_of(series))
    return change_of(series, before.series.get(key))


def _interval_notes(place: str, figures: EngineFigures) -> Iterator[str]:
    if figures.reset:
        yield (
            f"{place} was restarted in between (its counters started again): the figures are those "
            "since then; if it was not, the two scrapes are swapped"
        )
    if figures.new:
        yield f"{place} is not in the previous scrape: the figures are those since it started"


def _place(model: str | None, engine: str | None) -> str:
    name = "(no label model_name)" if model is None else model
    return name if engine is None else f"{name}, engine {engine}"


def _engine_order(figures: EngineFigures) -> tuple[int, str]:
    name = figures.engine or ""
    return (int(name), "") if name.isascii() and name.isdigit() else (sys.maxsize, name)


def _model(name: str | None, engines: tuple[EngineFigures, ...]) -> ModelFigures:
    total = sum((engine.counts for engine in engines), Counts())
    judgement = judge(total)
    for engine in engines if len(engines) > 1 else ():
        alone = engine.judgement
        tells = alone.verdict in (STRUCTURAL, IMPOSSIBLE) or alone.reason in _TELLING
        if tells and alone.severity > judgement.severity:
            message = f"engine {engine.name}: {alone.message}"
            judgement = Judgement(alone.verdict, alone.reason, message, alone.position)
    return ModelFigures(name, engines, total, judgement)


_TELLING = ("first-position", "decay")
"""Reasons that hold of an engine alone; its length may differ with the requests that it got."""


def _model_document(model: ModelFigures) -> dict[str, Any]:
    return {
        "model_name": model.model_name,
        "verdict": model.judgement.verdict,
        "reason": model.judgement.reason,
        "message": model.judgement.message,
        "total": _figures(model.total),
        "engines": [
            {
                "engine": engine.engine,
                "verdict": engine.judgement.verdict,
                "reason": engine.judgement.reason,
                "reset": engine.reset,
                "new": engine.new,
                **_figures(engine.counts),
            }
            for engine in model.engines
        ],
    }


def _figures(counts: Counts) -> dict[str, Any]:
    first = counts.by_position[0] if counts.by_position else None
    between = None if first is None else interval(first, counts.drafts)
    return {
        "drafts": counts.drafts,
        "draft_tokens": counts.draft_tokens,
        "accepted_tokens": counts.accepted,
        "accepted_tokens_by_position": list(counts.by_position),
        "draft_tokens_per_draft": _rounded(counts.draft_tokens_per_draft),
        "acceptance_rate": _rounded(counts.acceptance_rate),
        "mean_acceptance_length": _rounded(counts.mean_acceptance_length),
        "acceptance_by_position": [_rounded(s) for s in counts.acceptance_by_position],
        "conditional_acceptance_by_position": [
            _rounded(share) for share in counts.conditional_acceptance_by_position
        ],
        "position_0_interval": None if between is None else [_rounded(end) for end in between],
    }


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, _DIGITS)


# For a person


def _model_blocks(model: ModelFigures, *, fine: bool, interval: bool) -> Iterator[Block]:
    yield Line(f"{model.name}: {model.judgement.verdict}", bold=True)
    yield Line(f"  {model.judgement.message}")
    yield Line("")
    rows = [_row(engine.name, engine.counts, engine.judgement.verdict) for engine in model.engines]
    if len(model.engines) > 1:
        rows.append(_row("all", model.total, model.judgement.verdict))
    figures = (
        "drafts",
        "draft tokens per draft",
        "acceptance rate",
        "mean acceptance length",
    )
    short = ("drafts", "tokens", "rate", "length")
    narrow = Columns(("engine", *short, "verdict"), tuple(rows))
    yield Columns(("engine", *figures, "verdict"), tuple(rows), narrow)
    yield Line(
        "  of the interval between the scrapes" if interval else "  since the server started"
    )
    yield Line("")
    if model.total.acceptance_by_position:
        yield from _chart(model.total, fine=fine)
        yield Line("")


def _row(name: str, counts: Counts, verdict: str) -> tuple[str, ...]:
    return (
        name,
        str(counts.drafts),
        _shown(counts.draft_tokens_per_draft, 2),
        _shown(counts.acceptance_rate, 3),
        _shown(counts.mean_acceptance_length, 3),
        verdict,
    )


def _chart(counts: Counts, *, fine: bool) -> Iterator[Block]:
    """A bar a position: the share of all drafts that is accepted there."""
    shares = counts.acceptance_by_position
    conditional = counts.conditional_acceptance_by_position
    rows = tuple(
        (
            str(position),
            _shown(share, 3),
            _bar(share, fine=fine),
            _shown(given, 3),
        )
        for position, (share, given) in enumerate(zip(shares, conditional, strict=True))
    )
    header = ("position", "accepted", "of all drafts".ljust(BAR_WIDTH), "of those so far")
    without_bars = tuple((row[0], row[1], row[3]) for row in rows)
    narrow = Columns(("position", "accepted", "of those so far"), without_bars)
    yield Columns(header, rows, narrow)


def _bar(share: float, *, fine: bool) -> str:
    """A bar of up to ``BAR_WIDTH`` characters; a share above 0 always shows."""
    share = min(share, 1.0)
    if not fine:
        return "#" * max(round(share * BAR_WIDTH), int(share > 0))
    eighths = max(round(share * BAR_WIDTH * 8), int(share > 0))
    return f"{_FULL * (eighths // 8)}{_PARTS[eighths % 8]}".rstrip()


def _shows_block_elements() -> bool:
    """Whether standard output is a terminal that can show them."""
    if sys.stdout is None or not sys.stdout.isatty():
        return False
    try:
        f"{_FULL}{_PARTS}".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _shown(figure: float | None, digits: int) -> str:
    return "-" if figure is None else f"{figure:.{digits}f}"


def _cause_lines(causes: Sequence[Cause]) -> Iterator[Line]:
    if causes:
        yield Line("Likely causes, the likeliest first:", bold=True)
    for number, cause in enumerate(causes, start=1):
        source = f" ({cause.source})" if cause.source else ""
        found = f" [found: {', '.join(cause.found)}]" if cause.found else ""
        yield Line(f"{number}. {cause.code}: {cause.message}{source}{found}")
        yield Line(f"   {cause.check}")
        for command in cause.commands:
            yield Line(f"     {command}", command=True)
