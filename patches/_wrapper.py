"""The interface on a multimodal wrapper around a DeepSeek-V2 language model.

A wrapper's forward returns what its language model returns, so it only has to implement the
interface and hand the layer ids on. Where its language model is a bare ``DeepseekV2Model`` and
``lm_head`` sits on the wrapper (Kimi-K2.5 in 0.15.0 and 0.15.1, Kimi-VL up to 0.14.1), the
proposer's weight sharing finds neither ``<language model>.model`` nor ``.lm_head``
(vllm/v1/spec_decode/eagle.py, load_model): it is given both.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, ClassVar

from libcst import matchers as m

from vllm_eagle3_patch.codemod.anchored import AnchoredCodemod, self_attribute
from vllm_eagle3_patch.codemod.nodes import find_all
from vllm_eagle3_patch.codemod.patch import Patch
from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.patches._forward import unknown_in_outer
from vllm_eagle3_patch.vllm_source import syntax

if TYPE_CHECKING:
    from collections.abc import Sequence

    import libcst as cst

    from vllm_eagle3_patch.ground.family import FamilyModel, Wrapper
    from vllm_eagle3_patch.vllm_source.sources import Sources

METHODS = """
def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
    self.language_model.set_aux_hidden_state_layers(layers)

def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
    return self.language_model.get_eagle3_aux_hidden_state_layers()
"""

# object.__setattr__ keeps nn.Module from registering a module or a parameter name twice.
BARE_LANGUAGE_MODEL = """
# EAGLE-3 shares <language model>.model.embed_tokens and <language model>.lm_head.
object.__setattr__(self.language_model, "model", self.language_model)
object.__setattr__(self.language_model, "lm_head", self.lm_head)
"""

BARE_CLASS = "DeepseekV2Model"


class WrapperCodemod(AnchoredCodemod):
    """The interface on a wrapper class, handed on to its language model.

    Subclasses set ``patch`` and ``owner``, the name of the class.
    """

    owner: ClassVar[str]

    def edit(self, module: cst.Module) -> None:
        """Find the import, the class, its forward, and for a bare language model its lm_head."""
        wrapper = self.only_class(module, self.owner)
        self.implement_eagle3(module, wrapper, beside=("SupportsMultiModal",))
        self.add_methods(module, wrapper, METHODS)
        forward = self.only_method(wrapper, "forward")
        self.only_known(module, forward, unknown_in_outer, f"{self.owner}.forward")
        self._share_with_draft_model(module, self.only_method(wrapper, "__init__"))

    def _share_with_draft_model(self, module: cst.Module, constructor: cst.FunctionDef) -> None:
        where = f"{self.owner}.__init__"
        any_call = _assigns_self("language_model", m.Call())
        holder = self._statement_with(constructor, any_call, "self.language_model = ...(...)")
        bare = _assigns_self("language_model", m.Call(func=m.Name(BARE_CLASS)))
        if not find_all(holder, bare):
            return
        self.absent(constructor, ("__setattr__",), where)
        head = _assigns_self("lm_head", m.Call(func=m.Name("ParallelLMHead")))
        other = self._statement_with(constructor, head, "self.lm_head = ParallelLMHead(...)")
        statements = list(constructor.body.body)
        last = max(holder, other, key=statements.index)
        self.insert_after(last, self.statements(module, BARE_LANGUAGE_MODEL))

    def _statement_with(
        self, constructor: cst.FunctionDef, matcher: m.Assign, anchor: str
    ) -> cst.CSTNode:
        """The statement of a constructor that holds the one assignment that matches."""
        statements = constructor.body.body
        found = [statement for statement in statements for _ in find_all(statement, matcher)]
        return self.only(found, anchor, f"{self.owner}.__init__")


def _assigns_self(name: str, value: m.BaseExpressionMatchType) -> m.Assign:
    return m.Assign(targets=[m.AssignTarget(self_attribute(name))], value=value)


class WrapperPatch(Patch):
    """The interface on one wrapper class.

    Attributes:
        wrapper: Its entry in the family's table.
        kind: Its codemod.
    """

    wrapper: ClassVar[Wrapper]
    kind: ClassVar[type[WrapperCodemod]]
    upstream = (
        "as vLLM's Kimi-K2.5 (pull request 36361, 0.18.0) and Pixtral (0.19.0) delegate it; "
        "the other wrappers never got it"
    )

    def paths(self, sources: Sources) -> tuple[str, ...]:
        """The wrapper's file, where the release ships it and its language model."""
        needed = (self.wrapper.path, self.wrapper.language_model.path)
        return needed[:1] if all(sources.exists(path) for path in needed) else ()

    def codemod(self, path: str = "") -> type[AnchoredCodemod]:
        """The wrapper's codemod."""
        return self.kind

    def holds(
        self,
        module: ast.Module,
        models: Sequence[FamilyModel] = FAMILY,
        *,
        path: str = "",
        protocol: bool = True,
    ) -> bool:
        """The class implements the interface, and the proposer finds what it shares."""
        owner = syntax.find_class(module, self.wrapper.owner)
        if not syntax.implements_eagle3(module, owner, protocol=protocol):
            return False
        constructor = syntax.find_method(owner, "__init__")
        bare = constructor is not None and any(
            syntax.last_name(node.targets[0]) == "language_model"
            and isinstance(node.value, ast.Call)
            and syntax.last_name(node.value.func) == BARE_CLASS
            for node in ast.walk(constructor)
            if isinstance(node, ast.Assign)
        )
        return not bare or {"model", "lm_head"} <= {
            call.args[1].value
            for call in syntax.calls(constructor or module, "__setattr__")
            if len(call.args) == 3 and isinstance(call.args[1], ast.Constant)  # noqa: PLR2004
        }


def wrapper_patch(entry: Wrapper) -> type[WrapperPatch]:
    """Define, and so register, the patch for one entry of the family's table."""

    class Delegation(WrapperCodemod):
        patch = entry.patch
        owner = entry.owner
        looks_into = (f"{entry.owner}.__init__", f"{entry.owner}.forward")

    class Interface(WrapperPatch):
        name = entry.patch
        title = f"{entry.owner} implements SupportsEagle3"
        wrapper = entry
        kind = Delegation

    return Interface
