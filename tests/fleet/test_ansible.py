"""The role and its playbooks on hosts of every kind: patchable, patched, read-only, not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from command_line import Entry
from command_line import run as run_tool
from fleet.playbooks import PLAYBOOKS, STATE, SUFFERING, UNREACHABLE, Fleet
from fleet.sshd import Host, free_port
from test_verify import Server

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module")
def fleet(work: Path, program: Path, key: Path, start: Callable[..., Host]) -> Fleet:
    """Seven hosts: four that can be patched, one patched, one read-only, one not there."""
    folder = work / "fleet"
    folder.mkdir()
    fleet = Fleet(folder, program, key)
    releases = {"first": "0.17.1", "second": "0.16.0", "third": "0.11.0", "native": "0.27.1"}
    for name, release in {**releases, "patched": "0.17.1", "readonly": "0.16.0"}.items():
        server = Server(folder / name, release)
        read_only = server.root if name == "readonly" else None
        host = start(name, read_only=read_only)
        more = {"vllm_eagle3_patch_program_file": str(program)} if name in SINGLE_FILE else {}
        fleet.add(name, host.port, server, **more)
    fleet.add("gone", free_port())
    assert run_tool("apply", "--site-packages", fleet.servers["patched"].root).exit_code == 0
    return fleet


SINGLE_FILE = {"first", "readonly"}
"""On the other hosts the program is there already."""

PATCHABLE = {"first", "second", "third", "native"}


@pytest.fixture(scope="module")
def fresh(fleet: Fleet) -> dict[str, dict[str, Entry]]:
    """The installations before anything was done, with what is beside them."""
    return fleet.trees(state=True)


def nothing_is_left_of_the_program(fleet: Fleet, work: Path) -> None:
    for name in fleet.servers:
        assert list((work / name / "tmp").iterdir()) == []
        assert {path.name for path in (work / name / "home").iterdir()} <= {".ansible"}


def test_check_looks_only(fleet: Fleet, fresh: dict[str, dict[str, Entry]], work: Path) -> None:
    run = fleet.play("check.yml")
    assert run.exit_code == UNREACHABLE
    assert run.counted("changed") == set()
    assert (run.counted("failed"), run.counted("unreachable")) == (set(), {"gone"})
    assert list(run.table) == list(fleet.variables)
    for name in PATCHABLE | {"readonly"}:
        version = fleet.servers[name].root
        assert run.table[name][1:] == ("patchable", "apply would patch it"), version
    assert run.table["native"][0] == "0.27.1"
    assert run.table["patched"] == ("0.17.1", "patched", "-")
    assert run.table["gone"][:2] == ("-", "unreachable")
    assert "Connection refused" in run.table["gone"][2]
    assert fleet.trees(state=True) == fresh
    assert fleet.restarted == []
    nothing_is_left_of_the_program(fleet, work)


def test_a_dry_run_says_what_would_change_and_writes_nothing(
    fleet: Fleet, fresh: dict[str, dict[str, Entry]], work: Path
) -> None:
    run = fleet.play("apply.yml", "--check", "--limit", "first,patched", **SUFFERING)
    assert run.exit_code == 0
    assert run.recap["first"]["changed"] == 1
    assert run.recap["patched"]["changed"] == 0
    assert run.table["first"] == ("0.17.1", "patchable", "would change 13 files")
    assert run.table["patched"] == ("0.17.1", "patched", "nothing to do")
    assert fleet.trees(state=True) == fresh
    assert fleet.restarted == []
    nothing_is_left_of_the_program(fleet, work)


def test_apply_changes_the_hosts_that_it_must_and_no_other(
    fleet: Fleet, fresh: dict[str, dict[str, Entry]], work: Path
) -> None:
    run = fleet.play("apply.yml", **SUFFERING)
    assert run.exit_code == UNREACHABLE
    assert run.counted("changed") == PATCHABLE
    assert (run.counted("failed"), run.counted("unreachable")) == ({"readonly"}, {"gone"})
    # One for the files, one for the restart.
    assert {run.recap[name]["changed"] for name in PATCHABLE} == {2}
    assert list(run.table) == list(fleet.variables)
    assert run.table["first"] == ("0.17.1", "patched", "changed 13 files")
    assert run.table["second"] == ("0.16.0", "patched", "changed 12 files")
    assert run.table["third"] == ("0.11.0", "patched", "changed 7 files")
    assert run.table["native"] == ("0.27.1", "patched", "changed 5 files")
    assert run.table["patched"] == ("0.17.1", "patched", "nothing to do")
    assert run.table["readonly"][:2] == ("0.16.0", "failed")
    assert "Read-only file system" in run.table["readonly"][2]
    assert run.table["gone"][:2] == ("-", "unreachable")
    assert sorted(fleet.restarted) == sorted(PATCHABLE)
    changed = {name for name, tree in fleet.trees(state=True).items() if tree != fresh[name]}
    assert changed == PATCHABLE
    # Each was verified by its own interpreter, the one that was patched already too.
    proven = {name for name, server in fleet.servers.items() if server.requests}
    assert proven == PATCHABLE | {"patched"}
    nothing_is_left_of_the_program(fleet, work)


def test_a_second_run_changes_nothing(fleet: Fleet, work: Path) -> None:
    before = fleet.trees(state=True)
    run = fleet.play("apply.yml", **SUFFERING)
    assert run.counted("changed") == set()
    assert {run.table[name][1:] for name in PATCHABLE} == {("patched", "nothing to do")}
    assert fleet.trees(state=True) == before
    assert fleet.restarted == []
    nothing_is_left_of_the_program(fleet, work)


def test_revert_brings_every_file_back(
    fleet: Fleet, fresh: dict[str, dict[str, Entry]], work: Path
) -> None:
    """Byte for byte; and a rolling restart goes host after host, in the inventory's order."""
    run = fleet.play("revert.yml", "--limit", "!gone")
    assert run.exit_code == 0
    reverted = ["first", "second", "third", "native", "patched"]
    assert fleet.restarted == reverted
    assert run.counted("changed") == set(reverted)
    assert run.table["first"] == ("0.17.1", "patchable", "changed 13 files")
    assert run.table["readonly"] == ("0.16.0", "patchable", "nothing to do")
    of_patched = fleet.trees()
    for name in PATCHABLE | {"readonly"}:
        wanted = {path: it for path, it in fresh[name].items() if not path.startswith(STATE)}
        assert of_patched[name] == wanted
    texts = {path: entry.content for path, entry in of_patched["patched"].items()}
    assert texts == {path: entry.content for path, entry in of_patched["first"].items()}
    nothing_is_left_of_the_program(fleet, work)


def test_the_playbooks_are_as_ansible_reads_them() -> None:
    for playbook in ("check.yml", "apply.yml", "revert.yml"):
        command = [str(Path(sys.executable).with_name("ansible-playbook")), "--syntax-check"]
        environ = {**os.environ, "LC_ALL": "C.UTF-8"}
        subprocess.run([*command, str(PLAYBOOKS / playbook)], check=True, env=environ)
