"""The role and its playbooks, run by ansible-core against hosts that are real to it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from command_line import Entry, snapshot
from command_line import run as run_tool
from fleet.conftest import PROJECT
from fleet.sshd import Host, free_port
from test_verify import WRAPPER, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PLAYBOOKS = PROJECT / "deploy/ansible"
STATE = ".vllm-eagle3-patch"
TIMEOUT = 300.0
ANY_FAILURE, UNREACHABLE = 2, 4
"""Ansible's exit codes; the second one is that of both."""
RESTART = """
- name: Restart it
  ansible.builtin.shell: echo {{ inventory_hostname }} >> {{ restarted }}
  changed_when: true
"""
BROKEN_RESTART = (
    RESTART
    + """
- name: Wait until it serves
  ansible.builtin.command: "false"
"""
)


@dataclass(frozen=True)
class Run:
    """How a playbook ended."""

    exit_code: int
    output: str

    @property
    def recap(self) -> dict[str, dict[str, int]]:
        """The counts of each host."""
        _, _, after = self.output.partition("PLAY RECAP")
        lines = re.findall(r"^(\S+)\s+: (.*)$", after, re.MULTILINE)
        return {
            host: {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", counts)}
            for host, counts in lines
        }

    def counted(self, name: str) -> set[str]:
        """The hosts with a count other than 0."""
        return {host for host, counts in self.recap.items() if counts[name]}

    @property
    def table(self) -> dict[str, tuple[str, str, str]]:
        """vLLM, state and note of each host, from the table that a person sees."""
        _, _, after = self.output.partition("Show one line a host")
        shown = json.loads(after[after.index("{") : after.index("\n}") + 2])["msg"]
        header, *rows = shown
        starts = [header.index(name) for name in ("host", "vLLM", "state", "note")]
        split = [
            [row[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
            for row in rows
        ]
        return {host: (vllm, state, note) for host, vllm, state, note in split}


class Fleet:
    """Hosts by name, their installations, and the inventory that lists them.

    Args:
        folder: Where inventory, key and restart log are.
        program: The single-file program.
        key: What opens every host.
    """

    def __init__(self, folder: Path, program: Path, key: Path) -> None:
        self.folder, self.program, self.key = folder, program, key
        self.servers: dict[str, Server] = {}
        self.variables: dict[str, dict[str, Any]] = {}
        self.log = folder / "restarted"

    def add(self, name: str, port: int, server: Server | None = None, **variables: object) -> None:
        """List a host, and the vLLM that is its."""
        self.variables[name] = {"ansible_port": port, **variables}
        if server is not None:
            self.servers[name] = server
            self.variables[name].setdefault("vllm_eagle3_patch_python", str(server.python))

    def trees(self, *, state: bool = False) -> dict[str, dict[str, Entry]]:
        """Every installation as it is, without what the tool keeps beside it."""
        return {
            name: {
                path: entry
                for path, entry in snapshot(server.root).items()
                if state or not path.startswith(STATE)
            }
            for name, server in self.servers.items()
        }

    @property
    def restarted(self) -> list[str]:
        """The hosts that were restarted, in that order."""
        return self.log.read_text().split() if self.log.exists() else []

    def play(self, playbook: str, *arguments: str, restart: str = RESTART, **more: object) -> Run:
        """Run a playbook on the hosts."""
        python_of_tests = Path(sys.executable)
        python = python_of_tests.resolve()
        everywhere = {
            "ansible_host": "127.0.0.1",
            "ansible_user": "root",
            "ansible_python_interpreter": str(python),
            "ansible_ssh_private_key_file": str(self.key),
            "vllm_eagle3_patch_program": str(python_of_tests.with_name("vllm-eagle3-patch")),
            "vllm_eagle3_patch_program_python": str(python),
        }
        inventory = self.folder / "inventory.json"
        hosts = {name: dict(variables) for name, variables in self.variables.items()}
        inventory.write_text(json.dumps({"all": {"vars": everywhere, "hosts": hosts}}))
        tasks = self.folder / "restart.yml"
        tasks.write_text(restart)
        self.log.unlink(missing_ok=True)
        given = {"vllm_eagle3_patch_restart_tasks": str(tasks), "restarted": str(self.log), **more}
        home = self.folder / "controller"
        (home / "tmp").mkdir(parents=True, exist_ok=True)
        ended = subprocess.run(
            [
                str(Path(sys.executable).with_name("ansible-playbook")),
                *("-i", str(inventory), str(PLAYBOOKS / playbook)),
                *("-e", json.dumps(given), *arguments),
            ],
            env={
                "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
                "HOME": str(home),
                "LC_ALL": "C.UTF-8",
                "TMPDIR": str(home / "tmp"),
                "ANSIBLE_HOME": str(home / "ansible"),
                "ANSIBLE_PIPELINING": "True",
                "ANSIBLE_HOST_KEY_CHECKING": "False",
                "ANSIBLE_FORKS": "10",
                "ANSIBLE_NOCOLOR": "True",
                "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self.folder / "c"),
                "ANSIBLE_SSH_ARGS": "-F none -o ControlMaster=auto -o ControlPersist=30s"
                " -o IdentitiesOnly=yes -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR",
            },
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert "[WARNING]" not in ended.stderr, ended.stderr
        assert "DEPRECATION" not in ended.stderr, ended.stderr
        run = Run(ended.returncode, ended.stdout + ended.stderr)
        print(run.output)
        return run


@pytest.fixture
def new_fleet(tmp_path: Path, program: Path, key: Path) -> Iterator[Fleet]:
    """A fleet without hosts."""
    yield Fleet(tmp_path, program, key)


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
SUFFERING = {"vllm_eagle3_patch_max_fail_percentage": 100, "vllm_eagle3_patch_serial": "100%"}


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


# A rolling restart that goes wrong


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
    assert run.table["two"] == ("0.17.1", "failed", f"{WRAPPER} fails image-token: seen\\nso")
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
    assert "No such file" in run.table["one"][2]


def test_the_playbooks_are_as_ansible_reads_them() -> None:
    for playbook in ("check.yml", "apply.yml", "revert.yml"):
        command = [str(Path(sys.executable).with_name("ansible-playbook")), "--syntax-check"]
        environ = {**os.environ, "LC_ALL": "C.UTF-8"}
        subprocess.run([*command, str(PLAYBOOKS / playbook)], check=True, env=environ)
