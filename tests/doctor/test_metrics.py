"""What figures come to, what they mean on both sides of each threshold, and how it is told."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from doctor.metrics_exposition import (
    NEIGHBOURS,
    Engine,
    diffusion_page,
    page,
    ray,
    untyped,
    v0_page,
)
from vllm_eagle3_patch.doctor.metrics import source
from vllm_eagle3_patch.doctor.metrics.acceptance import MetricsReport, read
from vllm_eagle3_patch.doctor.metrics.figures import Counts, interval
from vllm_eagle3_patch.doctor.metrics.source import MetricsError
from vllm_eagle3_patch.doctor.metrics.verdict import REPORTED, judge
from vllm_eagle3_patch.output import blocks
from vllm_eagle3_patch.output.blocks import Columns, print_blocks


def counts(drafts: int, *by_position: int, draft_tokens: int | None = None) -> Counts:
    """Counts of drafts that all hold k tokens, unless stated."""
    tokens = drafts * len(by_position) if draft_tokens is None else draft_tokens
    return Counts(drafts, tokens, sum(by_position), by_position)


def shares(drafts: int, *accepted: float) -> Counts:
    """Counts from shares, as reports give them."""
    return counts(drafts, *(round(share * drafts) for share in accepted))


@pytest.fixture
def told(tmp_path: Path) -> Callable[..., MetricsReport]:
    """Write pages to files and read them; ``previous`` is the earlier page."""

    def read_pages(now: str, previous: str | None = None) -> MetricsReport:
        (tmp_path / "now").write_text(now)
        if previous is None:
            return read(str(tmp_path / "now"))
        (tmp_path / "before").write_text(previous)
        return read(str(tmp_path / "now"), str(tmp_path / "before"))

    return read_pages


Told = Callable[..., MetricsReport]


# Figures


def test_figures_of_1000_drafts_of_3() -> None:
    """700 + 500 + 300 of 3000 tokens: half; 1 + 1500 / 1000; 500 of the 700 go on, then 300."""
    figures = counts(1000, 700, 500, 300)
    assert figures.draft_tokens_per_draft == 3
    assert figures.acceptance_rate == 0.5
    assert figures.mean_acceptance_length == 2.5
    assert figures.acceptance_by_position == (0.7, 0.5, 0.3)
    assert figures.conditional_acceptance_by_position == (0.7, 500 / 700, 300 / 500)
    assert figures.reference_length == 2.5


def test_reference_length_counts_three_positions() -> None:
    assert counts(100, 80, 60, 40, 30, 20).reference_length == 1 + 1.8
    assert counts(100, 80).reference_length == 1.8
    assert Counts(100, 500, 230).reference_length is None


def test_no_drafts_have_no_figures() -> None:
    figures = Counts(by_position=(0, 0))
    assert figures.draft_tokens_per_draft is None
    assert figures.acceptance_rate is None
    assert figures.mean_acceptance_length is None
    assert figures.acceptance_by_position == ()
    assert figures.conditional_acceptance_by_position == ()


def test_nothing_goes_on_from_nothing() -> None:
    assert counts(10, 5, 0, 0).conditional_acceptance_by_position == (0.5, 0.0, None)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # Wilson (1927): (p + z*z/2n +- z*sqrt(p(1-p)/n + z*z/4n*n)) / (1 + z*z/n), z = 1.96.
        (0, 0, 0.0, 1.0),
        (0, 103, 0.0, 0.03596),  # z*z / (n + z*z) = 3.8415 / 106.8415
        (0, 102, 0.0, 0.03629),
        (50, 100, 0.40383, 0.59617),  # 0.5 +- 1.96 * sqrt(0.0025 + 0.0000960) / 1.0384
        (100, 100, 0.96300, 1.0),
    ],
)
def test_wilsons_interval(successes: int, trials: int, low: float, high: float) -> None:
    assert interval(successes, trials) == pytest.approx((low, high), abs=1e-5)


def test_drafts_without_a_token_at_a_position() -> None:
    """100 drafts of k = 3 lack 60 tokens: a draft without position 1 lacks two, so 30 at most."""
    figures = counts(100, 90, 50, 40, draft_tokens=240)
    assert [figures.without_position(position) for position in range(3)] == [20, 30, 60]


# Verdicts, on both sides of each threshold


@pytest.mark.parametrize(
    ("figures", "verdict", "reason"),
    [
        pytest.param(counts(0, 0, 0, 0), "no-data", "no-drafts", id="no drafts"),
        # Nothing accepted: with 103 drafts the interval ends below 0.036 (report 31).
        pytest.param(counts(102, 0, 0, 0), "too-few-drafts", "few-drafts", id="nothing of 102"),
        pytest.param(counts(103, 0, 0, 0), "structural", "nothing-accepted", id="nothing of 103"),
        pytest.param(counts(10**6, 1, 0, 0), "suspicious", "first-position", id="one of a million"),
        pytest.param(
            Counts(500, 1500, 0), "structural", "nothing-accepted", id="nothing, no positions"
        ),
        # Position 0 at 0.2, where there are drafts enough.
        pytest.param(counts(1000, 199, 90, 40), "suspicious", "first-position", id="0.199"),
        pytest.param(counts(1000, 200, 160, 130), "suspicious", "length", id="0.200"),
        # Fewer: 0 of 16 leaves up to 0.194, 1 of 16 up to 0.283; 4 of 40 up to 0.231, 2 to 0.165.
        pytest.param(counts(40, 4, 0, 0), "too-few-drafts", "few-drafts", id="0.1 of 40"),
        pytest.param(counts(40, 2, 0, 0), "suspicious", "first-position", id="0.05 of 40"),
        pytest.param(counts(384, 70, 30, 10), "too-few-drafts", "few-drafts", id="0.18 of 384"),
        pytest.param(counts(385, 70, 30, 10), "suspicious", "first-position", id="0.18 of 385"),
        # Position 1: less than half of 0.8, which takes an interval below 0.4.
        pytest.param(counts(1000, 800, 285, 250), "suspicious", "decay", id="0.356 go on"),
        pytest.param(counts(1000, 800, 320, 250), "suspicious", "length", id="0.400 go on"),
        # 385 drafts and a length of 2.5, the lower end of what is usual at k = 3.
        pytest.param(counts(1000, 700, 500, 299), "suspicious", "length", id="length 2.499"),
        pytest.param(counts(1000, 700, 500, 300), "healthy", "length", id="length 2.500"),
        pytest.param(counts(384, 300, 240, 200), "too-few-drafts", "few-drafts", id="384 drafts"),
        pytest.param(counts(385, 300, 240, 200), "healthy", "length", id="385 drafts"),
        # k = 1 and 2.
        pytest.param(counts(1000, 689), "suspicious", "length", id="k = 1, 1.689"),
        pytest.param(counts(1000, 690), "healthy", "length", id="k = 1, 1.690"),
        pytest.param(counts(1000, 700, 469), "suspicious", "length", id="k = 2, 2.169"),
        pytest.param(counts(1000, 700, 470), "healthy", "length", id="k = 2, 2.170"),
        # k = 5: the first three positions decide, so that a long tail lends nothing.
        pytest.param(
            counts(1000, 600, 450, 400, 390, 380), "suspicious", "length", id="k = 5, 2.450"
        ),
        pytest.param(counts(1000, 700, 500, 300, 200, 100), "healthy", "length", id="k = 5, 2.5"),
        # Without positions: accepted / drafts is the most that position 0 can be.
        pytest.param(Counts(1000, 3000, 199), "suspicious", "first-position", id="at most 0.199"),
        pytest.param(Counts(1000, 3000, 1500), "healthy", "length", id="no positions, 2.5"),
        pytest.param(Counts(1000, 5000, 1499), "suspicious", "length", id="k = 5, 2.499, none"),
        pytest.param(Counts(1000, 5000, 2000), "no-data", "no-positions", id="k = 5, 3.0, none"),
        pytest.param(Counts(1000, 5000, 2500), "healthy", "length", id="k = 5, 3.5, none"),
        # What cannot be.
        pytest.param(Counts(10, 30, 30, (10, 10, 10)), "too-few-drafts", "few-drafts", id="all"),
        pytest.param(Counts(10, 30, 31, (10, 10, 10)), "impossible", "impossible", id="more"),
        pytest.param(counts(1000, 700, 701, 300), "impossible", "impossible", id="rising"),
        pytest.param(counts(1000, 700, 700, 300), "healthy", "length", id="level"),
        pytest.param(counts(1000, 1001, 500, 300), "impossible", "impossible", id="over drafts"),
        pytest.param(counts(0, 1, 0, 0, draft_tokens=3), "impossible", "impossible", id="none"),
        pytest.param(Counts(0, 3, 0), "impossible", "impossible", id="tokens without drafts"),
        pytest.param(
            counts(1000, 700, 500, 300, draft_tokens=3011), "impossible", "impossible", id="over k"
        ),
        pytest.param(
            counts(1000, 700, 500, 300, draft_tokens=3010), "healthy", "length", id="skew of k"
        ),
        pytest.param(
            Counts(1000, 3000, 1511, (700, 500, 300)), "impossible", "impossible", id="other sum"
        ),
        pytest.param(
            Counts(1000, 3000, 1510, (700, 500, 300)), "healthy", "length", id="skew of the sum"
        ),
    ],
)
def test_verdict(figures: Counts, verdict: str, reason: str) -> None:
    judgement = judge(figures)
    assert (judgement.verdict, judgement.reason) == (verdict, reason), judgement.message


@pytest.mark.parametrize(
    ("figures", "verdict", "reason"),
    [
        pytest.param(
            shares(1000, 0.578, 0.384, 0.292), "suspicious", "length", id="GPU runs, ids (0, 1, 2)"
        ),
        pytest.param(
            shares(1000, 1.0, 0.994, 0.99, 0.097, 0.02), "suspicious", "decay", id="GPU runs, k = 5"
        ),
        pytest.param(
            shares(1000, 1.0, 0.994, 0.99, 0.97, 0.02), "suspicious", "decay", id="a cliff at 4"
        ),
        pytest.param(Counts(1027, 3081, 3073), "healthy", "length", id="GPU runs, right ids"),
        pytest.param(Counts(1326, 3978, 2776), "healthy", "length", id="GPU runs, early draft"),
        pytest.param(
            shares(1000, 0.999, 0.997, 0.995), "healthy", "length", id="GPU runs, stopped early"
        ),
        pytest.param(
            shares(1000, 0.999, 0.97, 0.941),
            "healthy",
            "length",
            id="GPU runs, off by one: not to be seen in figures (report 29)",
        ),
        pytest.param(shares(1000, 0.1, 0.01, 0), "suspicious", "first-position", id="report 30"),
        pytest.param(
            shares(10_000, 0.036, 0.0006, 0), "suspicious", "first-position", id="report 31"
        ),
        pytest.param(shares(1000, 0.75, 0.58, 0.44), "healthy", "length", id="report 31, right"),
        pytest.param(counts(1000, 0, 0, 0), "structural", "nothing-accepted", id="report 33"),
        # Of the acceptance rates of table b only the sum is known: 3 * 0.6025 = 1.8075.
        pytest.param(Counts(1000, 3000, 1808), "healthy", "length", id="table b, GSM8K"),
        pytest.param(Counts(1000, 3000, 1344), "suspicious", "length", id="table b, MT-Bench low"),
        # 51.78 % of 4: 2.07 accepted, of which the first three positions hold 1.55 at least.
        pytest.param(Counts(42_668, 170_672, 88_374), "healthy", "length", id="table b, k = 4"),
    ],
)
def test_verdict_on_reported_figures(figures: Counts, verdict: str, reason: str) -> None:
    judgement = judge(figures)
    assert (judgement.verdict, judgement.reason) == (verdict, reason), judgement.message


def test_report_31_has_the_length_that_it_states() -> None:
    """1 + 0.036 + 0.0006 = 1.0366, given as 1.036; 1.21 % of 3 tokens a draft is 0.0363."""
    figures = shares(10_000, 0.036, 0.0006, 0)
    assert figures.mean_acceptance_length == pytest.approx(1.0366)
    assert figures.acceptance_rate == pytest.approx(0.0122)


def test_gpu_runs_have_the_conditional_shares_that_their_source_implies() -> None:
    """.384 / .578 = .664 and .292 / .384 = .760: it rises, so it is no decay."""
    figures = shares(1000, 0.578, 0.384, 0.292)
    given = figures.conditional_acceptance_by_position
    assert given == pytest.approx((0.578, 0.664, 0.760), abs=0.001)
    assert figures.mean_acceptance_length == pytest.approx(2.254)


def test_the_step_that_a_draft_model_was_not_trained_for_is_named() -> None:
    assert judge(shares(1000, 1.0, 0.994, 0.99, 0.097, 0.02)).position == 3
    assert judge(shares(1000, 1.0, 0.994, 0.99, 0.97, 0.02)).position == 4


def test_drafts_that_were_cut_short_are_not_taken_for_a_decay() -> None:
    """Half of the drafts hold one token: of the others most go on. With all of k it is a decay."""
    short = counts(1000, 900, 300, 280, draft_tokens=500 * 3 + 500)
    assert judge(short).reason == "length"
    assert "drafts hold only 2.00 tokens in the mean" in judge(short).message
    assert judge(counts(1000, 900, 300, 280)).reason == "decay"


def test_a_low_length_names_the_tasks_that_have_it() -> None:
    message = judge(shares(1000, 0.7, 0.45, 0.25)).message
    assert "published for CEval, MT-Bench only" in message
    assert "published for no task" in judge(shares(1000, 0.5, 0.3, 0.2)).message


def test_a_high_length_is_not_praised() -> None:
    assert "flatter" in judge(shares(1000, 0.99, 0.98, 0.97)).message
    assert "flatter" not in judge(shares(1000, 0.8, 0.7, 0.6)).message


def test_published_lengths_are_possible_at_k_3() -> None:
    assert all(1 < low <= high <= 4 for low, high in REPORTED.values())


# One scrape


@pytest.mark.parametrize(
    ("by_position", "exit_class", "exit_code"),
    [
        ((700, 500, 300), "ok", 0),
        ((100, 50, 20), "risky", 1),
        ((0, 0, 0), "broken", 4),
    ],
)
def test_exit_class(
    told: Told, by_position: tuple[int, ...], exit_class: str, exit_code: int
) -> None:
    report = told(page(Engine(1000, by_position)))
    assert (report.exit_class, report.exit_code) == (exit_class, exit_code)


@pytest.mark.parametrize(
    ("text", "reason", "cause"),
    [
        (page(Engine(0, (0, 0, 0))), "no-drafts", "no-requests"),
        (NEIGHBOURS, "not-speculating", "not-speculating"),
        (v0_page(50, 100, 70), "v0-engine", "v0-engine"),
        (diffusion_page(), "diffusion", None),
    ],
)
def test_no_data_is_not_ok(told: Told, text: str, reason: str, cause: str | None) -> None:
    report = told(text)
    assert (report.verdict, report.judgement.reason) == ("no-data", reason)
    assert report.exit_code == 1
    assert [c.code for c in report.causes()] == ([cause] if cause else [])


def test_engines_are_added_up_by_model(told: Told) -> None:
    """Model a: (700 + 600) / (1000 + 1000) = 0.65 at position 0, and 2800 / 2000 accepted."""
    report = told(
        page(
            Engine(1000, (700, 500, 300), model="a"),
            Engine(1000, (600, 400, 300), model="a", engine="10"),
            Engine(0, (0, 0, 0), model="a", engine="2"),
            Engine(1000, (800, 700, 600), model="b"),
        )
    )
    a, b = report.models
    assert [engine.engine for engine in a.engines] == ["0", "2", "10"]
    assert a.total == counts(2000, 1300, 900, 600)
    assert a.total.acceptance_by_position[0] == 0.65
    assert a.total.mean_acceptance_length == 2.4
    assert (a.judgement.verdict, b.judgement.verdict) == ("suspicious", "healthy")
    assert report.verdict == "suspicious"


def test_one_broken_engine_is_not_lost_in_the_sum(told: Told) -> None:
    healthy = [Engine(10_000, (8000, 6500, 5000), engine=str(n)) for n in range(3)]
    report = told(page(*healthy, Engine(1000, (0, 0, 0), engine="3")))
    assert (report.verdict, report.exit_code) == ("structural", 4)
    assert report.judgement.message.startswith("engine 3: none of 3000 draft tokens")


def test_an_engine_without_drafts_or_with_a_harder_task_takes_nothing_away(told: Told) -> None:
    report = told(
        page(
            Engine(10_000, (8000, 6500, 5000)),
            Engine(400, (260, 180, 120), engine="1"),
            Engine(0, (0, 0, 0), engine="2"),
        )
    )
    assert report.verdict == "healthy"


def test_a_model_without_drafts_is_not_ok(told: Told) -> None:
    idle = Engine(0, (0, 0, 0), model="idle")
    assert told(page(Engine(1000, (700, 500, 300)), idle)).exit_code == 1


def test_replicas_are_added_up_and_told(told: Told) -> None:
    replicas = [Engine(500, (350, 250, 150), more={"ReplicaId": name}) for name in "ab"]
    report = told(page(*replicas))
    assert report.models[0].total == counts(1000, 700, 500, 300)
    assert "the counters of 2 processes are added up" in report.notes[0]


def test_labels_may_be_missing(told: Told) -> None:
    report = told(untyped(page(Engine(1000, (700, 500, 300), engine=None, model=None))))
    assert report.verdict == "healthy"
    assert report.document()["models"][0]["model_name"] is None
    assert "(no label model_name): healthy" in shown(report)


def test_ray_with_nothing_accepted_is_structural(told: Told) -> None:
    assert told(ray(page(Engine(200, (0, 0, 0))), "_")).verdict == "structural"


def test_v0_beside_v1_is_a_note(told: Told) -> None:
    v0 = v0_page(50, 100, 70).replace("target", "older").replace(NEIGHBOURS, "")
    report = told(untyped(page(Engine(1000, (700, 500, 300)))) + untyped(v0))
    assert report.verdict == "healthy"
    assert "the V0 engine serves older" in report.notes[0]


# Two scrapes


def test_the_interval_is_what_is_judged(told: Told) -> None:
    """Healthy for 100 000 drafts, then 1000 without one accepted token."""
    before = Engine(100_000, (80_000, 65_000, 50_000), timestamp=1_000_000)
    now = Engine(101_000, (80_000, 65_000, 50_000), timestamp=1_060_000)
    assert told(page(now)).verdict == "healthy"
    report = told(page(now), page(before))
    assert report.models[0].total == counts(1000, 0, 0, 0)
    assert (report.verdict, report.seconds) == ("structural", 60.0)
    assert report.notes == ()


def test_no_drafts_in_the_interval(told: Told) -> None:
    text = page(Engine(1000, (700, 500, 300)))
    assert told(text, text).judgement.reason == "no-drafts"


def test_a_counter_that_went_down_was_reset(told: Told) -> None:
    """All of an engine's counters are then counted since, also those that are higher again."""
    before = Engine(500, (499, 498, 497), created=None)
    now = Engine(1000, (700, 500, 300), created=None)
    report = told(page(now), page(before))
    assert report.models[0].total == counts(1000, 700, 500, 300)
    assert report.models[0].engines[0].reset
    assert "target, engine 0 was restarted in between" in report.notes[0]


def test_a_later_start_is_a_reset_though_nothing_went_down(told: Told) -> None:
    before = Engine(100, (70, 50, 30), created=1000.0)
    now = Engine(1000, (700, 500, 300), created=2000.0)
    assert told(page(now), page(before)).models[0].total.drafts == 1000
    same = Engine(1000, (700, 500, 300), created=1000.0)
    report = told(page(same), page(before))
    assert report.models[0].total == counts(900, 630, 450, 270)
    assert not report.models[0].engines[0].reset


def test_another_k_is_a_reset(told: Told) -> None:
    before = page(Engine(100, (70, 50), created=None))
    report = told(page(Engine(1000, (700, 500, 300), created=None)), before)
    assert report.models[0].engines[0].reset


def test_only_the_engine_that_was_restarted_is_counted_since(told: Told) -> None:
    before = page(Engine(1000, (700, 500, 300)), Engine(900, (600, 400, 200), engine="1"))
    now = page(Engine(1500, (1050, 750, 450)), Engine(10, (7, 5, 3), engine="1"))
    report = told(now, before)
    assert [e.counts.drafts for e in report.models[0].engines] == [500, 10]
    assert [e.reset for e in report.models[0].engines] == [False, True]
    assert report.models[0].total == counts(510, 357, 255, 153)


def test_an_engine_that_came_or_went_is_told(told: Told) -> None:
    before = page(Engine(1000, (700, 500, 300)), Engine(5, (4, 3, 2), engine="1"))
    now = page(Engine(1500, (1050, 750, 450)), Engine(10, (7, 5, 3), engine="2"))
    report = told(now, before)
    assert [(e.engine, e.new) for e in report.models[0].engines] == [("0", False), ("2", True)]
    assert report.notes == (
        "target, engine 1 is only in the previous scrape and is left out",
        "target, engine 2 is not in the previous scrape: the figures are those since it started",
    )


@pytest.mark.parametrize("time", ["created", "timestamp"])
def test_swapped_scrapes_are_refused(told: Told, time: str) -> None:
    earlier = page(Engine(1000, (700, 500, 300), **{time: 1_000_000}))  # type: ignore[arg-type]
    later = page(Engine(2000, (1400, 1000, 600), **{time: 2_000_000}))  # type: ignore[arg-type]
    told(later, earlier)
    with pytest.raises(MetricsError, match="the later of the two"):
        told(earlier, later)


# Causes


@dataclass
class Found:
    code: str
    severity: str = "warning"


@dataclass
class Diagnosis:
    findings: list[Found]


def diagnosed(*codes: str, severity: str = "warning") -> Diagnosis:
    return Diagnosis([Found(code, severity) for code in codes])


def first_causes(report: MetricsReport, diagnosis: Diagnosis | None = None) -> list[str]:
    return [cause.code for cause in report.causes(diagnosis)][:2]


def test_causes_of_each_verdict_begin_with_the_likeliest(told: Told) -> None:
    expected = {
        (0, 0, 0): ["method", "lm-head"],
        (100, 50, 20): ["layers", "norms"],
        (900, 100, 20): ["unrolled-steps", "training"],
        (600, 400, 250): ["layers", "workload"],
        (700, 701, 300): ["while-counting", "leftover-counters"],
        (700, 500, 300): [],
    }
    for by_position, causes in expected.items():
        assert first_causes(told(page(Engine(1000, by_position)))) == causes


def test_findings_bring_their_causes_to_the_front(told: Told) -> None:
    report = told(page(Engine(1000, (900, 100, 20))))
    assert first_causes(report, diagnosed("rope"))[0] == "rope"
    assert first_causes(report, diagnosed("aux-layers-ignored"))[0] == "layers"
    both = report.causes(diagnosed("norm-flag", "aux-layers-convention"))
    assert [(cause.code, cause.found) for cause in both[:3]] == [
        ("layers", ("aux-layers-convention",)),
        ("norms", ("norm-flag",)),
        ("unrolled-steps", ()),
    ]
    assert len({cause.code for cause in both}) == len(both)


def test_what_is_only_informed_of_or_unknown_moves_nothing(told: Told) -> None:
    report = told(page(Engine(1000, (0, 0, 0))))
    plain = report.causes()
    assert report.causes(diagnosed("norm-flag", severity="info")) == plain
    assert report.causes(diagnosed("something-new")) == plain
    assert report.causes(diagnosed()) == plain


def test_findings_do_not_explain_what_is_no_acceptance(told: Told) -> None:
    for by_position in ((700, 500, 300), (700, 701, 300), (0, 0, 0)):
        drafts = 1000 if sum(by_position) else 0
        report = told(page(Engine(drafts, by_position)))
        assert report.causes(diagnosed("norm-flag")) == report.causes()


def test_a_decay_gives_the_number_of_tokens_to_ask_for(told: Told) -> None:
    by_position = (1000, 994, 990, 97, 20)
    (command,) = told(page(Engine(1000, by_position))).causes()[0].commands
    config = json.loads(command.partition("--speculative-config ")[2].strip("'"))
    assert config == {"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 3}


def test_commands_have_nothing_left_to_fill_in(told: Told) -> None:
    for by_position in ((0, 0, 0), (100, 50, 20), (900, 100, 20), (600, 400, 250), (7, 8, 3)):
        for cause in told(page(Engine(1000, by_position))).causes():
            assert not [command for command in cause.commands if "{interval}" in command]
            assert not [command for command in cause.commands if "{position}" in command]


def test_the_next_scrape_is_compared_with_this_file(tmp_path: Path) -> None:
    file = tmp_path / "a b.txt"
    file.write_text(page(Engine(0, (0, 0))))
    (command,) = read(str(file)).causes()[0].commands
    assert command.endswith(f"--metrics http://localhost:8000/metrics --previous '{file}'")


# Told


def shown(report: MetricsReport, *, block_elements: bool = False) -> str:
    """All of it as plain text, 120 columns wide."""
    stream = io.StringIO()
    before, sys.stdout = sys.stdout, stream
    try:
        blocks._show_plain(report.blocks(block_elements=block_elements), 120)
    finally:
        sys.stdout = before
    return stream.getvalue()


def test_the_report_of_a_page(told: Told) -> None:
    text = shown(told(page(Engine(1000, (700, 500, 300)))))
    lines = text.splitlines()
    assert lines[0] == "target: healthy"
    assert [line.split() for line in lines if line.startswith("0 ")] == [
        ["0", "1000", "3.00", "0.500", "2.500", "healthy"],
        ["0", "0.700", "#" * 28, "0.700"],
    ]
    assert text.isascii()
    assert "never judge on random prompts" in text
    assert "off by one may cost only 3 %" in text
    assert "GSM8K 2.79 to 3.23" in text


def test_what_figures_cannot_show_is_said_of_healthy_ones_only(told: Told) -> None:
    healthy, bad = (told(page(Engine(1000, (p, 500, 300)))) for p in (700, 500))
    assert "off by one" in healthy.document()["notes"][-1]
    assert bad.document()["notes"] == []


def test_bars_are_as_long_as_their_shares(told: Told) -> None:
    report = told(page(Engine(1000, (1000, 500, 1, 0))))
    lines = shown(report).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("position"))
    assert [line.count("#") for line in lines[start + 1 : start + 5]] == [40, 20, 1, 0]
    fine = shown(report, block_elements=True).splitlines()[start + 1 : start + 5]
    assert [line.count("\u2588") for line in fine] == [40, 20, 0, 0]
    assert "\u258f" in fine[2]


def test_a_pipe_gets_no_block_elements(told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    print_blocks(told(page(Engine(1000, (100, 50, 20)))).blocks())
    out = capsys.readouterr().out
    assert out.isascii()
    assert "Likely causes, the likeliest first:" in out


@pytest.mark.parametrize(("encoding", "expected"), [("utf-8", True), ("ascii", False)])
def test_a_terminal_gets_what_its_encoding_has(
    told: Told, monkeypatch: pytest.MonkeyPatch, encoding: str, expected: bool
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", stream)
    blocks = list(told(page(Engine(1000, (700, 500, 300)))).blocks())
    assert ("\u2588" in str(blocks)) is expected


def test_a_narrow_terminal_gets_the_figures(told: Told) -> None:
    report = told(page(Engine(1000, (700, 500, 300))))
    tables = [block for block in report.blocks() if isinstance(block, Columns)]
    assert all(blocks._fitting(table, 60) is not None for table in tables)


def test_the_document_is_json_and_has_the_figures(told: Told) -> None:
    now = page(Engine(2000, (1400, 1000, 600)), Engine(0, (0, 0, 0), engine="1"))
    before = page(Engine(1000, (700, 500, 300)))
    document = told(now, before).document(diagnosed("norm-flag"))
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert (document["verdict"], document["exit_code"]) == ("healthy", 0)
    (model,) = document["models"]
    assert model["total"]["mean_acceptance_length"] == 2.5
    assert model["total"]["acceptance_by_position"] == [0.7, 0.5, 0.3]
    assert model["total"]["conditional_acceptance_by_position"] == [0.7, 0.714286, 0.6]
    idle = model["engines"][1]
    assert (idle["new"], idle["drafts"], idle["acceptance_rate"]) == (True, 0, None)


def test_a_name_with_control_characters_stays_on_its_line(told: Told) -> None:
    text = shown(told(page(Engine(1000, (100, 50, 20), model=r"a\nb" + "\x1b[31m"))))
    assert text.startswith("a\\nb\\x1b[31m: suspicious\n")


# Sources


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    text = page(Engine(1000, (700, 500, 300))).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    report = read("-")
    assert (report.source, report.verdict) == ("-", "healthy")


def error_of(source: str, previous: str | None = None, timeout: float = 5.0) -> MetricsError:
    with pytest.raises(MetricsError) as caught:
        read(source, previous, timeout)
    assert caught.value.exit_code == 2
    assert caught.value.message.isprintable()
    assert caught.value.hint.isprintable()
    return caught.value


def test_standard_input_holds_one_scrape() -> None:
    assert "standard input" in error_of("-", "-").message


def test_no_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert "no standard input" in error_of("-").message


@pytest.mark.parametrize("source", ["", "not\0possible", "no\nsuch file", "/dev/null/x"])
def test_files_that_cannot_be_read(source: str) -> None:
    assert error_of(source).message


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert "Is a directory" in error_of(str(tmp_path)).message


@pytest.mark.parametrize("source", ["file:///etc/hostname", "ftp://localhost/metrics"])
def test_other_kinds_of_address(source: str) -> None:
    assert "is no kind of address" in error_of(source).message


def test_what_never_ends_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "SIZE_LIMIT", 1024 * 1024)
    assert "/dev/zero is larger than 1 MiB" in error_of("/dev/zero").message


Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def server(answer: Answer) -> Iterator[str]:
    """A server on the loopback interface that answers every GET so; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError):  # The reader left, as it should.
                answer(self)

        def log_message(self, *_: object) -> None:
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def answering(
    body: bytes = b"", status: int = 200, length: int | None = None, **headers: str
) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body) if length is None else length))
        request.end_headers()
        request.wfile.write(body)

    return answer


HEALTHY = page(Engine(1000, (700, 500, 300))).encode()


@pytest.mark.parametrize("path", ["", "/", "/metrics", "/metrics?a=b#c"])
def test_a_server(path: str) -> None:
    asked: list[tuple[str, str | None]] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        asked.append((request.path, request.headers.get("Accept")))
        answering(HEALTHY)(request)

    with server(answer) as address:
        report = read(f"{address}{path}")
        (command,) = read(f"{address}{path}", f"{address}{path}").causes()[0].commands
    assert report.verdict == "healthy"
    assert asked[0][0] == ("/metrics?a=b" if "?" in path else "/metrics")
    assert "version=0.0.4" in (asked[0][1] or "")
    assert f"curl -s {address}/metrics" in command.replace("'", "")


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with server(answering(HEALTHY)) as address:
        assert read(address).verdict == "healthy"


def test_redirects_are_followed() -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        moved = request.path == "/metrics"
        answering(HEALTHY, 307 if moved else 200, Location="/metrics/")(request)

    with server(answer) as address:
        assert read(address).verdict == "healthy"


@pytest.mark.parametrize("where", ["file:///etc/hostname", "ftp://localhost/", "gopher:x"])
def test_redirects_to_files_are_not_followed(where: str) -> None:
    with server(answering(status=302, Location=where)) as address:
        assert "the server redirects to an address of the kind" in error_of(address).message


def test_redirects_in_a_circle_end() -> None:
    with server(answering(status=302, Location="/metrics")) as address:
        assert "redirects more than 5 times" in error_of(address).message


@pytest.mark.parametrize("status", [401, 404, 500])
def test_an_error_of_the_server_is_named(status: int) -> None:
    with server(answering(b"<html>", status)) as address:
        assert f"/metrics answered {status}" in error_of(address).message


def test_an_error_page_with_status_200() -> None:
    with server(answering(b"<html>Sign in</html>\n")) as address:
        assert "is a web page" in error_of(address).message


def test_an_answer_that_breaks_off() -> None:
    with server(answering(HEALTHY, length=len(HEALTHY) + 10)) as address:
        assert error_of(address).code in ("metrics-truncated", "metrics-unreachable")


def test_a_server_that_sends_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "SIZE_LIMIT", 1024 * 1024)

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        while True:
            request.wfile.write(b"a 1\n" * 4096)

    with server(answer) as address:
        assert "is larger than 1 MiB" in error_of(address).message


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_sends_a_byte_now_and_then(start: bytes) -> None:
    left = threading.Event()

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(start)
        while not left.wait(0.05):
            request.wfile.write(b"a")

    with server(answer) as address:
        error = error_of(address, timeout=0.5)
        left.set()
    assert "did not answer in full within 0.5 seconds" in error.message


def test_a_server_that_is_none() -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"\x16\x03\x01 not http\r\n\r\n")

    with server(answer) as address:
        assert error_of(address).code == "metrics-unreachable"
        secure = error_of(address.replace("http:", "https:"))
    assert secure.code == "metrics-unreachable"


def test_nobody_listens() -> None:
    with server(answering()) as address:
        pass
    assert "Connection refused" in error_of(address).message


@pytest.mark.parametrize(
    "url", ["http://", "http:///metrics", "http://[::1", "http://a:b/", "http://a b/"]
)
def test_addresses_that_are_none(url: str) -> None:
    assert error_of(url).message


def test_a_password_is_not_repeated() -> None:
    error = error_of("http://user:secret@127.0.0.1:9/metrics")
    assert "secret" not in error.message + error.hint
