"""Whether the target model gets past vLLM's gates: the allowlist, the interface, the wrapper."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from vllm_eagle3_patch.doctor.finding import ERROR, WARNING, Finding, report, rule
from vllm_eagle3_patch.ground import matrix
from vllm_eagle3_patch.vllm_source.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm_eagle3_patch.doctor.situation import Situation


def _mend(situation: Situation, upstream: str) -> str:
    """What to do about a target that this vLLM does not support."""
    if situation.mendable:
        return f"{situation.apply_command}, or use {upstream}"
    return f"use {upstream}"


@cache
def _engines() -> tuple[tuple[str, Engine], ...]:
    """Every release of the matrix, newest first, with what it does as published."""
    return tuple(
        (name, Engine.of_table(table))
        for name in reversed(matrix.names())
        if (table := matrix.load_doctor(name)[0])
    )


def _first(holds: Callable[[Engine], bool]) -> tuple[str, Engine] | None:
    """The first release from which on something holds; None if not in the newest."""
    first = None
    for name, engine in _engines():
        if not holds(engine):
            break
        first = name, engine
    return first


def _admits(engine: Engine, kind: str | None) -> bool:
    allowed = engine.allowlist
    return allowed is None or kind is None or any(item in kind for item in allowed)


def _starts(engine: Engine, situation: Situation) -> bool:
    """Whether a release passes the target at every gate that this module knows."""
    kind = engine.targets.get(situation.target.architecture or "")
    return (
        kind is not None
        and kind.interface
        and kind.language_model
        and _admits(engine, situation.target.text_type)
    )


def _upstream(situation: Situation, otherwise: str) -> str:
    """The first release that takes the target: one answer, whichever gate is shut here."""
    first = _first(lambda engine: _starts(engine, situation))
    return otherwise if first is None else f"vLLM {first[0]} or later"


def _admitting(situation: Situation) -> str:
    """The first release that takes the target, or at least admits it, and why it does."""
    kind = situation.target.text_type
    first = _first(lambda engine: _starts(engine, situation)) or _first(
        lambda engine: _admits(engine, kind)
    )
    if first is None:
        return "a release whose list holds it"
    name, engine = first
    why = "has no such list" if engine.allowlist is None else f"admits {kind}"
    return f"vLLM {name} or later, which {why}"


@rule("target-not-allowed", reports=(1, 2, 3))
def target_not_allowed(situation: Situation) -> Iterator[Finding]:
    """The speculative config refuses the target's text model type.

    Reports 1, 2 and 3. The test is by substring and asks the language model's config; the list was
    dropped in 0.22.0 (vllm/config/speculative.py).
    """
    allowed, kind = situation.engine.allowlist, situation.target.text_type
    if not situation.eagle3 or allowed is None or kind is None:
        return
    if any(item in kind for item in allowed):
        return
    yield Finding(
        "target-not-allowed",
        ERROR,
        f"the speculative config of {situation.release} admits only targets whose text model type "
        f"contains one of {', '.join(allowed)}; this target's is {kind}",
        'the server stops at once: "Eagle3 is only supported for [...] models"',
        _mend(situation, _admitting(situation)),
        "model_type of the target's text config",
        report(1, "https://github.com/vllm-project/vllm/issues/31254"),
    )


@rule("interface-missing", "wrapper-missing", reports=(3, 4, 5))
def interface_missing(situation: Situation) -> Iterator[Finding]:
    """The target's class, or the multimodal model around it, lacks the EAGLE-3 interface.

    Reports 3, 4 and 5. The runner asks the outermost model, after both models have loaded
    (vllm/v1/worker/gpu_model_runner.py, load_model).
    """
    if not situation.eagle3 or not situation.uses_aux or situation.target.architecture is None:
        return
    name, kind = situation.target.architecture, situation.target_class
    consequence = (
        "after all weights have loaded the server stops: "
        '"Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested"'
    )
    source = report(4, "https://github.com/vllm-project/vllm/pull/45546")
    if kind is None:
        yield Finding(
            "interface-missing",
            ERROR,
            f"{situation.release} has no target class of the name {name} with the EAGLE-3 "
            "interface",
            consequence,
            _mend(
                situation, "a release that ships it; `vllm-eagle3-patch matrix` lists the family"
            ),
            "vllm/model_executor/models/registry.py",
            source,
        )
        return
    text = kind.language_model if kind.wrapper and situation.family else kind.interface
    if not text and not (kind.wrapper and not situation.family):
        part = "the language model" if kind.wrapper else "the class"
        yield Finding(
            "interface-missing",
            ERROR,
            f"{part} of {name} does not implement the EAGLE-3 interface in {situation.release}",
            consequence,
            _mend(situation, _upstream(situation, "vLLM 0.18.0 or later")),
            "SupportsEagle3 among the bases of the class in the registry",
            source,
        )
    elif not kind.language_model and not kind.wrapper:
        yield Finding(
            "interface-missing",
            ERROR,
            f"{name} has the EAGLE-3 interface, but its forward collects no aux hidden states",
            'the first step fails: "too many values to unpack"',
            "reinstall vLLM, or use another release",
            "forward of the target's model class",
            source,
        )
    if kind.wrapper and not kind.interface:
        yield Finding(
            "wrapper-missing",
            ERROR,
            f"{name}, the multimodal model around the language model, does not hand the EAGLE-3 "
            f"calls on in {situation.release}",
            consequence,
            _mend(situation, _upstream(situation, "vLLM 0.18.0 or later for Kimi-K2.5")),
            f"class {name} in the registry's file",
            report(5, "https://github.com/sgl-project/sglang/pull/19689"),
        )
    if kind.lacking_files:
        yield Finding(
            "interface-missing",
            WARNING,
            f"on one platform {name} comes from a file whose class lacks the interface: "
            f"{', '.join(kind.lacking_files)}",
            "there the server stops after all weights have loaded",
            "serve it on the other platform, or use a later release",
            kind.lacking_files[0],
            source,
        )


@rule("image-token", reports=(6,))
def image_token(situation: Situation) -> Iterator[Finding]:
    """The V1 proposer reads an image token's id that the multimodal target's config lacks.

    Report 6: load_model of vllm/v1/spec_decode/eagle.py (llm_base_proposer.py from 0.20.0 on). The
    runner under v1/worker/gpu reads none.
    """
    engine, name = situation.engine, situation.target.architecture
    if not situation.multimodal or engine.image_fallback is None or name in engine.image_tokens:
        return
    if situation.newer_runner is not None or "image_token_index" in situation.target.config:
        return
    family = situation.family
    if family is not None and (family.wrapper is None or family.wrapper.image_token is None):
        return
    has = [key for key in situation.target.config if "token_id" in key and "placeholder" in key]
    instead = f"; it has {', '.join(has)}" if has else ""
    yield Finding(
        "image-token",
        ERROR if family is not None else WARNING,
        f"{situation.release} has no branch for {name} and reads {engine.image_fallback}, which "
        f"this config lacks{instead}",
        "the draft model's load fails: \"object has no attribute 'image_token_index'\"",
        _mend(situation, "vLLM 0.18.0 or later for Kimi-K2.5"),
        "image_token_index of the target's config",
        report(6, "https://github.com/ROCm/vllm/pull/1080"),
    )


@rule("multimodal-draft", reports=(7,))
def multimodal_draft(situation: Situation) -> Iterator[Finding]:
    """The draft model's class refuses a multimodal target's input embeddings.

    Report 7: vllm/model_executor/models/llama_eagle3.py, 0.10.1 to 0.11.0.
    """
    kind = situation.draft_class
    if kind is None or not kind.refuses_embeddings or not situation.multimodal:
        return
    yield Finding(
        "multimodal-draft",
        ERROR,
        f"the class of EAGLE-3 draft models in {situation.release} does not take a multimodal "
        "target's embeddings, which the proposer always passes",
        '"Eagle3LlamaForCausalLM does not support multimodal inputs yet"',
        "use vLLM 0.11.1 or later",
        kind.path,
        report(7, "https://github.com/vllm-project/vllm/pull/25961"),
    )
