"""Apply: make EAGLE-3 work; plan, commit all files or none, and check the result from disk."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from vllm_eagle3_patch import __version__
from vllm_eagle3_patch.assess.assessment import Assessment
from vllm_eagle3_patch.assess.classify import (
    OUTDATED_BYTECODE,
    classify,
    known_originals,
    stale_paths,
)
from vllm_eagle3_patch.assess.decision import Options, Plan
from vllm_eagle3_patch.assess.plan import plan, unified_diff, wanted
from vllm_eagle3_patch.commands.notes import kept_copies, to_restart, with_force_given, would_keep
from vllm_eagle3_patch.commands.other_runs import recovered
from vllm_eagle3_patch.commands.report import Report, about
from vllm_eagle3_patch.commands.verify import (
    Verifying,
    needs_interpreter,
    recorded,
    results_of,
    verified,
)
from vllm_eagle3_patch.ground.errors import (
    BlockedError,
    NotReadableError,
    NotWritableError,
    PatchError,
    VerificationError,
)
from vllm_eagle3_patch.installation.find import Installation, Where
from vllm_eagle3_patch.transaction.recovery import recover_in
from vllm_eagle3_patch.verify.results import Verification

if TYPE_CHECKING:
    from vllm_eagle3_patch.transaction.state.lock import Hold
    from vllm_eagle3_patch.transaction.state.verified import Verified


def apply(
    where: Where,
    options: Options,
    *,
    dry_run: bool = False,
    show_diff: bool = False,
    verifying: Verifying | None = None,
) -> Report:
    """Make EAGLE-3 work: plan, commit all files or none, check the result from disk.

    Args:
        where: Which vLLM.
        options: What is selected.
        dry_run: Plan only.
        show_diff: Plan only, and put the unified diff into the report.
        verifying: Also run the result, and put every file back if that fails.
    """
    if verifying is not None:
        needs_interpreter(where)
    installation = where.find(writing=True)
    with about(installation):
        notes = recovered(installation.root, dry_run=dry_run or show_diff)
        if dry_run or show_diff:
            if verifying is not None:
                notes += ("not verified, as nothing was written",)
            assessment = classify(installation)
            decided = plan(assessment, options)
            diff = _plan_diff(decided) if show_diff else None
            return _report(assessment, decided, options)._replace(
                notes=notes + _overwrites(assessment, decided),
                changed=_paths(decided),
                diff=diff,
                dry_run=True,
            )
        return _apply(installation, options, notes, verifying)


def _apply(
    installation: Installation,
    options: Options,
    notes: tuple[str, ...],
    verifying: Verifying | None,
) -> Report:
    """Look, lock, look again, commit: what a look without the lock shows may be half of a run."""
    seen, refusal = None, None
    try:
        seen = _look(installation, options, contents=False)
    except BlockedError:
        raise
    except PatchError as error:
        refusal = error
    if seen is not None and seen.decided.exit_code == 0:
        return _nothing_to_do(seen, options, notes, verifying)
    from vllm_eagle3_patch.transaction.state.lock import exclusive

    with ExitStack() as stack:
        try:
            hold = stack.enter_context(exclusive(installation.root))
        except (NotReadableError, NotWritableError):
            # Where nothing would be written, the right to write is not missed.
            if refusal is not None:
                raise refusal from None
            if seen is None or seen.decided.exit_code == 1:
                raise
            return _report(*seen, options)._replace(notes=notes)
        recover_in(hold.root)
        seen = _look(installation, options)
        if seen.decided.changes:
            return _commit(hold, seen, options, notes, verifying)
    if seen.decided.exit_code == 0:
        return _nothing_to_do(seen, options, notes, verifying)
    return _report(*seen, options)._replace(notes=notes)


class _Look(NamedTuple):
    """What an installation is, and what is to be done."""

    assessment: Assessment
    decided: Plan


def _look(installation: Installation, options: Options, *, contents: bool = True) -> _Look:
    assessment = classify(installation)
    return _Look(assessment, plan(assessment, options, contents=contents))


def _report(assessment: Assessment, decided: Plan, options: Options) -> Report:
    if options.force:
        assessment = with_force_given(assessment)
    return Report.of("apply", assessment, decided)


def _nothing_to_do(
    seen: _Look, options: Options, notes: tuple[str, ...], verifying: Verifying | None
) -> Report:
    assessment, decided = seen
    installation = assessment.installation
    if any(problem.code == OUTDATED_BYTECODE for problem in assessment.problems):
        from vllm_eagle3_patch.transaction.commit import drop_bytecode

        drop_bytecode(installation.root, assessment.patched)
        notes += ("removed compiled files that Python would have used, not the patched ones",)
        assessment = classify(installation)
    verification = None
    if verifying is not None:
        verification = verified(installation, assessment, verifying, "nothing was changed")
        assessment, more = recorded(assessment, results_of(verification, assessment))
        notes += more
        decided = plan(assessment, options, contents=False)
    report = _report(assessment, decided, options)
    return report._replace(notes=notes, verification=verification)


def _commit(
    hold: Hold,
    seen: _Look,
    options: Options,
    notes: tuple[str, ...],
    verifying: Verifying | None,
) -> Report:
    from vllm_eagle3_patch.transaction.commit import commit

    assessment, decided = seen
    installation = assessment.installation
    verification: Verification | None = None
    results: tuple[Verified, ...] = ()

    def check() -> None:
        nonlocal verification, results
        written = _check_from_disk(installation, options)
        if verifying is not None:
            verification = verified(installation, written, verifying, "every file was put back")
            results = results_of(verification, written)

    release = assessment.release
    kept_aside = commit(
        hold,
        decided.changes,
        tool_version=__version__,
        vllm_version=installation.version or "",
        release=release.name if release else None,
        check=check,
        stale=stale_paths(assessment),
        published=known_originals(assessment),
    )
    after, more = recorded(classify(installation), results, hold=hold)
    notes += more
    notes += _patched_as_edited(assessment, decided, "was patched as it is; revert brings it back")
    notes += kept_copies(kept_aside) + to_restart(installation.root)
    report = Report.of("apply", after, plan(after, options, contents=False))
    return report._replace(notes=notes, changed=_paths(decided), verification=verification)


def _check_from_disk(installation: Installation, options: Options) -> Assessment:
    """What was planned now holds, as read back from disk.

    Raises:
        VerificationError: It does not.
    """
    after = classify(installation)
    decided = plan(after, options, contents=False)
    if decided.exit_code != 0:
        lacking = sorted({n for f in after.facts for n in wanted(f, options) if f.reason is None})
        raise VerificationError(
            f"after writing, still missing: {', '.join(lacking) or decided.state}",
            "every file was put back; please report this with the vLLM version",
        )
    return after


def _overwrites(assessment: Assessment, decided: Plan) -> tuple[str, ...]:
    """What ``--force`` would overwrite or build upon, before it is done."""
    as_edited = "would be patched as it is; revert would bring it back"
    entries = assessment.manifest.files if assessment.manifest else {}
    published, digest = known_originals(assessment), assessment.sources.digest
    return _patched_as_edited(assessment, decided, as_edited) + would_keep(
        (change.path for change in decided.changes if change.keep_aside),
        (
            path
            for path in stale_paths(assessment)
            if entries[path].original not in {*published, digest(path)}
        ),
    )


def _patched_as_edited(assessment: Assessment, decided: Plan, what: str) -> tuple[str, ...]:
    states = {status.path: status.state for status in assessment.files}
    return tuple(
        f"{change.path}, which someone else changed, {what}"
        for change in decided.changes
        if states[change.path] == "modified" and not change.keep_aside
    )


def _paths(decided: Plan) -> tuple[str, ...]:
    return tuple(change.path for change in decided.changes)


def _plan_diff(decided: Plan) -> str:
    return "".join(
        unified_diff(change.path, decided.before[change.path], change.after)
        for change in decided.changes
    )
