"""``eagle3-allowlist``: vLLM's speculative config admits the family's model types.

Up to 0.21.0 the config refuses a target whose ``hf_text_config.model_type`` contains none of a
list of strings: "Eagle3 is only supported for [...] models". The list is called
``eagle3_target_supported`` up to 0.16.0 and ``aux_hidden_states_supported`` from 0.17.0 on, where
it also gates the method ``extract_hidden_states``. It is found by what it is for, not by name.

Up to 0.10.0 there is one string in its place, "llama". It becomes such a list.

vLLM added four of the types in its pull request 36361 (0.18.0) and dropped the list in 0.22.0.
The config is in vllm/config.py up to 0.10.0, in vllm/config/__init__.py up to 0.10.2.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

import libcst as cst
from libcst import matchers as m

from vllm_eagle3_patch.codemod.anchored import AnchoredCodemod, without_comment
from vllm_eagle3_patch.codemod.nodes import find_all
from vllm_eagle3_patch.codemod.patch import Patch
from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.vllm_source.allowlist import CONFIG, allowlists, limits_models
from vllm_eagle3_patch.vllm_source.paths import SPECULATIVE_CONFIG

if TYPE_CHECKING:
    import ast
    from collections.abc import Sequence

    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.vllm_source.sources import Sources

MODEL_TYPES = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "kimi_k2",
    "kimi_k25",
    "kimi_vl",
    "deepseek_vl_v2",
    "glm_moe_dsa",
)
"""What is added, in this order: the pins of patched files hold it. Each of the family's
``text_types`` contains one, or the postcondition does not hold. Never ``deepseek`` alone (DeepSeek
V1), which would admit whatever contains it."""

MODEL_TYPE = m.Attribute(attr=m.Name("model_type"))

# any(item in ....model_type for item in <list>)
LIST_TEST = m.Call(
    func=m.Name("any"),
    args=[
        m.Arg(
            m.GeneratorExp(
                elt=m.Comparison(comparisons=[m.ComparisonTarget(m.In(), comparator=MODEL_TYPE)]),
                for_in=m.CompFor(iter=m.Name()),
            )
        )
    ],
)

# if ... and not any(...): raise ...
UNLISTED = m.UnaryOperation(operator=m.Not(), expression=LIST_TEST)
REFUSES_UNLISTED = m.If(
    test=m.OneOf(UNLISTED, m.BooleanOperation(operator=m.And(), right=UNLISTED)),
    body=m.IndentedBlock(body=[m.SimpleStatementLine(body=[m.Raise()])])
    | m.SimpleStatementSuite(body=[m.Raise()]),
)

# "llama" not in ....hf_text_config.model_type
STRING_TEST = m.Comparison(
    left=m.SimpleString(),
    comparisons=[
        m.ComparisonTarget(
            m.NotIn(),
            comparator=m.Attribute(
                value=m.Attribute(attr=m.Name("hf_text_config")), attr=m.Name("model_type")
            ),
        )
    ],
)
ANCHOR = 'any(... in ....model_type ...) or "..." not in ....hf_text_config.model_type'

# vLLM's own list and test from 0.10.1 on.
LIST_NAME = "eagle3_target_supported"
LIST = """
{name} = [
    {first},
    {others},
]
"""
TEST = """
admitted = not any(
        supported_model in {model_type}
        for supported_model in {name}
    )
"""
ONLY_MODELS = re.compile(r"(\"|')(.* is only supported for )Llama( models\b[^{}]*)\1")


class AllowlistCodemod(AnchoredCodemod):
    """Append the missing model types to the list, or put a list in place of the one string."""

    patch: ClassVar[str] = "eagle3-allowlist"
    looks_into: ClassVar[tuple[str, ...]] = (f"{CONFIG}._verify_args",)

    def edit(self, module: cst.Module) -> None:
        """Find the membership test, then the list that it goes through or the string."""
        within, where = self._config(module)
        lists, strings = find_all(within, LIST_TEST), find_all(within, STRING_TEST)
        test = self.only([*lists, *strings], ANCHOR, where)
        if strings:
            self._list_for_string(module, within, cst.ensure_type(test, cst.Comparison), where)
        else:
            refusing = find_all(within, REFUSES_UNLISTED)
            self.only(refusing, "if ... not any(... in ....model_type ...): raise", where)
            self._longer_list(module, within, cst.ensure_type(test, cst.Call), where)

    def _config(self, module: cst.Module) -> tuple[cst.CSTNode, str]:
        """The class of the config, which is all of a big module that has to be looked at."""
        if any(m.matches(node, m.ClassDef(name=m.Name(CONFIG))) for node in module.body):
            return self.only_class(module, CONFIG), f"class {CONFIG}"
        return module, "the module"

    def _longer_list(
        self, module: cst.Module, within: cst.CSTNode, test: cst.Call, where: str
    ) -> None:
        generator = cst.ensure_type(test.args[0].value, cst.GeneratorExp)
        name = cst.ensure_type(generator.for_in.iter, cst.Name).value
        target = m.AssignTarget(m.Name(name))
        assignment = self.only(
            find_all(within, m.Assign(targets=[target], value=m.List(elements=[m.AtLeastN(n=1)]))),
            f"{name} = [...]",
            where,
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

    def _list_for_string(
        self, module: cst.Module, within: cst.CSTNode, test: cst.Comparison, where: str
    ) -> None:
        """The test as vLLM has it from 0.10.1 on; the message tells what is admitted."""
        self.absent(within, (LIST_NAME,), where)
        holders = [
            node
            for block in find_all(within, m.IndentedBlock())
            for node in cst.ensure_type(block, cst.IndentedBlock).body
            if isinstance(node, cst.If) and test in find_all(node.test, STRING_TEST)
        ]
        holder = self.only(holders, f"if ... {module.code_for_node(test.left)} not in ...", where)
        told = [
            node
            for node in find_all(holder.body, m.SimpleString())
            if ONLY_MODELS.fullmatch(cst.ensure_type(node, cst.SimpleString).value)
        ]
        anchor = '"... is only supported for Llama models"'
        message = cst.ensure_type(self.only(told, anchor, where), cst.SimpleString)

        source = LIST.format(
            name=LIST_NAME,
            first=module.code_for_node(test.left),
            others=",\n    ".join(f'"{t}"' for t in MODEL_TYPES),
        )
        self.insert_before(holder, self.statements(module, source))
        model_type = module.code_for_node(test.comparisons[0].comparator)
        new = self._expression(module, TEST.format(name=LIST_NAME, model_type=model_type))
        self.change(test, lambda node: new.with_changes(lpar=node.lpar, rpar=node.rpar))
        text = ONLY_MODELS.sub(rf"f\1\2{{{LIST_NAME}}}\3\1", message.value)
        self.change(message, lambda _: cst.parse_expression(text))

    def _expression(self, module: cst.Module, source: str) -> cst.BaseExpression:
        """What ``<name> = <expression>`` assigns, with the file's own line endings."""
        (line,) = self.statements(module, source)
        (assignment,) = cst.ensure_type(line, cst.SimpleStatementLine).body
        return cst.ensure_type(assignment, cst.Assign).value

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
        return tuple(path for path in SPECULATIVE_CONFIG if limits_models(sources, path))

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
