"""Each rule, both outcomes: a healthy pair has no error or warning, one change gives one code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_models import (
    DEEPSEEK_V3,
    IDS,
    KIMI_K2,
    KIMI_K25,
    LLAMA_8B,
    LLAMA_DRAFT,
    MLA_K25,
    SPECULATORS_V3,
    STATED,
    WEIGHTS,
    changed,
    findings,
    grave,
    nested,
    situation,
    yarn,
)

from vllm_eagle3_patch.doctor.finding import all_rules, judged
from vllm_eagle3_patch.doctor.serve_options import parse_serve
from vllm_eagle3_patch.doctor.situation import Situation

CONTRACT = """
target-not-allowed interface-missing wrapper-missing image-token multimodal-draft
draft-architecture draft-model-type method auto-map hidden-size aux-count aux-layers-range
aux-layers-order aux-layers-ignored aux-layers-default aux-layers-convention norm-flag
lm-head embed-tokens vocab compile-cache dual-batch-overlap max-position dtype
float16-scaling rope quantization pipeline-parallel decode-context-parallel data-parallel
attention-backend kv-pages kv-transfer use-aux-hidden-state
"""

SHARING = {name: shape for name, shape in WEIGHTS.items() if name != "lm_head.weight"}
WHOLE = changed(STATED, draft_vocab_size=163840)
SAID_OUTPUTS = changed(STATED, **{IDS: [1, 29, 57], f"{IDS}_convention": "output"})
MLA = changed(MLA_K25, **{IDS: [2, 30, 58], f"{IDS}_convention": "boundary"})


def config(**changes: Any) -> dict[str, Any]:
    return changed(STATED, **changes)


# id: (what is changed, the codes of errors and warnings with their severity)
CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "healthy, config only": ({}, {}),
    "healthy, with weights": ({"weights": WEIGHTS}, {}),
    "healthy after apply": ({"release": "0.17.1", "patched": True, "weights": WEIGHTS}, {}),
    "healthy, an MLA draft model": (
        {"draft": changed(MLA, max_position_embeddings=131072)},
        {},
    ),
    "a type that the allowlist lacks": (
        {
            "target": changed(LLAMA_8B, model_type="gemma3"),
            "draft": config(hidden_size=4096, vocab_size=128256, **{IDS: [2, 16, 29]}),
            "release": "0.16.0",
        },
        {"target-not-allowed": "error"},
    ),
    "no interface": (
        {"target": changed(KIMI_K2, model_type="llama"), "release": "0.17.1"},
        {"interface-missing": "error"},
    ),
    "a wrapper that does not hand it on": (
        {
            "target": changed(
                KIMI_K2, architectures=["KimiVLForConditionalGeneration"], image_token_index=1
            )
        },
        {"wrapper-missing": "error"},
    ),
    "an image token that the config lacks": (
        {
            "target": changed(
                KIMI_K25,
                architectures=["LlavaForConditionalGeneration"],
                text_config={**KIMI_K2, "model_type": "llama"},
            ),
            "release": "0.16.0",
        },
        {"image-token": "warning"},
    ),
    "a draft class without multimodal inputs": (
        {
            "target": changed(
                KIMI_K25,
                architectures=["Mistral3ForConditionalGeneration"],
                text_config=changed(
                    KIMI_K2, model_type="llama", kv_lora_rank=None, quantization_config=None
                ),
                image_token_index=1,
            ),
            "release": "0.11.0",
        },
        {
            "multimodal-draft": "error",
            "interface-missing": "error",
            "aux-layers-ignored": "info",
        },
    ),
    "an MLA draft model before its class came": (
        {
            "draft": changed(MLA, max_position_embeddings=131072, model_type="llama"),
            "release": "0.17.1",
            "patched": True,
        },
        {"draft-architecture": "error"},
    ),
    "a type that is taken for MTP": (
        {"draft": config(model_type="deepseek_v3")},
        {"draft-model-type": "error"},
    ),
    "a type that needs its own code": (
        {
            "draft": config(
                architectures=["LlamaForCausalLMEagle3"], model_type="kimi_k2", auto_map=None
            ),
            "release": "0.17.1",
            "patched": True,
        },
        {"draft-model-type": "error"},
    ),
    "the method of EAGLE-1": (
        {"serve": """--speculative-config '{"method":"eagle","num_speculative_tokens":3}'"""},
        {"method": "error"},
    ),
    "a name that means EAGLE-1": (
        {"serve": """--speculative-config '{"model":"x/eagle-3","num_speculative_tokens":3}'"""},
        {"method": "error"},
    ),
    "a name that means EAGLE-3": (
        {"serve": """--speculative-config '{"model":"x/k2-eagle3","num_speculative_tokens":3}'"""},
        {},
    ),
    "no number of tokens": (
        {"serve": """--speculative-config '{"model":"x/k2-eagle3"}'"""},
        {"speculative-tokens": "error"},
    ),
    "nothing says EAGLE-3": (
        {"draft": changed(LLAMA_DRAFT, architectures=["LlamaForCausalLM"], draft_vocab_size=None)},
        {"method": "warning", "aux-layers-default": "warning"},
    ),
    "another width": (
        {"draft": config(hidden_size=4096)},
        {"hidden-size": "error"},
    ),
    "another width that it says": (
        {"draft": config(hidden_size=4096, target_hidden_size=7168)},
        {},
    ),
    "another width without an embedding": (
        {
            "draft": config(hidden_size=4096, target_hidden_size=7168),
            "weights": {**WEIGHTS, "fc.weight": (4096, 3 * 7168), "lm_head.weight": (32000, 4096)},
        },
        {"hidden-size": "error"},
    ),
    "four states": (
        {"draft": config(**{IDS: [2, 20, 40, 58]})},
        {"aux-count": "error"},
    ),
    "four states that it counts": (
        {"draft": config(num_aux_hidden_states=4, **{IDS: [2, 20, 40, 58]}), "release": "0.28.0"},
        {},
    ),
    "an fc for four states": (
        {"weights": {**WEIGHTS, "fc.weight": (7168, 4 * 7168)}},
        {"aux-count": "error"},
    ),
    "an id beyond the layers": (
        {"draft": config(**{IDS: [2, 30, 70]})},
        {"aux-layers-range": "error"},
    ),
    "the last id, which is dropped": (
        {"draft": config(**{IDS: [2, 30, 61]})},
        {"aux-layers-range": "error"},
    ),
    "the last id, which is kept": (
        {"draft": config(**{IDS: [2, 30, 61]}), "release": "0.28.0"},
        {},
    ),
    "the last id after apply": (
        {"draft": config(**{IDS: [2, 30, 61]}), "release": "0.17.1", "patched": True},
        {},
    ),
    "the embedding, which raises": (
        {"draft": config(**{IDS: [0, 30, 58]})},
        {"aux-layers-range": "error"},
    ),
    "the embedding after apply": (
        {"draft": config(**{IDS: [0, 30, 58]}), "release": "0.17.1", "patched": True},
        {},
    ),
    "a negative id": (
        {"draft": config(**{IDS: [-1, 30, 58]})},
        {"aux-layers-range": "error"},
    ),
    "ids that are words": (
        {"draft": config(**{IDS: ["2", "30", "58"]})},
        {"aux-layers-range": "error"},
    ),
    "descending ids": (
        {"draft": config(**{IDS: [58, 30, 2]})},
        {"aux-layers-order": "warning"},
    ),
    "an id twice": (
        {"draft": config(**{IDS: [2, 30, 30]})},
        {"aux-layers-order": "error"},
    ),
    "nested ids that are not the default": (
        {"draft": changed(LLAMA_DRAFT, **nested(1, 14, 39))},
        {"aux-layers-ignored": "warning"},
    ),
    "nested ids that are the default": (
        {"draft": changed(LLAMA_DRAFT, **nested(1, 29, 57))},
        {},
    ),
    "no ids": (
        {"draft": LLAMA_DRAFT},
        {"aux-layers-default": "warning"},
    ),
    "ids that begin with 2": (
        {"draft": changed(LLAMA_DRAFT, **{IDS: [2, 30, 58]})},
        {},
    ),
    "ids that look like outputs": (
        {"draft": changed(LLAMA_DRAFT, **{IDS: [1, 29, 57]})},
        {},
    ),
    "outputs that are taken for boundaries": (
        {"draft": SAID_OUTPUTS},
        {"aux-layers-convention": "warning"},
    ),
    "ids that the user states to be outputs": (
        {"draft": changed(LLAMA_DRAFT, **{IDS: [1, 29, 57]}), "convention": "output"},
        {"aux-layers-convention": "warning"},
    ),
    "outputs that the patch turns into boundaries": (
        {
            "draft": SAID_OUTPUTS,
            "release": "0.17.1",
            "patched": True,
        },
        {},
    ),
    "a norm that the class lacks": (
        {"draft": config(norm_output=True)},
        {"norm-flag": "warning"},
    ),
    "a norm that the class has": (
        {"draft": config(norm_output=True, fc_norm=True), "release": "0.28.0"},
        {},
    ),
    "a norm with weights that the class lacks": (
        {"draft": config(fc_norm=True), "weights": {**WEIGHTS, "fc_norm.0.weight": (7168,)}},
        {"norm-flag": "error"},
    ),
    "a norm with weights that the config does not name": (
        {"weights": {**WEIGHTS, "fc_norm.0.weight": (7168,)}},
        {"norm-flag": "error"},
    ),
    "a norm with weights that the class passes over": (
        {"weights": {**WEIGHTS, "input_norm.weight": (21504,)}},
        {"norm-flag": "warning"},
    ),
    "a norm where the class does not look": (
        {"draft": config(eagle_config={"norm_before_residual": True})},
        {"norm-flag": "warning"},
    ),
    "a small vocabulary without a head": (
        {"weights": SHARING},
        {"lm-head": "error"},
    ),
    "the whole vocabulary without a head": (
        {"draft": WHOLE, "weights": {**SHARING, "d2t": (163840,)}},
        {},
    ),
    "an embedding of the target's shape": (
        {"weights": {**WEIGHTS, "embed_tokens.weight": (163840, 7168)}},
        {"embed-tokens": "warning"},
    ),
    "a head of another size": (
        {"weights": {**WEIGHTS, "lm_head.weight": (16000, 7168)}},
        {"vocab": "error"},
    ),
    "no map of the vocabulary": (
        {"weights": {k: v for k, v in WEIGHTS.items() if k != "d2t"}},
        {"vocab": "error"},
    ),
    "a map of another size": (
        {"weights": {**WEIGHTS, "d2t": (16000,)}},
        {"vocab": "error"},
    ),
    "another tokenizer": (
        {"draft": config(vocab_size=128256)},
        {"vocab": "warning"},
    ),
    "a tied head of another size": (
        {"draft": config(tie_word_embeddings=True)},
        {"vocab": "warning"},
    ),
    "a vocabulary larger than the whole": (
        {"draft": config(draft_vocab_size=200000)},
        {"vocab": "error"},
    ),
    "dual batch overlap": (
        {"serve": "--enable-dbo"},
        {"dual-batch-overlap": "error"},
    ),
    "dual batch overlap after apply": (
        {"serve": "--enable-dbo", "release": "0.17.1", "patched": True},
        {},
    ),
    "longer than the draft model's window": (
        {"draft": config(max_position_embeddings=4096)},
        {"max-position": "warning"},
    ),
    "as long as the draft model's window": (
        {"draft": config(max_position_embeddings=4096), "serve": "--max-model-len 4096"},
        {},
    ),
    "no window, so Transformers' default": (
        {"draft": config(max_position_embeddings=None)},
        {"max-position": "warning"},
    ),
    "another type": (
        {"draft": config(torch_dtype="float16")},
        {"dtype": "warning"},
    ),
    "float16": (
        {"draft": config(torch_dtype="float16"), "serve": "--dtype half"},
        {"float16-scaling": "warning"},
    ),
    "an MLA draft model without a factor": (
        {
            "draft": changed(
                MLA,
                rope_scaling={"type": "yarn", "original_max_position_embeddings": 4096},
                max_position_embeddings=131072,
            )
        },
        {"rope": "error"},
    ),
    "two layouts that differ": (
        {
            "draft": config(rope_scaling=yarn(32), rope_parameters={**yarn(64), "rope_theta": 5e4}),
            "release": "0.28.0",
        },
        {"rope": "warning"},
    ),
    "another method's draft model in the speculators format": (
        {
            "target": DEEPSEEK_V3,
            "draft": changed(SPECULATORS_V3, speculators_model_type="dflash"),
            "release": "0.33.0",
        },
        {"draft-architecture": "error"},
    ),
    "one that drafts in parallel": (
        {
            "target": DEEPSEEK_V3,
            "draft": changed(SPECULATORS_V3, speculators_model_type="peagle"),
            "release": "0.33.0",
        },
        {"draft-architecture": "warning"},
    ),
    "an MLA draft model with a plain rotary embedding that is taken for YaRN": (
        {"draft": changed(MLA, rope_scaling=None), "release": "0.24.0"},
        {"rope": "error"},
    ),
    "the same in Transformers 5's layout": (
        {
            "draft": changed(
                MLA,
                rope_scaling=None,
                rope_parameters={"rope_type": "default", "rope_theta": 5e4},
            ),
            "release": "0.27.1",
        },
        {"rope": "error"},
    ),
    "the same where Transformers may be 4 or 5": (
        {"draft": changed(MLA, rope_scaling=None), "release": "0.20.0"},
        {"rope": "warning"},
    ),
    "the same where Transformers 4 loses its theta": (
        {"draft": changed(MLA, rope_scaling=None), "release": "0.18.0"},
        {"rope": "warning"},
    ),
    "the same with the theta that is used instead": (
        {"draft": changed(MLA, rope_scaling=None, rope_theta=10000), "release": "0.18.0"},
        {},
    ),
    "the same where the class builds what the config says": (
        {"draft": changed(MLA, rope_scaling=None), "release": "0.28.0"},
        {},
    ),
    "Transformers 5's layout where 5 is required, below a later one": (
        {
            "draft": changed(
                STATED, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
            ),
            "release": "0.33.0",
        },
        {},
    ),
    "Transformers 5's layout in an older release": (
        {"draft": config(rope_parameters={"rope_type": "default", "rope_theta": 1e6})},
        {"rope": "warning"},
    ),
    "a quantization in the language model's config": (
        {
            "target": changed(
                KIMI_K25,
                text_config={**KIMI_K2, "quantization_config": {"quant_method": "spinquant"}},
            )
        },
        {"quantization": "warning"},
    ),
    "an embedding in the speculators format": (
        {
            "target": DEEPSEEK_V3,
            "draft": SPECULATORS_V3,
            "weights": {**WEIGHTS, "t2d": (129280,), "embed_tokens.weight": (129280, 7168)},
        },
        {},
    ),
    "a rotated target": (
        {"target": changed(KIMI_K2, quantization_config={"quant_method": "quarot"})},
        {"quantization": "warning"},
    ),
    "pipeline stages": (
        {"serve": "-pp 2"},
        {"pipeline-parallel": "error"},
    ),
    "heads that do not divide": (
        {"draft": config(num_attention_heads=56, num_key_value_heads=8), "serve": "-tp 16"},
        {"draft-tensor-parallel": "error"},
    ),
    "KV heads that are copied": (
        {"draft": config(num_key_value_heads=8), "serve": "-tp 16"},
        {},
    ),
    "decode context parallel": (
        {"serve": "-tp 8 -dcp 8"},
        {"decode-context-parallel": "error"},
    ),
    "decode context parallel with an MLA draft model": (
        {"draft": changed(MLA, max_position_embeddings=131072), "serve": "-tp 8 -dcp 4"},
        {"decode-context-parallel": "warning"},
    ),
    "data parallel": (
        {"serve": "-dp 8 --enable-expert-parallel"},
        {"data-parallel": "warning"},
    ),
    "data parallel without experts": (
        {"target": changed(KIMI_K2, n_routed_experts=None), "serve": "-dp 8"},
        {},
    ),
    "an MLA backend": (
        {"serve": "--attention-backend FLASHMLA"},
        {"attention-backend": "error"},
    ),
    "an MLA backend by the environment": (
        {"serve": "--attention-config.backend FLASHINFER_MLA"},
        {"attention-backend": "error"},
    ),
    "an MLA backend that stays with the target": (
        {"serve": "--attention-backend FLASHMLA", "release": "0.21.0"},
        {},
    ),
    "an MLA backend and an MLA draft model": (
        {
            "draft": changed(MLA, max_position_embeddings=131072),
            "serve": "--attention-backend FLASHMLA",
        },
        {},
    ),
    "an MLA backend after apply": (
        {"serve": "--attention-backend FLASHMLA", "release": "0.17.1", "patched": True},
        {},
    ),
    "a backend of its own in a release without that key": (
        {
            "serve": """--speculative-config '{"method":"eagle3","num_speculative_tokens":3,"""
            """"attention_backend":"FLASH_ATTN"}'"""
        },
        {"attention-backend": "error"},
    ),
    "sliding windows beside MLA": (
        {"draft": config(use_sliding_window=True, sliding_window=4096)},
        {"kv-pages": "warning"},
    ),
    "a KV cache that is handed on": (
        {"serve": """--kv-transfer-config '{"kv_connector":"Nixl","kv_role":"kv_both"}'"""},
        {"kv-transfer": "warning"},
    ),
    "a KV cache that is handed on, an MLA draft model": (
        {
            "draft": changed(MLA, max_position_embeddings=131072),
            "serve": """--kv-transfer-config '{"kv_role":"kv_both"}'""",
        },
        {},
    ),
    "no aux hidden states, which the class does not read": (
        {
            "draft": changed(
                MLA, max_position_embeddings=131072, eagle_config={"use_aux_hidden_state": False}
            ),
        },
        {"use-aux-hidden-state": "error"},
    ),
    "no aux hidden states, which is read": (
        {"draft": config(eagle_config={"use_aux_hidden_state": False})},
        {},
    ),
    "a key that is not there": (
        {"draft": config(num_hidden_layers=None)},
        {"missing-key": "warning"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_change_gives_one_finding(case: str) -> None:
    changes, expected = CASES[case]
    wanted = {code: severity for code, severity in expected.items() if severity != "info"}
    assert grave(situation(**changes)) == wanted


def test_every_code_of_the_contract_has_a_rule() -> None:
    assert set(CONTRACT.split()) <= {code for rule in all_rules() for code in rule.codes}


def test_every_rule_has_both_outcomes() -> None:
    """A code of each rule appears in some case above, or in a test of its own below."""
    below = {"compile-cache", "kv-pages", "weights", "auto-map", "tensor-parallel"}
    shown = {code for _, expected in CASES.values() for code in expected}
    for rule in all_rules():
        assert set(rule.codes) & (shown | below), rule.codes


def test_every_rule_names_its_reports_and_what_it_does() -> None:
    for rule in all_rules():
        assert rule.summary, rule.codes
        doc = rule.judge.__doc__ or ""
        for number in rule.reports:
            assert str(number) in doc, (rule.codes, number)


def test_every_finding_can_be_acted_on() -> None:
    """An error or warning has a fix; every finding has a consequence, evidence and a source."""
    for changes, _ in CASES.values():
        for finding in findings(situation(**changes)):
            assert finding.message, finding.code
            assert finding.consequence, finding.code
            assert finding.evidence, finding.code
            assert finding.source, finding.code
            assert finding.fix or finding.severity == "info", finding.code


def codes(judgement: Situation) -> dict[str, str]:
    return {finding.code: finding.severity for finding in findings(judgement)}


def test_the_compile_cache_matters_where_the_key_lacks_the_ids() -> None:
    assert codes(situation(release="0.16.0"))["compile-cache"] == "info"
    assert "compile-cache" not in codes(situation(release="0.18.0"))
    draft = changed(LLAMA_DRAFT, **nested(2, 30, 58))
    assert codes(situation(draft=draft, release="0.18.0"))["compile-cache"] == "info"
    assert "compile-cache" not in codes(situation(draft=draft, release="0.17.1", patched=True))


@pytest.mark.parametrize(
    ("release", "serve", "expected"),
    [
        ("0.10.2", None, "error"),
        ("0.11.0", None, "error"),
        ("0.11.1", None, None),
        ("0.28.0", None, None),
    ],
)
def test_kv_pages_beside_mla(release: str, serve: str | None, expected: str | None) -> None:
    assert codes(situation(release=release, serve=serve)).get("kv-pages") == expected


def test_kv_pages_of_one_size_go_together_in_an_old_release() -> None:
    draft = changed(
        STATED,
        architectures=["LlamaForCausalLM"],
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        eagle_config={},
        **{IDS: None},
    )
    assert grave(situation(LLAMA_8B, draft, release="0.10.0")) == {"aux-layers-default": "warning"}
    wider = changed(draft, num_key_value_heads=32)
    assert grave(situation(LLAMA_8B, wider, release="0.10.0"))["kv-pages"] == "error"


def test_weights_that_were_not_seen_are_said() -> None:
    assert codes(situation())["weights"] == "info"
    assert "weights" not in codes(situation(weights=WEIGHTS))


def test_a_fp8_cache_in_an_old_release() -> None:
    old = situation(release="0.10.2", serve="--kv-cache-dtype fp8")
    assert codes(old)["dtype"] == "warning"
    assert "dtype" not in codes(situation(serve="--kv-cache-dtype fp8"))


def test_a_target_of_two_platforms_names_the_file_that_lacks_the_interface() -> None:
    healthy = situation(release="0.28.0")
    kind = healthy.engine.targets["DeepseekV3ForCausalLM"]
    split = replace(kind, lacking_files=("vllm/models/x/amd/model.py",))
    engine = replace(healthy.engine, targets={"DeepseekV3ForCausalLM": split})
    found = [f for f in judged(replace(healthy, engine=engine)) if f.code == "interface-missing"]
    assert [f.severity for f in found] == ["warning"]
    assert "amd" in found[0].message


def test_states_that_are_one_ranks_part() -> None:
    healthy = situation(release="0.28.0", serve="-tp 8")
    kind = replace(healthy.engine.targets["DeepseekV3ForCausalLM"], partial_sums=True)
    engine = replace(healthy.engine, targets={"DeepseekV3ForCausalLM": kind})
    assert grave(replace(healthy, engine=engine)) == {"tensor-parallel": "warning"}
    alone = replace(
        healthy, engine=engine, options=replace(healthy.options, tensor_parallel_size=1)
    )
    assert grave(alone) == {}


def test_states_that_are_split_over_ranks() -> None:
    serve = "-tp 8 -dp 2 --enable-expert-parallel"
    healthy = situation(release="0.28.0", serve=serve)
    kind = replace(healthy.engine.targets["DeepseekV3ForCausalLM"], gathers=False)
    engine = replace(healthy.engine, targets={"DeepseekV3ForCausalLM": kind})
    assert "expert-parallel" in grave(replace(healthy, engine=engine))
    assert "expert-parallel" not in grave(healthy)


def test_a_decode_server_needs_its_prefill_server_to_speculate() -> None:
    role = """--kv-transfer-config '{"kv_role":"kv_consumer"}'"""
    messages = [f.message for f in findings(situation(serve=role)) if f.code == "kv-transfer"]
    assert any("prefill server" in message for message in messages)


def fix_of(judgement: Situation, code: str) -> str:
    return next(finding.fix for finding in findings(judgement) if finding.code == code)


def test_apply_is_named_where_it_helps_and_as_it_helps() -> None:
    assert "apply" in fix_of(situation(release="0.17.1"), "interface-missing")
    # The engine cannot run it, whatever is patched.
    assert "apply" not in fix_of(situation(release="0.10.2"), "interface-missing")
    # vLLM has the interface: what goes along with the patch is --harden's.
    serve = "--attention-backend FLASHMLA"
    assert "apply --harden" in fix_of(situation(serve=serve), "attention-backend")
    older = fix_of(situation(serve=serve, release="0.17.1"), "attention-backend")
    assert "apply" in older
    assert "--harden" not in older
    # Not the family, or not shipped.
    other = situation(changed(LLAMA_8B, model_type="gemma3"), release="0.16.0")
    assert "apply" not in fix_of(other, "target-not-allowed")
    unknown = situation(KIMI_K25, release="0.14.1")
    assert "apply" not in fix_of(unknown, "target-not-allowed")


@pytest.mark.parametrize(
    ("target", "release", "first"),
    [
        (DEEPSEEK_V3, "0.17.1", "0.18.0"),
        (KIMI_K2, "0.17.1", "0.18.0"),
        (KIMI_K25, "0.17.1", "0.18.0"),
    ],
)
def test_every_gate_names_the_same_first_release(
    target: dict[str, object], release: str, first: str
) -> None:
    judgement = situation(target, release=release)
    fixes = [
        finding.fix
        for finding in findings(judgement)
        if finding.code in ("target-not-allowed", "interface-missing", "wrapper-missing")
    ]
    assert len(fixes) > 1
    assert all(f"or use vLLM {first} or later" in fix for fix in fixes), fixes


def test_a_target_that_the_list_never_held_is_sent_past_the_list() -> None:
    other = situation(changed(LLAMA_8B, model_type="olmo"), release="0.16.0")
    assert "vLLM 0.22.0 or later, which has no such list" in fix_of(other, "target-not-allowed")


def test_harden_is_named_where_it_reads_the_layer_ids_right() -> None:
    draft = SAID_OUTPUTS
    assert "apply --harden" in fix_of(situation(draft=draft), "aux-layers-convention")
    # No target of the family: nothing of ours changes it.
    other = situation(LLAMA_8B, draft)
    assert all("apply" not in finding.fix for finding in findings(other))
    already = replace(situation(draft=draft).engine, decides_layers=True)
    assert "aux-layers-convention" not in grave(replace(situation(draft=draft), engine=already))


def test_a_norm_that_the_speculators_format_does_not_carry_yet() -> None:
    """0.18.0: the class reads norm_before_fc, but the format's reader does not hand it on."""
    draft = changed(SPECULATORS_V3, norm_before_fc=True)
    kind = situation(DEEPSEEK_V3, draft).draft_class
    assert kind is not None
    assert "norm_before_fc" in kind.keys
    carries = "norm_before_fc" in (situation(DEEPSEEK_V3, draft).engine.speculators_keys or ())
    assert ("norm-flag" in grave(situation(DEEPSEEK_V3, draft))) is not carries
    assert grave(situation(DEEPSEEK_V3, draft, release="0.28.0")) == {}


def with_folder(judgement: Situation, folder: Path) -> Situation:
    draft = replace(judgement.given_draft, folder=folder, path=folder / "config.json")
    return replace(judgement, given_draft=draft)


def test_remote_code_beside_the_config(tmp_path: Path) -> None:
    mapping = {
        "AutoConfig": "configuration_x.Config",
        "AutoTokenizer": ["tokenization_x.Tokenizer", None],
        "AutoModel": "owner/repository--modeling_x.Model",
    }
    judgement = situation(draft=config(auto_map=mapping))
    assert codes(judgement)["auto-map"] == "info"  # Its folder is not known.
    judgement = with_folder(judgement, tmp_path)
    assert grave(judgement) == {"auto-map": "warning"}
    trusting = replace(judgement, options=replace(judgement.options, trust_remote_code=True))
    assert grave(trusting) == {"auto-map": "error"}
    (tmp_path / "configuration_x.py").touch()
    assert grave(trusting) == {"auto-map": "warning"}  # vLLM itself reads that file only.
    (tmp_path / "tokenization_x.py").touch()
    (tmp_path / "modeling_x.py").touch()
    assert grave(trusting) == {}


def test_a_command_line_that_does_not_speculate() -> None:
    silent = replace(situation(), options=parse_serve("vllm serve X -tp 8"))
    assert grave(silent) == {"method": "error"}
    other = situation(changed(LLAMA_8B), LLAMA_8B)
    ngram = replace(other, options=replace(other.options, method="ngram"))
    assert grave(ngram) == {"method": "warning"}


def test_a_rule_of_renaming_that_is_not_understood() -> None:
    judgement = situation()
    engine = replace(judgement.engine, renaming={"eagle3": "arch.title()"})
    assert grave(replace(judgement, engine=engine)) == {"draft-architecture": "warning"}


def test_pipeline_stages_that_relay_states() -> None:
    judgement = situation(release="0.33.0", serve="-pp 2")
    kind = replace(judgement.engine.targets["DeepseekV3ForCausalLM"], relays=True)
    engine = replace(judgement.engine, targets={"DeepseekV3ForCausalLM": kind})
    assert grave(replace(judgement, engine=engine)) == {}


@pytest.mark.parametrize(("own", "expected"), [(1, "info"), (4, "error"), (8, None)])
def test_the_draft_models_own_tensor_parallel_size(own: int, expected: str | None) -> None:
    serve = (
        "-tp 8 --speculative-config "
        f"""'{{"method":"eagle3","num_speculative_tokens":3,"draft_tensor_parallel_size":{own}}}'"""
    )
    assert codes(situation(serve=serve)).get("draft-tensor-parallel") == expected


def test_mla_that_is_switched_off_in_an_old_release() -> None:
    judgement = situation(release="0.10.2")
    off = replace(judgement, options=parse_serve("VLLM_MLA_DISABLE=1 vllm serve X"))
    assert codes(judgement)["kv-pages"] == "error"
    assert codes(off)["kv-pages"] == "warning"


def test_a_backend_that_the_draft_model_cannot_use() -> None:
    serve = (
        """--speculative-config '{"method":"eagle3","num_speculative_tokens":3,"""
        """"attention_backend":"FLASHMLA"}'"""
    )
    assert grave(situation(serve=serve, release="0.28.0")) == {"attention-backend": "error"}


def test_a_forward_that_collects_nothing() -> None:
    judgement = situation()
    kind = replace(judgement.engine.targets["DeepseekV3ForCausalLM"], language_model=False)
    engine = replace(judgement.engine, targets={"DeepseekV3ForCausalLM": kind})
    assert grave(replace(judgement, engine=engine)) == {"interface-missing": "error"}


def test_a_vocabulary_that_an_old_class_has_to_be_told() -> None:
    draft = config(draft_vocab_size=None, architectures=["LlamaForCausalLM"])
    assert codes(situation(draft=draft, release="0.10.0"))["vocab"] == "error"
    assert "vocab" not in codes(situation(draft=draft, release="0.11.1"))


def test_a_head_that_an_old_release_does_not_share_or_keep() -> None:
    sharing = {**SHARING, "d2t": (163840,)}
    kept = situation(draft=WHOLE, release="0.10.2", weights=sharing)
    assert codes(kept)["lm-head"] == "error"
    own = {**sharing, "lm_head.weight": (163840, 7168)}
    taken = situation(draft=WHOLE, release="0.11.0", weights=own)
    assert codes(taken)["lm-head"] == "warning"
    assert "lm-head" not in codes(situation(draft=WHOLE, weights=own))


def test_past_the_window_a_release_that_makes_the_table_longer_does_not_fail() -> None:
    short = changed(STATED, max_position_embeddings=4096)
    old = findings(situation(draft=short, release="0.26.0"))
    new = findings(situation(draft=short, release="0.27.0"))
    (before,) = (f for f in old if f.code == "max-position")
    (after,) = (f for f in new if f.code == "max-position")
    assert "device assertion" in before.consequence
    assert "nothing fails" in after.consequence
    assert after.severity == "warning"
