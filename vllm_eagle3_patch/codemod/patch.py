"""A patch: one thing to change in vLLM, when it is needed, and how to see that it holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from vllm_eagle3_patch.ground.errors import AnchorNotFoundError, VerificationError
from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.vllm_source.paths import INTERFACES, RUNNER
from vllm_eagle3_patch.vllm_source.sources import Text, not_too_deep

if TYPE_CHECKING:
    import ast
    from collections.abc import Callable, Sequence

    from vllm_eagle3_patch.codemod.anchored import AnchoredCodemod
    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.vllm_source.sources import Sources


REGISTERED: list[Callable[[], Patch]] = []
"""The classes of patches, once the modules that define them were imported."""


class Patch(ABC):
    """One thing to change in vLLM. A module in ``patches/`` defines a subclass; that registers it.

    Attributes:
        name: What users call it, in words joined by hyphens.
        title: One line on what it does.
        upstream: Where vLLM itself made this change, or why it never did.
        harden: Whether it changes models that already start: applied with ``--harden`` only.
        companion: Whether it goes along wherever ``deepseek-v2`` is applied, so that what that
            patch makes ready also works well; elsewhere it is applied with ``--harden`` only.
        needs_file: Whether a model that needs it cannot be ready without one of its files.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    upstream: ClassVar[str]
    harden: ClassVar[bool] = False
    companion: ClassVar[bool] = False
    needs_file: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        """Register the class, unless it is a base of others and has no name of its own."""
        if "name" in vars(cls):
            REGISTERED.append(cls)

    @abstractmethod
    def paths(self, sources: Sources) -> tuple[str, ...]:
        """The files of this installation that it concerns; none if it has no business here."""

    @abstractmethod
    def holds(
        self,
        module: ast.Module,
        models: Sequence[FamilyModel] = FAMILY,
        *,
        path: str = "",
        protocol: bool = True,
    ) -> bool:
        """The postcondition, read from a parsed file, whoever wrote it.

        Args:
            module: One of :meth:`paths`, parsed.
            models: The models it has to hold for.
            path: Which one, for a patch that changes several files.
            protocol: Whether this vLLM has the protocol ``SupportsEagle3``.
        """

    @abstractmethod
    def codemod(self, path: str = "") -> type[AnchoredCodemod]:
        """The codemod that makes the postcondition hold in one of :meth:`paths`."""

    def missing(self, sources: Sources, model: FamilyModel) -> bool:
        """Whether a model lacks this patch in an installation."""
        paths = self.paths(sources)
        protocol = has_protocol(sources)
        if not paths and self.needs_file:
            return True
        return not all(
            self.holds(sources.module(path), (model,), path=path, protocol=protocol)
            for path in paths
        )

    def apply(
        self,
        content: bytes,
        path: str,
        models: Sequence[FamilyModel] = FAMILY,
        *,
        protocol: bool = True,
    ) -> bytes:
        """The content of a file with the patch in it; unchanged if it holds already.

        Args:
            content: The file's bytes.
            path: The file, relative to the directory that holds the package.
            models: The models that the installation ships.
            protocol: Whether its vLLM has the protocol ``SupportsEagle3``.

        Raises:
            AnchorNotFoundError: An anchor is missing or ambiguous.
            UnsupportedError: The file is not Python, or LibCST cannot reproduce it exactly.
            VerificationError: The result does not satisfy the postcondition.
        """
        return self.apply_to(Text(content, path), models, protocol=protocol).content

    def apply_to(
        self, text: Text, models: Sequence[FamilyModel] = FAMILY, *, protocol: bool = True
    ) -> Text:
        """The same for a file that may have been parsed already; that very one if it holds."""
        with not_too_deep(text.path):
            return self._applied_to(text, models, protocol)

    def _applied_to(self, text: Text, models: Sequence[FamilyModel], protocol: bool) -> Text:
        path = text.path
        if self.holds(text.module, models, path=path, protocol=protocol):
            return text
        from libcst.codemod import CodemodContext

        codemod = self.codemod(path)(CodemodContext(filename=path), models, protocol)
        # transform_module would clone the tree for metadata, which no codemod here asks for.
        changed = Text(codemod.transform_module_impl(text.tree()).bytes, path)
        if not self.holds(changed.module, models, path=path, protocol=protocol):
            raise VerificationError(
                f"{path}: patch {self.name} was applied but its postcondition does not hold",
                "nothing was written; please report this with the vLLM version",
                code="postcondition",
            )
        return changed


def has_protocol(sources: Sources) -> bool:
    """Whether this vLLM asks for the protocol ``SupportsEagle3`` (0.10.1 on) and has it.

    Raises:
        AnchorNotFoundError: It asks for a protocol that is not where it always was.
    """
    if b"class SupportsEagle3(" in (sources.read(INTERFACES) or b""):
        return True
    if b"supports_eagle3(" in (sources.read(RUNNER) or b""):
        raise AnchorNotFoundError(
            "deepseek-v2", INTERFACES, "class SupportsEagle3", "the module", 0
        )
    return False
