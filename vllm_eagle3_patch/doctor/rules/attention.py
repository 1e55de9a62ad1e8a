"""Attention beside MLA: the backend, the pages of the KV cache, and handing that cache on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_eagle3_patch.doctor.finding import ERROR, INFO, WARNING, Finding, report, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_eagle3_patch.doctor.checkpoint import Checkpoint
    from vllm_eagle3_patch.doctor.situation import Situation

_NOPE = 128
"""``qk_nope_head_dim`` of DeepSeek-V3 and Kimi, for which vLLM sets FLASHINFER_MLA itself."""


def _hands_on(situation: Situation) -> bool:
    """Whether a backend that is set for the target reaches the draft model."""
    if situation.engine.own_backend:
        return False
    if situation.options.draft_attention_backend and situation.engine.backend_option:
        return False
    if situation.newer_runner is not None:
        return situation.newer_runner.inherits_backend
    return situation.engine.inherits_backend


@rule("attention-backend", reports=(19, 20))
def attention_backend(situation: Situation) -> Iterator[Finding]:
    """An MLA backend that is set for the target reaches a draft model without MLA.

    Reports 19 and 20. The V1 runner hands it on up to 0.20.2, the runner under v1/worker/gpu in
    every release; layers that cannot use it fail from 0.11.1 on.
    """
    engine, options = situation.engine, situation.options
    if not situation.eagle3:
        return
    source = report(19, "https://github.com/vllm-project/vllm/pull/39126")
    own = options.draft_attention_backend
    if own and not engine.backend_option:
        yield Finding(
            "attention-backend",
            ERROR,
            f"{situation.release} has no attention_backend in its speculative config",
            "the server refuses the unknown key at once",
            "leave it out, or use vLLM 0.21.0 or later",
            "attention_backend of the speculative config",
            source,
        )
    if situation.draft_mla:
        return
    if own and "MLA" in own.upper() and engine.backend_option:
        yield Finding(
            "attention-backend",
            ERROR,
            f"{own} is an MLA backend, and the draft model has no MLA",
            '"Selected backend ... is not valid for this configuration"',
            "leave attention_backend of the speculative config out",
            "attention_backend of the speculative config",
            source,
        )
    given = options.attention_backend or ""
    if "MLA" in given.upper() and _hands_on(situation) and engine.refuses_backend:
        instead = (
            '"attention_backend": "FLASH_ATTN" in the speculative config, or '
            if engine.backend_option
            else ""
        )
        yield Finding(
            "attention-backend",
            ERROR,
            f"the attention backend {given} is handed on to the draft model, which has no MLA",
            "\"Selected backend ... is not valid for this configuration. Reason: ['head_size not "
            "supported', 'non-MLA not supported']\"",
            f"set no attention backend, or {instead}{situation.harden_command}",
            "--attention-backend",
            source,
        )
    elif (
        not given
        and engine.forced_backends
        and engine.refuses_backend
        and _hands_on(situation)
        and situation.target.integer("qk_nope_head_dim") == _NOPE
    ):
        yield Finding(
            "attention-backend",
            INFO,
            f"on Blackwell (SM 10.x) {situation.release} sets {', '.join(engine.forced_backends)} "
            "by itself, which reaches the draft model",
            "there, and only there, the draft model does not start",
            situation.apply_command,
            "check_and_update_config of vllm/platforms/cuda.py",
            source,
        )


@rule("kv-pages", reports=(23,))
def kv_pages(situation: Situation) -> Iterator[Finding]:
    """The KV caches of target and draft model do not go together in this engine.

    Report 23. Up to 0.10.2 the KV cache manager knows one page size; 0.11.0 builds the draft
    model's attention metadata with the target's builder; later releases hold both.
    """
    engine = situation.engine
    if not situation.eagle3:
        return
    mla = situation.target.mla and not situation.options.mla_disabled
    mixed = mla and not situation.draft_mla
    source = report(23, "https://github.com/vllm-project/vllm/pull/55622")
    evidence = "kv_lora_rank of the target's config, num_key_value_heads of the draft model's"
    sizes = _bytes_in_words(situation)
    if engine.one_page_size and (mixed or _unequal(situation, mla=mla)):
        yield Finding(
            "kv-pages",
            ERROR,
            f"the KV cache manager of {situation.release} knows one page size only, and {sizes}",
            "NotImplementedError when the KV cache is set up",
            "use vLLM 0.11.1 or later",
            evidence,
            source,
        )
    elif engine.one_page_size and situation.target.mla and situation.options.mla_disabled:
        yield Finding(
            "kv-pages",
            WARNING,
            f"the KV cache manager of {situation.release} knows one page size only; without MLA "
            "the target's heads must be as many and as wide as the draft model's KV heads",
            "NotImplementedError when the KV cache is set up, if they are not",
            "use vLLM 0.11.1 or later",
            evidence,
            source,
        )
    elif engine.targets_metadata and mixed:
        yield Finding(
            "kv-pages",
            ERROR,
            f"{situation.release} takes the MLA target's attention metadata and KV cache for the "
            "draft model's",
            "the draft model does not start",
            f"{situation.apply_command}, or use vLLM 0.11.1 or later",
            "propose of vllm/v1/spec_decode/eagle.py",
            source,
        )
    elif mixed and _slides(situation.draft):
        yield Finding(
            "kv-pages",
            WARNING,
            f"the draft model has sliding-window attention beside an MLA target: {sizes}",
            '"page size is not divisible by the maximum page size and cannot be padded"',
            "use a draft model with full attention",
            "layer_types, use_sliding_window of the draft model's config",
            source,
        )


def _slides(draft: Checkpoint) -> bool:
    kinds = draft.value("layer_types")
    listed = isinstance(kinds, list) and "sliding_attention" in kinds
    return listed or (
        bool(draft.value("use_sliding_window")) and draft.integer("sliding_window") is not None
    )


def _kv_width(model: Checkpoint, ranks: int) -> int | None:
    """Values that one token takes in the cache of one layer on one rank, without MLA."""
    heads = model.integer("num_attention_heads")
    groups = model.integer("num_key_value_heads") or heads
    width = model.integer("head_dim")
    hidden = model.integer("hidden_size")
    if width is None and hidden is not None and heads:
        width = hidden // heads
    if groups is None or width is None:
        return None
    return 2 * max(1, groups // ranks) * width


def _mla_width(model: Checkpoint) -> int | None:
    rank, rope = model.integer("kv_lora_rank"), model.integer("qk_rope_head_dim")
    return None if rank is None or rope is None else rank + rope


def _unequal(situation: Situation, *, mla: bool) -> bool:
    """Whether two models without MLA have pages of different sizes."""
    if mla or situation.draft_mla or situation.options.mla_disabled:
        return False
    ranks = situation.options.tensor_parallel
    theirs, mine = _kv_width(situation.target, ranks), _kv_width(situation.draft, ranks)
    return theirs is not None and mine is not None and theirs != mine


def _bytes_in_words(situation: Situation) -> str:
    ranks = situation.options.tensor_parallel
    theirs = _mla_width(situation.target) or _kv_width(situation.target, ranks)
    mine = _mla_width(situation.draft) if situation.draft_mla else _kv_width(situation.draft, ranks)
    return f"a token takes {theirs} values in a layer of the target and {mine} in the draft model"


@rule("kv-transfer", reports=(24, 48))
def kv_transfer(situation: Situation) -> Iterator[Finding]:
    """The KV cache is handed to another server, and the two models' caches differ.

    Reports 24 and 48.
    """
    role = situation.options.kv_transfer_role
    if not situation.eagle3 or role is None:
        return
    mixed = situation.target.mla and not situation.draft_mla
    if mixed:
        yield Finding(
            "kv-transfer",
            WARNING,
            "the KV cache is transferred, and the draft model's regions are not as large as the "
            "MLA target's",
            '"assert tensor_size_bytes == curr_tensor_size_bytes" with NIXL, or a cache in the '
            "wrong layout: length 2.1 instead of 2.8",
            "use an MLA draft model, or speculate without --kv-transfer-config",
            "--kv-transfer-config",
            report(24, "https://github.com/vllm-project/vllm/pull/48529"),
        )
    if role == "kv_consumer":
        yield Finding(
            "kv-transfer",
            WARNING,
            "this server decodes only; the draft model's cache of the prompt is filled by a "
            "prefill, so the prefill server needs the same --speculative-config",
            "without it the draft model does not know the prompt",
            "give the prefill server the same --speculative-config",
            "kv_role of --kv-transfer-config",
            report(24, "https://github.com/RBLN-SW/vllm-rbln/pull/1006"),
        )
