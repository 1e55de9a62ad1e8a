"""Verify: run the installation's own code, for itself and after ``apply``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_eagle3_patch.assess.assessment import Assessment, Problem
from vllm_eagle3_patch.assess.classify import classify
from vllm_eagle3_patch.assess.decision import Options
from vllm_eagle3_patch.assess.grounds import REFUTED, RELEASE, grounded, rests_on
from vllm_eagle3_patch.assess.plan import plan
from vllm_eagle3_patch.commands.other_runs import in_the_way
from vllm_eagle3_patch.commands.report import Report, about
from vllm_eagle3_patch.ground.errors import PatchError, VerificationError, VllmNotFoundError
from vllm_eagle3_patch.ground.family import select_models
from vllm_eagle3_patch.installation.find import Installation, Where
from vllm_eagle3_patch.verify.results import CheckResult, ModelResult, Verification

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_eagle3_patch.transaction.state.lock import Hold
    from vllm_eagle3_patch.transaction.state.verified import Verified


class Verifying(NamedTuple):
    """How an installation's code is run to verify it: for how long at most, and who is told."""

    timeout: float
    progress: Callable[[str], None]

    def run(
        self, installation: Installation, assessment: Assessment, models: Sequence[str] | None
    ) -> Verification:
        """Run it (see ``verify/verification.py``)."""
        from vllm_eagle3_patch.verify.verification import verify

        return verify(
            installation, assessment, models=models, timeout=self.timeout, progress=self.progress
        )


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
    needs_interpreter(where)
    installation = where.find()
    with about(installation):
        blocked = in_the_way(installation.root)
        if blocked is not None:
            raise blocked
        assessment = classify(installation)
        named = [model.architecture for model in select_models(options.models)]
        verification = verifying.run(installation, assessment, named)
        assessment, notes = recorded(assessment, results_of(verification, assessment))
        decided = plan(assessment, options, contents=False)
        failures = verification.unexpected
        if failures:
            hint = "please report this with the vLLM version; revert takes out what apply put in"
            problem = Problem(VerificationError.default_code, first_failure(failures), hint)
            code = VerificationError.exit_code
            decided = decided._replace(exit_code=code, problems=(problem, *decided.problems))
        elif decided.exit_code == 0 and not any(model.ok for model in verification.models):
            problem = Problem(
                "nothing-proven", why_nothing_ran(verification.models), WHERE_TO_VERIFY
            )
            code = VllmNotFoundError.exit_code
            decided = decided._replace(exit_code=code, problems=(problem, *decided.problems))
        report = Report.of("verify", assessment, decided.proven_only())
        return report._replace(notes=notes, verification=verification)


def results_of(verification: Verification, assessment: Assessment) -> tuple[Verified, ...]:
    """What running the models showed, with the contents that it rests on."""
    from vllm_eagle3_patch.transaction.state.verified import Verified

    verdicts = {True: "proven", False: "refuted", None: "unproven"}
    return tuple(
        Verified(
            model.architecture,
            verdicts[model.ok],
            rests_on(assessment, model.architecture),
            f"{model.failed[0].name}: {model.failed[0].detail}" if model.failed else None,
        )
        for model in verification.models
    )


def recorded(
    assessment: Assessment, results: Sequence[Verified], *, hold: Hold | None = None
) -> tuple[Assessment, tuple[str, ...]]:
    """The assessment with what was shown, and a note where that could not be kept.

    Kept is what says more than that the contents are a release's.
    """
    from vllm_eagle3_patch.transaction.verdicts import record_verification

    grounds = {facts.architecture: facts.ground for facts in assessment.facts if facts.looks_ready}
    telling = tuple(
        result
        for result in results
        if grounds.get(result.architecture, RELEASE) != RELEASE
        or (result.verdict == REFUTED and result.architecture in grounds)
    )
    notes: tuple[str, ...] = ()
    try:
        record_verification(assessment.installation.root, telling, hold=hold)
    except PatchError as error:
        notes = (f"what verify showed is not kept, so check will not know it: {error.message}",)
    return grounded(assessment, results), notes


WHERE_TO_VERIFY = "install in that environment what it lacks, or verify where the server runs"


def why_nothing_ran(models: Sequence[ModelResult]) -> str:
    """Why no model could be run, by the first one's first check that could not."""
    reasons = (check.detail for model in models for check in model.checks if check.ok is None)
    return f"nothing is proven, as no model could be run: {next(reasons, 'there is none')}"


def needs_interpreter(where: Where) -> None:
    if where.site_packages is not None:
        from vllm_eagle3_patch.verify.verification import interpreter_of

        interpreter_of(None)


def first_failure(failures: Sequence[tuple[ModelResult, CheckResult]]) -> str:
    """The first failure, and how many there are."""
    model, check = failures[0]
    more = f" (the first of {len(failures)} failures)" if len(failures) > 1 else ""
    return f"{model.architecture} fails {check.name}: {check.detail}{more}"


def verified(
    installation: Installation, assessment: Assessment, verifying: Verifying, undone: str
) -> Verification:
    """What running it shows, if every model that lacks nothing passes.

    Raises:
        VerificationError: One fails, or vLLM could not be run.
    """
    try:
        verification = verifying.run(installation, assessment, None)
    except VllmNotFoundError as error:
        raise VerificationError(
            f"could not be verified: {error.message}", f"{undone}; {error.hint}"
        ) from error
    complete = {facts.architecture for facts in assessment.facts if facts.interface}
    failures = [
        (model, check) for model, check in verification.unexpected if model.architecture in complete
    ]
    tried = [model for model in verification.models if model.architecture in complete]
    if failures:
        message, advice = first_failure(failures), "please report this with the vLLM version"
    elif tried and not any(model.ok for model in tried):
        message, advice = why_nothing_ran(tried), WHERE_TO_VERIFY
    else:
        return verification
    failed = VerificationError(message, f"{undone}; {advice}")
    failed.document["verification"] = verification.document()
    raise failed
