"""Where an architecture leads, on real releases whose sources name something else."""

from __future__ import annotations

import pytest

from tools.fetch_release import fetch
from vllm_eagle3_patch.assess.survey import survey
from vllm_eagle3_patch.ground.errors import AnchorNotFoundError
from vllm_eagle3_patch.patches.deepseek_v2 import DeepseekV2
from vllm_eagle3_patch.vllm_source.paths import DEEPSEEK, REGISTRY
from vllm_eagle3_patch.vllm_source.sources import Sources, parse

ARCHITECTURE = "DeepseekV3ForCausalLM"
ENTRY = '"DeepseekV3ForCausalLM": ("deepseek_v2", "DeepseekV3ForCausalLM")'
MODEL_CLASS = "    model_cls = DeepseekV2Model\n"
OUTER = "\nclass DeepseekV2ForCausalLM("
OWN_FORWARD = """
class TracedModel(DeepseekV2Model):
    def forward(self, *args):
        return super().forward(*args)

"""

REPLACED = {
    "a method assigned": ("\nDeepseekV2Model.forward = traced\n", "`DeepseekV2Model.forward = "),
    "a method set": ('\nsetattr(DeepseekV2Model, "forward", traced)\n', "`setattr(DeepseekV2Model"),
    "a method assigned under a condition": (
        "\nif traced:\n    DeepseekV2ForCausalLM.forward = traced\n",
        "`DeepseekV2ForCausalLM.forward = ",
    ),
    "the class assigned": ("\nDeepseekV2Model = traced(DeepseekV2Model)\n", "`DeepseekV2Model = "),
}


def sources(release: str, path: str, *changes: tuple[str, str]) -> Sources:
    text = (fetch(release) / path).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return Sources(fetch(release), {path: text.encode()})


def reason(found: Sources) -> str | None:
    (facts,) = (facts for facts in survey(found) if facts.architecture == ARCHITECTURE)
    assert facts.reason is None or not facts.ready
    return facts.reason


@pytest.mark.parametrize("release", ["0.17.1", "0.33.0"])
def test_as_published_every_model_runs_what_is_patched(release: str) -> None:
    assert {facts.reason for facts in survey(Sources(fetch(release)))} == {None}


@pytest.mark.parametrize("release", ["0.17.1", "0.33.0"])
def test_a_registry_that_names_another_module(release: str) -> None:
    other = ENTRY.replace('"deepseek_v2"', '"forked"')
    assert reason(sources(release, REGISTRY, (ENTRY, other))) == (
        f"the registry takes {ARCHITECTURE} from vllm.model_executor.models.forked, "
        "which is not there"
    )


@pytest.mark.parametrize("release", ["0.17.1", "0.33.0"])
def test_an_inner_model_with_a_forward_of_its_own(release: str) -> None:
    found = sources(
        release,
        DEEPSEEK,
        (OUTER, OWN_FORWARD + OUTER),
        (MODEL_CLASS, MODEL_CLASS.replace("Deepseek", "Traced").replace("TracedV2", "Traced")),
    )
    assert reason(found) == (
        f"{ARCHITECTURE} runs the forward of TracedModel in {DEEPSEEK}; no patch changes it"
    )
    if release == "0.17.1":
        refused(found, "model_cls = DeepseekV2Model")


@pytest.mark.parametrize(("statement", "named"), REPLACED.values(), ids=REPLACED)
def test_a_class_that_a_module_changes_afterwards(statement: str, named: str) -> None:
    text = (fetch("0.17.1") / DEEPSEEK).read_text()
    found = Sources(fetch("0.17.1"), {DEEPSEEK: (text + statement).encode()})
    assert named in (reason(found) or "")
    refused(found, named)


def refused(found: Sources, named: str) -> None:
    """By the patch, which does not hold either, even where all that it writes is there."""
    content = found.read(DEEPSEEK) or b""
    original = (fetch(found.root.name) / DEEPSEEK).read_bytes()
    with pytest.raises(AnchorNotFoundError) as caught:
        DeepseekV2().apply(content, DEEPSEEK)
    assert named in caught.value.message
    patched = DeepseekV2().apply(original, DEEPSEEK)
    assert DeepseekV2().holds(parse(patched, DEEPSEEK))
    added = content[len(original) :] if content.startswith(original) else b""
    assert not added or not DeepseekV2().holds(parse(patched + added, DEEPSEEK))
