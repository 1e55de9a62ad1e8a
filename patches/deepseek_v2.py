"""``deepseek-v2``: DeepSeek-V2/V3 and what derives from it give EAGLE-3 its aux hidden states.

The model runner asks the outermost model for ``SupportsEagle3`` (up to 0.10.0 there is no protocol:
it calls the two methods by name), tells it which layer ids to capture, and expects
``(hidden_states, aux_hidden_states)`` from each forward (vllm/v1/worker/gpu_model_runner.py, 0.8.5
to 0.17.1). Id ``k`` is the residual stream entering layer ``k``: ``hidden_states + residual``; id 0
is the embedding output, id ``n`` the final stream before the last norm.

vLLM did this in its pull request 36361 (first in 0.18.0), but there id 0 raises a TypeError, id
``n`` is dropped up to 0.24.0, and ids are not checked. Not needed from 0.18.0 on.
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
from vllm_eagle3_patch.patches._forward import (
    IDS,
    ISLICE,
    SLICE,
    STATES,
    collects,
    unknown_in_outer,
    unknown_statement,
)
from vllm_eagle3_patch.vllm_source import syntax
from vllm_eagle3_patch.vllm_source.paths import DEEPSEEK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.vllm_source.sources import Sources

MODEL = "DeepseekV2Model"
OUTER = "DeepseekV2ForCausalLM"

# A class attribute and not one set in __init__: EagleMistralLarge3Model calls only
# nn.Module.__init__ and then this forward (mistral_large_3_eagle.py, 0.12.0 on).
CLASS_DEFAULT = "aux_hidden_state_layers: tuple[int, ...] = ()"

MODEL_METHODS = '''
def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
    """Capture the residual stream entering each of these layers (n: leaving the last)."""
    layers = tuple(layers)
    num_layers = len(self.layers)
    first = self.start_layer
    last = num_layers if self.end_layer == num_layers else self.end_layer - 1
    for layer_id in layers:
        if not isinstance(layer_id, int) or not first <= layer_id <= last:
            raise ValueError(
                f"EAGLE-3 aux hidden state layer id {layer_id!r} is not valid: "
                f"of this model's {num_layers} layers, this rank can capture "
                f"ids {first} to {last}"
            )
        if layers.count(layer_id) > 1:
            raise ValueError(
                f"EAGLE-3 aux hidden state layer id {layer_id!r} is repeated in "
                f"{layers}: valid are distinct ids from {first} to {last}"
            )
    self.aux_hidden_state_layers = layers

def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
    num_layers = len(self.layers)
    layers = (2, num_layers // 2, num_layers - 3)
    if min(layers) < 0 or len(set(layers)) < len(layers):
        raise ValueError(
            f"no default EAGLE-3 aux hidden state layers for {num_layers} layers: "
            "set eagle_aux_hidden_state_layer_ids in the draft model's config"
        )
    return layers
'''

OUTER_METHODS = """
def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
    self.model.set_aux_hidden_state_layers(layers)

def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
    return self.model.get_eagle3_aux_hidden_state_layers()
"""

# Id 0 has no residual yet. Its copy is needed: up to 0.10.2 (and from 0.25.0 on) the first layer
# keeps this very buffer as the residual, and the fused add and norm writes into that.
COLLECT = """
if layer_id in self.aux_hidden_state_layers:
    aux_hidden_states.append(
        hidden_states.clone() if residual is None else hidden_states + residual
    )
"""

COLLECT_LAST = """
if self.end_layer in self.aux_hidden_state_layers:
    aux_hidden_states.append(hidden_states + residual)
"""

RETURN_BOTH = """
if aux_hidden_states:
    return hidden_states, aux_hidden_states
"""


# How releases go through the layers that this rank holds.
LAYERS: dict[str, m.Call | m.Subscript] = {
    # from 0.10.2 on
    ISLICE: m.Call(
        func=m.Name("islice"),
        args=[
            m.Arg(self_attribute("layers")),
            m.Arg(self_attribute("start_layer")),
            m.Arg(self_attribute("end_layer")),
        ],
    ),
    # up to 0.10.1.1
    SLICE: m.Subscript(
        value=self_attribute("layers"),
        slice=[
            m.SubscriptElement(
                m.Slice(
                    lower=self_attribute("start_layer"),
                    upper=self_attribute("end_layer"),
                    step=None,
                )
            )
        ],
    ),
}
LAYER_LOOP = m.For(target=m.Name("layer"), iter=m.OneOf(*LAYERS.values()))
NUMBERED_LOOP = """
for layer_id, layer in enumerate(
    {layers}, start=self.start_layer
):
    pass
"""
LAYER_CALL = assigns("hidden_states", "residual", value=m.Call(func=m.Name("layer")))
LAST_NORM = assigns("hidden_states", "_", value=m.Call(func=self_attribute("norm")))
OTHER_MODEL = m.SimpleStatementLine(
    body=[
        m.Assign(
            targets=[m.AssignTarget(m.Name("model_cls"))],
            value=m.DoesNotMatch(m.Name(MODEL)),
        )
    ]
)
RETURN = m.SimpleStatementLine(body=[m.Return(value=m.Name("hidden_states"))])


class DeepseekV2Codemod(AnchoredCodemod):
    """The interface on the outer class, the collecting forward on the inner one."""

    patch: ClassVar[str] = "deepseek-v2"
    looks_into: ClassVar[tuple[str, ...]] = (f"{MODEL}.forward", f"{OUTER}.forward")

    def edit(self, module: cst.Module) -> None:
        """Find the import, both classes, the layer loop, the last norm and the return."""
        outer = self.only_class(module, OUTER)
        self.implement_eagle3(module, outer, beside=("SupportsLoRA", "SupportsPP"))
        self.add_methods(module, outer, OUTER_METHODS)
        passes_on = self.only_method(outer, "forward")
        self.only_known(module, passes_on, unknown_in_outer, f"{OUTER}.forward")
        inner = self.only_class(module, MODEL)
        self.never_replaced(module, (MODEL, OUTER))
        self.only(
            [node for node in [outer] if not matching(outer.body, OTHER_MODEL)],
            f"model_cls = {MODEL}",
            f"class {OUTER}",
        )
        self.absent(inner, (IDS, STATES), f"class {MODEL}")
        self.add_class_attribute(module, inner, CLASS_DEFAULT)
        self.add_methods(module, inner, MODEL_METHODS)
        self._collect(module, self.only_method(inner, "forward"))

    def _collect(self, module: cst.Module, forward: cst.FunctionDef) -> None:
        where = f"{MODEL}.forward"
        statements = forward.body.body
        loop = self.only(find_all(forward, m.For()), "one loop", where)
        self.only(
            [loop] if loop in open_statements(forward) and m.matches(loop, LAYER_LOOP) else [],
            f"for layer in {' or '.join(LAYERS)}",
            where,
        )
        loop = cst.ensure_type(loop, cst.For)
        layers = next(layers for layers, kind in LAYERS.items() if m.matches(loop.iter, kind))
        anchor = "hidden_states, residual = layer(...)"
        call = self.only(matching(loop.body, LAYER_CALL), anchor, f"the loop of {where}")
        anchor = "hidden_states, _ = self.norm(...)"
        norm = self.only(matching(forward.body, LAST_NORM), anchor, where)
        anchor = "return hidden_states at the end"
        end = self.only([n for n in statements[-1:] if m.matches(n, RETURN)], anchor, where)
        self.absent(forward, ("layer_id",), where)
        self.only_known(module, forward, unknown_statement, where)

        (numbered,) = self.statements(module, NUMBERED_LOOP.format(layers=layers))
        numbered = cst.ensure_type(numbered, cst.For)
        self.insert_before(loop, self.statements(module, "aux_hidden_states = []"))
        self.change(loop.target, lambda _: numbered.target)
        self.change(loop.iter, lambda node: _enumerated(numbered.iter, node))
        self.insert_before(call, self.statements(module, COLLECT))
        self.insert_before(norm, self.statements(module, COLLECT_LAST))
        self.insert_before(end, self.statements(module, RETURN_BOTH))


def open_statements(function: cst.FunctionDef) -> list[cst.CSTNode]:
    """The statements of a function, and those directly in a ``with`` of it."""
    within = [node.body for node in function.body.body if isinstance(node, cst.With)]
    return [statement for block in (function.body, *within) for statement in block.body]


def _enumerated(template: cst.BaseExpression, layers: cst.BaseExpression) -> cst.BaseExpression:
    """The template's ``enumerate(...)``, around the file's own iterable if that has comments."""
    if not m.findall(layers, m.Comment()):
        return template
    call = cst.ensure_type(template, cst.Call)
    return call.with_changes(args=[call.args[0].with_changes(value=layers), *call.args[1:]])


class DeepseekV2(Patch):
    """See the module."""

    name = "deepseek-v2"
    title = "DeepSeek-V2/V3 collect aux hidden states and implement SupportsEagle3"
    upstream = "vLLM pull request 36361, first in 0.18.0"

    def paths(self, sources: Sources) -> tuple[str, ...]:
        """The one file, in every release."""
        return (DEEPSEEK,) if sources.exists(DEEPSEEK) else ()

    def codemod(self, path: str = "") -> type[AnchoredCodemod]:
        """See :class:`DeepseekV2Codemod`."""
        return DeepseekV2Codemod

    def holds(
        self,
        module: ast.Module,
        models: Sequence[FamilyModel] = FAMILY,
        *,
        path: str = "",
        protocol: bool = True,
    ) -> bool:
        """Both classes play their part: vLLM's own way since 0.18.0 counts too."""
        outer, inner = syntax.find_class(module, OUTER), syntax.find_class(module, MODEL)
        return (
            syntax.implements_eagle3(module, outer, protocol=protocol)
            and syntax.replacement(module, (MODEL, OUTER)) is None
            and _builds(outer, MODEL)
            and collects(syntax.find_method(inner, "forward"))
            and has_layer_ids(inner)
        )


def _builds(outer: ast.ClassDef | None, model: str) -> bool:
    """Whether a class names no other inner model than this one."""
    return outer is not None and all(
        syntax.last_name(node.value) == model
        for node in outer.body
        if isinstance(node, ast.Assign) and syntax.last_name(node.targets[0]) == "model_cls"
    )


def has_layer_ids(inner: ast.ClassDef | None) -> bool:
    """Whether the ids that a class's forward reads from ``self`` are there before any are set.

    The class gives them, its constructor does, or a base that may (from 0.18.0 on vLLM has
    ``EagleModelMixin`` for that); ``nn.Module`` gives nothing.
    """
    forward = syntax.find_method(inner, "forward")
    if inner is None or forward is None:
        return False
    name = "aux_hidden_state_layers"
    if not any(_is_own(node, name) for node in ast.walk(forward)):
        return True
    constructor = syntax.find_method(inner, "__init__") or ast.Pass()
    return (
        any(base != "Module" for base in syntax.base_names(inner))
        or any(
            isinstance(target, ast.Name) and target.id == name
            for statement in inner.body
            for target in syntax.assigned(statement)
        )
        or any(
            _is_own(part, name)
            for statement in ast.walk(constructor)
            for target in syntax.assigned(statement)
            for part in ast.walk(target)
        )
    )


def _is_own(node: ast.AST, name: str) -> bool:
    """Whether a node is ``self.<name>``, read or written."""
    return isinstance(node, ast.Attribute) and ast.unparse(node) == f"self.{name}"
