"""The commands, each a function that returns a report; nothing here prints or exits."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from vllm_eagle3_patch import __version__
from vllm_eagle3_patch.assess.classify import (
    OUTDATED_BYTECODE,
    Assessment,
    Problem,
    classify,
    known_originals,
    made_of_originals,
    modified,
    pinned_originals,
    stale_paths,
)
from vllm_eagle3_patch.assess.plan import (
    MODIFIED,
    Options,
    Plan,
    plan,
    unified_diff,
    untrusted,
    wanted,
)
from vllm_eagle3_patch.commands.report import Report
from vllm_eagle3_patch.ground.errors import (
    BrokenVllmError,
    InterruptedRunError,
    NotWritableError,
    PatchError,
    UnsupportedError,
    VerificationError,
    VllmNotFoundError,
    VllmRemovedError,
)
from vllm_eagle3_patch.ground.family import select_models
from vllm_eagle3_patch.installation.find import Installation, find
from vllm_eagle3_patch.transaction.state.presence import has_traces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from vllm_eagle3_patch.transaction.commit import KeptAside, RevertResult
    from vllm_eagle3_patch.verify.verification import CheckResult, ModelResult, Verification


_LOOKS = 5


class Where(NamedTuple):
    """Which vLLM, as the user named it."""

    site_packages: Path | None = None
    python: Path | None = None

    def find(self, *, writing: bool = False) -> Installation:
        """Find it (see :func:`vllm_eagle3_patch.installation.find.find`)."""
        return find(site_packages=self.site_packages, python=self.python, writing=writing)


class Verifying(NamedTuple):
    """How an installation's code is run to verify it.

    Attributes:
        timeout: Seconds to wait for its interpreter.
        progress: Told what is going on, a line each time.
    """

    timeout: float
    progress: Callable[[str], None] | None = None

    def run(
        self, installation: Installation, assessment: Assessment, models: Sequence[str] | None
    ) -> Verification:
        """Run it (see :func:`vllm_eagle3_patch.verify.verification.verify`)."""
        from vllm_eagle3_patch.verify.verification import verify

        return verify(
            installation, assessment, models=models, timeout=self.timeout, progress=self.progress
        )


def check(where: Where, options: Options) -> Report:
    """Say whether EAGLE-3 works for each model, and if not, what is missing. Never writes."""
    return check_installation(where.find(), options)


def check_installation(installation: Installation, options: Options) -> Report:
    """The same for an installation that was found already."""
    with _about(installation):
        try:
            in_the_way: PatchError | None = _in_the_way(installation.root)
        except PatchError as error:
            in_the_way = error  # Our state is broken: say what the files are all the same.
        assessment = classify(installation)
        if in_the_way is None:
            decided = plan(assessment, options, contents=False)
            return _report("check", assessment, decided, notes=_not_hardened(assessment))
        problems = (Problem.of(in_the_way), *assessment.problems)
        code = in_the_way.exit_code
        state = plan(assessment, options, contents=False).state
        if isinstance(in_the_way, (InterruptedRunError, NotWritableError)):
            state = "interrupted"
        return Report("check", code, state, installation, assessment, problems)


def verify(where: Where, options: Options, verifying: Verifying) -> Report:
    """Run the installation's own code and say for which models it does what it should.

    Args:
        where: Which vLLM.
        options: As for ``check``, which decides the exit code unless a check fails that should
            not: one of a model that is ready, or one that no missing patch explains.
        verifying: How it is run.

    Raises:
        WrongUsageError: The user named a folder and no interpreter.
        VllmNotFoundError: The interpreter cannot import vLLM, or takes too long.
    """
    _needs_interpreter(where)
    installation = where.find()
    with _about(installation):
        in_the_way = _in_the_way(installation.root)
        if in_the_way is not None:
            raise in_the_way
        assessment = classify(installation)
        decided = plan(assessment, options, contents=False)
        named = [model.architecture for model in select_models(options.models)]
        verification = verifying.run(installation, assessment, named)
        from vllm_eagle3_patch.verify.verification import unexpected

        failures = unexpected(verification, assessment)
        if failures:
            hint = "please report this with the vLLM version; revert takes out what apply put in"
            problem = Problem(VerificationError.default_code, _named(failures), hint)
            code = VerificationError.exit_code
            decided = decided._replace(exit_code=code, problems=(problem, *decided.problems))
        elif decided.exit_code == 0 and not any(model.ok for model in verification.models):
            problem = Problem("nothing-proven", _unproven(verification.models), _WHERE_TO_VERIFY)
            code = VllmNotFoundError.exit_code
            decided = decided._replace(exit_code=code, problems=(problem, *decided.problems))
        return _report("verify", assessment, decided, verification=verification)


_WHERE_TO_VERIFY = "install in that environment what it lacks, or verify where the server runs"


def _unproven(models: Sequence[ModelResult]) -> str:
    """Why no model could be run, by the first one's first check that could not."""
    reasons = (check.detail for model in models for check in model.checks if check.ok is None)
    return f"nothing is proven, as no model could be run: {next(reasons, 'there is none')}"


def _needs_interpreter(where: Where) -> None:
    if where.site_packages is not None:
        from vllm_eagle3_patch.verify.verification import interpreter_of

        interpreter_of(None)


def _named(failures: Sequence[tuple[ModelResult, CheckResult]]) -> str:
    """The first failure, and how many there are."""
    model, check = failures[0]
    more = f" (the first of {len(failures)} failures)" if len(failures) > 1 else ""
    return f"{model.architecture} fails {check.name}: {check.detail}{more}"


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
        show_diff: Plan only, and show the unified diff.
        verifying: Also run the result, and put every file back if that fails.
    """
    if verifying is not None:
        _needs_interpreter(where)
    installation = where.find(writing=True)
    with _about(installation):
        notes = _recover(installation.root, dry_run=dry_run or show_diff)
        if dry_run or show_diff:
            if verifying is not None:
                notes += ("not verified, as nothing was written",)
            assessment = classify(installation)
            decided = plan(assessment, options)
            diff = _plan_diff(decided) if show_diff else None
            return _report(
                "apply",
                _forcing(assessment, force=options.force),
                decided,
                notes=notes + _overwrites(assessment, decided),
                changed=_paths(decided),
                diff=diff,
                dry_run=True,
            )
        return _undisturbed(
            installation.root, lambda: _apply(installation, options, notes, verifying)
        )


def _apply(
    installation: Installation,
    options: Options,
    notes: tuple[str, ...],
    verifying: Verifying | None,
) -> Report:
    assessment = classify(installation)
    decided = plan(assessment, options)
    verification: Verification | None = None
    if not decided.changes:
        if any(problem.code == OUTDATED_BYTECODE for problem in assessment.problems):
            from vllm_eagle3_patch.transaction import commit

            patched = [status.path for status in assessment.files if status.state == "patched"]
            commit.drop_bytecode(installation.root, patched)
            notes += ("removed compiled files that Python would have used, not the patched ones",)
            assessment = classify(installation)
        if verifying is not None and decided.exit_code == 0:
            verification = _verified(installation, assessment, verifying, "nothing was changed")
        return _report(
            "apply",
            _forcing(assessment, force=options.force),
            decided,
            notes=notes,
            changed=(),
            verification=verification,
        )
    from vllm_eagle3_patch.transaction import commit

    def look_again() -> None:
        nonlocal verification
        written = _check_from_disk(installation, options)
        if verifying is not None:
            verification = _verified(installation, written, verifying, "every file was put back")

    release = assessment.release
    result = commit.commit(
        installation.root,
        decided.changes,
        tool_version=__version__,
        vllm_version=installation.version or "",
        release=release.name if release else None,
        check=look_again,
        stale=stale_paths(assessment),
    )
    after = classify(installation)
    notes += _patched_as_edited(assessment, decided, "was patched as it is; revert brings it back")
    notes += _kept(result.kept_aside) + _restart(installation.root)
    return _report(
        "apply",
        after,
        plan(after, options, contents=False),
        notes=notes,
        changed=_paths(decided),
        verification=verification,
    )


def _verified(
    installation: Installation, assessment: Assessment, verifying: Verifying, undone: str
) -> Verification:
    """What running it shows, if every model that lacks nothing passes.

    Raises:
        VerificationError: One fails, or vLLM could not be run.
    """
    from vllm_eagle3_patch.verify.verification import unexpected

    try:
        verification = verifying.run(installation, assessment, None)
    except VllmNotFoundError as error:
        raise VerificationError(
            f"could not be verified: {error.message}", f"{undone}; {error.hint}"
        ) from error
    complete = {facts.architecture for facts in assessment.facts if facts.interface}
    failures = [
        (model, check)
        for model, check in unexpected(verification, assessment)
        if model.architecture in complete
    ]
    tried = [model for model in verification.models if model.architecture in complete]
    if failures:
        message, advice = _named(failures), "please report this with the vLLM version"
    elif tried and not any(model.ok for model in tried):
        message, advice = _unproven(tried), _WHERE_TO_VERIFY
    else:
        return verification
    failed = VerificationError(message, f"{undone}; {advice}")
    failed.verification = verification
    raise failed


def revert(where: Where, *, force: bool = False, dry_run: bool = False) -> Report:
    """Put every original file back, byte for byte.

    Args:
        where: Which vLLM.
        force: Also put back a file of ours that was edited since; the edit is kept aside.
        dry_run: Only say what would be put back.
    """
    try:
        installation = where.find(writing=True)
        with _about(installation):
            notes = _recover(installation.root, dry_run=dry_run)
            return _undisturbed(
                installation.root,
                lambda: _revert(installation, notes, force=force, dry_run=dry_run),
            )
    except BrokenVllmError as broken:
        if not has_traces(broken.root):
            raise
        return _revert_broken(broken, force=force, dry_run=dry_run)


def _revert_broken(broken: BrokenVllmError, *, force: bool, dry_run: bool) -> Report:
    """Revert by our state alone, where vLLM was removed or cannot be judged.

    Of one that was removed nothing is put back that is not there any more.
    """
    from vllm_eagle3_patch.transaction import commit
    from vllm_eagle3_patch.transaction.state.manifest import read_manifest

    notes = _recover(broken.root, dry_run=dry_run)
    manifest = read_manifest(broken.root)
    paths = tuple(manifest.files) if manifest else ()
    removed = isinstance(broken, VllmRemovedError)
    what = "no vLLM is there any more" if removed else f"vLLM is broken: {broken.message}"
    result = commit.revert(
        broken.root,
        force=force,
        dry_run=dry_run,
        known_originals=() if removed else pinned_originals(paths),
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
        kept_aside = _would_keep(kept.path for kept in result.kept_aside)
    else:
        kept_aside = _kept(result.kept_aside)
    return (
        *(f"not as we left it, left alone: {path}" for path in result.left_alone),
        *(f"dropped what was kept of a file that is not ours: {path}" for path in result.stale),
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
    installation: Installation, notes: tuple[str, ...], *, force: bool, dry_run: bool
) -> Report:
    from vllm_eagle3_patch.transaction import commit

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
    result = commit.revert(
        installation.root,
        force=force,
        dry_run=dry_run,
        known_originals=known_originals(assessment),
        not_shipped=assessment.not_shipped,
        ours=made_of_originals(assessment.manifest.files) if assessment.manifest else {},
        all_or_none=True,
    )
    notes += _reverted(result, dry_run=dry_run)
    if result.reverted and not dry_run:
        notes += _restart(installation.root)
    after = _forcing(assessment, force=force) if dry_run else classify(installation)
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


def diff(where: Where, options: Options) -> Report:
    """The unified diff that apply would make, or has made. Never writes."""
    installation = where.find()
    with _about(installation):
        in_the_way = _in_the_way(installation.root)
        if in_the_way is not None:
            raise in_the_way
        assessment = classify(installation)
        decided = plan(assessment, options)
        if untrusted(assessment):  # What was made cannot be told from what was there.
            decided = decided._replace(exit_code=MODIFIED)
        if decided.exit_code > 1:
            return _report("diff", assessment, decided)
        after = {change.path: change.after for change in decided.changes}
        originals = assessment.originals
        text = "".join(
            unified_diff(
                status.path,
                originals.read(status.path) or b"",
                after.get(status.path) or assessment.sources.read(status.path) or b"",
            )
            for status in assessment.files
        )
        code = 1 if text else 0
        return Report(
            "diff", code, decided.state, installation, assessment, assessment.problems, diff=text
        )


@contextmanager
def _about(installation: Installation) -> Iterator[None]:
    """Let an error say which vLLM it is about."""
    try:
        yield
    except PatchError as error:
        error.installation = installation
        raise


def _paths(decided: Plan) -> tuple[str, ...]:
    return tuple(change.path for change in decided.changes)


def _in_the_way(root: Path) -> InterruptedRunError | NotWritableError | None:
    """A run in progress, or what an interrupted one left."""
    if not has_traces(root):
        return None
    from vllm_eagle3_patch.transaction.state.journal import unfinished
    from vllm_eagle3_patch.transaction.state.lock import held_by

    holder = held_by(root)
    if holder is not None:
        return NotWritableError(
            f"another run is changing this installation: {holder}",
            "wait for it to end and try again",
            code="busy",
        )
    if unfinished(root) is not None:
        return InterruptedRunError(
            "an earlier run was interrupted before it was done",
            "run apply or revert: each first brings every file back to a known content",
        )
    return None


def _recover(root: Path, *, dry_run: bool) -> tuple[str, ...]:
    in_the_way = _in_the_way(root)
    if in_the_way is None:
        return ()
    if dry_run or isinstance(in_the_way, NotWritableError):
        raise in_the_way
    from vllm_eagle3_patch.transaction import commit

    result = commit.recover(root)
    if result is None:
        return ()
    if result.outcome == "completed":
        done = f"an interrupted {result.operation} was found: it was done but for tidying up"
    else:
        done = f"an interrupted {result.operation} was found and undone first"
    return (
        done,
        *(f"changed by someone else meanwhile, left alone: {path}" for path in result.left_alone),
    )


def _undisturbed(root: Path, act: Callable[[], Report]) -> Report:
    """Look and act, and do both again where it failed while other runs changed what was seen.

    A run looks before it takes the lock, so that it may see half of what another one does.
    """
    for left in reversed(range(_LOOKS)):
        # Whoever takes or returns the lock changes names in this folder; so does ``act`` itself.
        before = root.stat().st_mtime_ns
        try:
            report = act()
        except (NotWritableError, VerificationError):
            raise
        except PatchError:
            if left == 0 or not _was_disturbed(root, before):
                raise
        else:
            if report.exit_code == 0 or left == 0 or not _was_disturbed(root, before):
                return report
    raise AssertionError("the last look counts")


def _was_disturbed(root: Path, before: int) -> bool:
    in_the_way = _in_the_way(root)
    if isinstance(in_the_way, NotWritableError):
        raise in_the_way
    return root.stat().st_mtime_ns != before


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


def _kept(kept_aside: Sequence[KeptAside]) -> tuple[str, ...]:
    return tuple(
        f"a copy of the edited {kept.path} is in {kept.copy}; delete it when you do not need it"
        for kept in kept_aside
    )


def _overwrites(assessment: Assessment, decided: Plan) -> tuple[str, ...]:
    """What ``--force`` would overwrite or build upon, before it is done."""
    as_edited = "would be patched as it is; revert would bring it back"
    return _patched_as_edited(assessment, decided, as_edited) + _would_keep(
        change.path for change in decided.changes if change.keep_aside
    )


def _patched_as_edited(assessment: Assessment, decided: Plan, what: str) -> tuple[str, ...]:
    states = {status.path: status.state for status in assessment.files}
    return tuple(
        f"{change.path}, which someone else changed, {what}"
        for change in decided.changes
        if states[change.path] == "modified" and not change.keep_aside
    )


def _would_keep(paths: Iterable[str]) -> tuple[str, ...]:
    from vllm_eagle3_patch.transaction.state.layout import FOLDER

    return tuple(
        f"the edited {path} would be replaced, and a copy of it kept in {FOLDER}" for path in paths
    )


def _forcing(assessment: Assessment, *, force: bool) -> Assessment:
    """Where ``--force`` was given, nobody is told to give it."""
    if not force:
        return assessment
    given = "--force was given: what becomes of it is said in a note, or it stays as it is"
    return assessment._replace(
        problems=tuple(
            problem._replace(hint=given) if problem.code == "modified" else problem
            for problem in assessment.problems
        ),
    )


def _not_hardened(assessment: Assessment) -> tuple[str, ...]:
    """That a native release works but is not right at the edges, as long as that is so."""
    release = assessment.release
    if release is None or release.support != "native":
        return ()
    digest = assessment.sources.digest
    if all(pin.hardened in (pin.patched, digest(path)) for path, pin in release.files.items()):
        return ()
    return (
        "vLLM's own EAGLE-3 starts here, but layer id 0 fails, bad ids are accepted, and more "
        "(see the README): apply --harden mends that",
    )


def _restart(root: Path) -> tuple[str, ...]:
    from vllm_eagle3_patch.ground.processes import running_with

    pids = running_with(root)
    if not pids:
        return ()
    listed = ", ".join(str(pid) for pid in pids)
    return (f"vLLM is running from this installation (pid {listed}): restart it to pick this up",)


def _plan_diff(decided: Plan) -> str:
    return "".join(
        unified_diff(change.path, decided.before[change.path], change.after)
        for change in decided.changes
    )


def _report(command: str, assessment: Assessment, decided: Plan, **more: object) -> Report:
    problems = (*decided.problems, *assessment.problems)
    return Report(
        command,
        decided.exit_code,
        decided.state,
        assessment.installation,
        assessment,
        problems,
        candidates=decided.candidates,
        **more,  # type: ignore[arg-type]
    )
