"""The patched constructor of a bare Kimi-K2.5, run with a stand-in ``nn.Module``."""

from typing import Any

import pytest
from kimi_k25_sources import BARE_AFTER, BARE_BEFORE
from wrapper_runs import Module, Parameter, PPMissingLayer, build, names_of

from vllm_eagle3_patch.patches.wrappers import PATCHES

PATCHED = PATCHES["kimi-k25"]().apply(BARE_BEFORE.encode(), "kimi_k25.py")


def run(source: str | bytes, *, last_rank: bool = True) -> Any:
    owner = "KimiK25ForConditionalGeneration"
    return build(source, owner, last_rank=last_rank, vocab_size=8, hidden_size=4)


def test_the_proposer_finds_what_it_shares() -> None:
    wrapper = run(PATCHED)
    language_model = wrapper.get_language_model()
    assert language_model.model.embed_tokens is language_model.embed_tokens
    assert language_model.lm_head is wrapper.lm_head


def test_without_the_patch_it_finds_neither() -> None:
    language_model = run(BARE_BEFORE).get_language_model()
    assert not hasattr(language_model, "model")
    assert not hasattr(language_model, "lm_head")


@pytest.mark.parametrize("kind", [Module, Parameter])
def test_nothing_is_registered_twice(kind: type) -> None:
    names = names_of(run(PATCHED), kind)
    assert names == names_of(run(BARE_BEFORE), kind)
    assert len(names) == {Module: 3, Parameter: 2}[kind]


def test_a_plain_assignment_would_register_the_head_twice() -> None:
    sharing = 'object.__setattr__(self.language_model, "lm_head", self.lm_head)'
    naive = BARE_AFTER.replace(sharing, "self.language_model.lm_head = self.lm_head")
    assert "language_model.lm_head.weight" in names_of(run(naive), Parameter)


def test_a_stage_that_is_not_the_last_has_no_head_to_share() -> None:
    wrapper = run(PATCHED, last_rank=False)
    assert isinstance(wrapper.get_language_model().lm_head, PPMissingLayer)


def test_ids_go_to_the_language_model() -> None:
    wrapper = run(PATCHED)
    assert wrapper.get_eagle3_aux_hidden_state_layers() == (2, 30, 58)
    wrapper.set_aux_hidden_state_layers((1, 2, 3))
    assert wrapper.language_model.captured == (1, 2, 3)
