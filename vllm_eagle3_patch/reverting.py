"""Putting the originals back."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_eagle3_patch.errors import InterruptedRunError, ModifiedFileError
from vllm_eagle3_patch.folder import Folder
from vllm_eagle3_patch.journal import REVERT, Journal, Replacement, unfinished
from vllm_eagle3_patch.lock import exclusive
from vllm_eagle3_patch.os_errors import explained
from vllm_eagle3_patch.recovery import RecoveryResult, recover_in
from vllm_eagle3_patch.replacing import current_digest
from vllm_eagle3_patch.run import KeptAside, carry_out, manifest_of, next_run, replace_all
from vllm_eagle3_patch.state import ManifestEntry, lost_original, original_is_usable
from vllm_eagle3_patch.state_folder import FOLDER, opened_in


@dataclass(frozen=True)
class RevertResult:
    """What ``revert`` did, or would do.

    Args:
        reverted: The files whose originals were put back.
        left_alone: Files of ours that someone edited: they and their originals stay.
        already_original: Files that were as the originals already.
        stale: Files that are not ours any more, or gone: vLLM was installed anew or removed.
        kept_aside: Where copies of edited files are.
        state_removed: Whether nothing of our state is left.
        recovered: What became of an interrupted run that was found.
    """

    reverted: tuple[str, ...] = ()
    left_alone: tuple[str, ...] = ()
    already_original: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    kept_aside: tuple[KeptAside, ...] = ()
    state_removed: bool = False
    recovered: RecoveryResult | None = None


def revert(
    root: Path,
    *,
    force: bool = False,
    dry_run: bool = False,
    known_originals: Collection[str] = (),
    all_or_none: bool = False,
) -> RevertResult:
    """Put every original back, with its mode, owner, times and link, and remove our state.

    An interrupted run is ended first. A file that someone edited stays, and with it what is kept
    of it; a file that is not ours any more stays, and what was kept of it is removed.

    Args:
        root: The folder that holds the package folder ``vllm``.
        force: Replace edited files too, keeping copies of them in the state folder.
        dry_run: Only say what would be done; nothing is written.
        known_originals: SHA-256 digests of files as they are installed: a file with one of them
            was installed anew, not edited.
        all_or_none: Refuse if there are both files to revert and edited ones.

    Raises:
        ModifiedFileError: With ``all_or_none``; nothing was written.
        InterruptedRunError: With ``dry_run``; an interrupted run has to be ended first.
        StateCorruptError: The state cannot be trusted, or an original is lost.
        NotWritableError: Another run is at work, or something cannot be written.
    """
    with explained(), Folder.at(root) as folder:
        if folder.status(FOLDER) is None:
            return RevertResult(state_removed=True)
        if dry_run:
            if unfinished(root) is not None:
                raise InterruptedRunError(
                    "an earlier run was interrupted",
                    "run revert without --dry-run: it ends that run first",
                )
            return _plan(folder, force, known_originals, all_or_none)[1]
    with exclusive(root) as hold:
        recovered = recover_in(hold.root)
        journal, result = _plan(hold.root, force, known_originals, all_or_none)
        if journal.files or journal.dropped():
            carry_out(hold, journal, lambda site: replace_all(site, hold))
        removed = hold.root.status(FOLDER) is None
        return replace(result, state_removed=removed, recovered=recovered)


def _plan(
    root: Folder, force: bool, known_originals: Collection[str], all_or_none: bool
) -> tuple[Journal, RevertResult]:
    manifest = manifest_of(root)
    entries = manifest.files if manifest else {}
    digests = {path: current_digest(root, path) for path in entries}
    found: dict[str, list[str]] = {what: [] for what in ("ours", "edited", "original", "stale")}
    for path, entry in entries.items():
        found[_what_is_there(entry, digests[path], known_originals)].append(path)
    if all_or_none and found["ours"] and found["edited"] and not force:
        raise ModifiedFileError(
            f"edited since they were patched: {', '.join(found['edited'])}; nothing was reverted",
            "use --force to replace them too: copies of them are kept",
        )
    left_alone = [] if force else found["edited"]
    files = tuple(
        Replacement(path, digest, entries[path].original, aside=path in found["edited"])
        for path, digest in digests.items()
        if digest is not None and (path in found["ours"] or (force and path in found["edited"]))
    )
    run = next_run(root, manifest)
    after = None
    if manifest is not None and left_alone:
        after = replace(manifest, run=run, files={path: entries[path] for path in left_alone})
    tool = manifest.tool if manifest else ""
    journal = Journal(REVERT, tool, run, manifest, after, files)
    _make_sure_of_originals(root, journal)
    kept_aside = KeptAside.all_of(journal)
    return journal, RevertResult(
        reverted=tuple(file.path for file in files),
        left_alone=tuple(left_alone),
        already_original=tuple(found["original"]),
        stale=tuple(found["stale"]),
        kept_aside=kept_aside,
        state_removed=manifest is not None and not left_alone and not kept_aside,
    )


def _what_is_there(
    entry: ManifestEntry, digest: str | None, known_originals: Collection[str]
) -> str:
    if digest == entry.written:
        return "ours"
    if digest == entry.original:
        return "original"
    return "stale" if digest is None or digest in known_originals else "edited"


def _make_sure_of_originals(root: Folder, journal: Journal) -> None:
    for file in journal.files:
        entry = journal.entry_of(file.path)
        with opened_in(root) as state:
            if not original_is_usable(root, state, entry):
                raise lost_original(entry)
