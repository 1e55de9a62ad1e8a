"""What is known of an installation before anything is decided, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_eagle3_patch.assess.model_facts import ModelFacts
from vllm_eagle3_patch.ground.matrix import Release
from vllm_eagle3_patch.installation.find import Installation
from vllm_eagle3_patch.transaction.state.manifest import Manifest, ManifestEntry
from vllm_eagle3_patch.vllm_source.sources import Sources

if TYPE_CHECKING:
    from vllm_eagle3_patch.ground.errors import PatchError


class Problem(NamedTuple):
    """Something a user should know: a stable code, what is so, what to do."""

    code: str
    message: str
    hint: str

    @classmethod
    def of(cls, error: PatchError) -> Problem:
        """An error as a problem."""
        return cls(error.code, error.message, error.hint)


class FileStatus(NamedTuple):
    """One file that a patch concerns.

    Attributes:
        path: Relative to the directory that holds the package.
        state: ``pristine``, ``patched``, ``modified`` or ``missing``.
        digest: Its sha256 in hexadecimal, None if it is missing.
        patches: The patches in it; for a pristine file those that concern it, if known.
        known: Whether its content is in the matrix or was written by us.
        entry: What our manifest says of it, where that still holds.
        stale: Whether the manifest speaks of it, but vLLM was installed anew since.
    """

    path: str
    state: str
    digest: str | None
    patches: tuple[str, ...]
    known: bool
    entry: ManifestEntry | None = None
    stale: bool = False


class Assessment(NamedTuple):
    """Everything that is known of an installation before anything is decided.

    Attributes:
        manifest: What our state folder says, None without one or if it is corrupt.
        release: The release that it is by content, None if it is none of the matrix.
        facts: What holds for each model that it ships.
        problems: What a user should know, whatever is decided.
        evidence: Files that are read for the facts and that no patch changes.
    """

    installation: Installation
    sources: Sources
    manifest: Manifest | None
    release: Release | None
    files: tuple[FileStatus, ...]
    facts: tuple[ModelFacts, ...]
    problems: tuple[Problem, ...] = ()
    evidence: tuple[str, ...] = ()

    @property
    def pinned(self) -> bool:
        """Whether every file concerned is known by content."""
        return self.release is not None and all(status.known for status in self.files)

    @property
    def patched(self) -> tuple[str, ...]:
        """The files with patches of ours."""
        return tuple(status.path for status in self.files if status.state == "patched")

    @property
    def not_shipped(self) -> frozenset[str]:
        """Files of our manifest that the vLLM that is there now came without."""
        entries = self.manifest.files if self.manifest else {}
        record = self.installation.record
        return frozenset(path for path in entries if record and path not in record)

    @property
    def originals(self) -> Sources:
        """The installation as it was before us: our files replaced by their kept originals.

        Raises:
            StateCorruptError: An original is lost or not what it was.
        """
        if self.manifest is None:
            return self.sources
        from vllm_eagle3_patch.transaction.state.manifest import original_bytes

        root = self.installation.root
        ours = [status.entry for status in self.files if status.entry is not None]
        return self.sources.with_overlay({e.path: original_bytes(root, e) for e in ours})
