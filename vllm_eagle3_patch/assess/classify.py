"""Classify: what each file of an installation is, which release it belongs to, what is missing."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from vllm_eagle3_patch import __version__
from vllm_eagle3_patch.assess.assessment import Assessment, FileStatus, Problem
from vllm_eagle3_patch.assess.grounds import grounded
from vllm_eagle3_patch.assess.model_facts import ModelFacts
from vllm_eagle3_patch.ground import matrix
from vllm_eagle3_patch.ground.errors import PatchError, UnsupportedError
from vllm_eagle3_patch.transaction.state.presence import has_traces
from vllm_eagle3_patch.vllm_source.sources import Sources

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm_eagle3_patch.ground.matrix import Release
    from vllm_eagle3_patch.installation.find import Installation
    from vllm_eagle3_patch.transaction.state.manifest import Manifest, ManifestEntry
    from vllm_eagle3_patch.transaction.state.verified import Verified

OUTDATED_BYTECODE = "outdated-bytecode"
_MARKERS = re.compile(rb"# vllm-eagle3-patch: ([a-z0-9-]+)")


def classify(installation: Installation) -> Assessment:
    """Read an installation and our state in it. Nothing is written.

    Raises:
        PatchError: A file cannot be read.
    """
    sources = Sources(installation.root)
    problems: list[Problem] = []
    manifest = None
    traces = has_traces(installation.root)
    if traces:
        from vllm_eagle3_patch.transaction.state.manifest import read_manifest

        try:
            manifest = read_manifest(installation.root)
        except PatchError as error:
            traces = False  # What else is there is not believed either.
            problems.append(Problem.of(error))
    release = identify(sources, installation, manifest)
    files = tuple(
        _status(path, sources, installation, release, manifest)
        for path in _concerned(sources, release)
    )
    evidence = _evidence(release)
    assessment = Assessment(installation, sources, manifest, release, files, (), (), evidence)
    try:
        facts = facts_of(sources, release)
    except UnsupportedError as error:
        facts = ()
        problems.append(Problem.of(error))
    problems.extend(_problems(assessment))
    results: tuple[Verified, ...] = ()
    if traces and any(model.ready for model in facts):
        from vllm_eagle3_patch.transaction.state.verified import read_verified

        try:
            results = read_verified(installation.root, __version__)
        except PatchError as error:
            problems.append(Problem.of(error)._replace(code="verified-corrupt"))
    return grounded(assessment._replace(facts=facts, problems=tuple(problems)), results)


def identify(
    sources: Sources, installation: Installation, manifest: Manifest | None
) -> Release | None:
    """The release whose files these are: by their content, else as they were installed."""
    first = matrix.base_version(installation.version)
    entries = manifest.files if manifest else {}

    def has_content(path: str, pin: matrix.FilePin) -> bool:
        digest = sources.digest(path)
        entry = entries.get(path)
        if entry is not None and digest == entry.written:
            return entry.original == pin.original
        return pin.has(digest)

    def was_installed(path: str, pin: matrix.FilePin) -> bool:
        return has_content(path, pin) or pin.has(installation.record.get(path))

    for belongs in (has_content, was_installed):
        for release in matrix.releases(first):
            if all(belongs(path, pin) for path, pin in release.files.items()):
                return release
    return None


def _evidence(release: Release | None) -> tuple[str, ...]:
    if release is not None:
        return tuple(release.evidence)
    from vllm_eagle3_patch.assess.survey import EVIDENCE

    return EVIDENCE


def _concerned(sources: Sources, release: Release | None) -> Iterable[str]:
    if release is not None:
        return release.files
    from vllm_eagle3_patch.patches._discovery import all_patches

    return sorted({path for patch in all_patches() for path in patch.paths(sources)})


def _status(
    path: str,
    sources: Sources,
    installation: Installation,
    release: Release | None,
    manifest: Manifest | None,
) -> FileStatus:
    digest = sources.digest(path)
    entry = manifest.files.get(path) if manifest else None
    if digest is None:
        something = os.path.lexists(sources.root / path)
        return FileStatus(path, "modified" if something else "missing", None, (), known=False)
    if entry is not None:
        # With --force an edited file was patched: its original is in no release.
        known = release is None or entry.original == release.files[path].original
        if digest == entry.written:
            return FileStatus(path, "patched", digest, entry.patches, known=known, entry=entry)
        if digest in made_of_originals({path: entry})[path]:
            # A backup of what an earlier run left was restored: its original is still kept.
            patches = _markers(path, sources)
            return FileStatus(path, "patched", digest, patches, known=known, entry=entry)
    pin = _pin_of(path, digest, release)
    stale = entry is not None
    if pin is not None:
        state = "pristine" if digest == pin.original else "patched"
        patches = pin.patches if release is not None else ()
        return FileStatus(path, state, digest, patches, known=True, stale=stale)
    return _unknown_status(path, digest, sources, installation, entry)


def _pin_of(path: str, digest: str, release: Release | None) -> matrix.FilePin | None:
    """What the matrix knows of a content: of this release, or of any if it is none of them."""
    releases = (release,) if release is not None else matrix.releases()
    for candidate in releases:
        pin = candidate.files.get(path)
        if pin is not None and pin.has(digest):
            return pin
    return None


def by_release(assessment: Assessment) -> dict[str, list[str]]:
    """The files that the matrix knows by the release they are of: as few releases as it takes."""
    contents = {s.path: s.entry.original if s.entry else s.digest for s in assessment.files}
    first = matrix.base_version(assessment.installation.version)
    found: dict[str, list[str]] = {}
    while contents:
        fitting = {
            release.name: [
                path
                for path, digest in contents.items()
                if path in release.files and release.files[path].has(digest)
            ]
            for release in matrix.releases(first)
        }
        paths = max(fitting.values(), key=len)
        if not paths:
            break
        found[" or ".join(name for name in fitting if fitting[name] == paths)] = paths
        contents = {p: d for p, d in contents.items() if p not in paths}
    return found


def _unknown_status(
    path: str,
    digest: str,
    sources: Sources,
    installation: Installation,
    entry: ManifestEntry | None,
) -> FileStatus:
    """A content that neither the matrix nor our manifest knows."""
    markers = _markers(path, sources)
    recorded = installation.record.get(path)
    restored = entry is not None and digest == entry.original
    as_installed = digest == recorded or (recorded is None and not markers and entry is None)
    if restored or as_installed:
        stale = entry is not None
        return FileStatus(path, "pristine", digest, (), known=False, stale=stale)
    state = "patched" if markers and entry is None else "modified"
    return FileStatus(path, state, digest, markers, known=False)


def _markers(path: str, sources: Sources) -> tuple[str, ...]:
    """The patches of ours in a file, by the comments that they leave."""
    found = _MARKERS.findall(sources.read(path) or b"")
    return tuple(dict.fromkeys(name.decode() for name in found))


def facts_of(sources: Sources, release: Release | None) -> tuple[ModelFacts, ...]:
    """From the matrix where every file is as pinned, else from the source.

    Raises:
        UnsupportedError: A file that decides cannot be parsed.
    """
    digest = sources.digest
    if release is not None and all(digest(path) == pin for path, pin in release.evidence.items()):
        if all(digest(path) == pin.original for path, pin in release.files.items()):
            return tuple(_pinned(model, patched=False) for model in release.models)
        if all(digest(path) == pin.patched for path, pin in release.files.items()):
            return tuple(_pinned(model, patched=True) for model in release.models)
    from vllm_eagle3_patch.assess.survey import survey

    return survey(sources)


def _pinned(model: matrix.ModelPin, *, patched: bool) -> ModelFacts:
    return ModelFacts(
        architecture=model.architecture,
        model_types=model.model_types,
        missing=model.missing_patched if patched else model.missing,
        reason=model.reason,
        engine=model.support == "interface",
        limits=model.limits_patched if patched else model.limits,
    )


def known_originals(assessment: Assessment) -> set[str]:
    """The sha256 of files of ours as any release, or this installation's RECORD, has them."""
    paths = assessment.manifest.files if assessment.manifest else {}
    record = assessment.installation.record
    return pinned_originals(paths) | {record[path] for path in paths if path in record}


def pinned_originals(paths: Iterable[str]) -> set[str]:
    """The sha256 of files as any release of the matrix has them."""
    return {
        release.files[path].original
        for release in matrix.releases()
        for path in paths
        if path in release.files
    }


def made_of_originals(entries: Mapping[str, ManifestEntry]) -> dict[str, set[str]]:
    """The sha256 of what the matrix says that the default set makes of each kept original."""
    made: dict[str, set[str]] = {path: set() for path in entries}
    for release in matrix.releases():
        for path, entry in entries.items():
            pin = release.files.get(path)
            if pin is not None and pin.original == entry.original:
                made[path] |= {pin.patched, pin.hardened} - {pin.original}
    return made


def stale_paths(assessment: Assessment) -> tuple[str, ...]:
    """The files of our manifest that vLLM was installed anew with, or came without, since."""
    stale = [status.path for status in assessment.files if status.stale]
    entries = assessment.manifest.files if assessment.manifest else {}
    others = entries.keys() - {status.path for status in assessment.files}
    digests = {path: assessment.sources.digest(path) for path in others}
    if any(digests[path] != entries[path].written for path in others):
        known = known_originals(assessment)
        for path in others:
            gone = digests[path] is None and path in assessment.not_shipped
            if gone or digests[path] in known - {entries[path].written}:
                stale.append(path)
    return tuple(sorted(stale))


def _problems(assessment: Assessment) -> Iterable[Problem]:
    for package in assessment.installation.shadowed:
        yield Problem(
            "shadowed",
            f"another vllm on the path is not imported: {package}",
            "remove it, or name the installation you mean with --site-packages",
        )
    stale = stale_paths(assessment)
    if stale and not any(status.state == "modified" for status in assessment.files):
        yield Problem(
            "stale-state",
            f"not as apply left it, but as installed: {', '.join(stale)}",
            "vLLM was reinstalled, upgraded or restored: apply starts afresh, revert tidies up",
        )
    yield from _lost(assessment)
    yield from _bytecode_problems(assessment)
    yield from _file_problems(assessment)


def _lost(assessment: Assessment) -> Iterable[Problem]:
    ours = {status.path for status in assessment.files if status.entry is not None}
    if assessment.manifest is None or not ours:
        return
    from vllm_eagle3_patch.transaction.state.manifest import lost_originals

    try:
        lost = lost_originals(assessment.installation.root, assessment.manifest)
    except PatchError as error:
        yield Problem.of(error)
        return
    for path in lost:
        if path in ours:
            message = f"the kept original of {path} is gone: revert cannot bring it back"
            yield Problem("original-lost", message, "to get the original back, reinstall vLLM")


def _bytecode_problems(assessment: Assessment) -> Iterable[Problem]:
    if not assessment.patched:
        return
    from vllm_eagle3_patch.ground.text import one_line
    from vllm_eagle3_patch.transaction.bytecode import outdated_unchecked

    root = assessment.installation.root
    for file in (file for path in assessment.patched for file in outdated_unchecked(root, path)):
        yield Problem(
            OUTDATED_BYTECODE,
            f"Python would use {one_line(file)}, compiled before its source was patched and "
            "marked as not to be compared with it",
            "apply removes such files",
        )


def _file_problems(assessment: Assessment) -> Iterable[Problem]:
    for status in assessment.files:
        if status.state == "missing":
            ours = assessment.manifest is not None and status.path in assessment.manifest.files
            hint = "revert puts it back" if ours else "reinstall vLLM: it is incomplete"
            yield Problem("missing", f"{status.path} is missing", hint)
        elif status.state == "modified":
            yield modified(status.path)
    lacking = [s.path for s in assessment.files if s.state == "patched" and s.entry is None]
    if lacking:
        yield Problem(
            "no-original",
            f"patched, but no original is kept here: {', '.join(lacking)}",
            "to get the original back, reinstall vLLM",
        )


def modified(path: str) -> Problem:
    """What is said of a file that someone else changed."""
    return Problem(
        "modified",
        f"{path} was changed by someone else",
        "apply and revert leave it alone unless you say --force (then a copy is kept)",
    )
