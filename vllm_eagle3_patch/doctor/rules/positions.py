"""Positions: the draft model's context window and its rotary embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_eagle3_patch.doctor.finding import ERROR, INFO, WARNING, Finding, report, rule
from vllm_eagle3_patch.doctor.situation import derived_length

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm_eagle3_patch.doctor.situation import Situation

_LLAMA_DEFAULT = 2048
"""Positions that LlamaConfig has where a config names none (Transformers)."""


@rule("max-position", reports=(46,))
def max_position(situation: Situation) -> Iterator[Finding]:
    """Sequences are served that are longer than the draft model's context window.

    Report 46: the draft model's table of rotary embeddings has ``max_position_embeddings`` rows.
    """
    if not situation.eagle3:
        return
    served = situation.served_length
    own = derived_length(situation.draft.text)
    default = own is None and situation.draft.model_type == "llama"
    window = _LLAMA_DEFAULT if default else own
    if served is None or window is None or window >= served:
        return
    given = "--max-model-len" if situation.options.max_model_len else "the target's own length"
    yield Finding(
        "max-position",
        WARNING,
        f"the draft model knows {window} positions"
        + (" (Transformers' default for llama)" if default else "")
        + f", but sequences of {served} tokens will be served ({given})",
        "past that: a device assertion (index out of bounds) in compiled graphs, wrong drafts in "
        "eager mode; length fell from 2.30 at 2k to 1.09 at 16k for one draft model",
        f"--max-model-len {window}, or a draft model with a longer window",
        "max_position_embeddings of the draft model's config",
        report(46, "https://github.com/vllm-project/vllm/issues/48894"),
    )


@rule("rope", reports=(15, 45))
def rope(situation: Situation) -> Iterator[Finding]:
    """The draft model's rotary embedding cannot be read as it stands, or is not the target's.

    Reports 15 and 45. An MLA draft model is built with DeepSeek's YaRN, which wants a ``factor``,
    wherever the type is not ``default`` (deepseek_v2.py).
    """
    if not situation.eagle3:
        return
    draft = situation.draft
    old, new = draft.value("rope_scaling"), draft.value("rope_parameters")
    own = new or old
    source = report(15, "https://github.com/vllm-project/vllm/pull/51092")
    evidence = "rope_scaling (rope_parameters) of the draft model's config"
    kind = _kind(own)
    if situation.draft_mla and kind not in ("default", None) and "factor" not in (own or {}):
        yield Finding(
            "rope",
            ERROR,
            f"the draft model is MLA, and its rotary embedding of type {kind} has no factor",
            "\"KeyError: 'factor'\"",
            "write the target's \"rope_scaling\" into the draft model's config if it was trained "
            "with it",
            evidence,
            source,
        )
    elif situation.draft_mla and own is None:
        five = "<5" not in situation.engine.transformers
        yield Finding(
            "rope",
            WARNING if five else INFO,
            "the draft model is MLA and has no rope_scaling: a plain rotary embedding",
            "with Transformers 5 some releases take it for DeepSeek's YaRN and stop: \"KeyError: "
            "'factor'\""
            if five
            else "none in this release",
            'write "rope_parameters": {"rope_type": "default", "rope_theta": ...} into the draft '
            "model's config"
            if five
            else "",
            evidence,
            source,
        )
    if isinstance(own, dict) and "rope_type" in own and "type" in own:
        if own["rope_type"] != own["type"]:
            yield Finding(
                "rope",
                ERROR,
                f"the draft model's rotary embedding has rope_type {own['rope_type']} and type "
                f"{own['type']}",
                '"Found conflicts between rope_type and type"',
                "keep the one that it was trained with",
                evidence,
                "vllm/transformers_utils/config.py, patch_rope_parameters_dict",
            )
    elif isinstance(own, dict) and own and kind is None:
        yield Finding(
            "rope",
            WARNING,
            "the draft model's rotary embedding names no type",
            "\"rope_parameters should have a 'rope_type' key\", or it is taken for a plain one",
            'write "rope_type" into it',
            evidence,
            "vllm/transformers_utils/config.py, patch_rope_parameters_dict",
        )
    if old and new and old != new:
        yield Finding(
            "rope",
            WARNING,
            "the draft model's config has rope_scaling and rope_parameters, and they differ",
            "which one is used depends on the version of Transformers",
            "keep the one that it was trained with",
            evidence,
            report(45, "https://github.com/vllm-project/speculators/pull/574"),
        )
    if new and not old and "<5" in situation.engine.transformers:
        yield Finding(
            "rope",
            WARNING,
            "the draft model's config has rope_parameters, the layout of Transformers 5, but "
            f"{situation.release} requires {situation.engine.transformers}",
            "the type or theta may fall back to a default: acceptance 2.39 instead of 2.50 by "
            "theta alone",
            'write "rope_theta" and "rope_scaling" at the top level of the draft model\'s config',
            evidence,
            report(45, "https://github.com/wejoncy/sfllm/pull/32"),
        )
    theirs, mine = _said(situation.target.text), _said(draft.text)
    if theirs != mine and theirs and mine:
        yield Finding(
            "rope",
            INFO,
            f"rotary embeddings differ: the target has {theirs}, the draft model {mine}",
            "none if the draft model was trained so: public Kimi draft models have theta 1e6 and "
            "no scaling",
            "",
            "rope_theta, rope_scaling of both configs",
            report(45, "https://github.com/vllm-project/speculators/pull/574"),
        )


def _kind(parameters: Any) -> str | None:
    if not isinstance(parameters, dict):
        return None
    kind = parameters.get("rope_type", parameters.get("type"))
    return kind if isinstance(kind, str) else None


def _said(config: Mapping[str, Any]) -> str:
    """A rotary embedding in a few words."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta")
    if theta is None and isinstance(parameters, dict):
        theta = parameters.get("rope_theta")
    words = [f"theta {theta}"] if theta is not None else []
    kind = _kind(parameters)
    if kind not in (None, "default"):
        words.append(f"{kind} {parameters.get('factor', '')}".strip())
    elif words:
        words.append("no scaling")
    return ", ".join(words)
