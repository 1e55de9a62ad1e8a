"""Carrying out a run: written down first, then done as a whole or undone as a whole."""

from collections.abc import Callable, Collection
from itertools import count

from vllm_eagle3_patch.ground.errors import NotWritableError, VerificationError
from vllm_eagle3_patch.ground.folder import Folder
from vllm_eagle3_patch.ground.os_errors import refused
from vllm_eagle3_patch.transaction.bytecode import remove_bytecode
from vllm_eagle3_patch.transaction.conclusion import begun, conclude, finish, settle
from vllm_eagle3_patch.transaction.file_swap import current_digest, keep, swap
from vllm_eagle3_patch.transaction.recovery import is_complete, recover_in
from vllm_eagle3_patch.transaction.state.journal import REVERT, Journal, Site
from vllm_eagle3_patch.transaction.state.layout import (
    COPIES,
    EDITED,
    FOLDER,
    JOURNAL,
    ORIGINALS,
    PREVIOUS,
    opened_in,
)
from vllm_eagle3_patch.transaction.state.lock import Hold
from vllm_eagle3_patch.transaction.state.manifest import Manifest, manifest_in


def carry_out(hold: Hold, journal: Journal, action: Callable[[Site], None]) -> None:
    """Do what a journal says: ``action`` replaces the files and checks them.

    Raises:
        PatchError: What ``action`` raised; everything was rolled back.
        NotWritableError: Something could not be written and everything was rolled back, or rolling
            back failed too (code ``rollback-failed``): the next run does it.
        OSError: As ``NotWritableError``; the lock's context explains it.
    """
    root = hold.root
    try:
        with begun(root, JOURNAL, journal.encoded()) as state:
            site = Site(root, state, journal)
            action(site)
            hold.confirm()
            conclude(site)
            finish(site)
    except BaseException as error:
        try:
            hold.confirm()
            recover_in(root)
        except (OSError, MemoryError) as second:
            raise NotWritableError(
                f"{_reason(error)}; rolling back failed too: {_reason(second)}",
                "mend that, then run apply or revert: either ends the interrupted run first",
                code="rollback-failed",
            ) from error
        # Once it is complete, a failure to tidy up that did not last is none.
        if not isinstance(error, OSError) or not is_complete(root, journal):
            raise


def last_copies(root: Folder, journal: Journal, published: Collection[str]) -> tuple[str, ...]:
    """The files of which a run would delete the last copy of an original.

    Args:
        root: The folder that holds the package folder ``vllm``.
        journal: What is about to happen.
        published: The SHA-256 of files that can be had again: those of releases and of RECORD.
    """
    put_back = {file.path for file in journal.files} if journal.operation == REVERT else set()
    return tuple(
        entry.path
        for entry in journal.dropped()
        if entry.path not in put_back
        and entry.original not in published
        and current_digest(root, entry.path) != entry.original
    )


def manifest_of(root: Folder) -> Manifest | None:
    """The manifest of an installation, None if there is no state.

    Raises:
        StateCorruptError: The state cannot be trusted.
    """
    if root.status(FOLDER) is None:
        return None
    with opened_in(root) as state:
        return manifest_in(state)


def next_run(root: Folder, manifest: Manifest | None) -> int:
    """The number of a run under which nothing is kept yet."""
    taken = set() if manifest is None else {str(manifest.run)}
    if root.status(FOLDER) is not None:
        with opened_in(root) as state:
            for shelf in {ORIGINALS, COPIES, PREVIOUS, EDITED} & set(state.names()):
                with state.below(shelf) as folder:
                    taken.update(folder.names())
    return next(number for number in count(1) if str(number) not in taken)


def replace_all(site: Site, hold: Hold) -> None:
    """Keep what a run replaces, swap it, read back what is there then, and write the manifest.

    Raises:
        ModifiedFileError: A file was changed by someone else meanwhile.
        VerificationError: A file does not hold what it should.
        OSError: Something cannot be written.
    """
    for file in site.journal.files:
        keep(site, file)
    for file in site.journal.files:
        hold.confirm()
        swap(site, file)
    for file in site.journal.files:
        remove_bytecode(site.root, file.path)
    for file in site.journal.files:
        if current_digest(site.root, file.path) != file.after:
            raise VerificationError(
                f"{file.path} does not hold what was written; everything was rolled back",
                "look into the system's log, and for other programs that change this file",
            )
    settle(site, site.journal.after)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError):
        return refused(error).message
    return str(error) or type(error).__name__
