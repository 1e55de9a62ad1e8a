"""The limits in words: the codes of the contract, each with what it means to an operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

MESSAGES = {
    "pipeline-parallel": (
        "with --pipeline-parallel-size above 1 only the last stage's layers can be captured; "
        "ids of earlier layers are refused at start-up"
    ),
    "dual-batch-overlap": (
        "with --enable-dbo the micro-batch wrapper concatenates the model's outputs and fails on "
        "the list of aux hidden states: the patch dual-batch-overlap mends that, and up to 0.12.0 "
        "--enable-dbo fails all the same, as the draft model's layers and the target's share "
        "attention metadata"
    ),
    "forced-mla-backend": (
        "an MLA attention backend that you set for the target reaches the draft model too, and a "
        "grouped-query one does not start with it: set none; the patch draft-attention-backend "
        "mends that, for the V2 model runner too, which hands it on in every release"
    ),
    "blackwell": (
        "on Blackwell (SM 10.x) vLLM itself sets an MLA attention backend, beside which a "
        "grouped-query draft model does not start: the patch draft-attention-backend mends that, "
        "but where vLLM sets CUTLASS_MLA (up to 0.14.1) set FLASHINFER_MLA too"
    ),
    "nested-layer-ids": (
        "layer ids under eagle_config in the draft model's config are not read, and the default "
        "layers are used: the patch aux-layer-ids mends that, or put "
        "eagle_aux_hidden_state_layer_ids at the config's top level"
    ),
    "float16": (
        "with --dtype float16 the residual stream is scaled down against overflow, and so are the "
        "captured states; a draft model trained on bfloat16 states accepts badly"
    ),
    "platform": (
        "with --tensor-parallel-size above 1 the model's own file for this platform captures one "
        "rank's part of each state only: the patch aux-layer-bounds (--harden) mends that"
    ),
}

_REMAINING = {
    "dual-batch-overlap": (
        {"dual-batch-overlap"},
        "do not use --enable-dbo: the patch in place puts aux hidden states together, but when it "
        "splits a batch this vLLM gives all layers of a KV cache group the attention metadata of "
        "the last of them, whatever their own backends; that is so up to 0.12.0",
    ),
    "blackwell": (
        {"draft-attention-backend", "draft-attention-metadata"},
        "on Blackwell (SM 10.x) vLLM itself sets CUTLASS_MLA, whose KV cache has blocks of 128 "
        "tokens, where the draft model's FlashInfer takes 64 at most (from 0.11.1 on the server "
        'stops: "No common block size"), patched or not: set FLASHINFER_MLA for the target, by '
        "VLLM_ATTENTION_BACKEND up to 0.12.0, by --attention-backend from 0.13.0 on",
    ),
}
"""What still fails once any of these patches is in place."""


def message(code: str, in_place: Collection[str]) -> str:
    """A limit in words.

    Args:
        code: Its code.
        in_place: The patches of ours that are there: none is said to mend what it did not.
    """
    patches, remaining = _REMAINING.get(code, ((), ""))
    return MESSAGES[code] if not set(patches) & set(in_place) else remaining
