"""What the model runners, the proposer and the KV cache manager do, read from their source."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from vllm_eagle3_patch.ground.layer_ids import LAYER_IDS
from vllm_eagle3_patch.vllm_source import syntax
from vllm_eagle3_patch.vllm_source.backends import hands_backend_on
from vllm_eagle3_patch.vllm_source.engine import NESTED, NESTED_SHORT, TOP, NewerRunner
from vllm_eagle3_patch.vllm_source.image_tokens import image_tokens
from vllm_eagle3_patch.vllm_source.paths import (
    KV_CACHE,
    MICRO_BATCHES,
    NEWER_LAYER_IDS,
    NEWER_LOADER,
    PROPOSERS,
    RUNNER,
    WHOLE_CONFIG,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_eagle3_patch.vllm_source.sources import Sources


USE_AUX = "use_aux_hidden_state"
DECIDES = "eagle3_aux_hidden_state_layers"
READER = "_get_eagle3_aux_layers_from_config"
NEWER_READER = "get_eagle3_aux_layers_from_config"
SPECULATIVE_CONFIG = "SpeculativeConfig"
LEAVES = {
    "pipeline-parallel": "EAGLE3 with pipeline parallelism",
    "dual-batch-overlap": "dual batch overlap",
}
"""Features in the words of ``_get_v2_model_runner_unsupported_features``."""
JOINING_METHODS = ("_capture_ubatches", "_run_ubatches")


def config_decides_layers(config: ast.Module, sources: Sources) -> bool:
    """Whether the config decides on layer ids and the runners ask it (``aux-layer-ids``)."""
    owner = syntax.find_class(config, SPECULATIVE_CONFIG)
    method = syntax.find_method(owner, DECIDES)
    return (
        method is not None
        and {LAYER_IDS, NESTED} <= set(syntax.strings(method))
        and all(
            any(syntax.calls(sources.module(path), DECIDES))
            for path in filter(sources.exists, (RUNNER, NEWER_LAYER_IDS))
        )
    )


def keys(sources: Sources) -> tuple[str, ...]:
    """The places where the V1 runner itself looks for layer ids, in order; none up to 0.11.0."""
    if not sources.exists(RUNNER):
        return ()
    reader = syntax.find_function(sources.module(RUNNER), READER)
    return () if reader is None else _places(reader)


def _places(reader: syntax.FunctionNode) -> tuple[str, ...]:
    nested = [
        call
        for call in syntax.calls(reader, "get")
        if isinstance(call.func, ast.Attribute) and "config" in syntax.last_name(call.func.value)
    ]
    asked = {text for call in nested for text in syntax.strings(call)}
    known = set(syntax.strings(_code(reader)))
    looks_below = NESTED in known
    places = [TOP] if LAYER_IDS in known or syntax.mentions(reader, LAYER_IDS) else []
    places += [NESTED] if looks_below and LAYER_IDS in asked else []
    places += [NESTED_SHORT] if looks_below and "layer_ids" in asked else []
    return tuple(places)


def _code(function: syntax.FunctionNode) -> ast.Module:
    """A function's statements without its docstring."""
    start = 1 if syntax.has_docstring(function) else 0
    return ast.Module(function.body[start:], [])


def newer_runner(sources: Sources) -> NewerRunner | None:
    """The runner under v1/worker/gpu, where it knows EAGLE-3."""
    if not sources.exists(NEWER_LAYER_IDS):
        return None
    module = sources.module(NEWER_LAYER_IDS)
    reader = syntax.find_function(module, NEWER_READER)
    return NewerRunner(
        keys=_places(reader) if reader else (),
        **_default_for(sources),
        reads_use_aux=USE_AUX in set(syntax.strings(module)),
        inherits_backend=sources.exists(NEWER_LOADER)
        and hands_backend_on(sources.module(NEWER_LOADER)),
    )


def _default_for(sources: Sources) -> dict[str, Any]:
    """For which models vLLM takes the newer runner by itself (VllmConfig.use_v2_model_runner)."""
    if not sources.exists(WHOLE_CONFIG):
        return {}
    module = sources.module(WHOLE_CONFIG)
    chooses = syntax.find_function(module, "use_v2_model_runner")
    if chooses is None:
        return {}
    words = {
        text
        for node in ast.walk(module)
        if isinstance(node, syntax.FunctionNode) and node.name.endswith("unsupported_features")
        for text in syntax.strings(node)
    }
    leaves = tuple(name for name, said in LEAVES.items() if said in words)
    if not syntax.mentions(chooses, "_is_default_v2_model_runner_model"):
        return {"everywhere": True, "leaves": leaves}
    architectures = sorted(
        {
            text
            for node in ast.walk(module)
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            if any(
                syntax.last_name(t) == "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"
                for t in syntax.assigned(node)
            )
            for text in syntax.strings(node.value)
        }
    )
    default = syntax.find_function(module, "_is_default_v2_model_runner_model")
    dense = any(
        isinstance(node, ast.Return)
        and isinstance(node.value, ast.BoolOp)
        and isinstance(node.value.op, ast.Or)
        and syntax.mentions(node.value, "is_moe")
        for node in ast.walk(default or ast.Pass())
    )
    return {
        "architectures": tuple(architectures),
        "dense": dense,
        "plain_only": default is not None and syntax.mentions(default, "is_quantized"),
        "leaves": leaves,
    }


def hashed_ids(config: ast.Module) -> str:
    """Which layer ids vLLM itself has in the compile-cache key: ``none`` or ``top``."""
    owner = syntax.find_class(config, SPECULATIVE_CONFIG)
    compute_hash = syntax.find_method(owner, "compute_hash")
    hashes = compute_hash is not None and LAYER_IDS in set(syntax.strings(compute_hash))
    return "top" if hashes else "none"


def reads_use_aux(sources: Sources) -> bool:
    """Whether the V1 runner's proposer reads ``eagle_config.use_aux_hidden_state`` (0.12.0 on)."""
    return any(
        USE_AUX in set(syntax.strings(sources.module(path)))
        for path in filter(sources.exists, PROPOSERS)
    )


def one_page_size(sources: Sources) -> bool:
    """Whether the KV cache manager knows one page size only (up to 0.10.2)."""
    return b"UniformTypeKVCacheSpecs" not in (sources.read(KV_CACHE) or b"")


def targets_metadata(sources: Sources) -> bool:
    """Whether the proposer takes the target's attention group for the draft model (0.11.0)."""
    return any(
        syntax.same(node, "self.runner.attn_groups[0][0]")
        for path in filter(sources.exists, PROPOSERS)
        for propose in (syntax.find_function(sources.module(path), "propose"),)
        for node in ast.walk(propose or ast.Pass())
        if isinstance(node, ast.Subscript)
    )


def weight_sharing(sources: Sources) -> tuple[bool, str]:
    """Whether a draft model's own embedding is kept, and how its ``lm_head`` is treated."""
    modules = [sources.module(path) for path in filter(sources.exists, PROPOSERS)]
    if any("has_own_embed_tokens" in _texts(module) for module in modules):
        return True, "compared"
    for module in modules:
        if any("shares the same lm_head" in text for text in syntax.strings(module)):
            return False, "by-shape"
    return False, "kept"


def _texts(module: ast.Module) -> set[str]:
    return set(syntax.strings(module))


def image_token_places(sources: Sources) -> tuple[dict[str, str], str | None]:
    """Where the proposer reads a multimodal target's image token: by class, and for the others."""
    named: dict[str, str] = {}
    fallback = None
    for path in filter(sources.exists, PROPOSERS):
        module = sources.module(path)
        named.update(image_tokens(module))
        tested = set(named.values())
        for value in _copied(module):
            if value not in tested:
                fallback = value
    return named, fallback


def _copied(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        match node:
            case ast.Assign(targets=[ast.Attribute(attr="image_token_index")], value=value):
                yield ast.unparse(value)
            case _:
                continue


def dual_batch_overlap(sources: Sources) -> str:
    """Whether micro-batches put a tensor and a list of tensors together."""
    if not sources.exists(MICRO_BATCHES):
        return "none"
    joins = joins_lists(sources.module(MICRO_BATCHES))
    return "works" if joins and not _groups_metadata(sources) else "fails"


def joins_lists(module: ast.Module) -> bool:
    """Whether the micro-batch wrapper's methods join by a function that takes lists apart.

    That function knows lists, and calls itself for what is in them.
    """
    apart = [
        function.name
        for function in module.body
        if isinstance(function, ast.FunctionDef)
        and any(syntax.calls(function, function.name))
        and any(syntax.mentions(call, "list") for call in syntax.calls(function, "isinstance"))
    ]
    wrapper = syntax.find_class(module, "UBatchWrapper")
    methods = [syntax.find_method(wrapper, name) for name in JOINING_METHODS]
    return all(
        method is not None
        and not any(syntax.calls(method, "cat"))
        and any(any(syntax.calls(method, name)) for name in apart)
        for method in methods
    )


def _groups_metadata(sources: Sources) -> bool:
    """In 0.11.0 to 0.12.0 every layer of a group gets the last attention group's metadata."""
    if not sources.exists(RUNNER):
        return False
    return any(
        isinstance(node, ast.For)
        and isinstance(node.iter, ast.Attribute)
        and node.iter.attr == "layer_names"
        and syntax.last_name(node.iter.value).startswith("kv_cache_group")
        and syntax.mentions(node, "ubid")
        for node in ast.walk(sources.module(RUNNER))
    )
