"""Plan: what apply would do, all of it in memory, and how it would end."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vllm_eagle3_patch import __version__
from vllm_eagle3_patch.assess.assessment import Problem
from vllm_eagle3_patch.assess.classify import by_release, facts_of
from vllm_eagle3_patch.assess.decision import Options, Plan
from vllm_eagle3_patch.assess.grounds import unproven
from vllm_eagle3_patch.ground.digest import sha256
from vllm_eagle3_patch.ground.errors import UnsupportedError
from vllm_eagle3_patch.ground.family import FAMILY, select_models

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_eagle3_patch.assess.assessment import Assessment, FileStatus
    from vllm_eagle3_patch.assess.model_facts import ModelFacts
    from vllm_eagle3_patch.codemod.compose import Composed
    from vllm_eagle3_patch.codemod.patch import Patch
    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.ground.matrix import FilePin
    from vllm_eagle3_patch.transaction.change import Change
    from vllm_eagle3_patch.vllm_source.sources import Sources

READY, WOULD_CHANGE, CANNOT, MODIFIED = 0, 1, 4, 5
_UNTRUSTED = {"state-corrupt", "state-newer", "state-unsafe"}


def plan(assessment: Assessment, options: Options, *, contents: bool = True) -> Plan:
    """Decide what apply would do, in the order that the contract gives; the first match wins.

    Args:
        assessment: The installation as classified; no journal and no lock is in the way.
        options: What the user selected.
        contents: Whether the changes are wanted and not only how it would end: for a pinned
            installation that is known without running a codemod.

    Raises:
        PatchError: A file or a kept original cannot be read.
    """
    if not assessment.facts and options.force:
        assessment = assessment._replace(facts=_facts_of_originals(assessment, options))
    candidates = in_question(assessment, options)
    names = tuple(facts.architecture for facts in candidates)
    blocked = (
        _ready(assessment, options, candidates)
        or _unsupported(assessment, options, candidates)
        or ((MODIFIED, ()) if untrusted(assessment) else None)
        or _not_ours(assessment, options)
        or ((CANNOT, ()) if any(facts.refuted for facts in candidates) else None)
        or _mixed(assessment, options)
        or _unpinned(assessment, options)
    )
    if blocked is not None:
        code, problems = blocked
        if code == READY:
            problems = unproven(candidates)
        state = _state(assessment, code, candidates)
        return Plan(code, state, problems=problems, candidates=names)
    if not contents and _matrix_knows(assessment, options):
        return Plan(WOULD_CHANGE, _state(assessment, WOULD_CHANGE, candidates), candidates=names)
    try:
        composed = compose(assessment, options, candidates)
    except _AnchorsError as missing:
        return Plan(CANNOT, "unsupported", problems=missing.problems, candidates=names)
    changes, before = _changes(assessment, options, composed)
    code = WOULD_CHANGE if changes else READY
    problems = () if changes else unproven(candidates)
    return Plan(code, _state(assessment, code, candidates), changes, before, problems, names)


def _facts_of_originals(assessment: Assessment, options: Options) -> tuple[ModelFacts, ...]:
    """What held before a file of ours was broken beyond reading."""
    from vllm_eagle3_patch.assess.survey import survey

    try:
        return survey(_base(assessment, options))
    except UnsupportedError:
        return ()


def _matrix_knows(assessment: Assessment, options: Options) -> bool:
    """Whether this is a release as published, which the default set is pinned for."""
    release = assessment.release
    return (
        release is not None
        and options.default_set
        and release.support == "patch"
        and all(s.digest == release.files[s.path].original for s in assessment.files)
    )


def in_question(assessment: Assessment, options: Options) -> tuple[ModelFacts, ...]:
    """The models that decide: those named, else those that are ready or can be made ready."""
    if options.models:
        named = {model.architecture for model in select_models(options.models)}
        return tuple(facts for facts in assessment.facts if facts.architecture in named)
    return tuple(facts for facts in assessment.facts if options.allows(facts))


def wanted(facts: ModelFacts, options: Options) -> tuple[str, ...]:
    """What a model lacks of the patches that are selected."""
    return tuple(name for name in facts.missing if options.selects(name))


Blocked = tuple[int, tuple[Problem, ...]]


def _ready(
    assessment: Assessment, options: Options, candidates: Sequence[ModelFacts]
) -> Blocked | None:
    """Every model in question has what was selected, and none of it is an older version's."""
    if any(status.state == "missing" for status in assessment.files):
        return None
    possible = all(map(options.allows, candidates))
    if not candidates or not possible or any(wanted(facts, options) for facts in candidates):
        return None
    if any(facts.refuted for facts in candidates):
        return None
    if options.harden or any(name in options.only for name in _beyond_ready(options)):
        return None
    if _outdated(assessment, options):
        return None
    return READY, ()


def untrusted(assessment: Assessment) -> bool:
    """Whether what we kept here cannot be read: nothing is built upon it then."""
    return any(problem.code in _UNTRUSTED for problem in assessment.problems)


def _outdated(assessment: Assessment, options: Options) -> bool:
    """Whether what we wrote is not what this version would write for the default set."""
    manifest, release = assessment.manifest, assessment.release
    if manifest is None or any(s.state in ("modified", "missing") for s in assessment.files):
        return False
    if manifest.tool != __version__:
        return True
    if release is None or not options.default_set:
        return False
    return not all(
        status.digest in (release.files[status.path].patched, release.files[status.path].hardened)
        for status in assessment.files
    )


def _beyond_ready(options: Options) -> set[str]:
    """The patches that no model lacks to be ready, if any were named."""
    if not options.only:
        return set()
    from vllm_eagle3_patch.patches._discovery import all_patches

    return {patch.name for patch in all_patches() if patch.harden or patch.companion}


def _unsupported(
    assessment: Assessment, options: Options, candidates: Sequence[ModelFacts]
) -> Blocked | None:
    """Nothing can be done for a model that was named, or for any model."""
    hopeless = [
        facts
        for facts in (candidates if options.models else assessment.facts)
        if not options.allows(facts)
    ]
    absent = _not_shipped(assessment, options)
    if candidates and not absent and not (options.models and hopeless):
        return None
    if not assessment.facts and _not_ours(assessment, options):
        return None  # The file that cannot be read is what is in the way, and is told next.
    if not assessment.facts:
        if any(problem.code == "not-python" for problem in assessment.problems):
            return CANNOT, ()
        message = "this vLLM ships no model of the DeepSeek-V2 family that is known here"
        return CANNOT, (Problem("unsupported", message, "see the command matrix"),)
    if absent:
        message = f"this vLLM does not ship {' or '.join(absent)}"
        return CANNOT, (Problem("not-shipped", message, "check without --model lists what it has"),)
    reasons = tuple(dict.fromkeys(facts.reason or "" for facts in hopeless))
    hint = "use a release that the command matrix lists as native or patch"
    if any(facts.engine for facts in hopeless):
        hint = "to add the interface all the same (extracting hidden states), use --interface-only"
    return CANNOT, tuple(Problem("unsupported", reason, hint) for reason in reasons)


def _not_shipped(assessment: Assessment, options: Options) -> tuple[str, ...]:
    """The models that the user named and this vLLM does not have."""
    shipped = {facts.architecture for facts in assessment.facts}
    return tuple(
        name
        for name in options.models
        if not any(model.architecture in shipped for model in select_models((name,)))
    )


def _not_ours(assessment: Assessment, options: Options) -> Blocked | None:
    """A file concerned is missing, or was changed by someone else."""
    in_the_way = any(
        status.state == "missing" or (status.state == "modified" and not options.force)
        for status in assessment.files
        if _concerns(assessment, options, status)
    )
    return (MODIFIED, ()) if in_the_way else None


def _concerns(assessment: Assessment, options: Options, status: FileStatus) -> bool:
    """Whether a patch that the user selected changes a file."""
    patches = assessment.release.files[status.path].patches if assessment.release else ()
    return not patches or any(map(options.selects, patches))


def _mixed(assessment: Assessment, options: Options) -> Blocked | None:
    """The files are of different releases, and the user did not allow that."""
    if options.unpinned or assessment.release is not None:
        return None
    found = by_release(assessment)
    if len(found) < 2:  # noqa: PLR2004  a mixture is of two at least
        return None
    each = "; ".join(f"of {name}: {', '.join(paths)}" for name, paths in found.items())
    hint = "reinstall vLLM; or, to patch it where every anchor is found, use --unpinned"
    return CANNOT, (Problem("mixed", f"files of different releases; {each}", hint),)


def _unpinned(assessment: Assessment, options: Options) -> Blocked | None:
    """A file's content is not in the matrix, and the user did not allow that."""
    unknown = [s.path for s in assessment.files if not s.known and s.state == "pristine"]
    if options.unpinned or not unknown:
        return None
    message = f"not as in any release of the matrix: {', '.join(unknown)}"
    hint = "to patch it where every anchor is found, use --unpinned"
    return CANNOT, (Problem("unpinned", message, hint),)


class _AnchorsError(Exception):
    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__()
        self.problems = problems


def compose(
    assessment: Assessment, options: Options, candidates: Sequence[ModelFacts]
) -> dict[str, Composed]:
    """The files with all needed patches in them, from the originals.

    Raises:
        UnsupportedError: The result is not what the matrix pins.
    """
    from vllm_eagle3_patch.codemod.compose import Task
    from vllm_eagle3_patch.codemod.compose import compose as compose_file
    from vllm_eagle3_patch.codemod.patch import has_protocol

    base = _base(assessment, options)
    models = _models(assessment)
    protocol = has_protocol(base)
    needed = _needed(assessment, options, candidates, base)
    by_path: dict[str, list[Patch]] = {}
    for patch in needed:
        for path in patch.paths(base):
            by_path.setdefault(path, []).append(patch)
    composed: dict[str, Composed] = {}
    lacking = {name for facts in candidates for name in wanted(facts, options)}
    failures: list[tuple[Patch, UnsupportedError]] = [
        (patch, _no_file(patch))
        for patch in needed
        if patch.name in lacking and patch.needs_file and not patch.paths(base)
    ]
    for path, patches in by_path.items():
        pin = _original_pin(assessment, base, path)
        file = compose_file(Task(base.text(path), tuple(patches), models, protocol, pin))
        failures.extend(file.failures)
        if file.patches:
            composed[path] = file
    if failures:
        failures.sort(key=lambda failure: needed.index(failure[0]))
        raise _AnchorsError(tuple(Problem.of(error) for _, error in failures))
    if not (options.only or options.skip or options.models):
        _as_pinned(assessment, composed, hardened=options.harden)
    return composed


def _no_file(patch: Patch) -> UnsupportedError:
    return UnsupportedError(
        f"the file that the patch {patch.name} changes is not there",
        "reinstall vLLM: it is incomplete",
        code="missing",
    )


def _original_pin(assessment: Assessment, base: Sources, path: str) -> FilePin | None:
    """What the matrix knows of a file that is as its release published it."""
    pin = assessment.release.files.get(path) if assessment.release else None
    return pin if pin is not None and base.digest(path) == pin.original else None


def _base(assessment: Assessment, options: Options) -> Sources:
    """The originals; a file of ours that was edited counts as ours when ``--force`` is given."""
    base = assessment.originals
    if not options.force or assessment.manifest is None:
        return base
    from vllm_eagle3_patch.transaction.state.manifest import original_bytes

    entries = assessment.manifest.files
    edited = [s.path for s in assessment.files if s.state == "modified" and s.path in entries]
    root = assessment.installation.root
    return base.with_overlay({path: original_bytes(root, entries[path]) for path in edited})


def _needed(
    assessment: Assessment, options: Options, candidates: Sequence[ModelFacts], base: Sources
) -> tuple[Patch, ...]:
    """What a model in question lacks and is selected, and what is in place already."""
    from vllm_eagle3_patch.patches._discovery import chosen_patches

    names = {facts.architecture for facts in candidates}
    facts_before = candidates
    if any(status.entry is not None for status in assessment.files) or options.force:
        facts_before = facts_of(base, assessment.release)
        facts_before = tuple(f for f in facts_before if f.architecture in names)
    return chosen_patches(
        {name for facts in facts_before for name in facts.missing},
        harden=options.harden,
        only=options.only,
        skip=options.skip,
        in_place={n for s in assessment.files if s.entry is not None for n in s.entry.patches},
    )


def _models(assessment: Assessment) -> tuple[FamilyModel, ...]:
    shipped = {facts.architecture for facts in assessment.facts}
    return tuple(model for model in FAMILY if model.architecture in shipped)


def _as_pinned(assessment: Assessment, composed: Mapping[str, Composed], *, hardened: bool) -> None:
    from vllm_eagle3_patch.patches._discovery import all_patches

    release = assessment.release
    if release is None or not assessment.pinned:
        return
    hardening = {patch.name for patch in all_patches() if patch.harden}
    for path, file in composed.items():
        pin = release.files[path]
        if set(file.patches) - hardening != set(pin.patches):
            continue  # --interface-only put more there, now or earlier.
        # What was hardened once stays so.
        known = {pin.hardened} if hardened else {pin.patched, pin.hardened}
        if sha256(file.content) not in known:
            raise UnsupportedError(
                f"{path}: the patched file is not the one that the matrix pins for {release.name}",
                "reinstall this tool: its codemods, its matrix or LibCST do not belong together",
                code="matrix-mismatch",
            )


def _changes(
    assessment: Assessment, options: Options, composed: Mapping[str, Composed]
) -> tuple[tuple[Change, ...], dict[str, bytes]]:
    from vllm_eagle3_patch.transaction.change import Change

    entries = assessment.manifest.files if assessment.manifest else {}
    changes, before = [], {}
    for status in assessment.files:
        file = composed.get(status.path)
        if file is None or status.digest is None or sha256(file.content) == status.digest:
            continue
        before[status.path] = assessment.sources.read(status.path) or b""
        changes.append(
            Change(
                path=status.path,
                expected=status.digest,
                after=file.content,
                patches=file.patches,
                keep_aside=status.state == "modified" and status.path in entries,
                made_of=status.entry.original if status.entry is not None else None,
            )
        )
    return tuple(changes), before


def _state(assessment: Assessment, code: int, candidates: Sequence[ModelFacts]) -> str:
    """The installation in one word, as in the JSON of ``check``."""
    files = assessment.files
    if any(status.state in ("modified", "missing") for status in files):
        return "modified"
    ours = any(status.state == "patched" for status in files)
    if code == READY and any(facts.missing for facts in candidates):
        return "patchable"  # What was selected is in place; more could be.
    if code == READY:
        return "patched" if ours else "ready"
    if code == WOULD_CHANGE:
        return "patchable"
    # With --interface-only everything that can be added may be in place all the same.
    engine = [facts.interface for facts in assessment.facts if facts.engine]
    return "patched" if ours and engine and all(engine) else "unsupported"


def unified_diff(path: str, before: bytes, after: bytes) -> str:
    """A unified diff that ``patch -p1`` accepts; bytes that are not UTF-8 survive as surrogates."""
    import difflib

    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{path}", f"b/{path}")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _lines(content: bytes) -> list[str]:
    text = content.decode("utf-8", "surrogateescape")
    return [line for line in re.split(r"(?<=\n)", text) if line]
