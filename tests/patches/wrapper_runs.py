"""Constructors of patched wrappers, run with a stand-in for torch's ``nn.Module``."""

from __future__ import annotations

import ast
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any


class Parameter:
    """What a module has weights in."""


class Module:
    """Registers what is assigned to it, as torch's does."""

    def __init__(self) -> None:
        object.__setattr__(self, "registered", {})

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, (Module, Parameter)):
            self.registered[name] = value
        else:
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["registered"][name]
        except KeyError:
            raise AttributeError(name) from None


class Head(Module):
    """``ParallelLMHead`` or an embedding."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__()
        self.weight = Parameter()


class PPMissingLayer(Module):
    """What a stage that is not the last has for a head."""


class DeepseekV2Model(Module):
    """The bare language model, patched."""

    def __init__(self, vllm_config: object, prefix: str = "") -> None:
        super().__init__()
        self.embed_tokens = Head()
        self.captured: tuple[int, ...] = ()

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.captured = layers

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return 2, 30, 58


class DeepseekV2ForCausalLM(Module):
    """The language model with its head, patched."""

    def __init__(self, vllm_config: object, **options: object) -> None:
        super().__init__()
        self.architectures = options.get("architectures")
        self.model = DeepseekV2Model(vllm_config)
        self.lm_head = Head()

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.model.set_aux_hidden_state_layers(layers)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        layers: tuple[int, ...] = self.model.get_eagle3_aux_hidden_state_layers()
        return layers


class MultiModal:
    """``SupportsMultiModal`` from 0.15.0 on: which attribute holds the language model."""

    def _mark_tower_model(self, *_: object) -> nullcontext[None]:
        return nullcontext()

    def _mark_language_model(self, *_: object) -> nullcontext[None]:
        return nullcontext()

    def get_language_model(self) -> Any:
        return self.language_model  # type: ignore[attr-defined]


def build(source: str | bytes, owner: str, *, last_rank: bool = True, **config: object) -> Any:
    """An instance of a wrapper class of a source, whose imports are replaced by the above."""
    module = ast.parse(source)
    module.body = [node for node in module.body if isinstance(node, ast.ClassDef)]
    others = ("SupportsPP", "SupportsLoRA", "SupportsEagle3")
    names: dict[str, Any] = {
        **{name: type(name, (), {}) for name in others},
        "SupportsMultiModal": MultiModal,
        "nn": SimpleNamespace(Module=Module),
        "DeepseekV2Model": DeepseekV2Model,
        "init_vllm_registered_model": DeepseekV2ForCausalLM,
        "ParallelLMHead": Head,
        "PPMissingLayer": PPMissingLayer,
        "LogitsProcessor": lambda size: lambda head, states: (head, states),
        "get_pp_group": lambda: SimpleNamespace(is_last_rank=last_rank),
    }
    exec(compile(module, "wrapper.py", "exec"), names)
    return names[owner](vllm_config=SimpleNamespace(**config))


def names_of(module: Module, kind: type, prefix: str = "") -> list[str]:
    """The dotted names of all modules or parameters, one registered twice listed twice."""
    names = []
    for name, child in module.registered.items():
        names += [prefix + name] if isinstance(child, kind) else []
        names += names_of(child, kind, f"{prefix}{name}.") if isinstance(child, Module) else []
    return names
