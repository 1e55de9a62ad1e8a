"""The semantic check itself, on small look-alike models of our own, good and broken."""

import pytest

from semantics import ALL_RULES, Subject, check_all

GOOD = """
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.compilation.decorators import support_torch_compile
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.sequence import IntermediateTensors

from .interfaces import SupportsPP
from .utils import make_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "eagle_aux_hidden_state_layer_ids"


class DecoderLayer(nn.Module):
    pass


def too_few(ids):
    return len(set(ids)) < 3 or min(ids) < 0


@support_torch_compile
class DeepseekV2Model(nn.Module):
    aux_hidden_state_layers: tuple[int, ...] = ()

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(self.config.vocab_size)
        self.start_layer, self.end_layer, self.layers = make_layers(
            self.config.num_hidden_layers, lambda prefix: DecoderLayer(), prefix=prefix
        )
        self.norm = RMSNorm(self.config.hidden_size)

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        lowest, highest = self.start_layer, self.config.num_hidden_layers
        for layer in layers:
            if not lowest <= layer <= highest or layers.count(layer) > 1:
                raise ValueError(f"layer id {layer}: each once, {lowest} to {highest}")
        self.aux_hidden_state_layers = tuple(layers)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        count = self.config.num_hidden_layers
        ids = (2, count // 2, count - 3)
        if too_few(ids):
            raise ValueError(f"{count} layers have no default ids: set {KEY}")
        return ids

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        if get_pp_group().is_first_rank:
            states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            residual = None
        else:
            states = intermediate_tensors["hidden_states"]
            residual = intermediate_tensors["residual"]
        aux = []
        held = islice(self.layers, self.start_layer, self.end_layer)
        for index, layer in enumerate(held, start=self.start_layer):
            if index in self.aux_hidden_state_layers:
                aux.append(states.clone() if residual is None else states + residual)
            states, residual = layer(positions, states, residual)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": states, "residual": residual})
        if self.end_layer in self.aux_hidden_state_layers:
            aux.append(states + residual)
        states, _ = self.norm(states, residual)
        return (states, aux) if aux else states


class DeepseekV2ForCausalLM(nn.Module, SupportsPP):
    model_cls = DeepseekV2Model

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.model.set_aux_hidden_state_layers(layers)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.model.get_eagle3_aux_hidden_state_layers()

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)
"""

COLLECT = "states.clone() if residual is None else states + residual"
SET_IDS = "self.aux_hidden_state_layers = tuple(layers)"
DELEGATE = "self.model.set_aux_hidden_state_layers(layers)"
BOUNDS = "not lowest <= layer <= highest or layers.count(layer) > 1"


def changed(*changes: tuple[str, str]) -> bytes:
    """Returns the good source with each fragment, found exactly once, replaced."""
    source = GOOD
    for fragment, replacement in changes:
        assert source.count(fragment) == 1, fragment
        source = source.replace(fragment, replacement)
    return source.encode()


def failing(subject: Subject) -> dict[str, str]:
    return {rule: result for rule, result in check_all(subject).items() if result != "ok"}


def test_a_good_model_holds_every_rule() -> None:
    assert check_all(Subject(GOOD.encode())) == dict.fromkeys(ALL_RULES, "ok")


def test_a_good_model_without_an_outer_class_holds_every_rule() -> None:
    assert failing(Subject(GOOD.encode(), outer_class=None)) == {}


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        pytest.param(
            [(COLLECT, "states if residual is None else states + residual")],
            {"first"},
            id="the first state aliases the buffer that becomes the residual",
        ),
        pytest.param([(COLLECT, "states + residual")], {"first"}, id="no case for id 0"),
        pytest.param(
            [(COLLECT, "states.clone() if residual is None else residual")],
            {"order", "first", "last", "middle"},
            id="the residual itself, which later layers write",
        ),
        pytest.param(
            [(COLLECT, "states.clone() if residual is None else residual.add_(states)")],
            {"order", "first", "last", "same", "middle"},
            id="summed in place",
        ),
        pytest.param(
            [("if index in self.aux", "if index + 1 in self.aux")],
            {"order", "first", "last", "middle"},
            id="one layer early",
        ),
        pytest.param(
            [
                ("            states, residual = layer(positions, states, residual)\n", ""),
                (
                    "            if index in self.aux",
                    "            states, residual = layer(positions, states, residual)\n"
                    "            if index in self.aux",
                ),
            ],
            {"order", "first", "last", "middle"},
            id="the stream leaving the layer",
        ),
        pytest.param(
            [("start=self.start_layer", "start=0")],
            {"last", "middle"},
            id="ids counted from this stage",
        ),
        pytest.param(
            [("if self.end_layer in self.aux", "if None in self.aux")],
            {"last"},
            id="the last id dropped",
        ),
        pytest.param(
            [
                (
                    "aux.append(states + residual)\n        states, _",
                    "aux.append(states)\n        states, _",
                )
            ],
            {"last"},
            id="the last state aliases what the norm writes",
        ),
        pytest.param(
            [("return (states, aux) if aux else states", "return states, aux")],
            {"plain", "middle", "subclass"},
            id="a pair without ids",
        ),
        pytest.param(
            [("        aux = []", "        aux = []\n        states = states.clone()")],
            {"plain"},
            id="a copy without ids",
        ),
        pytest.param(
            [("return (states, aux) if aux else states", "return states")],
            {"order", "first", "last", "middle"},
            id="captured but not returned",
        ),
        pytest.param(
            [
                (
                    '{"hidden_states": states, "residual": residual}',
                    '{"hidden_states": states, "residual": residual} | {"aux": aux}',
                )
            ],
            {"middle"},
            id="a middle stage sends captured states on",
        ),
        pytest.param(
            [
                (
                    "if not get_pp_group().is_last_rank:",
                    "if not aux and not get_pp_group().is_last_rank:",
                )
            ],
            {"middle"},
            id="a middle stage with ids runs on into the norm",
        ),
        pytest.param(
            [
                ("    aux_hidden_state_layers: tuple[int, ...] = ()\n", ""),
                ("        super().__init__()", "        self.aux_hidden_state_layers = ()"),
            ],
            {"subclass"},
            id="the ids live in __init__ only",
        ),
        pytest.param([(BOUNDS, "False")], {"bad_ids"}, id="every id accepted"),
        pytest.param([(BOUNDS, "not 0 <= layer <= highest")], {"bad_ids"}, id="repeats accepted"),
        pytest.param(
            [(BOUNDS, "not 0 <= layer <= highest or layers.count(layer) > 1")],
            {"bad_ids"},
            id="ids of another stage accepted",
        ),
        pytest.param(
            [(": each once, {lowest} to {highest}", " is bad")],
            {"bad_ids"},
            id="the valid range is not named",
        ),
        pytest.param([("layer id {layer}: each", "each")], {"bad_ids"}, id="the id is not named"),
        pytest.param(
            [('raise ValueError(f"layer', 'raise TypeError(f"layer')],
            {"bad_ids"},
            id="another error than ValueError",
        ),
        pytest.param(
            [("<= highest or", "< highest or")], {"last", "bad_ids"}, id="the last id refused"
        ),
        pytest.param([("count - 3)", "count - 2)")], {"default_ids"}, id="another default"),
        pytest.param([("if too_few(ids):", "if False:")], {"default_ids"}, id="a default anyway"),
        pytest.param([("set {KEY}", "sorry")], {"default_ids"}, id="the key is not named"),
        pytest.param(
            [(DELEGATE, "pass")],
            {"order", "first", "last", "middle", "bad_ids"},
            id="the outer class does not delegate",
        ),
        pytest.param(
            [(SET_IDS, "self.layer_ids = layers")],
            {"order", "first", "last", "middle"},
            id="the ids go to another attribute",
        ),
    ],
)
def test_a_broken_model_fails_exactly_the_rules_it_breaks(
    changes: list[tuple[str, str]], rules: set[str]
) -> None:
    assert set(failing(Subject(changed(*changes)))) == rules


def test_a_name_that_is_not_imported_is_a_failure() -> None:
    results = failing(Subject(changed(("from itertools import islice\n", ""))))
    assert "NameError: name 'islice' is not defined" in results["plain"]


def test_a_name_imported_for_type_checkers_only_is_a_failure() -> None:
    source = changed(("        super().__init__()", "        assert VllmConfig"))
    assert "NameError: name 'VllmConfig' is not defined" in failing(Subject(source))["plain"]


def test_without_the_interface_only_the_rules_about_ids_fail() -> None:
    renamed = (
        "def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:\n"
        f"        {DELEGATE}"
    )
    results = failing(Subject(changed((renamed, "def unused(self):\n        pass"))))
    assert not {"plain", "subclass", "default_ids"} & set(results)
    assert results["order"] == "DeepseekV2ForCausalLM has no set_aux_hidden_state_layers"


MIXIN = b"""
from typing import Protocol


class EagleModelMixin:
    aux_hidden_state_layers: tuple[int, ...] = ()

    def _set_aux_hidden_state_layers(self, layers):
        self.aux_hidden_state_layers = layers


class SupportsEagle3(Protocol):
    def set_aux_hidden_state_layers(self, layers):
        assert isinstance(self.model, EagleModelMixin), "no EagleModelMixin"
        self.model._set_aux_hidden_state_layers(layers)
"""


def mixin_source(model_bases: str) -> bytes:
    """Returns the good source with the outer class inheriting how ids are set."""
    own_method = (
        "    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:\n"
        f"        {DELEGATE}\n"
    )
    return changed(
        (own_method, ""),
        ("import SupportsPP", "import EagleModelMixin, SupportsEagle3, SupportsPP"),
        ("(nn.Module, SupportsPP)", "(nn.Module, SupportsPP, SupportsEagle3)"),
        ("class DeepseekV2Model(nn.Module)", f"class DeepseekV2Model({model_bases})"),
    )


def test_base_classes_come_from_the_extra_sources() -> None:
    source = mixin_source("nn.Module, EagleModelMixin")
    assert set(failing(Subject(source, extra_sources=[MIXIN]))) == {"bad_ids"}


def test_an_assertion_of_the_model_is_a_failure_and_no_crash() -> None:
    results = failing(Subject(mixin_source("nn.Module"), extra_sources=[MIXIN]))
    assert "no EagleModelMixin" in results["order"]
    assert "no EagleModelMixin" in results["middle"]


def test_only_the_rules_asked_for_are_checked() -> None:
    assert check_all(Subject(GOOD.encode()), ["plain", "last"]) == {"plain": "ok", "last": "ok"}


def test_a_class_that_is_in_no_source_is_an_error() -> None:
    with pytest.raises(LookupError, match="DeepseekV32Model"):
        Subject(GOOD.encode(), model_class="DeepseekV32Model")
