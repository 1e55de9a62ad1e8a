"""Parallelism: pipeline, tensor, data, expert and decode context, and dual batch overlap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_eagle3_patch.doctor.finding import ERROR, INFO, WARNING, Finding, report, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_eagle3_patch.doctor.situation import Situation


@rule("pipeline-parallel", reports=(25,))
def pipeline_parallel(situation: Situation) -> Iterator[Finding]:
    """States captured on an earlier pipeline stage do not reach the last one.

    Report 25. The V1 runner never relays them; the runner under v1/worker/gpu does for models that
    say so, and refuses the others.
    """
    stages = situation.options.pipeline_parallel
    if not situation.eagle3 or not situation.uses_aux or stages <= 1:
        return
    kind, newer = situation.target_class, situation.newer_runner is not None
    if newer and kind is not None and kind.relays:
        return
    yield Finding(
        "pipeline-parallel",
        ERROR,
        f"with {stages} pipeline stages only the last stage's layers can be captured: "
        f"{situation.runner_in_words} of {situation.release} does not hand aux hidden states on "
        "for this target",
        '"does not support eagle3 with pipeline parallelism", or fc gets too few states: "mat1 and '
        'mat2 shapes cannot be multiplied"',
        "--pipeline-parallel-size 1 (use --tensor-parallel-size instead)",
        "--pipeline-parallel-size",
        report(25, "https://github.com/vllm-project/vllm/pull/45985"),
    )


@rule("draft-tensor-parallel", reports=(26,))
def draft_tensor_parallel(situation: Situation) -> Iterator[Finding]:
    """The draft model runs at the target's tensor-parallel size, and its heads must divide.

    Report 26; ModelConfig.verify_with_parallel_config, and LlamaAttention for the KV heads.
    """
    ranks, own = situation.options.tensor_parallel, situation.options.draft_tensor_parallel_size
    source = report(26, "https://github.com/vllm-project/vllm/issues/31345")
    evidence = "draft_tensor_parallel_size of the speculative config"
    if own is not None and own not in (1, ranks):
        yield Finding(
            "draft-tensor-parallel",
            ERROR,
            f"draft_tensor_parallel_size {own} is neither 1 nor the target's {ranks}",
            "the server refuses it at once",
            "leave draft_tensor_parallel_size out",
            evidence,
            source,
        )
    elif own is not None and own != ranks:
        yield Finding(
            "draft-tensor-parallel",
            INFO,
            f"draft_tensor_parallel_size {own} has no effect: the draft model runs at {ranks}",
            "none",
            "",
            evidence,
            source,
        )
    if not situation.eagle3 or ranks == 1:
        return
    heads = situation.draft.integer("num_attention_heads")
    groups = situation.draft.integer("num_key_value_heads") or heads
    uneven = heads is not None and heads % ranks != 0
    if groups and not situation.draft_mla and not uneven:
        uneven = groups % ranks != 0 and ranks % groups != 0
    if uneven:
        yield Finding(
            "draft-tensor-parallel",
            ERROR,
            f"the draft model's {heads} attention heads ({groups} KV heads) cannot be shared by "
            f"{ranks} ranks",
            '"must be divisible by tensor parallel size"',
            "choose a --tensor-parallel-size that divides the draft model's heads",
            "num_attention_heads, num_key_value_heads of the draft model's config",
            source,
        )


@rule("data-parallel", "expert-parallel", reports=(27, 48))
def data_parallel(situation: Situation) -> Iterator[Finding]:
    """Data parallelism with a mixture of experts: hangs were reported; states may be split.

    Reports 27 and 48. From 0.25.0 on sequence-parallel states are gathered before the capture.
    """
    copies = situation.options.data_parallel
    if not situation.eagle3 or copies <= 1 or not situation.target.experts:
        return
    yield Finding(
        "data-parallel",
        WARNING,
        f"{copies} data-parallel engines with a mixture of experts: every rank has to step the "
        "draft model as often as the others",
        "hangs near max_model_len and in idle ranks were reported",
        "try it under load before you rely on it, or use --data-parallel-size 1",
        "--data-parallel-size",
        report(27, "https://github.com/vllm-project/vllm/issues/44185"),
    )
    kind = situation.target_class
    split = situation.options.enable_expert_parallel and situation.options.tensor_parallel > 1
    if split and kind is not None and not kind.gathers:
        yield Finding(
            "expert-parallel",
            WARNING,
            "with expert parallelism the states are split over ranks between layers, and the "
            "target's forward does not gather them before it captures",
            "each rank captures a part of the tokens: acceptance far below a run without it",
            "leave --enable-expert-parallel out",
            "--enable-expert-parallel",
            report(48, "https://github.com/sgl-project/sglang/pull/14280"),
        )


@rule("decode-context-parallel", reports=(21, 22))
def decode_context_parallel(situation: Situation) -> Iterator[Finding]:
    """Decode context parallelism is copied to the draft model.

    Reports 21 and 22: a grouped-query draft model needs more ranks than KV heads
    (ModelConfig.verify_with_parallel_config).
    """
    ranks, size = situation.options.tensor_parallel, situation.options.decode_context_parallel
    if not situation.eagle3 or size <= 1:
        return
    heads = situation.draft.integer("num_key_value_heads") or situation.draft.integer(
        "num_attention_heads"
    )
    few = not situation.draft_mla and heads is not None and ranks <= heads
    yield Finding(
        "decode-context-parallel",
        ERROR if few else WARNING,
        f"decode context parallelism of {size} reaches the draft model"
        + (
            f", whose {heads} KV heads are not fewer than {ranks} tensor-parallel ranks"
            if few
            else ""
        ),
        '"tensor parallel size ... must be greater than total num kv heads ..."'
        if few
        else "a server was seen to load and then die at warm-up",
        "leave --decode-context-parallel-size out",
        "--decode-context-parallel-size",
        report(21, "https://github.com/vllm-project/vllm-ascend/issues/8297")
        if few
        else report(22, "https://github.com/local-inference-lab/vllm/pull/23"),
    )


@rule("dual-batch-overlap", reports=())
def dual_batch_overlap(situation: Situation) -> Iterator[Finding]:
    """Dual batch overlap concatenates what the halves return, which fails on a list of states.

    vllm/v1/worker/gpu_ubatch_wrapper.py; no report, read in the source of every release.
    """
    if not situation.eagle3 or not situation.options.enable_dbo:
        return
    fails = situation.engine.dual_batch_overlap == "fails" and situation.newer_runner is None
    absent = situation.engine.dual_batch_overlap == "none"
    if not fails and not absent and situation.newer_runner is None:
        return
    yield Finding(
        "dual-batch-overlap",
        ERROR if fails or absent else WARNING,
        f"{situation.release} has no dual batch overlap"
        if absent
        else "dual batch overlap puts the halves of a batch together and does not know the list "
        "of aux hidden states"
        if fails
        else "the runner under v1/worker/gpu does not combine dual batch overlap with speculation",
        "the first step of two micro-batches fails in torch.cat" if fails else "refused or ignored",
        f"leave --enable-dbo out, or {situation.harden_command}"
        if fails and situation.family
        else "leave --enable-dbo out",
        "--enable-dbo",
        "vllm/v1/worker/gpu_ubatch_wrapper.py",
    )


@rule("tensor-parallel", reports=())
def tensor_parallel(situation: Situation) -> Iterator[Finding]:
    """A platform's own file captures one rank's part of each state.

    vllm/models/deepseek_v32/{nvidia,amd}/model.py: the sum over ranks is left to the next norm. No
    report; read in the source.
    """
    kind = situation.target_class
    if kind is None or not kind.partial_sums or situation.options.tensor_parallel <= 1:
        return
    if not situation.eagle3 or not situation.uses_aux:
        return
    yield Finding(
        "tensor-parallel",
        WARNING,
        "the target's own file for this platform captures states before they are summed over the "
        f"{situation.options.tensor_parallel} ranks",
        "the draft model is fed one rank's part: acceptance stays low",
        situation.harden_command,
        "forward of DeepseekV32Model",
        "vllm/models/deepseek_v32/nvidia/model.py",
    )
