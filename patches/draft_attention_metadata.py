"""``draft-attention-metadata``: the engine goes by the draft model where it went by its MLA target.

vLLM 0.11.0 can hold KV caches of different sizes, but takes the target for the draft model in four
places, so that a grouped-query draft model does not start beside an MLA target:

* The runner gives every layer the KV cache of MLA, without room for the draft model's values
  (vllm/v1/worker/gpu_model_runner.py, get_kv_cache_spec).
* The proposer builds the draft model's attention metadata with the target's builder
  (vllm/v1/spec_decode/eagle.py, propose), although it has a method that finds the draft model's.
* FlashAttention 3's builder, the draft model's, wants no other layers in the whole engine
  (vllm/v1/attention/backends/flash_attn.py, _get_sliding_window_configs).
* The draft model's layers are quantized like the target, so that its weights do not fit
  (vllm/model_executor/models/llama_eagle3.py). This is mended beside MLA targets only.

Older releases cannot be mended like this: their KV cache manager knows one page size only.

From 0.11.1 on MLA layers have a class of their own, which answers for its KV cache (vLLM pull
request 25103), the proposer asks that method, and draft models have their own quantization (25883).
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, ClassVar

import libcst as cst
from libcst import matchers as m

from vllm_eagle3_patch.codemod.anchored import AnchoredCodemod, matching
from vllm_eagle3_patch.codemod.nodes import find_all
from vllm_eagle3_patch.codemod.patch import Patch
from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.vllm_source import syntax
from vllm_eagle3_patch.vllm_source.paths import DRAFT_MODEL, FLASH_ATTENTION, PROPOSER, RUNNER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.vllm_source.sources import Sources


# Only where the runner itself makes the specs of both kinds of KV cache: 0.11.0.
CONCERNED = b"MLAAttentionSpec("


def _sets(name: str, value: m.BaseExpressionMatchType) -> m.SimpleStatementLine:
    """A matcher for the statement ``<name> = <value>``."""
    return m.SimpleStatementLine(body=[m.Assign([m.AssignTarget(m.Name(name))], value)])


def _through(target: m.Name | m.Tuple, owner: str, method: str) -> m.For:
    """A matcher for ``for <target> in <owner>.<method>()``."""
    called = m.Attribute(m.Name(owner), m.Name(method))
    return m.For(target=target, iter=m.Call(func=called, args=[]))


def _first(listed: m.BaseExpressionMatchType) -> m.Subscript:
    """A matcher for ``<listed>[0]``."""
    return m.Subscript(listed, [m.SubscriptElement(m.Index(m.Integer("0")))])


SPECS = "get_kv_cache_spec"
ASK_CONFIG = _sets(
    "use_mla", m.Attribute(m.Attribute(attr=m.Name("model_config")), m.Name("use_mla"))
)
EACH_LAYER = _through(
    m.Tuple([m.Element(m.Name("layer_name")), m.Element(m.Name("attn_module"))]),
    "attn_layers",
    "items",
)
ASK_LAYER = "use_mla = attn_module.use_mla"

TARGETS_GROUP = "self.runner.attn_groups[0][0]"
FIND_BUILDER = "_get_attention_metadata_builder"
TARGETS_BUILDER = _sets(
    "attn_metadata_builder",
    m.Subscript(
        m.Attribute(
            _first(_first(m.Attribute(attr=m.Name("attn_groups")))), m.Name("metadata_builders")
        )
    ),
)

WINDOWS = "_get_sliding_window_configs"
EVERY_LAYER = _through(m.Name("layer"), "layers", "values")
ASSERTED = m.SimpleStatementLine(body=[m.Assert()])
SKIP_MLA = """
if layer.use_mla:
    continue
"""

DRAFT_CLASS = "LlamaModel"
OWN_QUANTIZATION = "get_quantization_config"
TARGETS_CONFIG = _sets(
    "current_vllm_config", m.Call(func=m.Name("get_current_vllm_config"), args=[])
)
QUANTIZE_AS_ITSELF = f"""
if current_vllm_config.model_config.is_deepseek_mla:
    from copy import copy

    current_vllm_config = copy(current_vllm_config)
    current_vllm_config.quant_config = VllmConfig.{OWN_QUANTIZATION}(
        vllm_config.speculative_config.draft_model_config, vllm_config.load_config
    )
"""


class DraftModelCodemod(AnchoredCodemod):
    """What the four have in common."""

    patch: ClassVar[str] = "draft-attention-metadata"


class CacheCodemod(DraftModelCodemod):
    """Each layer is asked for the kind of its KV cache."""

    looks_into: ClassVar[tuple[str, ...]] = (SPECS,)

    def edit(self, module: cst.Module) -> None:
        """Find where the target's config is asked, and the loop over the layers."""
        specs = self.only_method(self.only_class_with(module, SPECS), SPECS)
        anchor = "use_mla = ....model_config.use_mla"
        self.only(matching(specs.body, ASK_CONFIG), anchor, SPECS)
        anchor = "for layer_name, attn_module in attn_layers.items()"
        loop = cst.ensure_type(self.only(matching(specs.body, EACH_LAYER), anchor, SPECS), cst.For)
        first = cst.ensure_type(loop.body, cst.IndentedBlock).body[0]
        self.insert_before(first, self.statements(module, ASK_LAYER))


class BuilderCodemod(DraftModelCodemod):
    """The draft model's own builder."""

    looks_into: ClassVar[tuple[str, ...]] = ("propose", FIND_BUILDER)

    def edit(self, module: cst.Module) -> None:
        """Find where the builder is chosen, and the method that finds the right one."""
        proposer = self.only_class_with(module, "propose")
        self.only_method(proposer, FIND_BUILDER)
        propose = self.only_method(proposer, "propose")
        anchor = f"attn_metadata_builder = {TARGETS_GROUP}.metadata_builders[...]"
        chosen = self.only(matching(propose.body, TARGETS_BUILDER), anchor, "propose")
        (own,) = self.statements(module, f"attn_metadata_builder = self.{FIND_BUILDER}()")
        new = cst.ensure_type(own, cst.SimpleStatementLine)
        self.change(
            chosen,
            lambda node: node.with_changes(
                body=new.body, leading_lines=[*node.leading_lines, *new.leading_lines]
            ),
        )


class SlidingWindowCodemod(DraftModelCodemod):
    """MLA layers are none of this builder's business."""

    looks_into: ClassVar[tuple[str, ...]] = (WINDOWS,)

    def edit(self, module: cst.Module) -> None:
        """Find the assertion that every layer has FlashAttention."""
        named = m.FunctionDef(name=m.Name(WINDOWS))
        found = [node for node in module.body if m.matches(node, named)]
        function = cst.ensure_type(
            self.only(found, f"def {WINDOWS}", "the module"), cst.FunctionDef
        )
        anchor = "for layer in layers.values()"
        loop = self.only(matching(function.body, EVERY_LAYER), anchor, WINDOWS)
        block = cst.ensure_type(cst.ensure_type(loop, cst.For).body, cst.IndentedBlock)
        asserted = self.only(matching(block, ASSERTED), "assert ...", f"the loop of {WINDOWS}")
        self.insert_before(asserted, self.statements(module, SKIP_MLA))


class QuantizationCodemod(DraftModelCodemod):
    """The draft model's own quantization, or none."""

    looks_into: ClassVar[tuple[str, ...]] = (f"{DRAFT_CLASS}.__init__",)

    def edit(self, module: cst.Module) -> None:
        """Find where the draft model takes the config that its layers are built with."""
        alias = m.ImportAlias(name=m.Name("VllmConfig"))
        self.only(find_all(module, alias), "import of VllmConfig", "the module")
        where = f"{DRAFT_CLASS}.__init__"
        constructor = self.only_method(self.only_class(module, DRAFT_CLASS), "__init__")
        anchor = "current_vllm_config = get_current_vllm_config()"
        taken = self.only(matching(constructor.body, TARGETS_CONFIG), anchor, where)
        self.insert_after(taken, self.statements(module, QUANTIZE_AS_ITSELF))


class DraftAttentionMetadata(Patch):
    """See the module."""

    name = "draft-attention-metadata"
    title = "the engine goes by the draft model where it went by its MLA target"
    upstream = "vLLM pull requests 25103 and 25883 among others, first in 0.11.1"
    needs_file = False

    def paths(self, sources: Sources) -> tuple[str, ...]:
        """The four files, in the one release that lacks only this."""
        if CONCERNED not in (sources.read(RUNNER) or b""):
            return ()
        return tuple(path for path in _PLACES if sources.exists(path))

    def codemod(self, path: str = "") -> type[AnchoredCodemod]:
        """The codemod of one of the four files."""
        kind, _ = _PLACES.get(path, _PLACES[PROPOSER])
        return kind

    def holds(
        self,
        module: ast.Module,
        models: Sequence[FamilyModel] = FAMILY,
        *,
        path: str = "",
        protocol: bool = True,
    ) -> bool:
        """The file does not take the target for the draft model."""
        _, goes_by_draft_model = _PLACES.get(path, _PLACES[PROPOSER])
        return goes_by_draft_model(module)


def _asks_layers(module: ast.Module) -> bool:
    specs = syntax.find_function(module, SPECS)
    return specs is not None and any(
        syntax.same(node, "attn_module.use_mla")
        for node in ast.walk(specs)
        if isinstance(node, ast.Attribute)
    )


def _finds_builder(module: ast.Module) -> bool:
    propose = syntax.find_function(module, "propose")
    return propose is not None and not any(
        syntax.same(node, TARGETS_GROUP)
        for node in ast.walk(propose)
        if isinstance(node, ast.Subscript)
    )


def _passes_mla_over(module: ast.Module) -> bool:
    windows = syntax.find_function(module, WINDOWS)
    return windows is not None and (
        syntax.mentions(windows, "use_mla")
        or not any(isinstance(node, ast.Assert) for node in ast.walk(windows))
    )


def _has_own_quantization(module: ast.Module) -> bool:
    draft_model = syntax.find_class(module, DRAFT_CLASS)
    return draft_model is not None and syntax.mentions(draft_model, OWN_QUANTIZATION)


_PLACES: dict[str, tuple[type[DraftModelCodemod], Callable[[ast.Module], bool]]] = {
    RUNNER: (CacheCodemod, _asks_layers),
    PROPOSER: (BuilderCodemod, _finds_builder),
    FLASH_ATTENTION: (SlidingWindowCodemod, _passes_mla_over),
    DRAFT_MODEL: (QuantizationCodemod, _has_own_quantization),
}
