"""Reading facts from vLLM's source: small questions asked of a parsed module."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def find_class(module: ast.AST, name: str) -> ast.ClassDef | None:
    """The class of this name anywhere in a module."""
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    return None


def find_method(owner: ast.ClassDef | None, name: str) -> FunctionNode | None:
    """A class's own method; inherited ones are not seen."""
    if owner is None:
        return None
    for node in owner.body:
        if isinstance(node, FunctionNode) and node.name == name:
            return node
    return None


def find_function(module: ast.AST, name: str) -> FunctionNode | None:
    """A function or method of this name anywhere in a module."""
    for node in ast.walk(module):
        if isinstance(node, FunctionNode) and node.name == name:
            return node
    return None


def base_names(owner: ast.ClassDef) -> tuple[str, ...]:
    """The last part of each base's name: ``nn.Module`` is ``Module``."""
    return tuple(last_name(base) for base in owner.bases)


def last_name(node: ast.AST) -> str:
    """``c`` for ``a.b.c``, the name itself for a plain name, else an empty string."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def mentions(node: ast.AST, name: str) -> bool:
    """Whether a name or an attribute of this name is used below a node."""
    return any(last_name(child) == name for child in ast.walk(node))


def strings(node: ast.AST) -> Iterator[str]:
    """Every string constant below a node."""
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value


def calls(node: ast.AST, name: str) -> Iterator[ast.Call]:
    """Every call below a node of a function or method with this last name."""
    for child in ast.walk(node):
        if isinstance(child, ast.Call) and last_name(child.func) == name:
            yield child


def appends_to(node: ast.AST, name: str) -> bool:
    """Whether ``name.append(...)`` is called below a node."""
    return any(
        isinstance(call.func, ast.Attribute) and last_name(call.func.value) == name
        for call in calls(node, "append")
    )


def has_docstring(function: FunctionNode) -> bool:
    """Whether the first statement of a function is its docstring."""
    return ast.get_docstring(function, clean=False) is not None


def same(node: ast.AST, source: str) -> bool:
    """Whether an expression is the one written in ``source``, whatever its layout."""
    return ast.dump(node) == ast.dump(ast.parse(source, mode="eval").body)


def binds(module: ast.Module, name: str) -> bool:
    """Whether a module itself imports a name or defines a class of it, under ``if`` or not."""
    return any(
        node.name == name
        if isinstance(node, ast.ClassDef)
        else isinstance(node, ast.Import | ast.ImportFrom)
        and name in {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        for node in within_scope(module)
    )


def within_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """Every node below a module, class or function that is not below one nested in it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, FunctionNode | ast.ClassDef | ast.Lambda):
            yield from within_scope(child)


def assigned(statement: ast.AST) -> tuple[ast.expr, ...]:
    """What a statement gives a value to; an annotation alone gives none."""
    if isinstance(statement, ast.Assign):
        return tuple(statement.targets)
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        return (statement.target,)
    return ()


def replacement(module: ast.Module, names: Collection[str]) -> ast.AST | None:
    """A statement that replaces one of these classes or an attribute of it, anywhere."""
    for node in ast.walk(module):
        for target in assigned(node):
            named = target.value if isinstance(target, ast.Attribute) else target
            if isinstance(named, ast.Name) and named.id in names:
                return node
    for call in calls(module, "setattr"):
        if any(last_name(argument) in names for argument in call.args[:1]):
            return call
    return None


def does_something(function: FunctionNode | None) -> bool:
    """Whether a function is there and more than a docstring, ``pass``, ``...`` or a ``raise``."""
    return function is not None and not all(
        isinstance(statement, ast.Pass | ast.Raise)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for statement in function.body
    )


def returns_something(function: FunctionNode | None) -> bool:
    """Whether a function is there and returns a value somewhere."""
    return function is not None and any(
        isinstance(node, ast.Return) and node.value is not None and not same(node.value, "None")
        for node in within_scope(function)
    )


def implements_eagle3(
    module: ast.Module, owner: ast.ClassDef | None, *, protocol: bool = True
) -> bool:
    """Whether a class of a module has the base ``SupportsEagle3`` and its two methods.

    The base's name must be known in the module. Without the protocol (up to 0.10.0) the methods
    alone count. Methods that do nothing, or return nothing where ids are asked for, do not.

    The second is ``get_eagle3_aux_hidden_state_layers`` up to 0.17.1; from 0.18.0 on
    ``get_eagle3_default_aux_hidden_state_layers`` in the protocol, where some models keep the
    older name (vllm/model_executor/models/deepseek_v2.py, 0.33.0).
    """
    if owner is None or (protocol and not _has_protocol(module, owner)):
        return False
    defaults = ("get_eagle3_aux_hidden_state_layers", "get_eagle3_default_aux_hidden_state_layers")
    return does_something(find_method(owner, "set_aux_hidden_state_layers")) and any(
        returns_something(find_method(owner, name)) for name in defaults
    )


def _has_protocol(module: ast.Module, owner: ast.ClassDef) -> bool:
    return any(
        last_name(base) == "SupportsEagle3" and binds(module, ast.unparse(base).partition(".")[0])
        for base in owner.bases
    )
