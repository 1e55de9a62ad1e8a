"""``deepseek-v32``: each platform's own DeepSeek-V3.2 collects the aux hidden states.

The ``DeepseekV32ForCausalLM`` of vllm/models/deepseek_v32/nvidia/model.py and amd/model.py
inherits ``SupportsEagle3`` from ``DeepseekV2ForCausalLM``, but its model is not
``DeepseekV2Model``. If the forward of its own never collected, a server would start, and the draft
model would get nothing. Which of these files a release uses:
vllm_eagle3_patch/vllm_source/registry.py.

Every published release collects in each of them (vLLM wrote them so: 0.25.0 NVIDIA, 0.27.0 AMD),
so there is nothing to add. A file that does not is refused with an error that names it, and the
models that are taken from it are not ready.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, ClassVar

from vllm_eagle3_patch.codemod.anchored import AnchoredCodemod
from vllm_eagle3_patch.codemod.patch import Patch
from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.patches._forward import collects
from vllm_eagle3_patch.patches.deepseek_v2 import OUTER
from vllm_eagle3_patch.vllm_source import syntax
from vllm_eagle3_patch.vllm_source.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    import libcst as cst

    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.vllm_source.sources import Sources

PLATFORM_OUTER = "DeepseekV32ForCausalLM"
PLATFORM_MODEL = "DeepseekV32Model"


class PlatformCodemod(AnchoredCodemod):
    """Adds nothing: it only says which platform's file does not collect."""

    patch: ClassVar[str] = "deepseek-v32"

    def edit(self, module: cst.Module) -> None:
        """Refuse the file.

        Raises:
            AnchorNotFoundError: Always: it is called for a file that does not collect.
        """
        anchor = "a forward that collects aux hidden states, as in every published release"
        self.only((), anchor, f"{PLATFORM_OUTER} with {PLATFORM_MODEL}")


class DeepseekV32(Patch):
    """See the module."""

    name = "deepseek-v32"
    title = "each platform's own DeepSeek-V3.2 collects aux hidden states"
    upstream = "in each of vLLM's own files from its first release on (0.25.0, 0.27.0)"
    needs_file = False

    def paths(self, sources: Sources) -> tuple[str, ...]:
        """The platforms' files that a model of the family is taken from."""
        registry = Registry(sources)
        files = (path for model in FAMILY for path in registry.platform_files(model))
        return tuple(dict.fromkeys(files))

    def codemod(self, path: str = "") -> type[AnchoredCodemod]:
        """See :class:`PlatformCodemod`."""
        return PlatformCodemod

    def holds(
        self,
        module: ast.Module,
        models: Sequence[FamilyModel] = FAMILY,
        *,
        path: str = "",
        protocol: bool = True,
    ) -> bool:
        """The outer class inherits the interface and uses the model, whose forward collects."""
        outer = syntax.find_class(module, PLATFORM_OUTER)
        inner = syntax.find_class(module, PLATFORM_MODEL)
        return (
            outer is not None
            and OUTER in syntax.base_names(outer)
            and any(_sets_model(statement) for statement in outer.body)
            and collects(syntax.find_method(inner, "forward"))
        )

    def missing(self, sources: Sources, model: FamilyModel) -> bool:
        """Whether a platform's file that this model is taken from does not collect."""
        return bool(not_collecting(sources, model))


def not_collecting(sources: Sources, model: FamilyModel) -> tuple[str, ...]:
    """The platforms' files that a model is taken from and that do not collect."""
    patch = DeepseekV32()
    return tuple(
        path
        for path in Registry(sources).platform_files(model)
        if not patch.holds(sources.module(path), (model,), path=path)
    )


def _sets_model(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Assign)
        and syntax.last_name(statement.targets[0]) == "model_cls"
        and syntax.last_name(statement.value) == PLATFORM_MODEL
    )
