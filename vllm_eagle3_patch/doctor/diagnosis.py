"""A diagnosis: what every rule found, the verdict, and what ``apply`` would mend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm_eagle3_patch import __version__
from vllm_eagle3_patch.doctor.finding import ERROR, WARNING, Finding, judged
from vllm_eagle3_patch.doctor.serve_options import DEFAULT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_eagle3_patch.doctor.situation import Situation
    from vllm_eagle3_patch.vllm_source.engine import Engine

SCHEMA = 1
OK, RISKY, BROKEN = "ok", "risky", "broken"
EXIT_CODES = {OK: 0, RISKY: 1, BROKEN: 4}
IN_WORDS = {
    OK: "no rule fired and every needed key was found",
    RISKY: "it starts, and may accept badly",
    BROKEN: "it does not start, or speculates to no effect",
}


@dataclass(frozen=True)
class WithPatch:
    """What ``apply`` would change.

    Attributes:
        mended: The codes of the findings that would be gone or less grave.
        left: The codes of the errors and warnings that would be left.
    """

    verdict: str
    mended: tuple[str, ...]
    left: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """In words."""
        if self.verdict == OK:
            return "with the patch: ready"
        said = "it starts" if self.verdict == RISKY else "still broken"
        return f"with the patch: {said}; left: {', '.join(self.left)}"


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor says.

    Attributes:
        release: The release of the vLLM, None if it is none of the matrix.
        where: Where that vLLM is, or that it is the matrix's.
        patched: What the same vLLM does after ``apply``; None if that is not known, or it makes no
            difference.
        known: Whether the matrix knows this vLLM by its content, and so what ``apply`` makes of it.
        corrected_draft: The folder of the corrected copy of the draft model that was written: what
            is to be served, and not judged.
    """

    situation: Situation
    release: str | None
    where: str
    patched: Engine | None = None
    known: bool = True
    corrected_draft: str | None = None

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Every rule's findings, the gravest first."""
        return judged(self.situation)

    @property
    def verdict(self) -> str:
        """``ok``, ``risky`` or ``broken``."""
        return _verdict(self.findings)

    @property
    def exit_code(self) -> int:
        """As the contract's table says."""
        return EXIT_CODES[self.verdict]

    @cached_property
    def with_patch(self) -> WithPatch | None:
        """What ``apply`` would change; None where it would change nothing."""
        if self.patched is None:
            return None
        after = judged(replace(self.situation, engine=self.patched))
        grave = [f.code for f in self.findings if f.severity in (ERROR, WARNING)]
        left = [f.code for f in after if f.severity in (ERROR, WARNING)]
        mended = [code for code in grave if grave.count(code) > left.count(code)]
        if not mended and _verdict(after) == self.verdict:
            return None
        return WithPatch(_verdict(after), tuple(dict.fromkeys(mended)), tuple(dict.fromkeys(left)))

    @property
    def speculative_config(self) -> dict[str, Any]:
        """What to give ``--speculative-config``."""
        config = self.situation.speculative_config
        return config if self.corrected_draft is None else {**config, "model": self.corrected_draft}

    @property
    def assumed(self) -> dict[str, str]:
        """By option, what was assumed because nothing was given."""
        return dict(_assumed(self.situation))

    def document(self) -> dict[str, Any]:
        """The JSON document of the contract."""
        target, draft = self.situation.target, self.situation.draft
        return {
            "schema": SCHEMA,
            "tool": __version__,
            "command": "doctor",
            "exit_code": self.exit_code,
            "verdict": self.verdict,
            "release": self.release,
            "where": self.where,
            "target": {
                "architecture": target.architecture,
                "model_type": target.model_type,
                "text_model_type": target.text_type,
                "num_layers": self.situation.num_layers,
                "hidden_size": target.integer("hidden_size"),
            },
            "draft": {"architecture": draft.architecture, "model_type": draft.model_type},
            "layers": {
                **self.situation.layers.document,
                "in_words": self.situation.layers.sentence,
            },
            "findings": [
                {
                    "code": finding.code,
                    "severity": finding.severity,
                    "message": finding.message,
                    "consequence": finding.consequence,
                    "fix": finding.fix,
                    "evidence": finding.evidence,
                    "source": finding.source,
                }
                for finding in self.findings
            ],
            "assumed": self.assumed,
            "with_patch": None
            if self.with_patch is None
            else {
                "verdict": self.with_patch.verdict,
                "mended": list(self.with_patch.mended),
                "left": list(self.with_patch.left),
                "in_words": self.with_patch.sentence,
            },
            "speculative_config": self.speculative_config,
        }


def _verdict(findings: tuple[Finding, ...]) -> str:
    severities = {finding.severity for finding in findings}
    if ERROR in severities:
        return BROKEN
    return RISKY if WARNING in severities else OK


def _assumed(situation: Situation) -> Iterator[tuple[str, str]]:
    options = situation.options
    for name in ("tensor", "pipeline", "data", "decode-context"):
        if getattr(options, f"{name.replace('-', '_')}_parallel_size") is None:
            yield f"--{name}-parallel-size", "1"
    if options.max_model_len is None:
        length = situation.served_length
        yield "--max-model-len", "not known" if length is None else f"{length}, the target's own"
    if options.dtype in (None, "auto"):
        yield "--dtype", f"auto: {situation.dtype or 'not known'}, the target's own"
    if options.kv_cache_dtype is None:
        yield "--kv-cache-dtype", "auto"
    if options.attention_backend is None:
        yield "--attention-backend", "none, so vLLM chooses"
    if options.num_speculative_tokens is None:
        yield "--num-speculative-tokens", f"{DEFAULT_TOKENS}, as in the public figures"
    if options.method is None:
        why = "concluded from its name" if options.speculates else "as written below"
        yield "--method", f"{situation.method}, {why}"
