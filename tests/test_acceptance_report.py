"""From the results of benchmarks/acceptance to the tables of its README."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.acceptance import report
from benchmarks.acceptance.rows import PROMPTS, SPARSE, Row, id_sets, rows, shifted

RIGHT = {
    "drafts": 1000,
    "draft_tokens": 4000,
    "accepted": 1500,
    "accepted_per_position": [900, 600],
}
WRONG = {
    "drafts": 1100,
    "draft_tokens": 4400,
    "accepted": 1400,
    "accepted_per_position": [900, 500],
}
TEXTS = [f"text {number}" for number in range(PROMPTS)]
NAME = "ids right, eager"


def about() -> dict[str, Any]:
    """What a run knows before its rows: a simulation of two sets of ids."""
    counts = [
        {"dtype": "bfloat16", "draft": "sparse-early", "ids": list(ids), "ahead": 4, "counts": one}
        for ids, one in ((SPARSE, RIGHT), (shifted(SPARSE, 1), WRONG))
    ]
    return {
        "about": {
            "device": "a GPU",
            "torch": "2.11.0",
            "transformers": "4.57.6",
            "attention": "mla",
            "early_steps": {"sparse": 100},
            "dtype": "bfloat16",
            "prompts": PROMPTS,
            "texts": {"bfloat16": TEXTS},
            "counts": counts,
        }
    }


def row(name: str, **found: Any) -> dict[str, Any]:
    return {"row": name, "seconds": 60.0, "vllm": "0.17.1", "good": "problem" not in found, **found}


def counted(counts: dict[str, Any], texts: list[str] = TEXTS) -> list[dict[str, Any]]:
    plain = row("without EAGLE-3, eager", texts=TEXTS)
    return [about(), plain, row(NAME, counts=counts, texts=texts)]


def test_counts_that_equal_the_simulation_are_good() -> None:
    text, good = report.markdown(counted(RIGHT))
    assert good
    assert (
        f"| {NAME} | (1, 4, 6) | 1000 | 1500 | 0.900 0.600 | 1000, 1500 | none | 0.00% "
        "| (2, 5, 7): 9.1% | 64/64 |"
    ) in text
    assert "vLLM 0.17.1, a GPU, torch 2.11.0" in text


def test_counts_of_other_ids_are_not() -> None:
    text, good = report.markdown(counted(WRONG))
    assert not good
    assert f"Not as it must be: {NAME}." in text


def test_a_small_gap_is_rounding() -> None:
    near = RIGHT | {"drafts": 1004}
    text, good = report.markdown(counted(near))
    assert good
    assert "| +4, +0 | 0.40% |" in text


def test_another_text_is_not_good() -> None:
    text, good = report.markdown(counted(RIGHT, ["another", *TEXTS[1:]]))
    assert not good
    assert "| 63/64 |" in text


def test_a_patched_vllm_is_compared_with_an_unpatched_one() -> None:
    lines = [about(), row("stock, eager", texts=TEXTS), row("without EAGLE-3, eager", texts=TEXTS)]
    text, good = report.markdown(lines)
    assert good
    assert "| without EAGLE-3, eager | 64/64 | 64/64 |" in text


@pytest.mark.parametrize(
    ("name", "identical", "nearest", "good"),
    [
        ("states, eager", 30, 30, True),
        ("states, eager", 29, 30, False),
        ("states, only graphs", 30, 30, True),
        ("states, graphs", 0, 30, True),
        ("states, graphs", 0, 29, False),
    ],
)
def test_states_are_exact_or_nearest_to_their_own(
    name: str, identical: int, nearest: int, good: bool
) -> None:
    states = {
        "ids": [1, 4, 6],
        "forwards": 10,
        "without_python": 5,
        "tensors": 30,
        "identical": identical,
        "nearest": nearest,
        "median_difference": 0.01,
        "largest_difference": 0.02,
        "least_to_others": 0.1,
    }
    assert report.markdown([about(), row(name, states=states)])[1] is good


def test_a_forced_backend_is_compared_with_itself_and_with_no_other() -> None:
    forced = "forced TRITON_MLA, eager"
    texts = ["other"] * 64
    lines = [about(), row("without EAGLE-3, eager", texts=["plain"] * 64)]
    lines.append(row("forced TRITON_MLA without EAGLE-3, eager", texts=texts))
    found = report.Found([*lines, row(forced, texts=texts)])
    by_name = {known.name: known for known in report.rows(cuda=True)}
    assert found.equal_texts(by_name[forced]) == "64/64"
    assert found.equal_texts(by_name["forced TRITON_MLA without EAGLE-3, eager"]) == ""


def test_an_error_that_must_come_is_shown() -> None:
    text, good = report.markdown(
        [about(), row("pipeline parallel 2", said="ValueError: ids 4 to 8")]
    )
    assert good
    assert "| pipeline parallel 2 | `ValueError: ids 4 to 8` | as it must be |" in text


def test_another_error_is_bad() -> None:
    text, good = report.markdown([about(), row(NAME, problem="KeyError: a")])
    assert not good
    assert f"| {NAME} | `KeyError: a` | **not** as it must be |" in text


def test_of_a_row_that_was_run_again_the_last_counts() -> None:
    lines = [about(), row(NAME, problem="KeyError: a"), *counted(RIGHT)[1:]]
    assert report.markdown(lines)[1]


def test_rows_belong_to_the_models_told_before_them() -> None:
    other = about()
    other["about"]["counts"] = []
    assert report.markdown([*counted(RIGHT), other])[1]
    text, good = report.markdown([*counted(RIGHT)[:-1], other, counted(RIGHT)[-1]])
    assert not good
    assert "| 64/64 |" not in text.partition("without EAGLE-3 |")[0]


def test_the_tool_and_the_cost_are_told() -> None:
    lines = [
        {
            "tool": "apply",
            "variant": "patched",
            "options": [],
            "exit_code": 0,
            "changed": ["a", "b"],
        },
        row("cost", rounds=12, cost={"eager": {"ratio": 1.002, "spread": 1.05, "seconds": 2.0}}),
    ]
    text, good = report.markdown(lines)
    assert good
    assert "`apply` (patched): exit code 0, 2 files changed." in text
    assert "eager: 1.002 (slowest / quickest unpatched round: 1.050)" in text
    assert not report.markdown([lines[0] | {"exit_code": 6}])[1]


def test_what_doctor_said_is_quoted() -> None:
    line = {"doctor": "served--right", "exit_code": 0, "text": "healthy\n"}
    assert "*served, right* (exit code 0):\n\n```\nhealthy\n```" in report.markdown([line])[0]


def test_lines_that_were_cut_off_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    assert report.read(file) == []
    file.write_text('{"row": "a"}\n{"row": "b', encoding="utf-8")
    assert report.read(file) == [{"row": "a"}]


def test_a_document_of_the_tool_is_shortened() -> None:
    document = {
        "tool": "0.1.0",
        "state": "patched",
        "changed": ["a"],
        "vllm": {"version": "0.17.1"},
        "models": [],
    }
    assert report.summary(json.dumps(document)) == {
        "version": "0.1.0",
        "state": "patched",
        "changed": ["a"],
        "vllm": "0.17.1",
    }
    assert report.summary("no JSON") == {}


def test_a_text_is_put_between_its_comments(tmp_path: Path) -> None:
    readme, results = tmp_path / "README.md", tmp_path / "results.jsonl"
    readme.write_text("a\n<!-- 0.17.1 -->\nold\n<!-- end of 0.17.1 -->\nb\n", encoding="utf-8")
    results.write_text("\n".join(map(json.dumps, counted(RIGHT))), encoding="utf-8")
    assert report.main([str(results), "--write", "0.17.1", "--readme", str(readme)]) == 0
    written = readme.read_text(encoding="utf-8")
    assert written.startswith("a\n<!-- 0.17.1 -->\nvLLM 0.17.1")
    assert written.endswith("\n<!-- end of 0.17.1 -->\nb\n")
    assert "old" not in written
    with pytest.raises(ValueError, match="no place for"):
        report.put(written, "0.16.0", "")


def test_names_of_rows_are_unique_also_as_files() -> None:
    known = rows(cuda=True)
    assert len({row.name for row in known}) == len({row.slug for row in known}) == len(known)
    assert {row.name for row in rows(cuda=False)} <= {row.name for row in known}


def test_what_a_row_must_use_is_simulated() -> None:
    for one in rows(cuda=True):
        if one.draft:
            own = SPARSE if one.draft.startswith("sparse") else (2, 4, 5)
            assert one.boundaries in id_sets(own), one.name


def test_the_order_of_ids_is_without_effect() -> None:
    assert Row("a", ids=(4, 1, 6)).boundaries == SPARSE


@pytest.mark.parametrize("release", ["0.17.1", "0.16.0", "0.14.1"])
def test_the_readme_says_what_was_found(release: str) -> None:
    lines = report.read(report.README.with_name("results") / f"{release}.jsonl")
    document = report.README.read_text(encoding="utf-8")
    assert report.put(document, release, report.markdown(lines)[0]) == document
