"""The command ``doctor``: from what a user named to a diagnosis. Nothing here prints or exits."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_eagle3_patch.doctor.checkpoint import Checkpoint, CheckpointError, read_draft, read_target
from vllm_eagle3_patch.doctor.diagnosis import Diagnosis
from vllm_eagle3_patch.doctor.situation import Situation
from vllm_eagle3_patch.ground import matrix
from vllm_eagle3_patch.ground.errors import UnsupportedError, VllmNotFoundError
from vllm_eagle3_patch.vllm_source.engine import Engine

if TYPE_CHECKING:
    from vllm_eagle3_patch.doctor.serve_options import ServeOptions
    from vllm_eagle3_patch.installation.find import Where
    from vllm_eagle3_patch.vllm_source.sources import Sources


@dataclass(frozen=True)
class Read:
    """A vLLM that was read.

    Attributes:
        patched: What it does after ``apply``, None if not known or no different.
        release: Its release, None if it is none of the matrix.
        name: What sentences call it.
        known: Whether the matrix knows it by its content.
    """

    engine: Engine
    patched: Engine | None
    release: str | None
    where: str
    name: str
    known: bool = True


def diagnose(
    target: str,
    draft: str,
    options: ServeOptions,
    where: Where,
    *,
    release: str | None = None,
    convention: str | None = None,
) -> Diagnosis:
    """Say whether a target and a draft model will work together.

    Args:
        target: A folder with ``config.json``, a ``config.json``, or a cached model id.
        draft: The same of the draft model.
        options: The server's options.
        where: Which installation, if no release is named.
        release: A release of the matrix; no installation is needed then.
        convention: What the draft model's layer ids count, if the user states it.

    Raises:
        CheckpointError: A checkpoint or the release is not there, or cannot be read.
        VllmNotFoundError: There is no vLLM.
        UnsupportedError: Its source cannot be read.
    """
    target_model, draft_model = read_target(target), read_draft(draft)
    read = _of_matrix(release) if release is not None else _installed(where, target_model)
    situation = Situation(
        target_model,
        draft_model,
        options,
        read.engine,
        read.name,
        convention,
        _leading(where),
        _leading(where) if release is None else f"--release {shlex.quote(release)}",
    )
    return Diagnosis(situation, read.release, read.where, read.patched, read.known)


def _leading(where: Where) -> str:
    """The option that leads ``apply`` to the same vLLM."""
    if where.site_packages is not None:
        return f"--site-packages {shlex.quote(str(where.site_packages))}"
    return "" if where.python is None else f"--python {shlex.quote(str(where.python))}"


def _of_matrix(name: str) -> Read:
    if matrix.load(name) is None:
        raise CheckpointError(
            f"no release {name[:80]} in the matrix",
            f"there are {matrix.names()[0]} to {matrix.names()[-1]}; see vllm-eagle3-patch matrix",
            code="release-unknown",
        )
    stock, patched = _pinned(name)
    return Read(stock, patched, name, "the matrix", f"vLLM {name}")


def _installed(where: Where, target: Checkpoint) -> Read:
    from vllm_eagle3_patch.assess.classify import identify
    from vllm_eagle3_patch.vllm_source.read_engine import read
    from vllm_eagle3_patch.vllm_source.sources import Sources

    try:
        installation = where.find()
    except VllmNotFoundError as error:
        hint = f"{error.hint}; or name a release of the matrix: --release 0.17.1"
        raise VllmNotFoundError(error.message, hint, error.code) from error
    sources = Sources(installation.root)
    engine = read(sources, [target.architecture] if target.architecture else [])
    release = identify(sources, installation, None)
    if release is not None and not _as_pinned(sources, release):
        release = None  # Someone edited it: what apply makes of the release says nothing of it.
    version = installation.version or "of unknown version"
    hardened = release is not None and _hardened(sources, release)
    patched = _pinned(release.name)[1] if release is not None and not hardened else None
    if patched is not None and _same(engine, patched, target.architecture):
        patched = None
    return Read(
        engine,
        patched,
        release.name if release else matrix.base_version(installation.version),
        str(installation.package),
        f"vLLM {version}",
        release is not None,
    )


def _as_pinned(sources: Sources, release: matrix.Release) -> bool:
    """Whether every file that patches concern is the release's, as published or as we patch it."""
    return all(
        sources.digest(path) in (pin.original, pin.patched, pin.hardened)
        for path, pin in release.files.items()
    )


def _hardened(sources: Sources, release: matrix.Release) -> bool:
    """Whether ``apply --harden`` was here: what ``apply`` alone makes of the release is less."""
    return any(
        pin.hardened not in (pin.original, pin.patched) and sources.digest(path) == pin.hardened
        for path, pin in release.files.items()
    )


def _pinned(name: str) -> tuple[Engine, Engine | None]:
    """What the matrix says that a release does, and what it does after ``apply`` if that differs.

    Raises:
        UnsupportedError: The matrix does not say.
    """
    table, changes = matrix.load_doctor(name)
    if not table:
        raise UnsupportedError(
            f"the matrix does not say what vLLM {name} does with a draft model",
            "reinstall this tool: its matrix is not whole",
            code="matrix-mismatch",
        )
    engine = Engine.of_table(table)
    return engine, engine.with_changes(changes) if changes else None


def _same(engine: Engine, patched: Engine, architecture: str | None) -> bool:
    """Whether an installation does what a release does after ``apply``, for one target."""
    one = {k: v for k, v in patched.targets.items() if k == architecture}
    return engine.table() == {
        **patched.table(),
        "targets": Engine(targets=one).table().get("targets"),
    }
