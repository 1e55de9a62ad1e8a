"""The config's side of ``aux-layer-ids``: it decides which layer ids are in effect.

Why, and by which rule, stands in ``patches/aux_layer_ids.py``.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, ClassVar

import libcst as cst
from libcst import matchers as m

from vllm_eagle3_patch.codemod.anchored import AnchoredCodemod
from vllm_eagle3_patch.codemod.nodes import find_all
from vllm_eagle3_patch.ground.family import TEXT_TYPES
from vllm_eagle3_patch.ground.layer_ids import (
    LAYER_IDS,
    eagle3_boundaries,
    eagle3_ids_look_like_outputs,
)
from vllm_eagle3_patch.vllm_source import syntax

if TYPE_CHECKING:
    import ast

CONFIG = "SpeculativeConfig"
METHOD = "eagle3_aux_hidden_state_layers"
MEANING = (eagle3_boundaries, eagle3_ids_look_like_outputs)
MEANING_SOURCE = "".join(f"@staticmethod\n{inspect.getsource(function)}\n" for function in MEANING)
PATCHED = "".join(f'        "{text_type}",\n' for text_type in TEXT_TYPES)

# The annotation is a string for Python 3.9; info_once takes no arguments in 0.8.5.
CONFIG_METHODS = (
    MEANING_SOURCE
    + '''
def eagle3_aux_hidden_state_layers(self) -> "tuple[int, ...] | None":
    """The EAGLE-3 layer ids of the draft model's config; None: vLLM's own reading stands."""
    # The text model's type tells what was patched, as it did in vLLM's own list of
    # EAGLE-3 targets: in a multimodal model it is the language model that collects.
    patched = (
PATCHED    )
    target = getattr(self.target_model_config, "hf_text_config", None)
    if (
        self.method != "eagle3"
        or self.draft_model_config is None
        or getattr(target, "model_type", None) not in patched
    ):
        return None
    hf_config = self.draft_model_config.hf_config
    nested = getattr(hf_config, "eagle_config", None)
    if not isinstance(nested, dict):
        nested = {}
    key = "eagle_aux_hidden_state_layer_ids"
    convention_key = f"{key}_convention"
    convention = getattr(hf_config, convention_key, nested.get(convention_key))
    if convention not in (None, "boundary", "output"):
        raise ValueError(
            f"{convention_key} in the draft model's config is {convention!r}: "
            'it must be "boundary" or "output"'
        )
    places = (
        (key, getattr(hf_config, key, None)),
        (f"eagle_config.{key}", nested.get(key)),
        ("eagle_config.layer_ids", nested.get("layer_ids")),
    )
    for place, ids in places:
        if ids not in (None, [], ()):
            break
    else:
        logger.info_once(
            f"EAGLE-3 aux hidden state layers: {key} is not in the draft model's "
            "config, so the choice is vLLM's"
        )
        return None
    if not isinstance(ids, (list, tuple)) or any(type(i) is not int for i in ids):
        raise ValueError(
            f"{place} in the draft model's config is {ids!r}: "
            "it must be a list of integers"
        )
    layers = self.eagle3_boundaries(ids, convention)
    logger.info_once(
        f"EAGLE-3 aux hidden state layers {layers}: {place} in the draft model's "
        f"config is {list(ids)}, by the convention {convention or 'boundary'!r} "
        f"({convention_key} there overrides it)"
    )
    # The speculators format counts boundaries by definition.
    speculators = getattr(type(hf_config), "model_type", None) == "speculators"
    num_layers = getattr(target, "num_hidden_layers", 0)
    if (
        convention is None
        and not speculators
        and self.eagle3_ids_look_like_outputs(ids, num_layers)
    ):
        logger.warning_once(
            f"EAGLE-3 aux hidden state layers: {list(ids)} look like outputs of layers, "
            "but are read as boundaries (the streams entering these layers); if the "
            f'draft model was trained on the outputs, write "{convention_key}": '
            '"output" into its config'
        )
    return layers
'''.lstrip("\n").replace("PATCHED", PATCHED)
)

# Up to 0.16.0 the key holds no ids; from 0.17.0 on those of the top level.
HASHED = f"""
layer_ids = self.{METHOD}()
if layer_ids is not None:
    factors.append(layer_ids)
"""
HASHED_INSTEAD = f"""
{{variable}} = self.{METHOD}() or {{variable}}
"""


def _is_layer_ids(literal: str) -> bool:
    return literal[1:-1] == LAYER_IDS


LOGGER = m.SimpleStatementLine(
    body=[
        m.Assign(
            targets=[m.AssignTarget(m.Name("logger"))], value=m.Call(func=m.Name("init_logger"))
        )
    ]
)
# layer_ids = getattr(..., "eagle_aux_hidden_state_layer_ids", ...)
READS_TOP_LEVEL = m.SimpleStatementLine(
    body=[
        m.Assign(
            targets=[m.AssignTarget(m.Name())],
            value=m.Call(
                func=m.Name("getattr"),
                args=[
                    m.Arg(),
                    m.Arg(m.SimpleString(value=m.MatchIfTrue(_is_layer_ids))),
                    m.ZeroOrMore(),
                ],
            ),
        )
    ]
)
HASHES_FACTORS = m.Call(func=m.Name("str"), args=[m.Arg(m.Name("factors"))])


class ConfigCodemod(AnchoredCodemod):
    """The method on the config, and its answer in the compile-cache key."""

    patch: ClassVar[str] = "aux-layer-ids"
    looks_into: ClassVar[tuple[str, ...]] = (f"{CONFIG}.compute_hash",)

    def edit(self, module: cst.Module) -> None:
        """Find the logger, the class, ``compute_hash``, and where that hashes its factors."""
        loggers = [node for node in module.body if m.matches(node, LOGGER)]
        self.only(loggers, "logger = init_logger(...)", "the module")
        config = self.only_class(module, CONFIG)
        names = [function.__name__ for function in MEANING]
        self.absent(config, (METHOD, *names), f"class {CONFIG}")
        compute_hash = self.only_method(config, "compute_hash")
        first, *others = self.statements(module, CONFIG_METHODS)
        spaced = first.with_changes(
            leading_lines=[cst.EmptyLine(indent=False), *first.leading_lines]
        )
        self._hash(module, compute_hash)
        self.change(compute_hash, lambda node: cst.FlattenSentinel([spaced, *others, node]))

    def _hash(self, module: cst.Module, compute_hash: cst.FunctionDef) -> None:
        where = f"{CONFIG}.compute_hash"
        found = find_all(compute_hash, READS_TOP_LEVEL)
        if not found:
            statements = [s for s in compute_hash.body.body if find_all(s, HASHES_FACTORS)]
            statement = self.only(statements, "str(factors)", where)
            self.insert_before(statement, self.statements(module, HASHED))
            return
        line = self.only(found, f'... = getattr(..., "{LAYER_IDS}", ...)', where)
        assignment = cst.ensure_type(
            cst.ensure_type(line, cst.SimpleStatementLine).body[0], cst.Assign
        )
        variable = cst.ensure_type(assignment.targets[0].target, cst.Name).value
        appended = m.Call(
            func=m.Attribute(value=m.Name("factors"), attr=m.Name("append")),
            args=[m.Arg(m.Call(func=m.Name("tuple"), args=[m.Arg(m.Name(variable))]))],
        )
        anchor = f"factors.append(tuple({variable}))"
        self.only(find_all(compute_hash, appended), anchor, where)
        new = self.statements(module, HASHED_INSTEAD.format(variable=variable))
        self.insert_after(line, new)


def decides(module: ast.Module) -> bool:
    """Whether the config has a method that looks in both places, and hashes its answer."""
    config = syntax.find_class(module, CONFIG)
    method = syntax.find_method(config, METHOD)
    compute_hash = syntax.find_method(config, "compute_hash")
    return (
        method is not None
        and {LAYER_IDS, "eagle_config"} <= set(syntax.strings(method))
        and compute_hash is not None
        and any(syntax.calls(compute_hash, METHOD))
    )
