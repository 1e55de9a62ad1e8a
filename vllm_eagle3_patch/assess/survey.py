"""What an installation's source says of each model of the family: the slow, general answer.

The matrix holds the same answers for every release's files as published, made by this module, so
that a pinned installation is answered without parsing anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_eagle3_patch.assess.limits import engine_reason, limits_of
from vllm_eagle3_patch.assess.model_facts import ModelFacts
from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.patches._discovery import all_patches
from vllm_eagle3_patch.patches.deepseek_v32 import not_collecting
from vllm_eagle3_patch.vllm_source.paths import (
    CUDA,
    DEEPSEEK,
    DEEPSEEK_V32,
    DRAFT_MODEL,
    INTERFACES,
    KV_CACHE,
    NEWER_LOADER,
    PROPOSERS,
    REGISTRY,
    RUNNER,
    WHOLE_CONFIG,
)
from vllm_eagle3_patch.vllm_source.read_engine import read_family
from vllm_eagle3_patch.vllm_source.registry import Registry
from vllm_eagle3_patch.vllm_source.resolution import elsewhere
from vllm_eagle3_patch.vllm_source.sources import not_too_deep

if TYPE_CHECKING:
    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.vllm_source.engine import Engine
    from vllm_eagle3_patch.vllm_source.sources import Sources

EVIDENCE = tuple(
    sorted(
        {
            CUDA,
            DEEPSEEK,
            DEEPSEEK_V32,
            DRAFT_MODEL,
            INTERFACES,
            KV_CACHE,
            NEWER_LOADER,
            REGISTRY,
            RUNNER,
            WHOLE_CONFIG,
            *PROPOSERS,
            *(model.wrapper.language_model.path for model in FAMILY if model.wrapper),
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
        registry = Registry(sources)
        models = registry.family_models()
        if not models:
            return ()
        engine = read_family(sources, registry)
        return tuple(_facts(sources, model, engine) for model in models)


def _facts(sources: Sources, model: FamilyModel, engine: Engine) -> ModelFacts:
    patches = {patch.name: patch for patch in all_patches()}
    missing = tuple(
        name
        for name in model.requires
        if name not in patches or patches[name].missing(sources, model)
    )
    reason = engines = engine_reason(engine, model)
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
        engine=engines is not None and reason == engines,
        limits=limits_of(engine, model),
    )
