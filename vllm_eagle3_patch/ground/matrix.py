"""The compatibility matrix: what every release of vLLM holds, pinned by content.

``patches/releases/<version>.toml`` is written from the release's own wheel (``make matrix``):
the sha256 of each file concerned, as published and after the default set of patches, and what
``assess/survey.py`` reads from both. A file whose sha256 is in here is known, whatever
the installation calls its version.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_eagle3_patch import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

RELEASES = Path(__file__).parents[1] / "patches" / "releases"

SUPPORT = ("native", "patch", "interface", "unsupported")
"""Best first: works as published; works after ``apply``; the interface can be added but the
engine cannot run the combination; nothing can be done."""


class FilePin(NamedTuple):
    """One file of a release: its sha256, and the patches of the default set in it.

    Attributes:
        original: As published.
        patched: After the default set of patches.
        hardened: After the default set and ``--harden``.
    """

    original: str
    patched: str
    hardened: str
    patches: tuple[str, ...]

    def has(self, digest: str | None) -> bool:
        """Whether a content is this file's, as published or with the patches of either set."""
        return digest in (self.original, self.patched, self.hardened)


class ModelPin(NamedTuple):
    """One model of a release: what it lacks and what limits it, as published and patched."""

    architecture: str
    model_types: tuple[str, ...]
    support: str
    reason: str | None
    missing: tuple[str, ...]
    limits: tuple[str, ...]
    missing_patched: tuple[str, ...]
    limits_patched: tuple[str, ...]


class Release(NamedTuple):
    """One release of vLLM.

    Attributes:
        support: The best of its models' support.
        reason: Why no model works there, if none does.
        requires_python: The Python versions that it admits.
        files: The files that patches concern, by path.
        evidence: The sha256 of files that are only read, by path.
        models: The family's models that it ships.
    """

    name: str
    support: str
    reason: str | None
    requires_python: str
    files: Mapping[str, FilePin]
    evidence: Mapping[str, str]
    models: tuple[ModelPin, ...]


@cache
def load(name: str) -> Release | None:
    """One release by its version without a local part, or None if the matrix lacks it."""
    text = _text(name)
    if text is None:
        return None
    pins, _, _ = text.partition(_DOCTOR)
    return _release(tomllib.loads(pins))


def load_doctor(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``doctor`` reads from a release's source, and what of that the default set changes.

    Both as tables of ``doctor.engine.Engine``; empty if the matrix lacks the release.
    """
    data = tomllib.loads(_text(name) or "")
    return data.get("doctor", {}), data.get("doctor_patched", {})


_DOCTOR = "\n[doctor]\n"
"""Where a release's file goes on with what only ``doctor`` wants; it is longer than the rest."""


def _text(name: str) -> str | None:
    # Longer than any version is: the system refuses to look for a name of hundreds of characters.
    if not re.fullmatch(r"[0-9a-z.]{1,64}", name):
        return None
    file = RELEASES / f"{name}.toml"
    return file.read_text(encoding="utf-8") if file.is_file() else None


def names() -> tuple[str, ...]:
    """Every release of the matrix, oldest first."""
    from packaging.version import Version

    return tuple(sorted((file.stem for file in RELEASES.glob("*.toml")), key=Version))


def releases(first: str | None = None) -> Iterator[Release]:
    """Every release, the one named ``first`` before the others."""
    likely = load(first) if first else None
    if likely is not None:
        yield likely
    yield from (release for release in reversed(oldest_first()) if release is not likely)


def oldest_first() -> tuple[Release, ...]:
    """Every release, in order."""
    return tuple(release for name in names() if (release := load(name)) is not None)


def base_version(version: str | None) -> str | None:
    """The release a version belongs to: ``0.16.0`` for ``0.16.0+cu129``."""
    return None if version is None else version.partition("+")[0].strip()


def _release(data: dict[str, Any]) -> Release:
    return Release(
        name=data["release"],
        support=data["support"],
        reason=data.get("reason"),
        requires_python=data["requires_python"],
        files={
            path: FilePin(
                pin["original"],
                pin["patched"],
                pin.get("hardened", pin["patched"]),
                tuple(pin["patches"]),
            )
            for path, pin in data["files"].items()
        },
        evidence=data["evidence"],
        models=tuple(
            ModelPin(
                architecture=architecture,
                model_types=tuple(model["model_types"]),
                support=model["support"],
                reason=model.get("reason"),
                missing=tuple(model["missing"]),
                limits=tuple(model["limits"]),
                missing_patched=tuple(model.get("missing_patched", ())),
                limits_patched=tuple(model.get("limits_patched", model["limits"])),
            )
            for architecture, model in data["models"].items()
        ),
    )


def document(chosen: Sequence[Release]) -> dict[str, Any]:
    """The JSON document of the command ``matrix``."""
    return {
        "schema": 1,
        "tool": __version__,
        "command": "matrix",
        "exit_code": 0,
        "releases": [
            {
                "name": release.name,
                "support": release.support,
                "reason": release.reason,
                "requires_python": release.requires_python,
                "models": [
                    {
                        "architecture": model.architecture,
                        "model_types": list(model.model_types),
                        "support": model.support,
                        "reason": model.reason,
                        "missing": list(model.missing),
                        "limits": list(model.limits),
                        "limits_patched": list(model.limits_patched),
                    }
                    for model in release.models
                ],
                "files": {
                    path: {
                        "original": pin.original,
                        "patched": pin.patched,
                        "hardened": pin.hardened,
                        "patches": list(pin.patches),
                    }
                    for path, pin in release.files.items()
                },
            }
            for release in chosen
        ],
    }
