"""Putting the originals back."""

import errno
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from vllm_eagle3_patch.ground.errors import ModifiedFileError, NotReadableError
from vllm_eagle3_patch.ground.folder import GONE, Folder, parent_of, passing_over
from vllm_eagle3_patch.ground.os_errors import explained
from vllm_eagle3_patch.transaction.all_or_none import (
    carry_out,
    last_copies,
    manifest_of,
    next_run,
    replace_all,
)
from vllm_eagle3_patch.transaction.bytecode import remove_bytecode
from vllm_eagle3_patch.transaction.file_swap import current_digest, swap
from vllm_eagle3_patch.transaction.state.journal import (
    REVERT,
    Journal,
    KeptAside,
    Replacement,
    Site,
)
from vllm_eagle3_patch.transaction.state.layout import FOLDER, MANIFEST, VERIFIED, opened_in
from vllm_eagle3_patch.transaction.state.lock import Hold
from vllm_eagle3_patch.transaction.state.manifest import (
    Manifest,
    ManifestEntry,
    lost_original,
    original_is_usable,
    unclaimed_in,
)


@dataclass(frozen=True)
class RevertResult:
    """What ``revert`` did, or would do.

    Attributes:
        reverted: The files whose originals were put back.
        left_alone: Files of ours that someone edited: they and their originals stay.
        stale: Files that are not ours any more, or gone with their folder: vLLM was installed anew
            or removed.
        kept_aside: What stays in the state folder for the user to delete.
        unclaimed: Kept files, relative to the root, of which the manifest says nothing: they stay.
        other_owner: Files that came back as a copy and have another owner or group than the
            original: we may not give them away.
    """

    reverted: tuple[str, ...]
    left_alone: tuple[str, ...]
    stale: tuple[str, ...]
    kept_aside: tuple[KeptAside, ...]
    unclaimed: tuple[str, ...]
    other_owner: tuple[str, ...] = ()


class Origins(NamedTuple):
    """What tells whose a file is that is not as this tool wrote it.

    Attributes:
        known_originals: SHA-256 digests of files as they are installed: a file with one of them
            was installed anew, not edited, and one that was kept can be had again.
        not_shipped: Paths that the vLLM that is there now does not have: a file that is missing
            there was not deleted by anyone.
        ours: For paths in the manifest, SHA-256 digests of what else we make of the original that
            is kept: it counts as what we wrote.
    """

    known_originals: Collection[str] = ()
    not_shipped: Collection[str] = ()
    ours: Mapping[str, Collection[str]] = MappingProxyType({})


def planned_revert(root: Path, origins: Origins, *, force: bool) -> RevertResult:
    """What ``revert`` would do; it raises the same.

    Raises:
        NotReadableError: The state or a file of the manifest may not be read.
    """
    with explained(NotReadableError), Folder.at(root) as folder:
        return _plan(folder, origins, force=force)[1]


def revert(hold: Hold, origins: Origins, *, force: bool) -> RevertResult:
    """Put every original back, with its mode, owner, times and link, and remove our state.

    The caller has ended an interrupted run. A file that someone edited stays, and with it what is
    kept of it; one that someone deleted is put back, unless its folder is gone; a file that is not
    ours any more stays, and what was kept of it is removed, or set aside where it is the last copy.
    What is kept without being in the manifest is never removed. With ``force`` edited files are
    replaced too, and copies of them kept in the state folder.

    Raises:
        ModifiedFileError: There are both files to revert and edited ones; nothing was written.
        StateCorruptError: The state cannot be trusted, or an original is lost.
        BusyError: Another run took the lock over.
        NotWritableError: Rolling back failed too.
        OSError: Something cannot be written; the lock's context explains it.
    """
    journal, result = _plan(hold.root, origins, force=force)
    if journal.files or journal.dropped() or _is_left(hold.root, journal):
        carry_out(hold, journal, lambda site: _put_all_back(site, hold))
    entries = [journal.entry_of(file.path) for file in journal.files]
    other_owner = tuple(e.path for e in entries if _has_other_owner(hold.root, e))
    return replace(result, other_owner=other_owner)


def _plan(root: Folder, origins: Origins, *, force: bool) -> tuple[Journal, RevertResult]:
    manifest = manifest_of(root)
    entries = manifest.files if manifest else {}
    digests = {path: current_digest(root, path) for path in entries}
    found: dict[str, list[str]] = {what: [] for what in ("ours", "edited", "original", "stale")}
    for path, entry in entries.items():
        what = _what_is_there(root, entry, digests[path], origins)
        gone = what == "ours" and digests[path] is None and path in origins.not_shipped
        found["stale" if gone else what].append(path)
    if found["ours"] and found["edited"] and not force:
        raise ModifiedFileError(
            f"edited since they were patched: {', '.join(found['edited'])}; nothing was reverted",
            "use --force to replace them too: copies of them are kept",
        )
    # What is edited and has no digest is no file: there are no bytes to keep aside.
    left_alone = [path for path in found["edited"] if not force or digests[path] is None]
    files = tuple(
        Replacement(path, digest, entries[path].original, aside=path in found["edited"])
        for path, digest in digests.items()
        if path in found["ours"] or (path in found["edited"] and path not in left_alone)
    )
    run = next_run(root, manifest)
    unclaimed = _unclaimed(root, manifest)
    after = None
    if manifest is not None and (left_alone or unclaimed):
        after = replace(manifest, run=run, files={path: entries[path] for path in left_alone})
    tool = manifest.tool if manifest else ""
    journal = Journal(REVERT, tool, run, manifest, after, files)
    journal = replace(journal, saved=last_copies(root, journal, origins.known_originals))
    _make_sure_of_originals(root, journal)
    return journal, RevertResult(
        reverted=tuple(file.path for file in files),
        left_alone=tuple(left_alone),
        stale=tuple(found["stale"]),
        kept_aside=journal.kept_aside(),
        unclaimed=unclaimed,
    )


def _is_left(root: Folder, journal: Journal) -> bool:
    """Whether there is something to remove although there is no original to put back."""
    if journal.after is not None or root.status(FOLDER) is None:
        return False
    with opened_in(root) as state:
        return bool({MANIFEST, VERIFIED} & set(state.names()))


def _what_is_there(root: Folder, entry: ManifestEntry, digest: str | None, origins: Origins) -> str:
    if digest is None:
        return _without_a_file(root, entry.path)
    if digest == entry.written or digest in origins.ours.get(entry.path, ()):
        return "ours"
    if digest == entry.original:
        return "original"
    return "stale" if digest in origins.known_originals else "edited"


def _without_a_file(root: Folder, path: str) -> str:
    with passing_over(GONE - {errno.ENOENT}):
        with passing_over({errno.ENOENT}), parent_of(root, path) as (folder, name):
            return "ours" if folder.status(name) is None else "edited"
        return "stale"
    return "edited"  # A link or a file is in the place of its folder.


def _has_other_owner(root: Folder, entry: ManifestEntry) -> bool:
    with passing_over(GONE), parent_of(root, entry.path) as (folder, name):
        status = folder.status(name)
        if status is not None and entry.symlink is None:
            return (status.st_uid, status.st_gid) != entry.owner
    return False


def _unclaimed(root: Folder, manifest: Manifest | None) -> tuple[str, ...]:
    if manifest is None or root.status(FOLDER) is None:
        return ()
    with opened_in(root) as state:
        return tuple(f"{FOLDER}/{path}" for path in unclaimed_in(state, manifest))


def _put_all_back(site: Site, hold: Hold) -> None:
    """Put back the files that were deleted, of which there is nothing to keep, then the others."""
    journal = site.journal
    for file in journal.files:
        if file.before is None:
            hold.confirm()
            swap(site, file)
            remove_bytecode(site.root, file.path)
    others = tuple(file for file in journal.files if file.before is not None)
    replace_all(replace(site, journal=replace(journal, files=others)), hold)


def _make_sure_of_originals(root: Folder, journal: Journal) -> None:
    for file in journal.files:
        entry = journal.entry_of(file.path)
        with opened_in(root) as state:
            if not original_is_usable(root, state, entry):
                raise lost_original(entry)
