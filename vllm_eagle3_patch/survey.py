"""What an installation's source says of each model of the family: the slow, general answer.

The matrix holds the same answers for every release's files as published, made by this module, so
that a pinned installation is answered without parsing anything.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from vllm_eagle3_patch import limits, reading
from vllm_eagle3_patch.facts import ModelFacts
from vllm_eagle3_patch.family import FAMILY, FamilyModel
from vllm_eagle3_patch.patch import INTERFACES, all_patches

if TYPE_CHECKING:
    from vllm_eagle3_patch.sources import Sources

REGISTRY = "vllm/model_executor/models/registry.py"
KV_CACHE = "vllm/v1/core/kv_cache_utils.py"
PROPOSER = "vllm/v1/spec_decode/eagle.py"

EVIDENCE = tuple(sorted({REGISTRY, KV_CACHE, PROPOSER, INTERFACES, *limits.EVIDENCE}))
"""Files that are read for the answers and need not be changed by any patch."""


def survey(sources: Sources) -> tuple[ModelFacts, ...]:
    """Read the facts of every model of the family that an installation ships.

    Raises:
        UnsupportedError: A file that decides cannot be parsed.
    """
    engine = engine_reason(sources)
    return tuple(_facts(sources, model, engine) for model in shipped(sources))


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
    return tuple(model for model in FAMILY if model.architecture in registered)


def engine_reason(sources: Sources) -> str | None:
    """Why this engine cannot run an MLA target with a grouped-query draft model, or None.

    Source: vllm/v1/core/kv_cache_utils.py (one page size only up to 0.10.2) and
    vllm/v1/spec_decode/eagle.py (0.11.0 builds the draft's attention metadata with the target's
    builder), read in each release.
    """
    if b"UniformTypeKVCacheSpecs" not in (sources.read(KV_CACHE) or b""):
        return (
            "the KV cache manager knows one page size only, and an MLA target and a "
            "grouped-query draft model differ in theirs"
        )
    if not sources.exists(PROPOSER):
        return None
    propose = reading.find_function(sources.module(PROPOSER), "propose")
    if propose is not None and any(
        isinstance(node, ast.Subscript) and reading.same(node, "self.runner.attn_groups[0][0]")
        for node in ast.walk(propose)
    ):
        return "the proposer builds the draft model's attention metadata with the target's builder"
    return None


def _facts(sources: Sources, model: FamilyModel, engine: str | None) -> ModelFacts:
    patches = {patch.name: patch for patch in all_patches()}
    missing = tuple(
        name
        for name in model.requires
        if name not in patches or patches[name].missing(sources, model)
    )
    reason = engine
    unpatchable = [name for name in missing if name not in patches]
    if unpatchable:
        reason = f"{model.architecture} lacks {', '.join(unpatchable)}, and no patch adds that"
    return ModelFacts(
        architecture=model.architecture,
        model_types=model.model_types,
        missing=missing,
        reason=reason,
        engine=engine is not None and not unpatchable,
        limits=limits.limits_of(sources, model),
    )
