"""Pairs of models and releases, with what must be found: by reasoning, stated beside each.

The configs have the keys and values of the public models (tests/doctor/doctor_models.py). Expected
are the codes of errors (E) and warnings (W); from them follows the verdict.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from doctor_models import (
    AMD_FP8,
    AQ_K2,
    AQ_K25,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM_5,
    IDS,
    K27_CODE,
    KIMI_K2,
    KIMI_K2_THINKING,
    KIMI_K25,
    KIMI_K26,
    LIGHTSEEK_K25,
    LLAMA_8B,
    LLAMA_DRAFT,
    MLA_31,
    MLA_K25,
    NVIDIA,
    SPECFORGE_V3,
    SPECULATORS_V3,
    STATED,
    Config,
    changed,
    findings,
    grave,
    nested,
    situation,
    verdict,
)

GATE = {"target-not-allowed": "E", "interface-missing": "E"}
WRAPPED = {**GATE, "wrapper-missing": "E", "image-token": "E"}

STATED_V3 = changed(STATED, vocab_size=129280, max_position_embeddings=163840)
STATED_GLM = changed(
    STATED,
    hidden_size=6144,
    vocab_size=154880,
    max_position_embeddings=202752,
    **{IDS: [2, 39, 75]},
)
LLAMA_HEAD = changed(
    LLAMA_DRAFT,
    architectures=["LlamaForCausalLM"],
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=2048,
)
EAGLE = """--speculative-config '{"method":"eagle","num_speculative_tokens":3}'"""
OWN_BACKEND = (
    "--attention-backend FLASHMLA --speculative-config "
    """'{"method":"eagle3","num_speculative_tokens":3,"attention_backend":"FLASH_ATTN"}'"""
)


@dataclass(frozen=True)
class Pair:
    """One pair in one release."""

    target: Config
    draft: Config
    release: str
    expected: dict[str, str]
    why: str
    patched: bool = False
    serve: str | None = None


PAIRS: dict[str, Pair] = {
    # Kimi-K2 with a grouped-query draft model, ids nested and beginning with 2.
    "K2 0.9.2": Pair(
        KIMI_K2,
        AQ_K2,
        "0.9.2",
        {
            **GATE,
            "draft-architecture": "E",
            "kv-pages": "E",
        },
        "one page size; LlamaForCausalLMEagle3 becomes Eagle3LlamaForCausalLMEagle3",
    ),
    "K2 0.10.0": Pair(
        KIMI_K2,
        AQ_K2,
        "0.10.0",
        {
            **GATE,
            "draft-architecture": "E",
            "kv-pages": "E",
        },
        "as 0.9.2",
    ),
    "K2 0.10.1": Pair(
        KIMI_K2,
        AQ_K2,
        "0.10.1",
        {
            **GATE,
            "draft-architecture": "E",
            "kv-pages": "E",
        },
        "the name is kept, but its line of the registry is commented out",
    ),
    "K2 0.10.2": Pair(
        KIMI_K2,
        AQ_K2,
        "0.10.2",
        {
            **GATE,
            "kv-pages": "E",
            "quantization": "E",
        },
        "the name is registered; the draft's layers are built as FP8, like the target's",
    ),
    "K2 0.11.0": Pair(
        KIMI_K2,
        AQ_K2,
        "0.11.0",
        {
            **GATE,
            "kv-pages": "E",
            "quantization": "E",
        },
        "two page sizes, but metadata and quantization are the target's",
    ),
    "K2 0.11.0 patched": Pair(
        KIMI_K2,
        AQ_K2,
        "0.11.0",
        {},
        "draft-attention-metadata mends that, aux-layer-ids reads the ids",
        patched=True,
    ),
    "K2 0.11.1": Pair(KIMI_K2, AQ_K2, "0.11.1", GATE, "the two gates"),
    "K2 0.12.0 patched": Pair(KIMI_K2, AQ_K2, "0.12.0", {}, "gates open", patched=True),
    "K2 0.16.0": Pair(KIMI_K2, AQ_K2, "0.16.0", GATE, "the two gates"),
    "K2 0.17.1": Pair(
        KIMI_K2,
        AQ_K2,
        "0.17.1",
        GATE,
        "the two gates; the default equals the nested ids",
    ),
    "K2 0.17.1 patched": Pair(
        KIMI_K2,
        AQ_K2,
        "0.17.1",
        {},
        "gates open",
        patched=True,
    ),
    "K2 0.18.0": Pair(KIMI_K2, AQ_K2, "0.18.0", {}, "native"),
    "K2 0.22.0": Pair(KIMI_K2, AQ_K2, "0.22.0", {}, "nested ids are read: the same ids"),
    "K2 0.33.0": Pair(KIMI_K2, AQ_K2, "0.33.0", {}, "the other runner, its default"),
    "K2-Thinking 0.18.0": Pair(
        KIMI_K2_THINKING,
        AQ_K2,
        "0.18.0",
        {
            "max-position": "W",
        },
        "a window of 131072 for a target of 262144",
    ),
    "K2-Thinking 0.18.0, shorter": Pair(
        KIMI_K2_THINKING,
        AQ_K2,
        "0.18.0",
        {},
        "served no longer than the draft's window",
        serve="--max-model-len 131072",
    ),
    # Kimi-K2.5 and K2.6: multimodal, text type kimi_k2.
    "K2.5 0.14.1": Pair(
        KIMI_K25,
        AQ_K25,
        "0.14.1",
        {
            **GATE,
            "image-token": "E",
        },
        "the class came in 0.15.0",
    ),
    "K2.5 0.15.0": Pair(
        KIMI_K25,
        AQ_K25,
        "0.15.0",
        WRAPPED,
        "the class is there and lacks all four",
    ),
    "K2.5 0.15.0 patched": Pair(KIMI_K25, AQ_K25, "0.15.0", {}, "mended", patched=True),
    "K2.5 0.17.1": Pair(KIMI_K25, AQ_K25, "0.17.1", WRAPPED, "all four"),
    "K2.5 0.17.1 patched": Pair(KIMI_K25, AQ_K25, "0.17.1", {}, "mended", patched=True),
    "K2.5 0.18.0": Pair(KIMI_K25, AQ_K25, "0.18.0", {}, "native"),
    "K2.5 0.33.0": Pair(KIMI_K25, AQ_K25, "0.33.0", {}, "native"),
    "K2.5, no ids 0.17.1 patched": Pair(
        KIMI_K25,
        LIGHTSEEK_K25,
        "0.17.1",
        {
            "aux-layers-default": "W",
        },
        "which layers it wants is not in its config",
        patched=True,
    ),
    "K2.5, no ids 0.18.0": Pair(
        KIMI_K25,
        LIGHTSEEK_K25,
        "0.18.0",
        {
            "aux-layers-default": "W",
        },
        "the same",
    ),
    "K2.5, no ids, as EAGLE 0.18.0": Pair(
        KIMI_K25,
        LIGHTSEEK_K25,
        "0.18.0",
        {"method": "E"},
        "EAGLE for an EAGLE-3 head: length 1.00",
        serve=EAGLE,
    ),
    "K2.5, FP8 draft 0.18.0": Pair(
        KIMI_K25, AMD_FP8, "0.18.0", {}, "the draft model's own quantization is used"
    ),
    "K2.6, FP4 target 0.18.0": Pair(
        KIMI_K26, AQ_K25, "0.18.0", {}, "quantized targets accept well"
    ),
    # MLA draft models.
    "K2.5 MLA 0.17.1": Pair(
        KIMI_K25,
        MLA_K25,
        "0.17.1",
        {
            **WRAPPED,
            "draft-architecture": "E",
            "draft-model-type": "E",
        },
        "no class for MLA draft models, and type kimi_k2 is not known",
    ),
    "K2.5 MLA 0.17.1 patched": Pair(
        KIMI_K25,
        MLA_K25,
        "0.17.1",
        {
            "draft-architecture": "E",
            "draft-model-type": "E",
        },
        "the patch adds no draft class",
        patched=True,
    ),
    "K2.5 MLA 0.18.0": Pair(KIMI_K25, MLA_K25, "0.18.0", {}, "native"),
    "K2.5 MLA 0.22.0": Pair(KIMI_K25, MLA_K25, "0.22.0", {}, "nested ids are read"),
    "K2.5 MLA 0.33.0": Pair(KIMI_K25, MLA_K25, "0.33.0", {}, "the default is used"),
    "K2.5 MLA, backend forced 0.18.0": Pair(
        KIMI_K25,
        MLA_K25,
        "0.18.0",
        {},
        "an MLA draft model can use it",
        serve="--attention-backend FLASHINFER_MLA",
    ),
    "K2.6 MLA 3.1 0.18.0": Pair(
        KIMI_K26,
        MLA_31,
        "0.18.0",
        {"norm-flag": "W"},
        "fc_norm and norm_output came in 0.22.0; the default is outputs 1, 29 and 57",
    ),
    "K2.6 MLA 3.1 0.21.0": Pair(KIMI_K26, MLA_31, "0.21.0", {"norm-flag": "W"}, "the same"),
    "K2.6 MLA 3.1 0.22.0": Pair(
        KIMI_K26,
        MLA_31,
        "0.22.0",
        {},
        "the norms are there; that [1, 29, 57] looks like outputs is said",
    ),
    "K2.6 MLA 3.1 0.28.0": Pair(
        KIMI_K26, MLA_31, "0.28.0", {}, "experts and not listed: still the V1 runner"
    ),
    "K2.6 MLA 3.1 0.29.0": Pair(
        KIMI_K26,
        MLA_31,
        "0.29.0",
        {},
        "the other runner does not read them, and its default is right",
    ),
    "K2.6 MLA 3.1 0.33.0": Pair(KIMI_K26, MLA_31, "0.33.0", {}, "the same"),
    "K2 NVIDIA 0.17.1 patched": Pair(
        KIMI_K2,
        NVIDIA,
        "0.17.1",
        {"draft-model-type": "E"},
        "type deepseek_v3 becomes an MTP model",
        patched=True,
    ),
    "K2 NVIDIA 0.18.0": Pair(KIMI_K2, NVIDIA, "0.18.0", {"draft-model-type": "E"}, "the same"),
    "K2 NVIDIA as kimi_k2 0.18.0": Pair(
        KIMI_K2,
        changed(NVIDIA, model_type="kimi_k2"),
        "0.18.0",
        {},
        "its trainer counts boundaries, and they are the default",
    ),
    # Ids that count outputs: 1, 29, 57.
    "K2.7 0.17.1": Pair(
        KIMI_K25, K27_CODE, "0.17.1", WRAPPED, "the gates; the default is right if they are outputs"
    ),
    "K2.7 0.17.1 patched": Pair(
        KIMI_K25,
        K27_CODE,
        "0.17.1",
        {},
        "read as boundaries; that they look like outputs is said",
        patched=True,
    ),
    "K2.7 0.18.0": Pair(KIMI_K25, K27_CODE, "0.18.0", {}, "the same"),
    "K2.7 0.21.0": Pair(KIMI_K25, K27_CODE, "0.21.0", {}, "the same"),
    "K2.7 0.22.0": Pair(KIMI_K25, K27_CODE, "0.22.0", {}, "read as they are"),
    "K2.7 0.24.0": Pair(KIMI_K25, K27_CODE, "0.24.0", {}, "the same"),
    "K2.7 0.33.0": Pair(KIMI_K25, K27_CODE, "0.33.0", {}, "the other runner's default"),
    # DeepSeek-V3 and R1.
    "V3 template 0.17.1 patched": Pair(
        DEEPSEEK_V3,
        SPECFORGE_V3,
        "0.17.1",
        {"dtype": "W"},
        "the template says float16",
        patched=True,
        serve="-tp 8",
    ),
    "V3 template, 16 ranks 0.17.1 patched": Pair(
        DEEPSEEK_V3,
        SPECFORGE_V3,
        "0.17.1",
        {
            "dtype": "W",
            "draft-tensor-parallel": "E",
        },
        "56 heads do not divide by 16",
        patched=True,
        serve="-tp 16",
    ),
    "V3 template 0.22.0": Pair(
        DEEPSEEK_V3,
        SPECFORGE_V3,
        "0.22.0",
        {
            "dtype": "W",
        },
        "nested ids are read",
    ),
    "V3 speculators 0.10.0": Pair(
        DEEPSEEK_V3,
        SPECULATORS_V3,
        "0.10.0",
        {
            **GATE,
            "draft-architecture": "E",
            "kv-pages": "E",
            "missing-key": "W",
        },
        "the format came in 0.10.1",
    ),
    "V3 speculators 0.17.1": Pair(DEEPSEEK_V3, SPECULATORS_V3, "0.17.1", GATE, "the two gates"),
    "V3 speculators 0.17.1 patched": Pair(
        DEEPSEEK_V3,
        SPECULATORS_V3,
        "0.17.1",
        {},
        "boundaries by definition, at the top level",
        patched=True,
    ),
    "V3 speculators 0.18.0": Pair(DEEPSEEK_V3, SPECULATORS_V3, "0.18.0", {}, "native"),
    "V3 speculators 0.33.0": Pair(DEEPSEEK_V3, SPECULATORS_V3, "0.33.0", {}, "native"),
    "V3.2 0.17.1 patched": Pair(DEEPSEEK_V32, STATED_V3, "0.17.1", {}, "mended", patched=True),
    "V3.2 0.18.0": Pair(
        DEEPSEEK_V32, STATED_V3, "0.18.0", {}, "deepseek_v3 is a part of deepseek_v32"
    ),
    "V3.2, 8 ranks 0.33.0": Pair(
        DEEPSEEK_V32,
        STATED_V3,
        "0.33.0",
        {"tensor-parallel": "W"},
        "its own file leaves the sum over ranks to the next norm",
        serve="-tp 8",
    ),
    "GLM 0.18.0": Pair(
        GLM_5,
        STATED_GLM,
        "0.18.0",
        {"target-not-allowed": "E"},
        "native classes, but the allowlist lacks glm_moe_dsa",
    ),
    "GLM 0.17.1 patched": Pair(GLM_5, STATED_GLM, "0.17.1", {}, "mended", patched=True),
    "GLM 0.22.0": Pair(GLM_5, STATED_GLM, "0.22.0", {}, "no allowlist any more"),
    # Options.
    "K2, two stages 0.18.0": Pair(
        KIMI_K2,
        STATED,
        "0.18.0",
        {"pipeline-parallel": "E"},
        "the last rank captures its own layers only",
        serve="-pp 2",
    ),
    "K2, two stages 0.33.0": Pair(
        KIMI_K2,
        STATED,
        "0.33.0",
        {"pipeline-parallel": "E"},
        "this class does not relay",
        serve="-pp 2",
    ),
    "K2, backend forced 0.20.2": Pair(
        KIMI_K2,
        STATED,
        "0.20.2",
        {"attention-backend": "E"},
        "handed on to the draft model",
        serve="--attention-backend FLASHMLA",
    ),
    "K2, backend forced 0.21.0": Pair(
        KIMI_K2,
        STATED,
        "0.21.0",
        {},
        "the V1 runner never hands it on since",
        serve="--attention-backend FLASHMLA",
    ),
    "K2, backend forced 0.33.0": Pair(
        KIMI_K2,
        STATED,
        "0.33.0",
        {"attention-backend": "E"},
        "the other runner does",
        serve="--attention-backend FLASHMLA",
    ),
    "K2, own backend 0.33.0": Pair(
        KIMI_K2, STATED, "0.33.0", {}, "unless the draft model's is given", serve=OWN_BACKEND
    ),
    "K2, dual batch overlap 0.22.0": Pair(
        KIMI_K2,
        STATED,
        "0.22.0",
        {
            "dual-batch-overlap": "E",
        },
        "tuples are concatenated, the list in them is not",
        serve="--enable-dbo",
    ),
    # Not the family, and not the right draft model.
    "Llama 0.17.1": Pair(
        LLAMA_8B,
        LLAMA_HEAD,
        "0.17.1",
        {
            "aux-layers-default": "W",
            "max-position": "W",
        },
        "no ids, and a window of 2048",
    ),
    "Llama with Kimi's draft 0.18.0": Pair(
        LLAMA_8B,
        AQ_K2,
        "0.18.0",
        {
            "hidden-size": "E",
            "vocab": "W",
            "aux-layers-ignored": "W",
        },
        "7168 wide for a target of 4096",
    ),
    "K2 with other layers 0.18.0": Pair(
        KIMI_K2,
        changed(LLAMA_DRAFT, **nested(1, 14, 39)),
        "0.18.0",
        {"aux-layers-ignored": "W"},
        "trained on boundaries 1, 14 and 39, fed 2, 30 and 58",
    ),
    "K2 with other layers 0.17.1 patched": Pair(
        KIMI_K2,
        changed(LLAMA_DRAFT, **nested(1, 14, 39)),
        "0.17.1",
        {},
        "read, as they are",
        patched=True,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair(name: str) -> None:
    pair = PAIRS[name]
    judged = situation(
        pair.target, pair.draft, release=pair.release, patched=pair.patched, serve=pair.serve
    )
    found = grave(judged)
    expected = {
        code: {"E": "error", "W": "warning"}[severity] for code, severity in pair.expected.items()
    }
    assert found == expected, [f.message for f in findings(judged)]
    assert verdict(found) == verdict(expected)


def test_there_are_enough_of_them() -> None:
    assert len(PAIRS) >= 60
    assert len({pair.release for pair in PAIRS.values()}) >= 12
    assert {verdict(pair.expected) for pair in PAIRS.values()} <= {"ok", "risky", "broken"}
