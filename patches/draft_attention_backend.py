"""``draft-attention-backend``: a draft model without MLA chooses its own attention backend.

An attention backend that is set, by the operator or (up to 0.17.1, on Blackwell) by vLLM itself
(vllm/platforms/cuda.py, check_and_update_config), is given to every layer, a draft model's too.
Beside an MLA target that is an MLA backend, and a grouped-query draft model does not start with
it: "Selected backend ... is not valid for this configuration" (get_attn_backend_cls in the same
file, 0.11.1 on; before, such a layer silently took another).

The patch is where that backend is read for a layer, ``get_attn_backend``, and not where draft
models are built: both model runners pass there; the layer itself knows whether it has MLA, which
a draft model's config may not (``is_deepseek_mla`` knows no Kimi-K2 below ``eagle``); and up to
0.12.0 the setting is an attribute of ``vllm.envs``, which holds for the whole process.

vLLM's V1 runner never hands it on since pull request 39930 (first in 0.21.0); the runner under
v1/worker/gpu still does in 0.33.0, unless ``speculative_config.attention_backend`` is set.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, ClassVar

import libcst as cst
from libcst import matchers as m

from vllm_eagle3_patch.codemod.anchored import AnchoredCodemod
from vllm_eagle3_patch.codemod.nodes import find_all
from vllm_eagle3_patch.codemod.patch import Patch
from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.vllm_source.backends import keeps_mla_from_others, refuses_backend
from vllm_eagle3_patch.vllm_source.paths import ATTENTION_SELECTORS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.vllm_source.sources import Sources

SELECTS = b"def get_attn_backend("

FUNCTION = "own_backend_of_draft_model"
DECIDE = f'''
def {FUNCTION}(backend, use_mla):
    """The backend that is set; for a draft model without MLA not the one of its MLA target."""
    if backend is None or use_mla or "MLA" not in str(backend):
        return backend
    from vllm.config import get_current_vllm_config
    from vllm.logger import init_logger

    vllm_config = get_current_vllm_config()
    speculative_config = vllm_config.speculative_config
    if getattr(speculative_config, "method", None) != "eagle3":
        return backend
    # While a draft model is built, this is still the config of its target.
    if not vllm_config.model_config.use_mla:
        return backend
    own_backend = getattr(speculative_config, "attention_backend", None)
    if own_backend is None:
        init_logger(__name__).info_once(
            "EAGLE-3: the draft model chooses its own attention backend, "
            "its target's %s is for MLA only",
            backend,
        )
    return own_backend
'''

# How the backend that is set is read: from the environment up to 0.12.0, then from the config.
ENVIRONMENT = m.Attribute(value=m.Name("envs"), attr=m.Name("VLLM_ATTENTION_BACKEND"))
CONFIG = m.Attribute(
    value=m.Name("attention_config") | m.Attribute(attr=m.Name("attention_config")),
    attr=m.Name("backend"),
)
TOLD_MLA = m.FunctionDef(
    params=m.Parameters(params=[m.ZeroOrMore(), m.Param(name=m.Name("use_mla")), m.ZeroOrMore()])
)


class DraftAttentionBackendCodemod(AnchoredCodemod):
    """A function above the one that reads the backend, and what it reads passed through it."""

    patch: ClassVar[str] = "draft-attention-backend"
    looks_into: ClassVar[tuple[str, ...]] = ("get_attn_backend", "_cached_get_attn_backend")

    def edit(self, module: cst.Module) -> None:
        """Find the one place where the backend that is set is read for a layer."""
        self.absent(module, (FUNCTION,), "the module")
        reads = [
            (function, read)
            for function in module.body
            if m.matches(function, TOLD_MLA)
            for read in find_all(function, ENVIRONMENT | CONFIG)
        ]
        anchor = "the attention backend that is set, read in a function told use_mla"
        read = self.only([read for _, read in reads], anchor, "the module")
        (decide,) = self.statements(module, DECIDE)
        blank = [cst.EmptyLine(indent=False)] * 2
        decide = decide.with_changes(leading_lines=[*blank, *decide.leading_lines])
        self.change(reads[0][0], lambda node: cst.FlattenSentinel([decide, node]))
        self.change(read, _decided)


def _decided(read: cst.BaseExpression) -> cst.Call:
    """``own_backend_of_draft_model(<what is set>, use_mla)``."""
    space = cst.SimpleWhitespace(" ")
    setting = cst.Arg(read, comma=cst.Comma(whitespace_after=space))
    return cst.Call(cst.Name(FUNCTION), [setting, cst.Arg(cst.Name("use_mla"))])


class DraftAttentionBackend(Patch):
    """See the module."""

    name = "draft-attention-backend"
    title = "a draft model without MLA chooses its own attention backend"
    upstream = "vLLM pull request 39930, first in 0.21.0, for the V1 runner"
    companion = True
    needs_file = False

    def paths(self, sources: Sources) -> tuple[str, ...]:
        """The selector, where a backend that does not fit a layer is refused."""
        if not refuses_backend(sources):
            return ()
        return tuple(p for p in ATTENTION_SELECTORS if SELECTS in (sources.read(p) or b""))

    def codemod(self, path: str = "") -> type[AnchoredCodemod]:
        """See :class:`DraftAttentionBackendCodemod`."""
        return DraftAttentionBackendCodemod

    def holds(
        self,
        module: ast.Module,
        models: Sequence[FamilyModel] = FAMILY,
        *,
        path: str = "",
        protocol: bool = True,
    ) -> bool:
        """What is set reaches a layer only through a function that asks whether it has MLA.

        Not so in any release of vLLM's: the V1 runner of 0.21.0 sets nothing for a draft model, but
        the runner under v1/worker/gpu passes here too.
        """
        return keeps_mla_from_others(module)
