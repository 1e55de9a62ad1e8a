"""What the class of a target model does, read from its file and those of its bases."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.vllm_source import syntax
from vllm_eagle3_patch.vllm_source.engine import DEFAULT_LAYERS, TargetClass
from vllm_eagle3_patch.vllm_source.paths import INTERFACES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.vllm_source.registry import Registry
    from vllm_eagle3_patch.vllm_source.sources import Sources

    Located = tuple[str, ast.ClassDef]

PROTOCOL = "SupportsEagle3"
SETTER = "set_aux_hidden_state_layers"
DEFAULTS = ("get_eagle3_aux_hidden_state_layers", "get_eagle3_default_aux_hidden_state_layers")
IDS = "aux_hidden_state_layers"
MIXIN = "EagleModelMixin"
BARE_LANGUAGE_MODEL = "DeepseekV2Model"


class Targets:
    """Reads target classes of one installation.

    Args:
        sources: Its files.
        registry: Its registry.
    """

    def __init__(self, sources: Sources, registry: Registry) -> None:
        self._sources = sources
        self._registry = registry
        self._protocol = self._protocol_class()
        self._known: dict[int, list[_Backbone]] = {}

    def read(self, architecture: str) -> TargetClass | None:
        """What an architecture's class does, None if the registry does not know it."""
        classes = self._registry.classes(architecture)
        if not classes:
            return None
        family = next((m for m in FAMILY if m.architecture == architecture), None)
        lacking = tuple(path for path, owner in classes if not self._implements(path, owner))
        wrapper = self._is_wrapper(classes[0])
        inner = (self._registry.text_classes(family) if family else ()) or classes
        backbones = self._backbones_of(inner)
        shared = not wrapper or family is None or self._shares(classes[0], family)
        return replace(
            self._layers(inner),
            interface=len(lacking) < len(classes) and shared,
            language_model=all(self._implements(path, owner) for path, owner in inner)
            and all(_collects(backbone) for backbone in backbones),
            wrapper=wrapper,
            lacking_files=lacking if len(lacking) < len(classes) else (),
            default_layers=self._default_layers((*classes, *inner)),
        )

    def read_layers(self, model: FamilyModel) -> TargetClass:
        """Only what the layers of a model of the family do: no file of a wrapper is read."""
        return self._layers(self._registry.text_classes(model))

    def _layers(self, classes: tuple[Located, ...]) -> TargetClass:
        backbones = self._backbones_of(classes)
        return TargetClass(
            first_id=bool(backbones) and all(map(_keeps_first, backbones)),
            last_id=bool(backbones) and all(map(_keeps_last, backbones)),
            relays=bool(backbones) and all(map(_relays, backbones)),
            float16_scaling=all(self._scales_float16(place) for place in classes),
            partial_sums=any(self._partial_sums(place) for place in self.models(classes)),
            gathers=all(map(_gathers, backbones)),
        )

    def _protocol_class(self) -> ast.ClassDef | None:
        if not self._sources.exists(INTERFACES):
            return None
        return syntax.find_class(self._sources.module(INTERFACES), PROTOCOL)

    def _implements(self, path: str, owner: ast.ClassDef) -> bool:
        """The protocol among its bases, and methods that do something there or in the protocol.

        Up to 0.10.0 there is no protocol: the runner calls the two methods by name.
        """
        lineage = [base for _, base in self._registry.lineage(path, owner)]
        if self._protocol is not None and not any(
            PROTOCOL in syntax.base_names(base) for base in lineage
        ):
            return False
        holders = [*lineage, *([self._protocol] if self._protocol is not None else [])]
        sets = any(syntax.does_something(syntax.find_method(h, SETTER)) for h in holders)
        names = any(
            syntax.returns_something(syntax.find_method(h, name))
            for h in holders
            for name in DEFAULTS
        )
        return sets and names

    def _is_wrapper(self, place: Located) -> bool:
        return any(
            "SupportsMultiModal" in syntax.base_names(base)
            for _, base in self._registry.lineage(*place)
        )

    def _shares(self, place: Located, family: FamilyModel) -> bool:
        """Whether the proposer finds the embedding and the head that a draft model shares.

        It looks for ``<language model>.model`` and ``.lm_head`` (vllm/v1/spec_decode/eagle.py,
        load_model). Kimi-K2.5 in 0.15.0 and 0.15.1 and Kimi-VL up to 0.14.1 hold a bare
        ``DeepseekV2Model`` and have the head themselves.
        """
        _, owner = place
        constructor = syntax.find_method(owner, "__init__")
        if constructor is None or family.wrapper is None:
            return True
        bare = any(
            syntax.last_name(node.targets[0]) == "language_model"
            and isinstance(node.value, ast.Call)
            and syntax.last_name(node.value.func) == BARE_LANGUAGE_MODEL
            for node in ast.walk(constructor)
            if isinstance(node, ast.Assign)
        )
        return not bare or {"model", "lm_head"} <= {
            text for call in syntax.calls(constructor, "__setattr__") for text in _strings(call)
        }

    def models(self, classes: tuple[Located, ...]) -> Iterator[Located]:
        """The inner model of a class: its ``model_cls``, or what its constructor builds."""
        for path, owner in classes:
            for file, base in self._registry.lineage(path, owner):
                name = _model_class(base)
                if name is None:
                    continue
                yield from self._registry.named(file, name)
                break

    def _backbones_of(self, classes: tuple[Located, ...]) -> list[_Backbone]:
        for place in classes:
            if id(place[1]) not in self._known:
                self._known[id(place[1])] = list(self._backbones(place))
        return [backbone for _, owner in classes for backbone in self._known[id(owner)]]

    def _backbones(self, place: Located) -> Iterator[_Backbone]:
        for path, model in self.models((place,)):
            lineage = [base for _, base in self._registry.lineage(path, model)]
            forward = next(
                (f for base in lineage if (f := syntax.find_method(base, "forward"))), None
            )
            yield _Backbone(lineage, forward)

    def _default_layers(self, classes: tuple[Located, ...]) -> tuple[str, ...]:
        for place in classes:
            holders = [base for _, base in self._registry.lineage(*place)]
            holders += [base for _, base in self.models((place,))]
            for owner in holders:
                for name in reversed(DEFAULTS):
                    found = _three(syntax.find_method(owner, name))
                    if found:
                        return found
        return DEFAULT_LAYERS

    def _scales_float16(self, place: Located) -> bool:
        return any(
            syntax.mentions(forward, "float16")
            and syntax.mentions(forward, "routed_scaling_factor")
            for forward in self._layer_forwards(place)
        )

    def _layer_forwards(self, place: Located) -> Iterator[ast.AST]:
        for path, _ in self.models((place,)):
            for owner in self._registry.classes_in(path):
                forward = syntax.find_method(owner, "forward")
                if owner.name.endswith("DecoderLayer") and forward is not None:
                    yield forward

    def _partial_sums(self, model: Located) -> bool:
        """The layers leave the sum over ranks to the next norm (see ``limits._platform``)."""
        path, forward = next(
            (
                (file, method)
                for file, base in self._registry.lineage(*model)
                if (method := syntax.find_method(base, "forward")) is not None
            ),
            (model[0], None),
        )
        fused = any(
            owner.name == "DeepseekV32DecoderLayer"
            and syntax.mentions(owner, "fused_allreduce_rms_norm")
            for owner in self._registry.classes_in(path)
        )
        return fused and not any(
            syntax.mentions(loop, "tensor_model_parallel_all_reduce")
            for loop in ast.walk(forward or ast.Pass())
            if isinstance(loop, ast.For)
        )


class _Backbone:
    """An inner model: its classes and its forward."""

    def __init__(self, lineage: list[ast.ClassDef], forward: syntax.FunctionNode | None) -> None:
        self.lineage = lineage
        self.forward: ast.AST = forward or ast.Pass()
        self.mixed_in = any(MIXIN in syntax.base_names(base) for base in lineage)


def _model_class(owner: ast.ClassDef) -> str | None:
    for statement in owner.body:
        if (
            isinstance(statement, ast.Assign)
            and syntax.last_name(statement.targets[0]) == "model_cls"
        ):
            return syntax.last_name(statement.value) or None
    constructor = syntax.find_method(owner, "__init__")
    for node in ast.walk(constructor or ast.Pass()):
        match node:
            case ast.Assign(
                targets=[ast.Attribute(value=ast.Name(id="self"), attr="model")],
                value=ast.Call(func=ast.Name(id=name)),
            ) if name != "maybe_init":
                return name
            case _:
                continue
    initializer = syntax.find_method(owner, "_init_model")
    for node in ast.walk(initializer or ast.Pass()):
        match node:
            case ast.Return(value=ast.Call(func=ast.Name(id=name))):
                return name
            case _:
                continue
    return None


def _collects(backbone: _Backbone) -> bool:
    return syntax.mentions(backbone.forward, "aux_hidden_states")


def _asks(node: ast.AST) -> bool:
    """Whether a test asks for an id among the ids to capture."""
    return isinstance(node, ast.Compare) and any(
        syntax.last_name(part) == IDS for part in node.comparators
    )


def _keeps_first(backbone: _Backbone) -> bool:
    """What is appended knows that there is no residual before the first layer."""
    if backbone.mixed_in and not any(map(_asks, ast.walk(backbone.forward))):
        return True
    return any(
        isinstance(node, ast.If | ast.IfExp)
        and isinstance(node.test, ast.Compare)
        and isinstance(node.test.ops[0], ast.Is | ast.IsNot)
        and syntax.last_name(node.test.left) == "residual"
        for loop in ast.walk(backbone.forward)
        if isinstance(loop, ast.For)
        for node in ast.walk(loop)
    )


def _keeps_last(backbone: _Backbone) -> bool:
    """A test after the loop, or the loop captures what leaves a layer under the next id."""
    if backbone.mixed_in and not any(map(_asks, ast.walk(backbone.forward))):
        return True
    return any(
        _asks(node)
        and isinstance(node, ast.Compare)
        and syntax.last_name(node.left) in ("end_layer", "num_hidden_layers", "num_layers")
        for node in ast.walk(backbone.forward)
    )


def _relays(backbone: _Backbone) -> bool:
    """States of earlier pipeline stages go along with the intermediate tensors (0.29.0 on)."""
    return any(
        isinstance(statement, ast.Assign | ast.AnnAssign)
        and any(
            syntax.last_name(target) == "supports_aux_hidden_states_over_pp"
            for target in syntax.assigned(statement)
        )
        and isinstance(statement.value, ast.Constant)
        and statement.value.value is True
        for base in backbone.lineage
        for statement in base.body
    )


def _gathers(backbone: _Backbone) -> bool:
    """Where states are split over ranks between layers, what is captured is put together."""
    splits = any(
        isinstance(node, ast.Attribute) and node.attr == "use_sequence_parallel_moe"
        for node in ast.walk(backbone.forward)
    )
    return not splits or any(
        _asks(node.test) and syntax.mentions(node, "tensor_model_parallel_all_gather")
        for node in ast.walk(backbone.forward)
        if isinstance(node, ast.If)
    )


def _three(method: syntax.FunctionNode | None) -> tuple[str, ...]:
    """The expressions of a method that returns a tuple of them, or puts it in a name first."""
    if method is None:
        return ()
    tuples = [
        node.value
        for node in ast.walk(method)
        if isinstance(node, ast.Return | ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and node.value.elts
    ]
    if len(tuples) != 1:
        return ()
    return tuple(ast.unparse(part) for part in tuples[0].elts)


def _strings(call: ast.Call) -> Iterator[str]:
    for argument in call.args:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value
