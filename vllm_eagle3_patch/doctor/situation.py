"""The situation that rules judge: two checkpoints, the options, and what the vLLM does."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm_eagle3_patch.doctor.checkpoint import CONFIG
from vllm_eagle3_patch.doctor.draft_view import as_vllm_sees
from vllm_eagle3_patch.doctor.expressions import NotUnderstoodError, evaluate
from vllm_eagle3_patch.doctor.layers import Layers, find_layers
from vllm_eagle3_patch.doctor.serve_options import DEFAULT_TOKENS
from vllm_eagle3_patch.ground.family import FAMILY, TEXT_TYPES, FamilyModel
from vllm_eagle3_patch.vllm_source.engine import (
    DEFAULT_LAYERS,
    NESTED,
    NESTED_SHORT,
    TOP,
    DraftClass,
    TargetClass,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_eagle3_patch.doctor.checkpoint import Checkpoint
    from vllm_eagle3_patch.doctor.serve_options import ServeOptions
    from vllm_eagle3_patch.vllm_source.engine import Engine, NewerRunner

METHOD = "eagle3"
THREE = 3
YARN = "yarn"


@dataclass(frozen=True)
class Situation:
    """What is known before any weights load.

    Attributes:
        given_draft: The draft model, its config as it stands in the file.
        release: Its release as a user names it, for sentences; ``this vLLM`` if not known.
        convention: What the user states that layer ids count, None if nothing.
        where: Options that lead ``apply`` to this vLLM, such as ``--python .venv``.
        asked: Options that lead ``doctor`` to it, such as ``--release 0.17.1``.
    """

    target: Checkpoint
    given_draft: Checkpoint
    options: ServeOptions
    engine: Engine
    release: str = "this vLLM"
    convention: str | None = None
    where: str = ""
    asked: str = ""

    @cached_property
    def draft(self) -> Checkpoint:
        """The draft model with its config as vLLM sees it."""
        return as_vllm_sees(self.given_draft, self.engine)

    @cached_property
    def family(self) -> FamilyModel | None:
        """The entry of the DeepSeek-V2 family's table, None for another target."""
        return next((m for m in FAMILY if m.architecture == self.target.architecture), None)

    @cached_property
    def target_class(self) -> TargetClass | None:
        """What the target's class does; None if this vLLM does not know the architecture."""
        return self.engine.targets.get(self.target.architecture or "")

    @property
    def multimodal(self) -> bool:
        """Whether the target is a multimodal model around a language model."""
        return self.target.multimodal or (
            self.target_class is not None and self.target_class.wrapper
        )

    @cached_property
    def method(self) -> str:
        """The method that vLLM will use (SpeculativeConfig.__post_init__)."""
        if self.options.method is not None:
            return self.options.method
        if not self.options.speculates:
            return METHOD  # Nothing was said: the doctor's own recommendation is judged.
        name = (self.options.draft_model or self.given_draft.given).lower()
        for part, method in self.engine.detection:
            if part in name:
                return method
        return "draft_model"

    @property
    def eagle3(self) -> bool:
        """Whether EAGLE-3 is what will run."""
        return self.method == METHOD

    @cached_property
    def renamed(self) -> str | None:
        """The draft architecture that vLLM looks up; None if its rule is not understood."""
        architecture = self.draft.architecture
        if architecture is None:
            return None
        if self.draft.speculators is not None:
            return architecture
        name = self.rewritten_architecture or architecture
        source = self.engine.renaming.get(self.method)
        if source is None:
            return name
        try:
            value = evaluate(source, {"arch": name})
        except NotUnderstoodError:
            return None
        return value if isinstance(value, str) else None

    @cached_property
    def rewritten_type(self) -> str | None:
        """The MTP type that the draft model's type is turned into, None if it stays."""
        if self.draft.speculators is not None:
            return None
        return self.engine.rewritten.get(self.draft.model_type or "")

    @property
    def rewritten_architecture(self) -> str | None:
        """The architecture that such a type is given."""
        given = self.engine.mtp_architectures
        kind = self.rewritten_type
        return None if kind is None else given.get(kind, given.get(self.draft.model_type or ""))

    @cached_property
    def draft_class(self) -> DraftClass | None:
        """What the draft model's class does; None if there is none or it is no EAGLE-3 class."""
        path = self.engine.draft_architectures.get(self.renamed or "")
        return None if path is None else self.engine.draft_classes.get(path)

    @property
    def draft_mla(self) -> bool:
        """Whether the draft model's attention is MLA."""
        if self.draft_class is not None:
            return self.draft_class.mla
        return self.draft.mla

    @cached_property
    def newer_runner(self) -> NewerRunner | None:
        """The runner under v1/worker/gpu, where it is the one that will run; else None."""
        runner = self.engine.newer_runner
        if runner is None or self.options.newer_runner is False:
            return None
        if self.options.newer_runner:
            return runner
        left = ("pipeline-parallel" in runner.leaves and self.options.pipeline_parallel > 1) or (
            "dual-batch-overlap" in runner.leaves and self.options.enable_dbo
        )
        plain = not self.target.experts and not self.target.quantization
        listed = self.target.architecture in runner.architectures
        chosen = (
            runner.everywhere
            or (listed and (plain or not runner.plain_only))
            or (runner.dense and not self.target.experts)
        )
        return runner if chosen and not left else None

    @property
    def config_decides_layers(self) -> bool:
        """Whether the patch ``aux-layer-ids`` decides which layer ids this target gets."""
        return self.engine.decides_layers and self.target.text_type in TEXT_TYPES

    @property
    def keys(self) -> Sequence[str]:
        """The places where layer ids are looked for: by the patch, or the runner that will run."""
        if self.config_decides_layers:
            return (TOP, NESTED, NESTED_SHORT)
        return self.engine.keys if self.newer_runner is None else self.newer_runner.keys

    @property
    def runner_in_words(self) -> str:
        """The runner that will run."""
        return "the V1 runner" if self.newer_runner is None else "the runner under v1/worker/gpu"

    @cached_property
    def num_layers(self) -> int | None:
        """The target's layers."""
        return self.target.integer("num_hidden_layers")

    @cached_property
    def layers(self) -> Layers:
        """The layer question, answered."""
        default = self.target_class.default_layers if self.target_class else DEFAULT_LAYERS
        return find_layers(
            self.draft,
            self.keys,
            self.num_layers,
            reads_convention=self.config_decides_layers,
            default=default,
            stated=self.convention,
        )

    @cached_property
    def uses_aux(self) -> bool:
        """Whether the draft model takes aux hidden states: not if it says so and that is read."""
        if self.draft.eagle_config.get("use_aux_hidden_state") is not False:
            return True
        return not self.reads_use_aux

    @property
    def reads_use_aux(self) -> bool:
        """Whether the runner that will run reads ``eagle_config.use_aux_hidden_state``."""
        if self.newer_runner is not None:
            return self.newer_runner.reads_use_aux
        return self.engine.reads_use_aux

    @property
    def states_width(self) -> int | None:
        """The width of one aux hidden state as the draft model's class takes it."""
        wide = self.draft.integer("target_hidden_size")
        return wide if wide is not None else self.draft.integer("hidden_size")

    @cached_property
    def states_built(self) -> int:
        """For how many aux hidden states the draft model's class builds its ``fc``."""
        kind = self.draft_class
        if kind is None or not kind.counts_states:
            return THREE
        number = self.draft.integer("num_aux_hidden_states")
        if number is not None:
            return number
        nested = self.draft.eagle_config.get("eagle_aux_hidden_state_layer_ids")
        if (
            isinstance(nested, list)
            and nested
            and "eagle_aux_hidden_state_layer_ids" in (kind.nested_keys)
        ):
            return len(nested)
        top = self.draft.config.get("eagle_aux_hidden_state_layer_ids")
        if isinstance(top, list) and top and "eagle_aux_hidden_state_layer_ids" in kind.keys:
            return len(top)
        return THREE

    @cached_property
    def dtype(self) -> str | None:
        """The type that the server computes in; None if neither option nor config says."""
        said = self.options.dtype
        if said in (None, "auto"):
            said = self.target.dtype
        names = {"half": "float16", "float": "float32"}
        return names.get(said or "", said)

    @cached_property
    def served_length(self) -> int | None:
        """The longest sequence served, in tokens: the option, else what vLLM derives."""
        return self.options.max_model_len or derived_length(self.target.text)

    @property
    def apply_command(self) -> str:
        """What mends a target of the family."""
        return f"vllm-eagle3-patch apply {self.where}".rstrip()

    @property
    def harden_command(self) -> str:
        """What mends what goes along with the interface: where vLLM has that, ``--harden`` only."""
        native = self.target_class is not None and self.target_class.interface
        return f"{self.apply_command} --harden" if native else self.apply_command

    @property
    def mendable(self) -> bool:
        """Whether ``apply`` makes a target ready: the family's, where the engine can run it."""
        one_page_size = self.engine.one_page_size and self.target.mla
        return self.family is not None and self.target_class is not None and not one_page_size

    @property
    def speculative_config(self) -> dict[str, Any]:
        """What to give ``--speculative-config``."""
        options, draft = self.options, self.given_draft
        named_config = draft.folder is None and draft.path.name == CONFIG
        folder = str(draft.path.parent) if named_config else draft.given
        config: dict[str, Any] = {
            "method": METHOD,
            "model": options.draft_model or folder,
            "num_speculative_tokens": options.num_speculative_tokens or DEFAULT_TOKENS,
        }
        if options.draft_attention_backend and self.engine.backend_option:
            config["attention_backend"] = options.draft_attention_backend
        return config

    @property
    def speculative_option(self) -> str:
        """The same as an option, as a shell takes it."""
        return as_option(self.speculative_config)

    @property
    def doctor_command(self) -> str:
        """What asks about these two checkpoints again."""
        names = (self.target.given, self.given_draft.given)
        return f"vllm-eagle3-patch doctor {' '.join(map(shlex.quote, names))} {self.asked}".rstrip()


def as_option(config: Mapping[str, Any]) -> str:
    """A speculative config as an option of the server, as a shell takes it."""
    return f"--speculative-config {shlex.quote(json.dumps(config))}"


def derived_length(config: Mapping[str, object]) -> int | None:
    """The length that vLLM derives from a config (_get_and_verify_max_len, config/model.py).

    YaRN counts from ``original_max_position_embeddings`` times ``factor``.
    """
    length = config.get("max_position_embeddings")
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(rope, dict):
        kind = rope.get("rope_type", rope.get("type"))
        original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
        scaled = isinstance(kind, str) and kind.endswith(YARN)
        if scaled and isinstance(original, int) and isinstance(factor, int | float):
            product = original * factor
            return int(product) if math.isfinite(product) else None
    return length if isinstance(length, int) else None
