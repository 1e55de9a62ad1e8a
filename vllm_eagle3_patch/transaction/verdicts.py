"""Keeping what ``verify`` showed."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from vllm_eagle3_patch import __version__
from vllm_eagle3_patch.ground.errors import StateCorruptError
from vllm_eagle3_patch.ground.folder import Folder
from vllm_eagle3_patch.transaction.conclusion import begun
from vllm_eagle3_patch.transaction.file_swap import changed_meanwhile, current_digest
from vllm_eagle3_patch.transaction.recovery import recover_in
from vllm_eagle3_patch.transaction.state.layout import FOLDER, VERIFIED, opened_in
from vllm_eagle3_patch.transaction.state.lock import Hold, exclusive
from vllm_eagle3_patch.transaction.state.verified import Verified, verified_bytes, verified_in


def record_verification(
    root: Path, results: Sequence[Verified], *, hold: Hold | None = None
) -> None:
    """Keep these results; of each model the last one that said something is kept.

    Args:
        root: The folder that holds the package folder ``vllm``.
        results: What was shown. One that is unproven says nothing of what was shown earlier.
        hold: The lock, if the caller holds it already.

    Raises:
        ModifiedFileError: A file is not the one that was run any more.
        BusyError: Another run is at work.
        NotWritableError: It cannot be written.
    """
    told = {result.architecture: result for result in results if result.verdict != "unproven"}
    if not told:
        return
    with exclusive(root) if hold is None else nullcontext(hold) as held:
        recover_in(held.root)
        files = {path: digest for result in told.values() for path, digest in result.files.items()}
        for path, digest in files.items():
            if current_digest(held.root, path) != digest:
                raise changed_meanwhile(path)
        known = {result.architecture: result for result in _earlier(held.root)}
        data = verified_bytes(__version__, {**known, **told}.values())
        try:
            begun(held.root, VERIFIED, data).close()
        except BaseException:
            with suppress(OSError):
                recover_in(held.root)
            raise


def _earlier(root: Folder) -> tuple[Verified, ...]:
    if root.status(FOLDER) is None:
        return ()
    with suppress(StateCorruptError), opened_in(root) as state:
        return verified_in(state, __version__)
    return ()
