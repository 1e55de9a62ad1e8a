"""Which attention backend a draft model gets, read from vLLM's source."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from vllm_eagle3_patch.vllm_source import syntax
from vllm_eagle3_patch.vllm_source.paths import ATTENTION_SELECTORS, CUDA, PROPOSERS

if TYPE_CHECKING:
    from vllm_eagle3_patch.vllm_source.sources import Sources


def hands_backend_on(module: ast.Module) -> bool:
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


def inherits_backend(sources: Sources) -> bool:
    """Whether the V1 runner builds a draft model with its target's attention backend."""
    return any(hands_backend_on(sources.module(p)) for p in filter(sources.exists, PROPOSERS))


def own_backend(sources: Sources) -> bool:
    """Whether the selector asks if a draft model has MLA (the patch draft-attention-backend)."""
    return refuses_backend(sources) and any(
        keeps_mla_from_others(sources.module(path))
        for path in filter(sources.exists, ATTENTION_SELECTORS)
    )


def keeps_mla_from_others(module: ast.Module) -> bool:
    """What is set reaches a layer only through a function that asks whether it has MLA."""
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    readers = [node for node in functions if _is_told_mla(node)]
    reads = [node for reader in readers for node in ast.walk(reader) if _is_read(node)]
    decided = [
        argument
        for function in functions
        if _decides(function)
        for reader in readers
        for call in syntax.calls(reader, function.name)
        for argument in call.args
        if any(syntax.last_name(other) == "use_mla" for other in call.args)
    ]
    return bool(reads) and all(read in decided for read in reads)


def _is_told_mla(function: ast.FunctionDef) -> bool:
    return any(argument.arg == "use_mla" for argument in function.args.args)


def _is_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and (
        syntax.same(node, "envs.VLLM_ATTENTION_BACKEND")
        or (node.attr == "backend" and syntax.last_name(node.value) == "attention_config")
    )


def _decides(function: ast.FunctionDef) -> bool:
    """Whether it asks for MLA, the layer's and the target's, and then returns another backend."""
    return syntax.mentions(function, "use_mla") and any(
        isinstance(node, ast.Return)
        and node.value is not None
        and syntax.last_name(node.value) != function.args.args[0].arg
        for node in ast.walk(function)
    )


def refuses_backend(sources: Sources) -> bool:
    """Whether a layer that cannot use the backend that is set fails (0.11.1 on), or takes another.

    Up to 0.11.0 such a layer silently took another (get_attn_backend_cls of platforms/cuda.py).
    """
    return b"Selected backend {selected_backend} is not valid" in (sources.read(CUDA) or b"")


def forced_backends(sources: Sources) -> tuple[str, ...]:
    """MLA backends that vLLM itself sets on Blackwell (check_and_update_config, up to 0.17.1)."""
    if not sources.exists(CUDA):
        return ()
    update = syntax.find_function(sources.module(CUDA), "check_and_update_config")
    return tuple(
        sorted(
            {
                name
                for node in ast.walk(update or ast.Pass())
                if isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Attribute)
                and node.targets[0].attr in ("backend", "VLLM_ATTENTION_BACKEND")
                for name in (*syntax.strings(node.value), syntax.last_name(node.value))
                if name in ("CUTLASS_MLA", "FLASHINFER_MLA")
            }
        )
    )
