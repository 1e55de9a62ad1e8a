"""Odd values in any key: a checkpoint is refused in one line, or judged; never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doctor_models import (
    DEEPSEEK_V3,
    IDS,
    KIMI_K25,
    MLA_31,
    NVIDIA,
    SPECULATORS_V3,
    STATED,
    WEIGHTS,
    safetensors,
    write,
)

from command_line import run

ODD: list[Any] = [
    None, True, -1, 0, 10**30, 1.5, "", "x", "\ud800", [], [[]], [None], ["x", 1], [1] * 5000, {},
    {"type": None}, {"rope_type": 5, "type": "yarn"}, {"": {"": []}},
    {"type": "yarn", "factor": 1e308, "original_max_position_embeddings": 10**9},
    {"type": "yarn", "factor": "x", "original_max_position_embeddings": 4096},
    {IDS: "2,30,58"}, {IDS: [10**40, -(10**40)]}, {"use_aux_hidden_state": "no"},
]  # fmt: skip
EXTRA = (
    "eagle_config", "auto_map", "rope_parameters", "quantization_config", "head_dim", "layer_types",
    "sliding_window", "use_sliding_window", "num_aux_hidden_states", "target_hidden_size", "dtype",
    "fc_norm", f"{IDS}_convention", IDS, "language_config", "image_token_index", "n_predict",
)  # fmt: skip


def ends_well(target: Path, draft: Path, release: str, *more: object) -> None:
    ended = run("doctor", target, draft, "--release", release, "--json", *more)
    assert ended.exit_code in (0, 1, 2, 4), ended.stderr
    document = ended.document
    if ended.exit_code == 2:
        assert len(ended.stderr.splitlines()) == 2
        assert [p["code"] for p in document["problems"]] == ["checkpoint-unreadable"]
    plain = run("doctor", target, draft, "--release", release)
    assert plain.exit_code == ended.exit_code


@pytest.mark.parametrize("release", ["0.10.2", "0.33.0"])
@pytest.mark.parametrize("which", ["V3", "K2.5", "stated", "MLA", "NVIDIA", "speculators"])
def test_odd_values(which: str, release: str, tmp_path: Path) -> None:
    targets = {"V3": DEEPSEEK_V3, "K2.5": KIMI_K25}
    drafts = {"stated": STATED, "MLA": MLA_31, "NVIDIA": NVIDIA, "speculators": SPECULATORS_V3}
    config = {**targets, **drafts}[which]
    target, draft = tmp_path / "target", tmp_path / "draft"
    write(target, DEEPSEEK_V3)
    write(draft, STATED, WEIGHTS)
    changed = target if which in targets else draft
    keys = [*config, *EXTRA]
    for number, key in enumerate(keys):
        # Each key meets some of the values, and all keys together all of them.
        for value in ODD[number % 3 :: 3]:
            (changed / "config.json").write_text(json.dumps({**config, key: value}))
            ends_well(target, draft, release)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (10**15, 1), (2, 3, 4)])
def test_odd_shapes(shape: tuple[int, ...], tmp_path: Path) -> None:
    target, draft = write(tmp_path / "target", DEEPSEEK_V3), write(tmp_path / "draft", STATED)
    for name in (*WEIGHTS, "embed_tokens.weight", "fc_norm.0.weight"):
        content = safetensors({**WEIGHTS, name: shape})
        (draft / "model.safetensors").write_bytes(content)
        ends_well(target, draft, "0.18.0")


def test_odd_values_are_written_too(tmp_path: Path) -> None:
    target, draft = write(tmp_path / "target", DEEPSEEK_V3), tmp_path / "draft"
    for number, value in enumerate(ODD):
        write(draft, {**STATED, "odd": value, "auto_map": {"AutoConfig": value}}, WEIGHTS)
        copy = tmp_path / f"copy-{number}"
        ends_well(target, draft, "0.18.0")
        run("doctor", target, draft, "--release", "0.18.0", "--write-draft-config", copy)
        assert json.loads((copy / "config.json").read_bytes().decode("utf-8", "surrogatepass"))
