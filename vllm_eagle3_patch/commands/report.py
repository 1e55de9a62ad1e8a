"""How a command ended, as data; the JSON of the contract is made here."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_eagle3_patch import __version__
from vllm_eagle3_patch.assess.decision import Plan
from vllm_eagle3_patch.assess.limit_messages import message
from vllm_eagle3_patch.ground.errors import PatchError, VllmNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_eagle3_patch.assess.assessment import Assessment, Problem
    from vllm_eagle3_patch.assess.model_facts import ModelFacts
    from vllm_eagle3_patch.installation.find import Installation
    from vllm_eagle3_patch.verify.results import Verification

SCHEMA = 1

_WRITING = ("apply", "revert")


class Report(NamedTuple):
    """How a command ended.

    Attributes:
        state: The installation's state in one word, None if there is no installation.
        changed: The files written, or in a dry run those that would be.
        notes: What else happened, a line each.
        dry_run: Whether nothing was written because that was asked for.
        candidates: The architectures that decided the exit code.
        options: The options given to ``check`` that ``apply`` needs too, word by word.
        named: The architectures that the user named, of which alone a person is told; if none
            was, of all. The JSON has all.
    """

    command: str
    exit_code: int
    state: str | None = None
    installation: Installation | None = None
    assessment: Assessment | None = None
    problems: tuple[Problem, ...] = ()
    changed: tuple[str, ...] = ()
    diff: str | None = None
    notes: tuple[str, ...] = ()
    dry_run: bool = False
    candidates: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    verification: Verification | None = None
    named: tuple[str, ...] = ()

    @classmethod
    def of(cls, command: str, assessment: Assessment, decided: Plan) -> Report:
        """Of a command that ends as was decided."""
        return cls(
            command,
            decided.exit_code,
            decided.state,
            assessment.installation,
            assessment,
            (*decided.problems, *assessment.problems),
            candidates=decided.candidates,
        )

    def document(self) -> dict[str, Any]:
        """The JSON document of the contract."""
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "tool": __version__,
            "command": self.command,
            "exit_code": self.exit_code,
            "vllm": self.installation.document() if self.installation else None,
            "release": _release(self.assessment),
            "state": self.state,
            "models": _models(self.assessment),
            "files": _files(self.assessment),
            "problems": [
                {"code": p.code, "message": p.message, "hint": p.hint} for p in self.problems
            ],
            "notes": list(self.notes),
        }
        if self.command in _WRITING:
            document["changed"] = list(self.changed)
            document["dry_run"] = self.dry_run
        if self.diff is not None:
            document["diff"] = self.diff
        if self.verification is not None:
            document["verification"] = self.verification.document()
        return document


def _release(assessment: Assessment | None) -> dict[str, Any]:
    release = assessment.release if assessment else None
    return {
        "name": release.name if release else None,
        "pinned": assessment.pinned if assessment else False,
        "support": release.support if release else "unknown",
        "reason": release.reason if release else None,
    }


def _models(assessment: Assessment | None) -> list[dict[str, Any]]:
    if assessment is None:
        return []
    in_place = patches_in_place(assessment)
    return [
        {
            "architecture": facts.architecture,
            "model_types": list(facts.model_types),
            "ready": facts.ready,
            "ground": facts.ground,
            "missing": list(facts.missing),
            "patched_by": list(patched_by(assessment, facts)),
            "reason": facts.reason,
            "limits": [{"code": code, "message": message(code, in_place)} for code in facts.limits],
        }
        for facts in assessment.facts
    ]


def patches_in_place(assessment: Assessment) -> set[str]:
    """The patches of ours in the files as they are."""
    return {
        name for status in assessment.files if status.state == "patched" for name in status.patches
    }


def patched_by(assessment: Assessment, facts: ModelFacts) -> tuple[str, ...]:
    """The patches of ours that a model's interface rests on."""
    from vllm_eagle3_patch.ground.family import FAMILY

    in_place = patches_in_place(assessment)
    requires = next(m.requires for m in FAMILY if m.architecture == facts.architecture)
    return tuple(name for name in requires if name in in_place)


def _files(assessment: Assessment | None) -> list[dict[str, Any]]:
    if assessment is None:
        return []
    return [
        {
            "path": status.path,
            "state": status.state,
            "sha256": status.digest,
            "patches": list(status.patches),
        }
        for status in assessment.files
    ]


@contextmanager
def about(installation: Installation) -> Iterator[None]:
    """Let the JSON of an error say which vLLM it is about."""
    try:
        yield
    except PatchError as error:
        error.document["vllm"] = installation.document()
        raise


class Everywhere(NamedTuple):
    """What ``check --all`` found: a report an installation, or a place that cannot be read."""

    reports: tuple[Report, ...]

    @property
    def exit_code(self) -> int:
        """The highest of all, so that 0 means all ready and 1 that apply gets the others there."""
        return max(
            (report.exit_code for report in self.reports), default=VllmNotFoundError.exit_code
        )

    def document(self) -> dict[str, Any]:
        """The JSON document: those of ``check``, in a list."""
        return {
            "schema": SCHEMA,
            "tool": __version__,
            "command": "check",
            "all": True,
            "exit_code": self.exit_code,
            "installations": [report.document() for report in self.reports],
        }
