"""Fixtures: small copies of a real installation, which every test may change as it likes."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

import safety_table
from safety_table import tried
from tools.fetch_release import fetch
from vllm_eagle3_patch.ground import matrix

__all__ = ["tried"]  # a fixture


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-safety", action="store_true", help="write docs/safety.md")
    parser.addoption(
        "--releases",
        metavar="NAMES",
        help="of the tests that a release of vLLM is a parameter of, run those of these releases",
    )


def pytest_configure(config: pytest.Config) -> None:
    safety_table.configure(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "tried" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.safety)
    chosen = config.getoption("--releases")
    if chosen is not None:
        named = set(chosen.split(","))
        left_out = [item for item in items if not _releases_of(item) <= named]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _releases_of(item) <= named]


def _releases_of(item: pytest.Item) -> set[str]:
    """The releases of vLLM that a test has as its parameters."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = {getattr(p, "name", p) for p in parameters if isinstance(p, str | matrix.Release)}
    return names.intersection(matrix.names())


def small_copy(release: str, destination: Path) -> Path:
    """A release's files that the matrix names, with its metadata, as a site-packages folder."""
    pins = matrix.load(release)
    assert pins is not None
    source = fetch(release)
    for path in (*pins.files, *pins.evidence, "vllm/__init__.py", "vllm/_version.py"):
        target = destination / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, target)
    (info,) = source.glob("*.dist-info")
    shutil.copytree(info, destination / info.name)
    return destination


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    """vLLM 0.17.1, as far as this tool looks at it."""
    return small_copy("0.17.1", tmp_path / "site-packages")


@pytest.fixture(autouse=True)
def signals_are_heard() -> None:
    """Started in the background or under ``nohup``, the tests would inherit ignored signals."""
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests name their installation; none is found by accident."""
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
