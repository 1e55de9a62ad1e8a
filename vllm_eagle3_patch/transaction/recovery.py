"""Ending an interrupted run: it is undone, or tidied up if it was complete.

A run is complete once its journal is concluded, the manifest it was to leave is there and no file
is as the run found it. One that is not is undone, ``revert`` as well as ``apply``. What is there
tells how far it came, so ending a run may itself be interrupted anywhere and started again.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from vllm_eagle3_patch.ground import filesystem
from vllm_eagle3_patch.ground.errors import NotReadableError, PatchError
from vllm_eagle3_patch.ground.folder import Folder
from vllm_eagle3_patch.ground.os_errors import explained
from vllm_eagle3_patch.transaction.bytecode import remove_bytecode
from vllm_eagle3_patch.transaction.conclusion import NEW, dissolve, end, finish, settle
from vllm_eagle3_patch.transaction.file_swap import current_digest, put_back, unstage
from vllm_eagle3_patch.transaction.state import lock, readme
from vllm_eagle3_patch.transaction.state.journal import (
    APPLY,
    Journal,
    KeptAside,
    Replacement,
    Site,
    is_concluded,
    journal_in,
)
from vllm_eagle3_patch.transaction.state.layout import (
    CONCLUDED,
    COPIES,
    EDITED,
    FOLDER,
    JOURNAL,
    MANIFEST,
    ORIGINALS,
    VERIFIED,
    discard,
    document_in,
    opened_in,
)
from vllm_eagle3_patch.transaction.state.manifest import Manifest, manifest_bytes

_DOCUMENTS = (readme.NAME, MANIFEST, JOURNAL, VERIFIED)


@dataclass(frozen=True)
class RecoveryResult:
    """What became of an interrupted run.

    Attributes:
        operation: What it was: ``apply`` or ``revert``.
        outcome: ``rolled-back``, or ``completed`` if it only had to be tidied up.
        left_alone: Files that someone else changed after the run had replaced them.
        kept_aside: What a completed run left in the state folder for the user to delete.
    """

    operation: str
    outcome: str
    left_alone: tuple[str, ...] = ()
    kept_aside: tuple[KeptAside, ...] = ()


def recover(root: Path) -> RecoveryResult | None:
    """End an interrupted run, if there is one.

    Raises:
        StateCorruptError: The state cannot be trusted.
        BusyError: Another run is at work.
        NotReadableError: It cannot be told whether there is one.
        NotWritableError: Something cannot be written.
    """
    with explained(NotReadableError), Folder.at(root) as folder:
        needed = lock.leftovers(folder) or _needs_recovery(folder)
    if not needed:
        return None
    with lock.exclusive(root) as hold:
        return recover_in(hold.root)


def recover_in(root: Folder) -> RecoveryResult | None:
    """End an interrupted run; the caller holds the lock. Raises as ``recover`` does."""
    if root.status(FOLDER) is None:
        return None
    with opened_in(root) as state:
        journal = journal_in(state)
        for name in _DOCUMENTS:
            filesystem.remove(state, name + NEW)
        if journal is None:
            if _holds_nothing(state):
                dissolve(root, state)
                end(root, state)
            return None
        site = Site(root, state, journal)
        if is_concluded(state) and is_complete(root, journal):
            finish(site)
            kept_aside = journal.kept_aside()
            return RecoveryResult(journal.operation, "completed", kept_aside=kept_aside)
        return _roll_back(site)


def is_complete(root: Folder, journal: Journal) -> bool:
    """Whether all is as a run was to leave it, but for tidying up."""
    manifest = None
    if root.status(FOLDER) is not None:
        with opened_in(root) as state:
            manifest = document_in(state, MANIFEST)
    return manifest == manifest_bytes(journal.after) and not any(
        current_digest(root, file.path) == file.before != file.after for file in journal.files
    )


def _roll_back(site: Site) -> RecoveryResult:
    journal = site.journal
    outcomes: dict[str, str] = {}
    failure: OSError | PatchError | None = None
    for file in reversed(journal.files):
        # One that cannot be undone now is no reason to leave the others as they are.
        try:
            outcomes[file.path] = _undo(site, file)
        except (OSError, PatchError) as error:
            failure = failure or error
    foreign = tuple(path for path, outcome in outcomes.items() if outcome == "foreign")
    for path, outcome in outcomes.items():
        if outcome == "restored":
            remove_bytecode(site.root, path)
    if failure is not None:
        raise failure
    manifest = _with_retained(journal, foreign)
    settle(site, manifest)
    for file in journal.files:
        if not (journal.keeps_original(file.path) and file.path in foreign):
            discard(site.state, journal.shelf(file.path))
            if journal.keeps_original(file.path):
                discard(site.state, journal.copy(file.path))
        if file.aside and file.path not in foreign:
            discard(site.state, journal.aside(file.path))
    if manifest is None:
        dissolve(site.root, site.state)
    end(site.root, site.state)
    return RecoveryResult(journal.operation, "rolled-back", foreign[::-1])


def _undo(site: Site, file: Replacement) -> str:
    if file.before is not None:
        return put_back(site, file)
    # A deleted file that is back stays: it is the original, and nothing was there to go back to.
    unstage(site, file.path)
    return "untouched"


def _with_retained(journal: Journal, foreign: tuple[str, ...]) -> Manifest | None:
    """The manifest before a run, with the originals of files that stay changed.

    What is in the place of such a file is not ours, but its original must not be lost.
    """
    if journal.operation != APPLY or journal.after is None:
        return journal.before
    retained = {path: journal.after.files[path] for path in foreign if journal.keeps_original(path)}
    if not retained:
        return journal.before
    before = journal.before.files if journal.before else {}
    return replace(journal.after, files={**before, **retained})


def _needs_recovery(root: Folder) -> bool:
    if root.status(FOLDER) is None:
        return False
    with opened_in(root) as state:
        names = set(state.names())
        unwritten = {name + NEW for name in _DOCUMENTS}
        return bool(names & (unwritten | {JOURNAL, CONCLUDED})) or _holds_nothing(state)


def _holds_nothing(state: Folder) -> bool:
    """Whether there is nothing in the state folder that anybody could miss."""
    return not set(state.names()) & {MANIFEST, VERIFIED, ORIGINALS, COPIES, EDITED}
