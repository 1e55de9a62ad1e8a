"""``wrappers``: each multimodal wrapper hands ``SupportsEagle3`` on to its language model.

The model runner asks the outermost model (vllm/v1/worker/gpu_model_runner.py, load_model), which
for a multimodal target is the wrapper. There is one patch for each class that the family's table
(vllm_eagle3_patch/ground/family.py) calls a wrapper: ``kimi-k25``, ``kimi-vl``, ``deepseek-vl2``
and so on. What they do is in patches/_wrapper.py; another class needs an entry in that table and a
row in tests/patches/test_wrappers.py.

vLLM did this for Kimi-K2.5 in its pull request 36361 (first in 0.18.0) and for Pixtral in 0.19.0.
"""

from __future__ import annotations

from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.patches._wrapper import wrapper_patch

# By name: two models may share the class that is patched.
WRAPPERS = {model.wrapper.patch: model.wrapper for model in FAMILY if model.wrapper is not None}
PATCHES = {name: wrapper_patch(wrapper) for name, wrapper in WRAPPERS.items()}
