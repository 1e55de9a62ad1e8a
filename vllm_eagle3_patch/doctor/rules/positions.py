"""Positions: the draft model's context window and its rotary embedding."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from vllm_eagle3_patch.doctor.finding import ERROR, INFO, WARNING, Finding, report, rule
from vllm_eagle3_patch.doctor.situation import derived_length

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm_eagle3_patch.doctor.situation import Situation

FOUR, FIVE, EITHER = "4", "5", "either"
_THETA = 10000
"""What get_rope takes where no ``rope_theta`` reaches it."""
_LLAMA_DEFAULT = 2048
"""Positions that LlamaConfig has where a config names none (Transformers)."""


@rule("max-position", reports=(46,))
def max_position(situation: Situation) -> Iterator[Finding]:
    """Sequences are served that are longer than the draft model's context window.

    Report 46: the draft model's table of rotary embeddings has ``max_position_embeddings`` rows,
    and from 0.27.0 on more if the server needs them.
    """
    if not situation.eagle3:
        return
    served = situation.served_length
    own = derived_length(situation.draft.text)
    default = own is None and situation.draft.model_type == "llama"
    window = _LLAMA_DEFAULT if default else own
    if served is None or window is None or window >= served:
        return
    scaled = _kind(draft_rope(situation)) not in ("default", None)
    raised = situation.engine.raises_positions and not scaled
    given = "--max-model-len" if situation.options.max_model_len else "the target's own length"
    yield Finding(
        "max-position",
        WARNING,
        f"the draft model knows {window} positions"
        + (" (Transformers' default for llama)" if default else "")
        + f", but sequences of {served} tokens will be served ({given})",
        (
            f"{situation.release} makes its table of rotary embeddings longer, so nothing fails, "
            "but it was not trained past that"
            if raised
            else "past that: a device assertion (index out of bounds) in compiled graphs, wrong "
            "drafts in eager mode"
        )
        + "; length fell from 2.30 at 2k to 1.09 at 16k for one draft model",
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
    yield from _plain_in_mla(situation)
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
    if new and not old and _transformers(situation) == FOUR:
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


def draft_rope(situation: Situation) -> Any:
    """What the draft model's config says of its rotary embedding, in either layout."""
    return situation.draft.value("rope_parameters") or situation.draft.value("rope_scaling")


def _transformers(situation: Situation) -> str:
    """The major version of Transformers that the release requires: 4, 5, or either.

    From 5 on ``rope_scaling`` is another name of ``rope_parameters``, which is always there.
    """
    required = situation.engine.transformers
    below = re.search(r"<=?(\d+)((?:\.\d+)*)", required)
    if below is not None and (int(below[1]), below[2].strip(".0")) <= (5, ""):
        return FOUR
    least = re.search(r">=(\d+)", required)
    return FIVE if least is not None and int(least[1]) >= 5 else EITHER  # noqa: PLR2004


def _plain_in_mla(situation: Situation) -> Iterator[Finding]:
    """A plain rotary embedding in an MLA draft model (report 15).

    Up to 0.27.1 deepseek_eagle3.py takes any ``rope_scaling`` for YaRN, which in Transformers 5 is
    always there; without one, in Transformers 4, it loses ``rope_theta``.
    """
    draft, kind, own = situation.draft, situation.draft_class, draft_rope(situation)
    plain = own is None or (_kind(own) in ("default", None) and "factor" not in own)
    if not situation.draft_mla or not plain:
        return
    version = _transformers(situation)
    theta = draft.value("rope_theta")
    if theta is None and isinstance(own, dict):
        theta = own.get("rope_theta")
    severity, consequence = INFO, "none in this release"
    if kind is not None and kind.forces_yarn:
        if version == FIVE or draft.value("rope_scaling"):
            severity = ERROR
            consequence = "it is taken for DeepSeek's YaRN: \"KeyError: 'factor'\""
        elif version == EITHER:
            severity = WARNING
            consequence = (
                "with Transformers 5 it is taken for DeepSeek's YaRN: \"KeyError: 'factor'\"; with "
                f"4 rope_theta is lost and {_THETA} used"
            )
        elif theta not in (None, _THETA):
            severity = WARNING
            consequence = f"rope_theta {theta} is lost and {_THETA} used: acceptance stays low"
    yield Finding(
        "rope",
        severity,
        "the draft model is MLA and has a plain rotary embedding",
        consequence,
        "" if severity == INFO else "use vLLM 0.28.0 or later, which builds it as the config says",
        "rope_scaling (rope_parameters) of the draft model's config",
        report(15, "https://github.com/vllm-project/vllm/pull/51092"),
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
