"""Look-alikes of vLLM's DeepSeek-V2 module, a tenth of its size and our own."""

BEFORE = '''"""A DeepSeek-V2 look-alike."""

from itertools import islice

from torch import nn

from .interfaces import MixtureOfExperts, SupportsEagle, SupportsLoRA, SupportsPP


class DeepseekV2Model(nn.Module):
    compiled = False

    def __init__(self, config):
        super().__init__()
        self.start_layer, self.end_layer, self.layers = make_layers(config)

    def forward(self, input_ids, positions, intermediate_tensors):
        if get_pp_group().is_first_rank:
            hidden_states = self.embed_tokens(input_ids)
            residual = None
        else:
            hidden_states = intermediate_tensors["hidden_states"]
            residual = intermediate_tensors["residual"]

        for layer in islice(self.layers, self.start_layer, self.end_layer):
            hidden_states, residual = layer(positions, hidden_states, residual)

        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})

        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class DeepseekV2ForCausalLM(
    nn.Module, SupportsPP, MixtureOfExperts, SupportsLoRA, SupportsEagle
):
    def __init__(self, config):
        super().__init__()
        self.model = DeepseekV2Model(config)

    def forward(self, input_ids, positions, intermediate_tensors=None):
        return self.model(input_ids, positions, intermediate_tensors)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    pass
'''

AFTER = '''"""A DeepSeek-V2 look-alike."""

from itertools import islice

from torch import nn

from .interfaces import MixtureOfExperts, SupportsEagle, SupportsEagle3, SupportsLoRA, SupportsPP


class DeepseekV2Model(nn.Module):
    # vllm-eagle3-patch: deepseek-v2
    aux_hidden_state_layers: tuple[int, ...] = ()
    compiled = False

    def __init__(self, config):
        super().__init__()
        self.start_layer, self.end_layer, self.layers = make_layers(config)

    # vllm-eagle3-patch: deepseek-v2
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

    def forward(self, input_ids, positions, intermediate_tensors):
        if get_pp_group().is_first_rank:
            hidden_states = self.embed_tokens(input_ids)
            residual = None
        else:
            hidden_states = intermediate_tensors["hidden_states"]
            residual = intermediate_tensors["residual"]

        # vllm-eagle3-patch: deepseek-v2
        aux_hidden_states = []
        for layer_id, layer in enumerate(
            islice(self.layers, self.start_layer, self.end_layer), start=self.start_layer
        ):
            # vllm-eagle3-patch: deepseek-v2
            if layer_id in self.aux_hidden_state_layers:
                aux_hidden_states.append(
                    hidden_states.clone() if residual is None else hidden_states + residual
                )
            hidden_states, residual = layer(positions, hidden_states, residual)

        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})

        # vllm-eagle3-patch: deepseek-v2
        if self.end_layer in self.aux_hidden_state_layers:
            aux_hidden_states.append(hidden_states + residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        # vllm-eagle3-patch: deepseek-v2
        if aux_hidden_states:
            return hidden_states, aux_hidden_states
        return hidden_states


class DeepseekV2ForCausalLM(
    nn.Module, SupportsPP, MixtureOfExperts, SupportsLoRA, SupportsEagle, SupportsEagle3
):
    def __init__(self, config):
        super().__init__()
        self.model = DeepseekV2Model(config)

    # vllm-eagle3-patch: deepseek-v2
    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.model.set_aux_hidden_state_layers(layers)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.model.get_eagle3_aux_hidden_state_layers()

    def forward(self, input_ids, positions, intermediate_tensors=None):
        return self.model(input_ids, positions, intermediate_tensors)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    pass
'''

# Up to vLLM 0.10.1.1 the loop goes through a slice. Up to 0.10.0 there is no protocol either.
SLICED_BEFORE = '''"""A DeepSeek-V2 look-alike."""

from torch import nn

from .interfaces import SupportsPP


class DeepseekV2Model(nn.Module):

    fall_back = False

    def __init__(self, config):
        super().__init__()
        self.start_layer, self.end_layer, self.layers = make_layers(config)

    def forward(self, input_ids, positions, intermediate_tensors):
        residual = None
        hidden_states = self.get_input_embeddings(input_ids)

        for layer in self.layers[self.start_layer:self.end_layer]:
            hidden_states, residual = layer(positions, hidden_states, residual)

        if not get_pp_group().is_last_rank:
            return IntermediateTensors({
                "hidden_states": hidden_states,
                "residual": residual
            })

        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class DeepseekV2ForCausalLM(nn.Module, SupportsPP):

    def __init__(self, config):
        super().__init__()
        self.model = DeepseekV2Model(config)

    def forward(self, input_ids, positions, intermediate_tensors=None):
        return self.model(input_ids, positions, intermediate_tensors)
'''

SLICED_AFTER = (
    '''"""A DeepSeek-V2 look-alike."""

from torch import nn

from .interfaces import SupportsEagle3, SupportsPP


class DeepseekV2Model(nn.Module):
    # vllm-eagle3-patch: deepseek-v2
    aux_hidden_state_layers: tuple[int, ...] = ()

    fall_back = False

    def __init__(self, config):
        super().__init__()
        self.start_layer, self.end_layer, self.layers = make_layers(config)
'''
    + AFTER[
        AFTER.index("\n    # vllm-eagle3-patch: deepseek-v2\n    def set_") : AFTER.index(
            "    def forward"
        )
    ]
    + """\
    def forward(self, input_ids, positions, intermediate_tensors):
        residual = None
        hidden_states = self.get_input_embeddings(input_ids)

        # vllm-eagle3-patch: deepseek-v2
        aux_hidden_states = []
        for layer_id, layer in enumerate(
            self.layers[self.start_layer:self.end_layer], start=self.start_layer
        ):
            # vllm-eagle3-patch: deepseek-v2
            if layer_id in self.aux_hidden_state_layers:
                aux_hidden_states.append(
                    hidden_states.clone() if residual is None else hidden_states + residual
                )
            hidden_states, residual = layer(positions, hidden_states, residual)

        if not get_pp_group().is_last_rank:
            return IntermediateTensors({
                "hidden_states": hidden_states,
                "residual": residual
            })

        # vllm-eagle3-patch: deepseek-v2
        if self.end_layer in self.aux_hidden_state_layers:
            aux_hidden_states.append(hidden_states + residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        # vllm-eagle3-patch: deepseek-v2
        if aux_hidden_states:
            return hidden_states, aux_hidden_states
        return hidden_states


class DeepseekV2ForCausalLM(nn.Module, SupportsPP, SupportsEagle3):

    def __init__(self, config):
        super().__init__()
        self.model = DeepseekV2Model(config)

    # vllm-eagle3-patch: deepseek-v2
    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.model.set_aux_hidden_state_layers(layers)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.model.get_eagle3_aux_hidden_state_layers()

    def forward(self, input_ids, positions, intermediate_tensors=None):
        return self.model(input_ids, positions, intermediate_tensors)
"""
)

# What the patch leaves out where there is no protocol.
WITHOUT_PROTOCOL = (
    ("import SupportsEagle3, SupportsPP", "import SupportsPP"),
    ("SupportsPP, SupportsEagle3)", "SupportsPP)"),
)

# The edits of vLLM's own change, each of which may have been made by hand without the others.
IMPORT_AND_BASE = (
    ("SupportsEagle, SupportsLoRA, SupportsPP\n", "SupportsEagle, SupportsEagle3, SupportsLoRA\n"),
    ("SupportsLoRA, SupportsEagle\n", "SupportsLoRA, SupportsEagle, SupportsEagle3\n"),
)
METHODS = (
    (
        "        self.model = DeepseekV2Model(config)\n",
        """        self.model = DeepseekV2Model(config)

    def set_aux_hidden_state_layers(self, layers):
        self.model.aux_hidden_state_layers = layers

    def get_eagle3_aux_hidden_state_layers(self):
        return 2, 30, 58
""",
    ),
)
DEFAULT = (
    ("make_layers(config)\n", "make_layers(config)\n        self.aux_hidden_state_layers = ()\n"),
)
COLLECTING = (
    (
        "        for layer in islice(self.layers, self.start_layer, self.end_layer):\n",
        """        aux_hidden_states = []
        for idx, layer in enumerate(
            islice(self.layers, self.start_layer, self.end_layer),
            start=self.start_layer,
        ):
            if idx in self.aux_hidden_state_layers:
                aux_hidden_states.append(hidden_states + residual)
""",
    ),
    (
        "residual)\n        return hidden_states\n",
        """residual)
        if len(aux_hidden_states) > 0:
            return hidden_states, aux_hidden_states
        return hidden_states
""",
    ),
)
COUNTING = (
    (
        "        for layer in islice(self.layers, self.start_layer, self.end_layer):\n",
        """        aux_hidden_states = []
        idx = self.start_layer
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            if idx in self.aux_hidden_state_layers:
                aux_hidden_states.append(hidden_states + residual)
            idx += 1
""",
    ),
    COLLECTING[1],
)

# Lines of BEFORE that the tests change.
INNER = "class DeepseekV2Model(nn.Module):\n"
OUTER = "class DeepseekV2ForCausalLM(\n"
BASES = "    nn.Module, SupportsPP, MixtureOfExperts, SupportsLoRA, SupportsEagle\n"
IMPORT = "from .interfaces import MixtureOfExperts, SupportsEagle, SupportsLoRA, SupportsPP\n"
FORWARD = "    def forward(self, input_ids, positions, intermediate_tensors):\n"
LOOP = "        for layer in islice(self.layers, self.start_layer, self.end_layer):\n"
CALL = "            hidden_states, residual = layer(positions, hidden_states, residual)\n"
SLICED_LOOP = "        for layer in self.layers[self.start_layer:self.end_layer]:\n"
NORM = "        hidden_states, _ = self.norm(hidden_states, residual)\n"
RETURN = "residual)\n        return hidden_states\n"
