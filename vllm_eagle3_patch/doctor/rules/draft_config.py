"""Whether vLLM finds a class for the draft model: architecture, model type, method, remote code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_eagle3_patch.doctor.draft_view import is_speculators
from vllm_eagle3_patch.doctor.expressions import NotUnderstoodError, evaluate
from vllm_eagle3_patch.doctor.finding import ERROR, INFO, WARNING, Finding, report, rule
from vllm_eagle3_patch.doctor.layers import places
from vllm_eagle3_patch.doctor.situation import METHOD

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm_eagle3_patch.doctor.situation import Situation

_CONFIG = "architectures of the draft model's config"
_PARALLEL = "peagle"
_REMOTE_TYPES = ("kimi_k2",)
"""Model types of public draft models that Transformers does not know."""


def looks_like_eagle3(situation: Situation) -> bool:
    """Whether anything in a draft model's config or weights says EAGLE-3."""
    draft = situation.given_draft
    names = draft.config.get("architectures") or []
    signs = (
        any("eagle3" in str(name).lower() for name in names),
        draft.config.get("speculators_model_type") == METHOD,
        bool(places(draft)),
        "draft_vocab_size" in draft.config,
        "eagle_config" in draft.config,
        draft.weights is not None and draft.weights.name("d2t", "midlayer.hidden_norm.weight"),
    )
    return any(signs)


@rule("draft-architecture", reports=(8, 9))
def draft_architecture(situation: Situation) -> Iterator[Finding]:
    """The name that vLLM makes of the draft model's architecture is not in its registry.

    Reports 8 and 9: EAGLEConfig (vllm/transformers_utils/configs/eagle.py) and registry.py.
    """
    name, renamed = situation.draft.architecture, situation.renamed
    if not situation.eagle3 or name is None or situation.rewritten_type is not None:
        return
    kind = situation.given_draft.config.get("speculators_model_type", METHOD)
    if kind != METHOD:
        parallel = kind == _PARALLEL
        yield Finding(
            "draft-architecture",
            WARNING if parallel else ERROR,
            f'the draft model\'s speculators_model_type is "{str(kind)[:40]}", not "{METHOD}"',
            "it drafts in parallel, which wants parallel_drafting in the speculative config and a "
            "vLLM that knows it; that is not judged here"
            if parallel
            else "its class is not that of an EAGLE-3 draft model: the load fails",
            "serve the draft model's folder by itself (vllm serve DRAFT), so that vLLM takes the "
            "speculative config from it"
            if parallel
            else "use an EAGLE-3 draft model, or the method that this one is for",
            "speculators_model_type of the draft model's config",
            report(41, "https://github.com/vllm-project/vllm/pull/21737"),
        )
        return
    if is_speculators(situation.given_draft) and situation.draft.speculators is None:
        yield Finding(
            "draft-architecture",
            ERROR,
            f"{situation.release} does not know the speculators format of this draft model",
            '"Model architectures [...] are not supported for now"',
            "use vLLM 0.10.2 or later",
            "speculators_config of the draft model's config",
            report(8, "https://github.com/vllm-project/vllm/issues/24967"),
        )
        return
    if renamed is None:
        yield Finding(
            "draft-architecture",
            WARNING,
            f"how {situation.release} renames a draft model's architecture is not understood, so "
            f"whether it knows {name} is not certain",
            "not known",
            "compare vllm/transformers_utils/configs/eagle.py with a release's",
            "vllm/transformers_utils/configs/eagle.py",
            report(8, "https://github.com/vllm-project/vllm/issues/24967"),
        )
        return
    if renamed in situation.engine.draft_architectures:
        return
    known = ", ".join(sorted(situation.engine.draft_architectures)) or "none"
    turned = f" becomes {renamed}, which" if renamed != name else ""
    yield Finding(
        "draft-architecture",
        ERROR,
        f"the draft model's architecture {name}{turned} is not in the registry of "
        f"{situation.release} (EAGLE-3 draft models there: {known})",
        '"Model architectures [...] are not supported for now"',
        _other_name(situation, name),
        _CONFIG,
        report(9, "https://github.com/vllm-project/vllm/pull/36361")
        if "Deepseek" in name
        else report(8, "https://github.com/vllm-project/vllm/issues/24967"),
    )


def _other_name(situation: Situation, name: str) -> str:
    if "Deepseek" in name or situation.draft.mla:
        return (
            "use vLLM 0.18.0 or later (Eagle3DeepseekV2ForCausalLM), or the grouped-query twin of "
            "this checkpoint, such as kimi-k2.5-eagle3 instead of kimi-k2.5-eagle3-mla"
        )
    plain = name.removesuffix("Eagle3")
    source = situation.engine.renaming.get(METHOD, "")
    try:
        other = evaluate(source, {"arch": plain})
    except NotUnderstoodError:
        other = None
    if plain != name and other in situation.engine.draft_architectures:
        return f'use vLLM 0.10.2 or later, or write "architectures": ["{plain}"] into its config'
    return "use vLLM 0.10.2 or later"


@rule("draft-model-type", reports=(9, 10))
def draft_model_type(situation: Situation) -> Iterator[Finding]:
    """The draft model's type is turned into an MTP type, or needs remote code to be known.

    Reports 9 and 10: SpeculativeConfig.hf_config_override, and _CONFIG_REGISTRY of
    vllm/transformers_utils/config.py.
    """
    kind = situation.draft.model_type
    if not situation.eagle3 or kind is None or situation.draft.speculators is not None:
        return
    new = situation.rewritten_type
    if new is not None:
        given = situation.rewritten_architecture or "an MTP class"
        yield Finding(
            "draft-model-type",
            ERROR,
            f"{situation.release} takes a draft model of type {kind} for an MTP model: it becomes "
            f"{new} with architecture {given}, looked up as {situation.renamed}",
            '"Model architectures [...] are not supported for now"',
            f'write "model_type": "{_type_instead(situation)}" into the draft model\'s config',
            "model_type of the draft model's config",
            report(9, "https://github.com/vllm-project/vllm/pull/36361"),
        )
    elif kind in _REMOTE_TYPES and kind not in situation.engine.config_types:
        remote = "auto_map" in situation.draft.config
        yield Finding(
            "draft-model-type",
            WARNING if remote else ERROR,
            f"neither {situation.release} nor Transformers has a config class for the draft "
            f"model's type {kind}"
            + (", so its own code is needed" if remote else ", and the config has no auto_map"),
            "without --trust-remote-code and that code the draft model's config does not load",
            "use vLLM 0.18.0 or later, which knows this type",
            "model_type of the draft model's config",
            report(10, "https://github.com/sgl-project/sglang/issues/25673"),
        )


def _type_instead(situation: Situation) -> str:
    return "kimi_k2" if situation.draft.mla else "llama"


@rule("method", "speculative-tokens", reports=(10, 41))
def method(situation: Situation) -> Iterator[Finding]:
    """The method that will run is not EAGLE-3, although the draft model is; or none will.

    Reports 10 and 41; method detection by name is in SpeculativeConfig.__post_init__.
    """
    source = report(41, "https://github.com/sgl-project/sglang/pull/21272")
    fix = situation.speculative_option
    evidence = "--speculative-config"
    if situation.options.speculates is False and situation.options.method is None:
        yield Finding(
            "method",
            ERROR,
            "the command line has no --speculative-config",
            "the server starts and does not speculate",
            fix,
            evidence,
            source,
        )
        return
    if not situation.eagle3 and looks_like_eagle3(situation):
        how = "is given" if situation.options.method else "is what vLLM concludes from its name"
        yield Finding(
            "method",
            ERROR,
            f'the draft model is an EAGLE-3 head, but method "{situation.method}" {how}',
            "its fc is skipped or its class not found; acceptance length was exactly 1.00, with "
            "no error",
            fix,
            evidence,
            source,
        )
    elif not situation.eagle3:
        yield Finding(
            "method",
            WARNING,
            f'method "{situation.method}" is not EAGLE-3, and only EAGLE-3 is judged here',
            "not known",
            "name an EAGLE-3 draft model",
            evidence,
            source,
        )
    elif not looks_like_eagle3(situation):
        yield Finding(
            "method",
            WARNING,
            "nothing in the draft model's config says that it is an EAGLE-3 head",
            "an EAGLE-1 head or an MTP module under the method eagle3 does not load, or accepts "
            "nothing",
            "check the model card for EAGLE-3",
            _CONFIG,
            source,
        )
    if situation.options.speculates and situation.options.num_speculative_tokens is None:
        predicts = situation.draft.integer("n_predict")
        if predicts is None and not is_speculators(situation.given_draft):
            yield Finding(
                "speculative-tokens",
                ERROR,
                "the speculative config has no num_speculative_tokens",
                '"num_speculative_tokens must be provided"',
                fix,
                evidence,
                "vllm/config/speculative.py",
            )


def remote_files(mapping: Mapping[str, Any]) -> list[str]:
    """The files that an ``auto_map`` names; one entry may list several classes, or null."""
    values = [
        v for value in mapping.values() for v in (value if isinstance(value, list) else [value])
    ]
    references = [value for value in values if isinstance(value, str)]
    return sorted({f"{name.rpartition('--')[2].partition('.')[0]}.py" for name in references})


@rule("auto-map", reports=(11,))
def auto_map(situation: Situation) -> Iterator[Finding]:
    """The draft model's config points at files of code that are not beside it.

    Report 11. They are read with --trust-remote-code, or where the type is not known without them.
    """
    mapping, folder = situation.given_draft.config.get("auto_map"), situation.given_draft.folder
    if not isinstance(mapping, dict) or not mapping:
        return
    names = remote_files(mapping)
    missing = [name for name in names if folder is not None and not (folder / name).is_file()]
    if folder is not None and not missing:
        return
    own = remote_files({"AutoConfig": mapping.get("AutoConfig")})
    needed = situation.options.trust_remote_code and bool(set(own) & set(missing))
    where = "are not beside it" if folder is not None else "may not be beside it"
    yield Finding(
        "auto-map",
        (ERROR if needed else WARNING) if missing else INFO,
        f"the draft model's config has an auto_map whose files {where}: "
        f"{', '.join(missing or names)}",
        'with --trust-remote-code: "does not appear to have a file named ..."',
        "drop auto_map from the draft model's config (--write-draft-config does), or copy the file",
        "auto_map of the draft model's config",
        report(11, "https://github.com/vllm-project/vllm/pull/21086"),
    )
