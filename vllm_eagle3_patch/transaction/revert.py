"""Putting the originals back."""

import errno
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from vllm_eagle3_patch.ground.errors import InterruptedRunError, ModifiedFileError
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
from vllm_eagle3_patch.transaction.recovery import RecoveryResult, recover_in
from vllm_eagle3_patch.transaction.state.journal import (
    REVERT,
    Journal,
    KeptAside,
    Replacement,
    Site,
    unfinished,
)
from vllm_eagle3_patch.transaction.state.layout import FOLDER, MANIFEST, VERIFIED, opened_in
from vllm_eagle3_patch.transaction.state.lock import Hold, exclusive, leftovers
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

    Args:
        reverted: The files whose originals were put back.
        left_alone: Files of ours that someone edited: they and their originals stay.
        already_original: Files that were as the originals already.
        stale: Files that are not ours any more, or gone with their folder: vLLM was installed anew
            or removed.
        kept_aside: What stays in the state folder for the user to delete.
        unclaimed: Kept files, relative to the root, of which the manifest says nothing: they stay.
        other_owner: Files that came back as a copy and have another owner or group than the
            original: we may not give them away.
        state_removed: Whether nothing of our state is left.
        recovered: What became of an interrupted run that was found.
    """

    reverted: tuple[str, ...] = ()
    left_alone: tuple[str, ...] = ()
    already_original: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    kept_aside: tuple[KeptAside, ...] = ()
    unclaimed: tuple[str, ...] = ()
    other_owner: tuple[str, ...] = ()
    state_removed: bool = False
    recovered: RecoveryResult | None = None


def revert(
    root: Path,
    *,
    force: bool = False,
    dry_run: bool = False,
    known_originals: Collection[str] = (),
    not_shipped: Collection[str] = (),
    ours: Mapping[str, Collection[str]] = MappingProxyType({}),
    all_or_none: bool = False,
    hold: Hold | None = None,
) -> RevertResult:
    """Put every original back, with its mode, owner, times and link, and remove our state.

    An interrupted run is ended first. A file that someone edited stays, and with it what is kept
    of it; one that someone deleted is put back, unless its folder is gone; a file that is not ours
    any more stays, and what was kept of it is removed, or set aside where it is the last copy. What
    is kept without being in the manifest is never removed.

    Args:
        root: The folder that holds the package folder ``vllm``.
        force: Replace edited files too, keeping copies of them in the state folder.
        dry_run: Only say what would be done; nothing is written.
        known_originals: SHA-256 digests of files as they are installed: a file with one of them
            was installed anew, not edited, and one that was kept can be had again.
        not_shipped: Paths that the vLLM that is there now does not have: a file that is missing
            there was not deleted by anyone.
        ours: For paths in the manifest, SHA-256 digests of what else we make of the original that
            is kept: it counts as what we wrote.
        all_or_none: Refuse if there are both files to revert and edited ones.
        hold: The lock, if the caller holds it already.

    Raises:
        ModifiedFileError: With ``all_or_none``; nothing was written.
        InterruptedRunError: With ``dry_run``; an interrupted run has to be ended first.
        StateCorruptError: The state cannot be trusted, or an original is lost.
        BusyError: Another run is at work.
        NotWritableError: Something cannot be written.
    """
    decide = partial(
        _plan,
        force=force,
        known_originals=known_originals,
        not_shipped=not_shipped,
        ours=ours,
        all_or_none=all_or_none,
    )
    with explained(), Folder.at(root) as folder:
        if folder.status(FOLDER) is None and (dry_run or not leftovers(folder)):
            return RevertResult(state_removed=True)
        if dry_run:
            if unfinished(root) is not None:
                raise InterruptedRunError(
                    "an earlier run was interrupted",
                    "run revert without --dry-run: it ends that run first",
                )
            return decide(folder)[1]
    with exclusive(root) if hold is None else nullcontext(hold) as held:
        recovered = recover_in(held.root)
        journal, result = decide(held.root)
        if journal.files or journal.dropped() or _is_left(held.root, journal):
            carry_out(held, journal, lambda site: _put_all_back(site, held))
        entries = [journal.entry_of(file.path) for file in journal.files]
        return replace(
            result,
            other_owner=tuple(e.path for e in entries if _has_other_owner(held.root, e)),
            state_removed=held.root.status(FOLDER) is None,
            recovered=recovered,
        )


def _plan(
    root: Folder,
    *,
    force: bool,
    known_originals: Collection[str],
    not_shipped: Collection[str],
    ours: Mapping[str, Collection[str]],
    all_or_none: bool,
) -> tuple[Journal, RevertResult]:
    manifest = manifest_of(root)
    entries = manifest.files if manifest else {}
    digests = {path: current_digest(root, path) for path in entries}
    found: dict[str, list[str]] = {what: [] for what in ("ours", "edited", "original", "stale")}
    for path, entry in entries.items():
        what = _what_is_there(root, entry, digests[path], known_originals, ours.get(path, ()))
        gone = what == "ours" and digests[path] is None and path in not_shipped
        found["stale" if gone else what].append(path)
    if all_or_none and found["ours"] and found["edited"] and not force:
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
    journal = replace(journal, saved=last_copies(root, journal, known_originals))
    _make_sure_of_originals(root, journal)
    kept_aside = journal.kept_aside()
    return journal, RevertResult(
        reverted=tuple(file.path for file in files),
        left_alone=tuple(left_alone),
        already_original=tuple(found["original"]),
        stale=tuple(found["stale"]),
        kept_aside=kept_aside,
        unclaimed=unclaimed,
        state_removed=manifest is not None and not (left_alone or kept_aside or unclaimed),
    )


def _is_left(root: Folder, journal: Journal) -> bool:
    """Whether there is something to remove although there is no original to put back."""
    if journal.after is not None or root.status(FOLDER) is None:
        return False
    with opened_in(root) as state:
        return bool({MANIFEST, VERIFIED} & set(state.names()))


def _what_is_there(
    root: Folder,
    entry: ManifestEntry,
    digest: str | None,
    known_originals: Collection[str],
    ours: Collection[str],
) -> str:
    if digest is None:
        return _without_a_file(root, entry.path)
    if digest == entry.written or digest in ours:
        return "ours"
    if digest == entry.original:
        return "original"
    return "stale" if digest in known_originals else "edited"


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
