"""Which layers feed the draft model: ignored, guessed, counted otherwise, out of range, in order.

The most valuable rules: with wrong layers a server starts, answers and accepts little, and says
nothing about it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_eagle3_patch.doctor.finding import ERROR, INFO, WARNING, Finding, report, rule
from vllm_eagle3_patch.doctor.layers import (
    convention_in_config,
    in_words,
    layer_ids,
    listed,
    places,
)
from vllm_eagle3_patch.ground.family import TEXT_TYPES
from vllm_eagle3_patch.ground.layer_ids import (
    BOUNDARY,
    CONVENTION,
    LAYER_IDS,
    OUTPUT,
    eagle3_boundaries,
)
from vllm_eagle3_patch.vllm_source.engine import LOST, NESTED, TOP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_eagle3_patch.doctor.layers import Layers
    from vllm_eagle3_patch.doctor.situation import Situation

_EVIDENCE = f"{LAYER_IDS} of the draft model's config"
_OFF_BY_ONE = (
    "off by one: about 3 % less acceptance length was measured on Kimi-K2.5, and position-0 "
    "acceptance of about 10 % instead of 45 % on MiniMax-M2.5 (reports 29 and 30)"
)


def _concerned(situation: Situation) -> bool:
    return situation.eagle3 and situation.uses_aux


@rule("aux-layers-ignored", reports=(7, 33, 34))
def aux_layers_ignored(situation: Situation) -> Iterator[Finding]:
    """Layer ids stand where the runner that will run does not look.

    Reports 7, 33 and 34: none are read up to 0.11.0, the top level from 0.11.1, nested ones by the
    V1 runner from 0.22.0; the runner under v1/worker/gpu reads ``eagle_config.layer_ids`` from
    0.27.0 and never ``eagle_config.eagle_aux_hidden_state_layer_ids``.
    """
    layers = situation.layers
    if not _concerned(situation) or layers.configured is None or layers.read == layers.place:
        return
    reads = " and ".join(
        {TOP: "the top level", NESTED: NESTED}.get(key, f"layer_ids under {NESTED}")
        for key in situation.keys
    )
    where = "at the top level" if layers.where == TOP else f"under {NESTED}"
    said = f"reads only {reads}" if reads else "reads no layer ids at all"
    if layers.place == LOST:
        said = "does not get the ids of a config in the speculators format"
    used = sorted(layers.used or ())
    severity, luck, fix = WARNING, "", _move_up(situation)
    then = (
        "the draft model is fed other layers than it was trained on: 0.00 and 1.21 % "
        "acceptance were measured so (reports 31 and 33)"
    )
    if used == sorted(layers.wanted):
        severity, luck, fix = INFO, ": the same tensors, by luck", ""
        then = "none as long as the default is the same; another release may read the ids"
    elif layers.doubtful and used == sorted(eagle3_boundaries([*layers.configured], OUTPUT)):
        severity, luck = INFO, ": the same tensors if the ids are outputs of layers, as they look"
        then, fix = f"none if they are; else {_OFF_BY_ONE}", _state(situation)
    yield Finding(
        "aux-layers-ignored",
        severity,
        f"the draft model's config has {listed(layers.configured)} {where}, but "
        f"{situation.runner_in_words} of {situation.release} {said}, so it uses its default "
        f"{listed(layers.used or ())}{luck}",
        then,
        fix,
        _EVIDENCE,
        report(34, "https://github.com/vllm-project/vllm/pull/42764"),
    )


def _move_up(situation: Situation) -> str:
    if situation.layers.place == LOST:
        return "use vLLM 0.11.1 or later, which passes them on"
    line = _boundaries(situation.layers)
    if TOP in situation.keys:
        return (
            f"write {line} at the top level of the draft model's config (--write-draft-config)"
            f"{_or_harden(situation)}"
        )
    return f"{situation.apply_command}, or vLLM 0.11.1 or later with {line} at the top level"


def _boundaries(layers: Layers) -> str:
    """What to write into the draft model's config."""
    line = f'"{LAYER_IDS}": {[*layers.wanted]}'
    return line if layers.said_by is None else f'{line} and "{CONVENTION}": "boundary"'


def _state(situation: Situation) -> str:
    """How to say that ids are outputs of layers."""
    return (
        f"if its model card says so: {situation.doctor_command} --convention output "
        "--write-draft-config DRAFT"
    )


def _or_harden(situation: Situation) -> str:
    """That the patch aux-layer-ids does it too, where it does and ``apply`` brings it."""
    if not situation.mendable or situation.config_decides_layers:
        return ""
    reading = replace(situation.engine, decides_layers=True)
    after = replace(situation, engine=reading).layers
    mends = after.read == after.place and after.used == after.wanted
    return f", or {situation.harden_command} (the patch aux-layer-ids)" if mends else ""


@rule("aux-layers-default", reports=(31,))
def aux_layers_default(situation: Situation) -> Iterator[Finding]:
    """The draft model's config names no layers, so vLLM guesses.

    Report 31. The speculators format has the same default by definition (table a).
    """
    layers = situation.layers
    if not _concerned(situation) or layers.configured is not None or _unusable(situation):
        return
    by_definition = situation.draft.speculators is not None
    yield Finding(
        "aux-layers-default",
        INFO if by_definition else WARNING,
        f"the draft model's config has no {LAYER_IDS}; {situation.release} uses its default"
        + (f" {listed(layers.used)}, {in_words(layers.outputs_of or ())}" if layers.used else "")
        + (", which the speculators format means too" if by_definition else ""),
        "none if the draft model was trained on these; a guess that was wrong gave 1.21 % "
        "acceptance, mean length 1.036",
        ""
        if by_definition
        else f'write "{LAYER_IDS}" as its model card gives them (boundaries: an output plus one) '
        "at the top level of the draft model's config",
        _EVIDENCE,
        report(31, "https://github.com/vllm-project/vllm/pull/50170"),
    )


def _unusable(situation: Situation) -> bool:
    return bool(places(situation.draft))


@rule("aux-layers-convention", reports=(29, 30, 36))
def aux_layers_convention(situation: Situation) -> Iterator[Finding]:
    """The ids count outputs of layers and vLLM takes them for boundaries, or they look so.

    Reports 29, 30 and 36, and table a.
    """
    layers = situation.layers
    if not _concerned(situation) or layers.configured is None or layers.used is None:
        return
    said = convention_in_config(situation.draft)
    if said not in (None, BOUNDARY, OUTPUT) and situation.target.text_type in TEXT_TYPES:
        yield Finding(
            "aux-layers-convention",
            ERROR if situation.config_decides_layers else WARNING,
            f'{CONVENTION} is {said!r}: it must be "boundary" or "output"',
            "with the patch aux-layer-ids the server refuses to start",
            f'write "{CONVENTION}": "boundary" or "output"',
            CONVENTION,
            "the patch aux-layer-ids of this tool",
        )
    source = report(29, "https://github.com/sgl-project/sglang/pull/25454")
    if layers.read is not None and layers.used != layers.wanted:
        yield Finding(
            "aux-layers-convention",
            WARNING,
            f"the draft model's ids {listed(layers.configured)} count {_counted(layers.convention)}"
            f" (by {layers.said_by or 'vLLM'}), but {situation.release} uses {listed(layers.used)},"
            f" {in_words(layers.outputs_of or ())}",
            _OFF_BY_ONE,
            f"write {_boundaries(layers)} at the top level of the draft model's config "
            f"(--write-draft-config){_or_harden(situation)}",
            _EVIDENCE,
            source,
        )
    elif layers.doubtful and layers.read is not None:
        yield Finding(
            "aux-layers-convention",
            INFO,
            f"the ids {listed(layers.configured)} look like outputs of layers, but no {CONVENTION} "
            f"says so, and they are used as boundaries: {in_words(layers.outputs_of or ())}",
            f"if they are outputs, {_OFF_BY_ONE}",
            _state(situation),
            _EVIDENCE,
            source,
        )


def _counted(convention: str) -> str:
    return "outputs of layers" if convention == OUTPUT else "boundaries"


@rule("aux-layers-range", reports=(14, 32, 35))
def aux_layers_range(situation: Situation) -> Iterator[Finding]:
    """An id is outside the target's layers, or at an edge that its class does not capture.

    Reports 14, 32 and 35: DeepSeek's class captures before each layer, so id 0 has no residual yet
    and id ``num_layers`` comes after the last; vLLM's own keeps the latter from 0.25.0 on.
    """
    if not _concerned(situation):
        return
    source = report(35, "https://github.com/vllm-project/vllm/pull/46788")
    for place, value in places(situation.draft).items():
        if layer_ids(value) is not None:
            continue
        read = place in situation.keys and isinstance(value, list)
        yield Finding(
            "aux-layers-range",
            ERROR if read else WARNING,
            f"the layer ids of the draft model's config are {str(value)[:60]}: they must be a list "
            "of integers",
            "no layer is captured, and the first forward fails"
            if read
            else "they are passed over and the default is used",
            f'write "{LAYER_IDS}": [...] with whole numbers at the top level',
            _EVIDENCE,
            source,
        )
    layers, kind, count = situation.layers, situation.target_class, situation.num_layers
    if layers.used is None or count is None or not layers.used:
        return
    outside = [k for k in layers.used if k < 0 or k > count]
    edges = []
    if kind is not None:
        edges += [0] if 0 in layers.used and not kind.first_id else []
        edges += [count] if count in layers.used and not kind.last_id else []
    if not outside and not edges:
        return
    bad = sorted(set(outside + edges))
    certain = bool(outside) or situation.family is not None
    yield Finding(
        "aux-layers-range",
        ERROR if certain else WARNING,
        f"of the ids {listed(layers.used)} that {situation.release} will use, {listed(bad)} cannot "
        f"be captured: the target has {count} layers, and its class captures "
        f"{0 if kind is None or kind.first_id else 1} to "
        f"{count if kind is None or kind.last_id else count - 1}",
        "id 0 raises a TypeError; any other is passed over in silence, and fc then gets too few "
        'states: "mat1 and mat2 shapes cannot be multiplied"',
        f"{situation.harden_command}, or use the draft model that was trained for this target"
        if not outside
        else "use the draft model that was trained for this target",
        _EVIDENCE,
        source,
    )


@rule("aux-layers-order", reports=(14,))
def aux_layers_order(situation: Situation) -> Iterator[Finding]:
    """Ids are not ascending, or one is there twice: states come in the order of the layers.

    Report 14: the class goes through its layers and appends.
    """
    used = situation.layers.used
    if not _concerned(situation) or not used:
        return
    source = report(14, "https://github.com/vllm-project/vllm/pull/48259")
    if len(set(used)) < len(used):
        yield Finding(
            "aux-layers-order",
            ERROR,
            f"an id is there twice in {listed(used)}, and each layer is captured once",
            'fc gets too few states: "mat1 and mat2 shapes cannot be multiplied"',
            "name distinct layers"
            if situation.layers.configured
            else f'write "{LAYER_IDS}" with distinct layers into the draft model\'s config',
            _EVIDENCE,
            source,
        )
    elif list(used) != sorted(used):
        yield Finding(
            "aux-layers-order",
            WARNING,
            f"the ids {listed(used)} are not ascending; states are captured in the order of the "
            f"layers, {listed(sorted(used))}",
            "if the draft model was trained in the order of the list, fc gets its states swapped "
            "and accepts next to nothing",
            f'write "{LAYER_IDS}": {sorted(used)} if it was trained in the order of the layers; '
            "otherwise the columns of fc.weight have to be put in that order",
            _EVIDENCE,
            source,
        )


@rule("use-aux-hidden-state", reports=(43,))
def use_aux_hidden_state(situation: Situation) -> Iterator[Finding]:
    """The draft model wants no aux hidden states, and this vLLM does not read that.

    Report 43: ``eagle_config.use_aux_hidden_state`` is read by the V1 runner from 0.12.0 on, by the
    runner under v1/worker/gpu later, and by the Llama class only.
    """
    if (
        not situation.eagle3
        or situation.draft.eagle_config.get("use_aux_hidden_state") is not False
    ):
        return
    kind = situation.draft_class
    in_class = kind is not None and "use_aux_hidden_state" in kind.nested_keys
    if situation.reads_use_aux and in_class:
        return
    who = situation.runner_in_words if not situation.reads_use_aux else "the draft model's class"
    yield Finding(
        "use-aux-hidden-state",
        ERROR,
        f"eagle_config.use_aux_hidden_state is false, but {who} of {situation.release} does not "
        "read it",
        "an fc that was never trained stands between the models: nothing is accepted, or the "
        "shapes do not agree",
        "use vLLM 0.12.0 or later with the V1 runner (VLLM_USE_V2_MODEL_RUNNER=0)",
        "eagle_config.use_aux_hidden_state of the draft model's config",
        report(43, "https://github.com/vllm-project/vllm/issues/40551"),
    )


@rule("compile-cache", reports=(58,))
def compile_cache(situation: Situation) -> Iterator[Finding]:
    """The compile-cache key does not hold the layer ids that will be used.

    Report 58 and SpeculativeConfig.compute_hash: no ids up to 0.16.0, those of the top level since.
    """
    layers = situation.layers
    if not _concerned(situation) or situation.config_decides_layers or layers.used is None:
        return
    if situation.engine.hashed_ids == "top" and layers.read == TOP:
        return
    yield Finding(
        "compile-cache",
        INFO,
        f"the compile-cache key of {situation.release} does not hold the layer ids that are used",
        "if this server ran before with other ids and the same cache folder, the old graph gives "
        "the old layers, without an error",
        "after a change of layer ids start once with VLLM_DISABLE_COMPILE_CACHE=1, or delete the "
        "folder torch_compile_cache in VLLM_CACHE_ROOT",
        "SpeculativeConfig.compute_hash",
        report(58, "https://github.com/vllm-project/vllm/issues/53366"),
    )
