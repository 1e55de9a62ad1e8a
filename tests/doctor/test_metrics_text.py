"""Every naming of the counters is read, and what is no such text is refused in two lines."""

from __future__ import annotations

import gzip
import os
import random
import re
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client import generate_latest as classic
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_of_the_client

from doctor.metrics_exposition import (
    NEIGHBOURS,
    STEM,
    Engine,
    diffusion_page,
    openmetrics,
    page,
    ray,
    sample,
    untyped,
    v0_page,
    without_total,
)
from vllm_eagle3_patch.doctor.metrics import text
from vllm_eagle3_patch.doctor.metrics.source import MetricsError
from vllm_eagle3_patch.doctor.metrics.text import parse

HALF = Engine(1000, (700, 500, 300))
"""1000 drafts of 3 tokens, of which 1500 were accepted."""

EXPECTED = {"drafts": 1000, "draft_tokens": 3000, "accepted_tokens": 1500}
POSITIONS = {0: 700, 1: 500, 2: 300}


def refused(content: bytes | str) -> MetricsError:
    """The error of a text that is refused; both of its lines are one line each."""
    with pytest.raises(MetricsError) as caught:
        parse(content.encode() if isinstance(content, str) else content, "FILE")
    error = caught.value
    assert error.exit_code == 2
    for line in (error.message, error.hint):
        assert line.isprintable(), line
        assert len(line) < 250, line
    return error


# Names


NAMINGS = {
    "V1": page(HALF),
    "V1 without _created (several API servers)": page(Engine(1000, (700, 500, 300), created=None)),
    "V1 with timestamps": page(Engine(1000, (700, 500, 300), timestamp=1_700_000_000_000)),
    "V1 filtered with grep": untyped(page(HALF)),
    "V1 names of the source": without_total(page(HALF)),
    "V1 names of the source, filtered": without_total(untyped(page(HALF))),
    "Ray up to 0.10.2": ray(page(HALF), ":"),
    "Ray from 0.11.0": ray(page(HALF), "_"),
    "OpenMetrics": openmetrics(page(HALF), ":"),
    "OpenMetrics, escaped": openmetrics(untyped(page(HALF)), "_"),
    "CRLF": page(HALF).replace("\n", "\r\n"),
    "byte order mark": "\ufeff" + page(HALF),
}


@pytest.mark.parametrize("text", NAMINGS.values(), ids=NAMINGS.keys())
def test_each_naming_gives_the_same_counts(text: str) -> None:
    (series,) = parse(text.encode(), "FILE").series.values()
    assert series.counts == EXPECTED
    assert series.by_position == POSITIONS
    assert series.label("model_name") == "target"
    assert series.label("engine") == "0"


@pytest.mark.parametrize("write", [classic, openmetrics_of_the_client])
def test_pages_that_the_client_library_itself_writes(
    write: Callable[[CollectorRegistry], bytes],
) -> None:
    """Created and counted as vllm/v1/spec_decode/metrics.py does (0.9.0 to 0.33.0)."""
    registry = CollectorRegistry()
    labels = ["model_name", "engine"]
    for kind, value in EXPECTED.items():
        Counter(f"{STEM}{kind}", "text", labels, registry=registry).labels("m", "0").inc(value)
    name = f"{STEM}accepted_tokens_per_pos"
    by_position = Counter(name, "text", [*labels, "position"], registry=registry)
    for position, value in POSITIONS.items():
        by_position.labels("m", "0", str(position)).inc(value)
    (series,) = parse(write(registry), "FILE").series.values()
    assert (series.counts, series.by_position) == (EXPECTED, POSITIONS)
    assert series.created is not None


def test_created_and_timestamp_are_seconds() -> None:
    engine = Engine(1, (1,), created=1_700_000_000.5, timestamp=1_700_000_100_250)
    (series,) = parse(page(engine).encode(), "FILE").series.values()
    assert (series.created, series.timestamp) == (1_700_000_000.5, 1_700_000_100.25)


def test_what_ray_leaves_out_is_zero() -> None:
    text = ray(page(Engine(200, (0, 0, 0))), "_")
    assert "accepted" not in text
    (series,) = parse(text.encode(), "FILE").series.values()
    assert series.counts == {"drafts": 200, "draft_tokens": 600, "accepted_tokens": 0}
    assert series.by_position == {0: 0, 1: 0, 2: 0}


def test_what_ray_writes_twice_counts_once() -> None:
    text = ray(page(HALF), "_")
    for both in (text + without_total(text), without_total(text) + text):
        (series,) = parse(both.encode(), "FILE").series.values()
        assert series.counts == EXPECTED


def test_engines_models_and_replicas_are_told_apart() -> None:
    engines = [
        Engine(10, (5,)),
        Engine(20, (6,), engine="1"),
        Engine(30, (7,), model="other"),
        Engine(40, (8,), more={"ReplicaId": "a"}),
        Engine(50, (9,), engine=None, model=None),
    ]
    series = parse(page(*engines).encode(), "FILE").series.values()
    assert sorted(s.counts["drafts"] for s in series) == [10, 20, 30, 40, 50]
    assert {s.label("model_name") for s in series} == {"target", "other", None}


def test_v0_is_named_and_not_counted() -> None:
    scrape = parse(v0_page(50, 100, 70).encode(), "FILE")
    assert (scrape.series, scrape.v0_models) == ({}, ("target",))


def test_v0_gauges_alone_are_v0() -> None:
    text = sample("vllm:spec_decode_efficiency", {"model_name": "m"}, "NaN", None)
    assert parse(text.encode(), "FILE").v0_models == ("m",)


def test_diffusion_and_no_speculation_are_told() -> None:
    assert parse(diffusion_page().encode(), "FILE").diffusion
    scrape = parse(NEIGHBOURS.encode(), "FILE")
    assert scrape.vllm
    assert not scrape.series


def test_what_else_is_on_the_page_does_no_harm() -> None:
    text = 'a broken {line\n{"a.name",label="x"} 1\n' + page(HALF)
    (series,) = parse(text.encode(), "FILE").series.values()
    assert series.counts == EXPECTED


def test_accepted_is_the_sum_of_its_positions_where_it_is_missing() -> None:
    text = re.sub(rf"{STEM}accepted_tokens_total\{{.*\n", "", page(HALF))
    (series,) = parse(text.encode(), "FILE").series.values()
    assert series.counts["accepted_tokens"] == 1500


# What is refused


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"<!DOCTYPE html>\n<html>502 Bad Gateway</html>\n", "is a web page"),
        (b'\n{"status": "success", "data": {}}\n', "is JSON"),
        (b"[1]\n", "is JSON"),
        (gzip.compress(page(HALF).encode()), "gzip"),
        (page(HALF).encode("utf-16"), "UTF-16"),
        (b"\x7fELF\0\0\0\1", "is binary"),
        (b"vllm:a 1\n\xff\xfe\n", "is not UTF-8"),
        (b"INFO 11-29 vllm started\n", "the first wrong line is: INFO 11-29 vllm started"),
        (b"x" * 200_000 + b"\n", "a line of 200000 characters"),
        (b"node_load1 0.5\n", "no metric of vLLM"),
        (b"# EOF\n", "no metric of vLLM"),
    ],
)
def test_what_is_no_page_of_vllm_is_refused(content: bytes, told: str) -> None:
    assert told in refused(content).message


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1.0", "0.5", "1e300", "9" * 400])
def test_what_no_counter_can_be_is_refused(value: str) -> None:
    text = page(HALF).replace(" 1000.0\n", f" {value}\n", 1)
    error = refused(text)
    assert "spec_decode_num_drafts_total is " in error.message
    assert error.code == "metrics-value"


@pytest.mark.parametrize("cut", [1, 2, 8, 40, 90])
def test_a_page_that_was_cut_is_refused(cut: int) -> None:
    """Also where only the line feed is missing: 300.0 may have been 300.01 or 3000.0."""
    text = untyped(page(HALF))
    assert refused(text[:-cut]).code == "metrics-truncated"


def test_a_page_that_was_cut_between_lines_lacks_a_counter() -> None:
    lines = untyped(page(HALF)).splitlines(keepends=True)
    drafts = next(i for i, line in enumerate(lines) if "num_drafts" in line)
    error = refused("".join(lines[: drafts + 1]))
    assert "vllm:spec_decode_num_draft_tokens_total is missing" in error.message


def test_a_position_that_is_missing_is_refused() -> None:
    text = re.sub(r'.*position="1".*\n', "", page(HALF))
    assert 'position="1"} is missing' in refused(text).message


@pytest.mark.parametrize("position", ["x", "-1", "1.0", "", "\u0663", "1000", "9" * 300])
def test_a_position_that_is_no_number_is_refused(position: str) -> None:
    text = untyped(page(HALF)).replace('position="2"', f'position="{position}"')
    assert "has the position" in refused(text).message


def test_a_position_without_its_label_is_refused() -> None:
    text = untyped(page(HALF)).replace(',position="2"', "")
    assert "has no label position" in refused(text).message


def test_two_scrapes_in_one_file_are_refused() -> None:
    error = refused(page(HALF) * 2)
    assert "is written twice" in error.message
    assert "--previous" in error.hint


def test_openmetrics_that_is_none_is_refused() -> None:
    text = openmetrics(page(HALF), ":")
    assert "is not OpenMetrics text" in refused(text.replace(" 1000.0", "  1000.0")).message
    assert "the first wrong line" in refused(text.replace(" 1000.0", " x")).message


def test_a_broken_line_of_ours_is_named() -> None:
    broken = "vllm:spec_decode_num_drafts_total{engine=\x1b[31m} 5"
    error = refused(page(HALF) + broken + "\n")
    assert "the first wrong line is: " in error.message
    assert "\x1b" not in error.message


def test_labels_may_hold_anything() -> None:
    name = r"a\"b\\c\n{},= \u0085"
    (series,) = parse(page(Engine(5, (1,), model=name)).encode(), "FILE").series.values()
    assert series.label("model_name") == 'a"b\\c\n{},= \\u0085'


def test_pages_with_bytes_changed_are_read_or_refused() -> None:
    randomness = random.Random(5)
    original = bytearray(page(HALF, Engine(5, (4, 1), engine="1")).encode())
    for _ in range(1500):
        changed = bytearray(original)
        for _ in range(randomness.randrange(1, 4)):
            at = randomness.randrange(len(changed))
            changed[at : at + randomness.randrange(3)] = os.urandom(randomness.randrange(3))
        try:
            parse(bytes(changed), "FILE")
        except MetricsError as error:
            assert error.message.isprintable()


def test_the_names_that_are_read_are_those_that_are_documented() -> None:
    for kind in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"):
        assert text._COUNTER.fullmatch(f"vllm:spec_decode_num_{kind}_total")
