"""``dual-batch-overlap``: the micro-batch wrapper puts aux hidden states together too.

With ``--enable-dbo`` the wrapper runs the model on the halves of a batch and concatenates what it
returns (vllm/v1/worker/gpu_ubatch_wrapper.py, _run_ubatches and _capture_ubatches). With EAGLE-3
that is a tensor and a list of aux hidden states, and ``torch.cat`` fails on them. Nothing else is
in the way: the model runner takes the pair apart as it always does, and draft models never run in
micro-batches (``allow_microbatching=False`` in the proposer).

vLLM's pull request 40789 (first in 0.22.0) concatenates the parts of a tuple; but the second part
is a list of tensors, on which ``torch.cat`` fails as before. The runner under v1/worker/gpu does
not combine dual batch overlap with speculative decoding.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, ClassVar

import libcst as cst
from libcst import matchers as m

from vllm_eagle3_patch.codemod.anchored import AnchoredCodemod
from vllm_eagle3_patch.codemod.nodes import find_all
from vllm_eagle3_patch.codemod.patch import Patch
from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.vllm_source import syntax
from vllm_eagle3_patch.vllm_source.paths import MICRO_BATCHES
from vllm_eagle3_patch.vllm_source.runner import JOINING_METHODS, joins_lists

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.vllm_source.sources import Sources

WRAPPER = "UBatchWrapper"

FUNCTION = "_cat_ubatch_outputs"
CONCATENATE = f'''
def {FUNCTION}(sorted_results):
    """Concatenate what a model returned for each micro-batch, with EAGLE-3 a tensor and a list."""
    if isinstance(sorted_results[0], (tuple, list)):
        return tuple({FUNCTION}(parts) for parts in zip(*sorted_results))
    return torch.cat(sorted_results, dim=0)
'''


def _cat(results: str) -> m.Call:
    """A matcher for ``torch.cat(<results>, dim=0)``."""
    concatenated = m.Arg(value=m.Name(results), keyword=None)
    dimension = m.Arg(value=m.Integer("0"), keyword=m.Name("dim"))
    function = m.Attribute(value=m.Name("torch"), attr=m.Name("cat"))
    return m.Call(func=function, args=[concatenated, dimension])


# vLLM's own since 0.22.0: if sorted_results and isinstance(sorted_results[0], tuple):
#     return tuple(torch.cat(parts, dim=0) for parts in zip(*sorted_results))
IS_TUPLE = m.Call(func=m.Name("isinstance"), args=[m.Arg(), m.Arg(m.Name("tuple"))])
PARTS = m.Call(func=m.Name("tuple"), args=[m.Arg(m.GeneratorExp(elt=_cat("parts")))])
TUPLES_ONLY = m.If(
    test=m.BooleanOperation(left=m.Name("sorted_results"), operator=m.And(), right=IS_TUPLE),
    body=m.IndentedBlock(body=[m.SimpleStatementLine(body=[m.Return(PARTS)])]),
    orelse=None,
)


class DualBatchOverlapCodemod(AnchoredCodemod):
    """One function that concatenates whatever a model returns, called in both places."""

    patch: ClassVar[str] = "dual-batch-overlap"
    looks_into: ClassVar[tuple[str, ...]] = (
        FUNCTION,
        *(f"{WRAPPER}.{name}" for name in JOINING_METHODS),
    )

    def edit(self, module: cst.Module) -> None:
        """Find both concatenations, or the function of vLLM's own that is called there."""
        own = m.FunctionDef(name=m.Name(FUNCTION))
        functions = [node for node in module.body if m.matches(node, own)]
        if functions:
            self._mend(self.only(functions, f"def {FUNCTION}", "the module"))
            return
        wrapper = self.only_class(module, WRAPPER)
        for name in JOINING_METHODS:
            method = self.only_method(wrapper, name)
            found = find_all(method, _cat("sorted_results"))
            call = self.only(found, "torch.cat(sorted_results, dim=0)", f"{WRAPPER}.{name}")
            self.only_known(module, method, _takes_apart, f"{WRAPPER}.{name}")
            self.change(call, _through_function)
        (function,) = self.statements(module, CONCATENATE)
        blank = [cst.EmptyLine(indent=False)] * 2
        function = function.with_changes(leading_lines=[*blank, *function.leading_lines])
        self.change(wrapper, lambda node: cst.FlattenSentinel([function, node]))

    def _mend(self, function: cst.CSTNode) -> None:
        """Lists are taken apart like tuples, and what is in them too."""
        anchor = "if sorted_results and isinstance(sorted_results[0], tuple): return tuple(...)"
        branch = self.only(find_all(function, TUPLES_ONLY), anchor, FUNCTION)
        (kind,) = find_all(branch, IS_TUPLE)
        (call,) = find_all(branch, _cat("parts"))
        either = cst.parse_expression("(tuple, list)")
        self.change(cst.ensure_type(kind, cst.Call).args[1].value, lambda _: either)
        self.change(call, _through_function)
        self.change(
            branch,
            lambda node: node.with_changes(leading_lines=[*node.leading_lines, self.marker_line()]),
        )


def _takes_apart(method: syntax.FunctionNode) -> ast.AST | None:
    """Where a method slices or asks what becomes a tuple; passing it on is all that vLLM does."""
    names = {"torch.cat(sorted_results, dim=0)"}
    for node in ast.walk(method):
        if isinstance(node, ast.Assign) and ast.unparse(node.value) in names:
            names.update(map(ast.unparse, node.targets))
    return next(
        (
            node
            for node in ast.walk(method)
            if isinstance(node, ast.Subscript | ast.Attribute) and ast.unparse(node.value) in names
        ),
        None,
    )


def _through_function(call: cst.Call) -> cst.Call:
    """``_cat_ubatch_outputs(...)`` of the same results."""
    results = call.args[0].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return call.with_changes(func=cst.Name(FUNCTION), args=[results])


class DualBatchOverlap(Patch):
    """See the module."""

    name = "dual-batch-overlap"
    title = "dual batch overlap concatenates aux hidden states too"
    upstream = "vLLM pull request 40789, first in 0.22.0, for tuples but not the list in them"
    companion = True
    needs_file = False

    def paths(self, sources: Sources) -> tuple[str, ...]:
        """The wrapper's file, where the release has one."""
        return (MICRO_BATCHES,) if sources.exists(MICRO_BATCHES) else ()

    def codemod(self, path: str = "") -> type[AnchoredCodemod]:
        """See :class:`DualBatchOverlapCodemod`."""
        return DualBatchOverlapCodemod

    def holds(
        self,
        module: ast.Module,
        models: Sequence[FamilyModel] = FAMILY,
        *,
        path: str = "",
        protocol: bool = True,
    ) -> bool:
        """Both methods concatenate by a function that takes lists apart, and lists in tuples."""
        return joins_lists(module)
