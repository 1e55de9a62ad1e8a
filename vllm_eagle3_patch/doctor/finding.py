"""Findings, and the rules that make them.

A module in ``rules/`` defines functions marked with :func:`rule`; that registers them. A rule sees
the whole situation and knows no other rule.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vllm_eagle3_patch.doctor.situation import Situation

    Judge = Callable[[Situation], Iterable["Finding"]]

ERROR, WARNING, INFO = "error", "warning", "info"
SEVERITIES = (ERROR, WARNING, INFO)


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        severity: ``error`` (does not start, or speculates to no effect), ``warning`` (starts, may
            accept badly) or ``info``.
        message: The cause, one sentence or two.
        consequence: What it does to a server, with a figure where one was measured.
        fix: What to type, or to write into which file; empty if there is nothing to do.
        evidence: The key or the file that shows it.
        source: Where the rule comes from: a report's number and address, or vLLM's file.
    """

    code: str
    severity: str
    message: str
    consequence: str
    fix: str
    evidence: str
    source: str


@dataclass(frozen=True)
class Rule:
    """A rule: the codes of its findings, the reports that it covers, and the function."""

    codes: tuple[str, ...]
    reports: tuple[int, ...]
    judge: Judge

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (self.judge.__doc__ or "").strip().partition("\n")[0].rstrip(".")


_RULES: list[Rule] = []


def rule(*codes: str, reports: tuple[int, ...]) -> Callable[[Judge], Judge]:
    """Register a function that makes findings of some codes.

    Args:
        codes: The codes.
        reports: The numbers of the public reports that it covers (``docs/doctor.md``).
    """

    def register(judge: Judge) -> Judge:
        _RULES.append(Rule(codes, reports, judge))
        return judge

    return register


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule of ``rules/``, in the order of the modules' names."""
    from vllm_eagle3_patch.doctor import rules

    for module in sorted(pkgutil.iter_modules(rules.__path__), key=lambda found: found.name):
        importlib.import_module(f"{rules.__name__}.{module.name}")
    return tuple(_RULES)


def judged(situation: Situation) -> tuple[Finding, ...]:
    """The findings of every rule, the gravest first, in the order of the rules."""
    found = list(_found(situation))
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


def _found(situation: Situation) -> Iterator[Finding]:
    for one in all_rules():
        for finding in one.judge(situation):
            assert finding.code in one.codes, f"{finding.code} is not a code of its rule"
            yield finding


def report(number: int, *threads: str) -> str:
    """How a finding names the public report that it rests on."""
    said = f"report {number}"
    return f"{said} ({', '.join(threads)})" if threads else said
