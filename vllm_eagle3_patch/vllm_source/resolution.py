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


def replacement(module: ast.Module) -> ast.AST | None:
    """A statement that replaces one of the classes or an attribute of it, anywhere in a module."""
    for node in ast.walk(module):
        for target in syntax.assigned(node):
            named = target.value if isinstance(target, ast.Attribute) else target
            if isinstance(named, ast.Name) and named.id in CHANGED:
                return node
        if isinstance(node, ast.Call) and syntax.last_name(node.func) == "setattr" and node.args:
            if syntax.last_name(node.args[0]) in CHANGED:
                return node
    return None


def elsewhere(sources: Sources, model: FamilyModel) -> str | None:
    """Why no patch changes what a server with a model runs, or None."""
    registry = Registry(sources)
    targets = Targets(sources, registry)
    for path, owner in registry.classes(model.architecture):
        expected = FILES if model.wrapper is None else (model.wrapper.path,)
        classes = [file for file, _ in registry.lineage(path, owner)]
        if not any(file in expected for file in classes):
            return f"the registry takes {model.architecture} from {path}, which no patch changes"
    for path, name in dict.fromkeys(_forwards(registry, targets, model)):
        if path not in FILES or name not in CHANGED:
            return f"{model.architecture} runs the forward of {name} in {path}; no patch changes it"
    replacing = ((path, replacement(sources.module(path))) for path in FILES if sources.exists(path))
    for path, node in replacing:
        if node is not None:
            return f"{path} replaces what a patch changes: `{ast.unparse(node).splitlines()[0]}`"
    return None


def _forwards(
    registry: Registry, targets: Targets, model: FamilyModel
) -> Iterator[tuple[str, str]]:
    """The file and the class that each forward of a language model comes from."""
    classes = targets.language_classes(model)
    for path, owner in (*classes, *targets.models(classes)):
        for file, base in registry.lineage(path, owner):
            if syntax.find_method(base, "forward") is not None:
                yield file, base.name
                break
