"""What keeps a model of the family from working, by what vllm_source reads of the installation.

A limit or a reason goes away when a patch or a newer vLLM takes its cause away: no version number
is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_eagle3_patch.vllm_source.engine import NESTED
from vllm_eagle3_patch.vllm_source.paths import DRAFT_MODEL

if TYPE_CHECKING:
    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.vllm_source.engine import Engine

ONE_PAGE_SIZE = (
    "the KV cache manager knows one page size only, and MLA's pages have no room for a draft "
    "model's values; with VLLM_MLA_DISABLE=1 (and VLLM_USE_V1=1) a text-only target can, if its "
    "heads are as many and as wide as the draft model's KV heads"
)
TEXT_ONLY = "the class of EAGLE-3 draft models does not support multimodal inputs yet"


def engine_reason(engine: Engine, model: FamilyModel) -> str | None:
    """Why this engine cannot run a target of this kind with a grouped-query draft model, or None.

    Up to 0.10.2 the runner describes every layer's KV cache as the target's kind (get_kv_cache_spec
    in vllm/v1/worker/gpu_model_runner.py), and the KV cache manager wants pages of one size. Pages
    of equal size do not help beside MLA: their layout is MLA's. No release up to 0.17.1 has a class
    for an MLA draft model. Without MLA a page of the same shape is enough.

    From 0.10.1 to 0.11.0 the one class of draft models raises an error for a multimodal target's
    input embeddings, which the proposer always passes.
    """
    if engine.one_page_size:
        return ONE_PAGE_SIZE
    draft_model = engine.draft_classes.get(DRAFT_MODEL)
    if model.wrapper and draft_model is not None and draft_model.refuses_embeddings:
        return TEXT_ONLY
    return None


def limits_of(engine: Engine, model: FamilyModel) -> tuple[str, ...]:
    """The codes of the limits under which a model that is ready does not work."""
    target = engine.targets[model.architecture]
    holds = {
        "pipeline-parallel": not target.relays,
        "dual-batch-overlap": engine.dual_batch_overlap == "fails",
        "forced-mla-backend": _forced_mla_backend(engine, model),
        "blackwell": _blackwell(engine, model),
        "nested-layer-ids": NESTED not in engine.keys and not engine.decides_layers,
        "float16": target.float16_scaling,
        "platform": target.partial_sums,
    }
    return tuple(code for code, held in holds.items() if held)


def _forced_mla_backend(engine: Engine, model: FamilyModel) -> bool:
    """A draft model is built with its target's backend by a runner that vLLM would take.

    Where the newer runner is the default the other still takes over for what that one cannot do.
    """
    newer = engine.newer_runner
    inherits = engine.inherits_backend or (
        newer is not None
        and newer.inherits_backend
        and (newer.everywhere or model.architecture in newer.architectures)
    )
    return inherits and engine.refuses_backend and not engine.own_backend


def _blackwell(engine: Engine, model: FamilyModel) -> bool:
    """vLLM assigns an MLA backend itself, but not for sparse (DSA) models.

    CUTLASS_MLA has blocks of 128 tokens only, and FlashInfer, which a draft model chooses on
    Blackwell, of 64 at most: "No common block size" (select_common_block_size, 0.11.1 on).
    """
    if model.sparse or engine.one_page_size:
        return False
    forced = engine.forced_backends
    return "CUTLASS_MLA" in forced or (bool(forced) and _forced_mla_backend(engine, model))
