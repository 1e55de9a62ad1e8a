"""``aux-layer-ids``: the layer ids that a draft model was trained with reach the model runner.

Draft models carry their ids at the top level of their config or nested under ``eagle_config``.
Up to 0.11.0 the model runner reads neither, up to 0.21.0 the top level only, and falls back to the
target's default without a word (reports 31, 33 and 34). From 0.22.0 on it also reads the nested
ids; the runner under ``vllm/v1/worker/gpu`` (0.17.0 on) reads its own third way up to 0.33.0.

The config decides, in one method that the runners and the compile-cache key both ask: with two
readings, a restart with other ids would run the old graph. The key held none of the ids up to
0.16.0 and only those of the top level since. Where the method has no answer, what vLLM itself does
stands: for a draft model without ids, for every method but ``eagle3`` (the ids of
``extract_hidden_states``, DFlash and DSpark are vLLM's own), and for every target that was not
patched. These are told by ``hf_text_config.model_type``, as in vLLM's own list of targets: wrappers
such as Pixtral's hold other language models too, and nothing else of a config names the one in it.

What ids mean: what vLLM already reads it goes on reading as it is, and where it does not read
nested ids they are read as 0.22.0 and later do, as they are. Trainers that count outputs of layers
write the same key (report 29), but no list shows who wrote it, so only the draft model's config can
say that: ``eagle_aux_hidden_state_layer_ids_convention``, ``"boundary"`` or ``"output"``. Ids that
look like outputs are logged as a warning. The meaning is that of ``ground/layer_ids.py``, which
the doctor shares.
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
from vllm_eagle3_patch.patches._layer_ids import CONFIG, METHOD, ConfigCodemod, decides
from vllm_eagle3_patch.vllm_source import syntax
from vllm_eagle3_patch.vllm_source.paths import NEWER_LAYER_IDS, RUNNER, SPECULATIVE_CONFIG

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.vllm_source.sources import Sources


READER = "_get_eagle3_aux_layers_from_config"
NEWER_READER = "get_eagle3_aux_layers_from_config"
SETTER = "set_aux_hidden_state_layers"
DEFAULT = "get_eagle3_aux_hidden_state_layers"

CONFIG_PARAMETER = m.Param(name=m.Name("spec_config")) | m.Param(
    annotation=m.Annotation(m.Name(CONFIG))
)

ASKED = f"""
if {{config}} and {{config}}.{METHOD}():
    return {{config}}.{METHOD}()
"""
ASKED_FIRST = f"""
aux_layers = self.speculative_config.{METHOD}()
"""

# ....set_aux_hidden_state_layers(....get_eagle3_aux_hidden_state_layers())
SETS_DEFAULT = m.SimpleStatementLine(
    body=[
        m.Expr(
            m.Call(
                func=m.Attribute(attr=m.Name(SETTER)),
                args=[m.Arg(m.Call(func=m.Attribute(attr=m.Name(DEFAULT)), args=[]))],
            )
        )
    ]
)


class AskConfigCodemod(AnchoredCodemod):
    """What both runners' codemods share: a reader that asks the config first."""

    patch: ClassVar[str] = "aux-layer-ids"

    def ask(self, module: cst.Module, reader: cst.FunctionDef, config: str) -> None:
        """Return the config's answer, if it has one, before a reader's own statements."""
        name = reader.name.value
        self.only([reader][len(reader.decorators) :], f"def {name} without a decorator", name)
        self.absent(reader, (METHOD,), name)
        statements = reader.body.body[1 if reader.get_docstring() is not None else 0 :]
        first = self.only(statements[:1], "a statement", name)
        self.insert_before(first, self.statements(module, ASKED.format(config=config)))


class RunnerCodemod(AskConfigCodemod):
    """The V1 runner: its reader asks the config; up to 0.11.0 it has none."""

    looks_into: ClassVar[tuple[str, ...]] = (READER, "load_model")

    def edit(self, module: cst.Module) -> None:
        """Find the reader, or else where ``load_model`` sets the model's default."""
        defines_reader = m.FunctionDef(name=m.Name(READER))
        classes = [node for node in module.body if isinstance(node, cst.ClassDef)]
        if any(matching(owner.body, defines_reader) for owner in classes):
            owner = self.only_class_with(module, READER)
            reader = self.only_method(owner, READER)
            own = [p for p in reader.params.params[:1] if m.matches(p.name, m.Name("self"))]
            self.only(own, "self", READER)
            self.ask(module, reader, "self.speculative_config")
        else:
            owner = self.only_class_with(module, "load_model")
            self._ask_before_default(module, self.only_method(owner, "load_model"))

    def _ask_before_default(self, module: cst.Module, load_model: cst.FunctionDef) -> None:
        anchor = f"....{SETTER}(....{DEFAULT}())"
        statement = self.only(find_all(load_model, SETS_DEFAULT), anchor, "load_model")
        self.absent(load_model, (METHOD, "aux_layers"), "load_model")
        (default,) = find_all(statement, m.Call(func=m.Attribute(attr=m.Name(DEFAULT))))
        self.change(
            default,
            lambda node: cst.BooleanOperation(cst.Name("aux_layers"), cst.Or(), node),
        )
        self.insert_before(statement, self.statements(module, ASKED_FIRST))


class NewerRunnerCodemod(AskConfigCodemod):
    """The reader of the runner under ``vllm/v1/worker/gpu``, a function."""

    looks_into: ClassVar[tuple[str, ...]] = (NEWER_READER,)

    def edit(self, module: cst.Module) -> None:
        """Find the function and its parameter."""
        wanted = m.FunctionDef(name=m.Name(NEWER_READER))
        found = [node for node in module.body if m.matches(node, wanted)]
        only = self.only(found, f"def {NEWER_READER}", "the module")
        reader = cst.ensure_type(only, cst.FunctionDef)
        first = [p for p in reader.params.params[:1] if m.matches(p, CONFIG_PARAMETER)]
        parameter = self.only(first, f"a {CONFIG} as the first parameter", NEWER_READER)
        self.ask(module, reader, parameter.name.value)


class AuxLayerIds(Patch):
    """See the module."""

    name = "aux-layer-ids"
    title = "the draft model's layer ids reach the model runner and the compile-cache key"
    upstream = "vLLM pull request 42764 (0.22.0) reads nested ids, as they are; never the rest"
    companion = True
    needs_file = False

    def paths(self, sources: Sources) -> tuple[str, ...]:
        """The file that has the config, and the runners that use such ids."""
        config = tuple(
            path
            for path in SPECULATIVE_CONFIG
            if f"class {CONFIG}".encode() in (sources.read(path) or b"")
        )
        runners = tuple(
            path
            for path in (RUNNER, NEWER_LAYER_IDS)
            if SETTER.encode() in (sources.read(path) or b"")
        )
        return config + runners

    def codemod(self, path: str = "") -> type[AnchoredCodemod]:
        """The codemod for the config, or for one of the runners."""
        return {RUNNER: RunnerCodemod, NEWER_LAYER_IDS: NewerRunnerCodemod}.get(path, ConfigCodemod)

    def holds(
        self,
        module: ast.Module,
        models: Sequence[FamilyModel] = FAMILY,
        *,
        path: str = "",
        protocol: bool = True,
    ) -> bool:
        """The config decides and hashes what it decided; the runners ask it."""
        if path == NEWER_LAYER_IDS:
            return _returns_answer(syntax.find_function(module, NEWER_READER))
        if path == RUNNER:
            reader = syntax.find_function(module, READER)
            return _returns_answer(reader) if reader else _sets_answer(module)
        return decides(module)


def _returns_answer(reader: syntax.FunctionNode | None) -> bool:
    return reader is not None and any(
        isinstance(node, ast.Return) and any(syntax.calls(node, METHOD))
        for node in ast.walk(reader)
    )


def _sets_answer(module: ast.Module) -> bool:
    """``load_model`` asks the config, and no model is set to its default without that."""
    load_model = syntax.find_function(module, "load_model")
    if load_model is None or not any(syntax.calls(load_model, METHOD)):
        return False
    return not any(
        isinstance(argument, ast.Call) and syntax.last_name(argument.func) == DEFAULT
        for call in syntax.calls(load_model, SETTER)
        for argument in call.args
    )
