"""``aux-layer-bounds``: vLLM's own collecting gets every layer id right, and refuses the others.

vLLM collects aux hidden states itself from 0.18.0 on (pull request 36361): ``DeepseekV2Model`` in
vllm/model_executor/models/deepseek_v2.py, and ``DeepseekV32Model`` in
vllm/models/deepseek_v32/{nvidia,amd}/model.py. Both have gaps that ``deepseek-v2`` does not have:

* Id 0 raises a TypeError; ``DeepseekV32Model`` for NVIDIA returns from 0.28.0 on a buffer that
  later kernels write. It has to be copied.
* Id ``n``, the final stream, is dropped without a word. ``DeepseekV2Model`` keeps it from 0.25.0
  on (pull request 46973), ``DeepseekV32Model`` never does.
* Any id is accepted, and for one that is never reached the draft model is given too few states.
* A model that sets up itself has no ids at all: ``EagleMistralLarge3Model`` in 0.18.0 and 0.18.1
  (vLLM mended that in mistral_large_3_eagle.py, 0.19.0).
* ``DeepseekV32Model`` leaves summing a layer's output over tensor-parallel ranks to the norm of
  the next layer (``fused_allreduce_rms_norm``), so what it keeps before that is one rank's part.
  Sequence-parallel states are whole, and gathered where the file does so.

Ids are only ever set where a pipeline ends: the V1 runner collects on its last rank alone, and the
one under vllm/v1/worker/gpu refuses these models with pipeline parallelism. An id of an earlier
stage is refused there; as published such a server starts, and its first step fails.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, ClassVar

import libcst as cst
from libcst import matchers as m

from vllm_eagle3_patch.codemod.anchored import AnchoredCodemod, assigns, matching, self_attribute
from vllm_eagle3_patch.codemod.nodes import find_all
from vllm_eagle3_patch.codemod.patch import Patch
from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.patches._forward import IDS, collects, unknown_statement
from vllm_eagle3_patch.patches.deepseek_v2 import (
    CLASS_DEFAULT,
    COLLECT,
    COLLECT_LAST,
    LAST_NORM,
    LAYER_CALL,
    LAYER_LOOP,
    MODEL,
    MODEL_METHODS,
    OUTER,
    open_statements,
)
from vllm_eagle3_patch.vllm_source import syntax
from vllm_eagle3_patch.vllm_source.paths import DEEPSEEK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.vllm_source.sources import Sources

    Either = m.OneOf[m.BaseExpressionMatchType]

V32 = "vllm/models/deepseek_v32/{platform}/model.py"
PATHS = (DEEPSEEK, V32.format(platform="nvidia"), V32.format(platform="amd"))
MODELS = (MODEL, "DeepseekV32Model")
SETTER = "set_aux_hidden_state_layers"
DEFAULT = "get_eagle3_aux_hidden_state_layers"
# What the runners call from 0.18.0 on; the protocol's own version checks nothing.
RUNNERS_DEFAULT = "get_eagle3_default_aux_hidden_state_layers"
SUM_OVER_RANKS = "tensor_model_parallel_all_reduce"

# A class derived from the outer one may hold an inner model without the checks.
DELEGATE_SETTER = f"""
if hasattr(self.model, "{SETTER}"):
    self.model.{SETTER}(layers)
    return
"""
DELEGATE_DEFAULT = f"""
if hasattr(self.model, "{DEFAULT}"):
    return self.model.{DEFAULT}()
"""
OUTER_METHODS = f"""
def {RUNNERS_DEFAULT}(self) -> tuple[int, ...]:
    return self.{DEFAULT}()
"""

_, KEEP = COLLECT.split(":\n", 1)
KEEP_UNGATHERED = KEEP.replace("aux_hidden_states.append(", "aux_hidden_state = (")
KEEP_SUMMED = f"""
if residual is None:
    aux_hidden_state = hidden_states.clone()
elif sharded:
    aux_hidden_state = hidden_states + residual
else:
    # Each rank holds a part: sum them as the next norm will.
    aux_hidden_state = {SUM_OVER_RANKS}(hidden_states) + residual
"""
SHARDED_BRANCH = "elif sharded:\n    aux_hidden_state = hidden_states + residual\n"
APPEND = "aux_hidden_states.append(aux_hidden_state)\n"
COLLECT_LAST_SUMMED = f"""
if self.end_layer in self.{IDS}:
    # Each rank holds a part: sum them as the norm will.
    aux_hidden_states.append(
        {SUM_OVER_RANKS}(hidden_states) + residual
    )
"""


def _sets(target: m.Name | m.Attribute) -> m.SimpleStatementLine:
    """A matcher for the statement ``<target> = ...``, annotated or not."""
    plain = m.Assign(targets=[m.AssignTarget(target)])
    return m.SimpleStatementLine(body=[plain | m.AnnAssign(target=target)])


def _parameters(method: cst.FunctionDef) -> list[cst.CSTNode]:
    return find_all(method.params, m.Param())


def _appends(state: m.BaseExpressionMatchType | Either) -> m.SimpleStatementLine:
    """A matcher for ``aux_hidden_states.append(<state>)``."""
    append = m.Attribute(m.Name("aux_hidden_states"), m.Name("append"))
    return m.SimpleStatementLine(body=[m.Expr(m.Call(func=append, args=[m.Arg(state)]))])


def _asks_for(layer_id: m.BaseExpressionMatchType) -> m.Comparison:
    """A matcher for ``<layer_id> in self.aux_hidden_state_layers``."""
    ids = m.ComparisonTarget(m.In(), comparator=self_attribute(IDS))
    return m.Comparison(left=layer_id, comparisons=[ids])


NUMBERED_LOOP = m.For(
    target=m.Tuple(elements=[m.Element(m.Name()), m.Element(m.Name("layer"))]),
    iter=m.Call(
        func=m.Name("enumerate"),
        args=[
            m.Arg(LAYER_LOOP.iter),
            m.Arg(self_attribute("start_layer"), keyword=m.Name("start")),
        ],
    ),
)
STREAM = m.BinaryOperation(m.Name("hidden_states"), m.Add(), m.Name("residual"))
NO_RESIDUAL = m.Comparison(
    left=m.Name("residual"), comparisons=[m.ComparisonTarget(m.Is(), m.Name("None"))]
)
ENTERING: Either = m.OneOf(
    STREAM, m.IfExp(test=NO_RESIDUAL, body=m.Name("hidden_states"), orelse=STREAM)
)
KEEPS = _appends(ENTERING)
KEEPS_UNGATHERED = m.SimpleStatementLine(
    body=[m.Assign(targets=[m.AssignTarget(m.Name("aux_hidden_state"))], value=ENTERING)]
)
KEEPS_LAST = m.If(
    test=_asks_for(self_attribute("end_layer")),
    body=m.IndentedBlock(body=[_appends(STREAM)]),
    orelse=None,
)
SUMMING_NORM = assigns(
    "hidden_states",
    "_",
    value=m.Call(
        func=m.Name("fused_allreduce_rms_norm"),
        args=[m.Arg(m.Name("hidden_states")), m.Arg(m.Name("residual")), m.Arg()],
    ),
)
SHARDED = self_attribute("use_sequence_parallel") | m.Comparison(
    left=m.Subscript(value=m.Attribute(m.Name("hidden_states"), m.Name("shape"))),
    comparisons=[m.ComparisonTarget(m.NotEqual(), comparator=m.Name("full_num_tokens"))],
)
EITHER_NORM = m.If(test=SHARDED, orelse=m.Else())


class AuxLayerBoundsCodemod(AnchoredCodemod):
    """The checks on both classes, and both ends in the inner one's forward."""

    patch: ClassVar[str] = "aux-layer-bounds"
    looks_into: ClassVar[tuple[str, ...]] = (
        *(f"{model}.forward" for model in MODELS),
        f"{OUTER}.forward",
        f"{OUTER}.{SETTER}",
        f"{OUTER}.{DEFAULT}",
    )

    def edit(self, module: cst.Module) -> None:
        """Find the inner class, in the file of the outer one that too, and what collects."""
        named = m.ClassDef(name=m.OneOf(*map(m.Name, MODELS)))
        found = [node for node in module.body if m.matches(node, named)]
        inner = self.opened(self.only(found, f"class {' or '.join(MODELS)}", "the module"))
        name = inner.name.value
        self.never_replaced(module, (*MODELS, OUTER))
        if name == MODEL:
            self._delegate(module, self.only_class(module, OUTER))
        if matching(inner.body, _sets(m.Name(IDS))):
            self.only((), f"class {name} without {IDS}", "the module")
        self.add_class_attribute(module, inner, CLASS_DEFAULT)
        self.add_methods(module, inner, MODEL_METHODS)
        self._collect(module, self.only_method(inner, "forward"), f"{name}.forward")

    def _delegate(self, module: cst.Module, outer: cst.ClassDef) -> None:
        """The outer class's methods ask the inner model first, if it has the checks."""
        model_ids = m.Attribute(self_attribute("model"), m.Name(IDS))
        for name, target, words, source, parameters in (
            (SETTER, model_ids, f"self.model.{IDS} = ...", DELEGATE_SETTER, ["self", "layers"]),
            (DEFAULT, m.Name("num_layers"), "num_layers = ...", DELEGATE_DEFAULT, ["self"]),
        ):
            method = self.only_method(outer, name)
            given = [cst.ensure_type(p, cst.Param).name.value for p in _parameters(method)]
            self.only([method][given != parameters :], f"({', '.join(parameters)})", name)
            statements = method.body.body[1 if method.get_docstring() is not None else 0 :]
            found = [node for node in statements[:1] if m.matches(node, _sets(target))]
            first = self.only(found, words, f"{OUTER}.{name}")
            self.insert_before(first, self.statements(module, source))
        self.add_methods(module, outer, OUTER_METHODS)

    def _collect(self, module: cst.Module, forward: cst.FunctionDef, where: str) -> None:
        keeps = self._keeps(forward, where)
        plain, summing, sharded = self._last_norms(forward, where)
        keeps_last = self._keeps_last(forward, plain, where)
        self.only_known(module, forward, unknown_statement, where)
        if not keeps_last:
            if plain is not None:
                self.insert_before(plain, self.statements(module, COLLECT_LAST))
            if summing is not None:
                self.insert_before(summing, self.statements(module, COLLECT_LAST_SUMMED))
        if summing is None:
            self._replace(module, keeps, KEEP if m.matches(keeps, KEEPS) else KEEP_UNGATHERED)
            return
        test = "" if sharded is None else module.code_for_node(sharded)
        branch = SHARDED_BRANCH.replace("sharded", test) if test else ""
        append = APPEND if m.matches(keeps, KEEPS) else ""
        if append:
            self.absent(forward, ("aux_hidden_state",), where)
        self._replace(module, keeps, KEEP_SUMMED.replace(SHARDED_BRANCH, branch) + append)
        if not find_all(module, m.ImportAlias(name=m.Name(SUM_OVER_RANKS))):
            self.import_name(module, SUM_OVER_RANKS, beside="get_pp_group")

    def _keeps(self, forward: cst.FunctionDef, where: str) -> cst.SimpleStatementLine:
        """The statement in the layer loop that keeps what enters a layer."""
        loops = find_all(forward, m.For())
        numbered = [n for n in open_statements(forward) if m.matches(n, NUMBERED_LOOP)]
        anchor = "for ..., layer in enumerate(islice(...), start=self.start_layer)"
        loop = cst.ensure_type(self.only(numbered, anchor, where), cst.For)
        self.only(loops, "one loop", where)
        where = f"the loop of {where}"
        layer_id = cst.ensure_type(loop.target, cst.Tuple).elements[0].value
        words = f"if {cst.ensure_type(layer_id, cst.Name).value} in self.{IDS}"
        test = _asks_for(m.Name(cst.ensure_type(layer_id, cst.Name).value))
        asks = self.only(matching(loop.body, m.If(test=test, orelse=None)), words, where)
        anchor = "hidden_states, residual = layer(...)"
        call = self.only(matching(loop.body, LAYER_CALL), anchor, where)
        if loop.body.body.index(asks) > loop.body.body.index(call):
            self.only((), f"{words} before the layer", where)
        kept = matching(cst.ensure_type(asks, cst.If).body, KEEPS | KEEPS_UNGATHERED)
        anchor = "hidden_states + residual kept"
        return cst.ensure_type(self.only(kept, anchor, where), cst.SimpleStatementLine)

    def _last_norms(
        self, forward: cst.FunctionDef, where: str
    ) -> tuple[cst.CSTNode | None, cst.CSTNode | None, cst.BaseExpression | None]:
        """The norms that end the forward: the plain one, and the one that sums over the ranks.

        Where there are both, the plain one is for sharded states; the test for those comes third.
        """
        anchor = "hidden_states, _ = self.norm(...) or fused_allreduce_rms_norm(...)"
        norms = find_all(forward, LAST_NORM | SUMMING_NORM)
        for node in matching(forward.body, EITHER_NORM):
            either = cst.ensure_type(node, cst.If)
            plain = matching(either.body, LAST_NORM)
            summing = matching(cst.ensure_type(either.orelse, cst.Else).body, SUMMING_NORM)
            if plain and summing and [*plain, *summing] == [*norms]:
                return plain[0], summing[0], either.test
        direct = [norm for norm in norms if norm in forward.body.body]
        norm = self.only(norms if len(norms) > 1 else direct, anchor, where)
        return (norm, None, None) if m.matches(norm, LAST_NORM) else (None, norm, None)

    def _keeps_last(self, forward: cst.FunctionDef, norm: cst.CSTNode | None, where: str) -> bool:
        """Whether the forward keeps the final stream already, before its one plain norm."""
        if len(find_all(forward, self_attribute(IDS))) == 1:
            return False
        statements = list(forward.body.body)
        before = statements[: statements.index(norm)] if norm in statements else []
        found = [node for node in before if m.matches(node, KEEPS_LAST)]
        self.only(found, f"if self.end_layer in self.{IDS} before the last norm", where)
        return True

    def _replace(self, module: cst.Module, line: cst.SimpleStatementLine, source: str) -> None:
        """Put other statements in the place of one; its comments go above them."""
        first, *others = self.statements(module, source)
        beside = line.trailing_whitespace.comment
        lines = [*line.leading_lines, *([cst.EmptyLine(comment=beside)] if beside else [])]
        first = first.with_changes(leading_lines=[*lines, *first.leading_lines])
        self.change(line, lambda _: cst.FlattenSentinel([first, *others]))


class AuxLayerBounds(Patch):
    """See the module."""

    name = "aux-layer-bounds"
    title = "vLLM's own collecting keeps the states of all layer ids whole and refuses bad ids"
    upstream = "vLLM pull request 46973, first in 0.25.0, for the last id of DeepseekV2Model only"
    harden = True
    needs_file = False

    def paths(self, sources: Sources) -> tuple[str, ...]:
        """The files whose models collect."""
        return tuple(path for path in PATHS if IDS.encode() in (sources.read(path) or b""))

    def codemod(self, path: str = "") -> type[AnchoredCodemod]:
        """See :class:`AuxLayerBoundsCodemod`."""
        return AuxLayerBoundsCodemod

    def holds(
        self,
        module: ast.Module,
        models: Sequence[FamilyModel] = FAMILY,
        *,
        path: str = "",
        protocol: bool = True,
    ) -> bool:
        """Ids are checked, exist before any constructor ran, and both ends are collected."""
        inner = [owner for name in MODELS if (owner := syntax.find_class(module, name))]
        outer = syntax.find_class(module, OUTER)
        return (
            len(inner) == 1
            and syntax.replacement(module, (*MODELS, OUTER)) is None
            and all(
                (
                    _has_class_default(inner[0]),
                    _checks(inner[0], outer, (SETTER, f"_{SETTER}")),
                    _checks(inner[0], outer, (DEFAULT, RUNNERS_DEFAULT)),
                    _collects_both_ends(syntax.find_method(inner[0], "forward")),
                )
            )
        )


def _has_class_default(owner: ast.ClassDef) -> bool:
    """Whether there are ids before any constructor has run."""
    targets = [
        target
        for node in owner.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    return "EagleModelMixin" in syntax.base_names(owner) or IDS in map(syntax.last_name, targets)


def _checks(inner: ast.ClassDef, outer: ast.ClassDef | None, names: tuple[str, ...]) -> bool:
    """Whether a method of these names raises ValueError, and all of the outer class get there."""
    of_outer = [method for name in names if (method := syntax.find_method(outer, name))]
    of_inner = [method for name in names if (method := syntax.find_method(inner, name))]
    return any(map(_raises_value_error, (*of_inner, *of_outer))) and all(
        _raises_value_error(method) or any(any(syntax.calls(method, name)) for name in names)
        for method in of_outer
    )


def _raises_value_error(method: syntax.FunctionNode) -> bool:
    return any(
        isinstance(node, ast.Raise) and any(syntax.calls(node, "ValueError"))
        for node in ast.walk(method)
    )


def _collects_both_ends(forward: syntax.FunctionNode | None) -> bool:
    """Whether id 0 is copied, the final stream kept before each last norm, and all are whole."""
    if forward is None or not collects(forward):
        return False
    copies = any(
        isinstance(node, ast.If | ast.IfExp)
        and syntax.mentions(node.test, "residual")
        and any(syntax.calls(node, "clone"))
        for node in ast.walk(forward)
    )
    whole = not syntax.mentions(forward, "fused_allreduce_rms_norm") or all(
        _sums(node) for node in forward.body if isinstance(node, ast.For)
    )
    kept = list(_kept_before_norms(forward.body, None))
    return copies and whole and bool(kept) and all(kept)


def _sums(kept: ast.AST) -> bool:
    """Whether what is kept is summed over the ranks, by whatever name of vLLM's for that."""
    return any("all_reduce" in syntax.last_name(node) for node in ast.walk(kept))


def _kept_before_norms(statements: Sequence[ast.stmt], kept: ast.If | None) -> Iterator[bool]:
    """For each norm of the final stream: whether that is kept before, summed if the norm sums."""
    for statement in statements:
        if isinstance(statement, ast.If) and syntax.mentions(statement.test, IDS):
            kept = statement if syntax.appends_to(statement, "aux_hidden_states") else kept
        elif isinstance(statement, ast.If):
            yield from _kept_before_norms(statement.body, kept)
            yield from _kept_before_norms(statement.orelse, kept)
        elif isinstance(statement, ast.Assign) and syntax.mentions(statement.value, "norm"):
            sums = syntax.mentions(statement.value, "fused_allreduce_rms_norm")
            yield kept is not None and (not sums or _sums(kept))
