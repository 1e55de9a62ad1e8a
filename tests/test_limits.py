"""Each limit both ways, read from packages of one or two files."""

import ast
from pathlib import Path

import pytest

from fake_package import write_package
from vllm_eagle3_patch.assess import limit_messages, limits
from vllm_eagle3_patch.ground import matrix
from vllm_eagle3_patch.ground.errors import UnsupportedError
from vllm_eagle3_patch.ground.family import FamilyModel, select_models
from vllm_eagle3_patch.vllm_source.sources import Sources

DENSE, SPARSE = (select_models((name,))[0] for name in ("deepseek_v3", "deepseek_v32"))

DEEPSEEK = "model_executor/models/deepseek_v2.py"
UBATCH = "v1/worker/gpu_ubatch_wrapper.py"
SELECTOR = "v1/attention/selector.py"
CUDA = "platforms/cuda.py"
RUNNER = "v1/worker/gpu_model_runner.py"
CONFIG = "config/vllm.py"
PROPOSER = "v1/spec_decode/llm_base_proposer.py"
OLDER_PROPOSER = "v1/spec_decode/eagle.py"
NEWER_RUNNER = "v1/worker/gpu/spec_decode/eagle/utils.py"

REFUSES = """
class CudaPlatform:
    def get_attn_backend_cls(cls, selected_backend):
        raise ValueError(f"Selected backend {selected_backend} is not valid for {cls}")
"""
SELECTS = """
def get_attn_backend(head_size, use_mla=False):
    return choose(get_current_vllm_config().attention_config.backend)
"""

# Nothing in these files holds any limit.
UNLIMITED = {
    DEEPSEEK: """
class DeepseekV2DecoderLayer(nn.Module):
    def forward(self, hidden_states):
        return hidden_states

class DeepseekV2Model(nn.Module):
    def forward(self, hidden_states, residual, aux_hidden_states):
        return IntermediateTensors(
            {"hidden_states": hidden_states, "residual": residual, "aux": aux_hidden_states}
        )
""",
    SELECTOR: SELECTS,
    CUDA: REFUSES,
    RUNNER: """
class GPUModelRunner:
    def _get_eagle3_aux_layers_from_config(self):
        return getattr(self.hf_config, "eagle_config", None)
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
    NEWER_RUNNER: "def load_eagle_model(config):\n    return get_model(vllm_config=config)\n",
}


def codes(
    folder: Path, files: dict[str, str | None], model: FamilyModel = DENSE
) -> tuple[str, ...]:
    """The limits of a package like the above but for some files; None: not there."""
    present = {name: text for name, text in {**UNLIMITED, **files}.items() if text is not None}
    return limits.limits_of(write_package(folder, present), model)


def test_a_package_without_any_limit(tmp_path: Path) -> None:
    assert codes(tmp_path, {}) == ()


def stage(tensors: str) -> str:
    forward = f"    def forward(self, hidden_states, residual):\n        return {tensors}\n"
    return f"class DeepseekV2Model(nn.Module):\n{forward}"


@pytest.mark.parametrize(
    ("source", "limited"),
    [
        (
            stage('IntermediateTensors({"hidden_states": hidden_states, "residual": residual})'),
            True,
        ),
        (stage('IntermediateTensors({"hidden_states": hidden_states})'), True),
        (stage('IntermediateTensors({"hidden_states": hidden_states, "aux": aux})'), False),
        (stage("hidden_states"), False),
        ("", False),
    ],
    ids=["both", "one", "and aux", "no stages", "no class"],
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


@pytest.mark.parametrize(
    ("source", "limited"),
    [
        (runner("return hf_config.eagle_aux_hidden_state_layer_ids"), True),
        (runner("return hf_config['eagle_config']", "other"), True),
        (runner('"""eagle_config is not read."""'), True),
        (None, True),
        (runner("return getattr(hf_config, 'eagle_config', None)"), False),
    ],
    ids=["top level", "another function", "docstring", "no runner", "nested"],
)
def test_nested_layer_ids(tmp_path: Path, source: str | None, limited: bool) -> None:
    assert ("nested-layer-ids" in codes(tmp_path, {RUNNER: source})) is limited


def layer(body: str, name: str = "forward") -> str:
    return f"class DeepseekV2DecoderLayer(nn.Module):\n    def {name}(self):\n        {body}\n"


@pytest.mark.parametrize(
    ("source", "limited"),
    [
        (layer("if x.dtype == torch.float16: x *= 1.0 / self.routed_scaling_factor"), True),
        (layer("if x.dtype == torch.float16: x *= 2"), False),
        (layer("x *= self.routed_scaling_factor"), False),
        (layer("if x.dtype == float16: x *= self.routed_scaling_factor", "run"), False),
        ("", False),
    ],
    ids=["scales", "another factor", "any type", "another method", "no class"],
)
def test_float16(tmp_path: Path, source: str, limited: bool) -> None:
    assert ("float16" in codes(tmp_path, {DEEPSEEK: source})) is limited


def test_all_of_them_in_the_contracts_order(tmp_path: Path) -> None:
    files = {
        DEEPSEEK: stage('IntermediateTensors({"hidden_states": hidden_states})')
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


def test_a_package_without_the_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"deepseek_v2\.py is missing"):
        codes(tmp_path, {DEEPSEEK: None})


def test_the_evidence_is_every_file_that_is_read(tmp_path: Path) -> None:
    """Beside the files of patches, which are pinned for themselves."""
    everything = {**UNLIMITED, UBATCH: wrapper("", "torch.cat"), CONFIG: NEWER_BY_DEFAULT}
    sources = write_package(tmp_path, everything)
    read: set[str] = set()

    class Recorded(Sources):
        def module(self, path: str) -> ast.Module:
            read.add(path)
            return super().module(path)

    limits.limits_of(Recorded(sources.root), DENSE)
    assert read == {*limits.EVIDENCE, f"vllm/{SELECTOR}", f"vllm/{UBATCH}"}
