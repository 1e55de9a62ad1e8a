"""Revert: put every original file back, byte for byte."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_eagle3_patch.assess.assessment import Assessment, Problem
from vllm_eagle3_patch.assess.classify import (
    classify,
    known_originals,
    made_of_originals,
    modified,
    pinned_originals,
)
from vllm_eagle3_patch.assess.decision import Options
from vllm_eagle3_patch.assess.plan import plan
from vllm_eagle3_patch.commands.notes import kept_copies, to_restart, with_force_given, would_keep
from vllm_eagle3_patch.commands.other_runs import recovered
from vllm_eagle3_patch.commands.report import Report, about
from vllm_eagle3_patch.ground.errors import BrokenVllmError, UnsupportedError, VllmRemovedError
from vllm_eagle3_patch.installation.find import Installation, Where
from vllm_eagle3_patch.transaction.recovery import recover_in
from vllm_eagle3_patch.transaction.revert import Origins, planned_revert
from vllm_eagle3_patch.transaction.revert import revert as put_back
from vllm_eagle3_patch.transaction.state.lock import exclusive
from vllm_eagle3_patch.transaction.state.manifest import read_manifest
from vllm_eagle3_patch.transaction.state.presence import has_traces

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from vllm_eagle3_patch.transaction.state.lock import Hold
    from vllm_eagle3_patch.transaction.state.manifest import Manifest


def revert(where: Where, *, force: bool = False, dry_run: bool = False) -> Report:
    """Put every original file back, byte for byte.

    Args:
        where: Which vLLM.
        force: Also put back a file of ours that was edited since; the edit is kept aside.
        dry_run: Only say what would be put back.
    """
    try:
        installation = where.find(writing=True)
        with about(installation):
            notes = recovered(installation.root, dry_run=dry_run)
            with _lock(installation.root, dry_run=dry_run) as hold:
                report = _revert(installation, hold, force=force, dry_run=dry_run)
    except BrokenVllmError as broken:
        if not has_traces(broken.root):
            raise
        notes = recovered(broken.root, dry_run=dry_run)
        with _lock(broken.root, dry_run=dry_run) as hold:
            report = _revert_broken(broken, hold, force=force, dry_run=dry_run)
        removed = isinstance(broken, VllmRemovedError)
        what = "no vLLM is there any more" if removed else f"vLLM is broken: {broken.message}"
        notes = (what, *notes)
    return report._replace(notes=(*notes, *report.notes))


@contextmanager
def _lock(root: Path, *, dry_run: bool) -> Iterator[Hold | None]:
    """The lock, with nothing of an interrupted run left; None where nothing is to be written."""
    if dry_run or not has_traces(root):
        yield None
        return
    with exclusive(root) as hold:
        recover_in(hold.root)  # What was seen without the lock may be half of another run.
        yield hold


def _revert(installation: Installation, hold: Hold | None, *, force: bool, dry_run: bool) -> Report:
    if has_traces(installation.root):
        read_manifest(installation.root)  # raises what keeps it from being read
    assessment = classify(installation)
    manifest = assessment.manifest
    if manifest is None and assessment.patched:
        raise UnsupportedError(
            "patched, but no originals are kept here",
            "reinstall vLLM to get the original files back",
            code="no-original",
        )
    origins = Origins(known_originals(assessment), assessment.not_shipped, _ours(manifest))
    report = _put_back(installation.root, hold, origins, force=force, dry_run=dry_run)
    notes = to_restart(installation.root) if report.changed and not dry_run else ()
    after = assessment if dry_run else classify(installation)
    if dry_run and force:
        after = with_force_given(assessment)
    return report._replace(
        state=plan(after, Options(), contents=False).state,
        installation=installation,
        assessment=after,
        problems=_as_before(assessment, after, dry_run=dry_run),
        notes=(*report.notes, *notes),
    )


def _revert_broken(
    broken: BrokenVllmError, hold: Hold | None, *, force: bool, dry_run: bool
) -> Report:
    """Revert by our state alone, where vLLM was removed or cannot be judged.

    Of one that was removed nothing is put back that is not there any more.
    """
    manifest = read_manifest(broken.root)
    paths = tuple(manifest.files) if manifest else ()
    gone = paths if isinstance(broken, VllmRemovedError) else ()
    origins = Origins(pinned_originals(paths), gone, _ours(manifest))
    return _put_back(broken.root, hold, origins, force=force, dry_run=dry_run)


def _ours(manifest: Manifest | None) -> dict[str, set[str]]:
    return made_of_originals(manifest.files) if manifest else {}


def _put_back(
    root: Path, hold: Hold | None, origins: Origins, *, force: bool, dry_run: bool
) -> Report:
    """Put the originals back, and say what a user should know besides the files that came back."""
    if hold is None:
        result = planned_revert(root, origins, force=force)
    else:
        result = put_back(hold, origins, force=force)
    if dry_run:
        kept_aside = would_keep(
            (kept.path for kept in result.kept_aside if kept.edited),
            (kept.path for kept in result.kept_aside if not kept.edited),
        )
    else:
        kept_aside = kept_copies(result.kept_aside)
    notes = (
        *(f"not as we left it, left alone: {path}" for path in result.left_alone),
        *(
            f"dropped what was kept of a file that is not ours: {path}"
            for path in result.stale
            if path not in {kept.path for kept in result.kept_aside}
        ),
        *(
            f"kept, but the manifest does not say of what: {path}; put it back by hand, or "
            "delete it"
            for path in result.unclaimed
        ),
        *(
            f"as it was but for its owner, whom only root could give it back to: {path}"
            for path in result.other_owner
        ),
        *kept_aside,
    )
    code = 1 if dry_run and result.reverted else 0
    return Report("revert", code, changed=result.reverted, notes=notes, dry_run=dry_run)


def _as_before(assessment: Assessment, after: Assessment, *, dry_run: bool) -> tuple[Problem, ...]:
    """What is wrong after a revert, but for edits that were there before apply: those came back."""
    entries = assessment.manifest.files if assessment.manifest and not dry_run else {}
    digest = after.sources.digest
    came_back = {modified(path) for path, e in entries.items() if digest(path) == e.original}
    return tuple(problem for problem in after.problems if problem not in came_back)
