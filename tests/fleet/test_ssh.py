"""Plain ssh, as docs/fleet.md says it."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import fake_environments as fake
from command_line import snapshot
from conftest import small_copy
from fleet.conftest import PROJECT

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleet.sshd import Host

DOCUMENTED = (PROJECT / "docs/fleet.md").read_text(encoding="utf-8")


def documented(start: str) -> str:
    """The one command of docs/fleet.md that starts so, as one line."""
    blocks = re.findall(r"^```sh\n(.*?)^```", DOCUMENTED, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    (line,) = [line for line in lines if line.startswith(start)]
    return re.sub(r"\s+", " ", line)


@pytest.fixture(scope="module")
def host(work: Path, start: Callable[..., Host]) -> Host:
    """A host whose python3 has vLLM 0.17.1; our tools lie beside it."""
    python = fake.make_venv(work / "venv")
    small_copy("0.17.1", fake.site_packages_of(work / "venv"))
    for name in ("vllm-eagle3-patch", "uv", "uvx", "pipx"):
        (work / "bin").mkdir(exist_ok=True)
        (work / "bin" / name).symlink_to(Path(sys.executable).with_name(name))
    return start("host", path=(work / "bin", python.parent))


def test_check_needs_no_terminal(host: Host) -> None:
    line = documented("ssh host /opt/venv/bin/vllm-eagle3-patch check").removeprefix("ssh host ")
    installed = str(Path(sys.executable).with_name("vllm-eagle3-patch"))
    ended = host.ssh(line.replace("/opt/venv/bin/vllm-eagle3-patch", installed))
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.startswith("vllm 0.17.1 in ")
    assert "\x1b" not in ended.stdout
    assert ended.stderr == ""


def test_json_is_all_of_the_output(host: Host) -> None:
    ended = host.ssh("vllm-eagle3-patch check --json")
    assert json.loads(ended.stdout)["state"] == "patchable"


def test_the_single_file_runs_from_standard_input_and_leaves_nothing(
    host: Host, program: Path, work: Path
) -> None:
    before = snapshot(work / "venv"), snapshot(host.home), snapshot(host.temporary)
    line = documented("ssh host 'd=")
    match = re.fullmatch(r"ssh host '(.*)' < \S+\.pyz", line)
    assert match, line
    ended = host.ssh(match[1], stdin=program)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.startswith("vllm 0.17.1 in ")
    assert ended.stderr == ""
    after = snapshot(work / "venv"), snapshot(host.home), snapshot(host.temporary)
    assert after == before


def environment_of_pip() -> str:
    """How this machine reaches the index, as a prefix of a shell command."""
    prefixes = ("PIP_", "UV_", "SSL_", "REQUESTS_", "HTTP_", "HTTPS_", "NO_PROXY")
    named = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    return " ".join(f"{name}='{value}'" for name, value in named.items())


@pytest.mark.parametrize("tool", ["uvx", "pipx"])
def test_it_runs_from_the_index_without_being_installed(
    tool: str, host: Host, wheel: Path, work: Path
) -> None:
    before = snapshot(work / "venv")
    command = documented(f"ssh host {tool} ").removeprefix("ssh host ")
    assert f" ./{wheel.name} " in command
    assert command.endswith(" --python /opt/venv")
    command = command.replace(f"./{wheel.name}", str(wheel)).replace("/opt/", f"{work}/")
    ended = host.ssh(f"{environment_of_pip()} {command}")
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.startswith("vllm 0.17.1 in ")
    assert snapshot(work / "venv") == before
