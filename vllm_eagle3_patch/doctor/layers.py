"""Which of the target's layers feed the draft model: what its config asks for, and what it gets.

vLLM's id ``k`` means the residual stream entering layer ``k``, a boundary: the output of layer
``k - 1``. Id 0 is the embedding output, id ``num_layers`` the final stream before the last norm.
Some trainers count outputs of layers under the same key (reports 29 and 30, table a); what a list
means is decided by ``ground/layer_ids.py``, which the patch ``aux-layer-ids`` shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_eagle3_patch.doctor.draft_view import is_speculators
from vllm_eagle3_patch.doctor.expressions import NotUnderstoodError, evaluate
from vllm_eagle3_patch.ground.layer_ids import (
    BOUNDARY,
    CONVENTION,
    LAYER_IDS,
    OUTPUT,
    eagle3_boundaries,
    eagle3_ids_look_like_outputs,
)
from vllm_eagle3_patch.vllm_source.engine import DEFAULT_LAYERS, LOST, NESTED, NESTED_SHORT, TOP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_eagle3_patch.doctor.checkpoint import Checkpoint

DEFAULT = "default"

_MOST, _DIGITS = 16, 12
"""Ids, and digits of one, that a sentence shows; no model has more."""


@dataclass(frozen=True)
class Layers:
    """The layer question, answered.

    Attributes:
        configured: The ids of the draft model's config, None without any.
        where: Where they stand: ``top`` or ``eagle_config``; None without any.
        place: The same more precisely, as ``engine`` names places.
        used: The ids that this vLLM will use, None if the target's layer count is not known.
        read: The place where it reads them, None if it uses its default.
        convention: What the configured ids count: ``boundary`` or ``output``; ``default`` if there
            are none.
        said_by: What says so, None if nothing does.
    """

    configured: tuple[int, ...] | None
    where: str | None
    place: str | None
    used: tuple[int, ...] | None
    read: str | None
    convention: str
    said_by: str | None
    num_layers: int | None

    @property
    def outputs_of(self) -> tuple[int, ...] | None:
        """For each id that is used, the layer whose output it is; -1 is the embedding."""
        return None if self.used is None else tuple(layer - 1 for layer in self.used)

    @property
    def wanted(self) -> tuple[int, ...]:
        """The boundaries that the configured ids mean."""
        return eagle3_boundaries([*(self.configured or ())], self.convention)

    @property
    def doubtful(self) -> bool:
        """Whether nothing says what the configured ids count and they look like outputs."""
        return (
            self.configured is not None
            and self.num_layers is not None
            and self.said_by is None
            and eagle3_ids_look_like_outputs([*self.configured], self.num_layers)
        )

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
        if self.read != self.place:
            default = "its default " if self.read is None else ""
            tail = f"this vLLM does not read that and uses {default}{listed(self.used)}"
        elif self.used != self.configured:
            tail = f"this vLLM takes that as outputs of layers and uses {listed(self.used)}"
        else:
            tail = f"this vLLM uses {listed(self.used)}"
        return f"{asked}; {tail}: {outputs}{self._comparison()}"

    def _comparison(self) -> str:
        if self.doubtful:
            return "; the ids look like outputs of layers, and nothing says whether they are"
        if self.used != self.wanted:
            return f", but the draft model wants {in_words([k - 1 for k in self.wanted])}"
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
    keys: Sequence[str],
    num_layers: int | None,
    *,
    reads_convention: bool = False,
    default: Sequence[str] = DEFAULT_LAYERS,
    stated: str | None = None,
) -> Layers:
    """Answer the layer question.

    Args:
        draft: The draft model, its config as vLLM sees it.
        keys: The places where the vLLM that will run looks for ids.
        num_layers: The target's layers.
        reads_convention: Whether it reads there what the ids count.
        default: Expressions of ``num_layers``: the target's default ids.
        stated: The convention that the user states, before all evidence.
    """
    there = places(draft)
    place = next(iter(there), None)
    configured = layer_ids(there[place]) if place else None
    if configured is None:
        place = None
    convention, said_by = _convention(draft, configured, stated)
    read = next((key for key in keys if key in there and layer_ids(there[key])), None)
    used: tuple[int, ...] | None
    if read is None:
        used = default_layers(default, num_layers)
    else:
        counted = convention_in_config(draft) if reads_convention else None
        used = eagle3_boundaries(there[read], counted)
    return Layers(
        configured=configured,
        where=None if place is None else (TOP if place in (TOP, LOST) else NESTED),
        place=place,
        used=used,
        read=read,
        convention=convention,
        said_by=said_by,
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


def convention_in_config(draft: Checkpoint) -> Any:
    """What the draft model's config says that its ids count; None if it does not."""
    return draft.config.get(CONVENTION, draft.eagle_config.get(CONVENTION))


def _convention(
    draft: Checkpoint, configured: tuple[int, ...] | None, stated: str | None
) -> tuple[str, str | None]:
    """What the ids count, and what says so."""
    if configured is None:
        return DEFAULT, None
    if stated is not None:
        return stated, "--convention"
    said = convention_in_config(draft)
    if said in (BOUNDARY, OUTPUT):
        return str(said), CONVENTION
    speculators = draft.speculators is not None or is_speculators(draft)
    return BOUNDARY, "the speculators format" if speculators else None
