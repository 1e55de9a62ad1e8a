"""Where a model of the family lives in a file of its own for each platform.

From 0.25.0 on vLLM has vllm/models/deepseek_v32/nvidia/model.py, from 0.27.0 on also
amd/model.py. The registry resolves DeepSeek-V3.2 and GLM's variant to that package from 0.29.0 on,
and the package's ``__init__.py`` chooses: NVIDIA's file, from 0.31.0 on AMD's too, and
``deepseek_v2.py`` anywhere else. A wrapper's language model may import a platform's model itself:
Dots3-Note takes NVIDIA's from 0.28.0 on.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.vllm_source import syntax
from vllm_eagle3_patch.vllm_source.paths import DEEPSEEK_V32, REGISTRY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_eagle3_patch.vllm_source.sources import Sources

_LANGUAGE_MODELS = {
    model.architecture: model.wrapper.language_model.path
    for model in FAMILY
    if model.wrapper is not None and model.sparse
}
EVIDENCE = (DEEPSEEK_V32, *_LANGUAGE_MODELS.values())
"""The files that decide, beside the registry."""

OUTER = "DeepseekV32ForCausalLM"
MODEL = "DeepseekV32Model"
LAYER = "DeepseekV32DecoderLayer"

_DOTTED = "vllm.models.deepseek_v32"


def platform_files(sources: Sources, architecture: str) -> tuple[str, ...]:
    """The files of the package that a model is taken from, one for each platform that has one.

    Raises:
        UnsupportedError: A file that decides cannot be parsed.
    """
    if architecture in _LANGUAGE_MODELS:
        deciding, name = _LANGUAGE_MODELS[architecture], MODEL
    elif _registered(sources, architecture):
        deciding, name = DEEPSEEK_V32, OUTER
    else:
        return ()
    if not sources.exists(deciding):
        return ()
    return tuple(dict.fromkeys(_imported_from(sources.module(deciding), name)))


def all_platform_files(sources: Sources) -> tuple[str, ...]:
    """The files of the package that any model of the family is taken from."""
    found = (path for model in FAMILY for path in platform_files(sources, model.architecture))
    return tuple(dict.fromkeys(found))


def _registered(sources: Sources, architecture: str) -> bool:
    """Whether the registry takes an architecture from the package."""
    if _DOTTED.encode() not in (sources.read(REGISTRY) or b""):
        return False
    return any(
        isinstance(key, ast.Constant)
        and key.value == architecture
        and isinstance(entry, ast.Tuple)
        and _DOTTED in syntax.strings(entry)
        for table in ast.walk(sources.module(REGISTRY))
        if isinstance(table, ast.Dict)
        for key, entry in zip(table.keys, table.values, strict=True)
    )


def _imported_from(module: ast.Module, name: str) -> Iterator[str]:
    """The files of the package that a module imports a class from."""
    for node in ast.walk(module):
        if not isinstance(node, ast.ImportFrom) or name not in [a.name for a in node.names]:
            continue
        dotted = f"{_DOTTED}.{node.module}" if node.level else str(node.module)
        if dotted.startswith(f"{_DOTTED}."):
            yield f"{dotted.replace('.', '/')}.py"
