"""Metrics pages as vLLM's releases write them, made here from figures that a test states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STEM = "vllm:spec_decode_num_"

NEIGHBOURS = """\
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython",major="3",minor="12"} 1.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="target"} 3.0
# HELP vllm:e2e_request_latency_seconds Histogram of e2e request latency in seconds.
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",model_name="target"} 7.0
vllm:e2e_request_latency_seconds_count{engine="0",model_name="target"} 7.0
vllm:e2e_request_latency_seconds_sum{engine="0",model_name="target"} NaN
"""
"""What else is on a page; a sum may well be NaN there."""


@dataclass(frozen=True)
class Engine:
    """What one engine has counted.

    Attributes:
        drafts: Its drafts.
        by_position: Accepted tokens by position; their number is k.
        draft_tokens: k for every draft, unless stated.
        accepted: The sum over positions, unless stated.
        engine: Its label; None for none.
        model: Its label; None for none.
        more: Other labels.
        created: The value of the ``_created`` gauges; None for none.
        timestamp: In milliseconds behind each sample; None for none.
    """

    drafts: int
    by_position: Sequence[int]
    draft_tokens: int | None = None
    accepted: int | None = None
    engine: str | None = "0"
    model: str | None = "target"
    more: Mapping[str, str] | None = None
    created: float | None = 1_700_000_000.5
    timestamp: int | None = None

    @property
    def labels(self) -> dict[str, str]:
        """In the order that prometheus_client writes them in."""
        own = {"engine": self.engine, "model_name": self.model}
        given = {key: value for key, value in own.items() if value is not None}
        return dict(sorted({**given, **(self.more or {})}.items()))

    @property
    def counters(self) -> dict[str, int]:
        """By the last part of their names."""
        tokens = self.draft_tokens
        accepted = self.accepted
        return {
            "drafts": self.drafts,
            "draft_tokens": self.drafts * len(self.by_position) if tokens is None else tokens,
            "accepted_tokens": sum(self.by_position) if accepted is None else accepted,
        }


def sample(name: str, labels: Mapping[str, str], value: object, timestamp: int | None) -> str:
    """One line of the classic format."""
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
    end = "" if timestamp is None else f" {timestamp}"
    return f"{name}{{{inside}}} {value}{end}\n"


def page(*engines: Engine, neighbours: bool = True) -> str:
    """As a V1 engine of 0.9.0 to 0.33.0 writes it through prometheus_client."""
    text = NEIGHBOURS if neighbours else ""
    for kind in ("drafts", "draft_tokens", "accepted_tokens"):
        text += _family(f"{STEM}{kind}", [(e, e.labels, e.counters[kind]) for e in engines])
    positions = [
        (e, {**e.labels, "position": str(position)}, accepted)
        for e in engines
        for position, accepted in enumerate(e.by_position)
    ]
    return text + _family(f"{STEM}accepted_tokens_per_pos", positions)


def _family(name: str, samples: Sequence[tuple[Engine, Mapping[str, str], int]]) -> str:
    text = f"# HELP {name}_total What is counted.\n# TYPE {name}_total counter\n"
    for engine, labels, value in samples:
        text += sample(f"{name}_total", labels, float(value), engine.timestamp)
    created = [(e, labels) for e, labels, _ in samples if e.created is not None]
    if created:
        text += f"# HELP {name}_created What is counted.\n# TYPE {name}_created gauge\n"
    for engine, labels in created:
        text += sample(f"{name}_created", labels, engine.created, engine.timestamp)
    return text


def untyped(text: str) -> str:
    """The same without comments and without ``_created``, as a filter leaves it."""
    kept = [line for line in text.splitlines(keepends=True) if not line.startswith("#")]
    return "".join(line for line in kept if "_created{" not in line)


def without_total(text: str) -> str:
    """Counters by the names that the source has, as a client without the suffix writes them."""
    return text.replace("_total", "")


def ray(text: str, separator: str, *, zeros: bool = False) -> str:
    """As Ray writes it: prefixed, with its own labels, and without counters that are still 0."""
    lines = []
    for line in untyped(text).splitlines(keepends=True):
        if STEM not in line or (line.endswith(" 0.0\n") and not zeros):
            continue
        name = line.replace("vllm:", f"ray_vllm{separator}", 1)
        lines.append(name.replace("{", '{Component="core_worker",WorkerId="w1",', 1))
    return "".join(lines)


def openmetrics(text: str, separator: str) -> str:
    """As prometheus_client writes OpenMetrics; newer versions have ``vllm_`` for ``vllm:``."""
    lines = []
    for line in text.splitlines(keepends=True):
        if STEM in line and "_created" not in line:
            comment = line.startswith("#")
            old, new = ("_total", "") if comment else ("vllm:", f"vllm{separator}")
            lines.append(line.replace(old, new, 1))
    return "".join(lines) + "# EOF\n"


def v0_page(accepted: int, draft_tokens: int, emitted: int) -> str:
    """As the V0 engine of 0.9.0 to 0.9.2 writes it."""
    text = NEIGHBOURS
    for kind, kind_of, value in (
        ("draft_acceptance_rate", "gauge", accepted / draft_tokens),
        ("efficiency", "gauge", 0.4),
        ("num_accepted_tokens_total", "counter", accepted),
        ("num_draft_tokens_total", "counter", draft_tokens),
        ("num_emitted_tokens_total", "counter", emitted),
    ):
        name = f"vllm:spec_decode_{kind}"
        text += f"# TYPE {name} {kind_of}\n"
        text += sample(name, {"model_name": "target"}, float(value), None)
    return text


def diffusion_page() -> str:
    """As 0.24.0 and later write it for a diffusion model."""
    name = "vllm:diffusion_num_denoising_steps_total"
    return f'{NEIGHBOURS}# TYPE {name} counter\n{name}{{engine="0",model_name="d"}} 9.0\n'
