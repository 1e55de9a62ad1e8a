"""Revert: put every original file back, byte for byte."""

from __future__ import annotations

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
from vllm_eagle3_patch.commands.notes import forcing, kept_copies, restart_notes, would_keep
from vllm_eagle3_patch.commands.report import Report
from vllm_eagle3_patch.commands.where import Where, about, recovered
from vllm_eagle3_patch.ground.errors import BrokenVllmError, UnsupportedError, VllmRemovedError
from vllm_eagle3_patch.installation.find import Installation
from vllm_eagle3_patch.transaction.recovery import recover_in
from vllm_eagle3_patch.transaction.revert import RevertResult
from vllm_eagle3_patch.transaction.state.presence import has_traces

if TYPE_CHECKING:
    from vllm_eagle3_patch.transaction.state.lock import Hold


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
            if dry_run or not has_traces(installation.root):
                return _revert(installation, notes, force=force, dry_run=dry_run)
            from vllm_eagle3_patch.transaction.state.lock import exclusive

            # What a look without the lock shows may be half of another run.
            with exclusive(installation.root) as hold:
                recover_in(hold.root)
                return _revert(installation, notes, force=force, hold=hold)
    except BrokenVllmError as broken:
        if not has_traces(broken.root):
            raise
        return _revert_broken(broken, force=force, dry_run=dry_run)


def _revert_broken(broken: BrokenVllmError, *, force: bool, dry_run: bool) -> Report:
    """Revert by our state alone, where vLLM was removed or cannot be judged.

    Of one that was removed nothing is put back that is not there any more.
    """
    from vllm_eagle3_patch.transaction.revert import revert as put_back
    from vllm_eagle3_patch.transaction.state.manifest import read_manifest

    notes = recovered(broken.root, dry_run=dry_run)
    manifest = read_manifest(broken.root)
    paths = tuple(manifest.files) if manifest else ()
    removed = isinstance(broken, VllmRemovedError)
    what = "no vLLM is there any more" if removed else f"vLLM is broken: {broken.message}"
    result = put_back(
        broken.root,
        force=force,
        dry_run=dry_run,
        known_originals=pinned_originals(paths),
        not_shipped=paths if removed else (),
        ours=made_of_originals(manifest.files) if manifest else {},
        all_or_none=True,
    )
    return Report(
        "revert",
        1 if dry_run and result.reverted else 0,
        changed=result.reverted,
        notes=(what, *notes, *_reverted(result, dry_run=dry_run)),
        dry_run=dry_run,
    )


def _reverted(result: RevertResult, *, dry_run: bool) -> tuple[str, ...]:
    """What a user should know of a revert besides the files that were put back."""
    if dry_run:
        kept_aside = would_keep(
            (kept.path for kept in result.kept_aside if kept.edited),
            (kept.path for kept in result.kept_aside if not kept.edited),
        )
    else:
        kept_aside = kept_copies(result.kept_aside)
    return (
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


def _revert(
    installation: Installation,
    notes: tuple[str, ...],
    *,
    force: bool,
    dry_run: bool = False,
    hold: Hold | None = None,
) -> Report:
    from vllm_eagle3_patch.transaction.revert import revert as put_back

    if has_traces(installation.root):
        from vllm_eagle3_patch.transaction.state.manifest import read_manifest

        read_manifest(installation.root)  # raises what keeps it from being read
    assessment = classify(installation)
    if assessment.manifest is None and any(s.state == "patched" for s in assessment.files):
        raise UnsupportedError(
            "patched, but no originals are kept here",
            "reinstall vLLM to get the original files back",
            code="no-original",
        )
    result = put_back(
        installation.root,
        force=force,
        dry_run=dry_run,
        known_originals=known_originals(assessment),
        not_shipped=assessment.not_shipped,
        ours=made_of_originals(assessment.manifest.files) if assessment.manifest else {},
        all_or_none=True,
        hold=hold,
    )
    notes += _reverted(result, dry_run=dry_run)
    if result.reverted and not dry_run:
        notes += restart_notes(installation.root)
    after = forcing(assessment, force=force) if dry_run else classify(installation)
    return Report(
        "revert",
        1 if dry_run and result.reverted else 0,
        plan(after, Options(), contents=False).state,
        installation,
        after,
        _as_before(assessment, after, dry_run=dry_run),
        changed=result.reverted,
        notes=notes,
        dry_run=dry_run,
    )


def _as_before(assessment: Assessment, after: Assessment, *, dry_run: bool) -> tuple[Problem, ...]:
    """What is wrong after a revert, but for edits that were there before apply: those came back."""
    entries = assessment.manifest.files if assessment.manifest and not dry_run else {}
    digest = after.sources.digest
    put_back = {modified(path) for path, e in entries.items() if digest(path) == e.original}
    return tuple(problem for problem in after.problems if problem not in put_back)
