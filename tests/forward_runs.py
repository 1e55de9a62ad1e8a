"""A patched forward run beside the original: what it returns, and which states it keeps.

The state of id ``k`` is what the last norm is given in the original model cut to ``k`` layers.
That needs no knowledge of the forward: whatever a fork does there, its states are its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from semantics import (
    FIRST_STAGE,
    LAST_STAGE,
    MIDDLE_STAGE,
    NUM_LAYERS,
    TOKEN_IDS,
    WHOLE,
    Array,
    Embedding,
    IntermediateTensors,
    Matrix,
    RMSNorm,
    Server,
    Stage,
    Subject,
    Tokens,
    add,
    both_kinds,
    embedding,
    reference,
)

# What the look-alikes of the tests do not import.
GIVEN = ("get_pp_group", "IntermediateTensors", "fused_allreduce_rms_norm")


class RecordingNorm(RMSNorm):
    """The last norm, and the streams that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Matrix] = []

    def forward(self, hidden_states: Array, residual: Array | None = None) -> Any:
        if residual is None:
            self.given.append(hidden_states.tolist())
            return hidden_states, hidden_states
        self.given.append(add(hidden_states.rows, residual.rows))
        return super().forward(hidden_states, residual)


class Ran(NamedTuple):
    """What came of one step: the values, or the kind of error, and what the norm was given."""

    returned: Any
    given: list[Matrix]
    failed: bool = False


def difference(
    before: bytes,
    after: bytes,
    model_class: str = "DeepseekV2Model",
    outer_class: str = "DeepseekV2ForCausalLM",
    extra_sources: tuple[bytes, ...] = (),
) -> str | None:
    """The first difference between a patched model and the original; None if there is none.

    An original whose classes cannot even be defined has nothing to compare with.
    """
    try:
        original = Subject(before, model_class, outer_class, extra_sources)
    except Exception:
        return None
    patched = Subject(after, model_class, outer_class, extra_sources)
    return next(_differences(original, patched), None)


def _differences(original: Subject, patched: Subject) -> Iterator[str]:
    for stage in (*both_kinds(WHOLE), FIRST_STAGE, MIDDLE_STAGE, LAST_STAGE):
        expected, found = ran(original, stage), ran(patched, stage)
        if found.returned != expected.returned:
            yield f"no ids ({stage}): {found.returned} instead of {expected.returned}"
        if not expected.failed and stage.is_last_rank:
            yield from _wrong_states(original, patched, stage, expected.returned)


def _wrong_states(original: Subject, patched: Subject, stage: Stage, output: Any) -> Iterator[str]:
    cuts = {
        k: ran(original, replace(stage, end_layer=k, num_layers=k)).given
        for k in range(stage.start_layer, NUM_LAYERS + 1)
    }
    states = {k: given[0] for k, given in cuts.items() if len(given) == 1}
    several = (tuple(sorted(states, reverse=True)), tuple(sorted(states)[1::2]))
    for ids in (*((k,) for k in states), *several):
        found = ran(patched, stage, ids)
        if found.returned != (output, tuple(states[k] for k in sorted(ids))):
            yield f"ids {ids} ({stage}): {found.returned}"


def ran(subject: Subject, stage: Stage, ids: tuple[int, ...] = ()) -> Ran:
    """One step of a model that is set up by hand, as vLLM's own subclasses are."""
    subject.stage = stage
    model, norm = _model(subject, stage)
    outer = subject.outer_class.__new__(subject.outer_class)
    outer.model = model
    server = Server(subject, stage, model, outer)
    entering = reference(stage.num_layers, [embedding(t) for t in TOKEN_IDS])[stage.start_layer]
    intermediate = None
    if entering.residual is not None:
        tensors = {"hidden_states": entering.hidden_states, "residual": entering.residual}
        intermediate = IntermediateTensors({k: Array(v) for k, v in tensors.items()})
    try:
        if ids:
            server.set_layers(ids)
        tokens = Tokens(TOKEN_IDS), Tokens(range(len(TOKEN_IDS)))
        return Ran(values(server.entry(*tokens, intermediate)), norm.given)
    except Exception as error:
        return Ran(type(error).__name__, [], failed=True)


def _model(subject: Subject, stage: Stage) -> tuple[Any, RecordingNorm]:
    namespace = subject.files[0].namespace
    for name in GIVEN:
        namespace.setdefault(name, subject.files[0].stand_ins[name])
    model = subject.model_class.__new__(subject.model_class)
    norm, embed = RecordingNorm(), Embedding()
    start, end, layers = stage.make_layers()
    set_by_hand = {
        "config": SimpleNamespace(),
        "start_layer": start,
        "end_layer": end,
        "layers": layers,
        "norm": norm,
        "embed_tokens": embed,
        "get_input_embeddings": embed,
        "enter": lambda tokens, given: (
            (given["hidden_states"], given["residual"]) if given else (embed(tokens), None)
        ),
        "use_sequence_parallel": False,
        "replicated_embed": False,
        "aux_hidden_state_layers": (),
    }
    for name, value in set_by_hand.items():
        if not hasattr(model, name):
            setattr(model, name, value)
    return model, norm


def values(returned: Any) -> Any:
    """What was returned, so that it can be compared: the numbers, and how they are held."""
    if isinstance(returned, Array):
        return returned.tolist()
    if isinstance(returned, IntermediateTensors):
        return {name: values(tensor) for name, tensor in returned.tensors.items()}
    if isinstance(returned, tuple | list):
        return tuple(map(values, returned))
    return type(returned).__name__
