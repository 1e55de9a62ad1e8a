"""``multimodal-image-token``: the proposer knows where a wrapper keeps its image token's id.

For a multimodal target the proposer copies the image token's id into the draft model's config
(load_model in vllm/v1/spec_decode/eagle.py; llm_base_proposer.py from 0.20.0 on). It lists the
classes it knows and for all others reads ``target_model.config.image_token_index``, which
Kimi-K2.5's config does not have: it has ``media_placeholder_token_id``. Hence "'KimiK25Config'
object has no attribute 'image_token_index'".

vLLM added the Kimi-K2.5 case in its pull request 36361 (first in 0.18.0).
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, ClassVar

import libcst as cst
from libcst import matchers as m

from vllm_eagle3_patch import reading
from vllm_eagle3_patch.codemod import AnchoredCodemod
from vllm_eagle3_patch.family import FAMILY
from vllm_eagle3_patch.patch import Patch
from vllm_eagle3_patch.sources import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_eagle3_patch.family import FamilyModel
    from vllm_eagle3_patch.sources import Sources

PATHS = ("vllm/v1/spec_decode/llm_base_proposer.py", "vllm/v1/spec_decode/eagle.py")

IMAGE_TOKENS = {
    "KimiK25ForConditionalGeneration": "target_model.config.media_placeholder_token_id",
}
"""Where each wrapper class of the family keeps its image token's id."""

BRANCH = """
if self.get_model_name(target_model) == "{wrapper}":
    self.model.config.image_token_index = {image_token}
"""

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


class ImageTokenCodemod(AnchoredCodemod):
    """A branch for each wrapper before the fallback."""

    patch: ClassVar[str] = "multimodal-image-token"

    def edit(self, module: cst.Module) -> None:
        """Find the last branch that names a class, before the fallback."""
        anchor = "branch before target_model.config.image_token_index"
        load_model = self.only_method(self.only_class_with(module, "load_model"), "load_model")
        last = self.only(m.findall(load_model, LAST_BRANCH), anchor, "load_model")
        named = image_tokens(parse(module.bytes, ""))
        branch = cst.ensure_type(last, cst.If).orelse
        for model in reversed(self.models):
            wrapper = model.architecture
            if wrapper not in IMAGE_TOKENS or named.get(wrapper) == IMAGE_TOKENS[wrapper]:
                continue
            if wrapper in named:
                self.only((), f"branch for {wrapper} that reads its image token", "load_model")
            source = BRANCH.format(wrapper=wrapper, image_token=IMAGE_TOKENS[wrapper])
            (new,) = self.statements(module, source)
            branch = cst.ensure_type(new, cst.If).with_changes(orelse=branch)
        self.change(last, lambda node: node.with_changes(orelse=branch))


class MultimodalImageToken(Patch):
    """See the module."""

    name = "multimodal-image-token"
    title = "the proposer reads the image token's id where each wrapper keeps it"
    upstream = "vLLM pull request 36361, first in 0.18.0, for Kimi-K2.5"
    needs_file = False

    def paths(self, sources: Sources) -> tuple[str, ...]:
        """The proposer's file, where it handles multimodal targets."""
        return tuple(path for path in PATHS if b"image_token_index" in (sources.read(path) or b""))

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
        """Every wrapper has a branch of its own."""
        wrappers = {model.architecture for model in models} & IMAGE_TOKENS.keys()
        named = image_tokens(module)
        return all(named.get(wrapper) == IMAGE_TOKENS[wrapper] for wrapper in wrappers)


def image_tokens(module: ast.Module) -> dict[str, str]:
    """What the proposer copies to the draft model's image token, by the class that it tests for."""
    return {
        name: ast.unparse(statement.value)
        for node in ast.walk(module)
        if isinstance(node, ast.If)
        for statement in node.body
        if isinstance(statement, ast.Assign)
        and reading.last_name(statement.targets[0]) == "image_token_index"
        for name in reading.strings(node.test)
    }
