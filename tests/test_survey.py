"""What the source of a small package says of each model of the family."""

from pathlib import Path

import pytest

from fake_package import write_package
from vllm_eagle3_patch import survey
from vllm_eagle3_patch.errors import AnchorNotFoundError, UnsupportedError
from vllm_eagle3_patch.facts import ModelFacts
from vllm_eagle3_patch.family import FAMILY, FamilyModel

REGISTRY = "model_executor/models/registry.py"
DEEPSEEK = "model_executor/models/deepseek_v2.py"
KIMI = "model_executor/models/kimi_k25.py"
SPECULATIVE = "config/speculative.py"
PROPOSER = "v1/spec_decode/eagle.py"
INTERFACES = "model_executor/models/interfaces.py"
KV_CACHE = "v1/core/kv_cache_utils.py"

METHODS = """
    def set_aux_hidden_state_layers(self, layers): pass
    def get_eagle3_aux_hidden_state_layers(self): pass
"""
READY = {
    REGISTRY: """
_TEXT_MODELS = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "DeepseekV3ForCausalLM": ("deepseek_v2", "DeepseekV3ForCausalLM"),
}
_MULTIMODAL_MODELS = {
    "KimiK25ForConditionalGeneration": ("kimi_k25", "KimiK25ForConditionalGeneration"),
}
""",
    DEEPSEEK: f"""
class DeepseekV2Model(nn.Module):
    def forward(self, hidden_states):
        aux_hidden_states = []
        for layer in self.layers:
            if layer.id in self.aux_hidden_state_layers:
                aux_hidden_states.append(hidden_states)
        return hidden_states, aux_hidden_states

class DeepseekV2ForCausalLM(SupportsEagle3):{METHODS}
""",
    KIMI: f"class KimiK25ForConditionalGeneration(SupportsEagle3):{METHODS}",
    SPECULATIVE: """
class SpeculativeConfig:
    attention_backend: str | None = None
    def verify(self):
        supported = ["llama", "deepseek_v3", "kimi_k2"]
        if not any(name in self.text_config.model_type for name in supported):
            raise ValueError(f"Eagle3 is only supported for {supported}")
""",
    PROPOSER: """
class EagleProposer:
    def propose(self):
        return self.attn_metadata_builder
    def load_model(self, target_model):
        if self.name == "KimiK25ForConditionalGeneration":
            self.model.config.image_token_index = target_model.config.media_placeholder_token_id
""",
    INTERFACES: "class SupportsEagle3(Protocol): pass\n",
    KV_CACHE: "class UniformTypeKVCacheSpecs: pass\n",
    "v1/worker/gpu_model_runner.py": """
def _get_eagle3_aux_layers_from_config(self):
    return self.hf_config.get("eagle_config")
""",
}


def test_a_release_without_the_protocol_is_asked_for_the_methods_only(tmp_path: Path) -> None:
    found = facts(
        tmp_path, {INTERFACES: "class SupportsLoRA(Protocol): pass\n", DEEPSEEK: WITHOUT_BASE}
    )
    assert found["DeepseekV3ForCausalLM"].missing == ()


def test_a_protocol_that_the_runner_asks_for_and_nobody_has_is_an_error(tmp_path: Path) -> None:
    runner = {"v1/worker/gpu_model_runner.py": "assert supports_eagle3(model)\n"}
    with pytest.raises(AnchorNotFoundError, match="class SupportsEagle3"):
        facts(tmp_path, {INTERFACES: "class SupportsOther(Protocol): pass\n", **runner})


def facts(folder: Path, files: dict[str, str | None]) -> dict[str, ModelFacts]:
    """The facts by architecture of a package like the above but for some files."""
    present = {name: text for name, text in {**READY, **files}.items() if text is not None}
    surveyed = survey.survey(write_package(folder, present))
    return {model.architecture: model for model in surveyed}


def test_a_package_where_all_is_ready(tmp_path: Path) -> None:
    assert facts(tmp_path, {}) == {
        "DeepseekV3ForCausalLM": ModelFacts(
            "DeepseekV3ForCausalLM", ("deepseek_v3", "kimi_k2"), (), None, engine=False, limits=()
        ),
        "KimiK25ForConditionalGeneration": ModelFacts(
            "KimiK25ForConditionalGeneration", ("kimi_k25",), (), None, engine=False, limits=()
        ),
    }
    assert all(model.ready and model.interface for model in facts(tmp_path, {}).values())


WITHOUT_BASE = READY[DEEPSEEK].replace("(SupportsEagle3)", "(Module)")
KIMI_WITHOUT_BASE = READY[KIMI].replace("(SupportsEagle3)", "(Module)")


@pytest.mark.parametrize(
    ("files", "text_model", "wrapper"),
    [
        ({DEEPSEEK: WITHOUT_BASE}, ("deepseek-v2",), ("deepseek-v2",)),
        (
            {SPECULATIVE: READY[SPECULATIVE].replace("deepseek_v3", "qwen")},
            ("eagle3-allowlist",),
            ("eagle3-allowlist",),
        ),
        ({SPECULATIVE: "class SpeculativeConfig: pass\n"}, (), ()),
        ({KIMI: KIMI_WITHOUT_BASE}, (), ("kimi-k25",)),
        (
            {PROPOSER: READY[PROPOSER].replace("KimiK25", "Other")},
            (),
            ("multimodal-image-token",),
        ),
        (
            {DEEPSEEK: WITHOUT_BASE, KIMI: KIMI_WITHOUT_BASE},
            ("deepseek-v2",),
            ("deepseek-v2", "kimi-k25"),
        ),
    ],
    ids=["interface", "allowlist", "no allowlist", "wrapper", "image token", "two"],
)
def test_what_each_model_lacks(
    tmp_path: Path,
    files: dict[str, str | None],
    text_model: tuple[str, ...],
    wrapper: tuple[str, ...],
) -> None:
    found = facts(tmp_path, files)
    assert found["DeepseekV3ForCausalLM"].missing == text_model
    assert found["KimiK25ForConditionalGeneration"].missing == wrapper
    for model in found.values():
        assert model.reason is None
        assert model.ready == model.interface == (not model.missing)


def test_limits_are_the_models_own(tmp_path: Path) -> None:
    found = facts(tmp_path, {SPECULATIVE: "class SpeculativeConfig: pass\n"})
    assert found["DeepseekV3ForCausalLM"].limits == ("forced-mla-backend",)


def test_a_registered_model_whose_file_is_elsewhere_is_not_ready(tmp_path: Path) -> None:
    """Its source says nothing of the interface: that is no yes."""
    assert not facts(tmp_path, {KIMI: None})["KimiK25ForConditionalGeneration"].ready


# What the installation ships


def test_models_in_the_familys_order(tmp_path: Path) -> None:
    names = [model.architecture for model in FAMILY]
    source = f"_MODELS = {dict.fromkeys(reversed(names))}\n"
    sources = write_package(tmp_path, {REGISTRY: source})
    assert survey.shipped(sources) == FAMILY


@pytest.mark.parametrize(
    "source",
    [
        "_MODELS = {}\n",
        "_MODELS = {'LlamaForCausalLM': 1, **OTHERS, name: 2}\n",
        "_PREVIOUS = ['DeepseekV3ForCausalLM']\n# DeepseekV2ForCausalLM\n",
        "_ALIASES = {'Other': 'DeepseekV3ForCausalLM'}\n",
    ],
    ids=["none", "others", "not in a table", "not as a key"],
)
def test_no_model_of_the_family(tmp_path: Path, source: str) -> None:
    sources = write_package(tmp_path, {REGISTRY: source})
    assert survey.shipped(sources) == ()
    assert survey.survey(sources) == ()


def test_no_registry(tmp_path: Path) -> None:
    assert survey.shipped(write_package(tmp_path, {"__init__.py": ""})) == ()


def test_a_registry_that_is_not_python(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"registry\.py"):
        survey.survey(write_package(tmp_path, {REGISTRY: "{"}))


# What the engine can run

PAGES = "one page size"
BUILDER = "target's builder"
GROUPS = "self.runner.attn_groups[0][0]"


def propose(body: str, name: str = "propose") -> str:
    return f"class EagleProposer:\n    def {name}(self):\n        {body}\n"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({KV_CACHE: "def unify(specs): raise NotImplementedError\n"}, PAGES),
        ({KV_CACHE: None}, PAGES),
        ({PROPOSER: propose(f"builder = {GROUPS}.metadata_builders[0]")}, BUILDER),
        ({PROPOSER: propose("builder = self.runner.attn_groups[0] [\n 0].builder")}, BUILDER),
        ({PROPOSER: propose("builder = self.runner.attn_groups[group][0]")}, None),
        ({PROPOSER: propose(f"builder = {GROUPS}", "propose_tree")}, None),
        ({PROPOSER: "from .llm_base_proposer import *\n"}, None),
        ({PROPOSER: None}, None),
    ],
    ids=[
        "one page size, as 0.10.2",
        "no KV cache manager",
        "the target's builder, as 0.11.0",
        "the same in another layout",
        "the draft's own builder",
        "in another function",
        "no propose",
        "no proposer",
    ],
)
def test_why_the_engine_cannot_run_it(
    tmp_path: Path, files: dict[str, str | None], reason: str | None
) -> None:
    present = {name: text for name, text in {**READY, **files}.items() if text is not None}
    found = survey.engine_reason(write_package(tmp_path, present))
    assert found is None if reason is None else reason in (found or "")


def test_an_engines_reason_is_every_models(tmp_path: Path) -> None:
    for model in facts(tmp_path, {KV_CACHE: ""}).values():
        assert PAGES in (model.reason or "")
        assert (model.engine, model.interface, model.ready) == (True, True, False)


ORPHAN = FamilyModel("OrphanForCausalLM", ("orphan",), ("deepseek_v3",), ("deepseek-v2", "none"))


@pytest.mark.parametrize("kv_cache", [READY[KV_CACHE], ""], ids=["able engine", "unable engine"])
def test_a_model_whose_patch_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_cache: str
) -> None:
    monkeypatch.setattr(survey, "FAMILY", (ORPHAN,))
    registry = '_MODELS = {"OrphanForCausalLM": 1}\n'
    model = facts(tmp_path, {REGISTRY: registry, KV_CACHE: kv_cache})["OrphanForCausalLM"]
    assert model.missing == ("none",)
    assert model.reason == "OrphanForCausalLM lacks none, and no patch adds that"
    assert (model.engine, model.interface, model.ready) == (False, False, False)


def test_the_evidence_is_every_file_that_is_read() -> None:
    files = {f"vllm/{name}" for name in (REGISTRY, KV_CACHE, PROPOSER)}
    assert files < set(survey.EVIDENCE)
    assert list(survey.EVIDENCE) == sorted(set(survey.EVIDENCE))
