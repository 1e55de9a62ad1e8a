"""Environments made by the real uv, offline, and small wheels of real vLLM releases for it."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import fake_environments as fake
from conftest import small_copy

UV = Path(sys.executable).with_name("uv")


def vllm_wheel(release: str, folder: Path) -> Path:
    """A wheel of the files of a release that the matrix names."""
    source = small_copy(release, folder / f"source-{release}")
    files = {
        str(path.relative_to(source)): path.read_bytes()
        for path in sorted((source / "vllm").rglob("*.py"))
    }
    return make_wheel(folder, "vllm", release, files)


def make_wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    """A wheel of these files that needs nothing else."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    wheel = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    held = {
        **files,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": wheel.encode(),
        f"{info}/top_level.txt": f"{name}\n".encode(),
    }
    rows = [f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in held.items()]
    held[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"]).encode()
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in held.items():
            archive.writestr(member, data)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


class Uv:
    """The real uv with a cache of its own.

    Args:
        cache: The folder of its cache.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def run(self, *arguments: object) -> None:
        """Run it; nothing is fetched."""
        environment = {
            **os.environ,
            "UV_CACHE_DIR": str(self.cache),
            "UV_OFFLINE": "1",
            "UV_NO_CONFIG": "1",
        }
        command = [str(UV), *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def venv(self, folder: Path, *options: object, python: object = sys.executable) -> Path:
        """Make an environment; returns its site-packages."""
        self.run("venv", "--python", python, *options, folder)
        return fake.site_packages_of(folder)

    def install(self, folder: Path, *wheels_and_options: object) -> None:
        """Install wheels into an environment, without what they need."""
        self.run("pip", "install", "--no-deps", "--python", folder, *wheels_and_options)

    def uninstall(self, folder: Path, name: str) -> None:
        """Uninstall a distribution from an environment."""
        self.run("pip", "uninstall", "--python", folder, name)
