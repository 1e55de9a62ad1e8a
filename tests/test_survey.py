"""What the source of a small package says of each model of the family."""

from pathlib import Path

import pytest

from fake_package import write_package
from vllm_eagle3_patch.assess import survey
from vllm_eagle3_patch.assess.model_facts import ModelFacts
from vllm_eagle3_patch.ground.errors import AnchorNotFoundError, UnsupportedError
from vllm_eagle3_patch.ground.family import FAMILY, FamilyModel, select_models

REGISTRY = "model_executor/models/registry.py"
DEEPSEEK = "model_executor/models/deepseek_v2.py"
KIMI = "model_executor/models/kimi_k25.py"
SPECULATIVE = "config/speculative.py"
PROPOSER = "v1/spec_decode/eagle.py"
INTERFACES = "model_executor/models/interfaces.py"
KV_CACHE = "v1/core/kv_cache_utils.py"
DRAFT_MODEL = "model_executor/models/llama_eagle3.py"

METHODS = """
    def set_aux_hidden_state_layers(self, layers): self.model.layers = layers
    def get_eagle3_aux_hidden_state_layers(self): return 2, 30, 58
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
from .interfaces import SupportsEagle3

class DeepseekV2Model(nn.Module):
    aux_hidden_state_layers = ()

    def forward(self, hidden_states):
        aux_hidden_states = []
        for idx, layer in enumerate(
            islice(self.layers, self.start_layer, self.end_layer), start=self.start_layer
        ):
            if idx in self.aux_hidden_state_layers:
                aux_hidden_states.append(hidden_states + residual)
            hidden_states, residual = layer(positions, hidden_states, residual)
        if aux_hidden_states:
            return hidden_states, aux_hidden_states
        return hidden_states

class DeepseekV2ForCausalLM(SupportsEagle3):{METHODS}
""",
    KIMI: f"""
from .interfaces import SupportsEagle3

class KimiK25ForConditionalGeneration(SupportsEagle3):{METHODS}
""",
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
    hands_on = "aux_hidden_states = []\n        IntermediateTensors({'hidden_states': 1})"
    found = facts(
        tmp_path, {DEEPSEEK: READY[DEEPSEEK].replace("aux_hidden_states = []", hands_on, 1)}
    )
    assert found["DeepseekV3ForCausalLM"].limits == ("pipeline-parallel",)


def test_a_registered_model_whose_file_is_elsewhere_is_not_ready(tmp_path: Path) -> None:
    """Its source says nothing of the interface: that is no yes."""
    assert not facts(tmp_path, {KIMI: None})["KimiK25ForConditionalGeneration"].ready


# What the installation ships


def test_models_in_the_familys_order(tmp_path: Path) -> None:
    names = [model.architecture for model in FAMILY]
    source = f"_MODELS = {dict.fromkeys(reversed(names))}\n"
    files = {REGISTRY: source, DEEPSEEK: "", "model_executor/models/mistral_large_3.py": ""}
    assert survey.shipped(write_package(tmp_path, files)) == FAMILY


def test_a_wrapper_whose_language_model_is_not_there_is_no_model_of_the_family(
    tmp_path: Path,
) -> None:
    """Pixtral is older than Mistral-Large-3, which alone makes it one."""
    source = '_MODELS = {"PixtralForConditionalGeneration": ("pixtral", "Pixtral")}\n'
    assert survey.shipped(write_package(tmp_path, {REGISTRY: source, DEEPSEEK: ""})) == ()


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
EMBEDDINGS = "does not support multimodal inputs yet"
REFUSES = f'raise NotImplementedError(f"{{type(self).__name__}} {EMBEDDINGS}.")\n'
(TEXT_MODEL,) = select_models(("deepseek_v3",))[:1]
(WRAPPER,) = select_models(("kimi_k25",))


@pytest.mark.parametrize(
    ("files", "text_model", "wrapper"),
    [
        ({KV_CACHE: "def unify(specs): raise NotImplementedError\n"}, PAGES, PAGES),
        ({KV_CACHE: None}, PAGES, PAGES),
        ({KV_CACHE: "", DRAFT_MODEL: REFUSES}, PAGES, PAGES),
        ({DRAFT_MODEL: REFUSES}, None, EMBEDDINGS),
        ({DRAFT_MODEL: "return self.model(input_ids, inputs_embeds)\n"}, None, None),
        ({DRAFT_MODEL: None}, None, None),
    ],
    ids=[
        "one page size",
        "no KV cache manager",
        "one page size and text only, as 0.10.2",
        "text only, as 0.11.0",
        "able",
        "no draft model",
    ],
)
def test_why_the_engine_cannot_run_it(
    tmp_path: Path, files: dict[str, str | None], text_model: str | None, wrapper: str | None
) -> None:
    present = {name: text for name, text in {**READY, **files}.items() if text is not None}
    package = write_package(tmp_path, present)
    for model, reason in ((TEXT_MODEL, text_model), (WRAPPER, wrapper)):
        found = survey.engine_reason(package, model)
        assert found is None if reason is None else reason in (found or "")
        assert "\n" not in (found or "")


def test_an_engine_that_knows_one_page_size_says_what_works_instead(tmp_path: Path) -> None:
    found = survey.engine_reason(write_package(tmp_path, {KV_CACHE: ""}), TEXT_MODEL)
    assert "VLLM_MLA_DISABLE=1" in (found or "")


def test_an_engines_reason_is_every_models(tmp_path: Path) -> None:
    for model in facts(tmp_path, {KV_CACHE: ""}).values():
        assert PAGES in (model.reason or "")
        assert (model.engine, model.interface, model.ready) == (True, True, False)


def test_the_draft_models_reason_is_the_wrappers_only(tmp_path: Path) -> None:
    found = facts(tmp_path, {DRAFT_MODEL: REFUSES})
    assert found["DeepseekV3ForCausalLM"].ready
    wrapper = found["KimiK25ForConditionalGeneration"]
    assert (wrapper.engine, wrapper.interface, wrapper.ready) == (True, True, False)


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
    files = {f"vllm/{name}" for name in (REGISTRY, KV_CACHE, DRAFT_MODEL)}
    assert files < set(survey.EVIDENCE)
    assert list(survey.EVIDENCE) == sorted(set(survey.EVIDENCE))
