"""Conditions under which a model that is ready still does not work, read from the source.

Each reader answers from the installed files, never from a version number, so a limit goes away
when a patch or a newer vLLM takes its cause away.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from vllm_eagle3_patch.patches._discovery import all_patches
from vllm_eagle3_patch.vllm_source import platforms, syntax
from vllm_eagle3_patch.vllm_source.paths import (
    CUDA,
    DEEPSEEK,
    NEWER_LOADER,
    PROPOSERS,
    RUNNER,
    WHOLE_CONFIG,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm_eagle3_patch.codemod.patch import Patch
    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.vllm_source.sources import Sources


EVIDENCE = (DEEPSEEK, CUDA, RUNNER, WHOLE_CONFIG, *PROPOSERS, NEWER_LOADER)
"""The files that the readers below read, beside those that patches change."""


def limits_of(sources: Sources, model: FamilyModel) -> tuple[str, ...]:
    """The codes of the limits that hold for a model in an installation."""
    return tuple(code for code, holds in _READERS.items() if holds(sources, model))


def _patch(name: str) -> Patch:
    (patch,) = (patch for patch in all_patches() if patch.name == name)
    return patch


def _backbones(sources: Sources, model: FamilyModel) -> Iterator[tuple[str, str, str]]:
    """The files that a model's layers may come from, with their model and layer classes."""
    own = platforms.platform_files(sources, model.architecture)
    for path in own:
        yield path, platforms.MODEL, platforms.LAYER
    if not own:
        yield DEEPSEEK, "DeepseekV2Model", "DeepseekV2DecoderLayer"


def _forward(sources: Sources, path: str, name: str) -> ast.AST:
    owner = syntax.find_class(sources.module(path), name)
    return syntax.find_method(owner, "forward") or ast.Pass()


def _pipeline_parallel(sources: Sources, model: FamilyModel) -> bool:
    """A stage that is not the last hands on hidden states and residual only."""
    handed_on = [
        call.args[0]
        for path, name, _ in _backbones(sources, model)
        for call in syntax.calls(_forward(sources, path, name), "IntermediateTensors")
        if call.args
    ]
    return any(
        isinstance(tensors, ast.Dict)
        and set(syntax.strings(tensors)) <= {"hidden_states", "residual"}
        for tensors in handed_on
    )


def _platform(sources: Sources, model: FamilyModel) -> bool:
    """The layers leave their sum over ranks to the next norm; what is kept before is one rank's."""
    return any(
        syntax.mentions(_forward(sources, path, layer), "fused_allreduce_rms_norm")
        and not any(
            syntax.mentions(loop, "tensor_model_parallel_all_reduce")
            for loop in ast.walk(_forward(sources, path, name))
            if isinstance(loop, ast.For)
        )
        for path, name, layer in _backbones(sources, model)
    )


def _dual_batch_overlap(sources: Sources, model: FamilyModel) -> bool:
    """``torch.cat`` meets a tuple of a tensor and a list, or metadata is not the layers' own.

    In 0.11.0 to 0.12.0 every layer of a KV cache group gets the metadata of the group's last
    attention group when a batch is split (gpu_model_runner.py, _prepare_inputs).
    """
    patch = _patch("dual-batch-overlap")
    if not patch.paths(sources):
        return False
    return patch.missing(sources, model) or any(
        isinstance(node, ast.For)
        and isinstance(node.iter, ast.Attribute)
        and node.iter.attr == "layer_names"
        and syntax.last_name(node.iter.value).startswith("kv_cache_group")
        and syntax.mentions(node, "ubid")
        for node in ast.walk(sources.module(RUNNER) if sources.exists(RUNNER) else ast.Pass())
    )


def _forced_mla_backend(sources: Sources, model: FamilyModel) -> bool:
    """A draft model is built with its target's backend by the runner that vLLM would take."""
    return _patch("draft-attention-backend").missing(sources, model) and any(
        _hands_backend_on(sources.module(path)) for path in _draft_loaders(sources, model)
    )


def _draft_loaders(sources: Sources, model: FamilyModel) -> Iterator[str]:
    """The files that build draft models: the V1 runner's, and the newer one's if it is used.

    Where the newer runner is the default the other still takes over for what that one cannot do.
    """
    yield from filter(sources.exists, PROPOSERS)
    if _newer_runner_is_default(sources, model) and sources.exists(NEWER_LOADER):
        yield NEWER_LOADER


def _newer_runner_is_default(sources: Sources, model: FamilyModel) -> bool:
    """Never up to 0.21.0, for some architectures up to 0.28.0, then for all."""
    if not sources.exists(WHOLE_CONFIG):
        return False
    module = sources.module(WHOLE_CONFIG)
    chooses = syntax.find_function(module, "use_v2_model_runner")
    if chooses is None:
        return False
    return not syntax.mentions(chooses, "_is_default_v2_model_runner_model") or any(
        model.architecture in syntax.strings(node.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Assign)
        and syntax.last_name(node.targets[0]) == "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"
    )


def _hands_backend_on(module: ast.Module) -> bool:
    """A file builds a model, and nothing but an option (below an ``if``) replaces the backend."""
    replaced = any(
        isinstance(node, ast.keyword) and node.arg == "backend"
        for function in ast.walk(module)
        if isinstance(function, syntax.FunctionNode)
        for statement in function.body
        if not isinstance(statement, ast.If)
        for node in ast.walk(statement)
    )
    return any(True for _ in syntax.calls(module, "get_model")) and not replaced


def _blackwell(sources: Sources, model: FamilyModel) -> bool:
    """vLLM assigns an MLA backend itself, but not for sparse (DSA) models.

    CUTLASS_MLA has blocks of 128 tokens only, and FlashInfer, which a draft model chooses on
    Blackwell, of 64 at most: "No common block size" (select_common_block_size, 0.11.1 on).
    """
    concerned = ("draft-attention-backend", "draft-attention-metadata")
    if model.sparse or not any(_patch(name).paths(sources) for name in concerned):
        return False
    update = syntax.find_function(sources.module(CUDA), "check_and_update_config")
    names = {
        name
        for node in ast.walk(update or ast.Pass())
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and node.targets[0].attr in ("backend", "VLLM_ATTENTION_BACKEND")
        for name in (*syntax.strings(node.value), syntax.last_name(node.value))
        if name.endswith("_MLA")
    }
    return "CUTLASS_MLA" in names or (bool(names) and _forced_mla_backend(sources, model))


def _nested_layer_ids(sources: Sources, _: FamilyModel) -> bool:
    """Neither the runner's reader of layer ids nor the config it asks looks into eagle_config."""
    if not sources.exists(RUNNER):
        return True
    patch = _patch("aux-layer-ids")
    paths = patch.paths(sources)
    if paths and all(patch.holds(sources.module(path), path=path) for path in paths):
        return False
    reader = syntax.find_function(sources.module(RUNNER), "_get_eagle3_aux_layers_from_config")
    code = reader.body[syntax.has_docstring(reader) :] if reader else []
    return not any("eagle_config" in text for part in code for text in syntax.strings(part))


def _float16(sources: Sources, model: FamilyModel) -> bool:
    """The decoder layer scales its residual stream in float16."""
    return any(
        syntax.mentions(forward, "float16") and syntax.mentions(forward, "routed_scaling_factor")
        for path, _, layer in _backbones(sources, model)
        for forward in (_forward(sources, path, layer),)
    )


_READERS: dict[str, Callable[[Sources, FamilyModel], bool]] = {
    "pipeline-parallel": _pipeline_parallel,
    "dual-batch-overlap": _dual_batch_overlap,
    "forced-mla-backend": _forced_mla_backend,
    "blackwell": _blackwell,
    "nested-layer-ids": _nested_layer_ids,
    "float16": _float16,
    "platform": _platform,
}
