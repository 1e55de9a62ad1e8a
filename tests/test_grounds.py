"""On what ground a model is called ready: a release's content, what verify showed, or none."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from command_line import Ended, run, snapshot
from conftest import small_copy
from test_verify import Server
from vllm_eagle3_patch import __version__
from vllm_eagle3_patch.ground.digest import sha256
from vllm_eagle3_patch.ground.errors import ModifiedFileError
from vllm_eagle3_patch.transaction.state.verified import Verified, read_verified
from vllm_eagle3_patch.transaction.verdicts import record_verification

STATE = ".vllm-eagle3-patch"
DEEPSEEK = "vllm/model_executor/models/deepseek_v2.py"
EVIDENCE = "vllm/model_executor/models/registry.py"
MODEL = ("--model", "deepseek_v3")


def ground(ended: Ended, architecture: str = "DeepseekV3ForCausalLM") -> tuple[bool, str | None]:
    (model,) = [m for m in ended.document["models"] if m["architecture"] == architecture]
    return model["ready"], model["ground"]


def add_a_comment(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n# ours\n")


@pytest.fixture
def patched(tmp_path: Path) -> Server:
    """vLLM 0.17.1, patched, of which a file that is only read is not the release's."""
    server = Server(tmp_path)
    assert server.run("apply").exit_code == 0
    add_a_comment(server.root / EVIDENCE)
    return server


def test_a_release_is_ready_by_its_contents(site_packages: Path) -> None:
    where = ("--site-packages", site_packages, "--json")
    assert ground(run("check", *where)) == (False, None)
    assert run("apply", *where).exit_code == 0
    ended = run("check", *where)
    assert (ended.exit_code, ground(ended)) == (0, (True, "release"))


def test_what_is_another_wrapper_s_does_not_count(site_packages: Path) -> None:
    where = ("--site-packages", site_packages, "--json")
    assert run("apply", *where).exit_code == 0
    add_a_comment(site_packages / "vllm/model_executor/models/kimi_k25.py")
    ended = run("check", *where)
    assert ground(ended) == (True, "release")
    assert ground(ended, "KimiK25ForConditionalGeneration") == (True, "unproven")
    assert ended.exit_code == 1
    assert run("check", *where, *MODEL).exit_code == 0


def test_what_only_looks_ready_is_1_until_verify_has_run_it(patched: Server) -> None:
    ended = patched.run_json("check")
    assert (ended.exit_code, ground(ended)) == (1, (True, "unproven"))
    (problem,) = ended.document["problems"]
    assert problem["code"] == "unproven"
    assert "run verify" in problem["hint"]
    shown = patched.run("check")
    assert shown.exit_code == 1
    assert shown.stdout.rstrip().endswith(f"vllm-eagle3-patch verify --python {patched.python}")
    assert patched.run_json("apply").exit_code == 0  # There is nothing that it could do.

    ended = patched.run_json("verify")
    assert (ended.exit_code, ground(ended)) == (0, (True, "verified"))
    ended = patched.run_json("check")
    assert (ended.exit_code, ground(ended), ended.codes) == (0, (True, "verified"), set())

    add_a_comment(patched.root / EVIDENCE)
    ended = patched.run_json("check")
    assert (ended.exit_code, ground(ended)) == (1, (True, "unproven"))


def test_what_verify_refuted_is_not_ready_and_check_says_why(patched: Server) -> None:
    patched.tell({"DeepseekV3ForCausalLM": {"aux-hidden-states": False}})
    ended = patched.run_json("verify")
    assert (ended.exit_code, ground(ended)) == (6, (False, None))
    ended = patched.run_json("check")
    assert (ended.exit_code, ground(ended)) == (4, (False, None))
    assert ground(ended, "DeepseekV2ForCausalLM") == (True, "verified")
    (problem,) = ended.document["problems"]
    assert problem["code"] == "refuted"
    assert problem["message"] == (
        "verify refuted DeepseekV3ForCausalLM: aux-hidden-states: seen\\nso"
    )
    assert patched.run("check", "--model", "deepseek_v2").exit_code == 0
    # A model that could not be run says nothing of what was shown; one that passes does.
    patched.tell({"DeepseekV3ForCausalLM": {"aux-hidden-states": None}})
    assert patched.run("verify").exit_code == 4
    patched.tell()
    assert patched.run("verify").exit_code == 0
    assert patched.run("check").exit_code == 0


def test_a_release_that_fails_here_is_not_ready_here(tmp_path: Path) -> None:
    server = Server(tmp_path)
    assert server.run("apply").exit_code == 0
    before = snapshot(server.root)
    assert server.run("verify").exit_code == 0
    assert snapshot(server.root) == before  # A release's content needs no more.
    server.tell({"DeepseekV3ForCausalLM": {"import": False}})
    assert server.run("verify").exit_code == 6
    ended = server.run_json("check")
    assert (ended.exit_code, ground(ended)) == (4, (False, None))
    assert ground(ended, "DeepseekV2ForCausalLM") == (True, "release")


def test_revert_leaves_nothing_of_it(patched: Server) -> None:
    assert patched.run("verify").exit_code == 0
    assert (patched.root / STATE / "verified.json").exists()
    assert patched.run("revert").exit_code == 0
    assert not (patched.root / STATE).exists()


def test_where_only_verify_has_written_revert_removes_that(tmp_path: Path) -> None:
    server = Server(tmp_path, "0.32.0")
    add_a_comment(server.root / EVIDENCE)
    before = snapshot(server.root)
    assert server.run("check", *MODEL).exit_code == 1
    assert server.run("verify", *MODEL).exit_code == 0
    assert server.run("check", *MODEL).exit_code == 0
    assert {path.name for path in (server.root / STATE).iterdir()} == {"README", "verified.json"}
    assert server.run("revert").exit_code == 0
    assert snapshot(server.root) == before


def test_a_damaged_record_is_told_and_written_anew(patched: Server) -> None:
    assert patched.run("verify").exit_code == 0
    file = patched.root / STATE / "verified.json"
    file.write_text("{}")
    ended = patched.run_json("check")
    assert (ended.exit_code, ended.codes) == (1, {"unproven", "verified-corrupt"})
    assert patched.run("verify").exit_code == 0
    assert patched.run_json("check").exit_code == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_where_one_may_not_write_verify_answers_all_the_same(patched: Server) -> None:
    patched.root.chmod(0o555)
    (patched.root / STATE).chmod(0o555)
    try:
        ended = patched.run_json("verify")
    finally:
        patched.root.chmod(0o755)
        (patched.root / STATE).chmod(0o755)
    assert (ended.exit_code, ground(ended)) == (0, (True, "verified"))
    assert any("not kept" in note for note in ended.document["notes"])


def test_a_verify_that_cannot_keep_its_result_says_so(
    patched: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("vllm_eagle3_patch.ground.filesystem.make_directory", refuse)
    ended = patched.run_json("verify")
    assert (ended.exit_code, ground(ended)) == (0, (True, "verified"))
    assert any("Read-only" in note for note in ended.document["notes"])
    monkeypatch.undo()
    assert patched.run_json("check").exit_code == 1


def test_results_of_other_models_are_kept_and_unproven_ones_say_nothing(tmp_path: Path) -> None:
    file = tmp_path / "vllm/a.py"
    file.parent.mkdir()
    file.write_text("a = 1\n")
    files = {"vllm/a.py": sha256(file.read_bytes())}
    first, second = Verified("A", "proven", files), Verified("B", "refuted", files, "state 3")
    record_verification(tmp_path, [Verified("A", "unproven", files)])
    assert not (tmp_path / STATE).exists()
    record_verification(tmp_path, [first])
    record_verification(tmp_path, [second, Verified("A", "unproven", files)])
    assert read_verified(tmp_path, __version__) == (first, second)
    assert read_verified(tmp_path, "another") == ()
    file.write_text("a = 2\n")
    with pytest.raises(ModifiedFileError):
        record_verification(tmp_path, [first])
    document = json.loads((tmp_path / STATE / "verified.json").read_text())
    assert document["schema"] == 1


def mixture(site_packages: Path, tmp_path: Path) -> None:
    """One file of 0.11.1 in 0.17.1, installed without RECORD."""
    other = small_copy("0.11.1", tmp_path / "other")
    shutil.copy(other / DEEPSEEK, site_packages / DEEPSEEK)
    (record,) = site_packages.glob("*.dist-info/RECORD")
    record.unlink()


def test_a_mixture_is_named_and_not_patched_without_being_asked(
    site_packages: Path, tmp_path: Path
) -> None:
    mixture(site_packages, tmp_path)
    before = snapshot(site_packages)
    for command in ("check", "apply", "diff"):
        ended = run(command, "--site-packages", site_packages, "--json")
        assert ended.exit_code == 4
        (problem,) = [p for p in ended.document["problems"] if p["code"] == "mixed"]
        assert f"of 0.11.2 or 0.11.1: {DEEPSEEK}" in problem["message"]
        assert "of 0.17.1: vllm/" in problem["message"]
        assert "--unpinned" in problem["hint"]
    assert snapshot(site_packages) == before
    ended = run("check", "--site-packages", site_packages, "--unpinned", "--json")
    assert "mixed" not in ended.codes
