"""What a run is about to do, written down before it does it.

A journal says which files a run replaces and what the manifest was and is to be. How far the run
came is read from the files themselves, but for one step: that it is done, checked included, is
said by giving the journal another name.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from vllm_eagle3_patch.ground.errors import NotReadableError
from vllm_eagle3_patch.ground.folder import Folder
from vllm_eagle3_patch.ground.os_errors import explained
from vllm_eagle3_patch.ground.text import one_line
from vllm_eagle3_patch.transaction.state.documents import SCHEMA, Fields, decode, encode
from vllm_eagle3_patch.transaction.state.layout import (
    CONCLUDED,
    COPIES,
    EDITED,
    FOLDER,
    JOURNAL,
    ORIGINALS,
    PREVIOUS,
    RESTORE,
    document_in,
    opened,
)
from vllm_eagle3_patch.transaction.state.manifest import Manifest, ManifestEntry

APPLY, REVERT = "apply", "revert"
_TOKEN = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True)
class Replacement:
    """One file that a run replaces.

    Attributes:
        path: Relative to the root, with forward slashes.
        before: The SHA-256 of what is there before the run; None where a file that was deleted is
            put back, which only ``revert`` does.
        after: The SHA-256 of what is there after it.
        aside: Whether someone edited what is replaced, so that a copy of it stays.
    """

    path: str
    before: str | None
    after: str
    aside: bool = False


@dataclass(frozen=True)
class KeptAside:
    """What stays in the state folder although a run has no use for it.

    Attributes:
        path: The file, relative to the root.
        copy: Where it is, relative to the root.
        edited: Whether someone had edited it and it was replaced all the same; else it is the
            last copy of an original that vLLM was installed over.
    """

    path: str
    copy: str
    edited: bool = True


@dataclass(frozen=True)
class Journal:
    """A run that is about to happen, is happening or was interrupted.

    Attributes:
        operation: ``apply`` or ``revert``.
        run: The number under which this run keeps files.
        saved: The files whose originals are of no use after it and are the last copies.
        token: Makes the names of its staged files its own.
    """

    operation: str
    tool: str
    run: int
    before: Manifest | None
    after: Manifest | None
    files: tuple[Replacement, ...]
    saved: tuple[str, ...] = ()
    token: str = field(default_factory=lambda: os.urandom(4).hex())

    def entry_of(self, path: str) -> ManifestEntry:
        """What says how the original of a file that this run replaces is kept."""
        manifest = self.before if self.operation == REVERT else self.after
        assert manifest is not None
        return manifest.files[path]

    def keeps_original(self, path: str) -> bool:
        """Whether what this run replaces there is an original, not something of ours."""
        return self.operation == APPLY and self.entry_of(path).kept == self.run

    def shelf(self, path: str) -> str:
        """Where what this run replaces is kept, relative to the state folder."""
        shelf = ORIGINALS if self.keeps_original(path) else PREVIOUS
        return f"{shelf}/{self.run}/{path}"

    def copy(self, path: str) -> str:
        """Where the copy of an original is that this run replaces."""
        return f"{COPIES}/{self.run}/{path}"

    def aside(self, path: str) -> str:
        """Where a copy of an edited file stays, or the last one of an original."""
        return f"{EDITED}/{self.run}/{path}"

    def kept_aside(self) -> tuple[KeptAside, ...]:
        """What stays aside after the run."""
        edited = [(file.path, True) for file in self.files if file.aside]
        saved = [(path, False) for path in self.saved]
        return tuple(
            KeptAside(path, f"{FOLDER}/{self.aside(path)}", edited=was_edited)
            for path, was_edited in edited + saved
        )

    def staged(self, name: str) -> str:
        """The name of a new file until it takes the place of ``name`` beside it."""
        return f".{name}.vllm-eagle3-patch-{self.token}"

    def dropped(self) -> tuple[ManifestEntry, ...]:
        """The entries whose originals are of no use after the run."""
        before = self.before.files if self.before else {}
        after = self.after.files if self.after else {}
        return tuple(
            entry
            for path, entry in before.items()
            if path not in after or after[path].kept != entry.kept
        )

    def encoded(self) -> bytes:
        """The bytes of its file."""
        return encode(
            {
                "schema": SCHEMA,
                "operation": self.operation,
                "tool": self.tool,
                "run": self.run,
                "before": self.before.document() if self.before else None,
                "after": self.after.document() if self.after else None,
                "files": [vars(replacement) for replacement in self.files],
                "saved": list(self.saved),
                "token": self.token,
            }
        )


@dataclass(frozen=True)
class Site:
    """An installation during a run."""

    root: Folder
    state: Folder
    journal: Journal


def unfinished(root: Path) -> Journal | None:
    """The journal of an interrupted run, or of one in progress. Nothing is written.

    Raises:
        StateCorruptError: The journal cannot be trusted.
        NotReadableError: It may not be read.
    """
    with explained(NotReadableError), opened(root) as state:
        return None if state is None else journal_in(state)


def journal_in(state: Folder) -> Journal | None:
    """The journal in an open state folder; raises as ``unfinished`` does."""
    for name in (JOURNAL, CONCLUDED):
        data = document_in(state, name)
        if data is not None:
            return _read(decode(data, one_line(state.path / name), RESTORE))
    return None


def is_concluded(state: Folder) -> bool:
    """Whether the journal in an open state folder is that of a run which only has to be tidied."""
    return state.status(JOURNAL) is None and state.status(CONCLUDED) is not None


def _read(fields: Fields) -> Journal:
    before, after = _manifest(fields, "before"), _manifest(fields, "after")
    operation = fields.one_of("operation", APPLY, REVERT)
    known = (before if operation == REVERT else after) or None
    files: list[Replacement] = []
    for item in fields.each("files"):
        before_it = item.optional_digest if operation == REVERT else item.digest
        replacement = Replacement(
            item.path("path"), before_it("before"), item.digest("after"), item.flag("aside")
        )
        seen = {file.path for file in files}
        if known is None or replacement.path not in known.files or replacement.path in seen:
            raise item.wrong("path")
        files.append(replacement)
    saved = fields.optional_texts("saved")
    if not {*saved} <= (before.files.keys() if before else set()):
        raise fields.wrong("saved")
    token = fields.text("token")
    if not _TOKEN.fullmatch(token):
        raise fields.wrong("token")
    return Journal(
        operation,
        fields.text("tool"),
        fields.number("run"),
        before,
        after,
        tuple(files),
        saved,
        token,
    )


def _manifest(fields: Fields, key: str) -> Manifest | None:
    inner = fields.optional_inner(key)
    return None if inner is None else Manifest.of(inner)
