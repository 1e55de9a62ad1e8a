"""What vLLM does with a draft model's config and class, read from its source."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from vllm_eagle3_patch.ground.layer_ids import LAYER_IDS
from vllm_eagle3_patch.vllm_source import syntax
from vllm_eagle3_patch.vllm_source.allowlist import CONFIG
from vllm_eagle3_patch.vllm_source.engine import DraftClass
from vllm_eagle3_patch.vllm_source.paths import CONFIG_TYPES, EAGLE_CONFIG, PROPOSER, SPECULATORS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_eagle3_patch.vllm_source.registry import Registry
    from vllm_eagle3_patch.vllm_source.sources import Sources

# vLLM's own from 0.11.1 on, and the patch draft-attention-metadata's in 0.11.0.
QUANTIZATION = ("get_draft_quant_config", "get_quantization_config")
REFUSES_EMBEDDINGS = "does not support multimodal inputs yet"


def renaming(sources: Sources) -> dict[str, str]:
    """By method, the expression that renames ``arch`` (EAGLEConfig.__init__).

    In 0.8.5 every draft model gets one fixed name, and the proposer builds the class of EAGLE-3
    draft models by itself: then the expression is that name.
    """
    if not sources.exists(EAGLE_CONFIG):
        return {}
    found: dict[str, str] = {}
    constructor = syntax.find_method(
        syntax.find_class(sources.module(EAGLE_CONFIG), "EAGLEConfig"), "__init__"
    )
    for node in ast.walk(constructor or ast.Pass()):
        match node:
            case ast.If(
                test=ast.Compare(
                    left=ast.Name(id="method"),
                    ops=[ast.Eq()],
                    comparators=[ast.Constant(value=str(method))],
                ),
                body=body,
            ):
                for expression in _architectures(body):
                    found[method] = expression
            case _:
                continue
    if not found and constructor is not None:
        fixed = list(_architectures(constructor.body))
        # Without VLLM_USE_V1 it is the class of the older engine, which knows no EAGLE-3.
        found = {"eagle": fixed[-1]} if fixed else {}
        if b"Eagle3LlamaForCausalLM(" in (sources.read(PROPOSER) or b""):
            found["eagle3"] = repr("Eagle3LlamaForCausalLM")
    return found


def _architectures(statements: list[ast.stmt]) -> Iterator[str]:
    for node in (node for statement in statements for node in ast.walk(statement)):
        match node:
            case ast.Assign(
                targets=[
                    ast.Subscript(
                        value=ast.Name(id="kwargs"), slice=ast.Constant(value="architectures")
                    )
                ],
                value=ast.ListComp(elt=expression) | ast.List(elts=[expression]),
            ):
                yield ast.unparse(expression)
            case _:
                continue


def rewritten(config: ast.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Model types that become an MTP type, and the architecture that each MTP type is given.

    SpeculativeConfig.hf_config_override; in 0.33.0 one architecture depends on the type before.
    """
    override = syntax.find_method(syntax.find_class(config, CONFIG), "hf_config_override")
    types: dict[str, str] = {}
    architectures: dict[str, str] = {}
    for node in ast.walk(override or ast.Pass()):
        if not isinstance(node, ast.If):
            continue
        tested = _tested_types(node.test)
        for statement in node.body:
            match statement:
                case ast.Assign(
                    targets=[ast.Attribute(attr="model_type")], value=ast.Constant(value=str(new))
                ):
                    types.update({old: types.get(old, new) for old in tested if old != new})
                case ast.Expr(value=ast.Call(func=ast.Attribute(attr="update"))):
                    for name in _given_architectures(statement):
                        for old in tested:
                            architectures.setdefault(old, name)
                case _:
                    continue
    return types, architectures


def _tested_types(test: ast.expr) -> tuple[str, ...]:
    """The values that a model type is compared with in a test."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        test = test.values[0]
    match test:
        case ast.Compare(
            left=ast.Attribute(attr="model_type"), ops=[ast.Eq() | ast.In()], comparators=[right]
        ):
            return tuple(syntax.strings(right))
        case _:
            return ()


def _given_architectures(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "architectures":
                names = list(syntax.strings(value))
                if names:
                    yield names[-1]


def detection(config: ast.Module) -> tuple[tuple[str, str], ...]:
    """Which parts of a draft model's name mean which method, in the order of the tests."""
    owner = syntax.find_class(config, CONFIG)
    found = []
    for node in ast.walk(owner or ast.Pass()):
        if not isinstance(node, ast.If) or "lower()" not in ast.unparse(node.test):
            continue
        parts = [t for t in syntax.strings(node.test) if t.startswith("eagle")]
        for statement in node.body:
            match statement:
                case ast.Assign(
                    targets=[ast.Attribute(attr="method")], value=ast.Constant(value=str(method))
                ):
                    found += [(part, method) for part in parts]
                case _:
                    continue
    return tuple(found)


def draft_classes(
    sources: Sources, registry: Registry
) -> tuple[dict[str, str], dict[str, DraftClass]]:
    """The architectures of EAGLE-3 draft models with their files, and what each file does."""
    names: dict[str, str] = {}
    classes: dict[str, DraftClass] = {}
    for architecture, (module, _) in sorted(registry.entries.items()):
        path = f"{module.replace('.', '/')}.py"
        if not module.endswith("eagle3") or not sources.exists(path):
            continue
        names[architecture] = path
        if path not in classes:
            classes[path] = draft_class(sources, path)
    return names, classes


def draft_class(sources: Sources, path: str) -> DraftClass:
    """What a file does that defines an EAGLE-3 draft model."""
    module = sources.module(path)
    keys, nested = set(), set()
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[owner, key, *_]) if (
                isinstance(key, ast.Constant) and syntax.last_name(owner) in ("config", "hf_config")
            ):
                keys.add(str(key.value))
            case ast.Attribute(value=owner, attr=attr, ctx=ast.Load()) if (
                syntax.last_name(owner) == "config"
            ):
                keys.add(attr)
            case (
                ast.Call(
                    func=ast.Attribute(value=ast.Name(id="eagle_config"), attr="get"),
                    args=[ast.Constant(value=str(key)), *_],
                )
                | ast.Subscript(
                    value=ast.Name(id="eagle_config"), slice=ast.Constant(value=str(key))
                )
            ):
                nested.add(key)
            case _:
                continue
    texts = set(syntax.strings(module))
    return DraftClass(
        path=path,
        keys=tuple(sorted(keys & OF_INTEREST)),
        nested_keys=tuple(sorted(nested & OF_INTEREST)),
        mla=syntax.mentions(module, "kv_lora_rank"),
        counts_states="num_aux_hidden_states" in keys,
        own_quantization=any(syntax.mentions(module, name) for name in QUANTIZATION),
        refuses_embeddings=any(REFUSES_EMBEDDINGS in text for text in texts),
        vocabulary_default=_has_vocabulary_default(module),
        skips_unused_norm="input_norm." in texts,
        forces_yarn=_forces_yarn(module),
    )


OF_INTEREST = frozenset(
    {
        "draft_vocab_size",
        "fc_norm",
        LAYER_IDS,
        "norm_before_fc",
        "norm_before_residual",
        "norm_output",
        "num_aux_hidden_states",
        "target_hidden_size",
        "use_aux_hidden_state",
    }
)
"""The keys that rules ask for."""


def _forces_yarn(module: ast.Module) -> bool:
    """``...["rope_type"] = "deepseek_yarn"`` in the draft model's own file (0.18.0 to 0.27.1)."""
    for node in ast.walk(module):
        match node:
            case ast.Assign(
                targets=[ast.Subscript(slice=ast.Constant(value="rope_type"))],
                value=ast.Constant(value="deepseek_yarn"),
            ):
                return True
            case _:
                continue
    return False


def _has_vocabulary_default(module: ast.Module) -> bool:
    """``getattr(config, "draft_vocab_size", ...)``, as from 0.11.0 on."""
    return any(
        isinstance(argument, ast.Constant) and argument.value == "draft_vocab_size"
        for call in syntax.calls(module, "getattr")
        for argument in call.args
    )


def config_types(sources: Sources) -> tuple[str, ...]:
    """The model types that vLLM has a config class of its own for (_CONFIG_REGISTRY)."""
    if not sources.exists(CONFIG_TYPES):
        return ()
    for node in ast.walk(sources.module(CONFIG_TYPES)):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = syntax.assigned(node)
        if not any(syntax.last_name(t).startswith("_CONFIG_REGISTRY") for t in targets):
            continue
        value = node.value
        if isinstance(value, ast.Call):
            return tuple(sorted(k.arg for k in value.keywords if k.arg))
        if isinstance(value, ast.Dict):
            return tuple(sorted({t for key in value.keys if key for t in syntax.strings(key)}))
    return ()


def speculators(sources: Sources) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """What of the speculators format reaches a draft model's config, and for which types."""
    if not sources.exists(SPECULATORS):
        return None, ()
    update = syntax.find_function(sources.module(SPECULATORS), "update_eagle3")
    if update is None:
        return None, ()
    keys = set()
    for node in ast.walk(update):
        match node:
            case ast.Assign(
                targets=[ast.Subscript(value=ast.Name(), slice=ast.Constant(value=str(key)))]
            ):
                keys.add(key)
            case _:
                continue
    types = [
        tuple(key.value for key in node.keys if isinstance(key, ast.Constant))
        for node in ast.walk(update)
        if isinstance(node, ast.Dict) and node.keys
    ]
    return tuple(sorted(keys)), tuple(sorted(map(str, types[0]))) if types else ()
