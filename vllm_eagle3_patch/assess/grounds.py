"""On what ground a model is called ready.

``release``: all that this rests on is of one pinned release, as published or as patched by us.
``verified``: this very content was run by ``verify`` here, and it was right. ``unproven``: it looks
ready. What ``verify`` refuted is not ready, however it looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_eagle3_patch.assess.assessment import Assessment, Problem
from vllm_eagle3_patch.ground.family import FAMILY

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm_eagle3_patch.assess.model_facts import ModelFacts
    from vllm_eagle3_patch.transaction.state.verified import Verified

REFUTED = "refuted"
RELEASE, VERIFIED, UNPROVEN = "release", "verified", "unproven"


def unproven(models: Iterable[ModelFacts]) -> tuple[Problem, ...]:
    """That of these models some look ready, and nothing has run them."""
    names = [facts.architecture for facts in models if facts.ground == UNPROVEN]
    if not names:
        return ()
    message = f"looks ready, but not as a release has it, and was not run: {', '.join(names)}"
    return (Problem(UNPROVEN, message, "run verify with the interpreter that runs the server"),)


def rests_on(assessment: Assessment, architecture: str) -> dict[str, str]:
    """The sha256 of each file by which a model is judged: all but those of other wrappers."""
    owners = {model.architecture: model.wrapper.path for model in FAMILY if model.wrapper}
    others = {*owners.values()} - {owners.get(architecture)}
    paths = {*(status.path for status in assessment.files), *assessment.evidence} - others
    digests = {path: assessment.sources.digest(path) for path in sorted(paths)}
    return {path: digest for path, digest in digests.items() if digest is not None}


def grounded(assessment: Assessment, results: Sequence[Verified]) -> Assessment:
    """With the ground of each model that looks ready, and what was refuted as a problem.

    Args:
        assessment: The installation; what was known of a model's ground stays if no result is of
            its content.
        results: What ``verify`` showed.
    """
    facts = tuple(_with_ground(assessment, facts, results) for facts in assessment.facts)
    others = tuple(problem for problem in assessment.problems if problem.code != REFUTED)
    return assessment._replace(facts=facts, problems=(*others, *_refuted(facts)))


def _with_ground(
    assessment: Assessment, facts: ModelFacts, results: Sequence[Verified]
) -> ModelFacts:
    if not facts.looks_ready:
        return facts
    contents = rests_on(assessment, facts.architecture)
    verdict = None
    for result in results:
        of_this = result.architecture == facts.architecture and result.verdict != UNPROVEN
        if of_this and _is_of(assessment, contents, result):
            verdict, refuted = result.verdict, result.difference
    if verdict == REFUTED:
        return facts._replace(ground=None, refuted=refuted or "it failed")
    if verdict is None and (facts.ground or facts.refuted):
        return facts
    if _is_of_the_release(assessment, contents):
        return facts._replace(ground=RELEASE, refuted=None)
    return facts._replace(ground=VERIFIED if verdict == "proven" else UNPROVEN, refuted=None)


def _is_of(assessment: Assessment, contents: dict[str, str], result: Verified) -> bool:
    """Whether what was run is all that is there now."""
    digest = assessment.sources.digest
    return contents.items() <= result.files.items() and all(
        digest(path) == content for path, content in result.files.items()
    )


def _is_of_the_release(assessment: Assessment, contents: dict[str, str]) -> bool:
    if assessment.release is None:
        return False
    known = {status.path: status.known for status in assessment.files}
    evidence = assessment.release.evidence
    return all(
        known[path] if path in known else evidence[path] == digest
        for path, digest in contents.items()
    )


def _refuted(models: Iterable[ModelFacts]) -> tuple[Problem, ...]:
    wrong: dict[str, list[str]] = {}
    for facts in models:
        if facts.refuted is not None:
            wrong.setdefault(facts.refuted, []).append(facts.architecture)
    hint = "what was run is what is there: reinstall vLLM, or mend it and run verify again"
    return tuple(
        Problem(REFUTED, f"verify refuted {', '.join(names)}: {difference}", hint)
        for difference, names in wrong.items()
    )
