"""``kimi-k25``: Kimi-K2.5 implements ``SupportsEagle3`` and hands it on to its language model.

The model runner asks the outermost model (vllm/v1/worker/gpu_model_runner.py, load_model), which
for Kimi-K2.5 is the multimodal wrapper. Its language model is a bare ``DeepseekV2Model`` in 0.15.0
and 0.15.1, a ``DeepseekV2ForCausalLM`` from 0.16.0 on.

vLLM did this in its pull request 36361 (first in 0.18.0). Not needed from there on.
"""

from __future__ import annotations

from vllm_eagle3_patch.wrapper import WrapperCodemod, WrapperPatch


class KimiK25Codemod(WrapperCodemod):
    """See :class:`WrapperCodemod`."""

    patch = "kimi-k25"
    wrapper = "KimiK25ForConditionalGeneration"


class KimiK25(WrapperPatch):
    """See the module."""

    name = "kimi-k25"
    title = "Kimi-K2.5 implements SupportsEagle3"
    path = "vllm/model_executor/models/kimi_k25.py"
    kind = KimiK25Codemod
