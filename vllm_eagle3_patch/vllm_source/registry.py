"""The registry of an installation, and the classes that it names with all they inherit."""

from __future__ import annotations

import ast
from functools import cached_property
from typing import TYPE_CHECKING

from vllm_eagle3_patch.vllm_source import syntax
from vllm_eagle3_patch.vllm_source.paths import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_eagle3_patch.vllm_source.sources import Sources

MODELS = "vllm.model_executor.models"
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
