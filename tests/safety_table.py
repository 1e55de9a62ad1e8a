"""The table of ``docs/safety.md``: what the tests tried, how, how often, and how it ended.

A test says with the fixture ``tried`` what it has seen come out well, after its assertions. What
tests that passed say becomes rows. ``make safety`` writes the file; every run of all tests compares
it, all but the counts, which depend on the file system.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

PATH = Path(__file__).parents[1] / "docs" / "safety.md"
PROPERTY = "tried"
GROUPS = (
    "Killed",
    "A change that fails",
    "Power loss",
    "Two at once",
    "Nothing bypasses the one module",
    "Installations as they are",
    "Hostile or bad input",
    "Fuzzing",
    "What users see",
)
INTRODUCTION = """\
# What was tried to make it lose a file

Written by `make safety` from the tests that passed; not by hand. Each row is what a test asserts;
`make test` runs them all and fails when a row here is not what they say (counts may differ between
file systems). The last column names the test. [SECURITY.md](../SECURITY.md) says what is promised.
"""


@dataclass(frozen=True)
class Row:
    """One fault or situation that was tried.

    Attributes:
        group: One of ``GROUPS``.
        situation: The fault or situation.
        how: How it was brought about.
        count: How many times, or at how many points.
        result: How it ended each time.
    """

    group: str
    situation: str
    how: str
    count: int
    result: str

    def __post_init__(self) -> None:
        assert self.group in GROUPS
        assert self.count > 0, f"nothing was tried: {self.situation}"


class Tried(Protocol):
    """Says that a situation was tried and ended as it should; called after the assertions."""

    def __call__(
        self, group: str, situation: str, *, how: str, result: str, count: int = 1
    ) -> None: ...


@pytest.fixture
def tried(record_property: pytest.FunctionRecordProperty) -> Tried:
    """Add a row to the table, if the test passes."""

    def add(group: str, situation: str, *, how: str, result: str, count: int = 1) -> None:
        row = Row(group, situation, how, count, result)
        record_property(PROPERTY, vars(row))

    return add


class SafetyTable:
    """Collects the rows of a run, in the process that sees every report."""

    def __init__(self, write: bool) -> None:
        self.write = write
        self.expected: set[str] = set()
        self.rows: dict[str, list[Row]] = {}
        self.not_tried: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        rows = [Row(**value) for name, value in report.user_properties if name == PROPERTY]
        if report.when == "call" and report.passed and rows:
            self.rows[report.nodeid] = rows
        if report.skipped and isinstance(report.longrepr, tuple):
            self.not_tried[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.write:
            if session.exitstatus == pytest.ExitCode.OK:
                PATH.write_text(document(self.rows, self.not_tried), "utf-8")
        elif self.is_outdated(session):
            print("\ndocs/safety.md is not what the tests say: run `make safety`")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def is_outdated(self, session: pytest.Session) -> bool:
        """Whether a whole run that passed says something else than the file does."""
        arguments = [Path(argument).resolve() for argument in session.config.args]
        option = session.config.option
        whole = arguments == [PATH.parents[1] / "tests"] and not option.keyword
        if not whole or session.exitstatus != pytest.ExitCode.OK or option.markexpr:
            return False
        said = PATH.read_text("utf-8") if PATH.exists() else ""
        # What could be tried where the file was written cannot be demanded everywhere.
        return not {_without_count(line) for line in table(self.rows)} <= {
            _without_count(line) for line in said.splitlines()
        }


def document(rows: dict[str, list[Row]], not_tried: dict[str, str]) -> str:
    """The text of ``docs/safety.md``."""
    lines = [INTRODUCTION]
    total = sum(row.count for found in rows.values() for row in found)
    lines.append(
        f"Last written on {platform.system()} with Python {platform.python_version()}: "
        f"{total} trials, none of which lost or mixed anything.\n"
    )
    lines += table(rows)
    if not_tried:
        lines += ["", "## Not tried there", ""]
        lines += [f"- `{_name(node)}`: {why}" for node, why in sorted(not_tried.items())]
    return "\n".join(lines) + "\n"


def table(rows: dict[str, list[Row]]) -> list[str]:
    """The lines of the tables, one table a group, equal rows of one test added up."""
    lines = []
    for group in GROUPS:
        found = list(
            _merged((node, row) for node in rows for row in rows[node] if row.group == group)
        )
        if found:
            lines += ["", f"## {group}", ""]
            lines += [
                "| fault or situation | how | count | result | test |",
                "|---|---|---|---|---|",
            ]
            lines += [
                f"| {row.situation} | {row.how} | {row.count} | {row.result} | `{name}` |"
                for name, row in found
            ]
    return lines


def _merged(found: Iterable[tuple[str, Row]]) -> Iterable[tuple[str, Row]]:
    counts: dict[tuple[str, str, str, str, str], int] = {}
    for node, row in found:
        key = (_name(node), row.group, row.situation, row.how, row.result)
        counts[key] = counts.get(key, 0) + row.count
    for (name, group, situation, how, result), count in sorted(counts.items()):
        yield name, Row(group, situation, how, count, result)


def _name(node: str) -> str:
    """A test's file and name, without what it was parametrized with."""
    return node.partition("[")[0].removeprefix("tests/")


def _without_count(line: str) -> Sequence[str]:
    cells = line.split(" | ")
    return tuple(cells[:2] + cells[3:])


def configure(config: pytest.Config) -> None:
    """Collect rows where all reports arrive: not in one of several worker processes."""
    config.addinivalue_line("markers", "safety: adds a row to docs/safety.md")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SafetyTable(config.getoption("write_safety")))
