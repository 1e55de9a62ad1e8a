"""A model without an engine: built by vLLM's own loader, called by hand."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

PIECEWISE_BACKEND = "vllm.compilation.cuda_piecewise_backend.CUDAPiecewiseBackend"


def config(target: Path, **options: Any) -> Any:
    """The config that an engine with these options would have.

    Args:
        target: The model's folder.
        options: More of vLLM's engine arguments.
    """
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=os.fspath(target),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        **options,
    )
    return arguments.create_engine_config()


def load(vllm_config: Any) -> Any:
    """Build the model that a config names, with its weights; its attention adds nothing."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    _do_without_accelerator()
    with set_current_vllm_config(vllm_config):
        _start_one_rank()
        model = get_model(vllm_config=vllm_config)
    _silence_attention(model)
    return model


def _do_without_accelerator() -> None:
    """What vLLM asks of an accelerator on every platform, answered by the CPU."""
    import torch
    from vllm.platforms import current_platform

    # 0.15.0 and 0.15.1 put the vision tower there (kimi_k25.py).
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    # The loader empties its cache in 0.32.0 (base_loader.py).
    if hasattr(torch, "accelerator"):
        torch.accelerator.empty_cache = lambda: None  # type: ignore[assignment]
    # The compiler asks for both up to 0.9.2 (vllm/compilation/backends.py).
    type(current_platform).graph_pool_handle = lambda _: (0, 0)
    type(current_platform).get_piecewise_backend_cls = lambda _: PIECEWISE_BACKEND


def _silence_attention(model: Any) -> None:
    """Let attention add nothing: without an engine it returns memory that nobody wrote."""
    import torch

    for module in model.modules():
        if type(module).__name__ == "Attention":
            module.forward = lambda query, *_, **__: torch.zeros_like(query).flatten(1)


def _start_one_rank() -> None:
    """The groups that vLLM's layers ask for, of one process."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    address = f"file://{tempfile.mkdtemp()}/rendezvous"
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=address, backend="gloo"
    )
    initialize_model_parallel(1, 1)


def name_absent_operators() -> None:
    """Let vLLM's fusion passes be imported, which name CUDA operators and do not use them here.

    vLLM's compiler imports them on every platform (vllm/compilation/), and up to 0.9.2 so does the
    proposer.
    """
    import torch
    import vllm._custom_ops  # it defines those that there are

    library = torch.library.Library("_C", "FRAGMENT")
    passes = Path(vllm._custom_ops.__file__).parent / "compilation"
    source = "".join(file.read_text() for file in sorted(passes.rglob("*.py")))
    for name in sorted(set(re.findall(r"torch\.ops\._C\.(\w+)", source))):
        if not hasattr(torch.ops._C, name):
            library.define(f"{name}() -> ()")
    _LIBRARIES.append(library)  # what it defines goes with it


_LIBRARIES: list[Any] = []
