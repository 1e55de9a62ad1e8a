"""A draft model's config as vLLM sees it: the speculators format is turned into a plain one.

SpeculatorsConfig (vllm/transformers_utils/configs/speculators/base.py, 0.10.1 on) starts from
``transformer_layer_config`` and copies the keys that the release knows (algos.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_eagle3_patch.doctor.checkpoint import Checkpoint
    from vllm_eagle3_patch.vllm_source.engine import Engine

LAYERS = "transformer_layer_config"
BY_DEFAULT = {"norm_before_residual": True}
"""What the format means where a key is missing (algos.py, every release that knows it)."""

_CLASSES = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}


def is_speculators(draft: Checkpoint) -> bool:
    """Whether a draft model's config is in the speculators format."""
    return isinstance(draft.config.get("speculators_config"), dict) or isinstance(
        draft.config.get("speculators_model_type"), str
    )


def as_vllm_sees(draft: Checkpoint, engine: Engine) -> Checkpoint:
    """The draft model with the config that its class will get; plain configs stay as they are."""
    if not is_speculators(draft) or engine.speculators_keys is None:
        return draft
    layers = draft.config.get(LAYERS) or {}
    config: dict[str, Any] = dict(layers)
    for key in engine.speculators_keys:
        value = draft.config.get(key, BY_DEFAULT.get(key))
        if value is not None:
            config[key] = value
    kind = str(layers.get("model_type", "llama"))
    chosen = _CLASSES.get(kind) if engine.speculators_types else _CLASSES["llama"]
    known = not engine.speculators_types or kind in engine.speculators_types
    config["architectures"] = [chosen or "Eagle3LlamaForCausalLM"] if known else [kind]
    config.setdefault("model_type", "llama")
    return replace(draft, config=config, speculators=draft.config)
