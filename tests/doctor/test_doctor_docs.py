"""``docs/doctor.md``: its table is as the rules say, and no report is left out."""

from __future__ import annotations

from tools import write_doctor_table
from tools.write_doctor_table import DOCUMENT, GROUPS, UNSEEN
from vllm_eagle3_patch.doctor.finding import all_rules


def test_the_document_is_current() -> None:
    current = DOCUMENT.read_text(encoding="utf-8")
    assert write_doctor_table.document(current) == current, "run python -m tools.write_doctor_table"


def test_every_report_of_groups_a_to_e_is_there() -> None:
    entries = {number for group in GROUPS.values() for number in group}
    assert entries >= set(range(1, 52)) | {58}
    assert entries >= {number for rule in all_rules() for number in rule.reports}
    assert entries >= set(UNSEEN)


def test_what_no_rule_covers_says_what_the_metrics_show() -> None:
    covered = {number for rule in all_rules() for number in rule.reports}
    for number in {n for group in GROUPS.values() for n in group} - covered:
        assert "--metrics" in UNSEEN[number], number
