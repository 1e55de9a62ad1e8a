"""Why acceptance is bad: the causes that the public reports name, in order of likelihood.

Each says what to check next. Findings of the static part of ``doctor`` move theirs to the front.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm_eagle3_patch.doctor.metrics.verdict import Judgement

_STATIC = "vllm-eagle3-patch doctor TARGET DRAFT"


class Finding(Protocol):
    """A finding of the static part; its ``severity`` is looked at if it has one."""

    @property
    def code(self) -> str: ...


class Diagnosis(Protocol):
    """What the static part found."""

    @property
    def findings(self) -> Sequence[Finding]: ...


@dataclass(frozen=True)
class Cause:
    """A likely cause.

    Attributes:
        message: What it is and what it does, a sentence.
        check: What to look at next, a sentence.
        commands: What to paste for that; TARGET and DRAFT stand for the two models.
        source: Report numbers, or what else it is known from.
        findings: The finding codes of the static part that show it; ``*`` stands for any end.
        found: Those of them that the static part did find.
    """

    code: str
    message: str
    check: str
    commands: tuple[str, ...] = ()
    source: str = ""
    findings: tuple[str, ...] = ()
    found: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "code": self.code,
            "message": self.message,
            "check": self.check,
            "commands": list(self.commands),
            "source": self.source,
            "found": list(self.found),
        }


_ALL = (
    Cause(
        "layers",
        "the draft model gets the hidden states of other layers than it was trained on",
        "compare the layers that its config asks for with those that this vLLM uses; off by one "
        "may cost 3 % or three quarters of position 0",
        (_STATIC,),
        "reports 29 to 35",
        ("aux-*",),
    ),
    Cause(
        "norms",
        "a norm of the draft model (norm_before_fc, fc_norm, norm_output) is not applied by this "
        "vLLM",
        "see which flags its config sets and which the installed draft model file reads",
        (_STATIC,),
        "reports 32, 42",
        ("norm-flag",),
    ),
    Cause(
        "method",
        "the method given is not eagle3, so the draft model's fc layer is skipped without an error",
        "give the method by name",
        (
            "vllm serve TARGET --speculative-config "
            '\'{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 3}\'',
        ),
        "report 41",
        ("method", "use-aux-hidden-state"),
    ),
    Cause(
        "lm-head",
        "the draft model's lm_head is random, or the target's took its place",
        "see whether its checkpoint holds lm_head.weight with draft_vocab_size rows",
        (_STATIC, 'grep "Detected EAGLE model" SERVER_LOG'),
        "reports 38, 39, 40",
        ("lm-head", "vocab"),
    ),
    Cause(
        "embed-tokens",
        "the checkpoint holds an embedding that was never trained, and this vLLM keeps it",
        "look for a distinct embed_tokens in the server's log, on every rank",
        (_STATIC, 'grep "Detected EAGLE model" SERVER_LOG'),
        "reports 37, 40",
        ("embed-tokens",),
    ),
    Cause(
        "weights",
        "the draft model is of another architecture or width than what was loaded",
        "see whether the architecture, the hidden size and the checkpoint agree",
        (_STATIC,),
        "reports 8, 12, 44",
        ("draft-architecture", "draft-model-type", "hidden-size"),
    ),
    Cause(
        "unrolled-steps",
        "the draft model was trained with fewer unrolled steps than the tokens asked of it",
        "ask for no more tokens than it was trained for, and compare the mean acceptance length",
        (
            "vllm serve TARGET --speculative-config "
            '\'{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": {position}}\'',
        ),
        "GPU runs: trained with 3 steps it accepts 1.0, .994, .99, .097, .02 at k = 5",
    ),
    Cause(
        "training",
        "the draft model is trained too little, or on other text than this",
        "compare with the figures on its card, on the same task and k",
        (),
        "report 50; GPU runs",
    ),
    Cause(
        "workload",
        "the prompts are harder for it, or the chat template is not the one it was trained with",
        "take an interval over a task with published figures (GSM8K, MT-Bench), with thinking as "
        "in its training",
        ("{interval}",),
        "report 50",
    ),
    Cause(
        "context",
        "prompts are longer than the draft model was trained for, or than its position table",
        "compare max_position_embeddings and the length it was trained at with your prompts",
        (_STATIC,),
        "report 46: 2.30 at 2k tokens, 1.09 at 16k",
        ("max-position",),
    ),
    Cause(
        "rope",
        "the draft model's rotary embedding has other parameters than in its training",
        "compare rope_theta and rope_scaling with the config it was trained with",
        (_STATIC,),
        "report 45",
        ("rope",),
    ),
    Cause(
        "parallel",
        "with data, expert or decode context parallelism, or prefill elsewhere, states or keys of "
        "the draft model are lost",
        "compare with a run with tensor parallelism only",
        ("vllm serve TARGET --tensor-parallel-size N --speculative-config ...",),
        "reports 24, 40, 48",
        ("pipeline-parallel", "data-parallel", "decode-context-parallel", "kv-transfer"),
    ),
    Cause(
        "quantization",
        "the target's quantization turns or scales its hidden states, or float16 does",
        "compare with the target as published, in bfloat16, if it fits",
        (_STATIC,),
        "report 47",
        ("quantization", "float16-scaling", "dtype"),
    ),
    Cause(
        "compile-cache",
        "a graph compiled for other layers is used again",
        "start once without the cache",
        ("VLLM_DISABLE_COMPILE_CACHE=1 vllm serve TARGET --speculative-config ...",),
        "report 58",
        ("compile-cache",),
    ),
    Cause(
        "while-counting",
        "several processes counted while the page was written",
        "take the scrape again while the server is idle",
        ("{interval}",),
        "vllm/v1/metrics/prometheus.py: several API servers share files of counters",
    ),
    Cause(
        "leftover-counters",
        "PROMETHEUS_MULTIPROC_DIR was set and not wiped between two runs",
        "unset it, or wipe it before each start",
        ("unset PROMETHEUS_MULTIPROC_DIR",),
        "vllm/v1/metrics/prometheus.py says so when it starts",
    ),
    Cause(
        "not-vllm",
        "a proxy, an exporter or a calculation wrote these figures",
        "give what the server itself writes at /metrics",
    ),
    Cause(
        "no-requests",
        "no request has come so far that it was speculated on",
        "send some requests of the usual kind, then look again",
        ("{interval}",),
    ),
    Cause(
        "few-requests",
        "too few requests were answered in this time",
        "let it serve the usual requests for longer, then look again",
        ("{interval}",),
    ),
    Cause(
        "not-speculating",
        "the server was started without a speculative config",
        "start it with one; vLLM creates the counters only then (vllm/v1/spec_decode/metrics.py)",
        (
            "vllm serve TARGET --speculative-config "
            '\'{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 3}\'',
        ),
    ),
    Cause(
        "v0-engine",
        "the V0 engine serves: it counts no drafts, and adds its totals up anew each time",
        "start the V1 engine",
        ("VLLM_USE_V1=1 vllm serve TARGET --speculative-config ...",),
        "vllm/engine/metrics.py, 0.9.0 to 0.9.2",
    ),
    Cause(
        "no-positions",
        "the page was filtered",
        "give the whole page, with accepted_tokens_per_pos",
        ("{interval}",),
    ),
)
_BY_CODE = {cause.code: cause for cause in _ALL}

_ORDER = {
    "nothing-accepted": ("method", "lm-head", "embed-tokens", "layers", "weights", "quantization"),
    "first-position": (
        "layers",
        "norms",
        "lm-head",
        "embed-tokens",
        "method",
        "rope",
        "weights",
        "quantization",
        "compile-cache",
    ),
    "decay": ("unrolled-steps", "training", "context", "rope", "layers", "parallel"),
    "length": (
        "layers",
        "workload",
        "norms",
        "context",
        "parallel",
        "rope",
        "training",
        "quantization",
    ),
    "impossible": ("while-counting", "leftover-counters", "not-vllm"),
    "no-drafts": ("no-requests",),
    "few-drafts": ("few-requests",),
    "not-speculating": ("not-speculating",),
    "v0-engine": ("v0-engine",),
    "diffusion": (),
    "no-positions": ("no-positions",),
}
"""The causes for each reason of a verdict, the likeliest first."""

_ABOUT_ACCEPTANCE = ("nothing-accepted", "first-position", "decay", "length")
"""The reasons that findings of the static part can explain."""


def causes_of(
    judgement: Judgement, diagnosis: Diagnosis | None = None, *, interval: str = ""
) -> tuple[Cause, ...]:
    """The causes of a verdict, likeliest first; none of a healthy one.

    Args:
        judgement: The verdict.
        diagnosis: What the static part found. Causes that it shows come first, in their order;
            what it merely informs of moves nothing.
        interval: The commands that take the figures of an interval.
    """
    if judgement.verdict == "healthy":
        return ()
    listed = [_BY_CODE[code] for code in _ORDER[judgement.reason]]
    shown: list[Cause] = []
    if diagnosis is not None and judgement.reason in _ABOUT_ACCEPTANCE:
        codes = tuple(_telling(diagnosis.findings))
        others = [cause for cause in _ALL if cause not in listed]
        for cause in (*listed, *others):
            found = tuple(code for code in codes if _matches(code, cause.findings))
            if found:
                shown.append(replace(cause, found=found))
    known = {cause.code for cause in shown}
    rest = [cause for cause in listed if cause.code not in known]
    return tuple(_filled(cause, judgement, interval) for cause in (*shown, *rest))


def _telling(findings: Iterable[Finding]) -> Iterable[str]:
    for finding in findings:
        if getattr(finding, "severity", None) != "info":
            yield finding.code


def _matches(code: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(code, pattern) for pattern in patterns)


def _filled(cause: Cause, judgement: Judgement, interval: str) -> Cause:
    position = str(judgement.position or 1)
    commands = tuple(
        command.replace("{position}", position).replace("{interval}", interval)
        for command in cause.commands
    )
    return replace(cause, commands=commands)
