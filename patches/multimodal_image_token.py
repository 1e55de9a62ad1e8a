"""``multimodal-image-token``: the proposer knows where a wrapper keeps its image token's id.

For a multimodal target the proposer copies the image token's id into the draft model's config
(load_model in vllm/v1/spec_decode/eagle.py; llm_base_proposer.py from 0.20.0 on). It lists the
classes it knows and for all others reads ``target_model.config.image_token_index``, which the
family's wrappers lack: Kimi's configs have ``media_placeholder_token_id``, and DeepSeek's have
nothing, the id is on the model. Hence "'KimiK25Config' object has no attribute
'image_token_index'".

From 0.11.1 on there are branches, and the wrappers get theirs beside them. From 0.9.2 to 0.11.0
there is only that one assignment: it becomes the last branch. Older proposers copy nothing.

vLLM added the Kimi-K2.5 case in its pull request 36361 (first in 0.18.0), Pixtral's in 0.12.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import libcst as cst
from libcst import matchers as m

from vllm_eagle3_patch.codemod.anchored import AnchoredCodemod
from vllm_eagle3_patch.codemod.nodes import find_all
from vllm_eagle3_patch.codemod.patch import Patch
from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.vllm_source.image_tokens import image_tokens, mentions_of_classes
from vllm_eagle3_patch.vllm_source.paths import PROPOSERS
from vllm_eagle3_patch.vllm_source.sources import parse

if TYPE_CHECKING:
    import ast
    from collections.abc import Sequence

    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.vllm_source.sources import Sources

BRANCH = """
if {model_name} {test}:
    self.model.config.image_token_index = {image_token}
"""
MODEL_NAME = "self.get_model_name(target_model)"
# Up to 0.11.0 the proposer has no method for it.
PLAIN_MODEL_NAME = "type(target_model).__name__"

TOKEN_INDEX = m.Attribute(
    value=m.Attribute(attr=m.Name("config")), attr=m.Name("image_token_index")
)
SETS_TOKEN = m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget(TOKEN_INDEX)])])
FALLBACK = m.SimpleStatementLine(
    body=[
        m.Assign(
            targets=[m.AssignTarget(TOKEN_INDEX)],
            value=m.Attribute(
                value=m.Attribute(value=m.Name("target_model"), attr=m.Name("config")),
                attr=m.Name("image_token_index"),
            ),
        )
    ]
)
# The last branch before the fallback: if <class name test>: <set>; else: <fallback>
LAST_BRANCH = m.If(
    body=m.IndentedBlock(body=[SETS_TOKEN]),
    orelse=m.Else(body=m.IndentedBlock(body=[FALLBACK])),
)
# No branches: if supports_multimodal(target_model): <fallback>; target_language_model = ...
NO_BRANCH = m.If(
    test=m.Call(func=m.Name("supports_multimodal")),
    body=m.IndentedBlock(body=[FALLBACK, m.ZeroOrMore()]),
)


class ImageTokenCodemod(AnchoredCodemod):
    """Branches for the wrappers before the fallback."""

    patch: ClassVar[str] = "multimodal-image-token"
    looks_into: ClassVar[tuple[str, ...]] = ("load_model",)

    def edit(self, module: cst.Module) -> None:
        """Find the last branch that names a class, or the fallback if it stands alone."""
        load_model = self.only_method(self.only_class_with(module, "load_model"), "load_model")
        alone = find_all(load_model, NO_BRANCH)
        if alone:
            found = self.only(alone, "one target_model.config.image_token_index", "load_model")
            self._surround(module, cst.ensure_type(found, cst.If))
            return
        anchor = "branch before target_model.config.image_token_index"
        last = self.only(find_all(load_model, LAST_BRANCH), anchor, "load_model")
        branches = self._branches(module, cst.ensure_type(last, cst.If).orelse, MODEL_NAME)
        self.change(last, lambda node: node.with_changes(orelse=branches))

    def _surround(self, module: cst.Module, multimodal: cst.If) -> None:
        """Make the statement that stands alone the last branch; comments above it stay there."""
        alone = cst.ensure_type(multimodal.body.body[0], cst.SimpleStatementLine)
        fallback = cst.Else(cst.IndentedBlock([alone.with_changes(leading_lines=[])]))
        branches = self._branches(module, fallback, PLAIN_MODEL_NAME)
        first = cst.ensure_type(branches, cst.If)
        lines = [*alone.leading_lines, *first.leading_lines]
        self.change(alone, lambda _: first.with_changes(leading_lines=lines))

    def _branches(
        self, module: cst.Module, last: cst.If | cst.Else | None, model_name: str
    ) -> cst.If | cst.Else | None:
        """Branches before the last one for the wrappers that have none, in the family's order."""
        parsed = parse(module.bytes, "")
        named, mentioned = image_tokens(parsed), mentions_of_classes(parsed)
        lacking: dict[str, list[str]] = {}
        for architecture, image_token in wanted(self.models).items():
            if named.get(architecture) == image_token:
                continue
            if architecture in mentioned:
                anchor = f"branch for {architecture} that reads its image token"
                self.only((), anchor, "load_model")
            lacking.setdefault(image_token, []).append(architecture)
        for image_token, architectures in reversed(lacking.items()):
            source = BRANCH.format(
                model_name=model_name, test=_test(architectures), image_token=image_token
            )
            (new,) = self.statements(module, source)
            last = cst.ensure_type(new, cst.If).with_changes(orelse=last)
        return last


def _test(architectures: Sequence[str]) -> str:
    """What a class name is compared with: one name, or several on a line each."""
    if len(architectures) == 1:
        return f'== "{architectures[0]}"'
    return "".join(("in (\n", *(f'    "{name}",\n' for name in architectures), ")"))


class MultimodalImageToken(Patch):
    """See the module."""

    name = "multimodal-image-token"
    title = "the proposer reads the image token's id where each wrapper keeps it"
    upstream = "vLLM pull request 36361, first in 0.18.0, for Kimi-K2.5; never for the others"
    needs_file = False

    def paths(self, sources: Sources) -> tuple[str, ...]:
        """The proposer's file, where it handles multimodal targets."""
        return tuple(
            path for path in PROPOSERS if b"image_token_index" in (sources.read(path) or b"")
        )

    def codemod(self, path: str = "") -> type[AnchoredCodemod]:
        """See :class:`ImageTokenCodemod`."""
        return ImageTokenCodemod

    def holds(
        self,
        module: ast.Module,
        models: Sequence[FamilyModel] = FAMILY,
        *,
        path: str = "",
        protocol: bool = True,
    ) -> bool:
        """Every wrapper that needs it has a branch of its own."""
        return wanted(models).items() <= image_tokens(module).items()


def wanted(models: Sequence[FamilyModel]) -> dict[str, str]:
    """Where the wrappers among some models keep their image token's id, by architecture."""
    return {
        model.architecture: model.wrapper.image_token
        for model in models
        if model.wrapper is not None and model.wrapper.image_token is not None
    }
