"""A patch: one thing to change in vLLM, when it is needed, and how to see that it holds."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from vllm_eagle3_patch.errors import UnsupportedError, VerificationError
from vllm_eagle3_patch.family import FAMILY
from vllm_eagle3_patch.sources import parse

if TYPE_CHECKING:
    import ast
    from collections.abc import Callable, Collection, Sequence

    from vllm_eagle3_patch.codemod import AnchoredCodemod
    from vllm_eagle3_patch.family import FamilyModel
    from vllm_eagle3_patch.sources import Sources


_REGISTERED: list[Callable[[], Patch]] = []


class Patch(ABC):
    """One thing to change in vLLM. A module in ``patches/`` defines a subclass; that registers it.

    Attributes:
        name: What users call it, in words joined by hyphens.
        title: One line on what it does.
        upstream: Where vLLM itself made this change, or why it never did.
        harden: Whether it changes models that already start: applied with ``--harden`` only.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    upstream: ClassVar[str]
    harden: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Register the class, unless it is a base of others and has no name of its own."""
        if "name" in vars(cls):
            _REGISTERED.append(cls)

    @abstractmethod
    def paths(self, sources: Sources) -> tuple[str, ...]:
        """The files of this installation that it concerns; none if it has no business here."""

    @abstractmethod
    def holds(self, module: ast.Module, models: Sequence[FamilyModel] = FAMILY) -> bool:
        """The postcondition, read from a parsed file, whoever wrote it.

        Args:
            module: One of :meth:`paths`, parsed.
            models: The models it has to hold for.
        """

    @abstractmethod
    def codemod(self) -> type[AnchoredCodemod]:
        """The codemod that makes the postcondition hold."""

    def missing(self, sources: Sources, model: FamilyModel) -> bool:
        """Whether a model lacks this patch in an installation."""
        return not all(self.holds(sources.module(path), (model,)) for path in self.paths(sources))

    def apply(self, content: bytes, path: str, models: Sequence[FamilyModel] = FAMILY) -> bytes:
        """The content of a file with the patch in it; unchanged if it holds already.

        Args:
            content: The file's bytes.
            path: The file, relative to the directory that holds the package.
            models: The models that the installation ships.

        Raises:
            AnchorNotFoundError: An anchor is missing or ambiguous.
            UnsupportedError: The file is not Python, or LibCST cannot reproduce it exactly.
            VerificationError: The result does not satisfy the postcondition.
        """
        if self.holds(parse(content, path), models):
            return content
        changed = _transform(self.codemod(), content, path, models)
        if not self.holds(parse(changed, path), models):
            raise VerificationError(
                f"{path}: patch {self.name} was applied but its postcondition does not hold",
                "nothing was written; please report this with the vLLM version",
                code="postcondition",
            )
        return changed


def _transform(
    codemod: type[AnchoredCodemod], content: bytes, path: str, models: Sequence[FamilyModel]
) -> bytes:
    import libcst
    from libcst.codemod import CodemodContext

    try:
        tree = libcst.parse_module(content)
    except (libcst.ParserSyntaxError, UnicodeDecodeError, LookupError) as error:
        raise UnsupportedError(
            f"{path} cannot be parsed by LibCST", "reinstall vLLM", code="not-python"
        ) from error
    if tree.bytes != content:
        raise UnsupportedError(
            f"{path} cannot be reproduced exactly by LibCST",
            "the file has unusual white space (a form feed?); it is left alone",
            code="not-reproducible",
        )
    context = CodemodContext(filename=path)
    # transform_module would clone the tree for metadata, which no codemod here asks for.
    return codemod(context, models).transform_module_impl(tree).bytes


@cache
def all_patches() -> tuple[Patch, ...]:
    """Every patch of ``patches/``, by name; importing them needs LibCST."""
    from vllm_eagle3_patch import patches

    for module in pkgutil.iter_modules(patches.__path__, f"{patches.__name__}."):
        importlib.import_module(module.name)
    return tuple(sorted((kind() for kind in _REGISTERED), key=lambda patch: patch.name))


def selected(
    patches: Collection[Patch],
    *,
    harden: bool = False,
    only: Collection[str] = (),
    skip: Collection[str] = (),
) -> tuple[Patch, ...]:
    """The patches a run may apply: the default set, changed by the options of that name."""
    return tuple(
        patch
        for patch in patches
        if patch.name not in skip and (patch.name in only if only else harden or not patch.harden)
    )
