"""What ``end_to_end`` runs: each row is one question to a patched vLLM. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LAYERS = 8
DEFAULT = (2, LAYERS // 2, LAYERS - 3)
"""What vLLM takes where the draft model's config names no ids."""
SPARSE = (1, 4, 6)
DRAFTS = {"default": DEFAULT, "sparse": SPARSE}
"""What the draft models are trained on."""
FAR_OFF = (5, 6, 7)
WITH_FIRST = (0, 4, 6)
WITH_LAST = (1, 4, LAYERS)
PROMPTS, MAX_TOKENS, AHEAD, SERVED_AHEAD = 64, 64, 4, 3
"""Requests, tokens of each, and tokens drafted a step; three is what servers are run with."""
BACKEND_ERROR = "not valid for this configuration"
"""What vLLM says of a draft model to which a target's MLA backend was handed on."""


PIPELINE_ERROR = "Pipeline parallelism is not supported for this model"
"""What vLLM says at start-up, as this draft model has no stages, before any id is looked at."""


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        name: Unique; other names begin with the same words if they are of one kind.
        kind: ``generate``, ``serve``, ``states`` or ``cost``.
        draft: The draft model; without one, no speculation.
        ids: The layer ids that its config names.
        place: Where: ``top``, ``nested`` in ``eagle_config``, or ``none``.
        used: The boundaries that vLLM must use; ``ids`` if it is empty.
        mode: ``eager``, ``graphs`` (as published: compiled, with CUDA graphs) or ``only-graphs``
            (not compiled, CUDA graphs of whole forwards).
        dtype: Empty for the one that the models are saved in.
        variant: Which installation: ``patched``, ``stock``, or ``skipped``, patched without
            ``draft-attention-backend``.
        engine: Further arguments of ``LLM``.
        error: What a run that must fail says.
        gpus: How many it needs.
    """

    name: str
    kind: str = "generate"
    draft: str = ""
    ids: tuple[int, ...] = ()
    place: str = "top"
    used: tuple[int, ...] = ()
    mode: str = "eager"
    dtype: str = ""
    variant: str = "patched"
    engine: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    gpus: int = 1

    @property
    def boundaries(self) -> tuple[int, ...]:
        """What vLLM must use; it collects the states on its way through the layers."""
        return tuple(sorted(self.used or self.ids))

    @property
    def slug(self) -> str:
        """The name as a file's."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.name)


def shifted(ids: tuple[int, ...], by: int) -> tuple[int, ...]:
    """The ids, off by some layers."""
    return tuple(layer_id + by for layer_id in ids)


def id_sets(own: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """What is simulated for a draft model: its own ids, and those it might be given instead."""
    near = (own, shifted(own, 1), shifted(own, -1), DEFAULT, SPARSE)
    return tuple(dict.fromkeys((*near, FAR_OFF, WITH_FIRST, WITH_LAST)))


def _counted(mode: str, **others: Any) -> list[Row]:
    """The rows about layer ids, in the order of what they are worth."""
    named = {
        "ids right": ("sparse-early", SPARSE, "top", ()),
        "ids one too high": ("sparse-early", shifted(SPARSE, 1), "top", ()),
        "ids one too low": ("sparse-early", shifted(SPARSE, -1), "top", ()),
        "ids nested": ("sparse-early", SPARSE, "nested", ()),
        "ids left out": ("sparse-early", SPARSE, "none", DEFAULT),
        "ids with 0": ("sparse-early", WITH_FIRST, "top", ()),
        "ids with n": ("sparse-early", WITH_LAST, "top", ()),
        "default ids": ("default-early", DEFAULT, "top", ()),
        "default ids left out": ("default-early", DEFAULT, "none", DEFAULT),
        "ids far off": ("sparse-early", FAR_OFF, "top", ()),
        "ids right, trained fully": ("sparse-full", SPARSE, "top", ()),
    }
    return [
        Row(f"{text}, {mode}", draft=draft, ids=ids, place=place, used=used, mode=mode, **others)
        for text, (draft, ids, place, used) in named.items()
    ]


def rows(*, cuda: bool) -> tuple[Row, ...]:
    """All rows, the most telling first; without a GPU those that a CPU can run."""
    eager, graphs = _counted("eager"), _counted("graphs")
    right = {"draft": "sparse-early", "ids": SPARSE}
    found = [
        eager[0],
        Row("without EAGLE-3, eager"),
        graphs[0],
        Row("without EAGLE-3, graphs", mode="graphs"),
        Row("stock, eager", variant="stock"),
        Row("stock, graphs", variant="stock", mode="graphs"),
        Row("stock with EAGLE-3", variant="stock", **right, error="only supported for"),
        Row("served, right", kind="serve", draft="sparse-full", ids=SPARSE, mode="graphs"),
        Row("served, far off", kind="serve", draft="sparse-early", ids=FAR_OFF, mode="graphs"),
        Row("states, eager", kind="states", **right),
        Row("states, graphs", kind="states", mode="graphs", **right),
        *(row for row in eager[1:7]),
        *(row for row in graphs[1:7]),
    ]
    if cuda:
        half = {"dtype": "float16", **right}
        found += [
            Row("states, only graphs", kind="states", mode="only-graphs", **right),
            *_forced(right),
            Row(
                "forced FLASHMLA, without draft-attention-backend",
                variant="skipped",
                engine={"attention_backend": "FLASHMLA"},
                error=BACKEND_ERROR,
                **right,
            ),
            Row("float16 without EAGLE-3, eager", dtype="float16"),
            Row("float16, ids right, eager", **half),
            Row("float16, ids right, graphs", mode="graphs", **half),
            Row("float16 without EAGLE-3, graphs", dtype="float16", mode="graphs"),
            *_on_two_gpus(right),
        ]
    found += [Row("cost", kind="cost"), *eager[7:], *graphs[7:]]
    found.append(Row("served, trained early", kind="serve", mode="graphs", **right))
    return tuple(found)


def _forced(right: dict[str, Any]) -> list[Row]:
    """Each MLA backend, with and without EAGLE-3: other kernels round otherwise."""
    found = []
    for name in ("FLASHMLA", "TRITON_MLA", "FLASH_ATTN_MLA"):
        engine = {"attention_backend": name}
        for mode in ("eager", "graphs"):
            found.append(Row(f"forced {name}, {mode}", mode=mode, engine=engine, **right))
            plain = f"forced {name} without EAGLE-3, {mode}"
            found.append(Row(plain, mode=mode, engine=engine))
    return found


def _on_two_gpus(right: dict[str, Any]) -> list[Row]:
    processes = {"distributed_executor_backend": "mp"}
    tensor = {"tensor_parallel_size": 2, "disable_custom_all_reduce": True, **processes}
    pipeline = {"pipeline_parallel_size": 2, **processes}
    return [
        Row("tensor parallel 2 without EAGLE-3, eager", engine=tensor, gpus=2),
        Row("tensor parallel 2, ids right, eager", engine=tensor, gpus=2, **right),
        Row("tensor parallel 2, ids right, graphs", engine=tensor, gpus=2, mode="graphs", **right),
        Row("pipeline parallel 2", engine=pipeline, gpus=2, error=PIPELINE_ERROR, **right),
    ]
