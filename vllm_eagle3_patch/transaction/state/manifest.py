"""What this tool knows of the files it changed in an installation, and their originals."""

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vllm_eagle3_patch.ground.digest import sha256
from vllm_eagle3_patch.ground.errors import NotReadableError, StateCorruptError
from vllm_eagle3_patch.ground.folder import GONE, Attributes, Folder, is_there, passing_over
from vllm_eagle3_patch.ground.os_errors import explained
from vllm_eagle3_patch.ground.text import one_line
from vllm_eagle3_patch.transaction.state.documents import SCHEMA, Fields, decode, encode
from vllm_eagle3_patch.transaction.state.layout import (
    CONCLUDED,
    COPIES,
    FOLDER,
    JOURNAL,
    MANIFEST,
    ORIGINALS,
    RESTORE,
    document_in,
    files_on,
    opened,
)

_LARGEST_ID = 2**32 - 2
# What says that a kept file is gone, or something else by now: another one has to serve.
_UNUSABLE = GONE | {errno.EIO, errno.ESTALE}


@dataclass(frozen=True)
class ManifestEntry:
    """One file that this tool changed.

    Attributes:
        path: Relative to the root, with forward slashes.
        original: The SHA-256 of the original.
        written: That of what this tool wrote.
        kept: The run that keeps the original: ``originals/<kept>/<path>``.
        symlink: Where the original led, if it was a symbolic link.
        mode: The original's permissions (of the file that a link led to).
        owner: Its user and group.
        times: Its last access and last change in nanoseconds.
    """

    path: str
    original: str
    written: str
    patches: tuple[str, ...]
    kept: int
    symlink: str | None
    mode: int
    owner: tuple[int, int]
    times: tuple[int, int]

    def attributes(self, extended: Mapping[str, bytes] | None = None) -> Attributes:
        """The original's attributes, with extended ones from elsewhere."""
        return Attributes(self.mode, self.owner, self.times, extended)


@dataclass(frozen=True)
class Manifest:
    """What was changed in an installation, and by which version of this tool."""

    tool: str
    vllm: str
    release: str | None
    run: int
    files: Mapping[str, ManifestEntry]

    def document(self) -> dict[str, object]:
        """As a JSON object."""
        return {
            "schema": SCHEMA,
            "tool": self.tool,
            "vllm": self.vllm,
            "release": self.release,
            "run": self.run,
            "files": [
                {
                    "path": entry.path,
                    "original": entry.original,
                    "written": entry.written,
                    "patches": list(entry.patches),
                    "kept": entry.kept,
                    "symlink": entry.symlink,
                    "mode": entry.mode,
                    "user": entry.owner[0],
                    "group": entry.owner[1],
                    "accessed_ns": entry.times[0],
                    "changed_ns": entry.times[1],
                }
                for entry in self.files.values()
            ],
        }

    @classmethod
    def of(cls, fields: Fields) -> "Manifest":
        """Read it from a JSON object.

        Raises:
            StateCorruptError: A field is missing or not as it must be.
        """
        files: dict[str, ManifestEntry] = {}
        for field in fields.each("files"):
            entry = ManifestEntry(
                path=field.path("path"),
                original=field.digest("original"),
                written=field.digest("written"),
                patches=field.texts("patches"),
                kept=field.number("kept"),
                symlink=field.optional_text("symlink"),
                mode=field.number("mode", 0o7777),
                owner=(field.number("user", _LARGEST_ID), field.number("group", _LARGEST_ID)),
                times=(field.time("accessed_ns"), field.time("changed_ns")),
            )
            if entry.path in files:
                raise field.wrong("path")
            files[entry.path] = entry
        if fields.number("schema") != SCHEMA:
            raise fields.wrong("schema")
        return cls(
            tool=fields.text("tool"),
            vllm=fields.text("vllm"),
            release=fields.optional_text("release"),
            run=fields.number("run"),
            files=files,
        )


def manifest_bytes(manifest: Manifest | None) -> bytes | None:
    """What the manifest's file holds; None where there is none to be."""
    return None if manifest is None else encode(manifest.document())


def read_manifest(root: Path) -> Manifest | None:
    """What this tool changed in an installation, None if there is no state.

    Raises:
        StateCorruptError: The state cannot be trusted; it is never read as no state.
        NotReadableError: It may not be read.
    """
    with explained(NotReadableError), opened(root) as state:
        return None if state is None else manifest_in(state)


def manifest_in(state: Folder) -> Manifest | None:
    """The manifest of an open state folder; raises as ``read_manifest`` does."""
    data = document_in(state, MANIFEST)
    if data is None:
        names = set(state.names())
        if names & {ORIGINALS, COPIES} and not names & {JOURNAL, CONCLUDED}:
            raise StateCorruptError(f"{one_line(state.path / MANIFEST)} is gone", RESTORE)
        return None
    return Manifest.of(decode(data, one_line(state.path / MANIFEST), RESTORE))


def original_bytes(root: Path, entry: ManifestEntry) -> bytes:
    """The bytes of a file as it was before this tool changed it.

    Raises:
        StateCorruptError: Neither the original nor its copy has the recorded content.
        NotReadableError: They may not be read.
    """
    with explained(NotReadableError), Folder.at(root) as folder, opened(root) as state:
        if state is not None:
            data = _linked_bytes(folder, state, entry)
            if data is None:
                data = bytes_at(state, f"{COPIES}/{entry.kept}/{entry.path}", entry.original)
            if data is not None:
                return data
    raise lost_original(entry)


def lost_original(entry: ManifestEntry) -> StateCorruptError:
    """The error that says that an original is gone."""
    return StateCorruptError(
        f"{entry.path}: the original that was kept is gone or damaged",
        "reinstall vLLM, then remove the folder " + FOLDER,
    )


def lost_originals(root: Path, manifest: Manifest) -> tuple[str, ...]:
    """The files of a manifest of which neither the original nor its copy is there.

    Only that they are there is looked at, not what they hold.

    Raises:
        StateCorruptError: The state cannot be trusted.
        NotReadableError: It may not be read.
    """
    with explained(NotReadableError), opened(root) as state:
        return tuple(
            path
            for path, entry in manifest.files.items()
            if state is None
            or not any(
                is_there(state, f"{shelf}/{entry.kept}/{path}") for shelf in (ORIGINALS, COPIES)
            )
        )


def unclaimed_in(state: Folder, manifest: Manifest | None) -> tuple[str, ...]:
    """The kept files of which a manifest says nothing, relative to the state folder.

    Of an original and its copy only the original is named.
    """
    entries = manifest.files.values() if manifest else ()
    paths = [PurePosixPath(str(entry.kept), entry.path) for entry in entries]
    # A link in the place of one of their folders is no file that was kept.
    claimed = {str(part) for path in paths for part in (path, *path.parents)}
    found = {
        path: f"{shelf}/{path}" for shelf in (COPIES, ORIGINALS) for path in files_on(state, shelf)
    }
    return tuple(found[path] for path in sorted(found.keys() - claimed))


def original_is_kept(root: Folder, state: Folder, entry: ManifestEntry) -> bool:
    """Whether the original itself is there, unchanged: its inode, or its symbolic link."""
    return _linked_bytes(root, state, entry) is not None


def original_is_usable(root: Folder, state: Folder, entry: ManifestEntry) -> bool:
    """Whether the original itself or its copy is there, unchanged."""
    copy = f"{COPIES}/{entry.kept}/{entry.path}"
    return original_is_kept(root, state, entry) or bytes_at(state, copy, entry.original) is not None


def _linked_bytes(root: Folder, state: Folder, entry: ManifestEntry) -> bytes | None:
    relative = f"{ORIGINALS}/{entry.kept}/{entry.path}"
    if entry.symlink is None:
        return bytes_at(state, relative, entry.original)
    parent, _, name = relative.rpartition("/")
    with passing_over(_UNUSABLE):
        with state.below(parent) as folder:
            if folder.link_text(name) != entry.symlink:
                return None
        # A relative link is meant to be read where it came from.
        with root.below(entry.path.rpartition("/")[0]) as place:
            data = place.snapshot(entry.symlink, follow=True).data
        return data if sha256(data) == entry.original else None
    return None


def bytes_at(folder: Folder, relative: str, digest: str) -> bytes | None:
    """The bytes of a file below a folder, None if they do not have this digest."""
    parent, _, name = relative.rpartition("/")
    with passing_over(_UNUSABLE):
        with folder.below(parent) as inner:
            data = inner.snapshot(name).data
        return data if sha256(data) == digest else None
    return None
