"""Each limit both ways, read from packages of one or two files."""

from pathlib import Path

import pytest

from fake_package import write_package
from vllm_eagle3_patch.assess import limit_messages, limits
from vllm_eagle3_patch.ground import matrix
from vllm_eagle3_patch.ground.family import FamilyModel, select_models
from vllm_eagle3_patch.vllm_source.read_engine import read_family
from vllm_eagle3_patch.vllm_source.registry import Registry

DENSE, SPARSE = (select_models((name,))[0] for name in ("deepseek_v3", "deepseek_v32"))

REGISTRY = "model_executor/models/registry.py"
DEEPSEEK = "model_executor/models/deepseek_v2.py"
KV_CACHE = "v1/core/kv_cache_utils.py"
SPECULATIVE = "config/speculative.py"
UBATCH = "v1/worker/gpu_ubatch_wrapper.py"
SELECTOR = "v1/attention/selector.py"
CUDA = "platforms/cuda.py"
RUNNER = "v1/worker/gpu_model_runner.py"
CONFIG = "config/vllm.py"
PROPOSER = "v1/spec_decode/llm_base_proposer.py"
OLDER_PROPOSER = "v1/spec_decode/eagle.py"
NEWER_RUNNER = "v1/worker/gpu/spec_decode/eagle/utils.py"
NEWER_LAYER_IDS = "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"

REFUSES = """
class CudaPlatform:
    def get_attn_backend_cls(cls, selected_backend):
        raise ValueError(f"Selected backend {selected_backend} is not valid for {cls}")
"""
SELECTS = """
def get_attn_backend(head_size, use_mla=False):
    return choose(get_current_vllm_config().attention_config.backend)
"""

ARCHITECTURES = ("DeepseekV2ForCausalLM", DENSE.architecture, SPARSE.architecture)
CLASS = ("deepseek_v2", "DeepseekV2ForCausalLM")
MODEL = """
class DeepseekV2Model(nn.Module):
    supports_aux_hidden_states_over_pp = True

class DeepseekV2ForCausalLM(nn.Module):
    model_cls = DeepseekV2Model
"""


def layer(body: str, name: str = "forward") -> str:
    return f"class DeepseekV2DecoderLayer(nn.Module):\n    def {name}(self):\n        {body}\n"


# Nothing in these files holds any limit.
UNLIMITED = {
    REGISTRY: f"MODELS = {dict.fromkeys(ARCHITECTURES, CLASS)}\n",
    DEEPSEEK: MODEL + layer("return hidden_states"),
    SPECULATIVE: "class SpeculativeConfig:\n    pass\n",
    KV_CACHE: "class UniformTypeKVCacheSpecs:\n    pass\n",
    SELECTOR: SELECTS,
    CUDA: REFUSES,
    RUNNER: """
class GPUModelRunner:
    def _get_eagle3_aux_layers_from_config(self):
        eagle_config = getattr(self.hf_config, "eagle_config", None)
        return eagle_config.get("eagle_aux_hidden_state_layer_ids")
""",
    CONFIG: "class VllmConfig:\n    pass\n",
    PROPOSER: """
class Proposer:
    def _create_draft_vllm_config(self):
        return replace(self.config, attention_config=replace(self.config.attn, backend=self.own))

    def _get_model(self):
        return get_model(vllm_config=self._create_draft_vllm_config())
""",
    OLDER_PROPOSER: "class EagleProposer(Proposer):\n    pass\n",
    NEWER_LAYER_IDS: "def get_eagle3_aux_layers_from_config(config):\n    return None\n",
    NEWER_RUNNER: "def load_eagle_model(config):\n    return get_model(vllm_config=config)\n",
}


def codes(
    folder: Path, files: dict[str, str | None], model: FamilyModel = DENSE
) -> tuple[str, ...]:
    """The limits of a package like the above but for some files; None: not there."""
    present = {name: text for name, text in {**UNLIMITED, **files}.items() if text is not None}
    package = write_package(folder, present)
    return limits.limits_of(read_family(package, Registry(package)), model)


def test_a_package_without_any_limit(tmp_path: Path) -> None:
    assert codes(tmp_path, {}) == ()


@pytest.mark.parametrize(
    ("source", "limited"),
    [
        (MODEL, False),
        (MODEL.replace("True", "False"), True),
        (MODEL.replace("supports", "admits"), True),
        ("", True),
    ],
    ids=["relays", "does not", "says nothing", "no class"],
)
def test_pipeline_parallel(tmp_path: Path, source: str, limited: bool) -> None:
    assert ("pipeline-parallel" in codes(tmp_path, {DEEPSEEK: source})) is limited


def wrapper(function: str, call: str = "merged") -> str:
    method = "    def {}(self, results):\n        return {}(results)\n"
    methods = [method.format(name, call) for name in ("_capture_ubatches", "_run_ubatches")]
    return f"{function}\nclass UBatchWrapper:\n{''.join(methods)}"


@pytest.mark.parametrize(
    ("source", "limited"),
    [
        (wrapper("", "torch.cat"), True),
        (
            wrapper("""
def merged(results):
    if isinstance(results[0], tuple):
        return tuple(torch.cat(parts) for parts in zip(*results))
    return torch.cat(results)
"""),
            True,
        ),
        (
            wrapper("""
def merged(results):
    if isinstance(results[0], (tuple, list)):
        return tuple(merged(parts) for parts in zip(*results))
    return torch.cat(results)
"""),
            False,
        ),
        (None, False),
    ],
    ids=["tensors only", "tuples of tensors, as 0.22.0", "tuples and lists", "no micro-batches"],
)
def test_dual_batch_overlap(tmp_path: Path, source: str | None, limited: bool) -> None:
    assert ("dual-batch-overlap" in codes(tmp_path, {UBATCH: source})) is limited


LOADS = """
class Proposer:
    def load_model(self):
        self.model = get_model(vllm_config=self.vllm_config)
"""
OPTION = """
def load_eagle_model(vllm_config, own):
    if own is not None:
        vllm_config = replace(vllm_config, attn=replace(vllm_config.attn, backend=own))
    return get_model(vllm_config=vllm_config)
"""
ALWAYS = OPTION.replace("if own is not None", "with own")
NEWER_BY_DEFAULT = """
class VllmConfig:
    @property
    def use_v2_model_runner(self):
        return not self.unsupported()
"""
NEWER_FOR_SOME = """
DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES = frozenset({"DeepseekV2ForCausalLM"})

class VllmConfig:
    @property
    def use_v2_model_runner(self):
        return self._is_default_v2_model_runner_model()
"""
DECIDES = """
def backend_for(backend, use_mla):
    return backend if use_mla else None

def get_attn_backend(head_size, use_mla=False):
    return choose(backend_for(get_current_vllm_config().attention_config.backend, use_mla))
"""

INHERITS = {
    "built with the target's config": ({PROPOSER: LOADS}, True),
    "in an older file": ({OLDER_PROPOSER: LOADS, PROPOSER: None}, True),
    "an option that may be unset": ({PROPOSER: OPTION}, True),
    "always another": ({PROPOSER: ALWAYS}, False),
    "no draft models": ({PROPOSER: None, OLDER_PROPOSER: None}, False),
    "the newer runner by default": ({CONFIG: NEWER_BY_DEFAULT}, True),
    "the newer runner's option": ({CONFIG: NEWER_BY_DEFAULT, NEWER_RUNNER: OPTION}, True),
    "the newer runner, always another": ({CONFIG: NEWER_BY_DEFAULT, NEWER_RUNNER: ALWAYS}, False),
    "no newer runner": ({CONFIG: NEWER_BY_DEFAULT, NEWER_RUNNER: None}, False),
    "the newer runner for other models": ({CONFIG: NEWER_FOR_SOME}, False),
    "no config": ({CONFIG: None}, False),
    "the selector asks for MLA": ({PROPOSER: LOADS, SELECTOR: DECIDES}, False),
    "the platform takes another": (
        {PROPOSER: LOADS, CUDA: "class CudaPlatform:\n    pass\n"},
        False,
    ),
}


@pytest.mark.parametrize(("files", "limited"), INHERITS.values(), ids=INHERITS)
def test_forced_mla_backend(tmp_path: Path, files: dict[str, str | None], limited: bool) -> None:
    assert ("forced-mla-backend" in codes(tmp_path, files)) is limited


def test_the_newer_runner_can_be_the_default_for_some_architectures(tmp_path: Path) -> None:
    (model,) = select_models(("DeepseekV2ForCausalLM",))
    assert codes(tmp_path, {CONFIG: NEWER_FOR_SOME}, model) == ("forced-mla-backend",)


def platform(statement: str, function: str = "check_and_update_config") -> str:
    return f"{REFUSES}\n    def {function}(cls, config):\n        {statement}\n"


FORCES = "config.attention_config.backend = AttentionBackendEnum.FLASHINFER_MLA"


@pytest.mark.parametrize(
    ("source", "limited"),
    [
        (platform(FORCES), True),
        (platform('envs.VLLM_ATTENTION_BACKEND = "CUTLASS_MLA"'), True),
        (platform(f"if blackwell: {FORCES}"), True),
        (platform("config.attention_config.backend = AttentionBackendEnum.FLASH_ATTN"), False),
        (platform("config.attention_config.backend = None"), False),
        (platform("use_mla = backend == AttentionBackendEnum.CUTLASS_MLA"), False),
        (platform("backend = AttentionBackendEnum.CUTLASS_MLA"), False),
        (platform("config.other = AttentionBackendEnum.CUTLASS_MLA"), False),
        (platform(FORCES, "get_attn_backend"), False),
        (platform(FORCES).replace("Selected", "Another"), False),
        (None, False),
    ],
    ids=[
        "in the config",
        "in the environment",
        "under a condition",
        "another backend",
        "none",
        "compared",
        "a local name",
        "another attribute",
        "another function",
        "a platform that takes another",
        "no platform",
    ],
)
def test_blackwell(tmp_path: Path, source: str | None, limited: bool) -> None:
    assert ("blackwell" in codes(tmp_path, {CUDA: source, PROPOSER: LOADS})) is limited


def test_blackwell_is_nothing_to_a_draft_model_with_a_backend_of_its_own(tmp_path: Path) -> None:
    assert codes(tmp_path, {CUDA: platform(FORCES)}) == ()
    assert codes(tmp_path, {CUDA: platform(FORCES), PROPOSER: LOADS, SELECTOR: DECIDES}) == ()


def test_blackwell_stays_where_the_target_has_blocks_that_flashinfer_cannot_read(
    tmp_path: Path,
) -> None:
    cutlass = platform(FORCES.replace("FLASHINFER", "CUTLASS"))
    files = {CUDA: cutlass, PROPOSER: LOADS, SELECTOR: DECIDES}
    assert codes(tmp_path, files) == ("blackwell",)


def test_blackwell_is_nothing_to_a_sparse_target(tmp_path: Path) -> None:
    files = {CUDA: platform(FORCES), PROPOSER: LOADS}
    assert codes(tmp_path, files, SPARSE) == ("forced-mla-backend",)


def runner(body: str, name: str = "_get_eagle3_aux_layers_from_config") -> str:
    return f"class GPUModelRunner:\n    def {name}(self):\n        {body}\n"


NESTED = "config = hf_config['eagle_config']; return config.get('eagle_aux_hidden_state_layer_ids')"


@pytest.mark.parametrize(
    ("source", "limited"),
    [
        (runner("return hf_config.eagle_aux_hidden_state_layer_ids"), True),
        (runner(NESTED, "other"), True),
        (runner(f'"""{NESTED}"""'), True),
        (None, True),
        (runner(NESTED), False),
    ],
    ids=["top level", "another function", "docstring", "no runner", "nested"],
)
def test_nested_layer_ids(tmp_path: Path, source: str | None, limited: bool) -> None:
    assert ("nested-layer-ids" in codes(tmp_path, {RUNNER: source})) is limited


@pytest.mark.parametrize(
    ("source", "limited"),
    [
        (layer("if x.dtype == torch.float16: x *= 1.0 / self.routed_scaling_factor"), True),
        (layer("if x.dtype == torch.float16: x *= 2"), False),
        (layer("x *= self.routed_scaling_factor"), False),
        (layer("if x.dtype == float16: x *= self.routed_scaling_factor", "run"), False),
        ("", False),
    ],
    ids=["scales", "another factor", "any type", "another method", "no layer"],
)
def test_float16(tmp_path: Path, source: str, limited: bool) -> None:
    assert ("float16" in codes(tmp_path, {DEEPSEEK: MODEL + source})) is limited


def test_all_of_them_in_the_contracts_order(tmp_path: Path) -> None:
    files = {
        DEEPSEEK: MODEL.replace("True", "False")
        + layer("x *= 1.0 / self.routed_scaling_factor if float16 else 1"),
        UBATCH: wrapper("", "torch.cat"),
        CUDA: platform(FORCES),
        PROPOSER: LOADS,
        RUNNER: None,
    }
    assert (*codes(tmp_path, files), "platform") == tuple(limit_messages.MESSAGES)


def test_each_message_is_one_line() -> None:
    assert not [text for text in limit_messages.MESSAGES.values() if "\n" in text or not text]


def test_what_is_left_after_patching_is_not_said_to_be_mended_by_it() -> None:
    for release in matrix.oldest_first():
        applied = {name for pin in release.files.values() for name in pin.patches}
        for model in release.models:
            for code in model.limits_patched if model.support == "patch" else ():
                said = limit_messages.message(code, applied)
                blamed = [name for name in applied if f"the patch {name} mends" in said]
                assert not blamed, (release.name, model.architecture, code)


@pytest.mark.parametrize(
    ("code", "patch", "left"),
    [
        ("dual-batch-overlap", "dual-batch-overlap", "do not use --enable-dbo"),
        ("blackwell", "draft-attention-backend", "set FLASHINFER_MLA for the target"),
        ("blackwell", "draft-attention-metadata", "set FLASHINFER_MLA for the target"),
    ],
)
def test_a_limit_that_remains_says_what_still_fails(code: str, patch: str, left: str) -> None:
    assert "mends that" in limit_messages.message(code, ())
    assert left in limit_messages.message(code, (patch, "deepseek-v2"))
