"""Real vLLM, patched by our command line from outside, on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.proof import (
    COMPILED,
    JUDGED_FAMILY,
    JUDGED_NATIVE,
    PARITY,
    SETS,
    compilations,
    is_exact,
)

if TYPE_CHECKING:
    from runtime.proof import Proof


def test_off_means_off(proof: Proof) -> None:
    for mode in ("eager", "compiled"):
        report = proof.off[mode]
        assert report["same_tokens"], mode
        assert report["tensors"] == report["identical"] > 0, mode


def test_the_traced_graph_is_unchanged_without_ids(proof: Proof) -> None:
    if not proof.release.graph_key:
        return
    assert proof.off["compiled"]["graphs"]
    assert proof.off["compiled"]["new_graphs"] == []


def test_states_are_the_residual_stream(proof: Proof) -> None:
    assert set(proof.on["sets"]) == set(SETS)
    assert is_exact(proof.on)
    for report in proof.on["sets"].values():
        assert report["same_tokens"]
        assert report["same_logits"]


def test_every_kind_of_forward_was_seen(proof: Proof) -> None:
    assert min(proof.on["kinds"].values()) > 0, proof.on["kinds"]


def test_nothing_is_returned_when_ids_are_unset(proof: Proof) -> None:
    assert proof.on["plain_when_off"]


def test_states_are_those_of_transformers(proof: Proof) -> None:
    assert len(proof.on["parity"]) == 9
    assert max(proof.on["parity"].values()) < PARITY


def test_the_releases_own_draft_model_takes_the_states(proof: Proof) -> None:
    draft = proof.on["draft"]
    assert draft["drafter"] == "Eagle3LlamaForCausalLM"
    assert draft["difference"] < PARITY
    assert draft["states"] == [17, 3 * 256]
    assert draft["shape"] == [17, 256]
    assert draft["logits"] == [17, 512]
    assert draft["shares_embedding"]


def test_kimi_k25_goes_through_the_proposer(proof: Proof) -> None:
    if not proof.release.kimi_k25:
        assert proof.kimi_k25 is None
        return
    assert proof.kimi_k25 is not None
    assert proof.kimi_k25["architecture"] == "KimiK25ForConditionalGeneration"
    assert proof.kimi_k25["supports_eagle3"]
    assert proof.kimi_k25["image_token_index"] == 500
    assert proof.kimi_k25["shares_embedding"]
    assert proof.kimi_k25["tensors"] == proof.kimi_k25["identical"] == 3
    assert proof.kimi_k25["finite"]


def test_other_ids_never_get_a_cached_graph(proof: Proof) -> None:
    assert tuple(proof.compiled) == compilations(proof.release)
    assert len({report["hash"] for report in proof.compiled.values()}) == 3
    for name, report in proof.compiled.items():
        assert report["tensors"] == 3, name
        assert report["largest_difference"] < COMPILED, name


def test_draft_configs_are_read_as_documented(proof: Proof) -> None:
    ids = {draft: report["layer_ids"] for (draft, _), report in proof.compiled.items()}
    # The last is nested.
    assert ids == {"sparse": [1, 4, 6], "default": [2, 4, 5], "nested": [3, 5, 6]}


def test_check_and_verify_agree(proof: Proof) -> None:
    assert proof.checked["exit_code"] == 0
    assert proof.verification["exit_code"] == 0
    assert not proof.verification["verification"]["gpu_context"]
    passed = {m["architecture"] for m in proof.verification["verification"]["models"] if m["ok"]}
    assert "DeepseekV3ForCausalLM" in passed


def test_the_judge_proves_what_is_right_and_refutes_what_is_not(proof: Proof) -> None:
    if not proof.release.judged:
        assert proof.judged == {}
        return
    right = (*JUDGED_FAMILY, *JUDGED_NATIVE)
    verdicts = {name: one["verdict"] for name, one in proof.judged.items()}
    assert {name: verdicts[name] for name in right} == dict.fromkeys(right, "proven")
    broken = verdicts.keys() - set(right)
    assert len(broken) == 9 * proof.release.mutations
    assert {verdicts[name] for name in broken} <= {"refuted"}
    if broken:
        found = proof.judged["after-the-layer"]["first_difference"]
        assert found == "state 1 is the output of layer 1, not its input"


def test_mutations_are_noticed(proof: Proof) -> None:
    assert proof.survived == []


def test_speculation_is_as_simulated(proof: Proof) -> None:
    assert set(proof.speculation) == set(proof.release.speculation)
    for name, found in proof.speculation.items():
        assert found["patched"] == (name == "replaced")
        assert found["rows"]
        assert found["baseline_texts_as_transformers"] == "48/48"
        for row in found["rows"]:
            assert row["gap"] == 0, row
            assert row["equal_texts"] == "48/48", row


def test_revert_brings_every_file_back(proof: Proof) -> None:
    assert proof.left_changed == []
