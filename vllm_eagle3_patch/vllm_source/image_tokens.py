"""Where the proposer looks for a multimodal target's image token, read from its source.

For the classes that ``load_model`` names it reads what the branch says, for all others
``target_model.config.image_token_index``. ``patches/multimodal_image_token.py`` adds branches.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from vllm_eagle3_patch.vllm_source import syntax

if TYPE_CHECKING:
    from collections.abc import Iterator


def image_tokens(module: ast.Module) -> dict[str, str]:
    """What the proposer copies to the draft model's image token, by the class that it tests for."""
    return {
        name: ast.unparse(value)
        for test, value in _branches_in(module)
        for name in _classes(test) or ()
    }


def mentions_of_classes(module: ast.Module) -> set[str]:
    """The classes that such tests name, whatever they ask of them."""
    return {name for test, _ in _branches_in(module) for name in syntax.strings(test)}


def _branches_in(module: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each test under which the image token is copied, and what is copied then."""
    for node in ast.walk(module):
        if not isinstance(node, ast.If):
            continue
        for statement in node.body:
            if (
                isinstance(statement, ast.Assign)
                and syntax.last_name(statement.targets[0]) == "image_token_index"
            ):
                yield node.test, statement.value


def _classes(test: ast.expr) -> tuple[str, ...] | None:
    """The classes for which a test is true; None for a test that may say something else."""
    match test:
        case ast.BoolOp(op=ast.Or(), values=parts):
            found = [_classes(part) for part in parts]
            if None in found:
                return None
            return tuple(name for names in found for name in names or ())
        case ast.Compare(ops=[ast.Eq() | ast.In()]):
            return tuple(syntax.strings(test))
        case _:
            return None
