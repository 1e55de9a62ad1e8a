"""The doctor on the acceptance experiment: right ids, off by one, the default.

The configs are those that benchmarks/acceptance trains, with its 8 layers; the figures are those
that it measured on vLLM 0.32.0, 4 tokens drafted a step (benchmarks/acceptance/README.md). The
draft model *sparse-early* was trained on the boundaries 1, 4 and 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from doctor_models import IDS, Config, findings, situation
from metrics_exposition import Engine, page

from vllm_eagle3_patch.doctor.metrics import acceptance

RELEASE = "0.32.0"
CONVENTION = f"{IDS}_convention"

TARGET: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


def draft(**layers: object) -> Config:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 256,
        "vocab_size": 512,
        "draft_vocab_size": 512,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **layers,
    }


RIGHT = draft(**{IDS: [1, 4, 6], CONVENTION: "boundary"})
OUTPUTS = draft(**{IDS: [0, 3, 5], CONVENTION: "output"})
"""The same layers, counted by their outputs: stock vLLM takes them for boundaries."""
LEFT_OUT = draft()


# On 0.17.1 after `apply`, which makes the release read the convention.
def about_layers(draft_config: Config, release: str = RELEASE) -> tuple[object, set[str]]:
    patched = release != RELEASE
    judged = situation(TARGET, draft_config, release=release, patched=patched)
    codes = {f.code for f in findings(judged) if f.severity != "info"}
    return judged.layers.used, {code for code in codes if code.startswith("aux-")}


def test_the_config_with_the_right_ids_is_right() -> None:
    assert about_layers(RIGHT) == ((1, 4, 6), set())
    assert about_layers(RIGHT, "0.17.1") == ((1, 4, 6), set())


def test_ids_that_are_off_by_one_are_seen_in_the_config() -> None:
    assert about_layers(OUTPUTS) == ((0, 3, 5), {"aux-layers-convention", "aux-layers-range"})
    assert about_layers(OUTPUTS, "0.17.1") == ((1, 4, 6), set())


def test_ids_that_are_left_out_mean_the_default() -> None:
    assert about_layers(LEFT_OUT) == ((2, 4, 5), {"aux-layers-default"})


def scrape(folder: Path, drafts: int, shares: Sequence[float]) -> str:
    """A page with these shares of drafts accepted by position."""
    file = folder / "metrics.txt"
    by_position = [round(drafts * share) for share in shares]
    file.write_text(page(Engine(drafts, by_position)), encoding="utf-8")
    return str(file)


MEASURED = {
    "right": (1054, (0.948, 0.484, 0.468, 0.011)),
    "off by one": (1100, (0.910, 0.453, 0.421, 0.011)),
    "default": (1086, (0.948, 0.441, 0.428, 0.014)),
    "far off": (1431, (0.621, 0.300, 0.213, 0.008)),
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_counters_alone_do_not_tell_which_ids_were_used(name: str, tmp_path: Path) -> None:
    # That is why the experiment compares counts with a simulation: all fall at position 1, as the
    # draft model was stopped early, and no rate is below what wrong layers would explain.
    drafts, shares = MEASURED[name]
    report = acceptance.read(scrape(tmp_path, drafts, shares))
    assert report.judgement.reason == "decay"
    assert report.models[0].total.acceptance_by_position == pytest.approx(shares, abs=0.001)


@pytest.mark.parametrize(
    ("draft_config", "first"),
    [(RIGHT, "unrolled-steps"), (OUTPUTS, "layers"), (LEFT_OUT, "layers")],
    ids=["right", "off by one", "default"],
)
def test_counters_and_config_together_tell(
    draft_config: Config, first: str, tmp_path: Path
) -> None:
    report = acceptance.read(scrape(tmp_path, *MEASURED["right"]))
    judged = situation(TARGET, draft_config, release=RELEASE)
    diagnosis = SimpleNamespace(findings=findings(judged))
    assert report.causes(diagnosis)[0].code == first
