"""Check: say whether EAGLE-3 works for each model, and if not, what is missing."""

from __future__ import annotations

from vllm_eagle3_patch.assess.assessment import Assessment, Problem
from vllm_eagle3_patch.assess.classify import classify
from vllm_eagle3_patch.assess.decision import Options
from vllm_eagle3_patch.assess.plan import plan
from vllm_eagle3_patch.commands.other_runs import in_the_way
from vllm_eagle3_patch.commands.report import Report, about
from vllm_eagle3_patch.ground.errors import BlockedError, InterruptedRunError, PatchError
from vllm_eagle3_patch.installation.find import Installation, Where


def check(where: Where, options: Options) -> Report:
    """Say whether EAGLE-3 works for each model, and if not, what is missing. Never writes."""
    return check_installation(where.find(), options)


def check_installation(installation: Installation, options: Options) -> Report:
    """The same for an installation that was found already."""
    with about(installation):
        try:
            blocked: PatchError | None = in_the_way(installation.root)
        except PatchError as error:
            blocked = error  # Our state is broken: say what the files are all the same.
        assessment = classify(installation)
        if blocked is None:
            decided = plan(assessment, options, contents=False).proven_only()
            report = Report.of("check", assessment, decided)
            return report._replace(notes=_not_hardened(assessment))
        problems = (Problem.of(blocked), *assessment.problems)
        code = blocked.exit_code
        state = plan(assessment, options, contents=False).state
        if isinstance(blocked, InterruptedRunError | BlockedError):
            state = "interrupted"
        return Report("check", code, state, installation, assessment, problems)


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
