"""Where vLLM keeps what is read or patched, relative to the folder that holds the package.

A tuple names the places of one file in order: the newest releases have it at the first.
"""

from vllm_eagle3_patch.ground.family import MODELS

DEEPSEEK = f"{MODELS}/deepseek_v2.py"
DRAFT_MODEL = f"{MODELS}/llama_eagle3.py"
INTERFACES = f"{MODELS}/interfaces.py"
REGISTRY = f"{MODELS}/registry.py"

DEEPSEEK_V32 = "vllm/models/deepseek_v32/__init__.py"

SPECULATIVE_CONFIG = ("vllm/config/speculative.py", "vllm/config/__init__.py", "vllm/config.py")
WHOLE_CONFIG = "vllm/config/vllm.py"
CONFIG_TYPES = "vllm/transformers_utils/config.py"
EAGLE_CONFIG = "vllm/transformers_utils/configs/eagle.py"
SPECULATORS = "vllm/transformers_utils/configs/speculators/algos.py"

CUDA = "vllm/platforms/cuda.py"
ATTENTION_SELECTORS = ("vllm/v1/attention/selector.py", "vllm/attention/selector.py")
FLASH_ATTENTION = "vllm/v1/attention/backends/flash_attn.py"
KV_CACHE = "vllm/v1/core/kv_cache_utils.py"

RUNNER = "vllm/v1/worker/gpu_model_runner.py"
MICRO_BATCHES = "vllm/v1/worker/gpu_ubatch_wrapper.py"
PROPOSER = "vllm/v1/spec_decode/eagle.py"
PROPOSERS = ("vllm/v1/spec_decode/llm_base_proposer.py", PROPOSER)

NEWER_LAYER_IDS = "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"
NEWER_LOADER = "vllm/v1/worker/gpu/spec_decode/eagle/utils.py"
