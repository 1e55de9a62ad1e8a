"""The statements of a model's forward that patches know, and those that collect.

A codemod inserts statements between others; what these others do decides whether the states are
right. So a forward may hold only what is listed in docs/add-a-patch.md, in that order: the forwards
of vLLM 0.8.5 to 0.33.0 do (vllm/model_executor/models/deepseek_v2.py and
vllm/models/deepseek_v32/{nvidia,amd}/model.py), and anything else is refused by name.
"""

from __future__ import annotations

import ast
import itertools
from typing import TYPE_CHECKING

from vllm_eagle3_patch.vllm_source import syntax

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Shape = Callable[[ast.AST], bool]

IDS = "aux_hidden_state_layers"
STATES = "aux_hidden_states"
ISLICE = "islice(self.layers, self.start_layer, self.end_layer)"
SLICE = "self.layers[self.start_layer:self.end_layer]"
NUMBERED = tuple(f"enumerate({layers}, start=self.start_layer)" for layers in (ISLICE, SLICE))

STREAM = ("hidden_states + residual", "residual + hidden_states")
SUMMED = ("tensor_model_parallel_all_reduce(hidden_states) + residual",)
NO_RESIDUAL = "residual is None"
EMBEDDING = ("hidden_states", "hidden_states.clone()")
ENTERING = (*STREAM, *(f"{e} if {NO_RESIDUAL} else {s}" for e in EMBEDDING for s in STREAM))
COLLECTED = (STATES, f"len({STATES}) > 0")


def text(node: ast.AST) -> str:
    """A node in one layout, whatever its own."""
    return ast.unparse(node)


def blocks(function: syntax.FunctionNode) -> list[list[ast.stmt]]:
    """The statements of a function, and those directly in a ``with`` of it."""
    inner = [node.body for node in function.body if isinstance(node, ast.With)]
    return [function.body, *inner]


# What each statement may be. A test of these is of one statement and says nothing of its place.


def prepares(node: ast.AST) -> bool:
    """A statement before the loop: it gives names their values, and cannot leave the forward."""
    if isinstance(node, ast.If):
        return all(map(prepares, (*node.body, *node.orelse)))
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [text(part) for target in targets for part in _parts(target)]
        collected = STATES not in names or text(node) == f"{STATES} = []"
        return collected and not any(name.startswith("self.") for name in names)
    return isinstance(node, ast.Assert | ast.Raise | ast.Expr | ast.Pass)


def _parts(target: ast.expr) -> Sequence[ast.expr]:
    return target.elts if isinstance(target, ast.Tuple) else (target,)


def calls_layer(node: ast.AST) -> bool:
    """``hidden_states, residual = layer(..., hidden_states, residual, ...)``."""
    return _passes_on(node, "hidden_states, residual", "layer")


def normalizes(node: ast.AST) -> bool:
    """``hidden_states, _ = self.norm(hidden_states, residual)``, or the norm that sums."""
    return any(
        _passes_on(node, "hidden_states, _", norm)
        for norm in ("self.norm", "fused_allreduce_rms_norm")
    )


def _passes_on(node: ast.AST, targets: str, function: str) -> bool:
    match node:
        case ast.Assign(targets=[target], value=ast.Call(func=func, args=args, keywords=more)):
            given = [text(argument) for argument in args]
            named = {keyword.arg: text(keyword.value) for keyword in more}
            pairs = [*itertools.pairwise(given)]
            return (
                text(target).strip("()") == targets
                and text(func) == function
                and ("hidden_states", "residual")
                in (*pairs, (named.get("hidden_states"), named.get("residual")))
            )
    return False


def asks(node: ast.AST) -> ast.If | None:
    """``if <id> in self.aux_hidden_state_layers:`` without an ``else``."""
    match node:
        case ast.If(
            test=ast.Compare(left=ast.Name() | ast.Attribute(), ops=[ast.In()], comparators=[ids]),
            orelse=[],
        ) if syntax.last_name(ids) == IDS:
            return node
    return None


def keeps(node: ast.AST) -> bool:
    """It asks for an id, and if it is there appends the stream once, whole."""
    asked = asks(node)
    return asked is not None and _appends_stream(asked.body)


def _appends_stream(statements: Sequence[ast.stmt]) -> bool:
    *before, last = statements
    match last:
        case ast.Expr(value=ast.Call(func=func, args=[ast.Name(id=name)], keywords=[])) if before:
            return text(func) == f"{STATES}.append" and all(_sets(s, name) for s in before)
        case ast.Expr(value=ast.Call(func=func, args=[state], keywords=[])):
            appended = text(func) == f"{STATES}.append"
            return not before and appended and text(state) in (*ENTERING, *SUMMED)
        case ast.If(test=test, body=[first], orelse=others) if others and not before:
            return (
                text(test) == NO_RESIDUAL
                and any(text(first) == f"{STATES}.append({e})" for e in EMBEDDING)
                and _appends_stream(others)
            )
    return False


def _sets(node: ast.AST, name: str) -> bool:
    """It gives a name the stream, by cases or not, or gathers what the name holds."""
    match node:
        case ast.Assign(targets=[ast.Name(id=target)], value=value):
            return target == name and text(value) in (*ENTERING, *SUMMED)
        case ast.If(test=test, body=[first], orelse=others) if text(test) == NO_RESIDUAL:
            embedded = any(text(first) == f"{name} = {e}" for e in EMBEDDING)
            return embedded and bool(others) and all(_sets(other, name) for other in others)
        case ast.If(body=body, orelse=[other]):
            return all(_sets(inner, name) for inner in (*body, other))
        case ast.If(orelse=[]):
            return _gathers(node, name)
    return False


def gathers(node: ast.AST) -> bool:
    """Where states are split over ranks, it puts them together: nothing else is assigned."""
    return _gathers(node, "hidden_states")


def _gathers(node: ast.AST, name: str) -> bool:
    if not isinstance(node, ast.If) or node.orelse:
        return False
    tests = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
    return text(tests[0]).startswith(f"{name}.shape[0] != ") and all(map(_renames, node.body))


def _renames(node: ast.AST) -> bool:
    """It assigns to plain names."""
    return isinstance(node, ast.Assign) and all(
        isinstance(part, ast.Name | ast.Starred) for t in node.targets for part in _parts(t)
    )


def forgets(node: ast.AST) -> bool:
    """``<name> = None``, of no name that the patches rely on."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant()):
            return name not in ("hidden_states", "residual", "layer", STATES)
    return False


def leaves_stage(node: ast.AST) -> bool:
    """An earlier pipeline stage returns its intermediate tensors."""
    match node:
        case ast.If(
            test=ast.UnaryOp(op=ast.Not(), operand=last),
            body=[*checks, ast.Return(value=ast.Call(func=func))],
            orelse=[],
        ):
            return (
                text(last) == "get_pp_group().is_last_rank"
                and text(func) == "IntermediateTensors"
                and all(isinstance(check, ast.Assert) for check in checks)
            )
    return False


def returns_both(node: ast.AST) -> bool:
    """``if aux_hidden_states: return hidden_states, aux_hidden_states``."""
    match node:
        case ast.If(test=test, body=[ast.Return(value=ast.Tuple(elts=[states, collected]))]):
            returned = (text(states), text(collected))
            return (
                returned == ("hidden_states", STATES)
                and text(test) in COLLECTED
                and not node.orelse
            )
    return False


def returns_states(node: ast.AST) -> bool:
    """``return hidden_states``."""
    return isinstance(node, ast.Return) and text(node) == "return hidden_states"


def loops(node: ast.AST) -> bool:
    """A loop without an ``else``; what it goes through is an anchor."""
    return isinstance(node, ast.For) and not node.orelse


def normalizes_either(node: ast.AST) -> bool:
    """One norm for states split over ranks, and one for the others."""
    return isinstance(node, ast.If) and bool(node.orelse) and _has_norm(node)


def _has_norm(node: ast.If) -> bool:
    return all(any(map(normalizes, branch)) for branch in (node.body, node.orelse))


def gathers_both(node: ast.AST) -> bool:
    """After the norm of states split over ranks: all of them are put together at once."""
    return isinstance(node, ast.If) and text(node.test) == STATES and _gathers_all(node)


def _gathers_all(node: ast.If) -> bool:
    last = node.body[-1]
    both = isinstance(last, ast.Assign) and text(last.targets[0]).strip("()")
    return both == f"hidden_states, *{STATES}" and all(map(_renames, (*node.body, *node.orelse)))


FORWARD: tuple[Shape, ...] = (
    prepares,
    loops,
    leaves_stage,
    gathers,
    keeps,
    lambda node: normalizes(node) or normalizes_either(node),
    returns_both,
    returns_states,
)
LOOP: tuple[Shape, ...] = (gathers, keeps, calls_layer, forgets)
SPLIT_NORM: tuple[Shape, ...] = (
    lambda node: (
        _renames(node) and text(node).startswith(("hidden_states, r", "(hidden_states, r"))
    ),
    normalizes,
    gathers_both,
)


REPEATED = (prepares, forgets)


def unknown_statement(forward: syntax.FunctionNode) -> ast.AST | None:
    """The first statement of an inner model's forward that no patch knows, or not in that place."""
    return next(_unknown(forward), None)


def _unknown(forward: syntax.FunctionNode) -> Iterator[ast.AST]:
    yield from _odd(forward)
    yield from _out_of_place(_without_with(forward.body), FORWARD)
    yield from (last for last in forward.body[-1:] if not returns_states(last))
    for block in blocks(forward):
        for node in block:
            if isinstance(node, ast.For):
                yield from _out_of_place(node.body, LOOP)
            elif isinstance(node, ast.If) and normalizes_either(node):
                yield from _out_of_place(node.body, SPLIT_NORM)
                yield from _out_of_place(node.orelse, (normalizes,))


def _odd(function: syntax.FunctionNode) -> Iterator[ast.AST]:
    """What no statement may hold: a name bound within an expression, a decorator, a pause."""
    yield from function.decorator_list
    odd = ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom
    yield from (node for node in ast.walk(function) if isinstance(node, odd))


def _without_with(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements with those of a ``with`` around a loop in its place."""
    for node in statements:
        around = isinstance(node, ast.With) and any(isinstance(s, ast.For) for s in node.body)
        if isinstance(node, ast.With) and around and all(not i.optional_vars for i in node.items):
            yield from node.body
        else:
            yield node


def _out_of_place(statements: Iterable[ast.stmt], shapes: Sequence[Shape]) -> Iterator[ast.AST]:
    """The statements that are of none of the shapes that may come there."""
    place = 0
    for node in statements:
        found = [i for i in range(place, len(shapes)) if shapes[i](node)]
        if found:
            place = found[0] + (shapes[found[0]] not in REPEATED)
        else:
            leaving = ast.Return | ast.Break | ast.Continue
            yield next((part for part in ast.walk(node) if isinstance(part, leaving)), node)


def unknown_in_outer(forward: syntax.FunctionNode) -> ast.AST | None:
    """The first statement that may come between what an inner model returns and the caller.

    What was a tensor becomes a pair: it may be given a name and returned, and nothing else.
    """
    *before, last = forward.body
    if isinstance(last, ast.Return) and isinstance(last.value, ast.Name) and before:
        *before, assignment = before
        if not (
            isinstance(assignment, ast.Assign) and text(assignment.targets[0]) == last.value.id
        ):
            return assignment
        returned: ast.expr | None = assignment.value
    else:
        returned = last.value if isinstance(last, ast.Return) else None
    inner = text(returned.func) if isinstance(returned, ast.Call) else ""
    if inner not in ("self.model", "self.language_model", "self.language_model.model"):
        return last if returned is None else returned
    return next(iter((*_odd(forward), *_out_of_place(before, (prepares,)))), None)


# Whether a forward collects, whoever wrote it.


def collects(forward: syntax.FunctionNode | None) -> bool:
    """Whether a forward keeps what enters each layer, under the layer's number, and returns it."""
    return (
        forward is not None
        and any(map(returns_both, forward.body))
        and any(
            _collects_in(node, [*forward.body, *block])
            for block in blocks(forward)
            for node in block
            if isinstance(node, ast.For)
        )
    )


def _collects_in(loop: ast.For, around: Sequence[ast.stmt]) -> bool:
    """The stream is kept right before the layer runs; only a counter may come between."""
    kept = [i for i, node in enumerate(loop.body) if keeps(node)]
    if len(kept) != 1:
        return False
    asked = loop.body[kept[0]]
    assert isinstance(asked, ast.If)
    assert isinstance(asked.test, ast.Compare)
    number = text(asked.test.left)
    following = loop.body[kept[0] + 1 :]
    counts = [node for node in following if text(node) == f"{number} += 1"]
    runs = [node for node in following if node not in counts][:1]
    target = text(loop.target).strip("()")
    if target == "layer":
        numbered = bool(counts) and f"{number} = self.start_layer" in map(text, around)
        numbered = numbered and text(loop.iter) in (ISLICE, SLICE)
    else:
        numbered = target == f"{number}, layer" and not counts and text(loop.iter) in NUMBERED
    return numbered and any(map(calls_layer, runs))
