"""Changing an installed vLLM: all files or none, and back again."""

import stat
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from vllm_eagle3_patch.ground.digest import sha256
from vllm_eagle3_patch.ground.errors import ModifiedFileError, PatchError, VerificationError
from vllm_eagle3_patch.ground.folder import Folder, Snapshot
from vllm_eagle3_patch.transaction.all_or_none import (
    carry_out,
    last_copies,
    manifest_of,
    next_run,
    replace_all,
)
from vllm_eagle3_patch.transaction.bytecode import remove_bytecode
from vllm_eagle3_patch.transaction.change import Change
from vllm_eagle3_patch.transaction.file_swap import changed_meanwhile, current_digest, stage
from vllm_eagle3_patch.transaction.state.documents import safe_path
from vllm_eagle3_patch.transaction.state.journal import (
    APPLY,
    Journal,
    KeptAside,
    Replacement,
    Site,
)
from vllm_eagle3_patch.transaction.state.lock import Hold, exclusive
from vllm_eagle3_patch.transaction.state.manifest import Manifest, ManifestEntry


def commit(
    hold: Hold,
    changes: Sequence[Change],
    *,
    tool_version: str,
    vllm_version: str,
    release: str | None,
    check: Callable[[], None],
    stale: Collection[str],
    published: Collection[str],
) -> tuple[KeptAside, ...]:
    """Change all these files or none, and say what stays in the state folder for the user.

    The caller has ended an interrupted run. A journal is written, every new file is staged beside
    the old one and every old one kept, all synced; the files are swapped, read back and
    compared, the manifest is written, and ``check`` is run. Whatever fails until then, an
    interruption included, everything is rolled back.

    Args:
        hold: The lock of the installation.
        changes: The files; one that holds its new content already is left as it is.
        tool_version: This and the next two are for the manifest.
        vllm_version: As vLLM's distribution says.
        release: In the matrix; None for an unknown one.
        check: Called when all files are in place; what it raises rolls them back.
        stale: Paths in the manifest that are not ours any more (vLLM was installed anew): what was
            kept of them is dropped, or set aside where it is the last copy.
        published: SHA-256 digests of files that can be had again: no copy of these is a last one.

    Raises:
        ModifiedFileError: A file is not as expected, or missing.
        VerificationError: The result is not as planned, or ``check`` failed.
        PatchError: What ``check`` raised, if it is one.
        StateCorruptError: The state cannot be trusted.
        BusyError: Another run took the lock over.
        NotWritableError: Rolling back failed too.
        OSError: Something cannot be written; the lock's context explains it.
    """
    paths = [change.path for change in changes]
    if not all(map(safe_path, paths)) or len(set(paths)) != len(paths):
        raise ValueError(f"not distinct relative paths in the package: {paths}")
    root = hold.root
    manifest = manifest_of(root)
    found = {change.path: _expected(root, change) for change in changes}
    effective = [change for change in changes if sha256(change.after) != change.expected]
    dropped = _no_longer_ours(root, manifest, stale)
    if not effective and not dropped:
        return ()
    run = next_run(root, manifest)
    entries = {p: e for p, e in manifest.files.items() if p not in dropped} if manifest else {}
    files = tuple(_replacement(change, entries.get(change.path)) for change in effective)
    for change in effective:
        entry = entries.get(change.path)
        entries[change.path] = _entry(root, change, found[change.path], entry, run)
    after = Manifest(tool_version, vllm_version, release, run, entries)
    journal = Journal(APPLY, tool_version, run, manifest, after, files)
    journal = replace(journal, saved=last_copies(root, journal, published))
    carry_out(hold, journal, lambda site: _replace_all(site, hold, effective, check))
    return journal.kept_aside()


def drop_bytecode(root: Path, paths: Sequence[str]) -> None:
    """Remove the compiled files of these sources (see ``remove_bytecode``).

    Raises:
        BusyError: Another run is at work.
        NotWritableError: One that would be used may not be removed.
    """
    with exclusive(root) as hold:
        for path in paths:
            remove_bytecode(hold.root, path)


def _replacement(change: Change, entry: ManifestEntry | None) -> Replacement:
    edited = entry is not None and entry.written != change.expected
    aside = change.keep_aside and edited
    return Replacement(change.path, change.expected, sha256(change.after), aside)


def _entry(
    root: Folder, change: Change, found: Snapshot, entry: ManifestEntry | None, run: int
) -> ManifestEntry:
    written = sha256(change.after)
    if entry is not None and (
        change.keep_aside or change.made_of == entry.original or change.expected == entry.written
    ):
        return replace(entry, written=written, patches=change.patches)
    parent, _, name = change.path.rpartition("/")
    with root.below(parent) as folder:
        symlink = folder.link_text(name)
    status = found.status
    return ManifestEntry(
        path=change.path,
        original=change.expected,
        written=written,
        patches=change.patches,
        kept=run,
        symlink=symlink,
        mode=stat.S_IMODE(status.st_mode),
        owner=(status.st_uid, status.st_gid),
        times=(status.st_atime_ns, status.st_mtime_ns),
    )


def _replace_all(
    site: Site, hold: Hold, changes: Sequence[Change], check: Callable[[], None]
) -> None:
    for change in changes:
        stage(site, change.path, change.after)
    replace_all(site, hold)
    try:
        check()
    except PatchError:
        raise
    except Exception as error:
        raise VerificationError(
            f"verification failed, everything was rolled back: {error or type(error).__name__}",
            "run verify by itself to see more",
        ) from error


def _expected(root: Folder, change: Change) -> Snapshot:
    """What is at a path, if it is what the change expects."""
    parent, _, name = change.path.rpartition("/")
    try:
        with root.below(parent) as folder:
            snapshot = folder.snapshot(name, follow=True)
    except FileNotFoundError as error:
        raise ModifiedFileError(
            f"{change.path} is missing", "reinstall vLLM, then run it again", code="missing"
        ) from error
    if sha256(snapshot.data) != change.expected:
        raise changed_meanwhile(change.path)
    return snapshot


def _no_longer_ours(
    root: Folder, manifest: Manifest | None, stale: Collection[str]
) -> frozenset[str]:
    entries = manifest.files if manifest else {}
    return frozenset(
        path
        for path in stale
        if path in entries and current_digest(root, path) != entries[path].written
    )
