"""Which of the target's layers feed the draft model: what its config asks for, and what it gets.

vLLM's id ``k`` means the residual stream entering layer ``k``, a boundary: the output of layer
``k - 1``. Id 0 is the embedding output, id ``num_layers`` the final stream before the last norm.
Some trainers count outputs of layers under the same key (reports 29 and 30, table a).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_eagle3_patch.doctor.draft_view import is_speculators
from vllm_eagle3_patch.doctor.expressions import NotUnderstoodError, evaluate
from vllm_eagle3_patch.vllm_source.engine import DEFAULT_LAYERS, LOST, NESTED, NESTED_SHORT, TOP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_eagle3_patch.doctor.checkpoint import Checkpoint
    from vllm_eagle3_patch.vllm_source.engine import Engine

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
CONVENTION = f"{LAYER_IDS}_convention"
BOUNDARY, OUTPUT, AMBIGUOUS, DEFAULT = "boundary", "output", "ambiguous", "default"

_MOST, _DIGITS = 16, 12
"""Ids, and digits of one, that a sentence shows; no model has more."""

_TRAINERS = {
    "use_last_layernorm": "NVIDIA Model-Optimizer",
    "use_input_layernorm_in_first_layer": "NVIDIA Model-Optimizer",
    "use_mtp_layernorm": "NVIDIA Model-Optimizer",
}
"""Keys under ``eagle_config`` that one trainer alone writes, which counts boundaries (table a,
https://github.com/NVIDIA/Model-Optimizer/pull/300)."""


@dataclass(frozen=True)
class Layers:
    """The layer question, answered.

    Attributes:
        configured: The ids of the draft model's config, None without any.
        where: Where they stand: ``top`` or ``eagle_config``; None without any.
        place: The same more precisely, as ``engine`` names places.
        used: The ids that this vLLM will use, None if the target's layer count is not known.
        read: The place where it reads them, None if it uses its default.
        convention: What the configured ids count: ``boundary``, ``output`` or ``ambiguous``;
            ``default`` if there are none.
        why: What the convention was concluded from.
    """

    configured: tuple[int, ...] | None
    where: str | None
    place: str | None
    used: tuple[int, ...] | None
    read: str | None
    convention: str
    why: str
    num_layers: int | None

    @property
    def outputs_of(self) -> tuple[int, ...] | None:
        """For each id that is used, the layer whose output it is; -1 is the embedding."""
        return None if self.used is None else tuple(layer - 1 for layer in self.used)

    @property
    def wanted(self) -> tuple[tuple[int, ...], ...]:
        """The boundaries that the configured ids may mean: two where that is ambiguous."""
        if self.configured is None:
            return ()
        above = tuple(layer + 1 for layer in self.configured)
        return {
            BOUNDARY: (self.configured,),
            OUTPUT: (above,),
            AMBIGUOUS: (self.configured, above),
        }[self.convention]

    @property
    def document(self) -> dict[str, Any]:
        """The object ``layers`` of the contract."""
        return {
            "configured": None if self.configured is None else list(self.configured),
            "where": self.where,
            "used": None if self.used is None else list(self.used),
            "outputs_of": None if self.outputs_of is None else list(self.outputs_of),
            "convention": self.convention,
        }

    @property
    def sentence(self) -> str:
        """The answer in plain words."""
        asked = "the draft model's config asks for no layers"
        if self.configured is not None:
            place = "at the top level" if self.where == TOP else f"under {NESTED}"
            asked = f"the draft model's config asks for {listed(self.configured)} {place}"
        if self.used is None:
            return f"{asked}; the target's layer count is not known, so neither are its layers"
        outputs = in_words(self.outputs_of or ())
        if self.configured is None:
            return f"{asked}, so this vLLM uses its default {listed(self.used)}: {outputs}"
        if self.read is None:
            tail = f"this vLLM does not read that and uses its default {listed(self.used)}"
        elif self.used != self.configured:
            tail = f"this vLLM takes that as outputs of layers and uses {listed(self.used)}"
        else:
            tail = f"this vLLM uses {listed(self.used)}"
        return f"{asked}; {tail}: {outputs}{self._comparison()}"

    def _comparison(self) -> str:
        assert self.used is not None
        if self.convention == AMBIGUOUS:
            return "; whether the trainer counted so is not certain"
        if self.used not in self.wanted:
            return f", but the draft model wants {in_words([k - 1 for k in self.wanted[0]])}"
        if self.read is None:
            return ": the same tensors, by luck"
        return ", as the draft model wants"


def listed(layers: Sequence[int]) -> str:
    """``2, 30, 58``."""
    shown = [str(layer)[:_DIGITS] for layer in layers[:_MOST]]
    return ", ".join([*shown, "..."] if len(layers) > _MOST else shown) or "none"


def in_words(outputs: Sequence[int]) -> str:
    """``the outputs of layers 1, 29 and 57``; -1 is the embedding."""
    if len(outputs) > _MOST:
        return f"the outputs of layers {listed(outputs)}"
    names = ["the embedding" if k < 0 else str(k)[:_DIGITS] for k in outputs]
    if not names:
        return "no layers"
    if len(names) == 1:
        return "the embedding" if outputs[0] < 0 else f"the output of layer {names[0]}"
    return f"the outputs of layers {', '.join(names[:-1])} and {names[-1]}"


def layer_ids(value: Any) -> tuple[int, ...] | None:
    """A list of integers as vLLM takes it; None for anything else, an empty list too."""
    if not isinstance(value, list) or not value:
        return None
    if any(not isinstance(item, int) or isinstance(item, bool) for item in value):
        return None
    return tuple(value)


def places(draft: Checkpoint) -> dict[str, Any]:
    """What stands in each place where layer ids can stand; absent places are left out."""
    found = {
        TOP: draft.config.get(LAYER_IDS),
        NESTED: draft.eagle_config.get(LAYER_IDS),
        NESTED_SHORT: draft.eagle_config.get("layer_ids"),
    }
    if draft.speculators is not None and LAYER_IDS not in draft.config:
        found[LOST] = draft.speculators.get(LAYER_IDS)
    return {place: value for place, value in found.items() if value not in (None, [])}


def find_layers(
    draft: Checkpoint,
    engine: Engine,
    keys: Sequence[str],
    num_layers: int | None,
    *,
    default: Sequence[str] = DEFAULT_LAYERS,
    stated: str | None = None,
) -> Layers:
    """Answer the layer question.

    Args:
        draft: The draft model, its config as vLLM sees it.
        engine: The vLLM.
        keys: The places where the runner that will run looks for ids.
        num_layers: The target's layers.
        default: Expressions of ``num_layers``: the target's default ids.
        stated: The convention that the user states, before all evidence.
    """
    there = places(draft)
    place = next(iter(there), None)
    configured = layer_ids(there[place]) if place else None
    if configured is None:
        place = None
    convention, why = _convention(draft, configured, num_layers, stated)
    read = next((key for key in keys if key in there and layer_ids(there[key])), None)
    used: tuple[int, ...] | None
    if read is None:
        used = default_layers(default, num_layers)
    else:
        used = layer_ids(there[read]) or ()
        if engine.converts_outputs and _converted(draft, used):
            used = tuple(layer + 1 for layer in used)
    return Layers(
        configured=configured,
        where=None if place is None else (TOP if place in (TOP, LOST) else NESTED),
        place=place,
        used=used,
        read=read,
        convention=convention,
        why=why,
        num_layers=num_layers,
    )


def default_layers(expressions: Sequence[str], num_layers: int | None) -> tuple[int, ...] | None:
    """The ids of such expressions, None without a layer count or if one is not understood."""
    if num_layers is None:
        return None
    try:
        values = [evaluate(source, {"num_layers": num_layers}) for source in expressions]
    except NotUnderstoodError:
        return None
    return tuple(value for value in values if isinstance(value, int))


def _stated_in_config(draft: Checkpoint) -> Any:
    return draft.config.get(CONVENTION, draft.eagle_config.get(CONVENTION))


def _converted(draft: Checkpoint, ids: tuple[int, ...]) -> bool:
    """The rule of the patch ``aux-layer-ids`` (patches/_layer_ids.py)."""
    said = _stated_in_config(draft)
    if said is not None:
        return bool(said == OUTPUT)
    return ids[0] == 1 and draft.speculators is None


def _convention(
    draft: Checkpoint,
    configured: tuple[int, ...] | None,
    num_layers: int | None,
    stated: str | None,
) -> tuple[str, str]:
    """What the ids count, and what that was concluded from."""
    if configured is None:
        return DEFAULT, "there are no ids"
    said = stated or _stated_in_config(draft)
    trainer = next((name for key, name in _TRAINERS.items() if key in draft.eagle_config), None)
    first = configured[0]
    if said in (BOUNDARY, OUTPUT):
        concluded = str(said), f"{CONVENTION} says so" if stated is None else "--convention says so"
    elif draft.speculators is not None or is_speculators(draft):
        concluded = BOUNDARY, "the speculators format counts boundaries"
    elif num_layers is not None and num_layers in configured:
        concluded = BOUNDARY, f"there is no layer {num_layers} to have an output"
    elif trainer is not None:
        concluded = BOUNDARY, f"{trainer} counts boundaries"
    elif first == 1:
        concluded = OUTPUT, "ids that begin with 1 count outputs of layers (report 29)"
    else:
        concluded = (
            AMBIGUOUS,
            f"ids that begin with {first} are boundaries for most readers, but trainers that count "
            "outputs wrote such ids too",
        )
    return concluded
