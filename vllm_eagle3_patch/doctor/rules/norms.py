"""Whether the draft model's norms reach the class that vLLM builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_eagle3_patch.doctor.finding import ERROR, WARNING, Finding, report, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_eagle3_patch.doctor.situation import Situation

_FLAGS = {
    "norm_before_residual": "0.10.1",
    "norm_before_fc": "0.18.0 with a Llama draft model",
    "fc_norm": "0.22.0",
    "norm_output": "0.22.0",
}
"""Flags of a draft model's config, and the first release whose classes read each."""
_TENSORS = {"norm_before_fc": "input_norm.", "fc_norm": "fc_norm."}
"""The weights that come with a flag; ``norm_output`` and ``norm_before_residual`` have none."""


@rule("norm-flag", reports=(32, 42))
def norm_flag(situation: Situation) -> Iterator[Finding]:
    """A norm that the draft model was trained with is not in the class that vLLM builds.

    Reports 32 and 42: the flags are read in llama_eagle3.py and deepseek_eagle3.py, each from
    another release on.
    """
    kind = situation.draft_class
    if not situation.eagle3 or kind is None:
        return
    draft, weights = situation.draft, situation.draft.weights
    for flag, since in _FLAGS.items():
        top, nested = draft.config.get(flag), draft.eagle_config.get(flag)
        if situation.draft.speculators is not None and flag not in draft.config:
            top = situation.draft.speculators.get(flag)
        tensors = weights.having(_TENSORS[flag]) if weights and flag in _TENSORS else ()
        carried = flag in draft.config  # Of the speculators format only some keys are.
        read = (bool(top) and carried and flag in kind.keys) or (
            bool(nested) and flag in kind.nested_keys
        )
        if bool(nested) is False and nested is not None and flag in kind.nested_keys:
            read = False  # The nested value goes before the top level's.
        if (top or nested) and not read:
            where = "under eagle_config, where" if nested and not top else "to true, which"
            yield Finding(
                "norm-flag",
                ERROR if tensors else WARNING,
                f"the draft model's config sets {flag} {where} {kind.path} of {situation.release} "
                "does not read",
                f"its weights {tensors[0]} and others have no place: the load fails"
                if tensors
                else "the server starts without that norm, and acceptance stays low (or the load "
                "fails on the norm's weights)",
                f'write "{flag}": true at the top level of the draft model\'s config'
                if nested and flag in kind.keys
                else f"use vLLM {since} or later, or a draft model without it",
                f"{flag} of the draft model's config",
                report(42, "https://github.com/vllm-project/vllm/pull/46488"),
            )
        elif tensors and not (top or nested):
            skipped = flag == "norm_before_fc" and kind.skips_unused_norm
            yield Finding(
                "norm-flag",
                WARNING if skipped else ERROR,
                f"the draft model has weights {tensors[0]}, but its config does not set {flag}",
                "they are left out, and acceptance stays low"
                if skipped
                else "they have no place in the class: the load fails",
                f'write "{flag}": true at the top level of the draft model\'s config',
                f"{tensors[0]} in the draft model's safetensors header",
                report(42, "https://github.com/vllm-project/vllm/pull/38111"),
            )
