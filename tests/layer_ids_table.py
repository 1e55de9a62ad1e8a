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
BOUNDARIES = [2, 30, 58]
OUTPUTS = [1, 29, 57]

IN_EFFECT: dict[str, tuple[object, tuple[int, ...] | None]] = {
    "boundaries, top level": (top(BOUNDARIES), (2, 30, 58)),
    "boundaries, nested": (nested(BOUNDARIES), (2, 30, 58)),
    "outputs, top level": (top(OUTPUTS), (2, 30, 58)),
    "outputs, nested": (nested(OUTPUTS), (2, 30, 58)),
    "a tuple": (top((2, 30, 58)), (2, 30, 58)),
    "one id": (nested([1]), (2,)),
    "id 0 first": (nested([0, 1, 61]), (0, 1, 61)),
    "1 not first": (nested([2, 1, 57]), (2, 1, 57)),
    "both places": (top([3, 4, 5], eagle_config={KEY: [6, 7, 8]}), (3, 4, 5)),
    "top level empty": (top([], eagle_config={KEY: OUTPUTS}), (2, 30, 58)),
    "top level null": (top(None, eagle_config={KEY: OUTPUTS}), (2, 30, 58)),
    "another nested name": (DraftConfig(eagle_config={"layer_ids": [1, 46, 90]}), (2, 47, 91)),
    "both nested names": (nested(BOUNDARIES, layer_ids=[3, 4, 5]), (2, 30, 58)),
    "outputs said to be boundaries": (
        nested(OUTPUTS, **{CONVENTION: "boundary"}),
        (1, 29, 57),
    ),
    "the same at the top level": (top(OUTPUTS, **{CONVENTION: "boundary"}), (1, 29, 57)),
    "boundaries said to be outputs": (nested([3, 4], **{CONVENTION: "output"}), (4, 5)),
    "outputs said to be outputs": (top(OUTPUTS, **{CONVENTION: "output"}), (2, 30, 58)),
    "convention above nested ids": (
        DraftConfig(**{CONVENTION: "boundary"}, eagle_config={KEY: OUTPUTS}),
        (1, 29, 57),
    ),
    "convention below top-level ids": (
        top(OUTPUTS, eagle_config={CONVENTION: "boundary"}),
        (1, 29, 57),
    ),
    "two conventions": (
        DraftConfig(**{CONVENTION: "output"}, eagle_config={KEY: [3], CONVENTION: "boundary"}),
        (4,),
    ),
    "convention null": (nested(OUTPUTS, **{CONVENTION: None}), (2, 30, 58)),
    "speculators": (SpeculatorsConfig(**{KEY: OUTPUTS}), (1, 29, 57)),
    "speculators said to be outputs": (
        SpeculatorsConfig(**{KEY: OUTPUTS, CONVENTION: "output"}),
        (2, 30, 58),
    ),
    "speculators over another model type": (
        SpeculatorsConfig(**{KEY: OUTPUTS}, model_type="llama"),
        (1, 29, 57),
    ),
    "none": (DraftConfig(), None),
    "all empty": (top([], eagle_config={KEY: [], "layer_ids": ()}), None),
    "other nested keys": (DraftConfig(eagle_config={"use_aux_hidden_state": True}), None),
    "eagle_config null": (DraftConfig(eagle_config=None), None),
    "eagle_config no mapping": (DraftConfig(eagle_config="eagle"), None),
    "a convention alone": (DraftConfig(**{CONVENTION: "output"}), None),
}
"""The draft config, and the ids that the runner has to use; None is the model's default."""

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
    """A logger as vLLM 0.8.5 has it: ``info_once`` takes a message and nothing else."""

    messages: list[str] = field(default_factory=list)

    def info_once(self, msg: str) -> None:
        """Keep the message, as vLLM does, only the first time."""
        if msg not in self.messages:
            self.messages.append(msg)


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
            if isinstance(node, ast.FunctionDef) and node.name in (METHOD, "compute_hash")
        ]
        self.logger = Logger()
        self._namespace: dict[str, Any] = {
            "Any": Any,
            "hashlib": hashlib,
            "safe_hash": hashlib.md5,
            "logger": self.logger,
        }
        run(functions, self._namespace)

    def stand_in(self, hf_config: object, method: str = "eagle3") -> Any:
        """A config object with the source's methods."""
        draft = None
        if hf_config is not None:
            draft = SimpleNamespace(hf_config=hf_config, compute_hash=lambda: "draft")
        names = [name for name in (METHOD, "compute_hash") if name in self._namespace]
        methods = {name: self._namespace[name] for name in names}
        config = type("SpeculativeConfig", (), methods)()
        config.method = method
        config.draft_model_config = draft
        config.enable_adaptive_verification = False
        return config

    def layers(self, hf_config: object, method: str = "eagle3") -> tuple[int, ...] | None:
        """The layer ids that the config decides on."""
        layers: tuple[int, ...] | None = getattr(self.stand_in(hf_config, method), METHOD)()
        return layers

    def hash(self, hf_config: object, method: str = "eagle3") -> str:
        """The config's part of the compile-cache key."""
        return str(self.stand_in(hf_config, method).compute_hash())


def run(statements: list[Any], namespace: dict[str, Any]) -> None:
    """Run statements taken out of a source."""
    future = ast.parse("from __future__ import annotations").body
    module = ast.Module([*future, *statements], [])
    exec(compile(ast.fix_missing_locations(module), "vllm", "exec"), namespace)
