"""Whether the widths of the two models, and the number of states between them, agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_eagle3_patch.doctor.finding import ERROR, INFO, Finding, report, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_eagle3_patch.doctor.situation import Situation

_UNPACKED = ("F16", "BF16", "F32", "F8_E4M3", "F8_E5M2")
"""Types of tensors whose shape is the weight's own."""


@rule("hidden-size", reports=(12,))
def hidden_size(situation: Situation) -> Iterator[Finding]:
    """The draft model's width, or the width of the states that it takes, is not the target's.

    Report 12. ``fc`` takes ``target_hidden_size`` (else ``hidden_size``) for each state; a draft
    model of another width than the target needs an embedding of its own, kept from 0.11.1 on.
    """
    target, draft = situation.target.integer("hidden_size"), situation.draft.integer("hidden_size")
    width = situation.states_width
    if not situation.eagle3 or target is None or draft is None or width is None:
        return
    source = report(12, "https://github.com/vllm-project/vllm/issues/18906")
    if width != target:
        key = "target_hidden_size" if width != draft else "hidden_size"
        yield Finding(
            "hidden-size",
            ERROR,
            f"the draft model takes states of width {width} ({key}), but the target's hidden size "
            f"is {target}",
            '"mat1 and mat2 shapes cannot be multiplied"',
            "use the draft model that was trained for this target"
            if draft == width
            else f'write "target_hidden_size": {target} into the draft model\'s config if its fc '
            "was trained so",
            f"{key} of the draft model's config",
            source,
        )
    if draft == target:
        return
    weights = situation.draft.weights
    embedded = weights is None or weights.name("embed_tokens.weight") is not None
    if not situation.engine.own_embeddings or not embedded:
        why = (
            f"{situation.release} shares the target's embedding with the draft model"
            if embedded
            else "its checkpoint has no embed_tokens of its own"
        )
        yield Finding(
            "hidden-size",
            ERROR,
            f"the draft model is {draft} wide and the target {target}, so it needs an embedding of "
            f"its own, but {why}",
            "\"KeyError: 'embed_tokens.weight'\", or an assertion on the last dimension",
            "use vLLM 0.11.1 or later and a draft model that ships embed_tokens",
            "hidden_size of both configs",
            source,
        )
    elif width == target:
        yield Finding(
            "hidden-size",
            INFO,
            f"the draft model is {draft} wide and the target {target}; it has to ship its own "
            "embed_tokens",
            "none if it does",
            "",
            "hidden_size of both configs",
            source,
        )


@rule("aux-count", reports=(13, 14))
def aux_count(situation: Situation) -> Iterator[Finding]:
    """The number of aux hidden states captured is not the number that ``fc`` takes.

    Reports 13 and 14. Up to 0.21.0 the classes build ``fc`` for three states; from 0.22.0 on for
    ``num_aux_hidden_states``, else the ids under ``eagle_config``, else three.
    """
    if not situation.eagle3 or not situation.uses_aux or situation.draft_class is None:
        return
    built, width = situation.states_built, situation.states_width
    weights = situation.draft.weights
    name = weights.name("fc.weight") if weights else None
    inputs = None
    if weights is not None and name is not None and weights.dtypes.get(name) in _UNPACKED:
        shape = weights.shapes[name]
        inputs = shape[1] if len(shape) == 2 else None  # noqa: PLR2004
    source = report(13, "https://github.com/vllm-project/vllm/pull/54598")
    counts = situation.draft_class.counts_states
    if inputs is not None and width and inputs != built * width:
        trained = f"{inputs // width} states" if inputs % width == 0 else f"width {inputs}"
        yield Finding(
            "aux-count",
            ERROR,
            f"fc.weight was trained for {trained}, but {situation.release} builds fc for {built} "
            f"states of width {width}",
            "the weights do not load: an assertion on their shape",
            f'write "num_aux_hidden_states": {inputs // width} into the draft model\'s config'
            if counts and inputs % width == 0
            else "use vLLM 0.22.0 or later, which reads num_aux_hidden_states",
            f"{name} in the draft model's safetensors header",
            source,
        )
        return
    used = situation.layers.used
    if used is None or len(set(used)) == built or len(set(used)) != len(used):
        return
    yield Finding(
        "aux-count",
        ERROR,
        f"{len(used)} aux hidden states will be captured (ids {', '.join(map(str, used))}), but "
        f"{situation.release} builds fc for {built}",
        '"mat1 and mat2 shapes cannot be multiplied" in the first forward, or the weights do not '
        "load",
        f'write "num_aux_hidden_states": {len(used)} into the draft model\'s config'
        if counts
        else "use vLLM 0.22.0 or later, which reads num_aux_hidden_states, or a draft model with "
        "three layer ids",
        "eagle_aux_hidden_state_layer_ids of the draft model's config",
        source,
    )
