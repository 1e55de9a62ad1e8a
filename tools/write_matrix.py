"""Write ``patches/releases/<version>.toml`` from a release's own wheel: ``make matrix``.

Run as ``python -m tools.write_matrix [VERSION ...]``; without a version, every release.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import Any

import tomlkit

from tools.fetch_release import fetch, releases
from vllm_eagle3_patch.assess.model_facts import ModelFacts
from vllm_eagle3_patch.assess.survey import EVIDENCE, survey
from vllm_eagle3_patch.codemod.patch import Patch, has_protocol
from vllm_eagle3_patch.ground.digest import sha256
from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.ground.matrix import RELEASES, SUPPORT
from vllm_eagle3_patch.patches._discovery import all_patches, chosen_patches
from vllm_eagle3_patch.vllm_source import read_engine
from vllm_eagle3_patch.vllm_source.sources import Sources

HEADER = "# Written by `make matrix RELEASE={name}` from the release's wheel; do not edit.\n"


@dataclass(frozen=True)
class Patched:
    """A release with the default set of patches in it."""

    contents: dict[str, bytes]
    patches: dict[str, list[str]]


def describe(name: str, root: Path) -> dict[str, Any]:
    """What the matrix holds of a release.

    Args:
        name: The release's version.
        root: Its files, laid out as in site-packages.
    """
    sources = Sources(root)
    before = survey(sources)
    patched = apply_set(sources, before)
    hardened = apply_set(sources, before, harden=True)
    after = {facts.architecture: facts for facts in survey(sources.with_overlay(patched.contents))}
    (metadata,) = root.glob("*.dist-info/METADATA")
    (record,) = root.glob("*.dist-info/RECORD")
    concerned = sorted({path for patch in all_patches() for path in patch.paths(sources)})
    models = {f.architecture: _model(f, after[f.architecture]) for f in before}
    best = min((m["support"] for m in models.values()), key=SUPPORT.index, default="unsupported")
    reasons = [m["reason"] for m in models.values() if "reason" in m and m["support"] == best]
    return {
        "release": name,
        "support": best,
        **({"reason": reasons[0]} if reasons else {}),
        "requires_python": BytesHeaderParser().parsebytes(metadata.read_bytes())["Requires-Python"],
        "record_sha256": sha256(record.read_bytes()),
        "models": models,
        "files": {path: _file(path, sources, patched, hardened) for path in concerned},
        "evidence": {
            path: sources.digest(path)
            for path in EVIDENCE
            if path not in concerned and sources.exists(path)
        },
        **_doctor(sources, sources.with_overlay(patched.contents)),
    }


def _doctor(sources: Sources, patched: Sources) -> dict[str, Any]:
    """What ``doctor`` reads from the source, and what of that the default set changes."""
    targets = read_engine.architectures_of_interest(sources)
    before = read_engine.for_matrix(read_engine.read(sources, targets))
    after = read_engine.for_matrix(read_engine.read(patched, targets))
    return {"doctor": before.table(), **_nonempty("doctor_patched", before.changes_to(after))}


def _nonempty(name: str, table: dict[str, Any]) -> dict[str, Any]:
    return {name: table} if table else {}


def _file(path: str, sources: Sources, patched: Patched, hardened: Patched) -> dict[str, Any]:
    content = sources.read(path) or b""
    described: dict[str, Any] = {
        "original": sha256(content),
        "patched": sha256(patched.contents.get(path, content)),
        "patches": patched.patches.get(path, []),
    }
    digest = sha256(hardened.contents.get(path, content))
    if digest != described["patched"]:
        described["hardened"] = digest
    return described


def apply_set(sources: Sources, before: tuple[ModelFacts, ...], *, harden: bool = False) -> Patched:
    """Apply the default set of patches, or with ``--harden``."""
    shipped = {facts.architecture for facts in before}
    models = tuple(model for model in FAMILY if model.architecture in shipped)
    possible = [facts for facts in before if facts.reason is None or facts.engine]
    ready = [facts for facts in possible if facts.reason is None]
    # Where no model can be ready, what --interface-only adds is pinned.
    lacking = {name for facts in ready or possible for name in facts.missing}
    patched = Patched({}, {})
    for patch in chosen_patches(lacking, harden=harden):
        _apply(patch, sources, models, patched)
    return patched


def _apply(patch: Patch, sources: Sources, models: tuple[Any, ...], patched: Patched) -> None:
    for path in patch.paths(sources):
        content = patched.contents.get(path) or sources.read(path) or b""
        changed = patch.apply(content, path, models, protocol=has_protocol(sources))
        if changed != content:
            patched.contents[path] = changed
            patched.patches.setdefault(path, []).append(patch.name)


def _model(before: ModelFacts, after: ModelFacts) -> dict[str, Any]:
    described: dict[str, Any] = {
        "model_types": list(before.model_types),
        "support": support_of(before),
        "missing": list(before.missing),
        "limits": list(before.limits),
    }
    if before.reason is not None:
        described["reason"] = before.reason
    if after.missing:
        described["missing_patched"] = list(after.missing)
    if after.limits != before.limits:
        described["limits_patched"] = list(after.limits)
    return described


def support_of(before: ModelFacts) -> str:
    """``native``, ``patch``, ``interface`` or ``unsupported``."""
    if before.reason is not None:
        return "interface" if before.engine else "unsupported"
    return "patch" if before.missing else "native"


def write(name: str, root: Path) -> Path:
    """Write a release's file of the matrix."""
    file = RELEASES / f"{name}.toml"
    text = HEADER.format(name=name) + tomlkit.dumps(describe(name, root))
    file.write_text(text, encoding="utf-8")
    return file


def main(names: list[str]) -> None:
    """Write the releases named, or all."""
    with ProcessPoolExecutor() as pool:
        for file in pool.map(_fetch_and_write, names or releases()):
            print(file, flush=True)


def _fetch_and_write(name: str) -> Path:
    return write(name, fetch(name))


if __name__ == "__main__":
    main(sys.argv[1:])
