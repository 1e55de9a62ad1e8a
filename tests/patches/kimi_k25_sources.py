"""Look-alikes of vLLM's Kimi-K2.5 wrapper, small and our own, in its two shapes."""

# As from vLLM 0.16.0 on: the language model is a DeepseekV2ForCausalLM.
BEFORE = '''"""A Kimi-K2.5 look-alike."""

from torch import nn

from .interfaces import (
    SupportsMultiModal,
    SupportsPP,
)


class KimiK25ForConditionalGeneration(
    nn.Module, SupportsMultiModal, SupportsPP
):
    """Images and text."""

    def __init__(self, vllm_config, prefix=""):
        super().__init__()
        self.config = vllm_config
        with self._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(
                vllm_config=vllm_config,
                architectures=["DeepseekV2ForCausalLM"],
            )

    def get_language_model(self):
        return self.language_model

    def forward(self, input_ids, positions, intermediate_tensors=None):
        return self.language_model(input_ids, positions, intermediate_tensors)

    def compute_logits(self, hidden_states):
        return self.language_model.compute_logits(hidden_states)
'''

AFTER = '''"""A Kimi-K2.5 look-alike."""

from torch import nn

from .interfaces import (
    SupportsEagle3,
    SupportsMultiModal,
    SupportsPP,
)


class KimiK25ForConditionalGeneration(
    nn.Module, SupportsMultiModal, SupportsPP, SupportsEagle3
):
    """Images and text."""

    def __init__(self, vllm_config, prefix=""):
        super().__init__()
        self.config = vllm_config
        with self._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(
                vllm_config=vllm_config,
                architectures=["DeepseekV2ForCausalLM"],
            )

    def get_language_model(self):
        return self.language_model

    # vllm-eagle3-patch: kimi-k25
    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.language_model.set_aux_hidden_state_layers(layers)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.language_model.get_eagle3_aux_hidden_state_layers()

    def forward(self, input_ids, positions, intermediate_tensors=None):
        return self.language_model(input_ids, positions, intermediate_tensors)

    def compute_logits(self, hidden_states):
        return self.language_model.compute_logits(hidden_states)
'''

# As in vLLM 0.15.0 and 0.15.1: a bare DeepseekV2Model, and lm_head on the wrapper.
BARE_BEFORE = '''"""A Kimi-K2.5 look-alike."""

from torch import nn

from .interfaces import SupportsMultiModal, SupportsPP


class KimiK25ForConditionalGeneration(nn.Module, SupportsMultiModal, SupportsPP):
    """Images and text."""

    def __init__(self, vllm_config, prefix=""):
        super().__init__()
        self.config = vllm_config
        self.language_model = DeepseekV2Model(
            vllm_config=vllm_config,
            prefix=prefix,
        )
        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(
                vllm_config.vocab_size,
                vllm_config.hidden_size,
            )
        else:
            self.lm_head = PPMissingLayer()
        self.logits_processor = LogitsProcessor(vllm_config.vocab_size)

    def get_language_model(self):
        return self.language_model

    def forward(self, input_ids, positions, intermediate_tensors=None):
        return self.language_model(input_ids, positions, intermediate_tensors)

    def compute_logits(self, hidden_states):
        return self.logits_processor(self.lm_head, hidden_states)
'''

BARE_AFTER = '''"""A Kimi-K2.5 look-alike."""

from torch import nn

from .interfaces import SupportsEagle3, SupportsMultiModal, SupportsPP


class KimiK25ForConditionalGeneration(nn.Module, SupportsMultiModal, SupportsPP, SupportsEagle3):
    """Images and text."""

    def __init__(self, vllm_config, prefix=""):
        super().__init__()
        self.config = vllm_config
        self.language_model = DeepseekV2Model(
            vllm_config=vllm_config,
            prefix=prefix,
        )
        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(
                vllm_config.vocab_size,
                vllm_config.hidden_size,
            )
        else:
            self.lm_head = PPMissingLayer()
        # vllm-eagle3-patch: kimi-k25
        # EAGLE-3 shares <language model>.model.embed_tokens and <language model>.lm_head.
        object.__setattr__(self.language_model, "model", self.language_model)
        object.__setattr__(self.language_model, "lm_head", self.lm_head)
        self.logits_processor = LogitsProcessor(vllm_config.vocab_size)

    def get_language_model(self):
        return self.language_model

    # vllm-eagle3-patch: kimi-k25
    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.language_model.set_aux_hidden_state_layers(layers)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.language_model.get_eagle3_aux_hidden_state_layers()

    def forward(self, input_ids, positions, intermediate_tensors=None):
        return self.language_model(input_ids, positions, intermediate_tensors)

    def compute_logits(self, hidden_states):
        return self.logits_processor(self.lm_head, hidden_states)
'''

# Lines of the sources above that the tests change.
BARE_IMPORT = "from .interfaces import SupportsMultiModal, SupportsPP\n"
BARE_CLASS = "class KimiK25ForConditionalGeneration(nn.Module, SupportsMultiModal, SupportsPP):\n"
FORWARD = "    def forward(self, input_ids, positions, intermediate_tensors=None):\n"
LANGUAGE_MODEL = """        self.language_model = DeepseekV2Model(
            vllm_config=vllm_config,
            prefix=prefix,
        )
"""
LM_HEAD = """        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(
                vllm_config.vocab_size,
                vllm_config.hidden_size,
            )
        else:
            self.lm_head = PPMissingLayer()
"""
SHARED = """        # vllm-eagle3-patch: kimi-k25
        # EAGLE-3 shares <language model>.model.embed_tokens and <language model>.lm_head.
        object.__setattr__(self.language_model, "model", self.language_model)
        object.__setattr__(self.language_model, "lm_head", self.lm_head)
"""

# What someone may have written by hand.
BASE = (
    (BARE_IMPORT, BARE_IMPORT.replace("import ", "import SupportsEagle3, ")),
    (BARE_CLASS, BARE_CLASS.replace("SupportsPP", "SupportsPP, SupportsEagle3")),
)
METHODS = (
    (
        FORWARD,
        f"""    def set_aux_hidden_state_layers(self, layers):
        self.language_model.set_aux_hidden_state_layers(layers)

    def get_eagle3_aux_hidden_state_layers(self):
        return self.language_model.get_eagle3_aux_hidden_state_layers()

{FORWARD}""",
    ),
)
SHARING = (
    (
        "        self.logits_processor = LogitsProcessor(vllm_config.vocab_size)\n",
        """        object.__setattr__(self.language_model, "model", self.language_model)
        object.__setattr__(self.language_model, "lm_head", self.lm_head)
        self.logits_processor = LogitsProcessor(vllm_config.vocab_size)
""",
    ),
)
