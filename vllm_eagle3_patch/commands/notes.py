"""What a command says besides: what it kept or would keep, and which servers run the old code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_eagle3_patch.transaction.state.layout import FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from vllm_eagle3_patch.assess.assessment import Assessment
    from vllm_eagle3_patch.transaction.state.journal import KeptAside


_EDITED, _LAST = "a copy of the edited", "what was kept of an earlier build, the last copy, of"


def kept_copies(kept_aside: Iterable[KeptAside]) -> tuple[str, ...]:
    return tuple(
        f"{_EDITED if kept.edited else _LAST} {kept.path} is in {kept.copy}; "
        "delete it when you do not need it"
        for kept in kept_aside
    )


def would_keep(edited: Iterable[str], last: Iterable[str]) -> tuple[str, ...]:
    """What ``kept_copies`` would say of a run that is not made."""
    return (
        *(
            f"the edited {path} would be replaced, and a copy of it kept in {FOLDER}"
            for path in edited
        ),
        *(f"{_LAST} {path} would be moved to {FOLDER}/edited" for path in last),
    )


def with_force_given(assessment: Assessment) -> Assessment:
    """The same, but nobody is told to give the ``--force`` that was given: a note says the rest."""
    given = "--force was given: what becomes of it is said in a note, or it stays as it is"
    return assessment._replace(
        problems=tuple(
            problem._replace(hint=given) if problem.code == "modified" else problem
            for problem in assessment.problems
        ),
    )


def to_restart(root: Path) -> tuple[str, ...]:
    from vllm_eagle3_patch.ground.processes import running_with

    pids = running_with(root)
    if not pids:
        return ()
    listed = ", ".join(str(pid) for pid in pids)
    return (f"vLLM is running from this installation (pid {listed}): restart it to pick this up",)
