"""The registry of an installation, and the classes that it names with all they inherit.

From 0.25.0 on vLLM has vllm/models/deepseek_v32/nvidia/model.py, from 0.27.0 on also
amd/model.py. The registry resolves DeepSeek-V3.2 and GLM's variant to that package from 0.29.0 on,
and the package's ``__init__.py`` chooses: NVIDIA's file, from 0.31.0 on AMD's too, and
``deepseek_v2.py`` anywhere else. Dots3-Note takes NVIDIA's model from 0.28.0 on.
"""

from __future__ import annotations

import ast
from functools import cached_property
from typing import TYPE_CHECKING

from vllm_eagle3_patch.ground.errors import UnsupportedError
from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.ground.family import MODELS as MODEL_FILES
from vllm_eagle3_patch.vllm_source import syntax
from vllm_eagle3_patch.vllm_source.paths import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.vllm_source.sources import Sources

MODELS = MODEL_FILES.replace("/", ".")
PLATFORM_PACKAGE = "vllm/models/deepseek_v32/"
PLATFORM_MODEL = "DeepseekV32Model"
DEEPEST = 12
"""Bases of bases. No model class of any release has more than 5 in vLLM's own files."""


class Registry:
    """What architectures an installation knows, and where their classes are.

    Args:
        sources: The installation's files.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._indexes: dict[str, _Index] = {}

    @cached_property
    def entries(self) -> dict[str, tuple[str, str]]:
        """By architecture, the dotted module and the class (the dicts of registry.py)."""
        if not self._sources.exists(REGISTRY):
            return {}
        found = {}
        for table in ast.walk(self._sources.module(REGISTRY)):
            if not isinstance(table, ast.Dict):
                continue
            for key, value in zip(table.keys, table.values, strict=True):
                match key, value:
                    case (
                        ast.Constant(value=str(architecture)),
                        ast.Tuple(
                            elts=[ast.Constant(value=str(module)), ast.Constant(value=str(name))]
                        ),
                    ):
                        dotted = module if module.startswith("vllm.") else f"{MODELS}.{module}"
                        found[architecture] = (dotted, name)
                    case _:
                        continue
        return found

    def family_models(self) -> tuple[FamilyModel, ...]:
        """The models of the family that it knows; a wrapper only beside its language model."""
        return tuple(
            model
            for model in FAMILY
            if model.architecture in self.entries
            and (model.wrapper is None or self._sources.exists(model.wrapper.language_model.path))
        )

    def text_classes(self, model: FamilyModel) -> tuple[tuple[str, ast.ClassDef], ...]:
        """The classes that run a model's layers: its own, or those of its language model.

        Raises:
            UnsupportedError: The file of a wrapper's language model has no such class.
        """
        if model.wrapper is None:
            return self.classes(model.architecture)
        path, name = model.wrapper.language_model
        found = tuple(self.named(path, name))
        if not found and self._sources.exists(path):
            raise UnsupportedError(
                f"{path} has no class {name}, the language model of {model.architecture}",
                "name a release that this tool knows with --release",
            )
        return found

    def platform_files(self, model: FamilyModel) -> tuple[str, ...]:
        """The files of the package that a model is to be taken from, whether they are there or not.

        One for each platform that has its own. A wrapper's language model imports one itself.
        """
        if model.wrapper is not None:
            deciding, name = model.wrapper.language_model.path, PLATFORM_MODEL
        else:
            dotted, name = self.entries.get(model.architecture, ("", ""))
            deciding = f"{dotted.replace('.', '/')}/__init__.py"
        if not self._sources.exists(deciding):
            return ()
        imported = self._index(deciding).imports.get(name, ())
        files = (f"{dotted.replace('.', '/')}.py" for dotted, _ in imported)
        return tuple(dict.fromkeys(file for file in files if file.startswith(PLATFORM_PACKAGE)))

    def classes(self, architecture: str) -> tuple[tuple[str, ast.ClassDef], ...]:
        """The class of an architecture, with its file: several where each platform has its own."""
        entry = self.entries.get(architecture)
        return tuple(self._defined(*entry, DEEPEST)) if entry else ()

    def lineage(self, path: str, owner: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        """A class and those of its bases that vLLM defines, nearest first."""
        yield from self._lineage(path, owner, DEEPEST)

    def classes_in(self, path: str) -> tuple[ast.ClassDef, ...]:
        """The classes that a file defines."""
        return tuple(self._index(path).classes.values()) if self._sources.exists(path) else ()

    def named(self, path: str, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
        """What a name means in a file: a class of its own, or one that it imports."""
        yield from self._named(path, name, DEEPEST)

    def _lineage(
        self, path: str, owner: ast.ClassDef, depth: int
    ) -> Iterator[tuple[str, ast.ClassDef]]:
        yield path, owner
        if depth <= 0:
            return
        for name in syntax.base_names(owner):
            if name in ("", owner.name):
                continue
            for file, base in self._named(path, name, depth - 1):
                yield from self._lineage(file, base, depth - 1)

    def _named(self, path: str, name: str, depth: int) -> Iterator[tuple[str, ast.ClassDef]]:
        if not self._sources.exists(path):
            return
        index = self._index(path)
        if name in index.classes:
            yield path, index.classes[name]
        elif depth > 0:
            for dotted, original in index.imports.get(name, ()):
                yield from self._defined(dotted, original, depth - 1)

    def _index(self, path: str) -> _Index:
        if path not in self._indexes:
            self._indexes[path] = _Index(self._sources.module(path), path)
        return self._indexes[path]

    def _defined(self, dotted: str, name: str, depth: int) -> Iterator[tuple[str, ast.ClassDef]]:
        if not dotted.startswith("vllm."):
            return
        base = dotted.replace(".", "/")
        for path in (f"{base}.py", f"{base}/__init__.py"):
            if self._sources.exists(path):
                yield from self._named(path, name, depth)
                return


class _Index:
    """The classes that a module defines, and what it imports under which name, anywhere in it."""

    def __init__(self, module: ast.Module, path: str) -> None:
        self.classes: dict[str, ast.ClassDef] = {}
        self.imports: dict[str, list[tuple[str, str]]] = {}
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                self.classes.setdefault(node.name, node)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    imported = (_dotted(path, node), alias.name)
                    self.imports.setdefault(alias.asname or alias.name, []).append(imported)


def _dotted(path: str, node: ast.ImportFrom) -> str:
    """The module that an import of a file names."""
    module = node.module or ""
    if not node.level:
        return module
    package = path.split("/")[: -node.level]
    return ".".join([*package, module]) if module else ".".join(package)
