"""The command ``doctor`` as a user runs it, on real releases and on the matrix."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from doctor_models import AQ_K2, AQ_K25, IDS, K27_CODE, KIMI_K2, KIMI_K25, STATED, WEIGHTS, write

from command_line import run
from conftest import small_copy
from tools.fetch_release import fetch

SCHEMA = json.loads(
    (Path(__file__).parents[1] / "schemas" / "doctor.json").read_text(encoding="utf-8")
)


ALSO_READ = (
    "vllm/transformers_utils/configs/eagle.py",
    "vllm/transformers_utils/configs/speculators/algos.py",
    "vllm/transformers_utils/config.py",
)


def doctors_copy(release: str, destination: Path) -> Path:
    """A release's files that the matrix names, and those that only the doctor reads."""
    site = small_copy(release, destination)
    for path in ALSO_READ:
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes((fetch(release) / path).read_bytes())
    return site


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Kimi-K2 and AQ-MedAI's draft model."""
    return write(tmp_path / "target", KIMI_K2), write(tmp_path / "draft", AQ_K2)


def test_the_document_is_the_contracts(models: tuple[Path, Path]) -> None:
    for release, code in (("0.17.1", 4), ("0.18.0", 0)):
        ended = run("doctor", *models, "--release", release, "--json")
        assert ended.exit_code == code
        assert ended.document["exit_code"] == code
        jsonschema.validate(ended.document, SCHEMA)
    document = ended.document
    assert document["release"] == "0.18.0"
    assert document["layers"]["used"] == [2, 30, 58]
    assert document["layers"]["outputs_of"] == [1, 29, 57]
    assert document["speculative_config"]["model"] == str(models[1])


@pytest.mark.parametrize("release", ["0.11.1", "0.17.1", "0.22.0", "0.33.0"])
def test_an_installation_and_the_matrix_say_the_same(
    release: str, models: tuple[Path, Path]
) -> None:
    source = fetch(release)
    installed = run("doctor", *models, "--site-packages", source, "--json").document
    pinned = run("doctor", *models, "--release", release, "--json").document
    for document in (installed, pinned):
        del document["where"]
        for finding in document["findings"]:
            finding["fix"] = finding["fix"].replace(f" --site-packages {source}", "")
            finding["fix"] = finding["fix"].replace(f" --release {release}", "")
    assert installed == pinned


def test_the_commands_of_a_fix_ask_about_the_same_vllm(
    tmp_path: Path, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(models[1], K27_CODE, WEIGHTS)
    ended = run("doctor", *models, "--release", "0.22.0", "--json")
    (fix,) = (f["fix"] for f in ended.document["findings"] if f["code"] == "aux-layers-convention")
    program, *words = shlex.split(fix.partition(": ")[2])
    assert program == "vllm-eagle3-patch"
    assert run(*words).exit_code in (0, 1)  # The verdict is on the draft model as it is.
    again = run("doctor", models[0], words[-1], "--release", "0.22.0", "--json")
    assert again.document["layers"]["used"] == [2, 30, 58]


def test_what_edges_need_is_done_to_the_same_vllm(tmp_path: Path) -> None:
    target = write(tmp_path / "t", KIMI_K2)
    draft = write(tmp_path / "d", {**STATED, IDS: [2, 30, 61]}, WEIGHTS)
    site = doctors_copy("0.22.0", tmp_path / "site")
    before = run("doctor", target, draft, "--site-packages", site, "--json").document
    (fix,) = (f["fix"] for f in before["findings"] if f["code"] == "aux-layers-range")
    program, *words = shlex.split(fix.partition(",")[0])
    assert program == "vllm-eagle3-patch"
    assert run(*words).exit_code == 0
    after = run("doctor", target, draft, "--site-packages", site, "--json").document
    assert after["verdict"] == "ok"
    # What apply alone makes of the release is less than what is there.
    assert after["with_patch"] is None


def test_apply_changes_the_answer(tmp_path: Path) -> None:
    target, draft = write(tmp_path / "t", KIMI_K25), write(tmp_path / "d", K27_CODE, WEIGHTS)
    site = doctors_copy("0.17.1", tmp_path / "site")
    before = run("doctor", target, draft, "--site-packages", site, "--json").document
    assert before["verdict"] == "broken"
    assert before["with_patch"]["verdict"] == "ok"
    assert before["with_patch"]["in_words"] == "with the patch: ready"
    assert set(before["with_patch"]["mended"]) >= {"target-not-allowed", "wrapper-missing"}
    assert run("apply", "--site-packages", site).exit_code == 0
    after = run("doctor", target, draft, "--site-packages", site, "--json").document
    assert after["verdict"] == "ok"
    assert after["with_patch"] is None
    assert before["layers"]["used"] == [2, 30, 58]
    assert after["layers"]["used"] == [1, 29, 57]


def test_a_build_that_is_no_release_is_read_all_the_same(
    tmp_path: Path, models: tuple[Path, Path]
) -> None:
    site = doctors_copy("0.17.1", tmp_path / "site")
    config = site / "vllm" / "config" / "speculative.py"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace('"minicpm",', '"minicpm", "kimi_k2",'), encoding="utf-8")
    document = run("doctor", *models, "--site-packages", site, "--json").document
    codes = [finding["code"] for finding in document["findings"]]
    assert "target-not-allowed" not in codes
    assert "interface-missing" in codes
    assert document["with_patch"] is None
    shown = run("doctor", *models, "--site-packages", site).stdout
    assert "what apply would change is not known" in shown


def test_what_a_person_reads(models: tuple[Path, Path]) -> None:
    shown = run("doctor", *models, "--release", "0.17.1").stdout
    first, second, *_ = shown.splitlines()
    assert first == "broken: it does not start, or speculates to no effect"
    assert second == "with the patch: ready"
    assert "error target-not-allowed: " in shown
    assert "  fix: vllm-eagle3-patch apply" in shown
    assert "assumed: --tensor-parallel-size 1" in shown
    last = shown.splitlines()[-1].strip()
    assert last.startswith('--speculative-config \'{"method": "eagle3"')
    assert "\x1b" not in shown


def test_options_one_by_one_and_a_whole_command_line(models: tuple[Path, Path]) -> None:
    serve = "vllm serve x -tp 8 -pp 2 --speculative-config.method eagle3"
    document = run("doctor", *models, "--release", "0.18.0", "--serve", serve, "--json").document
    assert "pipeline-parallel" in [f["code"] for f in document["findings"]]
    assert "--tensor-parallel-size" not in document["assumed"]
    own = run(
        "doctor",
        *models,
        "--release",
        "0.18.0",
        "--serve",
        serve,
        "--json",
        "--pipeline-parallel-size",
        1,
        "--num-speculative-tokens",
        5,
    ).document
    assert "pipeline-parallel" not in [f["code"] for f in own["findings"]]
    assert own["speculative_config"]["num_speculative_tokens"] == 5


def test_a_model_id_is_what_is_served(
    tmp_path: Path, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--AQ-MedAI--Kimi-K25-eagle3" / "snapshots" / "abc"
    write(snapshot, AQ_K25)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc\n", encoding="utf-8")
    name = "AQ-MedAI/Kimi-K25-eagle3"
    document = run("doctor", models[0], name, "--release", "0.18.0", "--json").document
    assert document["speculative_config"]["model"] == name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "TARGET and DRAFT missing"),
        (["x"], "DRAFT missing"),
        (["x", "y", "--release", "9.9.9"], "no"),
        (["x", "y", "--release", "0.18.0", "--site-packages", "z"], "no --site-packages"),
        (["x", "y", "--previous", "z"], "goes with --metrics"),
        (["x", "y", "-tp", "0"], "0 is not in the range"),
        (["x", "y", "--convention", "both"], "both"),
        (["--metrics", "m", "--write-draft-config", "z"], "goes with TARGET and DRAFT"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str) -> None:
    ended = run("doctor", *arguments)
    assert ended.exit_code == 2
    assert said in ended.stderr


def test_a_release_that_is_not_there(models: tuple[Path, Path]) -> None:
    for name in ("9.9.9", "../x", "x" * 500):
        ended = run("doctor", *models, "--release", name)
        assert ended.exit_code == 2
        assert len(ended.stderr.splitlines()) == 2


def test_a_folder_without_vllm(models: tuple[Path, Path], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    ended = run("doctor", *models, "--site-packages", empty)
    assert ended.exit_code == 3
    assert "--release" in ended.stderr


def test_a_healthy_pair_exits_with_0(tmp_path: Path) -> None:
    target, draft = write(tmp_path / "t", KIMI_K2), write(tmp_path / "d", STATED, WEIGHTS)
    ended = run("doctor", target, draft, "--release", "0.18.0")
    assert ended.exit_code == 0
    assert ended.stdout.startswith("ok: ")


def test_libcst_rich_and_torch_are_not_imported(models: tuple[Path, Path]) -> None:
    """Reading an installation needs Python's own parser only, and never vLLM."""
    code = (
        "import sys\n"
        "from vllm_eagle3_patch.cli.program import cli\n"
        "try:\n"
        f"    cli(['doctor', {str(models[0])!r}, {str(models[1])!r}, "
        f"'--site-packages', {str(fetch('0.17.1'))!r}])\n"
        "except SystemExit:\n"
        "    pass\n"
        "found = {'libcst', 'rich', 'torch', 'vllm', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr


METRICS = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="k2"} 1000.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="k2"} 3000.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="k2"} 0.0
"""


def test_the_metrics_of_a_server_join_the_diagnosis(tmp_path: Path) -> None:
    target, draft = write(tmp_path / "t", KIMI_K2), write(tmp_path / "d", STATED, WEIGHTS)
    scrape = tmp_path / "metrics.txt"
    scrape.write_text(METRICS, encoding="utf-8")
    alone = run("doctor", "--metrics", scrape, "--json")
    assert alone.document["command"] == "doctor"
    assert alone.exit_code == alone.document["exit_code"] > 0
    both = run("doctor", target, draft, "--release", "0.18.0", "--metrics", scrape, "--json")
    assert both.document["findings"]
    assert both.document["metrics"]["exit_code"] == alone.exit_code
    assert (both.document["verdict"], both.exit_code) == (
        alone.document["verdict"],
        alone.exit_code,
    )
    shown = run("doctor", target, draft, "--release", "0.18.0", "--metrics", scrape).stdout
    first, second, *_ = shown.splitlines()
    assert first.startswith(f"{alone.document['verdict']}: by the server's counters")
    assert second.startswith("by the configs ok: ")
    assert "Likely causes" in shown
