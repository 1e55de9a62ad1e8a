"""What a draft model's list of layer ids means, for vLLM and for the doctor.

The patch ``aux-layer-ids`` writes the source of these functions into vLLM as static methods: no
imports, and Python 3.9. vLLM's id ``k`` is the residual stream entering layer ``k``, a
boundary: the output of layer ``k - 1``.
"""

from __future__ import annotations

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
CONVENTION = f"{LAYER_IDS}_convention"
BOUNDARY, OUTPUT = "boundary", "output"


def eagle3_boundaries(ids: list[int], convention: object) -> tuple[int, ...]:
    """The ids as boundaries: as they are, unless they are said to be outputs of layers."""
    return tuple(i + 1 for i in ids) if convention == "output" else tuple(ids)


def eagle3_ids_look_like_outputs(ids: list[int], num_layers: int) -> bool:
    """Whether the ids are vLLM's default less one, as trainers of outputs write."""
    return list(ids) == [1, num_layers // 2 - 1, num_layers - 4]
