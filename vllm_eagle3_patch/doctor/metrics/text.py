"""The counters of speculative decoding in Prometheus text, in each naming that vLLM has used.

The names, read from the sources of 0.9.0 to 0.33.0 (``docs/metrics.md`` has the table):

* V1 engine, every release: ``vllm:spec_decode_num_drafts``, ``..._num_draft_tokens``,
  ``..._num_accepted_tokens`` and ``..._num_accepted_tokens_per_pos``
  (vllm/v1/spec_decode/metrics.py), with the labels ``model_name`` and ``engine``
  (vllm/v1/metrics/loggers.py), the last one with ``position`` too. prometheus_client writes
  ``_total`` behind the name of a counter, and a gauge ``_created`` beside it.
* V0 engine, 0.9.0 to 0.9.2: ``..._num_accepted_tokens_total``, ``..._num_draft_tokens_total``,
  ``..._num_emitted_tokens_total``, the gauges ``..._draft_acceptance_rate`` and
  ``..._efficiency``, with ``model_name`` only (vllm/engine/metrics.py). No count of drafts.
* Served by Ray (vllm/v1/metrics/ray_wrappers.py): Ray's own prefix ``ray_``, and from 0.11.0 on
  ``vllm_`` for ``vllm:``; from 0.12.0 on a label ``ReplicaId``. A counter that is still 0 is
  left out.
* Diffusion models, from 0.24.0 on: ``vllm:diffusion_num_...`` in place of these.

OpenMetrics text has ``vllm_`` for ``vllm:`` too, as newer versions of prometheus_client escape it.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics

from vllm_eagle3_patch.doctor.metrics.source import MetricsError
from vllm_eagle3_patch.ground.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.samples import Sample

DRAFTS = "drafts"
DRAFT_TOKENS = "draft_tokens"
ACCEPTED = "accepted_tokens"
BY_POSITION = "accepted_tokens_per_pos"

_COUNTER = re.compile(
    r"(?P<ray>ray_)?vllm[:_]spec_decode_num_"
    r"(?P<kind>drafts|draft_tokens|accepted_tokens_per_pos|accepted_tokens|emitted_tokens)"
    r"(?P<suffix>_total|_created)?"
)
_V0_GAUGE = re.compile(r"(ray_)?vllm[:_]spec_decode_(draft_acceptance_rate|efficiency)")
_DIFFUSION = re.compile(r"(ray_)?vllm[:_]diffusion_num_denoising_steps(_total)?")
_VLLM = re.compile(r"^(ray_)?vllm[:_]", re.MULTILINE)
_JSON = re.compile(rb"\[|\{\s*(\}|\"[^\"]*\"\s*:)")

LONGEST_LINE = 65_536
"""Characters. A line of vLLM's has some hundred."""

MOST_POSITIONS = 1_000
LARGEST_COUNT = 2**53
"""Above it a floating-point number, which Prometheus counts in, no longer holds every count."""

_LINES_TO_TRY = 1_000
_WHOLE = "give the whole page of /metrics of one vLLM server, as it is"
_END_OF_OPENMETRICS = "# EOF"


@dataclass
class Series:
    """The counters with one set of labels: those of one engine in one process.

    Attributes:
        labels: Every label but ``position``.
        by_position: Accepted draft tokens by position, as far as they are written.
        created: When the counters began, in seconds since 1970, if that is written.
        timestamp: When the sample was taken, in seconds since 1970, if that is written.
        ray: Whether Ray served it, so that what is missing is 0.
    """

    labels: tuple[tuple[str, str], ...]
    counts: dict[str, int] = field(default_factory=dict)
    by_position: dict[int, int] = field(default_factory=dict)
    created: float | None = None
    timestamp: float | None = None
    ray: bool = False

    def label(self, name: str) -> str | None:
        """The value of a label; None where there is none."""
        return dict(self.labels).get(name)


Key = tuple[tuple[tuple[str, str], ...], bool]
"""What tells series apart: the labels, and whether Ray wrote them."""


@dataclass(frozen=True)
class Scrape:
    """What one text says of speculative decoding.

    Attributes:
        series: The V1 engine's counters.
        v0_models: Models of which there are only the V0 engine's metrics.
        vllm: Whether there is any metric of vLLM.
        diffusion: Whether there are the counters of a diffusion model.
    """

    series: dict[Key, Series]
    v0_models: tuple[str, ...] = ()
    vllm: bool = False
    diffusion: bool = False


def parse(content: bytes, name: str) -> Scrape:
    """Read the counters out of Prometheus text, classic or OpenMetrics.

    Only the lines that concern speculative decoding are parsed, so that what else a page holds
    does no harm; without any, the first lines are, to tell whether it is such text at all.

    Args:
        content: The text, as bytes.
        name: What to call it in errors.

    Raises:
        MetricsError: It is not such text, ends in the middle of a line, or gives a counter twice
            or a value that no counter has.
    """
    text = _decoded(content, name)
    lines = text.split("\n")
    concerned = [line for line in lines if "spec_decode_" in line or "diffusion_num_" in line]
    if not concerned:
        _parse_lines(lines[:_LINES_TO_TRY], name)
        if _VLLM.search(text) is None:
            message = f"{name} is Prometheus text, but holds no metric of vLLM"
            raise MetricsError(message, _WHOLE, "metrics-not-vllm")
    is_openmetrics = text.rstrip().endswith(_END_OF_OPENMETRICS)
    samples = _parse_lines(concerned, name, as_openmetrics=is_openmetrics)
    return _scrape(samples, name, vllm=_VLLM.search(text) is not None)


def _decoded(content: bytes, name: str) -> str:
    start = content.lstrip()[:512].lower()
    hint = _WHOLE
    if content.startswith(b"\x1f\x8b"):
        what, hint = "is compressed (gzip)", "decompress it first (gunzip)"
    elif content.startswith((b"\xff\xfe", b"\xfe\xff")):
        what, hint = "is UTF-16 text", "write it as UTF-8 (iconv -f UTF-16 -t UTF-8)"
    elif b"\0" in content:
        what = "is binary"
    elif not start:
        what = "is empty"
    elif start.startswith(b"<"):
        what, hint = "is a web page (HTML or XML), not metrics", f"{_WHOLE}, not an error page"
    elif _JSON.match(start):
        what, hint = "is JSON, not Prometheus text", f"{_WHOLE}, not an answer of Prometheus' API"
    else:
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            message = f"{name} is not UTF-8 text"
            raise MetricsError(message, hint, "metrics-not-prometheus") from None
        return _whole_lines(text.replace("\r\n", "\n"), name)
    raise MetricsError(f"{name} {what}", hint, "metrics-not-prometheus")


def _whole_lines(text: str, name: str) -> str:
    """The format asks for a line feed behind the last line: without it a number may be cut."""
    last = text.rpartition("\n")[2]
    if last.strip() and last.strip() != _END_OF_OPENMETRICS:
        message = f"{name} ends in the middle of a line: {_excerpt(last)}"
        hint = "take the scrape again; every line of it ends with a line feed"
        raise MetricsError(message, hint, "metrics-truncated")
    return text


def _parse_lines(
    lines: list[str], name: str, *, as_openmetrics: bool = False
) -> list[tuple[str, Sample]]:
    """The samples of these lines that concern us, each with the name of its metric."""
    longest = max(lines, key=len, default="")
    if len(longest) > LONGEST_LINE:
        message = f"{name} is not Prometheus text: it has a line of {len(longest)} characters"
        raise MetricsError(message, _WHOLE, "metrics-not-prometheus")
    try:
        return list(_samples(lines, as_openmetrics=as_openmetrics))
    except Exception:  # The parsers raise ValueError and IndexError, and promise neither.
        bad = next((line for line in lines if not _parses(line)), None)
    if bad is None and as_openmetrics:
        message = f"{name} ends with # EOF but is not OpenMetrics text"
    else:
        message = f"{name} is not Prometheus text; the first wrong line is: {_excerpt(bad or '')}"
    raise MetricsError(message, _WHOLE, "metrics-not-prometheus")


def _samples(lines: Iterable[str], *, as_openmetrics: bool) -> Iterator[tuple[str, Sample]]:
    if as_openmetrics:
        # Names that the client library escaped are not those of its own comments, and their
        # samples are not together, both of which its parser refuses.
        kept = sorted((line for line in lines if line[:1] not in ("", "#")), key=_metric_name)
        text = "\n".join([*kept, _END_OF_OPENMETRICS, ""])
        families = openmetrics.text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    else:
        families = parser.text_string_to_metric_families("\n".join([*lines, ""]))
    for family in families:
        for sample in family.samples:
            if "spec_decode_" in sample.name or "diffusion_num_" in sample.name:
                yield sample.name, sample


def _metric_name(line: str) -> str:
    return re.split(r"[{ ]", line, maxsplit=1)[0]


def _parses(line: str) -> bool:
    try:
        list(_samples([line], as_openmetrics=False))
    except Exception:
        return False
    return True


def _excerpt(line: str) -> str:
    most = 60
    line = line.strip()
    return one_line(line if len(line) <= most else f"{line[:most]}...")


def _scrape(samples: Iterable[tuple[str, Sample]], name: str, *, vllm: bool) -> Scrape:
    found: dict[Key, Series] = {}
    written: dict[tuple[Key, str, int | None], str] = {}
    v0_gauges: set[str] = set()
    diffusion = False
    for metric, sample in samples:
        diffusion = diffusion or _DIFFUSION.fullmatch(metric) is not None
        if _V0_GAUGE.fullmatch(metric):
            v0_gauges.add(sample.labels.get("model_name", ""))
        counter = _COUNTER.fullmatch(metric)
        if counter is None:
            continue
        labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "position"))
        key = (labels, counter["ray"] is not None)
        series = found.setdefault(key, Series(labels, ray=key[1]))
        if counter["suffix"] == "_created":
            if counter["kind"] == DRAFTS and 0 <= sample.value <= LARGEST_COUNT:
                series.created = float(sample.value)
            continue
        position = _position(sample, name) if counter["kind"] == BY_POSITION else None
        before = written.get((key, counter["kind"], position))
        if before == metric:
            raise _twice(sample, name)
        if before is not None and counter["suffix"] is None:
            continue  # Ray writes some counters twice, as name and as name_total.
        written[key, counter["kind"], position] = metric
        _put(series, counter["kind"], position, sample, name)
    v1 = {key: series for key, series in found.items() if _is_v1(series)}
    v0 = {s.label("model_name") or "" for key, s in found.items() if key not in v1} | v0_gauges
    v0_models = tuple(sorted(v0 - {s.label("model_name") or "" for s in v1.values()}))
    for series in v1.values():
        _complete(series, name)
    return Scrape(v1, v0_models, vllm or bool(found), diffusion)


def _put(series: Series, kind: str, position: int | None, sample: Sample, name: str) -> None:
    value = _count(sample, name)
    if position is None:
        series.counts[kind] = value
    else:
        series.by_position[position] = value
    if sample.timestamp is not None:
        series.timestamp = float(sample.timestamp)


def _is_v1(series: Series) -> bool:
    """The V0 engine has no label ``engine``, no count of drafts and none by position."""
    counts_drafts = DRAFTS in series.counts or bool(series.by_position)
    return counts_drafts or series.label("engine") is not None


def _count(sample: Sample, name: str) -> int:
    value = sample.value
    if not 0 <= value <= LARGEST_COUNT or value != int(value):
        message = f"{name}: {one_line(sample.name)} is {_excerpt(str(value))}, which is no count"
        hint = "give what the server itself writes at /metrics, not a rate or another calculation"
        raise MetricsError(message, hint, "metrics-value")
    return int(value)


def _position(sample: Sample, name: str) -> int:
    text = sample.labels.get("position")
    if text is not None and text.isascii() and text.isdigit() and len(text) <= len("1000"):
        position = int(text)
        if position < MOST_POSITIONS:
            return position
    what = "has no label position" if text is None else f"has the position {_excerpt(text)!r}"
    message = f"{name}: a sample of {one_line(sample.name)} {what}"
    raise MetricsError(message, _WHOLE, "metrics-value")


def _twice(sample: Sample, name: str) -> MetricsError:
    labels = ", ".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
    message = f"{name}: {one_line(sample.name)} is written twice for {_excerpt(labels)}"
    hint = "give one scrape a file; an earlier one goes to --previous"
    return MetricsError(message, hint, "metrics-duplicate")


def _complete(series: Series, name: str) -> None:
    """Fill in what Ray leaves out (0 is not written), and refuse what else is missing.

    Raises:
        MetricsError: A counter that vLLM creates with the others is not there.
    """
    counts, by_position = series.counts, series.by_position
    if series.ray:
        for kind in (DRAFTS, DRAFT_TOKENS, ACCEPTED):
            counts.setdefault(kind, 0)
        drafts = counts[DRAFTS]
        length = -(-counts[DRAFT_TOKENS] // drafts) if drafts else 0
        highest = max(by_position, default=-1)
        for position in range(max(min(length, MOST_POSITIONS), highest + 1)):
            by_position.setdefault(position, 0)
    if by_position:
        counts.setdefault(ACCEPTED, sum(by_position.values()))
    missing = next(
        (
            f"vllm:spec_decode_num_{kind}_total"
            for kind in (DRAFTS, DRAFT_TOKENS, ACCEPTED)
            if kind not in counts
        ),
        None,
    )
    gap = next((p for p in itertools.count() if p not in by_position), 0)
    if missing is None and gap < len(by_position):
        missing = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{gap}"}}'
    if missing is not None:
        labels = ", ".join(f"{key}={value}" for key, value in series.labels)
        message = f"{name}: {missing} is missing for {_excerpt(labels) or 'the server'}"
        raise MetricsError(message, _WHOLE, "metrics-incomplete")
