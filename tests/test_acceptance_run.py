"""What benchmarks/acceptance does around vLLM: draft configs, metrics, the table's rows."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.acceptance.counting import Counts
from benchmarks.acceptance.report import last_error
from benchmarks.acceptance.rows import DEFAULT, LAYERS, SPARSE
from benchmarks.acceptance.run import (
    CONFIGURATIONS,
    EDGES,
    Configuration,
    compare,
    line,
    parse,
)
from benchmarks.acceptance.speculate import draft_with_ids, read_counts

RIGHT = Counts(10, 20, 12, [8, 4])
FALLEN_BACK = Counts(12, 24, 9, [6, 3])
EXPECTED = {("sparse-early", SPARSE): RIGHT, ("sparse-early", DEFAULT): FALLEN_BACK}


@dataclass
class Metric:
    name: str
    value: int = 0
    values: list[int] = field(default_factory=list)


def compared(place: str, counts: Counts, *, patched: bool = False) -> dict[str, Any]:
    """The row for a run that reported these counts."""
    configuration = Configuration("sparse-early", SPARSE, "a note", place)
    result = {
        "patched": patched,
        "counts": counts.to_json(),
        "tokens": [[1, 2], [3, 4]],
        "seconds": 1.0,
    }
    return compare(configuration, result, EXPECTED, [[1, 2], [3, 5]])


@pytest.mark.parametrize(
    ("place", "added"),
    [
        ("top", {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}),
        (
            "nested",
            {
                "eagle_config": {
                    "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
                    "use_aux_hidden_state": True,
                }
            },
        ),
        ("none", {}),
    ],
)
def test_a_draft_model_is_copied_with_other_ids(
    tmp_path: Path, place: str, added: dict[str, object]
) -> None:
    draft, copy = tmp_path / "draft", tmp_path / "copy"
    draft.mkdir()
    copy.mkdir()
    config = {"hidden_size": 128, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    (draft / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (draft / "model.safetensors").write_bytes(b"weights")
    draft_with_ids(draft, copy, [1, 4, 6], place)
    written = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    assert written == {"hidden_size": 128, **added}
    assert (copy / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("place", ["top", "nested"])
def test_what_the_ids_count_is_said_beside_them(tmp_path: Path, place: str) -> None:
    draft, copy = tmp_path / "draft", tmp_path / "copy"
    draft.mkdir()
    copy.mkdir()
    (draft / "config.json").write_text("{}", encoding="utf-8")
    (draft / "model.safetensors").write_bytes(b"weights")
    draft_with_ids(draft, copy, [1, 4, 6], place, "boundary")
    written = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    beside = written if place == "top" else written["eagle_config"]
    assert beside["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]
    assert beside["eagle_aux_hidden_state_layer_ids_convention"] == "boundary"


def test_counters_are_read_from_the_engines_metrics() -> None:
    metrics = [
        Metric("vllm:generation_tokens", 640),
        Metric("vllm:spec_decode_num_drafts", 10),
        Metric("vllm:spec_decode_num_draft_tokens", 20),
        Metric("vllm:spec_decode_num_accepted_tokens", 12),
        Metric("vllm:spec_decode_num_accepted_tokens_per_pos", values=[8, 4]),
    ]
    assert read_counts(metrics) == RIGHT


def test_without_speculation_there_are_no_counters() -> None:
    assert read_counts([Metric("vllm:generation_tokens", 640)]) == Counts()


def test_a_row_compares_with_the_ids_told() -> None:
    row = compared("top", RIGHT)
    assert (row["simulated_ids"], row["gap"], row["equal_texts"]) == (SPARSE, 0, "1/2")


def test_ids_left_out_mean_the_default() -> None:
    row = compared("none", FALLEN_BACK)
    assert (row["simulated_ids"], row["gap"]) == (DEFAULT, 0)


def test_the_order_of_the_ids_is_without_effect() -> None:
    configuration = Configuration("sparse-early", (4, 1, 6), "a note")
    for patched in (False, True):
        assert configuration.readings(patched=patched) == (SPARSE,)


@pytest.mark.parametrize(
    ("ids", "convention", "patched", "boundaries"),
    [
        ((1, 3, 4), "output", True, (2, 4, 5)),
        ((1, 3, 4), "output", False, (1, 3, 4)),
        ((1, 3, 4), "boundary", True, (1, 3, 4)),
        ((4, 1, 6), "output", True, (2, 5, 7)),
    ],
)
def test_what_ids_count_is_read_where_patched(
    ids: tuple[int, ...], convention: str, patched: bool, boundaries: tuple[int, ...]
) -> None:
    configuration = Configuration("a draft", ids, "a note", "top", convention)
    assert configuration.readings(patched=patched) == (boundaries,)


@pytest.mark.parametrize(("counts", "ids"), [(RIGHT, SPARSE), (FALLEN_BACK, DEFAULT)])
def test_nested_ids_are_read_or_ignored(counts: Counts, ids: tuple[int, ...]) -> None:
    row = compared("nested", counts)
    assert (row["simulated_ids"], row["gap"]) == (ids, 0)


def test_nested_ids_are_read_where_patched() -> None:
    row = compared("nested", FALLEN_BACK, patched=True)
    assert (row["simulated_ids"], row["gap"]) == (SPARSE, 0.2)


def test_ids_told_at_the_top_level_are_never_excused() -> None:
    row = compared("top", FALLEN_BACK)
    assert (row["simulated_ids"], row["gap"]) == (SPARSE, 0.2)


def test_a_line_of_the_table() -> None:
    assert line(compared("top", FALLEN_BACK)) == (
        "| sparse-early, ids (1, 4, 6): a note | 12 | 9 | 0.500 0.250 "
        "| 10, 12 with (1, 4, 6) | +2, -3 | 1/2 |"
    )


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("Traceback\nTypeError: no\n0%| | 0/48", "TypeError: no"),
        ("KeyError: a\nRuntimeError: b", "RuntimeError: b"),
        ("Killed", "Killed"),
    ],
)
def test_what_a_process_says_after_its_error_is_left_out(output: str, shown: str) -> None:
    assert last_error(output) == shown


def test_a_failed_run_shows_its_error() -> None:
    configuration = Configuration("sparse-early", SPARSE, "right")
    row = compare(configuration, {"error": "Traceback\nTypeError: no"}, EXPECTED, [])
    assert line(row) == "| sparse-early, ids (1, 4, 6): right | error: TypeError: no |"


def test_every_configuration_names_boundaries_that_exist() -> None:
    for configuration in (*CONFIGURATIONS, *EDGES):
        assert all(0 <= layer_id <= LAYERS for layer_id in configuration.ids)


def test_names_of_configurations_are_unique() -> None:
    names = [configuration.name for configuration in (*CONFIGURATIONS, *EDGES)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("device", "dtype", "attention", "tolerance"),
    [("cpu", "float32", "plain", 0.0), ("cuda", "bfloat16", "mla", 0.01)],
)
def test_the_device_decides_on_the_arithmetic(
    device: str, dtype: str, attention: str, tolerance: float
) -> None:
    options = parse(["--device", device])
    chosen = (options.dtype, options.attention, options.tolerance)
    assert chosen == (dtype, attention, tolerance)


def test_mla_in_float32_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--attention", "mla"])
    assert "no MLA in float32" in capsys.readouterr().err
