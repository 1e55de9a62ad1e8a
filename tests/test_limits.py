"""Each limit both ways, read from packages of one or two files."""

from pathlib import Path

import pytest

from fake_package import write_package
from vllm_eagle3_patch import limits, limits_text
from vllm_eagle3_patch.errors import UnsupportedError
from vllm_eagle3_patch.family import FamilyModel, select_models

DENSE, SPARSE = (select_models((name,))[0] for name in ("deepseek_v3", "deepseek_v32"))

DEEPSEEK = "model_executor/models/deepseek_v2.py"
UBATCH = "v1/worker/gpu_ubatch_wrapper.py"
SPECULATIVE = "config/speculative.py"
CUDA = "platforms/cuda.py"
RUNNER = "v1/worker/gpu_model_runner.py"

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
    UBATCH: """
def _merged(results):
    if isinstance(results[0], list):
        return [torch.cat(parts) for parts in zip(*results)]
    return torch.cat(results)
""",
    SPECULATIVE: "class SpeculativeConfig:\n    attention_backend: str | None = None\n",
    CUDA: "class CudaPlatform:\n    def check_and_update_config(cls, config):\n        pass\n",
    RUNNER: """
class GPUModelRunner:
    def _get_eagle3_aux_layers_from_config(self):
        return getattr(self.hf_config, "eagle_config", None)
""",
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


@pytest.mark.parametrize(
    ("source", "limited"),
    [
        ("result = torch.cat(sorted_results, dim=0)\n", True),
        ("isinstance(slot_mapping, list)\nresult = torch.cat(sorted_results, dim=0)\n", True),
        ("isinstance(sorted_results[0], tuple)\nresult = torch.cat(sorted_results)\n", True),
        ("isinstance(sorted_results[0], list)\nresult = torch.cat(sorted_results)\n", False),
        ("isinstance(results[0], (tuple, list))\nresult = torch.cat(results)\n", False),
        ("result = merge(sorted_results)\n", False),
        (None, False),
    ],
    ids=[
        "concatenates",
        "knows lists of others",
        "knows tuples, as 0.22.0",
        "knows lists",
        "knows both",
        "never concatenates",
        "no micro-batches",
    ],
)
def test_dual_batch_overlap(tmp_path: Path, source: str | None, limited: bool) -> None:
    assert ("dual-batch-overlap" in codes(tmp_path, {UBATCH: source})) is limited


CONFIG = "class SpeculativeConfig:\n    method: str = ''\n"


@pytest.mark.parametrize(
    ("source", "limited"),
    [
        (CONFIG, True),
        (f"class OtherConfig:\n    attention_backend: str\n{CONFIG}", True),
        (f"{CONFIG}    def f(self):\n        attention_backend: str = ''\n", True),
        ("attention_backend: str = ''\n", True),
        (None, True),
        (f"{CONFIG}    attention_backend: AttentionBackendEnum | None = None\n", False),
    ],
    ids=["none", "of another class", "of a function", "of the module", "no config", "its own"],
)
def test_forced_mla_backend(tmp_path: Path, source: str | None, limited: bool) -> None:
    assert ("forced-mla-backend" in codes(tmp_path, {SPECULATIVE: source})) is limited


def platform(statement: str, function: str = "check_and_update_config") -> str:
    return f"class CudaPlatform:\n    def {function}(cls, config):\n        {statement}\n"


FORCES = "config.attention_config.backend = AttentionBackendEnum.CUTLASS_MLA"


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
        (platform(FORCES, "get_attn_backend_cls"), False),
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
        "no platform",
    ],
)
def test_blackwell(tmp_path: Path, source: str | None, limited: bool) -> None:
    assert ("blackwell" in codes(tmp_path, {CUDA: source, SPECULATIVE: CONFIG})) is limited


def test_blackwell_is_nothing_to_a_draft_model_with_a_backend_of_its_own(tmp_path: Path) -> None:
    assert "blackwell" not in codes(tmp_path, {CUDA: platform(FORCES)})


def test_blackwell_is_nothing_to_a_sparse_target(tmp_path: Path) -> None:
    files = {CUDA: platform(FORCES), SPECULATIVE: CONFIG}
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
        UBATCH: "torch.cat(results)\n",
        SPECULATIVE: CONFIG,
        CUDA: platform(FORCES),
        RUNNER: None,
    }
    assert codes(tmp_path, files) == tuple(limits_text.MESSAGES)


def test_each_message_is_one_line() -> None:
    assert not [text for text in limits_text.MESSAGES.values() if "\n" in text or not text]


def test_a_package_without_the_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"deepseek_v2\.py is missing"):
        codes(tmp_path, {DEEPSEEK: None})


def test_the_evidence_is_every_file_that_is_read() -> None:
    assert {f"vllm/{name}" for name in UNLIMITED} == set(limits.EVIDENCE)
