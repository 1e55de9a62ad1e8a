"""``--write-draft-config``: the corrected copy, whole or not at all, and never in place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doctor_models import (
    AQ_K2,
    IDS,
    K27_CODE,
    KIMI_K2,
    NVIDIA,
    SPECULATORS_V3,
    STATED,
    WEIGHTS,
    changed,
    nested,
    write,
)

from command_line import run, snapshot
from vllm_eagle3_patch.doctor import draft_config


def written(
    tmp_path: Path, draft: dict[str, Any], *options: object, release: str = "0.22.0"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config that is written, and the JSON document's part about it."""
    target = write(tmp_path / "target", KIMI_K2)
    source = write(tmp_path / "draft", draft, WEIGHTS)
    before = snapshot(source)
    copy = tmp_path / "copy"
    ended = run(
        "doctor",
        target,
        source,
        "--release",
        release,
        "--write-draft-config",
        copy,
        "--json",
        *options,
    )
    assert ended.exit_code in (0, 1, 4), ended.stderr
    assert snapshot(source) == before, "the original was touched"
    link = copy / "model.safetensors"
    assert link.is_symlink()
    assert link.read_bytes() == (source / "model.safetensors").read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".copy")] == []
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    return config, ended.document["draft_config"]


def test_outputs_that_the_user_states_become_boundaries_at_the_top_level(tmp_path: Path) -> None:
    config, told = written(tmp_path, K27_CODE, "--convention", "output")
    assert config[IDS] == [2, 30, 58]
    assert config[f"{IDS}_convention"] == "boundary"
    assert config["eagle_config"][IDS] == [2, 30, 58]
    assert any("[2, 30, 58]" in change for change in told["changes"])
    again = run("doctor", tmp_path / "target", tmp_path / "copy", "--release", "0.22.0", "--json")
    assert again.document["layers"]["used"] == [2, 30, 58]
    assert again.document["verdict"] in ("ok", "risky")
    assert "aux-layers-convention" not in [f["code"] for f in again.document["findings"]]


@pytest.mark.parametrize(
    ("options", "said", "ids"),
    [
        ((), None, [2, 30, 58]),
        (("--convention", "boundary"), "boundary", [2, 30, 58]),
        (("--convention", "output"), "boundary", [3, 31, 59]),
    ],
)
def test_the_convention_is_written_where_it_is_stated(
    tmp_path: Path, options: tuple[str, ...], said: str | None, ids: list[int]
) -> None:
    config, _ = written(tmp_path, AQ_K2, *options)
    assert (config[IDS], config.get(f"{IDS}_convention")) == (ids, said)


def test_outputs_that_the_config_states_are_written_as_boundaries(tmp_path: Path) -> None:
    config, _ = written(tmp_path, changed(STATED, **{f"{IDS}_convention": "output"}))
    assert (config[IDS], config[f"{IDS}_convention"]) == ([3, 31, 59], "boundary")


def test_four_layers_are_counted(tmp_path: Path) -> None:
    config, _ = written(tmp_path, changed(STATED, **nested(1, 20, 40, 57), **{IDS: None}))
    assert config["num_aux_hidden_states"] == 4


def test_remote_code_that_is_not_there_is_dropped(tmp_path: Path) -> None:
    config, _ = written(tmp_path, changed(STATED, auto_map={"AutoConfig": "gone.Config"}))
    assert "auto_map" not in config


def test_remote_code_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "here.py").touch()
    config, _ = written(tmp_path, changed(STATED, auto_map={"AutoConfig": "here.Config"}))
    assert "auto_map" in config


def test_a_type_that_is_taken_for_mtp(tmp_path: Path) -> None:
    config, _ = written(tmp_path, NVIDIA)
    assert config["model_type"] == "kimi_k2"


def test_an_architecture_that_an_old_release_renames(tmp_path: Path) -> None:
    config, _ = written(tmp_path, STATED, release="0.10.0")
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_norms_and_vocabulary(tmp_path: Path) -> None:
    draft = changed(
        STATED,
        draft_vocab_size=16000,
        tie_word_embeddings=True,
        eagle_config={"norm_before_residual": True},
    )
    config, _ = written(tmp_path, draft)
    assert config["norm_before_residual"] is True
    assert config["draft_vocab_size"] == 32000
    assert config["tie_word_embeddings"] is False


def test_nothing_to_correct(tmp_path: Path) -> None:
    config, told = written(tmp_path, STATED)
    assert config == STATED
    assert told["changes"] == []
    speculators, _ = written(tmp_path / "more", SPECULATORS_V3)
    assert speculators == SPECULATORS_V3


def refused(tmp_path: Path, folder: Path) -> str:
    target = write(tmp_path / "target", KIMI_K2)
    draft = write(tmp_path / "draft", STATED)
    before = snapshot(tmp_path)
    ended = run("doctor", target, draft, "--release", "0.22.0", "--write-draft-config", folder)
    assert ended.exit_code == 2
    assert snapshot(tmp_path) == before
    return ended.stderr


def test_the_line_to_serve_names_the_copy(tmp_path: Path) -> None:
    target = write(tmp_path / "target", KIMI_K2)
    draft = write(tmp_path / "draft", STATED)
    asked = ("doctor", target, draft, "--release", "0.22.0", "--write-draft-config")
    shown = run(*asked, tmp_path / "copy").stdout
    option = shown.partition("to serve it:\n")[2].splitlines()[0]
    assert f'"model": "{tmp_path / "copy"}"' in option
    document = run(*asked, tmp_path / "other", "--json").document
    assert document["speculative_config"]["model"] == str(tmp_path / "other")


def test_folders_that_are_in_use_are_refused(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    assert "not empty" in refused(tmp_path, full)
    assert "no folder" in refused(tmp_path, full / "file")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert "no folder" in refused(tmp_path, tmp_path / "link")


def test_the_draft_models_own_folder_is_refused(tmp_path: Path) -> None:
    assert "own folder" in refused(tmp_path, tmp_path / "draft" / "copy")
    (tmp_path / "linked").symlink_to(tmp_path / "draft")
    assert "own folder" in refused(tmp_path, tmp_path / "linked" / "copy")


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    config, _ = written(tmp_path, STATED)
    assert config == STATED


def test_nothing_is_left_of_a_copy_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(draft_config.os, "fsync", fail)
    target, draft = write(tmp_path / "target", KIMI_K2), write(tmp_path / "draft", STATED)
    before = snapshot(tmp_path)
    ended = run(
        "doctor", target, draft, "--release", "0.22.0", "--write-draft-config", tmp_path / "copy"
    )
    assert ended.exit_code == 7
    assert "No space left" in ended.stderr
    assert snapshot(tmp_path) == before


def test_a_config_alone_is_copied_alone(tmp_path: Path) -> None:
    target = write(tmp_path / "target", KIMI_K2)
    draft = write(tmp_path / "draft", STATED, WEIGHTS)
    copy = tmp_path / "copy"
    ended = run(
        "doctor",
        target,
        draft / "config.json",
        "--release",
        "0.22.0",
        "--write-draft-config",
        copy,
        "--json",
    )
    assert [path.name for path in copy.iterdir()] == ["config.json"]
    assert any("no weights" in note for note in ended.document["draft_config"]["notes"])
