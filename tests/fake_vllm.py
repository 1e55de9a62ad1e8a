"""A torch and a vLLM small enough for a test, with all that the proof of ``verify`` asks for."""

from __future__ import annotations

from pathlib import Path

TORCH = """
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

float32, float64 = "torch.float32", "torch.float64"
cuda = SimpleNamespace(is_initialized=lambda: False)


class Tensor:
    def __init__(self, rows, dtype=float32):
        self.rows = [list(row) for row in rows]
        self.dtype = dtype

    def __add__(self, other):
        pairs = zip(self.rows, other.rows)
        return Tensor([[a + b for a, b in zip(*rows)] for rows in pairs])

    def add_(self, other):
        self.rows[:] = (self + other).rows
        return self

    def fill_(self, value):
        self.rows[:] = [[value for _ in row] for row in self.rows]
        return self

    def clone(self):
        return Tensor(self.rows)

    def double(self):
        return Tensor(self.rows, float64)


def tensor(values, dtype=None, device=None):
    return Tensor([row if isinstance(row, list) else [row] for row in values])


def equal(left, right):
    return left.rows == right.rows


@contextmanager
def no_grad():
    yield


class Module:
    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)


nn = SimpleNamespace(Module=Module)
"""

INTERFACES = '''
from typing import Protocol, runtime_checkable


@runtime_checkable
class SupportsEagle3(Protocol):
    supports_eagle3 = True

    def set_aux_hidden_state_layers(self, layers):
        """The ids."""
        ...

    def get_eagle3_aux_hidden_state_layers(self):
        """The default ids."""
        ...


def supports_eagle3(model):
    return isinstance(model, SupportsEagle3)
'''

REGISTRY = """
import importlib


class Entry:
    def __init__(self, module_name, class_name):
        self.module_name, self.class_name = module_name, class_name

    def load_model_cls(self):
        return getattr(importlib.import_module(self.module_name), self.class_name)


class ModelRegistry:
    models = {
        "DeepseekV2ForCausalLM": Entry(
            "vllm.model_executor.models.deepseek_v2", "DeepseekV2ForCausalLM"
        ),
        "KimiK25ForConditionalGeneration": Entry(
            "vllm.model_executor.models.kimi_k25", "KimiK25ForConditionalGeneration"
        ),
        "Dots3NoteForCausalLM": Entry("vllm.models.dots3_note", "Dots3NoteForCausalLM"),
    }
"""

DEEPSEEK = """
from torch import nn

from vllm.model_executor.models.interfaces import SupportsEagle3


def get_pp_group():
    raise RuntimeError("no process group")


def fused_allreduce_rms_norm(hidden_states, residual, norm):
    raise RuntimeError("no kernels")


class DeepseekV2Model(nn.Module):
    aux_hidden_state_layers = ()

    def __init__(self, config):
        raise RuntimeError("nobody may construct a model")

    def __call__(self, *args):
        raise RuntimeError("this compiles")

    def set_aux_hidden_state_layers(self, layers):
        self.aux_hidden_state_layers = layers

    def forward(self, input_ids, positions, intermediate_tensors, inputs_embeds=None):
        assert get_pp_group().is_first_rank
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        residual = None
        collected = []
        for number, layer in enumerate(self.layers):
            if number in self.aux_hidden_state_layers:
                collected.append(
                    hidden_states.clone() if residual is None else hidden_states + residual
                )
            hidden_states, residual = layer(positions, hidden_states, residual)
        if len(self.layers) in self.aux_hidden_state_layers:
            collected.append(hidden_states + residual)
        hidden_states, _ = fused_allreduce_rms_norm(hidden_states, residual, self.norm)
        return (hidden_states, collected) if collected else hidden_states


class DeepseekV2ForCausalLM(nn.Module, SupportsEagle3):
    def set_aux_hidden_state_layers(self, layers):
        self.model.set_aux_hidden_state_layers(layers)

    def get_eagle3_aux_hidden_state_layers(self):
        count = len(self.model.layers)
        return (2, count // 2, count - 3)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)
"""

KIMI = """
from torch import nn

from vllm.model_executor.models.interfaces import SupportsEagle3


class KimiK25ForConditionalGeneration(nn.Module, SupportsEagle3):
    def __init__(self, config):
        self.language_model = make_language_model(config)

    def set_aux_hidden_state_layers(self, layers):
        self.language_model.set_aux_hidden_state_layers(layers)

    def get_eagle3_aux_hidden_state_layers(self):
        return self.language_model.get_eagle3_aux_hidden_state_layers()

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        return self.language_model(input_ids, positions, intermediate_tensors, inputs_embeds)
"""

CONFIG = """
class SpeculativeConfig:
    draft_tensor_parallel_size = None

    @property
    def limit(self):
        return 1

    @staticmethod
    def positive(number):
        return number > 0

    def is_eagle3(self):
        return self.method == "eagle3"

    def _verify_args(self):
        assert self.limit == 1 and self.positive(self.num_speculative_tokens)
        assert self.draft_tensor_parallel_size is None
        supported = ["llama", "deepseek_v2", "kimi_k2", "deepseek_v3"]
        model_type = self.target_model_config.hf_text_config.model_type
        if self.is_eagle3() and not any(item in model_type for item in supported):
            raise ValueError(f"Eagle3 is only supported for {supported} models")
        return self
"""

PROPOSER = """
def supports_multimodal(model):
    raise RuntimeError("nobody may ask")


class EagleProposer:
    def load_model(self, target_model):
        self.model = None
        if supports_multimodal(target_model):
            assert hasattr(target_model, "config")
            if self.get_model_name(target_model) == "KimiK25ForConditionalGeneration":
                self.model.config.image_token_index = (
                    target_model.config.media_placeholder_token_id
                )
            else:
                self.model.config.image_token_index = target_model.config.image_token_index
            target_language_model = target_model.get_language_model()
"""

INIT = "vllm/__init__.py"
PLATFORMS = "vllm/platforms.py"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"
MODELS = "vllm/model_executor/models"

FILES = {
    "torch/__init__.py": TORCH,
    INIT: "",
    PLATFORMS: "class current_platform:\n    is_cuda = staticmethod(lambda: False)\n",
    "vllm/config.py": CONFIG,
    "vllm/model_executor/__init__.py": "",
    f"{MODELS}/__init__.py": "",
    f"{MODELS}/interfaces.py": INTERFACES,
    f"{MODELS}/registry.py": REGISTRY,
    f"{MODELS}/deepseek_v2.py": DEEPSEEK,
    f"{MODELS}/kimi_k25.py": KIMI,
    "vllm/models/__init__.py": "",
    "vllm/models/dots3_note.py": 'raise ImportError("needs CUDA")\n',
    "vllm/v1/__init__.py": "",
    "vllm/v1/spec_decode/__init__.py": "",
    "vllm/v1/spec_decode/eagle.py": PROPOSER,
    "vllm/v1/worker/__init__.py": "",
    # Nobody may import it: it is only read.
    RUNNER: "ids = self.get_eagle3_aux_hidden_state_layers()\n1 / 0\n",
}


def install(folder: Path, *changes: tuple[str, str, str]) -> Path:
    """Write both packages; each change is a file, a text in it, and what takes its place."""
    files = dict(FILES)
    for path, old, new in changes:
        assert old in files[path], (path, old)
        files[path] = files[path].replace(old, new, 1) if old else new + files[path]
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    return folder
