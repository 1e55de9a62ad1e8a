"""Whether the class that an architecture resolves to is the one that the patches change.

The registry names a class, that or a base of it names its inner model (``model_cls``), and a module
may give either another method afterwards. In each release from 0.8.5 to 0.33.0 all of that leads
to the forwards of ``CHANGED``; elsewhere a patch changes code that no server runs.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from vllm_eagle3_patch.vllm_source import syntax
from vllm_eagle3_patch.vllm_source.paths import DEEPSEEK
from vllm_eagle3_patch.vllm_source.registry import Registry
from vllm_eagle3_patch.vllm_source.target_classes import Targets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.vllm_source.sources import Sources

CHANGED = ("DeepseekV2Model", "DeepseekV32Model", "DeepseekV2ForCausalLM")
FILES = (
    DEEPSEEK,
    "vllm/models/deepseek_v32/nvidia/model.py",
    "vllm/models/deepseek_v32/amd/model.py",
)


def elsewhere(sources: Sources, model: FamilyModel) -> str | None:
    """Why no patch changes what a server with a model runs, or None."""
    registry = Registry(sources)
    targets = Targets(sources, registry)
    classes = registry.classes(model.architecture)
    dotted, _ = registry.entries.get(model.architecture, ("", ""))
    if model.wrapper is None and dotted and not classes:
        return f"the registry takes {model.architecture} from {dotted}, which is not there"
    for path, owner in classes:
        expected = FILES if model.wrapper is None else (model.wrapper.path,)
        if not any(file in expected for file, _ in registry.lineage(path, owner)):
            return f"the registry takes {model.architecture} from {path}, which no patch changes"
    for path, name in dict.fromkeys(_forwards(registry, targets, model)):
        if path not in FILES or name not in CHANGED:
            return f"{model.architecture} runs the forward of {name} in {path}; no patch changes it"
    for path in filter(sources.exists, FILES):
        node = syntax.replacement(sources.module(path), CHANGED)
        if node is not None:
            return f"{path} replaces what a patch changes: `{ast.unparse(node).splitlines()[0]}`"
    return None


def _forwards(
    registry: Registry, targets: Targets, model: FamilyModel
) -> Iterator[tuple[str, str]]:
    """The file and the class that each forward of a language model comes from."""
    classes = registry.text_classes(model)
    for path, owner in (*classes, *targets.models(classes)):
        for file, base in registry.lineage(path, owner):
            if syntax.find_method(base, "forward") is not None:
                yield file, base.name
                break
