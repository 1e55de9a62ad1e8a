"""An installation's source, read into an :class:`~vllm_eagle3_patch.vllm_source.engine.Engine`.

Everything is found in the code by what it does, with Python's own parser; no version number is
asked, and nothing of vLLM is imported.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from email.parser import BytesHeaderParser
from typing import TYPE_CHECKING

from vllm_eagle3_patch.ground.errors import UnsupportedError
from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.vllm_source import allowlist, backends, draft_classes, runner, syntax
from vllm_eagle3_patch.vllm_source.engine import Engine
from vllm_eagle3_patch.vllm_source.paths import DRAFT_MODEL, SPECULATIVE_CONFIG
from vllm_eagle3_patch.vllm_source.registry import Registry
from vllm_eagle3_patch.vllm_source.target_classes import PROTOCOL, SETTER, Targets

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm_eagle3_patch.vllm_source.sources import Sources


def read(sources: Sources, architectures: Iterable[str]) -> Engine:
    """What an installation does with EAGLE-3.

    Args:
        sources: Its files.
        architectures: The target models to read the classes of.

    Raises:
        UnsupportedError: There is no speculative config, or a file that decides is not Python.
    """
    config = _speculative_config(sources)
    registry = Registry(sources)
    targets = Targets(sources, registry)
    read_targets = {name: targets.read(name) for name in dict.fromkeys(architectures)}
    rewritten, mtp = draft_classes.rewritten(config)
    names, classes = draft_classes.draft_classes(sources, registry)
    known, types = draft_classes.speculators(sources)
    own_embeddings, lm_head = runner.weight_sharing(sources)
    image_tokens, fallback = runner.image_token_places(sources)
    return replace(
        _running(sources, config),
        allowlist=_allowlist(config),
        renaming=draft_classes.renaming(sources),
        rewritten=rewritten,
        mtp_architectures=mtp,
        detection=draft_classes.detection(config),
        draft_architectures=names,
        draft_classes=classes,
        targets={name: target for name, target in read_targets.items() if target is not None},
        config_types=draft_classes.config_types(sources),
        speculators_keys=known,
        speculators_types=types,
        hashed_ids=runner.hashed_ids(config),
        reads_use_aux=runner.reads_use_aux(sources),
        backend_option=_has_field(config, "attention_backend"),
        raises_positions=_raises_positions(config),
        targets_metadata=runner.targets_metadata(sources),
        own_embeddings=own_embeddings,
        lm_head=lm_head,
        image_tokens=image_tokens,
        image_fallback=fallback,
        transformers=_requirement(sources, "transformers"),
    )


def read_family(sources: Sources, registry: Registry) -> Engine:
    """What limits EAGLE-3 for the family's models; the rest of it is not read and stays unset.

    Raises:
        UnsupportedError: As for :func:`read`.
    """
    targets = Targets(sources, registry)
    models = registry.family_models()
    return replace(
        _running(sources, _speculative_config(sources)),
        draft_classes={
            path: draft_classes.draft_class(sources, path)
            for path in filter(sources.exists, (DRAFT_MODEL,))
        },
        targets={model.architecture: targets.read_layers(model) for model in models},
    )


def _running(sources: Sources, config: ast.Module) -> Engine:
    """What the runners, the backends and the KV cache manager do."""
    return Engine(
        keys=runner.keys(sources),
        decides_layers=runner.config_decides_layers(config, sources),
        newer_runner=runner.newer_runner(sources),
        inherits_backend=backends.inherits_backend(sources),
        refuses_backend=backends.refuses_backend(sources),
        own_backend=backends.own_backend(sources),
        forced_backends=backends.forced_backends(sources),
        one_page_size=runner.one_page_size(sources),
        dual_batch_overlap=runner.dual_batch_overlap(sources),
    )


def architectures_of_interest(sources: Sources) -> tuple[str, ...]:
    """The targets that the matrix holds: the family, and all whose file has the interface."""
    registry = Registry(sources)
    family = {model.architecture for model in FAMILY}
    marks = (PROTOCOL.encode(), SETTER.encode())
    found = []
    for architecture, (module, _) in registry.entries.items():
        content = sources.read(f"{module.replace('.', '/')}.py") or b""
        draft = architecture.startswith("Eagle") or "eagle" in module
        if architecture in family or (not draft and any(mark in content for mark in marks)):
            found.append(architecture)
    return tuple(sorted(found))


_TYPES_OF_INTEREST = ("deepseek", "glm", "kimi")


def for_matrix(engine: Engine) -> Engine:
    """What the matrix keeps: targets with the interface or of the family, and types near it."""
    family = {model.architecture for model in FAMILY}

    def near(names: Mapping[str, str]) -> dict[str, str]:
        return {k: v for k, v in names.items() if k.startswith(_TYPES_OF_INTEREST)}

    return replace(
        engine,
        rewritten=near(engine.rewritten),
        mtp_architectures=near(engine.mtp_architectures),
        config_types=tuple(t for t in engine.config_types if t.startswith(_TYPES_OF_INTEREST)),
        targets={
            name: target
            for name, target in engine.targets.items()
            if target.interface or name in family
        },
    )


def _speculative_config(sources: Sources) -> ast.Module:
    for path in SPECULATIVE_CONFIG:
        if f"class {allowlist.CONFIG}".encode() in (sources.read(path) or b""):
            return sources.module(path)
    raise UnsupportedError(
        "this vLLM has no speculative config where every release has it",
        "name the installation's site-packages with --site-packages, or a release with --release",
        code="not-vllm",
    )


def _allowlist(config: ast.Module) -> tuple[str, ...] | None:
    owner = syntax.find_class(config, allowlist.CONFIG)
    lists = allowlist.allowlists(ast.Module([owner], [])) if owner else []
    if not lists:
        return None
    admitted = set(lists[0]).intersection(*map(set, lists[1:]))
    return tuple(item for item in lists[0] if item in admitted)


def _has_field(config: ast.Module, name: str) -> bool:
    owner = syntax.find_class(config, allowlist.CONFIG)
    return owner is not None and any(
        isinstance(statement, ast.AnnAssign) and syntax.last_name(statement.target) == name
        for statement in owner.body
    )


def _raises_positions(config: ast.Module) -> bool:
    owner = syntax.find_class(config, allowlist.CONFIG)
    method = "_maybe_override_draft_max_position_embeddings"
    return syntax.find_method(owner, method) is not None


def _requirement(sources: Sources, distribution: str) -> str:
    """What vLLM's metadata requires of a distribution, without extras and markers."""
    for metadata in sorted(sources.root.glob("*.dist-info/METADATA")):
        name = metadata.parent.name.partition("-")[0]
        if "vllm" not in name or not (sources.root / "vllm").is_dir():
            continue
        header = BytesHeaderParser().parsebytes(metadata.read_bytes())
        for line in header.get_all("Requires-Dist", []):
            required = line.partition(";")[0].strip()
            rest = required[len(distribution) :].strip()
            if required.startswith(distribution) and (not rest or rest[0] in "<>=!~("):
                return str(rest)
    return ""
