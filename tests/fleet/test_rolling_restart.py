"""A rolling restart: one host after the other, and what becomes of it when one fails."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fleet.playbooks import ANY_FAILURE, BROKEN_RESTART, SUFFERING, UNREACHABLE, Fleet
from test_verify import WRAPPER, Server

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleet.sshd import Host


@pytest.fixture(scope="module")
def three(work: Path, program: Path, key: Path, start: Callable[..., Host]) -> Fleet:
    """Three hosts of one release."""
    folder = work / "three"
    folder.mkdir()
    fleet = Fleet(folder, program, key)
    for name in ("one", "two", "three"):
        fleet.add(name, start(name).port, Server(folder / name))
    return fleet


def test_a_failed_verification_stops_the_rolling_restart(three: Fleet) -> None:
    before = three.trees()
    three.servers["two"].tell({WRAPPER: {"image-token": False}})
    run = three.play("apply.yml")
    assert run.exit_code == ANY_FAILURE
    assert run.counted("failed") == {"two"}
    assert run.counted("changed") == {"one"}
    assert three.restarted == ["one"]
    assert run.table["one"][1] == "patched"
    note = f"{WRAPPER} fails image-token: seen\\nso; every file was put back"
    assert run.table["two"] == ("0.17.1", "failed", note)
    assert run.table["three"] == ("-", "not begun", "two failed")
    after = three.trees()
    assert after["one"] != before["one"]
    assert (after["two"], after["three"]) == (before["two"], before["three"])
    assert not three.servers["three"].requests


def test_a_restart_that_fails_stops_it_too_and_the_next_run_goes_on(three: Fleet) -> None:
    three.servers["two"].tell()
    run = three.play("apply.yml", restart=BROKEN_RESTART)
    assert run.exit_code == ANY_FAILURE
    assert three.restarted == ["two"]
    assert run.counted("failed") == {"two"}
    assert run.table["one"][1:] == ("patched", "nothing to do")
    assert run.table["two"][:2] == ("0.17.1", "failed")
    assert run.table["two"][2].startswith("Wait until it serves: ")
    assert run.table["two"][2].endswith(" (changed 13 files, restart not finished)")
    assert run.table["three"][1] == "not begun"

    run = three.play("apply.yml")
    assert run.exit_code == 0
    assert three.restarted == ["three"]
    assert {row[1] for row in run.table.values()} == {"patched"}


def test_what_may_fail_can_be_said(three: Fleet) -> None:
    assert three.play("revert.yml", **SUFFERING).exit_code == 0
    three.servers["one"].tell({WRAPPER: {"image-token": False}})
    run = three.play("apply.yml", vllm_eagle3_patch_max_fail_percentage=40)
    three.servers["one"].tell()
    assert run.exit_code == ANY_FAILURE
    assert three.restarted == ["two", "three"]
    assert [row[1] for row in run.table.values()] == ["failed", "patched", "patched"]


def test_wrong_arguments_are_refused(three: Fleet) -> None:
    run = three.play("apply.yml", "--limit", "one", vllm_eagle3_patch_verify_timeout="soon")
    assert run.exit_code == ANY_FAILURE
    assert "vllm_eagle3_patch_verify_timeout" in run.table["one"][2]


def test_a_host_without_the_program_says_so(three: Fleet) -> None:
    absent = {"vllm_eagle3_patch_program": "/no/program"}
    run = three.play("check.yml", "--limit", "one", **absent)
    assert run.exit_code == ANY_FAILURE
    assert run.table["one"][1] == "failed"
    assert run.table["one"][2].endswith("/no/program")


UNREADABLE = {
    "absent": (None, "no such file on the controller"),
    "empty": ("\n", "no tasks in it"),
    "no yaml": ("- name: [", "(line "),
    "no list": ("name: Restart it\n", "must contain a list of tasks"),
    "unknown module": ("- name: Restart it\n  no_such_module:\n", "'no_such_module'"),
}


@pytest.mark.parametrize(
    ("case", "check"), [*((case, ()) for case in UNREADABLE), ("absent", ("--check",))]
)
def test_a_restart_that_cannot_be_read_is_found_before_anything_is_changed(
    case: str, check: tuple[str, ...], three: Fleet
) -> None:
    text, wrong = UNREADABLE[case]
    before = three.trees(state=True)
    more = {} if text is None else {"restart": text}
    absent = {"vllm_eagle3_patch_restart_tasks": str(three.folder / "no/restart.yml")}
    run = three.play("apply.yml", *check, **more, **(absent if text is None else {}))
    assert run.exit_code == ANY_FAILURE
    assert run.counted("failed") == {"one", "two", "three"}
    assert run.counted("changed") == set()
    for row in run.table.values():
        assert row[1] == "failed"
        assert row[2].startswith("restart tasks /")
        assert wrong in row[2]
    assert three.trees(state=True) == before


LOST = """
- name: Lose it
  ansible.builtin.command: "true"
  vars: {ansible_port: 9}
"""
MISSING = """
- name: Go on elsewhere
  ansible.builtin.include_tasks: /no/more.yml
"""


@pytest.mark.parametrize("restart", [LOST, MISSING], ids=["lost", "missing"])
def test_whatever_ends_a_restart_there_is_a_table_and_the_run_fails(
    restart: str, three: Fleet
) -> None:
    assert three.play("revert.yml", **SUFFERING).exit_code == 0
    run = three.play("apply.yml", restart=restart)
    assert run.exit_code == ANY_FAILURE
    assert [row[1] for row in run.table.values()] == ["failed", "not begun", "not begun"]
    assert run.table["one"][2].endswith(" (changed 13 files, restart not finished)")


def test_a_host_that_is_lost_beside_others_is_unreachable(three: Fleet) -> None:
    assert three.play("revert.yml", **SUFFERING).exit_code == 0
    restart = LOST + "  when: inventory_hostname == 'two'\n"
    run = three.play("apply.yml", restart=restart, **SUFFERING)
    assert run.exit_code == UNREACHABLE
    assert run.counted("unreachable") == {"two"}
    assert run.table["one"][1:] == ("patched", "changed 13 files")
    assert run.table["two"][1:] == ("patched", "changed 13 files, not restarted")


def test_a_change_without_a_restart_says_so_and_the_restart_can_follow(three: Fleet) -> None:
    assert three.play("revert.yml", **SUFFERING).exit_code == 0
    run = three.play("apply.yml", "--limit", "one", vllm_eagle3_patch_restart_tasks="")
    assert run.exit_code == 0
    assert run.table["one"][1:] == ("patched", "changed 13 files, not restarted")
    run = three.play("apply.yml", "--limit", "one")
    assert run.table["one"][1:] == ("patched", "nothing to do")
    assert three.restarted == []
    run = three.play("apply.yml", "--limit", "one", vllm_eagle3_patch_restart_always=True)
    assert run.exit_code == 0
    assert run.table["one"][1:] == ("patched", "nothing to do, restarted")
    assert three.restarted == ["one"]
