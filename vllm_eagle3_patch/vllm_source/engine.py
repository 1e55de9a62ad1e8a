"""What an installed vLLM does with EAGLE-3, as data: read from its source or from the matrix."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

TOP = "top"
NESTED = "eagle_config"
NESTED_SHORT = "eagle_config.layer_ids"
LOST = "speculators"
"""Where layer ids can stand in a draft model's config: ``eagle_aux_hidden_state_layer_ids`` at the
top level or under ``eagle_config``, and ``layer_ids`` under ``eagle_config``. ``LOST``: at the top
level of a speculators config whose ids do not reach the draft model's class; nobody looks there."""

DEFAULT_LAYERS = ("2", "num_layers // 2", "num_layers - 3")
"""What every model of every release names by default."""


@dataclass(frozen=True)
class DraftClass:
    """What the class of a draft model does, read from its file.

    Attributes:
        keys: The keys of the draft model's config that the file reads at the top level.
        nested_keys: Those that it reads under ``eagle_config``.
        counts_states: Whether it reads how many aux hidden states its ``fc`` takes; else three.
        own_quantization: Whether its layers are quantized as the draft model is, not the target.
        refuses_embeddings: Whether it raises an error for a multimodal target's embeddings.
        vocabulary_default: Whether ``draft_vocab_size`` may be missing or null.
        skips_unused_norm: Whether tensors ``input_norm.*`` are passed over when no flag asks.
        forces_yarn: Whether any ``rope_scaling`` is taken for DeepSeek's YaRN, and without one
            ``rope_theta`` is lost.
    """

    path: str
    keys: tuple[str, ...] = ()
    nested_keys: tuple[str, ...] = ()
    mla: bool = False
    counts_states: bool = False
    own_quantization: bool = False
    refuses_embeddings: bool = False
    vocabulary_default: bool = False
    skips_unused_norm: bool = False
    forces_yarn: bool = False


@dataclass(frozen=True)
class TargetClass:
    """What the class of a target model does.

    Attributes:
        interface: Whether the outermost class implements the EAGLE-3 interface.
        language_model: Whether its language model does; the same as ``interface`` for text models.
        wrapper: Whether it is a multimodal model around a language model.
        lacking_files: Files of single platforms whose class lacks the interface.
        default_layers: Expressions of ``num_layers``: the ids that the model names by default.
        first_id: Whether id 0 works.
        last_id: Whether id ``num_layers`` works.
        relays: Whether states of earlier pipeline stages reach the last one.
        float16_scaling: Whether the decoder layer scales its residual stream in float16.
        partial_sums: Whether a captured state is one tensor-parallel rank's part of the sum.
        gathers: Whether sequence-parallel states are gathered before they are captured; true too
            where the states are never split between layers.
    """

    interface: bool = False
    language_model: bool = False
    wrapper: bool = False
    lacking_files: tuple[str, ...] = ()
    default_layers: tuple[str, ...] = DEFAULT_LAYERS
    first_id: bool = False
    last_id: bool = False
    relays: bool = False
    float16_scaling: bool = False
    partial_sums: bool = False
    gathers: bool = True


@dataclass(frozen=True)
class NewerRunner:
    """The runner under ``vllm/v1/worker/gpu`` (0.12.0 on; 0.17.0 on it knows EAGLE-3).

    Attributes:
        everywhere: Whether it is the default for every model.
        dense: Whether it is the default for every model that is no mixture of experts.
        plain_only: Whether those architectures count only unquantized and without experts.
        leaves: Features for which the V1 runner takes over: ``pipeline-parallel``,
            ``dual-batch-overlap``.
        reads_use_aux: Whether it reads ``eagle_config.use_aux_hidden_state``.
        inherits_backend: Whether a draft model is built with its target's attention backend.
    """

    keys: tuple[str, ...] = ()
    everywhere: bool = False
    architectures: tuple[str, ...] = ()
    dense: bool = False
    plain_only: bool = False
    leaves: tuple[str, ...] = ()
    reads_use_aux: bool = False
    inherits_backend: bool = False


@dataclass(frozen=True)
class Engine:
    """What an installed vLLM does.

    Attributes:
        allowlist: Strings one of which a target's text model type must contain; None: no such gate.
        renaming: By method, the expression that makes the architecture's new name of ``arch``.
        rewritten: Model types of a draft model's config that become an MTP type, and which.
        mtp_architectures: The architecture that such an MTP type is given.
        detection: Parts of a draft model's name and the method that each means, in order.
        draft_architectures: By architecture of the registry, the file of a draft model's class.
        targets: By architecture, what a target's class does. From an installation the one that
            was asked for; from the matrix all that have the interface or belong to the family.
        config_types: The model types that vLLM has a config class of its own for.
        speculators_keys: Keys of the speculators format that reach the draft model's config;
            None if the format is not known.
        speculators_types: The model types whose drafts in that format are known; empty: not asked.
        keys: The places where the V1 runner looks for layer ids, in order.
        decides_layers: Whether the config decides for the family's targets which layer ids are
            used, and hashes these (the patch ``aux-layer-ids``).
        hashed_ids: The layer ids in the compile-cache key otherwise: ``none`` or ``top``.
        newer_runner: The other runner, None if there is none that knows EAGLE-3.
        reads_use_aux: Whether the V1 runner reads ``eagle_config.use_aux_hidden_state``.
        inherits_backend: Whether it builds a draft model with its target's attention backend.
        refuses_backend: Whether a layer that cannot use the backend that is set fails.
        own_backend: Whether a draft model without MLA is kept from an MLA backend
            (the patch ``draft-attention-backend``).
        backend_option: Whether ``speculative_config.attention_backend`` exists.
        forced_backends: MLA backends that vLLM itself sets on Blackwell.
        one_page_size: Whether the KV cache manager knows one page size only.
        raises_positions: Whether a draft model's ``max_position_embeddings`` is raised to the
            length that is served.
        targets_metadata: Whether a draft model's attention metadata is built with the target's
            builder.
        own_embeddings: Whether a draft model's own embedding is kept where it differs.
        lm_head: How a draft model's ``lm_head`` is treated: ``kept`` (never shared), ``by-shape``
            (the target's is used where shapes agree) or ``compared`` (its own is kept).
        image_tokens: By class name, where the proposer reads a multimodal target's image token.
        image_fallback: Where it reads it for all other classes, None if it copies nothing.
        dual_batch_overlap: ``none`` (no such option), ``fails`` or ``works``.
        transformers: The requirement on Transformers, such as ``>=4.56.0,<5``.
    """

    allowlist: tuple[str, ...] | None = None
    renaming: Mapping[str, str] = field(default_factory=dict)
    rewritten: Mapping[str, str] = field(default_factory=dict)
    mtp_architectures: Mapping[str, str] = field(default_factory=dict)
    detection: tuple[tuple[str, str], ...] = ()
    draft_architectures: Mapping[str, str] = field(default_factory=dict)
    draft_classes: Mapping[str, DraftClass] = field(default_factory=dict)
    targets: Mapping[str, TargetClass] = field(default_factory=dict)
    config_types: tuple[str, ...] = ()
    speculators_keys: tuple[str, ...] | None = None
    speculators_types: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    decides_layers: bool = False
    hashed_ids: str = "none"
    newer_runner: NewerRunner | None = None
    reads_use_aux: bool = False
    inherits_backend: bool = False
    refuses_backend: bool = False
    own_backend: bool = False
    backend_option: bool = False
    forced_backends: tuple[str, ...] = ()
    one_page_size: bool = False
    raises_positions: bool = False
    targets_metadata: bool = False
    own_embeddings: bool = False
    lm_head: str = "kept"
    image_tokens: Mapping[str, str] = field(default_factory=dict)
    image_fallback: str | None = None
    dual_batch_overlap: str = "none"
    transformers: str = ""

    def table(self) -> dict[str, Any]:
        """As a table of the matrix: what is as the class has it by default is left out."""
        return _sparse(self)

    def changes_to(self, other: Engine) -> dict[str, Any]:
        """What to lay over this one's table to get another's; of tables in it single entries."""
        changes: dict[str, Any] = {}
        for entry in fields(self):
            before, after = getattr(self, entry.name), getattr(other, entry.name)
            if before == after:
                continue
            if isinstance(after, dict):
                after = {key: part for key, part in after.items() if before.get(key) != part}
            changes[entry.name] = _as_toml(after)
        return dict(sorted(changes.items(), key=lambda item: isinstance(item[1], dict)))

    def with_changes(self, changes: Mapping[str, Any]) -> Engine:
        """This one with such changes."""
        table = self.table()
        for name, value in changes.items():
            merges = isinstance(value, dict) and name not in ("newer_runner",)
            table[name] = {**table.get(name, {}), **value} if merges else value
        return Engine.of_table(table)

    @classmethod
    def of_table(cls, table: Mapping[str, Any]) -> Engine:
        """Back from such a table."""
        values = {name: _frozen(value) for name, value in table.items()}
        if "newer_runner" in table:
            values["newer_runner"] = _made(NewerRunner, table["newer_runner"])
        for name, kind in (("draft_classes", DraftClass), ("targets", TargetClass)):
            parts = table.get(name, {})
            values[name] = {key: _made(kind, part) for key, part in parts.items()}
        return cls(**values)


def _sparse(instance: Engine | NewerRunner | DraftClass | TargetClass) -> dict[str, Any]:
    """The values of a dataclass that are not its defaults; tables last, as TOML wants them."""
    values = {}
    for entry in fields(instance):
        value = getattr(instance, entry.name)
        default = {} if entry.default_factory is not MISSING else entry.default
        if value != default:
            values[entry.name] = _as_toml(value)
    return dict(sorted(values.items(), key=lambda item: isinstance(item[1], dict)))


def _as_toml(value: Any) -> Any:
    if isinstance(value, Engine | NewerRunner | DraftClass | TargetClass):
        return _sparse(value)
    if isinstance(value, dict):
        return {key: _as_toml(part) for key, part in sorted(value.items())}
    if isinstance(value, tuple):
        return [_as_toml(part) for part in value]
    return value


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_frozen(part) for part in value)
    if isinstance(value, dict):
        return {str(key): _frozen(part) for key, part in value.items()}
    return value


def _made(kind: Any, table: Mapping[str, Any]) -> Any:
    return kind(**{name: _frozen(value) for name, value in table.items()})
