"""Look-alikes of vLLM's own collecting models, a tenth of their size and our own."""

# As in vLLM 0.18.0 to 0.24.0.
BEFORE = '''"""A DeepSeek-V2 look-alike that collects."""

from itertools import islice

from torch import nn

from .interfaces import SupportsEagle3, SupportsPP


class DeepseekV2Model(nn.Module):
    compiled = False

    def __init__(self, config):
        super().__init__()
        self.start_layer, self.end_layer, self.layers = make_layers(config)
        self.aux_hidden_state_layers = tuple[int, ...]()

    def forward(self, input_ids, positions, intermediate_tensors):
        hidden_states, residual = self.enter(input_ids, intermediate_tensors)

        aux_hidden_states = []
        for idx, layer in enumerate(
            islice(self.layers, self.start_layer, self.end_layer),
            start=self.start_layer,
        ):
            if idx in self.aux_hidden_state_layers:
                aux_hidden_states.append(hidden_states + residual)
            hidden_states, residual = layer(positions, hidden_states, residual)

        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})

        hidden_states, _ = self.norm(hidden_states, residual)
        if len(aux_hidden_states) > 0:
            return hidden_states, aux_hidden_states
        return hidden_states


class DeepseekV2ForCausalLM(nn.Module, SupportsPP, SupportsEagle3):
    model_cls = DeepseekV2Model

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.model.aux_hidden_state_layers = layers

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        num_layers = len(self.model.layers)
        return (2, num_layers // 2, num_layers - 3)

    def forward(self, input_ids, positions, intermediate_tensors=None):
        return self.model(input_ids, positions, intermediate_tensors)
'''

MODEL_METHODS = '''    # vllm-eagle3-patch: aux-layer-bounds
    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Capture the residual stream entering each of these layers (n: leaving the last)."""
        layers = tuple(layers)
        num_layers = len(self.layers)
        first = self.start_layer
        last = num_layers if self.end_layer == num_layers else self.end_layer - 1
        for layer_id in layers:
            if not isinstance(layer_id, int) or not first <= layer_id <= last:
                raise ValueError(
                    f"EAGLE-3 aux hidden state layer id {layer_id!r} is not valid: "
                    f"of this model's {num_layers} layers, this rank can capture "
                    f"ids {first} to {last}"
                )
            if layers.count(layer_id) > 1:
                raise ValueError(
                    f"EAGLE-3 aux hidden state layer id {layer_id!r} is repeated in "
                    f"{layers}: valid are distinct ids from {first} to {last}"
                )
        self.aux_hidden_state_layers = layers

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        num_layers = len(self.layers)
        layers = (2, num_layers // 2, num_layers - 3)
        if min(layers) < 0 or len(set(layers)) < len(layers):
            raise ValueError(
                f"no default EAGLE-3 aux hidden state layers for {num_layers} layers: "
                "set eagle_aux_hidden_state_layer_ids in the draft model's config"
            )
        return layers

'''

AFTER = f'''"""A DeepSeek-V2 look-alike that collects."""

from itertools import islice

from torch import nn

from .interfaces import SupportsEagle3, SupportsPP


class DeepseekV2Model(nn.Module):
    # vllm-eagle3-patch: aux-layer-bounds
    aux_hidden_state_layers: tuple[int, ...] = ()
    compiled = False

    def __init__(self, config):
        super().__init__()
        self.start_layer, self.end_layer, self.layers = make_layers(config)
        self.aux_hidden_state_layers = tuple[int, ...]()

{MODEL_METHODS}    def forward(self, input_ids, positions, intermediate_tensors):
        hidden_states, residual = self.enter(input_ids, intermediate_tensors)

        aux_hidden_states = []
        for idx, layer in enumerate(
            islice(self.layers, self.start_layer, self.end_layer),
            start=self.start_layer,
        ):
            if idx in self.aux_hidden_state_layers:
                # vllm-eagle3-patch: aux-layer-bounds
                aux_hidden_states.append(
                    hidden_states.clone() if residual is None else hidden_states + residual
                )
            hidden_states, residual = layer(positions, hidden_states, residual)

        if not get_pp_group().is_last_rank:
            return IntermediateTensors({{"hidden_states": hidden_states, "residual": residual}})

        # vllm-eagle3-patch: aux-layer-bounds
        if self.end_layer in self.aux_hidden_state_layers:
            aux_hidden_states.append(hidden_states + residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        if len(aux_hidden_states) > 0:
            return hidden_states, aux_hidden_states
        return hidden_states


class DeepseekV2ForCausalLM(nn.Module, SupportsPP, SupportsEagle3):
    model_cls = DeepseekV2Model

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        # vllm-eagle3-patch: aux-layer-bounds
        if hasattr(self.model, "set_aux_hidden_state_layers"):
            self.model.set_aux_hidden_state_layers(layers)
            return
        self.model.aux_hidden_state_layers = layers

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        # vllm-eagle3-patch: aux-layer-bounds
        if hasattr(self.model, "get_eagle3_aux_hidden_state_layers"):
            return self.model.get_eagle3_aux_hidden_state_layers()
        num_layers = len(self.model.layers)
        return (2, num_layers // 2, num_layers - 3)

    # vllm-eagle3-patch: aux-layer-bounds
    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.get_eagle3_aux_hidden_state_layers()

    def forward(self, input_ids, positions, intermediate_tensors=None):
        return self.model(input_ids, positions, intermediate_tensors)
'''

# As in vLLM 0.25.0 to 0.33.0: states are gathered, and the last one is kept.
KEEP = "                aux_hidden_states.append(hidden_states + residual)\n"
KEPT = """                # vllm-eagle3-patch: aux-layer-bounds
                aux_hidden_states.append(
                    hidden_states.clone() if residual is None else hidden_states + residual
                )
"""
GATHER = """                if aux_hidden_state.shape[0] != positions.shape[0]:
                    aux_hidden_state = tensor_model_parallel_all_gather(aux_hidden_state, 0)
                    aux_hidden_state = aux_hidden_state[: positions.shape[0]]
                aux_hidden_states.append(aux_hidden_state)
"""
KEEP_UNGATHERED = f"                aux_hidden_state = hidden_states + residual\n{GATHER}"
KEPT_UNGATHERED = f"""                # vllm-eagle3-patch: aux-layer-bounds
                aux_hidden_state = (
                    hidden_states.clone() if residual is None else hidden_states + residual
                )
{GATHER}"""
MARKER = "        # vllm-eagle3-patch: aux-layer-bounds\n"
KEEP_LAST = """        if self.end_layer in self.aux_hidden_state_layers:
            aux_hidden_states.append(hidden_states + residual)
"""
NORM = "        hidden_states, _ = self.norm(hidden_states, residual)\n"
GATHER_ALL = """        if hidden_states.shape[0] != positions.shape[0]:
            hidden_states, residual = gather(hidden_states, residual)

"""
GATHERED = (
    (KEEP, KEEP_UNGATHERED),
    (NORM, f"{GATHER_ALL}{KEEP_LAST}\n{NORM}"),
)
GATHERED_AFTER = (
    (KEPT, KEPT_UNGATHERED),
    (f"{MARKER}{KEEP_LAST}{NORM}", f"{GATHER_ALL}{KEEP_LAST}\n{NORM}"),
)

# As in DeepSeek-V3.2's files of vLLM: for nvidia 0.25.0, for amd 0.27.0 to 0.33.0.
SPARSE_BEFORE = '''"""A DeepSeek-V3.2 look-alike."""

from itertools import islice

from vllm.distributed import get_pp_group, get_tp_group
from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM


class DeepseekV32Model(nn.Module):
    compiled = False

    def forward(self, input_ids, positions, intermediate_tensors=None):
        hidden_states, residual = self.enter(input_ids, intermediate_tensors)
        full_num_tokens = positions.shape[0]
        aux_hidden_states = []
        for idx, layer in enumerate(
            islice(self.layers, self.start_layer, self.end_layer),
            start=self.start_layer,
        ):
            if idx in self.aux_hidden_state_layers:
                aux_hidden_states.append(hidden_states + residual)
            hidden_states, residual = layer(positions, hidden_states, residual)

        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})

        # Fused with the sum.
        hidden_states, _ = fused_allreduce_rms_norm(hidden_states, residual, self.norm)
        if len(aux_hidden_states) > 0:
            return hidden_states, aux_hidden_states
        return hidden_states


class DeepseekV32ForCausalLM(DeepseekV2ForCausalLM):
    model_cls = DeepseekV32Model
'''

SPARSE_AFTER = f'''"""A DeepSeek-V3.2 look-alike."""

from itertools import islice

from vllm.distributed import tensor_model_parallel_all_reduce, get_pp_group, get_tp_group
from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM


class DeepseekV32Model(nn.Module):
    # vllm-eagle3-patch: aux-layer-bounds
    aux_hidden_state_layers: tuple[int, ...] = ()
    compiled = False

{MODEL_METHODS}    def forward(self, input_ids, positions, intermediate_tensors=None):
        hidden_states, residual = self.enter(input_ids, intermediate_tensors)
        full_num_tokens = positions.shape[0]
        aux_hidden_states = []
        for idx, layer in enumerate(
            islice(self.layers, self.start_layer, self.end_layer),
            start=self.start_layer,
        ):
            if idx in self.aux_hidden_state_layers:
                # vllm-eagle3-patch: aux-layer-bounds
                if residual is None:
                    aux_hidden_state = hidden_states.clone()
                else:
                    # Each rank holds a part: sum them as the next norm will.
                    aux_hidden_state = tensor_model_parallel_all_reduce(hidden_states) + residual
                aux_hidden_states.append(aux_hidden_state)
            hidden_states, residual = layer(positions, hidden_states, residual)

        if not get_pp_group().is_last_rank:
            return IntermediateTensors({{"hidden_states": hidden_states, "residual": residual}})

        # vllm-eagle3-patch: aux-layer-bounds
        if self.end_layer in self.aux_hidden_state_layers:
            # Each rank holds a part: sum them as the norm will.
            aux_hidden_states.append(
                tensor_model_parallel_all_reduce(hidden_states) + residual
            )
        # Fused with the sum.
        hidden_states, _ = fused_allreduce_rms_norm(hidden_states, residual, self.norm)
        if len(aux_hidden_states) > 0:
            return hidden_states, aux_hidden_states
        return hidden_states


class DeepseekV32ForCausalLM(DeepseekV2ForCausalLM):
    model_cls = DeepseekV32Model
'''

SUM = """                else:
                    # Each rank holds a part: sum them as the next norm will.
                    aux_hidden_state = tensor_model_parallel_all_reduce(hidden_states) + residual
"""
LAST_SUM = """        # vllm-eagle3-patch: aux-layer-bounds
        if self.end_layer in self.aux_hidden_state_layers:
            # Each rank holds a part: sum them as the norm will.
            aux_hidden_states.append(
                tensor_model_parallel_all_reduce(hidden_states) + residual
            )
"""
SUMMING_NORM = """        # Fused with the sum.
        hidden_states, _ = fused_allreduce_rms_norm(hidden_states, residual, self.norm)
"""


def indented(block: str) -> str:
    return "".join(f"    {line}" for line in block.splitlines(keepends=True))


# As for nvidia in 0.26.0 to 0.27.1: sequence parallelism shows in the shapes.
SHAPE = "hidden_states.shape[0] != full_num_tokens"
BY_SHAPE = f"""        if {SHAPE}:
            hidden_states, residual = gather(hidden_states, residual)
{{plain}}{indented(NORM)}        else:
{{summed}}{indented(SUMMING_NORM)}"""
PLAIN = indented(f"{MARKER}{KEEP_LAST}")
SHAPES = (
    (KEEP, KEEP_UNGATHERED),
    (SUMMING_NORM, BY_SHAPE.format(plain="", summed="")),
)
SHAPES_AFTER = (
    (
        f"{SUM}                aux_hidden_states.append(aux_hidden_state)\n",
        f"""                elif {SHAPE}:
                    aux_hidden_state = hidden_states + residual
{SUM}{GATHER}""",
    ),
    (
        f"{LAST_SUM}{SUMMING_NORM}",
        BY_SHAPE.format(plain=PLAIN, summed=indented(LAST_SUM)),
    ),
)

# As for nvidia in 0.28.0 to 0.33.0: a flag, id 0 not copied, and states packed for one gather.
KEEP_ALIAS = """                aux_hidden_states.append(
                    hidden_states if residual is None else hidden_states + residual
                )
"""
BY_FLAG = f"""        if self.use_sequence_parallel:
{{plain}}{indented(NORM)}            if aux_hidden_states:
                packed = torch.cat([hidden_states, *aux_hidden_states], dim=-1)
                packed = sp_all_gather(packed)[:full_num_tokens]
                hidden_states, *aux_hidden_states = packed.split(self.hidden_size, dim=-1)
            else:
                hidden_states = sp_all_gather(hidden_states)[:full_num_tokens]
        else:
{{summed}}{indented(SUMMING_NORM)}"""
FLAG = (
    (KEEP, KEEP_ALIAS),
    (SUMMING_NORM, BY_FLAG.format(plain="", summed="")),
)
FLAG_AFTER = (
    (
        SUM,
        f"""                elif self.use_sequence_parallel:
                    aux_hidden_state = hidden_states + residual
{SUM}""",
    ),
    (
        f"{LAST_SUM}{SUMMING_NORM}",
        BY_FLAG.format(plain=PLAIN, summed=indented(LAST_SUM)),
    ),
)
