"""The layer question: where ids stand, which of them are read, what they count, what is used."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doctor_models import (
    AQ_K2,
    DEEPSEEK_V3,
    IDS,
    K27_CODE,
    KIMI_K2,
    LLAMA_8B,
    LLAMA_DRAFT,
    SPECULATORS_V3,
    TINY,
    changed,
    grave,
    nested,
    situation,
)

from vllm_eagle3_patch.doctor.layers import in_words
from vllm_eagle3_patch.doctor.serve_options import parse_serve


@pytest.mark.parametrize(
    ("release", "patched", "draft", "expected"),
    [
        # Nothing is read up to 0.11.0, whatever stands where.
        ("0.11.0", False, {IDS: [2, 20, 40]}, ("top", (2, 30, 58), "boundary")),
        # The top level alone is read from 0.11.1 to 0.21.0.
        ("0.11.1", False, {IDS: [2, 20, 40]}, ("top", (2, 20, 40), "boundary")),
        ("0.21.0", False, nested(2, 20, 40), ("eagle_config", (2, 30, 58), "boundary")),
        # The V1 runner reads nested ids from 0.22.0 on, as they are.
        ("0.22.0", False, nested(1, 29, 57), ("eagle_config", (1, 29, 57), "boundary")),
        ("0.28.0", False, nested(1, 29, 57), ("eagle_config", (1, 29, 57), "boundary")),
        # From 0.29.0 on the other runner runs, which reads layer_ids only.
        ("0.29.0", False, nested(1, 29, 57), ("eagle_config", (2, 30, 58), "boundary")),
        (
            "0.33.0",
            False,
            {"eagle_config": {"layer_ids": [2, 20, 40]}},
            ("eagle_config", (2, 20, 40), "boundary"),
        ),
        # The patch reads all places; what the ids mean: tests/test_aux_layer_ids_releases.py.
        ("0.17.1", True, nested(1, 14, 39), ("eagle_config", (1, 14, 39), "boundary")),
        (
            "0.17.1",
            True,
            {"eagle_config": {"layer_ids": [1, 14, 39], f"{IDS}_convention": "output"}},
            ("eagle_config", (2, 15, 40), "output"),
        ),
        # An empty list is no list.
        ("0.17.1", False, {IDS: []}, (None, (2, 30, 58), "default")),
    ],
)
def test_what_is_used(
    release: str,
    patched: bool,
    draft: dict[str, object],
    expected: tuple[str | None, tuple[int, ...], str],
) -> None:
    layers = situation(draft=changed(LLAMA_DRAFT, **draft), release=release, patched=patched).layers
    assert (layers.where, layers.used, layers.convention) == expected


def test_ids_of_the_speculators_format_that_do_not_reach_the_draft_model() -> None:
    other = changed(SPECULATORS_V3, **{IDS: [1, 20, 40]})
    lost = situation(DEEPSEEK_V3, other, release="0.11.0", patched=True)
    assert lost.layers.configured == (1, 20, 40)
    assert (lost.layers.where, lost.layers.used) == ("top", (2, 30, 58))
    assert grave(lost)["aux-layers-ignored"] == "warning"
    assert "aux-layers-default" not in grave(lost)
    same = situation(DEEPSEEK_V3, SPECULATORS_V3, release="0.11.0", patched=True)
    assert "aux-layers-ignored" not in grave(same)
    read = situation(DEEPSEEK_V3, other, release="0.17.1", patched=True)
    assert read.layers.used == (1, 20, 40)
    assert "aux-layers-ignored" not in grave(read)


def test_the_environment_chooses_the_runner() -> None:
    draft = changed(LLAMA_DRAFT, **nested(2, 20, 40))
    first = situation(draft=draft, release="0.33.0")
    assert first.layers.used == (2, 30, 58)
    options = parse_serve("VLLM_USE_V2_MODEL_RUNNER=0 vllm serve X")
    assert replace(first, options=options).layers.used == (2, 20, 40)


def test_pipeline_stages_bring_the_v1_runner_back_where_it_takes_over() -> None:
    draft = changed(LLAMA_DRAFT, **nested(2, 20, 40))
    assert situation(draft=draft, release="0.29.0", serve="-pp 2").newer_runner is None
    assert situation(draft=draft, release="0.33.0", serve="-pp 2").newer_runner is not None


def test_another_target_gets_what_the_release_reads() -> None:
    draft = changed(LLAMA_DRAFT, **nested(2, 20, 28, **{f"{IDS}_convention": "output"}))
    assert situation(LLAMA_8B, draft, release="0.17.1", patched=True).layers.used == (2, 16, 29)
    above = changed(LLAMA_DRAFT, **{IDS: [2, 20, 28], f"{IDS}_convention": "output"})
    assert situation(LLAMA_8B, above, release="0.17.1", patched=True).layers.used == (2, 20, 28)
    unknown = changed(above, **{f"{IDS}_convention": "outputs"})
    assert "aux-layers-convention" in grave(situation(draft=unknown))
    assert "aux-layers-convention" not in grave(situation(LLAMA_8B, unknown))


def test_what_the_user_states_goes_before_the_config() -> None:
    draft = changed(LLAMA_DRAFT, **{IDS: [2, 20, 40], f"{IDS}_convention": "boundary"})
    assert situation(draft=draft).layers.convention == "boundary"
    assert situation(draft=draft, convention="output").layers.convention == "output"
    assert situation(draft=draft, convention="output").layers.used == (2, 20, 40)


def test_the_sentence_says_what_happens() -> None:
    lucky = situation(draft=AQ_K2, release="0.17.1").layers.sentence
    assert "asks for 2, 30, 58 under eagle_config" in lucky
    assert "default 2, 30, 58: the outputs of layers 1, 29 and 57: the same tensors, by luck" in (
        lucky
    )
    off = situation(draft=K27_CODE, release="0.22.0", convention="output").layers.sentence
    assert "uses 1, 29, 57: the outputs of layers 0, 28 and 56, but the draft model wants the " in (
        off
    )
    assert off.endswith("the outputs of layers 1, 29 and 57")
    unsaid = situation(draft=K27_CODE, release="0.22.0").layers.sentence
    assert unsaid.endswith("the ids look like outputs of layers, and nothing says whether they are")


def test_outputs_in_words() -> None:
    assert in_words([1, 29, 57]) == "the outputs of layers 1, 29 and 57"
    assert in_words([-1, 5]) == "the outputs of layers the embedding and 5"
    assert in_words([-1]) == "the embedding"
    assert in_words([]) == "no layers"


def test_no_layer_count_no_layers() -> None:
    target = changed(KIMI_K2, num_hidden_layers=None)
    judgement = situation(target, LLAMA_DRAFT)
    assert judgement.layers.used is None
    assert "not known" in judgement.layers.sentence
    assert grave(judgement)["missing-key"] == "warning"


@pytest.mark.parametrize(
    ("draft", "used", "codes"),
    [
        # Trained on boundaries 1, 4 and 6 of a target of 8 layers, and saying so.
        ({IDS: [1, 4, 6], f"{IDS}_convention": "boundary"}, (1, 4, 6), {}),
        # One more each: as good as any, to all that the configs show.
        ({IDS: [2, 5, 7]}, (2, 5, 7), {}),
        # No list: the default.
        ({}, (2, 4, 5), {"aux-layers-default": "warning"}),
    ],
)
def test_the_three_configurations_of_the_acceptance_experiment(
    draft: dict[str, object], used: tuple[int, ...], codes: dict[str, str]
) -> None:
    small = changed(
        LLAMA_DRAFT,
        hidden_size=512,
        vocab_size=1024,
        draft_vocab_size=1024,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        **draft,
    )
    target = changed(TINY, vocab_size=1024)
    judgement = situation(target, small, release="0.17.1", patched=True)
    assert judgement.layers.used == used
    assert grave(judgement) == codes
