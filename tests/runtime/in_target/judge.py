"""Are the EAGLE-3 aux hidden states of a target model right? Run by the server's interpreter.

Each class to judge is an object with ``architecture`` and, where they apply, ``original`` (the path
of the file as it was, by module), ``judged`` (what to judge in its place, by module),
``config`` (a config's keys), ``model_type`` and ``name``. The report has the verdict of each.

No knowledge of any model is used. The expected state of id ``k`` is what the last norm is given in
the *unpatched* model cut to ``k`` layers, as that norm adds it up. Everything is compared bit for
bit, in float32, on the CPU. The original and the judged file are each imported under their own name
in a forked process of their own, so that neither finds the other's custom operators, registries and
layer names; the weights follow from the parameters' names, so they are the same in both.

Only the standard library, that interpreter's torch and its vLLM, and no syntax newer than 3.9.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.machinery
import importlib.util
import io
import json
import os
import re
import select
import signal
import sys
import tempfile
import time
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # some norms are compiled where they are defined

import torch

NUM_LAYERS = 7
"""The least for which vLLM's default ids, 2, n // 2 and n - 3, differ from each other and n."""
NUM_TOKENS = 6
LARGEST = 1 << 20
"""Elements of a parameter; a larger one is in a tower that no text goes through."""
SECONDS = 120.0
"""For one class in one process."""
MODELS = "vllm.model_executor.models"
SET_LAYERS = "set_aux_hidden_state_layers"

PLAIN, IN_PLACE, OVERWRITTEN = "plain", "in place", "overwritten"
MODES = (PLAIN, IN_PLACE, OVERWRITTEN)
"""How the model is run: as its torch code does it; with each fused add and norm writing into what
it is given, as the GPU kernels do; and with what a layer was given overwritten once it returned."""

TINY = {
    **{
        "num_hidden_layers": NUM_LAYERS,
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 64,
    },
    **{
        "num_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rotary_dim": 16,
    },
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), 128),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("ffn_hidden_size", "mlp_ffn_hidden_size"), 96),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group", "first_k_dense_replace"), 1),
    **{"zero_expert_num": 2, "q_lora_rank": 24, "kv_lora_rank": 32, "v_head_dim": 16},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "qk_head_dim": 24},
    **{"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8, "sliding_window": 4},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "dim_model_base": 64},
}
"""Sizes by the names that configs give them; a name that a config lacks is left out."""

_EVERY = {
    name: TINY[name]
    for name in (
        *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
    )
}
"""What every config has, whoever wrote its class."""

_SPARSE = ("index_topk", "index_n_heads", "index_head_dim")
"""What the config of a model with sparse attention has in common; vLLM asserts that it is there."""

_DENSE = {name: size for name, size in TINY.items() if name not in (*_SPARSE, "sliding_window")}

IMPLIED = {
    **TINY,
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "bias"), False),
    **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm", "norm_head"), False),
    **dict.fromkeys(("mla_scale_q_lora", "mla_scale_kv_lora", "tie_word_embeddings"), False),
    **dict.fromkeys(
        ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_layer_freq"), 1
    ),
    **dict.fromkeys(("routed_scaling_factor", "partial_rotary_factor"), 1.0),
    **dict.fromkeys(("scale_emb", "scale_depth"), 1.0),
    **dict.fromkeys(("aux_loss_alpha", "embedding_dropout"), 0.0),
    **{"norm_topk_prob": True, "use_mixed_mlp_moe": True, "route_norm": True},
    **{"topk_method": "greedy", "scoring_func": "softmax", "score_func": "sigmoid"},
    **{"rope_theta": 10000.0, "rope_scaling": None, "pad_token_id": 0},
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    **dict.fromkeys(("hidden_act", "hidden_act_moe", "activation_function"), "silu"),
    **{"rms_norm_eps": 1e-6, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5},
    "layer_types": ["full_attention"] * NUM_LAYERS,
    **{"sliding_window": None, "num_nextn_predict_layers": 0, "zero_expert_type": "identity"},
    **{"is_moe_layer": [False] + [True] * (NUM_LAYERS - 1), "bskcn_tv": [0.9, 0.8]},
}
"""What vLLM reads of configs whose own class does not name it; given only where a class asks."""


class UnprovenError(Exception):
    """Nothing can be said of a class; its text is why."""


class _TooLongError(UnprovenError):
    """A process did not end in time, whatever it was doing."""


class _AtTheNormError(Exception):
    """A cut model has reached its last norm: the rest says nothing."""


# The original beside the installed file


class _OriginalLoader(importlib.machinery.SourceFileLoader):
    """Reads a kept original; neither reads nor writes bytecode."""

    def path_stats(self, path):
        raise OSError("no bytecode for a kept original")


class _Originals:
    """A finder that gives kept originals for the modules that they are the originals of."""

    def __init__(self, paths):
        self.paths = paths

    def find_spec(self, name, path=None, target=None):
        if name not in self.paths:
            return None
        loader = _OriginalLoader(name, self.paths[name])
        return importlib.util.spec_from_file_location(name, self.paths[name], loader=loader)


def use_originals(paths):
    """From now on, import these files in place of the installed ones."""
    loaded = sorted(set(paths) & set(sys.modules))
    if loaded:
        raise UnprovenError(f"{loaded[0]} is imported before any model is asked for")
    sys.meta_path.insert(0, _Originals(paths))


# A tiny config


def model_type_of(architecture):
    """The config's model type: as transformers pairs them, else one with the same letters."""
    from transformers.models.auto import configuration_auto, modeling_auto
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    for name, classes in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if architecture in (classes if isinstance(classes, tuple) else (classes,)):
            return name
    letters = re.sub(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|Model)$", "", architecture)
    known = (*_CONFIG_REGISTRY, *configuration_auto.CONFIG_MAPPING_NAMES)
    for suffix in ("", "text"):
        for name in known:
            if re.sub(r"[_.-]", "", name).lower() == letters.lower() + suffix:
                return name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", letters).lower()


def config_class(model_type):
    """vLLM's own config class before transformers' (vllm/transformers_utils/config.py)."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    if model_type in _CONFIG_REGISTRY:
        return _CONFIG_REGISTRY[model_type]
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    # A checkpoint brings its own: what vLLM reads of it is given when it asks (IMPLIED).
    from transformers import PretrainedConfig

    base = type("CheckpointConfig", (PretrainedConfig,), {"model_type": model_type})
    return lambda **given: base(**{**dict(_EVERY), **given})


def tiny_config(asked, implied):
    """A config of the class's own with few and small layers."""
    from vllm.model_executor.models.registry import _MULTIMODAL_MODELS

    model_type = asked.get("model_type") or asked.get("config", {}).get("model_type")
    model_type = model_type or model_type_of(asked["architecture"])
    given = {k: v for k, v in asked.get("config", {}).items() if k != "quantization_config"}
    config = config_class(model_type)(**given)
    text = config.get_text_config()
    if asked["architecture"] not in _MULTIMODAL_MODELS:
        config = text  # such as Llama 4's: the class is the language model, its config is a part
    config.architectures = [asked["architecture"]]
    layers = getattr(text, "num_hidden_layers", None)
    for name, usual in implied.items():
        found = getattr(text, "hidden_activation", usual) if name == "hidden_act" else usual
        setattr(text, name, copy.deepcopy(found))
    text.zero_expert_type = getattr(text, "zero_expert_type", None) or "identity"
    for name in ("n_group", "topk_group"):
        if getattr(text, name, 1) is None:
            setattr(text, name, IMPLIED[name])
    for name, value in {**TINY, **asked.get("tiny", {})}.items():
        had = getattr(text, name, None)
        if had is not None and not isinstance(had, (bool, str)):
            with suppress(AttributeError):  # a property
                setattr(text, name, [value] * NUM_LAYERS if isinstance(had, list) else value)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and layers and len(value) == layers and name not in TINY:
            setattr(text, name, (value * NUM_LAYERS)[:NUM_LAYERS])
        if name.endswith("_token_id") and isinstance(value, int):
            setattr(text, name, 1)
    for part in {id(c): c for c in (config, text)}.values():
        part.torch_dtype = part.dtype = "float32"
    _tiny_rope(text)
    return config


def _tiny_rope(text):
    """Rope factors that are lists are as long as half a rotated head."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = getattr(text, name, None)
        if isinstance(rope, dict):
            half = int(TINY["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
            for key, value in rope.items():
                if isinstance(value, list) and value and isinstance(value[0], float):
                    rope[key] = value[:1] * half


# One process, one rank, no device


def prepare():
    """What vLLM decides once for a process: the platform and how linear layers multiply."""
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    torch.set_num_threads(1)
    platforms._current_platform = CpuPlatform()
    torch.cuda.current_device = lambda: "cpu"
    import vllm.model_executor.layers.linear
    import vllm.model_executor.layers.vocab_parallel_embedding  # noqa: F401
    from vllm.model_executor.layers import utils
    from vllm.model_executor.models import registry

    # The CPU's own needs weights packed at load (layers/utils.py, dispatch_cpu_unquantized_gemm).
    if hasattr(utils, "dispatch_unquantized_gemm"):
        for module in list(sys.modules.values()):
            if module is not None and "dispatch_unquantized_gemm" in vars(module):
                module.dispatch_unquantized_gemm = lambda *_, **__: utils.default_unquantized_gemm
    # A registry entry asks a new process what a class is, which imports all of vLLM again.
    registry._LazyRegisteredModel.inspect_model_cls = lambda entry: (
        registry._ModelInfo.from_model_cls(entry.load_model_cls())
    )


def engine_config(config, folder):
    """The config that an engine for this model would have; compiles nothing, fuses nothing."""
    import vllm.config.model
    import vllm.transformers_utils.config as configs
    from vllm.engine.arg_utils import EngineArgs

    if hasattr(configs, "patch_rope_parameters"):  # as get_config does
        configs.patch_rope_parameters(config)
    config.save_pretrained(folder)

    def get_config(*_, **__):
        return copy.deepcopy(config)

    configs.get_config = vllm.config.model.get_config = get_config
    arguments = EngineArgs(
        model=folder,
        dtype="float32",
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        enforce_eager=True,
        skip_tokenizer_init=True,
        load_format="dummy",
        compilation_config={"custom_ops": ["none"]},
    )
    return arguments.create_engine_config()


def start_one_rank(vllm_config, folder):
    """The groups that vLLM's layers ask for, of one process; once."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        parallel_state,
    )

    if parallel_state.model_parallel_is_initialized():
        return
    with set_current_vllm_config(vllm_config):
        init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"file://{folder}/rendezvous",
            backend="gloo",
        )
        initialize_model_parallel(1, 1)
    # There is one for experts only where vLLM takes the config for one with experts.
    for group in ("_EP", "_EPLB"):
        if getattr(parallel_state, group, True) is None:
            setattr(parallel_state, group, parallel_state._DP)


class _Stage:
    """The pipeline group of one of several stages; all else is the real group's."""

    def __init__(self, group, rank, size):
        self.rank_in_group, self.world_size, self._group = rank, size, group
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1

    def __getattr__(self, name):
        return getattr(self._group, name)


@contextmanager
def stage(rank, size):
    """Within, this process is one stage of a pipeline."""
    import vllm.distributed.parallel_state as state

    group = state._PP
    state._PP = _Stage(group, rank, size)
    try:
        yield
    finally:
        state._PP = group


# What stands in for attention and mixtures of experts


def _attend(query, key, value):
    """Causal attention, of ``[tokens, heads, head size]``."""
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    tokens = query.shape[0]
    mask = torch.full((tokens, tokens), float("-inf")).triu(1)
    return torch.einsum("hqk,khd->qhd", (scores + mask).softmax(-1), value)


def _attention_init(self, num_heads, head_size, scale=1.0, num_kv_heads=None, *args, **named):
    _bare(self, named.get("prefix", ""))
    self.num_heads, self.head_size = num_heads, head_size
    self.num_kv_heads = num_kv_heads or num_heads
    self.head_size_v = named.get("head_size_v") or head_size


def _attention_forward(self, query, key=None, value=None, *_, **__):
    tokens = query.shape[0]
    query = query.reshape(tokens, self.num_heads, self.head_size)
    if key is None:  # the keys of an earlier layer, in a cache that is not here
        return query[..., : self.head_size_v].tanh().reshape(tokens, -1)
    key = key.reshape(tokens, self.num_kv_heads, self.head_size)
    value = value.reshape(tokens, self.num_kv_heads, self.head_size_v)
    return _attend(query, key, value).reshape(tokens, -1)


def _mla_init(self, num_heads, scale, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, *_, **named):
    _bare(self, named.get("prefix", ""))
    self.num_heads, self.v_head_dim = num_heads, v_head_dim
    self.qk_nope_head_dim, self.kv_b_proj = qk_nope_head_dim, named["kv_b_proj"]


def _mla_forward(self, q, kv_c_normed, k_pe, *_, **__):
    tokens = q.shape[0]
    wide = self.kv_b_proj(kv_c_normed)[0].view(tokens, self.num_heads, -1)
    key, value = wide.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
    k_pe = k_pe.reshape(tokens, 1, -1).expand(-1, self.num_heads, -1)
    return _attend(q, torch.cat([key, k_pe], dim=-1), value).reshape(tokens, -1)


def _bare(module, prefix):
    """An attention layer without a backend and a cache."""
    torch.nn.Module.__init__(module)
    module.layer_name = prefix
    module.impl = SimpleNamespace(
        record_logical_topk_ready=lambda: None, dcp_world_size=1, is_sparse=False
    )
    module.kv_cache_dtype, module.attn_backend, module.kv_cache = "auto", None, []


def _experts(module, hidden_states, router_logits):
    """Every expert, weighed by its logit: what matters is that it depends on all of it."""
    owner = getattr(module, "routed_experts", module)
    up, down = getattr(owner, "w13_weight", None), getattr(owner, "w2_weight", None)
    if up is None or up.ndim != 3 or up.shape[-1] != hidden_states.shape[-1]:
        raise UnprovenError(f"{type(module).__name__} keeps its experts' weights in another way")
    logits = router_logits
    if logits is None or logits.shape[-1] < up.shape[0]:
        logits = hidden_states[..., : up.shape[0]]
    weights = logits[..., : up.shape[0]].float().softmax(-1)
    gate, value = torch.einsum("th,eih->tei", hidden_states, up).chunk(2, dim=-1)
    inner = torch.nn.functional.silu(gate) * value
    return torch.einsum("tei,ehi,te->th", inner, down, weights)


def _moe_forward(self, hidden_states, router_logits=None, *_, **__):
    return _experts(self, hidden_states, router_logits)


def _shared_moe_forward(self, hidden_states, router_logits=None, *_, **__):
    shared = getattr(self, "_shared_experts", None)
    routed = _experts(self, hidden_states, router_logits)
    return (shared(hidden_states) if shared is not None else None), routed


def _runner_forward(self, hidden_states, router_logits=None, *_, **__):
    routed = _experts(self, hidden_states, router_logits)
    shared = getattr(getattr(self, "_shared_experts", None), "_layer", None)
    return routed if shared is None else routed + shared(hidden_states)


_STAND_INS = (
    ("vllm.attention.layer", "Attention", _attention_init, _attention_forward),
    ("vllm.attention.layer", "MLAAttention", _mla_init, _mla_forward),
    ("vllm.model_executor.layers.attention", "Attention", _attention_init, _attention_forward),
    ("vllm.model_executor.layers.attention", "MLAAttention", _mla_init, _mla_forward),
    ("vllm.model_executor.layers.fused_moe", "FusedMoE", None, _moe_forward),
    ("vllm.model_executor.layers.fused_moe", "SharedFusedMoE", None, _shared_moe_forward),
    ("vllm.model_executor.layers.fused_moe", "ZeroExpertFusedMoE", None, _moe_forward),
    ("vllm.model_executor.layers.fused_moe.runner.moe_runner", "MoERunner", None, _runner_forward),
)


def replace_kernels():
    """Give the classes that need a device and a cache torch code in their place."""
    for module, name, init, forward in _STAND_INS:
        try:
            owner = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if isinstance(owner, type):
            owner.forward = forward
            if init is not None:
                owner.__init__ = init


# A built model


class Built:
    """A real class, constructed from its tiny config, with weights that follow from their names."""

    def __init__(self, vllm_config, owner):
        from vllm.config import set_current_vllm_config

        self.vllm_config = copy.copy(vllm_config)
        self.vllm_config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(self.vllm_config), torch.device("cpu"):
            self.model = owner(vllm_config=self.vllm_config, prefix="").eval()
        for name, parameter in self.model.named_parameters():
            _fill(name, parameter.data)
        for module in self.model.modules():
            if type(module).__name__.endswith("Indexer"):  # of sparse attention: picks keys
                module.forward = lambda *_, **__: None
        self.parent = self.layers_name = self.norm = None
        self.called, self.given, self.written = [], [], 0

    def find(self):
        """Find the list of layers and the last norm, by running the model once."""
        lists = [
            (parent, name, child)
            for parent in self.model.modules()
            for name, child in parent.named_children()
            if isinstance(child, torch.nn.ModuleList) and len(child) == NUM_LAYERS
        ]
        called = []
        handles = []
        for module in self.model.modules():
            handles.append(
                module.register_forward_pre_hook(lambda m, _: called.append((m, "enters")))
            )
            handles.append(module.register_forward_hook(lambda m, *_: called.append((m, "leaves"))))
        try:
            self.run()
        finally:
            for handle in handles:
                handle.remove()
        for parent, name, child in lists:
            left = [i for i, (m, what) in enumerate(called) if what == "leaves" and m in set(child)]
            if left:
                self.parent, self.layers_name = parent, name
                break
        else:
            raise UnprovenError(f"no list of {NUM_LAYERS} layers is run")
        after = [m for m, what in called[left[-1] :] if what == "enters"]
        norms = [m for m in after if "norm" in type(m).__name__.lower()]
        if not norms:
            raise UnprovenError("no norm is called after the last layer")
        self.norm = norms[0]
        self._watch()

    @property
    def layers(self):
        return getattr(self.parent, self.layers_name)

    def _watch(self):
        """Note which layers run, what the last norm is given, and write as the mode says."""
        self.mode, self.stop = PLAIN, False
        for number, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(lambda *_, number=number: self.called.append(number))
            layer.register_forward_hook(self._overwrite, with_kwargs=True)
        self.norm.register_forward_pre_hook(self._reached, with_kwargs=True)
        for module in self.model.modules():
            if "norm" in type(module).__name__.lower():
                module.register_forward_hook(self._write_in_place, with_kwargs=True)
        self.norm.register_forward_hook(self._overwrite, with_kwargs=True)

    def _reached(self, norm, args, kwargs):
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        # transformers' own models have a dimension more, of one batch.
        self.given.append([t.clone().reshape(t.shape[-2:]) for t in tensors[:2]])
        if self.stop:
            raise _AtTheNormError

    def _write_in_place(self, norm, args, kwargs, result):
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        if self.mode == PLAIN or not isinstance(result, tuple) or len(result) != len(given) != 2:
            return None
        if len(given) != 2 or any(one.shape != other.shape for one, other in zip(given, result)):
            return None
        if _storage(given[0]) == _storage(given[1]):
            return None
        for target, source in zip(given, [value.clone() for value in result]):
            target.copy_(source)
        self.written += 1
        return tuple(given)

    def _overwrite(self, layer, args, kwargs, result):
        if self.mode != OVERWRITTEN:
            return
        kept = {_storage(t) for t in tensors_of(result)}
        for value in (*args, *kwargs.values()):
            if _is_stream(value) and _storage(value) not in kept:
                value.fill_(-7.0)
                self.written += 1

    def run(self, shift=0, received=None, mode=PLAIN):
        """One forward of the outermost model."""
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        self.mode = mode
        self.called, self.given, self.written = [], [], 0
        tokens = (torch.arange(NUM_TOKENS) * 7 + 3 + shift) % 50 + 2
        named = {"inputs_embeds": None, "intermediate_tensors": received}
        context = set_forward_context(None, self.vllm_config, num_tokens=NUM_TOKENS)
        with torch.no_grad(), set_current_vllm_config(self.vllm_config), context:
            return self.model(input_ids=tokens, positions=torch.arange(NUM_TOKENS), **named)

    def cut(self, count, mode):
        """What the last norm is given with only the first layers: the stream, and its parts."""
        whole, end = self.layers, getattr(self.parent, "end_layer", None)
        setattr(self.parent, self.layers_name, torch.nn.ModuleList(list(whole)[:count]))
        if end is not None:
            self.parent.end_layer = count
        self.stop = True
        try:
            self.run(mode=mode)
        except _AtTheNormError:
            pass
        except Exception:
            if count:
                raise
            return self._entering_first(mode, whole)
        finally:
            self.stop = False
            setattr(self.parent, self.layers_name, whole)
            if end is not None:
                self.parent.end_layer = end
        if len(self.given) != 1:
            raise UnprovenError(f"cut to {count} layers, the last norm is not reached")
        return self.called, self.given[0]

    def _entering_first(self, mode, whole):
        """Where the original cannot do without layers: the embedding output, as layer 0 gets it."""
        found = []

        def entering(layer, args, kwargs):
            found.extend(t.clone() for t in (*args, *kwargs.values()) if _is_stream(t))
            raise _AtTheNormError

        setattr(self.parent, self.layers_name, whole)
        if hasattr(self.parent, "end_layer"):
            self.parent.end_layer = NUM_LAYERS
        handle = whole[0].register_forward_pre_hook(entering, with_kwargs=True)
        try:
            self.run(mode=mode)
        except _AtTheNormError:
            return [], found[:1]
        finally:
            handle.remove()
        raise UnprovenError("its first layer is not run")

    def added(self, parts):
        """What the norm is given as it adds it up: for a pair, the second thing that it returns."""
        if len(parts) == 1:
            return parts[0]
        mode, self.mode = self.mode, PLAIN
        with torch.no_grad():
            result = self.norm.forward(*[part.clone() for part in parts])
        self.mode = mode
        return result[1].clone() if isinstance(result, tuple) else parts[0] + parts[1]


def _fill(name, tensor):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if not tensor.is_floating_point() or tensor.numel() > LARGEST:
        return
    values = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    scale = 0.1 if tensor.ndim < 2 else tensor.shape[-1] ** -0.5
    values = values * scale
    if "norm" in name and tensor.ndim == 1 and name.endswith("weight"):
        values = values + 1.0
    tensor.copy_(values.to(tensor.dtype))


def _is_stream(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim >= 2


def _storage(tensor):
    return tensor.untyped_storage().data_ptr()


def tensors_of(value):
    """Every tensor in what a forward gives, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "tensors"):  # IntermediateTensors
        value = value.tensors
    if isinstance(value, dict):
        value = [value[name] for name in sorted(value)]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in tensors_of(part)]
    return []


def shape_of(value):
    """The type and structure of what a forward gives, as text."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(shape_of, value))})"
    if hasattr(value, "tensors"):
        inner = ", ".join(f"{k}: {shape_of(v)}" for k, v in sorted(value.tensors.items()))
        return f"{type(value).__name__}({inner})"
    return type(value).__name__


def kept(value):
    """A forward's result as it is now: its shape and copies of its tensors."""
    return {"shape": shape_of(value), "tensors": [tensor.clone() for tensor in tensors_of(value)]}


def built(asked, folder):
    """Everything that is needed to build the class as often as asked; the engine's config too."""
    from vllm.model_executor.models.registry import ModelRegistry

    entry = ModelRegistry.models.get(asked["architecture"])
    if entry is None:
        raise UnprovenError("not in this release's registry")
    owner = entry.load_model_cls()
    replace_kernels()
    first_failure = None
    # As its class has it; with what sparse attention needs; with every size that there is a name
    # for, which helps where a checkpoint brings the config's class.
    for implied in ({}, {name: TINY[name] for name in _SPARSE}, dict(_DENSE)):
        try:
            return (owner, *_with_implied(asked, owner, implied, folder))
        except Exception as failure:
            first_failure = first_failure or failure
    raise first_failure


def fresh(vllm_config, owner):
    """A model with its list of layers and its last norm found."""
    model = Built(vllm_config, owner)
    model.find()
    return model


def _with_implied(asked, owner, implied, folder):
    """Build and run it; where its config lacks a name that is implied, give it and try again."""
    while True:
        try:
            vllm_config = engine_config(tiny_config(asked, implied), folder)
            start_one_rank(vllm_config, folder)
            return vllm_config, fresh(vllm_config, owner)
        except AttributeError as failure:
            absent = re.search(r"'_OpNamespace' '(\w+)' .* attribute '(\w+)'", str(failure))
            if absent is not None:  # of a build for a device; named where torch code is then run
                setattr(getattr(torch.ops, absent[1]), absent[2], None)
                continue
            name = re.search(r"Config' object has no attribute '(\w+)'", str(failure))
            if name is None or name[1] in implied or name[1] not in IMPLIED:
                raise
            implied[name[1]] = IMPLIED[name[1]]


# The two roles


def expectations(asked, folder):
    """Run in the original's process: outputs, the expected streams, and their parts."""
    owner, vllm_config, model = built(asked, folder)
    config = type(vllm_config.model_config.hf_config).__name__
    found = {
        "config": config,
        "norm": type(model.norm).__name__,
        "streams": {},
        "parts": {},
        "output": {},
        "written": {},
    }
    for mode in MODES:
        found["output"][mode] = kept(model.run(mode=mode))
        found["written"][mode] = model.written
        entered, full = list(model.called), model.given
        if entered != sorted(set(entered)) or len(full) != 1:
            raise UnprovenError("its layers do not run once each and in order, before one norm")
        cuts = []
        for count in range(NUM_LAYERS + 1):
            called, parts = model.cut(count, mode)
            if called != [number for number in entered if number < count]:
                raise UnprovenError(f"cut to {count} layers, it still runs layers {called}")
            cuts.append(parts)
        if not same(model.run(mode=mode) is not None and model.given[0], full[0]):
            raise UnprovenError(
                "it gives other values each time: a layer needs a cache or a device"
            )
        if not same(full[0], cuts[-1]):
            raise UnprovenError("the cut model differs from the whole one")
        streams = [model.added(parts) for parts in cuts]
        if not any(bool(stream.abs().sum() > 0) for stream in streams) or all(
            same([one], [other]) for one, other in zip(streams, streams[1:])
        ):
            raise UnprovenError("every stream is the same: nothing would be compared")
        found["streams"][mode] = streams
        found["parts"][mode] = cuts
    found["layers"] = len(entered)
    found["again"] = kept(model.run(shift=5))
    found["stages"] = _stages(owner, vllm_config, None)
    return found


def observations(asked, folder):
    """Run in the judged file's process: outputs and states for all the ids that are tried."""
    owner, vllm_config, model = built(asked, folder)
    found = {"output": {mode: kept(model.run(mode=mode)) for mode in MODES}}
    found["settable"] = callable(getattr(model.model, SET_LAYERS, None))
    if not found["settable"]:
        return found
    found["default"] = _default_ids(model.model)
    sets = [(k,) for k in range(NUM_LAYERS + 1)]
    inner = tuple(range(1, NUM_LAYERS))
    sets += [(2, 3, 4), (1, 3, 6), inner, (0, *inner, NUM_LAYERS), (5, 1, 3)]
    found["captured"] = []
    for ids in sets:
        # An engine sets them once; that they can be set again is asked of patched classes alone.
        one = model if asked.get("original") else fresh(vllm_config, owner)
        for mode in MODES:
            again = asked.get("original") or mode == PLAIN
            captured = _capture(one, ids if again else None, mode)
            found["captured"].append({"ids": list(ids), "mode": mode, **captured})
    found["refused"] = [
        {"ids": repr(ids), **_refusal(model, ids)}
        for ids in ((-1,), (NUM_LAYERS + 1,), (1.5,), ("2",), (2, 2))
    ]
    try:
        getattr(model.model, SET_LAYERS)(())
        found["cleared"] = kept(model.run())
    except Exception as failure:
        found["cleared"] = {"error": said(failure)}
    found["stages"] = _stages(owner, vllm_config, (NUM_LAYERS - 2, NUM_LAYERS - 1))
    return found


def _default_ids(model):
    for name in dir(model):
        if re.fullmatch(r"get_eagle3_(default_)?aux_hidden_state_layers", name):
            return [int(number) for number in getattr(model, name)() or ()]
    return []


def _capture(model, ids, mode):
    """A forward with these ids; what it gives then, and what is left of it after another one."""
    try:
        if ids is not None:
            getattr(model.model, SET_LAYERS)(ids)
        result = model.run(mode=mode)
    except Exception as failure:
        return {"error": said(failure)}
    if not isinstance(result, tuple) or len(result) != 2:
        return {"error": f"with ids set, forward gives {shape_of(result)}"}
    output, states = kept(result[0]), list(result[1])
    copies = [state.clone() for state in states]
    model.run(shift=5, mode=mode)
    changed = [i for i, (s, c) in enumerate(zip(states, copies)) if not same([s], [c])]
    return {"output": output, "states": copies, "changed": changed}


def _refusal(model, ids):
    try:
        getattr(model.model, SET_LAYERS)(ids)
        model.run()
    except Exception as failure:
        return {"error": said(failure)}
    return {"error": None}


def _stages(owner, vllm_config, ids):
    """The model as two pipeline stages; ``ids`` are set on the second."""
    from vllm.sequence import IntermediateTensors

    try:
        with stage(0, 2):
            first = Built(vllm_config, owner)
            passed = first.run()
        if not isinstance(passed, IntermediateTensors):
            return {"error": f"the first of two stages gives {shape_of(passed)}"}
        with stage(1, 2):
            second = Built(vllm_config, owner)
            output = second.run(received=copy.deepcopy(passed))
            found = {"output": kept(output), "passed": kept(passed), "error": None}
            if ids is None:
                return found
            getattr(second.model, SET_LAYERS)(ids)
            result = second.run(received=copy.deepcopy(passed))
    except Exception as failure:
        return {"error": said(failure)}
    if not isinstance(result, tuple) or len(result) != 2:
        return {**found, "error": f"the second stage gives {shape_of(result)} with ids {ids}"}
    states = [state.clone() for state in result[1]]
    return {**found, "ids": list(ids), "with": kept(result[0]), "states": states}


# The comparison


def same(one, other):
    """Whether two lists of tensors are the same, bit for bit (and type for type)."""
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) and not a.isnan().any()
        for a, b in zip(one, other)
    )


def same_result(one, other):
    return one["shape"] == other["shape"] and same(one["tensors"], other["tensors"])


def apart(one, other):
    """How two results of a forward differ, on one line."""
    if one["shape"] != other["shape"]:
        return f"{one['shape']} instead of {other['shape']}"
    largest = max(
        (
            (a.double() - b.double()).abs().max().item()
            for a, b in zip(one["tensors"], other["tensors"])
        ),
        default=0.0,
    )
    return f"values differ by up to {largest:.3g}"


def what_is(state, layer_id, mode, expected, right_before):
    """What a wrong state is, by comparing it with everything that it could be."""
    streams, parts = expected["streams"][mode], expected["parts"][mode]
    if state.shape != streams[layer_id].shape:
        return f"has shape {list(state.shape)}, not {list(streams[layer_id].shape)}"
    if state.dtype != streams[layer_id].dtype:
        return f"is {state.dtype}, not {streams[layer_id].dtype}"
    if right_before:
        return f"is changed after it was captured (mode {mode})"
    hit = [k for k, stream in enumerate(streams) if same([state], [stream])]
    if layer_id + 1 in hit:
        return f"is the output of layer {layer_id}, not its input"
    if hit:
        return f"is what enters layer {hit[0]}, not layer {layer_id}"
    for k in (layer_id, *range(len(parts))):
        if len(parts[k]) == 2:
            for part, name in zip(
                parts[k], ("hidden states without the residual", "residual alone")
            ):
                if same([state], [part]):
                    return f"is the {name}" + (f" of layer {k}" if k != layer_id else "")
    if mode != PLAIN and same([state], [expected["output"][PLAIN]["tensors"][0]]):
        return "is the output of the last norm"
    return "is no stream of the model"


def wrong_states(one, expected, plain=None):
    """What is wrong with the states of one run, or None; ``plain``, the same run in that mode."""
    if one.get("error"):
        return f"ids {one['ids']}: {one['error']}"
    mode, ids = one.get("mode", PLAIN), one["ids"]
    order = sorted(ids)
    streams, states = expected["streams"][mode], one["states"]
    if len(states) != len(ids):
        return f"ids {ids}: {len(states)} states for {len(ids)} ids"
    pairs = list(zip(states, order))
    wrong = [(s, k) for s, k in pairs if not same([s], [streams[k]])]
    if wrong:
        if len(ids) > 1 and all(any(same([s], [streams[k]]) for k in ids) for s in states):
            return f"ids {ids}: the states are in another order"
        state, k = wrong[0]
        before = plain and plain.get("states") and wrong_states(plain, expected) is None
        return f"state {k} {what_is(state, k, mode, expected, before)}"
    rows = one.get("output", one.get("with"))["tensors"][0].shape[0]
    if any(state.shape[0] != rows for state in states):
        return f"ids {ids}: states of {states[0].shape[0]} tokens, an output of {rows}"
    if one.get("changed"):
        return f"state {order[one['changed'][0]]} is changed by the next forward"
    return None


def judge_class(asked, expected, observed):
    """The checks of one class, and what they come to.

    Returns:
        ``verdict``, ``first_difference`` or ``reason``, ``checks``, ``findings``.
    """
    checks, findings = [], []
    patched = bool(asked.get("original"))

    def check(name, wrong, right, binding=True):
        checks.append({"name": name, "ok": wrong is None, "detail": wrong or right})
        if wrong is not None and not binding:
            findings.append(wrong)
        return wrong if binding else None

    note = f"{NUM_LAYERS + 1} streams, by cutting it before {expected['norm']}"
    check("cut", None, note)
    wrong = [
        f"without ids, {mode}: {apart(now, expected['output'][mode])}"
        for mode, now in observed["output"].items()
        if not same_result(now, expected["output"][mode])
    ]
    first = [check("off", wrong[0] if wrong else None, "without ids, output as the original's")]
    if not observed["settable"]:
        reason = f"no {SET_LAYERS}: builds and runs"
        return {
            "verdict": "unproven",
            "reason": first[0] or reason,
            "checks": checks,
            "findings": [],
        }
    # What the overwriting mode breaks in the original says nothing of the copy.
    tolerant = same_result(expected["output"][OVERWRITTEN], expected["output"][PLAIN])
    runs = [r for r in observed["captured"] if tolerant or r["mode"] != OVERWRITTEN]
    plain = {str(r["ids"]): r for r in runs if r["mode"] == PLAIN}
    edges = {0, NUM_LAYERS}
    for name, chosen, binding in (
        ("states", [r for r in runs if r["mode"] == PLAIN and not edges & set(r["ids"])], True),
        ("edges", [r for r in runs if r["mode"] == PLAIN and edges & set(r["ids"])], patched),
        (
            "in-place",
            [r for r in runs if r["mode"] == IN_PLACE and not edges & set(r["ids"])],
            True,
        ),
        (
            "in-place-edges",
            [r for r in runs if r["mode"] == IN_PLACE and edges & set(r["ids"])],
            patched,
        ),
        ("copies", [r for r in runs if r["mode"] == OVERWRITTEN], patched),
    ):
        reason = None
        if name == "copies" and not tolerant:
            reason = "the model needs what its layers were given"
        elif name != "copies" and name.startswith("in-place") and not expected["written"][IN_PLACE]:
            reason = "no norm of this model adds and writes in place"
        if reason is not None:
            checks.append({"name": name, "ok": None, "detail": reason})
            continue
        if not chosen:
            raise UnprovenError(f"nothing was compared for {name}")
        wrong = [w for w in (wrong_states(r, expected, plain[str(r["ids"])]) for r in chosen) if w]
        count = sum(len(r.get("states", ())) for r in chosen)
        first.append(check(name, wrong[0] if wrong else None, f"{count} states equal", binding))
    wrong = [
        f"ids {r['ids']}, {r['mode']}: capture changes the output: "
        f"{apart(r['output'], expected['output'][r['mode']])}"
        for r in runs
        if r.get("output") and not same_result(r["output"], expected["output"][r["mode"]])
    ]
    first.append(check("output", wrong[0] if wrong else None, "capture leaves the output as it is"))
    wrong = observed["cleared"].get("error")
    if wrong is None and not same_result(observed["cleared"], expected["output"][PLAIN]):
        wrong = f"with ids unset again: {apart(observed['cleared'], expected['output'][PLAIN])}"
    first.append(check("unset", wrong, "with ids unset again, output as the original's", patched))
    taken = [r["ids"] for r in observed["refused"] if r["error"] is None]
    wrong = f"ids {taken[0]} are not refused" if taken else None
    first.append(check("refused", wrong, f"{len(observed['refused'])} lists refused", patched))
    _judge_stages(expected, observed["stages"], check, first, checks, patched)
    difference = next((wrong for wrong in first if wrong is not None), None)
    if difference is not None:
        return {
            "verdict": "refuted",
            "first_difference": difference,
            "checks": checks,
            "findings": findings,
        }
    if expected["layers"] != NUM_LAYERS:
        reason = f"the original runs {expected['layers']} of {NUM_LAYERS} layers"
        return {"verdict": "unproven", "reason": reason, "checks": checks, "findings": findings}
    return {"verdict": "proven", "first_difference": None, "checks": checks, "findings": findings}


def _judge_stages(expected, now, check, first, checks, patched):
    then = expected["stages"]
    if then["error"] is not None:
        checks.append({"name": "stages", "ok": None, "detail": f"no two stages: {then['error']}"})
        return
    if not same(then["output"]["tensors"], expected["output"][PLAIN]["tensors"]):
        checks.append(
            {"name": "stages", "ok": None, "detail": "two stages of the original differ from one"}
        )
        return
    if "output" in now:
        wrong = [
            f"two stages without ids: {apart(now[part], then[part])}"
            for part in ("passed", "output")
            if not same_result(now[part], then[part])
        ]
        first.append(check("stages", wrong[0] if wrong else None, "two stages as one, without ids"))
    wrong = f"two stages: {now['error']}" if now["error"] else None
    if wrong is None:
        wrong = wrong_states(now, expected)
        if wrong is None and not same_result(now["with"], then["output"]):
            wrong = f"capture changes the output: {apart(now['with'], then['output'])}"
        wrong = wrong and f"second of two stages: {wrong}"
    first.append(check("second-stage", wrong, f"ids {now.get('ids')} on the second stage", patched))


# Processes


def said(failure):
    """An exception on one line."""
    words = " ".join(f"{type(failure).__name__}: {failure}".split())
    where = ""
    trace = failure.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if f"{os.sep}vllm{os.sep}" in code.co_filename:
            where = (
                f" ({code.co_filename.rpartition('site-packages' + os.sep)[2]}:{trace.tb_lineno})"
            )
        trace = trace.tb_next
    return (words if len(words) <= 400 else f"{words[:400]}...") + where


def in_process(role, asked, originals):
    """Run a role in a forked process; what it returns, or raises as why nothing can be said."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _answer(writing, role, asked, originals)
    os.close(writing)
    data, deadline = b"", time.monotonic() + SECONDS
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise _TooLongError(f"did not end within {SECONDS:g} seconds")
            part = pipe.read(1 << 20)
            if not part:
                break
            data += part
    _, status = os.waitpid(child, 0)
    if not data:
        raise UnprovenError(f"its process ended with status {status}")
    found = torch.load(io.BytesIO(data), weights_only=True)
    if "unproven" in found:
        raise UnprovenError(found["unproven"])
    return found


def _answer(writing, role, asked, originals):
    os.dup2(2, 1)  # what vLLM prints is not our answer
    try:
        with tempfile.TemporaryDirectory(prefix="judge-") as folder:
            use_originals(originals)
            prepare()
            found = role(asked, folder)
    except UnprovenError as failure:
        found = {"unproven": str(failure)}
    except BaseException as failure:
        if os.environ.get("JUDGE_DEBUG"):
            import traceback

            traceback.print_exc()
        found = {"unproven": said(failure)}
    buffer = io.BytesIO()
    torch.save(found, buffer)
    data = buffer.getvalue()
    while data:
        data = data[os.write(writing, data) :]
    os._exit(0)


def judge(asked):
    """One class: both processes, then the comparison."""
    started = time.monotonic()
    verdict = {"architecture": asked.get("name") or asked["architecture"], "how": None}
    try:
        expected = in_process(expectations, asked, asked.get("original") or {})
        verdict["how"] = "built"
        verdict["config"] = expected.pop("config")
        observed = _observed(asked)
        if isinstance(observed, str):
            difference = f"the original runs, and this does not: {observed}"
            verdict.update(verdict="refuted", first_difference=difference, checks=[])
        else:
            verdict.update(judge_class(asked, expected, observed))
    except UnprovenError as failure:
        verdict.update(verdict="unproven", reason=str(failure), checks=[])
    verdict["seconds"] = round(time.monotonic() - started, 2)
    return verdict


def _observed(asked):
    """What the judged file does, or why it cannot be run where its original can."""
    try:
        return in_process(observations, asked, asked.get("judged") or {})
    except _TooLongError:
        raise
    except UnprovenError as failure:
        if not asked.get("original"):
            raise
        return str(failure)


def main():
    """Judge the classes of ``--classes`` and write what was found to ``--report``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--classes", type=json.loads, required=True)
    parser.add_argument("--report", required=True)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # some norms are compiled where they are defined
    prepare()
    import vllm.engine.arg_utils  # before the processes fork: it takes long

    assert vllm.engine.arg_utils
    found = {"classes": [judge(one) for one in options.classes]}
    Path(options.report).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
