"""Another run in the way of a command: one in progress, or what an interrupted one left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_eagle3_patch.ground.errors import BusyError, InterruptedRunError
from vllm_eagle3_patch.transaction.state.presence import has_traces

if TYPE_CHECKING:
    from pathlib import Path


def in_the_way(root: Path) -> InterruptedRunError | BusyError | None:
    """A run in progress, or what an interrupted one left."""
    if not has_traces(root):
        return None
    from vllm_eagle3_patch.transaction.state.journal import unfinished
    from vllm_eagle3_patch.transaction.state.lock import held_by

    holder = held_by(root)
    if holder is not None:
        return BusyError(
            f"another run is changing this installation: {holder}",
            "wait for it to end and try again",
        )
    if unfinished(root) is not None:
        return InterruptedRunError(
            "an earlier run was interrupted before it was done",
            "run apply or revert: each first brings every file back to a known content",
        )
    return None


def recovered(root: Path, *, dry_run: bool) -> tuple[str, ...]:
    """End an interrupted run, and say so.

    Raises:
        BusyError: Another run is at work.
        InterruptedRunError: In a dry run, which writes nothing.
    """
    found = in_the_way(root)
    if found is None:
        return ()
    if dry_run or isinstance(found, BusyError):
        raise found
    from vllm_eagle3_patch.transaction.recovery import recover

    result = recover(root)
    if result is None:
        return ()
    from vllm_eagle3_patch.commands.notes import kept_copies

    if result.outcome == "completed":
        done = f"an interrupted {result.operation} was found: it was done but for tidying up"
    else:
        done = f"an interrupted {result.operation} was found and undone first"
    return (
        done,
        *(f"changed by someone else meanwhile, left alone: {path}" for path in result.left_alone),
        *kept_copies(result.kept_aside),
    )
