"""What `make dist` built, and hosts that are gone at the end."""

from __future__ import annotations

import platform
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fleet.sshd import Host, key_pair, need_root
from tools.build_programs import program_name
from vllm_eagle3_patch import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROJECT = Path(__file__).resolve().parents[2]
DIST = PROJECT / "dist"


@pytest.fixture(autouse=True, scope="session")
def root() -> None:
    need_root()


@pytest.fixture(scope="session")
def program() -> Path:
    """The single-file program for this machine."""
    path = DIST / program_name(__version__, platform.machine())
    assert path.exists(), "run `make dist` first"
    return path


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The wheel."""
    (path,) = DIST.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def work() -> Iterator[Path]:
    """A folder for hosts, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-eagle3-patch-fleet-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def key(work: Path) -> Path:
    """What opens every host."""
    return key_pair(work / "key")


@pytest.fixture(scope="module")
def start(work: Path, key: Path) -> Iterator[Callable[..., Host]]:
    """Start a host by its name; all are ended at the end."""
    hosts: list[Host] = []

    def start_one(name: str, **options: object) -> Host:
        host = Host(work / name, key, **options)  # type: ignore[arg-type]
        hosts.append(host)
        return host.start()

    try:
        yield start_one
    finally:
        for host in hosts:
            host.stop()
