"""Which layer ids are in effect for which draft config, and stand-ins to ask the patched code."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

KEY = "eagle_aux_hidden_state_layer_ids"
CONVENTION = "eagle_aux_hidden_state_layer_ids_convention"
METHOD = "eagle3_aux_hidden_state_layers"
DEFAULT = (2, 4, 6)


class DraftConfig(SimpleNamespace):
    """What vLLM makes of a draft model's ``config.json``."""

    model_type = "eagle"


class SpeculatorsConfig(SimpleNamespace):
    """The same for the speculators format: vLLM writes the top level itself."""

    model_type = "speculators"


def top(ids: object, **keys: object) -> DraftConfig:
    """A config with the ids at its top level."""
    return DraftConfig(**{KEY: ids}, **keys)


def nested(ids: object, **keys: object) -> DraftConfig:
    """A config with the ids under ``eagle_config``."""
    return DraftConfig(eagle_config={KEY: ids, **keys})


# As in the public draft models (table a of the reports), for a target of 61 layers.
NUM_LAYERS = 61
BOUNDARIES = [2, 30, 58]
OUTPUTS = [1, 29, 57]


@dataclass(frozen=True)
class Case:
    """A list in a draft model's config.

    Attributes:
        place: Where it stands: ``top``, ``nested`` or ``speculators``.
        ids: The list.
        convention: What the config says that it counts, None if nothing.
        patched: The boundaries that it means where the patch is in.
        warned: Whether vLLM then warns, and the doctor says, that the ids look like outputs.
    """

    place: str
    ids: tuple[int, ...]
    convention: str | None
    patched: tuple[int, ...]
    warned: bool = False

    @property
    def config(self) -> dict[str, object]:
        """The keys of the draft model's config."""
        said = {} if self.convention is None else {CONVENTION: self.convention}
        keys = {KEY: list(self.ids), **said}
        return {"eagle_config": keys} if self.place == "nested" else keys

    @property
    def hf_config(self) -> object:
        """What vLLM makes of it."""
        kind = SpeculatorsConfig if self.place == "speculators" else DraftConfig
        return kind(**self.config)


MEANINGS: dict[str, Case] = {
    "outputs, top level": Case("top", (1, 29, 57), None, (1, 29, 57), warned=True),
    "boundaries, top level": Case("top", (2, 30, 58), None, (2, 30, 58)),
    "embedding, top level": Case("top", (0, 29, 57), None, (0, 29, 57)),
    "1 first, top level": Case("top", (1, 14, 39), None, (1, 14, 39)),
    "outputs, nested": Case("nested", (1, 29, 57), None, (1, 29, 57), warned=True),
    "boundaries, nested": Case("nested", (2, 20, 40), None, (2, 20, 40)),
    "embedding, nested": Case("nested", (0, 29, 57), None, (0, 29, 57)),
    "outputs, speculators": Case("speculators", (1, 29, 57), None, (1, 29, 57)),
    "boundaries, speculators": Case("speculators", (2, 30, 58), None, (2, 30, 58)),
    "embedding, speculators": Case("speculators", (0, 29, 57), None, (0, 29, 57)),
    "outputs, top level, said": Case("top", (1, 29, 57), "output", (2, 30, 58)),
    "2 first, top level, said": Case("top", (2, 30, 58), "output", (3, 31, 59)),
    "embedding, top level, said": Case("top", (0, 29, 57), "output", (1, 30, 58)),
    "outputs, nested, said": Case("nested", (1, 29, 57), "output", (2, 30, 58)),
    "2 first, nested, said": Case("nested", (2, 20, 40), "output", (3, 21, 41)),
    "embedding, nested, said": Case("nested", (0, 29, 57), "output", (1, 30, 58)),
    "boundaries, top level, said": Case("top", (1, 29, 57), "boundary", (1, 29, 57)),
    "boundaries, nested, said": Case("nested", (1, 29, 57), "boundary", (1, 29, 57)),
}
"""What each list means. Where vLLM is as released, ids are as they are wherever it reads them."""

IN_EFFECT: dict[str, tuple[object, tuple[int, ...] | None]] = {
    **{name: (case.hf_config, case.patched) for name, case in MEANINGS.items()},
    "a tuple": (top((2, 30, 58)), (2, 30, 58)),
    "one id": (nested([1]), (1,)),
    "1 not first": (nested([2, 1, 57]), (2, 1, 57)),
    "both places": (top([3, 4, 5], eagle_config={KEY: [6, 7, 8]}), (3, 4, 5)),
    "top level empty": (top([], eagle_config={KEY: OUTPUTS}), (1, 29, 57)),
    "top level null": (top(None, eagle_config={KEY: OUTPUTS}), (1, 29, 57)),
    "another nested name": (DraftConfig(eagle_config={"layer_ids": [1, 46, 90]}), (1, 46, 90)),
    "both nested names": (nested(BOUNDARIES, layer_ids=[3, 4, 5]), (2, 30, 58)),
    "convention above nested ids": (
        DraftConfig(**{CONVENTION: "output"}, eagle_config={KEY: OUTPUTS}),
        (2, 30, 58),
    ),
    "convention below top-level ids": (
        top(OUTPUTS, eagle_config={CONVENTION: "output"}),
        (2, 30, 58),
    ),
    "two conventions": (
        DraftConfig(**{CONVENTION: "output"}, eagle_config={KEY: [3], CONVENTION: "boundary"}),
        (4,),
    ),
    "convention null": (nested(OUTPUTS, **{CONVENTION: None}), (1, 29, 57)),
    "speculators said to be outputs": (
        SpeculatorsConfig(**{KEY: OUTPUTS, CONVENTION: "output"}),
        (2, 30, 58),
    ),
    "none": (DraftConfig(), None),
    "all empty": (top([], eagle_config={KEY: [], "layer_ids": ()}), None),
    "other nested keys": (DraftConfig(eagle_config={"use_aux_hidden_state": True}), None),
    "eagle_config null": (DraftConfig(eagle_config=None), None),
    "eagle_config no mapping": (DraftConfig(eagle_config="eagle"), None),
    "a convention alone": (DraftConfig(**{CONVENTION: "output"}), None),
}
"""The draft config, and the ids that the config decides on; None leaves the choice to vLLM."""

REFUSED: dict[str, tuple[object, str]] = {
    "a string": (top("2,30,58"), KEY),
    "a number": (nested(3), f"eagle_config.{KEY}"),
    "zero": (top(0), KEY),
    "a mapping": (nested({"2": 30}), f"eagle_config.{KEY}"),
    "a bool among them": (nested([True, 29, 57]), f"eagle_config.{KEY}"),
    "a float among them": (top([2.0, 30, 58]), KEY),
    "a string among them": (top(["2", 30, 58]), KEY),
    "null among them": (nested([1, None]), f"eagle_config.{KEY}"),
    "another nested name": (DraftConfig(eagle_config={"layer_ids": 5}), "eagle_config.layer_ids"),
    "an unknown convention": (nested(OUTPUTS, **{CONVENTION: "outputs"}), CONVENTION),
    "no convention": (top(BOUNDARIES, **{CONVENTION: False}), CONVENTION),
    "an unknown convention alone": (DraftConfig(**{CONVENTION: ["output"]}), CONVENTION),
}
"""The draft config, and what the error names."""

OTHER_METHODS: dict[str, tuple[str, object]] = {
    "extract_hidden_states": ("extract_hidden_states", top([1, 2, 3])),
    "extract_hidden_states, a convention": (
        "extract_hidden_states",
        top([1, 2, 3], **{CONVENTION: "output"}),
    ),
    "dflash": ("dflash", DraftConfig(dflash_config={"target_layer_ids": [1, 9, 17]})),
    "dflash, top level": ("dflash", top([1, 9, 17], eagle_config={KEY: [4, 5, 6]})),
    "dspark": ("dspark", DraftConfig(dspark_target_layer_ids=[1, 9, 17])),
    "dense dspark": ("dspark", DraftConfig(target_layer_ids=[1, 9, 17])),
    "eagle": ("eagle", nested("no ids at all")),
}
"""Methods that are not concerned, with ids of their own: whatever vLLM makes of them stands."""


@dataclass
class Logger:
    """A logger as vLLM 0.8.5 has it: its methods take a message and nothing else."""

    messages: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def info_once(self, msg: str) -> None:
        """Keep the message, as vLLM does, only the first time."""
        if msg not in self.messages:
            self.messages.append(msg)

    def warning_once(self, msg: str) -> None:
        """The same for a warning."""
        if msg not in self.warnings:
            self.warnings.append(msg)


class Config:
    """Runs the methods of the class ``SpeculativeConfig`` in a config's source.

    Attributes:
        logger: What the source calls ``logger``.
    """

    def __init__(self, source: bytes) -> None:
        owner = next(
            node
            for node in ast.parse(source).body
            if isinstance(node, ast.ClassDef) and node.name == "SpeculativeConfig"
        )
        functions = [
            node
            for node in owner.body
            if isinstance(node, ast.FunctionDef) and node.name.startswith(("eagle3_", "compute_"))
        ]
        self.logger = Logger()
        namespace: dict[str, Any] = {
            "Any": Any,
            "hashlib": hashlib,
            "safe_hash": hashlib.md5,
            "logger": self.logger,
        }
        run(functions, namespace)
        self._methods = {node.name: namespace[node.name] for node in functions}

    def stand_in(
        self, hf_config: object, method: str = "eagle3", target: str | None = "deepseek_v3"
    ) -> Any:
        """A config object with the source's methods, for a target by its text model's type."""
        draft = None
        if hf_config is not None:
            draft = SimpleNamespace(hf_config=hf_config, compute_hash=lambda: "draft")
        text = SimpleNamespace(model_type=target, num_hidden_layers=NUM_LAYERS)
        config = type("SpeculativeConfig", (), self._methods)()
        config.method = method
        config.draft_model_config = draft
        config.target_model_config = target and SimpleNamespace(hf_text_config=text)
        config.enable_adaptive_verification = False
        return config

    def layers(self, hf_config: object, *given: str | None) -> tuple[int, ...] | None:
        """The layer ids that the config decides on."""
        layers: tuple[int, ...] | None = getattr(self.stand_in(hf_config, *given), METHOD)()
        return layers

    def hash(self, hf_config: object, *given: str | None) -> str:
        """The config's part of the compile-cache key."""
        return str(self.stand_in(hf_config, *given).compute_hash())


def run(statements: list[Any], namespace: dict[str, Any]) -> None:
    """Run statements taken out of a source."""
    future = ast.parse("from __future__ import annotations").body
    module = ast.Module([*future, *statements], [])
    exec(compile(ast.fix_missing_locations(module), "vllm", "exec"), namespace)
