"""The command of benchmarks/acceptance that runs everything; vLLM and the tool are stand-ins."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.acceptance import cost, end_to_end, served, speculate
from benchmarks.acceptance.counting import Counts
from benchmarks.acceptance.end_to_end import Run, digest, parse
from benchmarks.acceptance.pool import Ended, Job
from benchmarks.acceptance.rows import rows

TOOL = """import json, sys
print(json.dumps({"tool": "0.1.0", "changed": ["a"], "vllm": {"version": "0.17.1"}}))
raise SystemExit("verify" in sys.argv and "bad" in sys.argv)
"""


def expected(gpus: int) -> dict[str, Any]:
    return {"gpus": gpus, "prompts": [[1, 2]], "texts": {"bfloat16": [[3]]}, "counts": []}


def start(folder: Path, *others: str) -> Run:
    """A run in a folder, with the models that an earlier one left."""
    models = folder / "models"
    models.mkdir(exist_ok=True)
    (models / "expected.json").write_text(json.dumps(expected(1)), encoding="utf-8")
    options = ["--python", "patched", "--out", str(folder / "out"), "--models", str(models)]
    return Run(parse([*options, *others]))


def names(jobs: list[Job]) -> set[str]:
    return {job.name for job in jobs}


def test_rows_are_left_out_whose_installation_or_gpus_are_not_there(tmp_path: Path) -> None:
    alone = names(start(tmp_path).jobs(expected(1)))
    assert "ids right, eager" in alone
    assert not any(name.startswith(("stock", "tensor", "cost")) for name in alone)
    everything = start(tmp_path, "--stock", "stock", "--skipped", "skipped").jobs(expected(2))
    assert names(everything) == {row.name for row in rows(cuda=True)}


def test_rows_are_chosen_by_parts_of_their_names(tmp_path: Path) -> None:
    chosen = start(tmp_path, "--rows", "ids with 0|float16, ids").jobs(expected(1))
    assert names(chosen) == {
        "ids with 0, eager",
        "ids with 0, graphs",
        "float16, ids right, eager",
        "float16, ids right, graphs",
    }


def test_a_row_is_chosen_by_its_whole_name(tmp_path: Path) -> None:
    assert names(start(tmp_path, "--rows", "=ids right, eager|=b").jobs(expected(1))) == {
        "ids right, eager"
    }


def test_what_was_run_with_other_models_is_run_again(tmp_path: Path) -> None:
    run = start(tmp_path, "--rows", "ids with 0")
    run.add({"about": expected(1)})
    run.add({"row": "ids with 0, eager", "good": True})
    run.add({"about": expected(1) | {"counts": ["others"]}})
    run.add({"row": "ids with 0, graphs", "good": True})
    assert names(run.jobs(expected(1))) == {"ids with 0, graphs"}


def test_good_rows_are_not_run_again(tmp_path: Path) -> None:
    run = start(tmp_path, "--rows", "ids with 0")
    run.add({"row": "ids with 0, eager", "good": True})
    run.add({"row": "ids with 0, graphs", "good": False})
    assert names(run.jobs(expected(1))) == {"ids with 0, graphs"}


def test_rows_are_spread_over_the_gpus(tmp_path: Path) -> None:
    jobs = start(tmp_path).jobs(expected(2))
    one = [
        job.environment.get("CUDA_VISIBLE_DEVICES") for job in jobs if "parallel" not in job.name
    ]
    assert {one.count("0") - one.count("1")} <= {-1, 0, 1, 2}
    both = [job for job in jobs if "parallel" in job.name]
    assert both
    assert all(
        job.environment.get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")
        for job in both
    )


def test_each_row_has_a_cache_of_its_own(tmp_path: Path) -> None:
    jobs = start(tmp_path).jobs(expected(1))
    assert len({job.environment["VLLM_CACHE_ROOT"] for job in jobs}) == len(jobs)


def test_what_a_row_runs_with_can_be_parsed(tmp_path: Path) -> None:
    modes = {row.name: row.mode for row in rows(cuda=True)}
    for job in start(tmp_path, "--stock", "s", "--skipped", "s").jobs(expected(2)):
        words = list(job.command[3:])
        if job.name == "cost":
            words = words[words.index("--target") :]
        options = speculate.parse(words)
        found = speculate.engine(options, options.draft, 1)
        assert found["enforce_eager"] is (modes[job.name] == "eager")
        json.loads(options.engine)


def ended(run: Run, name: str, code: int | None, output: str, answer: Any = None) -> dict[str, Any]:
    """The line that is written for a row that ended so."""
    (job,) = [job for job in run.jobs(expected(2)) if job.name == name]
    job.log.write_text(output, encoding="utf-8")
    if answer is not None:
        Path(job.command[job.command.index("--out") + 1]).write_text(json.dumps(answer))
    run.ended(Ended(job, code, 1.0))
    return run.lines()[-1]


def test_what_a_row_answered_is_written_down(tmp_path: Path) -> None:
    counts = Counts(1, 4, 2, [1, 1]).to_json()
    answer = {"tokens": [[3]], "counts": counts, "page": "a page", "else": 1}
    line = ended(start(tmp_path), "served, right", 0, "", answer)
    assert line == {
        "row": "served, right",
        "seconds": 1.0,
        "counts": counts,
        "texts": [digest([3])],
        "good": True,
    }
    assert (tmp_path / "out" / "pages" / "served--right.txt").read_text() == "a page"


@pytest.mark.parametrize(("code", "problem"), [(None, "ended after 1 seconds"), (1, "KeyError: a")])
def test_a_row_that_failed_says_how(tmp_path: Path, code: int | None, problem: str) -> None:
    line = ended(start(tmp_path), "ids right, eager", code, "Traceback\nKeyError: a\n")
    assert (line["good"], line["problem"]) == (False, problem)


@pytest.mark.parametrize(
    ("code", "output", "good"),
    [
        (1, "Error: Pipeline parallelism is not supported for this model.\nends", True),
        (1, "KeyError: a", False),
        (0, "", False),
    ],
)
def test_an_error_that_must_come(tmp_path: Path, code: int, output: str, good: bool) -> None:
    line = ended(start(tmp_path), "pipeline parallel 2", code, output)
    assert line["good"] is good
    assert ("said" in line) is good


def tool(folder: Path) -> str:
    file = folder / "tool.py"
    file.write_text(TOOL, encoding="utf-8")
    return f"{sys.executable} {file}"


def test_the_tool_is_run_once(tmp_path: Path) -> None:
    run = start(tmp_path, "--tool", tool(tmp_path), "--skipped", "skipped")
    assert run.patch()
    told = [(line["tool"], line["variant"], line["options"]) for line in run.lines()]
    assert told == [
        ("apply", "patched", []),
        ("check", "patched", []),
        ("verify", "patched", []),
        ("apply", "skipped", ["--skip", "draft-attention-backend"]),
    ]
    assert all(line["version"] == "0.1.0" for line in run.lines())
    assert run.patch()
    assert len(run.lines()) == len(told)


def test_nothing_is_run_where_verify_fails(tmp_path: Path) -> None:
    run = start(tmp_path, "--tool", tool(tmp_path), "--apply-options=bad")
    run.options.tool += " bad"
    assert run.all_rows() == 1
    assert [line["exit_code"] for line in run.lines()] == [0, 0, 1]


def test_a_whole_run_with_a_stand_in_for_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(
        "import json, pathlib, sys\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--out') + 1])\n"
        "out.write_text(json.dumps({'tokens': [[3]], 'vllm': '0.17.1'}))\n"
    )
    document = expected(1) | {
        **dict.fromkeys(("device", "torch", "transformers", "attention"), "?"),
        "early_steps": {},
    }
    run = start(tmp_path, "--rows", "stock, eager|without EAGLE-3, graphs", "--stock", "stock")
    (run.options.models / "expected.json").write_text(json.dumps(document), encoding="utf-8")
    plain = Run.job

    def job(self: Run, *given: Any) -> Job:
        made = plain(self, *given)
        made.command = [sys.executable, str(stand_in), *made.command[3:]]
        return made

    monkeypatch.setattr(Run, "job", job)
    assert run.all_rows() == 0
    shown = capsys.readouterr().out
    assert "| stock, eager | 1/1 | - |" in shown
    assert end_to_end.report.read(run.results)[0]["about"]["prompts"] == 1


def test_the_cost_is_a_ratio_of_medians() -> None:
    seconds = {"stock eager": [1.0, 2.0, 4.0], "patched eager": [2.2, 2.2, 9.0]}
    assert cost.ratios(seconds) == {"eager": {"ratio": 1.1, "spread": 4.0, "seconds": 2.0}}


def test_arguments_are_put_as_options_of_the_server() -> None:
    arguments = {"enforce_eager": False, "seed": 0, "draft": None, "a": {}, "b_c": {"d": 1}}
    assert served.words(arguments) == ["--no-enforce-eager", "--seed", "0", "--b-c", '{"d": 1}']


def test_counters_are_read_from_a_page() -> None:
    page = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="target"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="target"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="0"} 8.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="target"} 1.7e+09
"""
    assert served.read_page(page) == Counts(10, 20, 12, [8, 4])
