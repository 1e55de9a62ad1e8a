"""Checkpoints: where they are looked for, what of them is read, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from doctor_models import AQ_K2, KIMI_K2, KIMI_K25, STATED, WEIGHTS, safetensors, write

from command_line import run
from vllm_eagle3_patch.doctor.checkpoint import (
    LARGEST_CONFIG,
    CheckpointError,
    hugging_face_cache,
    read_draft,
    read_target,
)

ID = "moonshotai/Kimi-K2-Instruct"


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "draft", STATED, WEIGHTS)
    whole = read_draft(str(folder))
    assert whole.weights is not None
    assert whole.weights.shape("lm_head.weight") == (32000, 7168)
    assert whole.folder == folder
    config = read_draft(str(folder / "config.json"))
    assert (config.config, config.weights, config.folder) == (whole.config, None, None)


def test_shards_by_their_index(tmp_path: Path) -> None:
    folder = write(tmp_path, STATED)
    parts = {"a.safetensors": ["fc.weight", "d2t"], "b.safetensors": ["lm_head.weight"]}
    for name, tensors in parts.items():
        (folder / name).write_bytes(safetensors({t: WEIGHTS[t] for t in tensors}))
    (folder / "unused.safetensors").write_bytes(safetensors({"other": (1,)}))
    mapping = {tensor: name for name, tensors in parts.items() for tensor in tensors}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": mapping}), encoding="utf-8")
    weights = read_draft(str(folder)).weights
    assert weights is not None
    assert set(weights.shapes) == set(mapping)
    assert weights.files == tuple(parts)


def test_metadata_is_no_tensor_and_names_have_prefixes(tmp_path: Path) -> None:
    folder = write(tmp_path, STATED)
    content = safetensors({"model.lm_head.weight": (5, 3)}, {"__metadata__": {"format": "pt"}})
    (folder / "model.safetensors").write_bytes(content)
    weights = read_draft(str(folder)).weights
    assert weights is not None
    assert weights.shape("lm_head.weight") == (5, 3)
    assert weights.shape("head.weight") is None


def test_the_text_config_of_a_multimodal_target(tmp_path: Path) -> None:
    target = read_target(str(write(tmp_path, KIMI_K25)))
    assert target.multimodal
    assert (target.model_type, target.text_type) == ("kimi_k25", "kimi_k2")
    assert target.integer("num_hidden_layers") == 61
    assert target.mla
    assert target.experts
    assert target.dtype == "bfloat16"


def cached(cache: Path, name: str = ID, revision: str = "abc") -> Path:
    repository = cache / f"models--{name.replace('/', '--')}"
    blob = repository / "blobs" / "1"
    blob.parent.mkdir(parents=True)
    blob.write_text(json.dumps(KIMI_K2), encoding="utf-8")
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision, encoding="utf-8")
    return snapshot


@pytest.mark.parametrize(
    ("name", "below"),
    [("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")],
)
def test_a_model_id_in_the_cache(
    name: str, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, str(tmp_path))
    snapshot = cached(tmp_path / below)
    target = read_target(ID)
    assert target.folder == snapshot
    assert target.integer("num_hidden_layers") == 61


def test_the_cache_is_where_huggingface_hub_puts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nobody")
    assert hugging_face_cache() == Path("/nobody/.cache/huggingface/hub")


@pytest.mark.parametrize(
    "given",
    ["", " ", "not/here", "/not/here", "a/b/c", "../x", "./x/y", "x\0y", "a" * 500, "x/.."],
)
def test_nothing_there(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as raised:
        read_target(given)
    assert raised.value.exit_code == 2
    assert raised.value.code == "checkpoint-missing"


def test_a_cached_model_without_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (cached(tmp_path) / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"without config\.json"):
        read_target(ID)


def test_a_reference_that_leads_elsewhere_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = cached(tmp_path)
    elsewhere = write(tmp_path / "elsewhere", AQ_K2)
    main = snapshot.parent.parent / "refs" / "main"
    main.write_text(os.path.relpath(elsewhere, snapshot.parent), encoding="utf-8")
    with pytest.raises(CheckpointError):
        read_target(ID)


HOSTILE_CONFIGS: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"{",
    "a list": b"[]",
    "a number": b"7",
    "not UTF-8": b'{"a": "\xff"}',
    "deeply nested": b"[" * 100_000,
    "huge": b" " * (LARGEST_CONFIG + 1),
    "architectures as a string": b'{"architectures": "DeepseekV3ForCausalLM"}',
    "architectures of numbers": b'{"architectures": [1]}',
    "a model type that is a list": b'{"model_type": []}',
    "a size that is a string": b'{"hidden_size": "7168"}',
    "a size that is a bool": b'{"hidden_size": true}',
    "a size below zero": b'{"num_hidden_layers": -1}',
    "an eagle_config that is a list": b'{"eagle_config": []}',
    "a text config that is a string": b'{"text_config": "x"}',
}


@pytest.mark.parametrize("case", HOSTILE_CONFIGS)
@pytest.mark.parametrize("which", ["target", "draft"])
def test_hostile_configs_are_one_line_and_a_hint(case: str, which: str, tmp_path: Path) -> None:
    folders = {"target": write(tmp_path / "t", KIMI_K2), "draft": write(tmp_path / "d", STATED)}
    (folders[which] / "config.json").write_bytes(HOSTILE_CONFIGS[case])
    ended = run("doctor", folders["target"], folders["draft"], "--release", "0.18.0")
    assert ended.exit_code == 2
    assert len(ended.stderr.splitlines()) == 2
    assert ended.stdout == ""
    as_json = run("doctor", folders["target"], folders["draft"], "--release", "0.18.0", "--json")
    assert [p["code"] for p in as_json.document["problems"]] == ["checkpoint-unreadable"]


def header(content: bytes, length: int | None = None) -> bytes:
    return (len(content) if length is None else length).to_bytes(8, "little") + content


HOSTILE_WEIGHTS: dict[str, bytes] = {
    "empty": b"",
    "shorter than a length": b"\x01\x02",
    "a header that is not there": header(b"", 100),
    "an absurd length": header(b"{}", 2**63),
    "a header that is not JSON": header(b"{{"),
    "a header that is a list": header(b"[]"),
    "a tensor without a shape": header(b'{"fc.weight": {"dtype": "BF16"}}'),
    "a tensor that is a number": header(b'{"fc.weight": 5}'),
    "a shape of words": header(b'{"fc.weight": {"shape": ["a"]}}'),
    "a shape below zero": header(b'{"fc.weight": {"shape": [-1]}}'),
    "not UTF-8": header(b'{"\xff": {"shape": []}}'),
}


@pytest.mark.parametrize("case", HOSTILE_WEIGHTS)
def test_hostile_weights(case: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "draft", STATED)
    (folder / "model.safetensors").write_bytes(HOSTILE_WEIGHTS[case])
    with pytest.raises(CheckpointError) as raised:
        read_draft(str(folder))
    assert raised.value.code == "checkpoint-unreadable"
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    "index",
    [
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": "../elsewhere.safetensors"}}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": "gone.safetensors"}}',
    ],
)
def test_hostile_indexes(index: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "draft", STATED)
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    with pytest.raises(CheckpointError):
        read_draft(str(folder))


def test_a_pipe_in_the_weights_place_does_not_stop_us(tmp_path: Path) -> None:
    folder = write(tmp_path / "draft", STATED)
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="no regular file"):
        read_draft(str(folder))


def test_a_pipe_in_a_configs_place_does_not_stop_us(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    os.mkfifo(folder / "config.json")
    with pytest.raises(CheckpointError):
        read_target(str(folder))
    with pytest.raises(CheckpointError):
        read_target(str(folder / "config.json"))
