"""The patched constructor of a bare Kimi-K2.5, run with a stand-in ``nn.Module``."""

import ast
from types import SimpleNamespace
from typing import Any

import pytest
from kimi_k25_sources import AFTER, BARE_AFTER, BARE_BEFORE

from vllm_eagle3_patch.patches.kimi_k25 import KimiK25


class Parameter:
    pass


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


class DeepseekV2Model(Module):
    def __init__(self, vllm_config: object, prefix: str = "") -> None:
        super().__init__()
        self.embed_tokens = Head()
        self.layers: list[object] = []
        self.captured: tuple[int, ...] = ()

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.captured = layers

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return 2, 30, 58


class Head(Module):
    def __init__(self, *args: object) -> None:
        super().__init__()
        self.weight = Parameter()


class PPMissingLayer(Module):
    pass


def build(source: str | bytes, *, last_rank: bool = True) -> Any:
    """An instance of the wrapper in a source, whose imports are replaced by the above."""
    module = ast.parse(source)
    module.body = [node for node in module.body if isinstance(node, ast.ClassDef)]
    protocols = ("SupportsMultiModal", "SupportsPP", "SupportsEagle3")
    names: dict[str, Any] = {
        **{name: type(name, (), {}) for name in protocols},
        "nn": SimpleNamespace(Module=Module),
        "DeepseekV2Model": DeepseekV2Model,
        "ParallelLMHead": Head,
        "PPMissingLayer": PPMissingLayer,
        "LogitsProcessor": lambda size: lambda head, states: (head, states),
        "get_pp_group": lambda: SimpleNamespace(is_last_rank=last_rank),
    }
    exec(compile(module, "kimi_k25.py", "exec"), names)
    config = SimpleNamespace(vocab_size=8, hidden_size=4)
    return names["KimiK25ForConditionalGeneration"](vllm_config=config, prefix="model")


def names_of(module: Module, kind: type, prefix: str = "") -> list[str]:
    """The dotted names of all modules or parameters, one registered twice listed twice."""
    names = []
    for name, child in module.registered.items():
        names += [prefix + name] if isinstance(child, kind) else []
        names += names_of(child, kind, f"{prefix}{name}.") if isinstance(child, Module) else []
    return names


PATCHED = KimiK25().apply(BARE_BEFORE.encode(), "kimi_k25.py")


def test_the_proposer_finds_what_it_shares() -> None:
    wrapper = build(PATCHED)
    language_model = wrapper.get_language_model()
    assert language_model.model.embed_tokens is language_model.embed_tokens
    assert language_model.lm_head is wrapper.lm_head


def test_without_the_patch_it_finds_neither() -> None:
    language_model = build(BARE_BEFORE).get_language_model()
    assert not hasattr(language_model, "model")
    assert not hasattr(language_model, "lm_head")


@pytest.mark.parametrize("kind", [Module, Parameter])
def test_nothing_is_registered_twice(kind: type) -> None:
    names = names_of(build(PATCHED), kind)
    assert names == names_of(build(BARE_BEFORE), kind)
    assert len(names) == {Module: 3, Parameter: 2}[kind]


def test_a_plain_assignment_would_register_the_head_twice() -> None:
    sharing = 'object.__setattr__(self.language_model, "lm_head", self.lm_head)'
    naive = BARE_AFTER.replace(sharing, "self.language_model.lm_head = self.lm_head")
    assert "language_model.lm_head.weight" in names_of(build(naive), Parameter)


def test_a_stage_that_is_not_the_last_has_no_head_to_share() -> None:
    wrapper = build(PATCHED, last_rank=False)
    assert isinstance(wrapper.get_language_model().lm_head, PPMissingLayer)


def test_ids_go_to_the_language_model() -> None:
    wrapper = build(PATCHED)
    assert wrapper.get_eagle3_aux_hidden_state_layers() == (2, 30, 58)
    wrapper.set_aux_hidden_state_layers((1, 2, 3))
    assert wrapper.language_model.captured == (1, 2, 3)


def test_ids_go_to_a_language_model_with_its_head() -> None:
    source = AFTER.replace("init_vllm_registered_model(", "DeepseekV2Model(").replace(
        'architectures=["DeepseekV2ForCausalLM"]', 'prefix=""'
    )
    source = source.replace("with self._mark_language_model(vllm_config):", "if True:")
    wrapper = build(source)
    wrapper.set_aux_hidden_state_layers((4,))
    assert wrapper.language_model.captured == (4,)
