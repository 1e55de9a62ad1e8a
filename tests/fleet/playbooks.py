"""Playbooks run by ansible-core against hosts that are real to it, and what a person then sees."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command_line import Entry, snapshot
from fleet.conftest import PROJECT
from test_verify import Server

if TYPE_CHECKING:
    pass

PLAYBOOKS = PROJECT / "deploy/ansible"
STATE = ".vllm-eagle3-patch"
TIMEOUT = 300.0
ANY_FAILURE, UNREACHABLE = 2, 4
"""Ansible's exit codes; the second one is that of both."""
SUFFERING = {"vllm_eagle3_patch_max_fail_percentage": 100, "vllm_eagle3_patch_serial": "100%"}
"""Go on whatever fails, with all hosts at once."""

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
