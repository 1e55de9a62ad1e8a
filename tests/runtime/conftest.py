"""One environment a release, made before its first test and removed after its last."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runtime.environment import Environment
from runtime.proof import HEADER, Proof, Prover
from runtime.releases import RELEASES, RuntimeRelease

if TYPE_CHECKING:
    from collections.abc import Iterator

KEPT = "VLLM_EAGLE3_PATCH_ENVIRONMENTS"
"""Names a folder in which environments are kept and used again, for whoever works on these tests.
Without it each one is removed: they take 3 to 8 GB."""

MINUTES = "VLLM_EAGLE3_PATCH_MINUTES"
"""After so many minutes no other release is begun: its tests are skipped, and counted so. Without
it every release is run."""

_proofs: list[Proof] = []
_started = time.monotonic()


@pytest.fixture(scope="session")
def cache() -> Iterator[Path]:
    """What pip downloads, shared by the environments of one run."""
    with tempfile.TemporaryDirectory(prefix="vllm-eagle3-patch-pip-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def removals() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Environments that are being removed; all are gone at the end."""
    running: list[subprocess.Popen[bytes]] = []
    yield running
    for process in running:
        assert process.wait() == 0


@pytest.fixture(scope="session")
def trained() -> Iterator[Path]:
    """The models of the acceptance experiment; the first release that speculates trains them."""
    with tempfile.TemporaryDirectory(prefix="vllm-eagle3-patch-models-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session", params=RELEASES, ids=lambda release: release.version)
def environment(
    request: pytest.FixtureRequest, cache: Path, removals: list[subprocess.Popen[bytes]]
) -> Iterator[Environment]:
    """A release, installed."""
    release: RuntimeRelease = request.param
    minutes = os.environ.get(MINUTES)
    if minutes and time.monotonic() - _started > 60 * float(minutes):
        pytest.skip(f"not begun, as more than {minutes} minutes had passed")
    kept = os.environ.get(KEPT)
    folder = Path(kept or tempfile.mkdtemp(prefix="vllm-eagle3-patch-")) / release.version
    environment = Environment(folder, release)
    try:
        if not environment.python.exists():
            environment.make(cache)
        yield environment
    finally:
        if not kept:
            # Beside the next release: there are some 60,000 files, and that takes minutes.
            removals.append(subprocess.Popen(["rm", "-rf", str(folder.parent)]))


@pytest.fixture(scope="session")
def proof(environment: Environment, trained: Path) -> Iterator[Proof]:
    """Everything that is run of a release, once."""
    with tempfile.TemporaryDirectory(prefix="vllm-eagle3-patch-runtime-") as work:
        found = Prover(environment, Path(work), trained).run()
    _proofs.append(found)
    yield found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line a release: what was compared, how many tensors, the largest difference."""
    if _proofs:
        terminalreporter.section("real vLLM")
        terminalreporter.write_line(HEADER)
        for found in _proofs:
            terminalreporter.write_line(found.row())
