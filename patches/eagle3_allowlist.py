"""``eagle3-allowlist``: vLLM's speculative config admits the family's model types.

Up to 0.21.0 the config refuses a target whose ``hf_text_config.model_type`` contains none of a
list of strings: "Eagle3 is only supported for [...] models". The list is called
``eagle3_target_supported`` up to 0.16.0 and ``aux_hidden_states_supported`` from 0.17.0 on, where
it also gates the method ``extract_hidden_states``. It is found by what it is for, not by name.

``deepseek`` alone (DeepSeek V1) would match the whole family and is not added.

vLLM added four of the types in its pull request 36361 (0.18.0) and dropped the list in 0.22.0.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, ClassVar

import libcst as cst
from libcst import matchers as m

from vllm_eagle3_patch import reading
from vllm_eagle3_patch.codemod import AnchoredCodemod, without_comment
from vllm_eagle3_patch.family import FAMILY, MODEL_TYPES
from vllm_eagle3_patch.patch import Patch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_eagle3_patch.family import FamilyModel
    from vllm_eagle3_patch.sources import Sources

PATHS = ("vllm/config/speculative.py",)
REFUSAL = b" is only supported for "

# any(item in ....model_type for item in <list>)
TEST = m.Call(
    func=m.Name("any"),
    args=[
        m.Arg(
            m.GeneratorExp(
                elt=m.Comparison(
                    comparisons=[
                        m.ComparisonTarget(
                            m.In(), comparator=m.Attribute(attr=m.Name("model_type"))
                        )
                    ]
                ),
                for_in=m.CompFor(iter=m.Name()),
            )
        )
    ],
)


class AllowlistCodemod(AnchoredCodemod):
    """Append the missing model types to the list."""

    patch: ClassVar[str] = "eagle3-allowlist"

    def edit(self, module: cst.Module) -> None:
        """Find the membership test, then the list that it goes through."""
        test = self.only(m.findall(module, TEST), "any(... in ....model_type ...)", "the module")
        generator = cst.ensure_type(cst.ensure_type(test, cst.Call).args[0].value, cst.GeneratorExp)
        name = cst.ensure_type(generator.for_in.iter, cst.Name).value
        target = m.AssignTarget(m.Name(name))
        assignment = self.only(
            m.findall(module, m.Assign(targets=[target], value=m.List(elements=[m.AtLeastN(n=1)]))),
            f"{name} = [...]",
            "the module",
        )
        listed = cst.ensure_type(cst.ensure_type(assignment, cst.Assign).value, cst.List)
        present = {
            element.value.evaluated_value
            for element in listed.elements
            if isinstance(element.value, cst.SimpleString)
        }
        new = [cst.Element(cst.SimpleString(f'"{t}"')) for t in MODEL_TYPES if t not in present]
        indent = cst.SimpleWhitespace(module.default_indent)
        self.change(listed, lambda node: self._extended(node, new, indent))

    def _extended(
        self, node: cst.List, new: list[cst.Element], indent: cst.SimpleWhitespace
    ) -> cst.List:
        """One new type a line below the marker comment; the other elements stay as they are."""
        line = cst.ParenthesizedWhitespace(indent=True, last_line=indent)
        below_marker = line.with_changes(
            empty_lines=[self.marker_line().with_changes(whitespace=indent)]
        )
        opening, closing = node.lbracket, node.rbracket
        if isinstance(opening.whitespace_after, cst.SimpleWhitespace):
            opening = cst.LeftSquareBracket(whitespace_after=line)
        *others, last = node.elements
        if isinstance(closing.whitespace_before, cst.ParenthesizedWhitespace):
            # A comment beside the last type stays there.
            first_line = closing.whitespace_before.first_line
            below_marker = below_marker.with_changes(first_line=first_line)
            closing = closing.with_changes(
                whitespace_before=without_comment(closing.whitespace_before)
            )
        last = last.with_changes(comma=cst.Comma(whitespace_after=below_marker))
        spaced = [element.with_changes(comma=cst.Comma(whitespace_after=line)) for element in new]
        spaced[-1] = spaced[-1].with_changes(comma=cst.Comma())
        end = cst.ParenthesizedWhitespace(indent=True)
        if isinstance(closing.whitespace_before, cst.SimpleWhitespace):
            closing = cst.RightSquareBracket(whitespace_before=end)
        return node.with_changes(
            lbracket=opening, elements=[*others, last, *spaced], rbracket=closing
        )


class Eagle3Allowlist(Patch):
    """See the module."""

    name = "eagle3-allowlist"
    title = "the speculative config admits the family's model types"
    upstream = "vLLM pull request 36361, first in 0.18.0; no list from 0.22.0 on"
    needs_file = False

    def paths(self, sources: Sources) -> tuple[str, ...]:
        """The speculative config, if it limits EAGLE-3 to certain models."""
        return tuple(path for path in PATHS if REFUSAL in (sources.read(path) or b""))

    def codemod(self, path: str = "") -> type[AnchoredCodemod]:
        """See :class:`AllowlistCodemod`."""
        return AllowlistCodemod

    def holds(
        self,
        module: ast.Module,
        models: Sequence[FamilyModel] = FAMILY,
        *,
        path: str = "",
        protocol: bool = True,
    ) -> bool:
        """Every text model type contains a string of the list."""
        lists = allowlists(module)
        return bool(lists) and all(
            any(item in text_type for item in allowed)
            for allowed in lists
            for model in models
            for text_type in model.text_types
        )


def allowlists(module: ast.Module) -> list[tuple[str, ...]]:
    """The strings that a target's model type must contain one of, for each test of that."""
    found = []
    for call in reading.calls(module, "any"):
        match call.args:
            case [
                ast.GeneratorExp(
                    elt=ast.Compare(ops=[ast.In()], comparators=[ast.Attribute(attr="model_type")]),
                    generators=[ast.comprehension(iter=ast.Name(id=name))],
                )
            ]:
                found.append(tuple(reading.strings(_assigned(module, name))))
            case _:
                continue
    return found


def _assigned(module: ast.Module, name: str) -> ast.AST:
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and reading.last_name(node.targets[0]) == name:
            return node.value
    return ast.Tuple(elts=[])
