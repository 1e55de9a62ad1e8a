"""Does vLLM's own code do what EAGLE-3 needs of it? Run by the server's interpreter, see verify.py.

Only the standard library, that interpreter's torch and its vLLM, and no syntax newer than Python
3.9. vLLM's real classes and functions are run; only what they are given are stand-ins, so small
that a few numbers are computed, on the CPU. No weights, no config and no GPU are needed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import textwrap
import time
from contextlib import contextmanager
from types import FunctionType, MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

INTERFACES = "vllm.model_executor.models.interfaces"
REGISTRY = "vllm.model_executor.models.registry"
DEEPSEEK = "vllm.model_executor.models.deepseek_v2"
RUNNER = "vllm.v1.worker.gpu_model_runner"
PROPOSERS = ("vllm.v1.spec_decode.llm_base_proposer", "vllm.v1.spec_decode.eagle")

SET_LAYERS = "set_aux_hidden_state_layers"
DEFAULT_LAYERS = re.compile(r"\bget_eagle3_(?:default_)?aux_hidden_state_layers\b")

NUM_LAYERS = 8
DEFAULT_IDS = (2, NUM_LAYERS // 2, NUM_LAYERS - 3)
"""What vLLM's models give by default (llama.py from 0.8.5 on, interfaces.py from 0.18.0 on)."""
NUM_TOKENS, HIDDEN_SIZE = 3, 4
TOKEN_ID = 163605

ADMITTED, MADE_UP = "llama", "no_such_model_type"
LONGEST_DETAIL = 400


class NotApplicableError(Exception):
    """A check says nothing here; its text is why."""


class FailedError(Exception):
    """What a check asserts does not hold; its text is how."""


class Loaded(NamedTuple):
    """A model's class and what it is made of.

    Attributes:
        owner: The class that the registry gives for the architecture.
        language_model: The class of the language model: the same, unless it is a wrapper.
        bare: Whether the wrapper holds the inner model itself (Kimi-K2.5 in 0.15.0 and 0.15.1,
            Kimi-VL up to 0.14.1).
    """

    owner: Any
    language_model: Any
    bare: bool

    @property
    def is_wrapper(self) -> bool:
        """Whether it is a multimodal model around a language model."""
        return self.owner is not self.language_model

    @property
    def inner(self) -> Any:
        """The class with the layers: ``model_cls`` from 0.11.1 on, else the module's one."""
        chosen = getattr(self.language_model, "model_cls", None)
        if chosen is not None:
            return chosen
        for base in self.language_model.__mro__:
            inner = getattr(sys.modules.get(base.__module__), "DeepseekV2Model", None)
            if inner is not None:
                return inner
        raise FailedError(f"{self.language_model.__name__} names no class for its layers")


class Residuals:
    """Stand-ins for the layers and the last norm, which record the stream that enters each.

    In place, they write where vLLM's fused add and norm writes, so that a state that is kept
    without a copy is wrong at the end. Out of place, they leave what they are given as it is, as
    other implementations do, so that a state that only their writing makes right is wrong too.
    All values are small integers: sums are exact in any order.
    """

    def __init__(self, torch: Any, *, in_place: bool) -> None:
        self.torch = torch
        self.in_place = in_place
        self.streams: list[Any] = []
        self.layers = [self._layer(number) for number in range(NUM_LAYERS)]

    def values(self, factor: int) -> Any:
        """A new tensor of ``[tokens, hidden size]`` that differs in every element and by factor."""
        rows = [
            [float((row * HIDDEN_SIZE + column + 1) * factor) for column in range(HIDDEN_SIZE)]
            for row in range(NUM_TOKENS)
        ]
        return self.torch.tensor(rows, dtype=self.torch.float32, device="cpu")

    def embed(self, _: Any) -> Any:
        """In place of the embedding."""
        return self.values(1)

    def norm(self, hidden_states: Any, residual: Any = None) -> Any:
        """In place of the last norm, fused with the last addition."""
        self._enter(hidden_states, residual)
        hidden_states, residual = self._written(hidden_states, residual)
        residual.add_(hidden_states)
        hidden_states.fill_(-1.0)
        return hidden_states, residual

    def _written(self, hidden_states: Any, residual: Any) -> tuple[Any, Any]:
        """What is written to: what was given, or copies of it."""
        if self.in_place:
            return hidden_states, residual
        return hidden_states.clone(), None if residual is None else residual.clone()

    def _enter(self, hidden_states: Any, residual: Any) -> None:
        stream = hidden_states.clone() if residual is None else hidden_states + residual
        self.streams.append(stream)

    def _layer(self, number: int) -> Any:
        def forward(positions: Any, hidden_states: Any, residual: Any, *_: Any) -> Any:
            self._enter(hidden_states, residual)
            hidden_states, residual = self._written(hidden_states, residual)
            if residual is None:
                residual = hidden_states  # up to 0.10.2, and from 0.25.0 on, without a copy
            else:
                residual.add_(hidden_states)
                hidden_states.fill_(-1.0)
            residual.add_(self.values(number + 2))
            return self.values(10 * number + 3), residual

        layer = _Callable(forward)
        layer.use_sequence_parallel_moe = False
        return layer


class _Callable(SimpleNamespace):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function=function)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def prove(models: Sequence[dict[str, Any]], edges: Sequence[str]) -> dict[str, Any]:
    """Import vLLM and check each model.

    Args:
        models: Each with ``architecture``; ``text_types``, the model types that the speculative
            config will see; for a wrapper ``image_token``, an expression of ``target_model``, and
            ``language_model``, its class as ``module:name``.
        edges: The modules whose inner model is said to capture ids 0 and ``n`` too.

    Returns:
        ``error`` if vLLM cannot be imported: a ``kind`` and a ``message``; else ``models``, each
        with its ``checks``. ``import_seconds``; ``gpu_context``, whether one was made.
    """
    started = time.monotonic()
    package, loading, error, results = None, "torch", None, []
    torch: Any = None
    try:
        torch = importlib.import_module("torch")
        loading = "vllm"
        package = os.path.dirname(importlib.import_module("vllm").__file__ or "")  # noqa: PTH120
        loading = REGISTRY
        importlib.import_module(loading)
        loading = DEEPSEEK
        _import_outer()
    except BaseException as failure:
        error = {"kind": _kind(failure), "message": f"{loading}: {said(failure)}"}
    import_seconds = time.monotonic() - started
    if error is None:
        results = [_checks(torch, model, edges) for model in models]
    return {
        "error": error,
        "package": None if package is None else os.fsencode(package).decode("latin-1"),
        "models": results,
        "import_seconds": round(import_seconds, 2),
        "gpu_context": torch is not None and _has_gpu_context(torch),
    }


def _import_outer() -> None:
    """Import what most of the family derives from, unless its own source is what is wrong.

    That is then told of each model.
    """
    try:
        importlib.import_module(DEEPSEEK)
    except BaseException as failure:
        if _kind(failure) != "error":
            raise


def _has_gpu_context(torch: Any) -> bool:
    try:
        return bool(torch.cuda.is_initialized())
    except Exception:
        return False  # A torch that was built without CUDA.


def _kind(failure: BaseException) -> str:
    text = str(failure)
    if ".so" in text or "undefined symbol" in text:
        return "shared-library"
    is_missing = isinstance(failure, ModuleNotFoundError) and not _is_vllm(failure.name)
    return "missing-module" if is_missing else "error"


def _is_vllm(module: str | None) -> bool:
    return (module or "vllm").partition(".")[0] == "vllm"


def said(failure: BaseException) -> str:
    """An exception on one line."""
    words = " ".join(f"{type(failure).__name__}: {failure}".split())
    return words if len(words) <= LONGEST_DETAIL else f"{words[:LONGEST_DETAIL]}..."


def _checks(torch: Any, model: dict[str, Any], edges: Sequence[str]) -> dict[str, Any]:
    """Every check of one model, in order; one that fails does not keep the others from running."""
    loaded: list[Loaded] = []

    def load() -> str:
        loaded.append(_load(model))
        return f"{loaded[0].owner.__module__}.{loaded[0].owner.__name__}"

    def of_class(check: Callable[[Loaded], str]) -> Callable[[], str]:
        def run() -> str:
            if not loaded:
                raise NotApplicableError("its class was not loaded")
            return check(loaded[0])

        return run

    checks: list[tuple[str, Callable[[], str]]] = [
        ("import", load),
        ("interface", of_class(_interface)),
        ("methods", of_class(_methods)),
        ("aux-hidden-states", of_class(lambda found: _aux_hidden_states(torch, found, edges))),
        ("allowlist", lambda: _allowlist(model["text_types"])),
    ]
    if model.get("language_model"):
        checks.append(("image-token", lambda: _image_token(model, loaded)))
    return {
        "architecture": model["architecture"],
        "checks": [_outcome(name, check) for name, check in checks],
    }


def _outcome(name: str, check: Callable[[], str]) -> dict[str, Any]:
    ok: bool | None
    try:
        ok, detail = True, check()
    except NotApplicableError as reason:
        ok, detail = None, str(reason)
    except FailedError as failure:
        ok, detail = False, str(failure)
    except BaseException as failure:  # A module may say sys.exit(): the others are still asked.
        ok, detail = False, said(failure)
    return {"name": name, "ok": ok, "detail": " ".join(detail.split())}


def _load(model: dict[str, Any]) -> Loaded:
    registry = importlib.import_module(REGISTRY).ModelRegistry
    entry = registry.models.get(model["architecture"])
    if entry is None:
        raise NotApplicableError("not in this release's registry")
    try:
        owner = entry.load_model_cls()
        language_model = owner
        if model.get("language_model"):
            module, _, name = model["language_model"].partition(":")
            language_model = getattr(importlib.import_module(module), name)
    except Exception as failure:
        reason = _not_ours(failure, getattr(entry, "module_name", ""))
        if reason is None:
            raise
        raise NotApplicableError(f"{reason}: {said(failure)}") from failure
    constructor = inspect.getsource(owner.__init__) if language_model is not owner else ""
    return Loaded(owner, language_model, "= DeepseekV2Model(" in constructor)


def _not_ours(failure: Exception, module: str) -> str | None:
    """Why a model's module cannot be imported whatever vLLM's source says, or None."""
    if isinstance(failure, ImportError) and not _is_vllm(failure.name):
        return f"needs {failure.name}, which is not installed or not as expected"
    # vllm/models/ holds models that are written for one platform (0.25.0 on). On others that says
    # nothing of them, unless it is the generic implementation that cannot be imported.
    about_code = isinstance(failure, (NameError, SyntaxError)) or DEEPSEEK not in sys.modules
    platform = importlib.import_module("vllm.platforms").current_platform
    if module.startswith("vllm.models.") and not about_code and not platform.is_cuda():
        return f"{module} cannot be imported on this platform"
    return None


# interface, methods


def _protocol() -> Any:
    return getattr(importlib.import_module(INTERFACES), "SupportsEagle3", None)


def _interface(loaded: Loaded) -> str:
    supports = getattr(importlib.import_module(INTERFACES), "supports_eagle3", None)
    if _protocol() is None:
        raise NotApplicableError("this release has no protocol SupportsEagle3 (up to 0.10.0)")
    if supports is None:
        raise FailedError(f"{INTERFACES} has SupportsEagle3, and no supports_eagle3 to ask")
    if not supports(loaded.owner):
        raise FailedError(f"supports_eagle3({loaded.owner.__name__}) is false")
    return f"supports_eagle3({loaded.owner.__name__}) is true"


def _default_method() -> str:
    """The method that this release's runner asks for the default ids, by its own source."""
    spec = importlib.util.find_spec(RUNNER)
    source = ""
    if spec is not None and spec.origin:
        with open(spec.origin, encoding="utf-8") as file:  # noqa: PTH123
            source = file.read()
    called: set[str] = set(DEFAULT_LAYERS.findall(source))
    if len(called) != 1:
        called = {name for name in dir(_protocol()) if DEFAULT_LAYERS.fullmatch(name)}
    if len(called) != 1:
        raise FailedError("cannot tell which method this release's runner asks for default ids")
    return called.pop()


def _methods(loaded: Loaded) -> str:
    owner = loaded.owner
    names = (SET_LAYERS, _default_method())
    for name in names:
        function = getattr(owner, name, None)
        if not callable(function):
            raise FailedError(f"{owner.__name__} has no {name}")
        code = getattr(inspect.unwrap(function), "__code__", None)
        # The protocol's own, up to 0.17.1, is a docstring and three dots: it refers to nothing.
        if code is not None and not code.co_names:
            raise FailedError(f"{owner.__name__}.{name} does nothing")
    return " and ".join(names)


# aux-hidden-states


def _aux_hidden_states(torch: Any, loaded: Loaded, edges: Sequence[str]) -> str:
    with torch.no_grad(), _single_rank(loaded):
        plain, streams = _run(torch, loaded, None)
        if isinstance(plain, (tuple, list)):
            raise FailedError("with no ids set, forward does not return a plain tensor")
        ids = _default_ids(torch, loaded)
        _compare(torch, loaded, ids, plain, streams)
        proven = f"ids {', '.join(map(str, ids))} of {NUM_LAYERS} layers"
        if loaded.inner.forward.__module__ in edges:
            _compare(torch, loaded, (0, *ids, NUM_LAYERS), plain, streams)
            proven += f", with 0 and {NUM_LAYERS}"
    return f"{proven}: the streams that entered"


def _default_ids(torch: Any, loaded: Loaded) -> tuple[int, ...]:
    outermost, _ = _model(torch, loaded)
    name = _default_method()
    ids = getattr(outermost, name)()
    if ids != DEFAULT_IDS:
        raise FailedError(
            f"{name} gives {ids!r} for {NUM_LAYERS} layers; vLLM's default is {DEFAULT_IDS}"
        )
    return DEFAULT_IDS


def _model(torch: Any, loaded: Loaded, *, in_place: bool = True) -> tuple[Any, Residuals]:
    """The outermost model, made without any constructor but torch's own."""

    def made(owner: Any) -> Any:
        instance = object.__new__(owner)
        torch.nn.Module.__init__(instance)
        return instance

    # torch's own __call__ in place of the one that compiles (support_torch_compile).
    plain = {"__call__": torch.nn.Module.__call__, "__module__": loaded.inner.__module__}
    inner = made(type(loaded.inner.__name__, (loaded.inner,), plain))
    stand_ins = Residuals(torch, in_place=in_place)
    config = SimpleNamespace(hidden_size=HIDDEN_SIZE, num_hidden_layers=NUM_LAYERS)
    for name, value in (
        ("config", config),
        ("hidden_size", HIDDEN_SIZE),
        ("layers", stand_ins.layers),
        ("start_layer", 0),
        ("end_layer", NUM_LAYERS),
        ("embed_tokens", stand_ins.embed),
        ("norm", stand_ins.norm),
        # Switches of vllm/models/deepseek_v32/nvidia/model.py (0.25.0 on).
        ("use_sequence_parallel", False),
        ("replicated_embed", False),
    ):
        setattr(inner, name, value)
    _construct_ids(inner, loaded.inner)
    if loaded.bare:
        language_model = inner
    else:
        language_model = made(loaded.language_model)
        language_model.config = config
        language_model.model = inner
    if not loaded.is_wrapper:
        return language_model, stand_ins
    outermost = made(loaded.owner)
    outermost.config = SimpleNamespace(text_config=config)
    outermost.language_model = language_model
    return outermost, stand_ins


def _construct_ids(instance: Any, owner: Any) -> None:
    """Run what a class's own constructor does about the layer ids (0.18.0 on), and nothing else."""
    for base in owner.__mro__:
        constructor = vars(base).get("__init__")
        if constructor is None:
            continue
        # Not the constructor's own source: support_torch_compile wraps it.
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        statements: list[ast.stmt] = [
            statement
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef) and function.name == "__init__"
            for statement in function.body
            if isinstance(statement, (ast.Assign, ast.AnnAssign))
            and "self.aux_hidden_state_layers" in map(ast.unparse, _targets(statement))
        ]
        _execute(statements, {**vars(sys.modules[base.__module__]), "self": instance})
        return


def _targets(statement: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return statement.targets if isinstance(statement, ast.Assign) else [statement.target]


def _execute(statements: list[ast.stmt], names: dict[str, Any]) -> None:
    """Run statements of vLLM's own source."""
    code = compile(ast.Module(statements, []), "vllm", "exec")
    exec(code, names)  # noqa: S102  it is the code that the server would run


@contextmanager
def _single_rank(loaded: Loaded) -> Iterator[None]:
    """One rank of everything, for the modules whose forward is run."""
    group = SimpleNamespace(
        is_first_rank=True, is_last_rank=True, world_size=1, rank=0, rank_in_group=0
    )
    single = {
        "get_pp_group": lambda: group,
        "tensor_model_parallel_all_reduce": lambda states: states,
        "fused_allreduce_rms_norm": lambda states, residual, norm: norm(states, residual),
    }
    undo: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for owner in (loaded.inner, loaded.language_model, loaded.owner):
            names = inspect.unwrap(owner.forward).__globals__
            replaced = {name: names[name] for name in single if name in names}
            undo.append((names, replaced))
            names.update({name: single[name] for name in replaced})
        yield
    finally:
        for names, replaced in reversed(undo):
            names.update(replaced)


def _run(
    torch: Any, loaded: Loaded, ids: tuple[int, ...] | None, *, in_place: bool = True
) -> tuple[Any, list[Any]]:
    """A forward of the outermost model, and the streams that entered its layers and its norm."""
    outermost, stand_ins = _model(torch, loaded, in_place=in_place)
    if ids is not None:
        getattr(outermost, SET_LAYERS)(ids)
    tokens = torch.tensor(list(range(NUM_TOKENS)), device="cpu")
    # A runner gives a multimodal model embeddings, and a text model token ids.
    embedded = stand_ins.embed(None) if loaded.is_wrapper else None
    result = outermost.forward(
        input_ids=None if loaded.is_wrapper else tokens,
        positions=tokens,
        intermediate_tensors=None,
        inputs_embeds=embedded,
    )
    if len(stand_ins.streams) != NUM_LAYERS + 1:
        raise FailedError(f"forward entered {len(stand_ins.streams) - 1} of {NUM_LAYERS} layers")
    return result, stand_ins.streams


def _compare(
    torch: Any, loaded: Loaded, ids: tuple[int, ...], plain: Any, streams: Sequence[Any]
) -> None:
    """With these ids, forward gives the streams, and all else is as it is without any ids."""
    for in_place in (True, False):
        result, entered = _run(torch, loaded, ids, in_place=in_place)
        if not isinstance(result, tuple) or len(result) != 2:  # noqa: PLR2004
            raise FailedError("with ids set, forward returns no (hidden_states, aux_hidden_states)")
        hidden_states, states = result
        if not torch.equal(hidden_states, plain):
            raise FailedError("collecting changes the hidden states that forward returns")
        for layer_id, stream in enumerate(entered):
            if not torch.equal(stream, streams[layer_id]):
                raise FailedError(f"collecting changes the stream that enters layer {layer_id}")
        _compare_states(torch, ids, states, entered)


def _compare_states(torch: Any, ids: tuple[int, ...], states: Any, streams: Sequence[Any]) -> None:
    if not isinstance(states, (list, tuple)):
        raise FailedError(f"the aux hidden states are a {type(states).__name__}, not a list")
    if len(states) != len(ids):
        raise FailedError(f"{len(states)} aux hidden states for ids {ids}")
    for state, layer_id in zip(states, ids):  # noqa: B905  Python 3.9 has no strict
        if not torch.equal(state, streams[layer_id]):
            taken = [k for k, stream in enumerate(streams) if torch.equal(state, stream)]
            what = f"the stream entering layer {taken[0]}" if taken else "no stream of the model"
            raise FailedError(f"id {layer_id} gives {what}")
        if state.dtype != streams[layer_id].dtype:
            raise FailedError(
                f"id {layer_id} gives {state.dtype}, where the stream is {streams[layer_id].dtype}"
            )


# allowlist


class _Asked:
    """In place of a speculative config: what is not given here is the class's own."""

    def __init__(self, owner: Any, **given: Any) -> None:
        self.__dict__.update(given, _owner=owner)

    def __getattr__(self, name: str) -> Any:
        fields = getattr(self._owner, "__dataclass_fields__", {})
        value = inspect.getattr_static(self._owner, name, fields.get(name))
        if isinstance(value, FunctionType):
            return MethodType(value, self)
        if isinstance(value, property) and value.fget is not None:
            return value.fget(self)
        if isinstance(value, staticmethod):
            return value.__func__
        return getattr(value, "default", value)


def _allowlist(text_types: Sequence[str]) -> str:
    owner = importlib.import_module("vllm.config").SpeculativeConfig
    verify: Any = inspect.getattr_static(owner, "_verify_args", None)
    while not isinstance(verify, FunctionType):
        verify = getattr(verify, "wrapped", None) or getattr(verify, "__wrapped__", None)
        if verify is None:
            raise FailedError("could not be asked: SpeculativeConfig has no _verify_args")
    if "hf_text_config.model_type" not in inspect.getsource(verify):
        if re.search(r"is only supported for .*\bmodels", inspect.getsource(owner)):
            raise FailedError("could not be asked: the test is not in _verify_args")
        raise NotApplicableError("this release has no allowlist")
    _controls(owner, verify)
    for text_type in text_types:
        refusal = _refusal(owner, verify, text_type)
        if refusal is not None:
            raise FailedError(f"{text_type} is refused: {refusal}")
    if not text_types:
        raise NotApplicableError("no config type of this model is known to be compared with it")
    return f"admits {', '.join(text_types)}"


def _controls(owner: Any, verify: Any) -> None:
    """One type that every release admits, and one that none does."""
    refusal = _refusal(owner, verify, ADMITTED)
    if refusal is not None:
        raise FailedError(f"could not be asked: {ADMITTED} is refused: {refusal}")
    if _refusal(owner, verify, MADE_UP) is None:
        raise FailedError(f"could not be asked: {MADE_UP} is admitted")


def _refusal(owner: Any, verify: Any, text_type: str) -> str | None:
    """Why the release's own check refuses a target's model type, or None."""
    text_config = SimpleNamespace(model_type=text_type)
    asked = _Asked(
        owner,
        method="eagle3",
        num_speculative_tokens=3,
        target_model_config=SimpleNamespace(hf_text_config=text_config, hf_config=text_config),
        draft_model_config=None,
        tensor_parallel_size=None,
    )
    try:
        verify(asked)
    except Exception as failure:
        return said(failure)
    return None


# image-token


def _image_token(model: dict[str, Any], loaded: Sequence[Loaded]) -> str:
    load_model = _load_model_of_proposer()
    source = textwrap.dedent(inspect.getsource(load_model))
    if "image_token_index" not in source:
        raise NotApplicableError("this release's proposer copies no image token")
    copying = _copying(ast.parse(source))
    if not copying:
        raise FailedError("could not be asked: load_model does not copy the image token as known")
    # The proposer goes by the name of the class.
    name = loaded[0].owner.__name__ if loaded else model["architecture"]
    where = model.get("image_token") or "target_model.config.image_token_index"
    target = _target(name, where)
    proposer = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace()))
    proposer.get_model_name = lambda model: type(model).__name__
    names = {**load_model.__globals__, "self": proposer, "target_model": target}
    try:
        _execute(copying, names)
    except AttributeError as failure:
        raise FailedError(f"is not read from {where}: {said(failure)}") from failure
    copied = getattr(proposer.model.config, "image_token_index", None)
    if copied != TOKEN_ID:
        raise FailedError(f"is not read from {where}: {copied!r} is copied")
    return f"is read from {where}"


def _load_model_of_proposer() -> Any:
    for name in PROPOSERS:
        if importlib.util.find_spec(name) is None:
            continue
        module = importlib.import_module(name)
        for owner in vars(module).values():
            if inspect.isclass(owner) and owner.__module__ == name:
                load_model = vars(owner).get("load_model")
                if load_model is not None:
                    return inspect.unwrap(load_model)
    raise FailedError("could not be asked: no proposer with a load_model was found")


def _copying(node: ast.AST) -> list[ast.stmt]:
    """The statements of the first branch that copy the image token, without what surrounds them."""
    for child in ast.walk(node):
        if isinstance(child, ast.If) and any(
            isinstance(name, ast.Name) and name.id == "supports_multimodal"
            for name in ast.walk(child.test)
        ):
            found = [statement for statement in child.body if _copies(statement)]
            if found:
                return found
    return []


def _copies(statement: ast.stmt) -> bool:
    return any(
        isinstance(target, ast.Attribute) and target.attr == "image_token_index"
        for node in ast.walk(statement)
        if isinstance(node, ast.Assign)
        for target in node.targets
    )


def _target(name: str, where: str) -> Any:
    """A target model of a class of this name that keeps its image token's id there and only there.

    Args:
        name: The class's name.
        where: As in ``target_model.config.media_placeholder_token_id``.
    """
    target = type(name, (), {})()
    target.config = SimpleNamespace()
    holder: Any = target
    *parents, last = where.split(".")[1:]
    for parent in parents:
        if not hasattr(holder, parent):
            setattr(holder, parent, SimpleNamespace())
        holder = getattr(holder, parent)
    setattr(holder, last, TOKEN_ID)
    return target


def answer(nonce: str, request: str) -> bytes:
    """The answer as JSON in ASCII, between marks that no other output can contain."""
    # As in a server's console script, the working directory is not searched.
    sys.path[:] = [entry for entry in sys.path if isinstance(entry, str) and entry]
    asked = json.loads(request)
    document = json.dumps(prove(asked["models"], asked["edges"]))
    return f"\nbegin-{nonce}{document}end-{nonce}\n".encode("ascii")


def write(data: bytes) -> None:
    """Write to the standard output itself: vLLM may have replaced ``sys.stdout``."""
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    write(answer(sys.argv[1], sys.argv[2]))
    os._exit(0)  # vLLM registers functions to run at exit; there is nothing to tidy up.
