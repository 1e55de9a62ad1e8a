"""Conditions under which a model that is ready still does not work, read from the source.

Each reader answers from the installed files, never from a version number, so a limit goes away
when a patch or a newer vLLM takes its cause away.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from vllm_eagle3_patch import reading

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_eagle3_patch.family import FamilyModel
    from vllm_eagle3_patch.sources import Sources

DEEPSEEK = "vllm/model_executor/models/deepseek_v2.py"
UBATCH = "vllm/v1/worker/gpu_ubatch_wrapper.py"
SPECULATIVE = "vllm/config/speculative.py"
CUDA = "vllm/platforms/cuda.py"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"

EVIDENCE = (DEEPSEEK, UBATCH, SPECULATIVE, CUDA, RUNNER)
"""The files that the readers below read."""


def limits_of(sources: Sources, model: FamilyModel) -> tuple[str, ...]:
    """The codes of the limits that hold for a model in an installation."""
    return tuple(code for code, holds in _READERS.items() if holds(sources, model))


def _pipeline_parallel(sources: Sources, _: FamilyModel) -> bool:
    """A stage that is not the last hands on hidden states and residual only."""
    model = reading.find_class(sources.module(DEEPSEEK), "DeepseekV2Model")
    forward = reading.find_method(model, "forward")
    handed_on = [
        call.args[0]
        for call in reading.calls(forward or ast.Pass(), "IntermediateTensors")
        if call.args
    ]
    return any(
        isinstance(tensors, ast.Dict)
        and set(reading.strings(tensors)) <= {"hidden_states", "residual"}
        for tensors in handed_on
    )


def _dual_batch_overlap(sources: Sources, _: FamilyModel) -> bool:
    """``torch.cat`` meets a tuple of a tensor and a list: only code that knows lists copes."""
    if not sources.exists(UBATCH):
        return False
    module = sources.module(UBATCH)
    knows_lists = any(
        "result" in ast.unparse(call.args[0]) and reading.mentions(call.args[1], "list")
        for call in reading.calls(module, "isinstance")
    )
    return any(True for _ in reading.calls(module, "cat")) and not knows_lists


def _forced_mla_backend(sources: Sources, _: FamilyModel) -> bool:
    """The draft model has no attention backend option of its own, and inherits the target's."""
    if not sources.exists(SPECULATIVE):
        return True
    config = reading.find_class(sources.module(SPECULATIVE), "SpeculativeConfig")
    return config is None or not any(
        isinstance(node, ast.AnnAssign) and reading.last_name(node.target) == "attention_backend"
        for node in config.body
    )


def _blackwell(sources: Sources, model: FamilyModel) -> bool:
    """vLLM assigns an MLA backend itself, but not for sparse (DSA) models."""
    if model.sparse or not sources.exists(CUDA) or not _forced_mla_backend(sources, model):
        return False
    update = reading.find_function(sources.module(CUDA), "check_and_update_config")
    return any(
        reading.last_name(node.targets[0]) in ("backend", "VLLM_ATTENTION_BACKEND")
        and isinstance(node.targets[0], ast.Attribute)
        and _names_mla_backend(node.value)
        for node in ast.walk(update or ast.Pass())
        if isinstance(node, ast.Assign)
    )


def _names_mla_backend(value: ast.expr) -> bool:
    names = [*reading.strings(value), reading.last_name(value)]
    return any(name.endswith("_MLA") for name in names)


def _nested_layer_ids(sources: Sources, _: FamilyModel) -> bool:
    """The runner's reader of layer ids never looks into ``eagle_config``."""
    if not sources.exists(RUNNER):
        return True
    reader = reading.find_function(sources.module(RUNNER), "_get_eagle3_aux_layers_from_config")
    code = reader.body[reading.has_docstring(reader) :] if reader else []
    return not any("eagle_config" in text for part in code for text in reading.strings(part))


def _float16(sources: Sources, _: FamilyModel) -> bool:
    """The decoder layer scales its residual stream in float16."""
    layer = reading.find_class(sources.module(DEEPSEEK), "DeepseekV2DecoderLayer")
    forward = reading.find_method(layer, "forward")
    return forward is not None and all(
        reading.mentions(forward, name) for name in ("float16", "routed_scaling_factor")
    )


_READERS: dict[str, Callable[[Sources, FamilyModel], bool]] = {
    "pipeline-parallel": _pipeline_parallel,
    "dual-batch-overlap": _dual_batch_overlap,
    "forced-mla-backend": _forced_mla_backend,
    "blackwell": _blackwell,
    "nested-layer-ids": _nested_layer_ids,
    "float16": _float16,
}
