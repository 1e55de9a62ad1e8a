"""What an installation's source says of each model of the family: the slow, general answer.

The matrix holds the same answers for every release's files as published, made by this module, so
that a pinned installation is answered without parsing anything.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from vllm_eagle3_patch.assess import limits
from vllm_eagle3_patch.assess.model_facts import ModelFacts
from vllm_eagle3_patch.ground.family import FAMILY, FamilyModel
from vllm_eagle3_patch.patches._discovery import all_patches
from vllm_eagle3_patch.vllm_source import platforms
from vllm_eagle3_patch.vllm_source.paths import DRAFT_MODEL, INTERFACES, KV_CACHE, REGISTRY
from vllm_eagle3_patch.vllm_source.resolution import elsewhere
from vllm_eagle3_patch.vllm_source.sources import not_too_deep

if TYPE_CHECKING:
    from vllm_eagle3_patch.vllm_source.sources import Sources

REFUSES_EMBEDDINGS = b"does not support multimodal inputs yet"

LANGUAGE_MODELS = {model.wrapper.language_model for model in FAMILY if model.wrapper}
EVIDENCE = tuple(
    sorted(
        {
            REGISTRY,
            KV_CACHE,
            DRAFT_MODEL,
            INTERFACES,
            *LANGUAGE_MODELS,
            *limits.EVIDENCE,
            *platforms.EVIDENCE,
        }
    )
)
"""Files that are read for the answers and need not be changed by any patch."""


def survey(sources: Sources) -> tuple[ModelFacts, ...]:
    """Read the facts of every model of the family that an installation ships.

    Raises:
        UnsupportedError: A file that decides cannot be parsed.
    """
    with not_too_deep("a file of this vLLM"):
        return tuple(
            _facts(sources, model, engine_reason(sources, model)) for model in shipped(sources)
        )


def shipped(sources: Sources) -> tuple[FamilyModel, ...]:
    """The models of the family in an installation's registry, in the family's order."""
    if not sources.exists(REGISTRY):
        return ()
    registered = {
        key.value
        for node in ast.walk(sources.module(REGISTRY))
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    }
    return tuple(
        model
        for model in FAMILY
        if model.architecture in registered
        and (model.wrapper is None or sources.exists(model.wrapper.language_model))
    )


ONE_PAGE_SIZE = (
    "the KV cache manager knows one page size only, and MLA's pages have no room for a draft "
    "model's values; with VLLM_MLA_DISABLE=1 (and VLLM_USE_V1=1) a text-only target can, if its "
    "heads are as many and as wide as the draft model's KV heads"
)
TEXT_ONLY = "the class of EAGLE-3 draft models does not support multimodal inputs yet"


def engine_reason(sources: Sources, model: FamilyModel) -> str | None:
    """Why this engine cannot run a target of this kind with a grouped-query draft model, or None.

    Up to 0.10.2 the runner describes every layer's KV cache as the target's kind (get_kv_cache_spec
    in vllm/v1/worker/gpu_model_runner.py), and the KV cache manager wants pages of one size. Pages
    of equal size do not help beside MLA: their layout is MLA's. No release up to 0.17.1 has a class
    for an MLA draft model. Without MLA a page of the same shape is enough.

    From 0.10.1 to 0.11.0 the one class of draft models raises an error for a multimodal target's
    input embeddings, which the proposer always passes.
    """
    if b"UniformTypeKVCacheSpecs" not in (sources.read(KV_CACHE) or b""):
        return ONE_PAGE_SIZE
    if model.wrapper and REFUSES_EMBEDDINGS in (sources.read(DRAFT_MODEL) or b""):
        return TEXT_ONLY
    return None


def _facts(sources: Sources, model: FamilyModel, engine: str | None) -> ModelFacts:
    patches = {patch.name: patch for patch in all_patches()}
    from vllm_eagle3_patch.patches.deepseek_v32 import not_collecting

    missing = tuple(
        name
        for name in model.requires
        if name not in patches or patches[name].missing(sources, model)
    )
    reason = engine
    unpatchable = [name for name in missing if name not in patches]
    broken = not_collecting(sources, model)
    replaced = elsewhere(sources, model)
    if unpatchable:
        reason = f"{model.architecture} lacks {', '.join(unpatchable)}, and no patch adds that"
    elif replaced:
        reason = replaced
    elif broken:
        reason = (
            f"{', '.join(broken)} inherits the interface but never collects; no patch adds that"
        )
    return ModelFacts(
        architecture=model.architecture,
        model_types=model.model_types,
        missing=missing,
        reason=reason,
        engine=engine is not None and reason == engine,
        limits=limits.limits_of(sources, model),
    )
