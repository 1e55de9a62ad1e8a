"""An independent check that a DeepSeek-V2-like model class collects auxiliary hidden states right.

The class is taken from the bytes of a model file and its real methods run, without torch or vLLM:
names that the file imports become stand-ins. Arrays write in place where vLLM's kernels do (the
fused add and RMS norm writes both of its arguments), so a captured state that aliases a buffer
shows up as a wrong value once the whole forward has run. What is expected comes from a plain loop
over lists, never from the forward under test.

A name that the file neither defines nor imports stays undefined: a patch that forgot an import
fails here as it would in vLLM.
"""

import __future__

import ast
import builtins
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from types import SimpleNamespace
from typing import Any, ClassVar

Row = list[float]
Matrix = list[Row]

HIDDEN_SIZE = 4
NUM_LAYERS = 8
TOKEN_IDS = (7, 2, 5)
LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
DEFAULT_IDS_METHODS = (
    "get_eagle3_aux_hidden_state_layers",
    "get_eagle3_default_aux_hidden_state_layers",
)
# What vLLM's own subclass sets by hand (EagleMistralLarge3Model), and two switches that the
# forward of DeepseekV32Model reads.
SET_BY_HAND = (
    "config",
    "vocab_size",
    "embed_tokens",
    "layers",
    "start_layer",
    "end_layer",
    "norm",
    "make_empty_intermediate_tensors",
    "use_sequence_parallel",
    "replicated_embed",
)


# The arithmetic of the model, on lists: used by the stand-in kernels and by the reference.


def embedding(token_id: int) -> Row:
    return [token_id * 0.5 + column * 0.25 - 1.0 for column in range(HIDDEN_SIZE)]


def rms_norm(row: Row) -> Row:
    scale = 1.0 / sqrt(sum(value * value for value in row) / len(row) + 1e-6)
    return [value * scale for value in row]


def attention(layer: int, row: Row) -> Row:
    return [row[column - 1] * 0.5 + 0.1 * (layer + 1) for column in range(len(row))]


def feed_forward(layer: int, row: Row) -> Row:
    return [row[column] * row[column - 2] - 0.05 * (layer + 2) for column in range(len(row))]


def add(left: Matrix, right: Matrix) -> Matrix:
    return [
        [a + b for a, b in zip(row, other, strict=True)]
        for row, other in zip(left, right, strict=True)
    ]


@dataclass(frozen=True)
class Boundary:
    """What enters a layer: the last layer's output and the residual (none before layer 0)."""

    hidden_states: Matrix
    residual: Matrix | None

    @property
    def stream(self) -> Matrix:
        if self.residual is None:
            return self.hidden_states
        return add(self.residual, self.hidden_states)


def reference(num_layers: int, embedded: Matrix) -> list[Boundary]:
    """Returns the boundaries 0 to `num_layers` of a whole model, computed without a model."""
    boundaries = [Boundary(embedded, None)]
    for layer in range(num_layers):
        stream = boundaries[-1].stream
        after_attention = add(stream, [attention(layer, rms_norm(row)) for row in stream])
        output = [feed_forward(layer, rms_norm(row)) for row in after_attention]
        boundaries.append(Boundary(output, after_attention))
    return boundaries


# Stand-ins for torch and vLLM.


class Array:
    """A `[num_tokens, hidden_size]` tensor: rows are shared by views and written in place."""

    operations: ClassVar[list[str]] = []
    dtype = "bfloat16"
    device = "cuda"

    def __init__(self, rows: Matrix) -> None:
        self.rows = rows

    @property
    def shape(self) -> tuple[int, int]:
        return (len(self.rows), len(self.rows[0]) if self.rows else HIDDEN_SIZE)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def tolist(self) -> Matrix:
        return [list(row) for row in self.rows]

    def write(self, rows: Matrix) -> None:
        for row, values in zip(self.rows, rows, strict=True):
            row[:] = values

    def clone(self) -> "Array":
        Array.operations.append("clone")
        return Array(self.tolist())

    def contiguous(self) -> "Array":
        return self

    def __add__(self, other: object) -> "Array":
        if not isinstance(other, Array):
            return NotImplemented
        Array.operations.append("add")
        return Array(add(self.rows, other.rows))

    def add_(self, other: "Array") -> "Array":
        Array.operations.append("add_")
        self.write(add(self.rows, other.rows))
        return self

    __iadd__ = add_

    def copy_(self, other: "Array") -> "Array":
        Array.operations.append("copy_")
        self.write(other.rows)
        return self

    def __getitem__(self, rows: slice) -> "Array":
        return Array(self.rows[rows])


class Tokens:
    """`input_ids` or `positions`: only the shape is the model's business."""

    def __init__(self, values: Sequence[int]) -> None:
        self.values = values
        self.shape = (len(values),)


class Module:
    """`torch.nn.Module`, as far as models use it."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)  # type: ignore[attr-defined]


class Stub:
    """Anything that a model file mentions and this check does not need: false, empty, callable."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()

    def __call__(self, *_: object, **__: object) -> "Stub":
        return Stub()

    def __getitem__(self, _: object) -> "Stub":
        return Stub()

    def __instancecheck__(self, _: object) -> bool:
        return False

    def __bool__(self) -> bool:
        return False


class IntermediateTensors:
    def __init__(self, tensors: dict[str, Array]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> Array:
        return self.tensors[name]


def add_and_rms_norm_in_place(hidden_states: Array, residual: Array) -> None:
    residual.write(add(residual.rows, hidden_states.rows))
    hidden_states.write([rms_norm(row) for row in residual.rows])


class Embedding(Module):
    def forward(self, input_ids: Tokens) -> Array:
        return Array([embedding(token_id) for token_id in input_ids.values])


class RMSNorm(Module):
    def forward(self, hidden_states: Array, residual: Array | None = None) -> Any:
        if residual is None:
            return Array([rms_norm(row) for row in hidden_states.rows])
        add_and_rms_norm_in_place(hidden_states, residual)
        return hidden_states, residual


class DecoderLayer(Module):
    """A decoder layer as vLLM's: `copies_input` is how layer 0 makes its residual.

    Releases differ: `residual = hidden_states` up to 0.10.2 and from 0.25.0 on,
    `residual = hidden_states.clone()` between. A model has to be right with both.
    """

    use_sequence_parallel_moe = False

    def __init__(self, index: int, copies_input: bool) -> None:
        super().__init__()
        self.index = index
        self.copies_input = copies_input

    def forward(
        self,
        positions: Tokens,
        hidden_states: Array,
        residual: Array | None,
        *_: object,
        **__: object,
    ) -> tuple[Array, Array]:
        if not isinstance(positions, Tokens):
            raise TypeError(f"layer {self.index} was not given the positions")
        if residual is None:
            residual = Array(hidden_states.tolist()) if self.copies_input else hidden_states
            hidden_states = Array([rms_norm(row) for row in hidden_states.rows])
        else:
            add_and_rms_norm_in_place(hidden_states, residual)
        hidden_states = Array([attention(self.index, row) for row in hidden_states.rows])
        add_and_rms_norm_in_place(hidden_states, residual)
        return Array([feed_forward(self.index, row) for row in hidden_states.rows]), residual


class PPMissingLayer(Module):
    def forward(self, *_: object, **__: object) -> None:
        raise RuntimeError("called a layer that is on another pipeline stage")


@dataclass(frozen=True)
class Stage:
    """The layers that one pipeline stage holds, and how its first layer makes its residual."""

    start_layer: int = 0
    end_layer: int = NUM_LAYERS
    num_layers: int = NUM_LAYERS
    copies_input: bool = False

    @property
    def is_first_rank(self) -> bool:
        return self.start_layer == 0

    @property
    def is_last_rank(self) -> bool:
        return self.end_layer == self.num_layers

    @property
    def world_size(self) -> int:
        return 1 if self.is_first_rank and self.is_last_rank else 2

    def make_layers(self, *_: object, **__: object) -> tuple[int, int, list[Module]]:
        held = range(self.start_layer, self.end_layer)
        layers: list[Module] = [
            DecoderLayer(index, self.copies_input) if index in held else PPMissingLayer()
            for index in range(self.num_layers)
        ]
        return self.start_layer, self.end_layer, layers

    def __str__(self) -> str:
        layers = f"layers {self.start_layer} to {self.end_layer - 1} of {self.num_layers}"
        return f"{layers}, residual {'copied' if self.copies_input else 'aliased'} in layer 0"


WHOLE = Stage()
FIRST_STAGE = Stage(end_layer=4)
MIDDLE_STAGE = Stage(start_layer=3, end_layer=6)
LAST_STAGE = Stage(start_layer=4)


# Taking the classes out of their files.


def last_name(expression: ast.expr) -> str:
    return ast.unparse(expression).rpartition(".")[2]


def runtime_statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields module-level statements, without those for type checkers only."""
    for statement in body:
        match statement:
            case ast.If():
                if last_name(statement.test) != "TYPE_CHECKING":
                    yield from runtime_statements(statement.body)
                yield from runtime_statements(statement.orelse)
            case ast.Try():
                yield from runtime_statements(statement.body)
                yield from runtime_statements(statement.orelse)
            case _:
                yield statement


def is_standard_library(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


class ModelFile:
    """One source file: its module-level names bound, its classes executed on demand."""

    def __init__(self, source: bytes, stand_ins: Mapping[str, Any]) -> None:
        self.stand_ins = stand_ins
        tree = ast.parse(source)
        statements = list(runtime_statements(tree.body))
        self.classes = {node.name: node for node in statements if isinstance(node, ast.ClassDef)}
        self.namespace: dict[str, Any] = {
            "__name__": "model_under_test",
            "__builtins__": {**vars(builtins), "__import__": self.import_stand_in},
        }
        for statement in statements:
            self.bind(statement)

    def import_stand_in(self, name: str, *args: Any) -> Any:
        level = args[3] if len(args) > 3 else 0
        if level == 0 and is_standard_library(name):
            return importlib.__import__(name, *args)
        return Stub(**self.stand_ins)

    def bind(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Import(names=names):
                for alias in names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    self.namespace[bound] = self.imported_module(alias, bound)
            case ast.ImportFrom(module=module, names=names, level=level):
                for alias in names:
                    if level == 0 and module and is_standard_library(module):
                        # A release may be for a later Python than runs the tests (typing.Self).
                        value = getattr(importlib.import_module(module), alias.name, Stub())
                    else:
                        value = self.stand_ins.get(alias.name, Stub())
                    self.namespace[alias.asname or alias.name] = value
            case ast.FunctionDef(name=name):
                if name in self.stand_ins:
                    self.namespace[name] = self.stand_ins[name]
                else:
                    self.execute(statement)
            case ast.ClassDef(name=name):
                self.namespace[name] = self.stand_ins.get(name, type(name, (Module,), {}))
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                self.namespace[name] = literal(value)

    def imported_module(self, alias: ast.alias, bound: str) -> Any:
        if is_standard_library(alias.name):
            return importlib.import_module(alias.name if alias.asname else bound)
        return self.stand_ins.get(alias.name.rpartition(".")[2], Stub(**self.stand_ins))

    def execute_class(self, name: str, bases: tuple[type, ...]) -> type:
        node = self.classes[name]
        node.bases = [ast.Starred(ast.Name("__bases__", ast.Load()), ast.Load())]
        node.keywords = []
        self.namespace["__bases__"] = bases
        self.execute(node)
        built: type = self.namespace[name]
        return built

    def execute(self, statement: ast.stmt) -> None:
        """Runs a class or function definition without decorators that need vLLM."""
        for node in ast.walk(statement):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                node.decorator_list = [
                    decorator
                    for decorator in node.decorator_list
                    if isinstance(decorator, ast.Name) and hasattr(builtins, decorator.id)
                ]
        tree = ast.fix_missing_locations(ast.Module([statement], []))
        # Annotations name types that are stubs here: leave them unevaluated.
        flags = __future__.annotations.compiler_flag
        exec(compile(tree, "<model under test>", "exec", flags, True), self.namespace)


def literal(value: ast.expr) -> Any:
    """Returns a constant's value, or a stub for what would have to be computed."""
    try:
        return ast.literal_eval(value)
    except ValueError:
        return Stub()


class Subject:
    """A model class under test and the class around it.

    Args:
        source: The file that defines both classes.
        model_class: The class whose forward is checked.
        outer_class: The class whose `model` it is, through which layer ids are set; None sets
            them on the model itself.
        extra_sources: Files that define base classes of the two; a base class that is in none
            of the files counts as a plain `torch.nn.Module`.

    Raises:
        LookupError: A class is in none of the sources.
    """

    def __init__(
        self,
        source: bytes,
        model_class: str = "DeepseekV2Model",
        outer_class: str | None = "DeepseekV2ForCausalLM",
        extra_sources: Sequence[bytes] = (),
    ) -> None:
        self.stage = WHOLE
        nn = Stub(Module=Module, ModuleList=list)
        stand_ins: dict[str, Any] = {
            "tensor_model_parallel_all_reduce": lambda states: states,  # there is one rank
            "torch": Stub(Tensor=Array, nn=nn),
            "nn": nn,
            "Module": Module,
            "IntermediateTensors": IntermediateTensors,
            "PPMissingLayer": PPMissingLayer,
            "RMSNorm": RMSNorm,
            "VocabParallelEmbedding": Embedding,
            "make_input_embedding": Embedding,
            "get_pp_group": lambda: self.stage,
            "make_layers": lambda *_, **__: self.stage.make_layers(),
            "fused_allreduce_rms_norm": lambda hidden, residual, norm: norm(hidden, residual),
        }
        self.files = [ModelFile(text, stand_ins) for text in (source, *extra_sources)]
        self.classes: dict[str, type] = {}
        self.model_class: Any = self.class_named(model_class)
        self.outer_class: Any = None if outer_class is None else self.class_named(outer_class)

    def class_named(self, name: str) -> type:
        """Executes a class and the base classes that the sources define."""
        if name not in self.classes:
            file = next((file for file in self.files if name in file.classes), None)
            if file is None:
                raise LookupError(f"no class {name} in the sources")
            bases = [
                self.class_named(base)
                for base in map(last_name, file.classes[name].bases)
                if any(base in other.classes for other in self.files)
            ]
            self.classes[name] = file.execute_class(name, (*bases, Module))
            for other in self.files:
                if name in other.namespace:
                    other.namespace[name] = self.classes[name]
        return self.classes[name]

    def on(self, stage: Stage) -> "Server":
        """Builds the model as one pipeline stage would, by its own `__init__`."""
        self.stage = stage
        config = SimpleNamespace(
            model_type="deepseek_v3",
            num_hidden_layers=stage.num_layers,
            hidden_size=HIDDEN_SIZE,
            vocab_size=16,
            rms_norm_eps=1e-6,
            index_topk=4,
        )
        model = calling(
            f"{self.model_class.__name__}.__init__",
            self.model_class,
            vllm_config=Stub(model_config=Stub(hf_config=config)),
            prefix="model",
        )
        outer: Any = None
        if self.outer_class is not None:
            outer = self.outer_class.__new__(self.outer_class)
            outer.model = model
            outer.config = config
        return Server(self, stage, model, outer)


def calling(what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls code under test: whatever it raises is a failed check that names the call."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise AssertionError(f"{what} raised {type(error).__name__}: {error}") from error


def refusal(what: str, function: Callable[..., Any], *args: Any) -> str | None:
    """Calls code under test that may refuse: the message of its ValueError, or None."""
    try:
        function(*args)
    except ValueError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{what} raised {type(error).__name__}: {error}") from error
    return None


@dataclass(frozen=True)
class Server:
    """One pipeline stage's model, ready to run."""

    subject: Subject
    stage: Stage
    model: Any
    outer: Any

    @property
    def entry(self) -> Any:
        return self.outer if hasattr(self.outer, "forward") else self.model

    @property
    def boundaries(self) -> list[Boundary]:
        return reference(self.stage.num_layers, [embedding(token_id) for token_id in TOKEN_IDS])

    @property
    def holder(self) -> Any:
        return self.model if self.outer is None else self.outer

    @property
    def set_layers(self) -> Callable[[tuple[int, ...]], None]:
        """What sets the layer ids: the method, or an attribute where the model has no method."""
        self.subject.stage = self.stage
        if hasattr(self.holder, "set_aux_hidden_state_layers"):
            method: Callable[[tuple[int, ...]], None] = self.holder.set_aux_hidden_state_layers
            return method
        assert self.outer is None and hasattr(self.model, "aux_hidden_state_layers"), (
            f"{type(self.holder).__name__} has no set_aux_hidden_state_layers"
        )
        return lambda ids: setattr(self.model, "aux_hidden_state_layers", ids)

    def about_ids(self, ids: tuple[int, ...]) -> str:
        return f"ids {ids} ({self.stage})"

    def run(self, *, embeds_given: bool = False) -> Any:
        """Runs one step, as the model runner calls it on this stage."""
        self.subject.stage = self.stage
        Array.operations.clear()
        entering = self.boundaries[self.stage.start_layer]
        hidden_states = Array([list(row) for row in entering.hidden_states])
        intermediate = None
        if entering.residual is not None:
            residual = Array([list(row) for row in entering.residual])
            intermediate = IntermediateTensors(
                {"hidden_states": hidden_states, "residual": residual}
            )
        return calling(
            f"forward ({self.stage})",
            self.entry,
            None if embeds_given else Tokens(TOKEN_IDS),
            Tokens(range(len(TOKEN_IDS))),
            intermediate,
            hidden_states if embeds_given else None,
        )

    def capture(self, ids: tuple[int, ...], *, embeds_given: bool = False) -> Array:
        """Sets the ids, runs, checks every captured state and returns the hidden states."""
        about = self.about_ids(ids) + (" with inputs_embeds" if embeds_given else "")
        calling(f"{about}: setting them", self.set_layers, ids)
        result = self.run(embeds_given=embeds_given)
        assert isinstance(result, tuple), f"{about}: returned {type(result).__name__}, no pair"
        assert len(result) == 2, f"{about}: returned {len(result)} values, expected 2"
        hidden_states, captured = result
        assert len(captured) == len(ids), (
            f"{about}: {len(captured)} states captured, expected {len(ids)}"
        )
        streams = [boundary.stream for boundary in self.boundaries]
        for layer, state in zip(sorted(ids), captured, strict=True):
            assert isinstance(state, Array), f"{about}: the state of id {layer} is no tensor"
            assert state.shape == (len(TOKEN_IDS), HIDDEN_SIZE), (
                f"{about}: the state of id {layer} has shape {state.shape}"
            )
            assert state.tolist() == streams[layer], (
                f"{about}: the state of id {layer} {mismatch(state.tolist(), streams)}"
            )
        assert isinstance(hidden_states, Array), f"{about}: the hidden states are no tensor"
        return hidden_states

    def assert_final(self, result: object, about: str) -> None:
        assert isinstance(result, Array), (
            f"{about} ({self.stage}): returned {type(result).__name__}, expected the bare tensor"
        )
        expected = [rms_norm(row) for row in self.boundaries[-1].stream]
        assert result.tolist() == expected, f"{about} ({self.stage}): wrong hidden states"


def mismatch(values: Matrix, streams: list[Matrix]) -> str:
    for layer, stream in enumerate(streams):
        if values == stream:
            return f"is what enters layer {layer}: the wrong layer, or a buffer written later"
    return "is no residual stream: a wrong sum, or a buffer written later"


# The rules: each returns None or raises AssertionError.


def both_kinds(stage: Stage) -> tuple[Stage, Stage]:
    return replace(stage, copies_input=False), replace(stage, copies_input=True)


def check_plain(subject: Subject) -> None:
    """Without ids the bare hidden states come back, and the forward itself computes nothing."""
    for stage in both_kinds(WHOLE):
        for embeds_given in (False, True):
            server = subject.on(stage)
            server.assert_final(server.run(embeds_given=embeds_given), "no ids set")
            assert not Array.operations, f"no ids set: the forward did {Array.operations}"


def check_order(subject: Subject) -> None:
    """One state an id, in ascending layer order, the residual stream entering that layer."""
    for stage in both_kinds(WHOLE):
        for ids in ((2, 4, 5), (3,), (5, 2, 4), (7, 6, 5, 4, 3, 2, 1)):
            subject.on(stage).capture(ids)


def check_first(subject: Subject) -> None:
    """Id 0 gives the embedding output, and no buffer that is written later."""
    for stage in both_kinds(WHOLE):
        for embeds_given in (False, True):
            server = subject.on(stage)
            hidden_states = server.capture((3, 0), embeds_given=embeds_given)
            server.assert_final(hidden_states, "ids (3, 0)")


def check_last(subject: Subject) -> None:
    """The id after the last layer gives the final stream before the last norm."""
    for stage in (*both_kinds(WHOLE), LAST_STAGE):
        server = subject.on(stage)
        server.assert_final(server.capture((6, NUM_LAYERS)), f"ids (6, {NUM_LAYERS})")


def check_same(subject: Subject) -> None:
    """The hidden states are the same with and without capture."""
    for stage in both_kinds(WHOLE):
        for embeds_given in (False, True):
            server = subject.on(stage)
            calling(server.about_ids((2, 4, 5)), server.set_layers, (2, 4, 5))
            result = server.run(embeds_given=embeds_given)
            hidden_states = result[0] if isinstance(result, tuple) else result
            server.assert_final(hidden_states, "ids (2, 4, 5)")


def check_middle(subject: Subject) -> None:
    """Pipeline stages: only the last one captures, and ids count from the whole model's start."""
    stages = (*both_kinds(FIRST_STAGE), MIDDLE_STAGE)
    for stage in stages:
        assert_intermediate(subject.on(stage), "no ids set")
    last = subject.on(LAST_STAGE)
    last.assert_final(last.run(), "no ids set")
    last.assert_final(last.capture((6, 4)), "ids (6, 4)")
    for stage in stages:
        server = subject.on(stage)
        ids = (stage.start_layer + 1, stage.end_layer - 1)
        # Refusing them when set is as good: such a stage has nowhere to return them.
        if refusal(server.about_ids(ids), server.set_layers, ids) is None:
            assert_intermediate(server, "ids of this stage set")


def assert_intermediate(server: Server, about: str) -> None:
    result = server.run()
    assert isinstance(result, IntermediateTensors), (
        f"{about} ({server.stage}): returned {type(result).__name__}, not IntermediateTensors"
    )
    leaving = server.boundaries[server.stage.end_layer]
    expected = {"hidden_states": leaving.hidden_states, "residual": leaving.residual}
    names = list(result.tensors)
    assert set(names) == set(expected), f"{about} ({server.stage}): holds {names}"
    found = {name: array.tolist() for name, array in result.tensors.items()}
    assert found == expected, f"{about} ({server.stage}): wrong intermediate tensors"


def check_subclass(subject: Subject) -> None:
    """A subclass that calls only `torch.nn.Module.__init__` runs as before."""
    model = subject.on(WHOLE).model

    class SetByHand(subject.model_class):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            Module.__init__(self)
            for name in SET_BY_HAND:
                if name in vars(model):
                    setattr(self, name, getattr(model, name))

    server = Server(subject, WHOLE, SetByHand(), None)
    for embeds_given in (False, True):
        server.assert_final(server.run(embeds_given=embeds_given), "set up by hand")


def check_bad_ids(subject: Subject) -> None:
    """Impossible ids are refused when they are set, by the id and the valid range."""
    cases = [
        (WHOLE, (2, -1), -1),
        (WHOLE, (2, NUM_LAYERS + 1), NUM_LAYERS + 1),
        (WHOLE, (2, 5, 2), 2),
        (LAST_STAGE, (3, 6), 3),
    ]
    for stage, ids, bad in cases:
        server = subject.on(stage)
        about = server.about_ids(ids)
        message = refusal(about, server.set_layers, ids)
        assert message is not None, f"{about}: accepted"
        assert str(bad) in re.findall(r"-?\d+", message), f"{about}: no {bad} in {message!r}"
        for bound in (stage.start_layer, stage.num_layers):
            assert str(bound) in re.findall(r"\d+", message), (
                f"{about}: no bound {bound} in {message!r}"
            )
    for stage, ids in ((WHOLE, (0, NUM_LAYERS)), (LAST_STAGE, (4, NUM_LAYERS))):
        server = subject.on(stage)
        calling(server.about_ids(ids), server.set_layers, ids)


def check_default_ids(subject: Subject) -> None:
    """The default is `(2, n // 2, n - 3)`; too few layers for it is an error naming the key."""
    for num_layers in (61, 27, 8, 7):
        expected = (2, num_layers // 2, num_layers - 3)
        for name, method in default_ids_methods(subject, num_layers):
            found = calling(f"{name} with {num_layers} layers", method)
            assert tuple(found) == expected, f"{name} with {num_layers} layers: {found}"
    for num_layers in (6, 5, 4, 2):
        for name, method in default_ids_methods(subject, num_layers):
            message = refusal(name, method)
            assert message is not None, f"{name} with {num_layers} layers: no ValueError"
            assert LAYER_IDS_KEY in message, f"{name}: no {LAYER_IDS_KEY} in {message!r}"


def default_ids_methods(
    subject: Subject, num_layers: int
) -> list[tuple[str, Callable[[], tuple[int, ...]]]]:
    server = subject.on(Stage(end_layer=num_layers, num_layers=num_layers))
    found = [
        (name, getattr(server.holder, name))
        for name in DEFAULT_IDS_METHODS
        if hasattr(server.holder, name)
    ]
    assert found, f"{type(server.holder).__name__} has no {' and no '.join(DEFAULT_IDS_METHODS)}"
    return found


ALL_RULES: dict[str, Callable[[Subject], None]] = {
    "plain": check_plain,
    "order": check_order,
    "first": check_first,
    "last": check_last,
    "same": check_same,
    "middle": check_middle,
    "subclass": check_subclass,
    "bad_ids": check_bad_ids,
    "default_ids": check_default_ids,
}


def check_all(subject: Subject, rules: Sequence[str] = tuple(ALL_RULES)) -> dict[str, str]:
    """Returns for each rule "ok" or what is wrong."""
    results = {}
    for rule in rules:
        try:
            ALL_RULES[rule](subject)
        except AssertionError as error:
            results[rule] = str(error)
        else:
            results[rule] = "ok"
    return results
