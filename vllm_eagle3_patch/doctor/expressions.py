"""Small expressions of vLLM's source, evaluated without running any of it.

The rule that renames a draft model's architecture and the layers that a target model names by
default are single expressions of strings, integers and one variable (EAGLEConfig in
vllm/transformers_utils/configs/eagle.py; get_eagle3_*_aux_hidden_state_layers of the models).
"""

from __future__ import annotations

import ast
import operator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Value = str | int | bool | None

LONGEST = 2_000
"""Characters. The longest such expression of any release has 160."""

_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_STRING_TESTS: dict[str, Callable[[str, str], bool]] = {
    "startswith": str.startswith,
    "endswith": str.endswith,
}


class NotUnderstoodError(ValueError):
    """An expression that holds more than the few forms that are known."""


def evaluate(source: str, names: Mapping[str, Value]) -> Value:
    """The value of an expression.

    Args:
        source: The expression, as vLLM's source has it.
        names: The values of the names in it.

    Raises:
        NotUnderstoodError: It is not Python, or it holds something that is not known here.
    """
    if len(source) > LONGEST:
        raise NotUnderstoodError(source[:80])
    try:
        return _value(ast.parse(source, mode="eval").body, names)
    except (SyntaxError, ValueError, TypeError, ZeroDivisionError, RecursionError) as error:
        raise NotUnderstoodError(source) from error


def _value(node: ast.expr, names: Mapping[str, Value]) -> Value:
    value: Value
    match node:
        case ast.Constant(value=str() | int() | None as constant):
            value = constant
        case ast.Name(id=name) if name in names:
            value = names[name]
        case ast.IfExp(test=test, body=body, orelse=orelse):
            value = _value(body if _value(test, names) else orelse, names)
        case ast.BoolOp(op=ast.And(), values=parts):
            value = all(_value(part, names) for part in parts)
        case ast.BoolOp(op=ast.Or(), values=parts):
            value = any(_value(part, names) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            value = not _value(operand, names)
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            value = _value(left, names) == _value(right, names)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            value = _ARITHMETIC[type(op)](_integer(left, names), _integer(right, names))
        case ast.JoinedStr(values=parts):
            value = "".join(_text(part, names) for part in parts)
        case ast.Call(func=ast.Attribute(value=owner, attr=name), args=[part], keywords=[]) if (
            name in _STRING_TESTS
        ):
            value = _STRING_TESTS[name](_text(owner, names), _text(part, names))
        case _:
            raise NotUnderstoodError(ast.unparse(node))
    return value


def _integer(node: ast.expr, names: Mapping[str, Value]) -> int:
    value = _value(node, names)
    if not isinstance(value, int):
        raise NotUnderstoodError(ast.unparse(node))
    return value


def _text(node: ast.expr, names: Mapping[str, Value]) -> str:
    if isinstance(node, ast.FormattedValue):
        node = node.value
    value = _value(node, names)
    if not isinstance(value, str):
        raise NotUnderstoodError(ast.unparse(node))
    return value
