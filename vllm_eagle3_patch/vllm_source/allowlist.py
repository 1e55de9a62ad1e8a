"""Which target models vLLM's speculative config admits, read from its source.

Up to 0.21.0 it refuses a target whose ``hf_text_config.model_type`` contains none of a list of
strings; up to 0.10.0 of one string. ``patches/eagle3_allowlist.py`` makes that list longer.
"""

from __future__ import annotations

import ast
import re
from collections import deque
from typing import TYPE_CHECKING

from vllm_eagle3_patch.vllm_source import syntax

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm_eagle3_patch.vllm_source.sources import Sources

# In each release the class SpeculativeConfig is in one of these.
REFUSAL = re.compile(rb"(?:Eagle3|\{self\.method\}) is only supported for ")
# What a config with such a test holds, however it words its refusal.
TEST_PARTS = (b"hf_text_config.model_type", b"eagle3")
CONFIG = "SpeculativeConfig"


def limits_models(sources: Sources, path: str) -> bool:
    """Whether a file says that it refuses a target's model type, or tests it for EAGLE-3."""
    content = sources.read(path) or b""
    if REFUSAL.search(content):
        return True
    return all(part in content for part in TEST_PARTS) and bool(allowlists(sources.module(path)))


def allowlists(module: ast.Module) -> list[tuple[str, ...]]:
    """The strings that a target's model type must contain one of, for each test of that."""
    found = []
    for node, scopes in _with_scopes(module):
        match node:
            case ast.UnaryOp(
                op=ast.Not(),
                operand=ast.Call(
                    func=ast.Name(id="any"),
                    args=[
                        ast.GeneratorExp(
                            elt=ast.Compare(
                                ops=[ast.In()], comparators=[ast.Attribute(attr="model_type")]
                            ),
                            generators=[ast.comprehension(iter=ast.Name(id=name))],
                        )
                    ],
                ),
            ):
                found.append(_assigned(scopes, name))
            case ast.If(test=test):
                needed = tuple(filter(None, map(_needed, _all_of(test))))
                if needed:
                    found.append(needed)
            case _:
                continue
    return found


def _all_of(test: ast.expr) -> list[ast.expr]:
    """The parts of ``a and b and c``."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return test.values
    return [test]


def _needed(test: ast.expr) -> str | None:
    """The one string that a test wants in a model type: up to 0.10.0 there is no list."""
    match test:
        case ast.Compare(
            left=ast.Constant(value=str(string)),
            ops=[ast.NotIn()],
            comparators=[
                ast.Attribute(value=ast.Attribute(attr="hf_text_config"), attr="model_type")
            ],
        ):
            return string
        case _:
            return None


def _with_scopes(module: ast.Module) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Every node of a module, with the scopes that names in it are looked up in, nearest first."""
    waiting: deque[tuple[ast.AST, tuple[ast.AST, ...]]] = deque([(module, ())])
    while waiting:
        node, scopes = waiting.popleft()
        yield node, scopes
        if isinstance(node, ast.Module | ast.ClassDef | syntax.FunctionNode):
            # A class's names are not seen from its methods.
            scopes = (node, *(scope for scope in scopes if not isinstance(scope, ast.ClassDef)))
        waiting.extend((child, scopes) for child in ast.iter_child_nodes(node))


def _assigned(scopes: Sequence[ast.AST], name: str) -> tuple[str, ...]:
    """The strings assigned to a name in the nearest scope that does; none if it does so twice."""
    for scope in scopes:
        values = [
            node.value
            for node in syntax.within_scope(scope)
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            if any(isinstance(t, ast.Name) and t.id == name for t in syntax.assigned(node))
        ]
        if values:
            return tuple(syntax.strings(values[0])) if len(values) == 1 else ()
    return ()
