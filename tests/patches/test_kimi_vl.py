"""``kimi-vl`` on look-alikes of its three shapes, before and after, and run."""

from dataclasses import dataclass
from typing import Any

import pytest
from patch_checks import changed, check_patched, refusal
from wrapper_runs import Module, Parameter, build, names_of

from vllm_eagle3_patch.patches.wrappers import PATCHES

PATCH = PATCHES["kimi-vl"]()
OWNER = "KimiVLForConditionalGeneration"

METHODS = """\
    # vllm-eagle3-patch: kimi-vl
    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.language_model.set_aux_hidden_state_layers(layers)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.language_model.get_eagle3_aux_hidden_state_layers()

"""
SHARED = """\
        # vllm-eagle3-patch: kimi-vl
        # EAGLE-3 shares <language model>.model.embed_tokens and <language model>.lm_head.
        object.__setattr__(self.language_model, "model", self.language_model)
        object.__setattr__(self.language_model, "lm_head", self.lm_head)
"""
FORWARD = "    def forward("


@dataclass(frozen=True)
class Shape:
    """What the wrapper looked like in some releases."""

    before: str
    imported: tuple[str, str]
    bases: tuple[str, str]
    below_head: str | None = None

    def after(self, *, protocol: bool = True) -> str:
        """With the patch in it."""
        changes = [(FORWARD, METHODS + FORWARD)]
        if protocol:
            changes += [self.imported, self.bases]
        if self.below_head is not None:
            changes.append((self.below_head, SHARED + self.below_head))
        return changed(self.before, *changes)


# From vLLM 0.8.5 to 0.10.1.1: one name imported, no pipeline parallelism, yapf's layout.
OLD = Shape(
    '''"""A Kimi-VL look-alike."""
from torch import nn

from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.utils import merge


class KimiVLForConditionalGeneration(nn.Module, SupportsMultiModal):

    def __init__(
        self,
        vllm_config,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.language_model = DeepseekV2Model(
            vllm_config=vllm_config,
            prefix=prefix,
        )
        self.unpadded_vocab_size = vllm_config.vocab_size
        self.lm_head = ParallelLMHead(
            self.unpadded_vocab_size,
            org_num_embeddings=vllm_config.vocab_size,
            padding_size=64)
        self.media_placeholder: int = vllm_config.media_placeholder_token_id

    def get_language_model(self):
        return self.language_model

    def forward(
        self,
        input_ids,
        **kwargs: object,
    ):
        return self.language_model(input_ids)
''',
    ("import SupportsMultiModal", "import SupportsEagle3, SupportsMultiModal"),
    ("SupportsMultiModal):", "SupportsMultiModal, SupportsEagle3):"),
    "        self.media_placeholder: int",
)

# From 0.10.2 to 0.14.1: the head is on the last stage only.
STAGED = Shape(
    '''"""A Kimi-VL look-alike."""

from torch import nn

from vllm.model_executor.models.interfaces import SupportsMultiModal, SupportsPP


class KimiVLForConditionalGeneration(nn.Module, SupportsMultiModal, SupportsPP):
    def __init__(self, vllm_config, prefix=""):
        super().__init__()
        self.language_model = DeepseekV2Model(vllm_config=vllm_config, prefix=prefix)
        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(vllm_config.vocab_size)
        else:
            self.lm_head = PPMissingLayer()
        self.media_placeholder: int = vllm_config.media_placeholder_token_id

    def get_language_model(self):
        return self.language_model

    def forward(self, input_ids, **kwargs):
        return self.language_model(input_ids)
''',
    ("import SupportsMultiModal", "import SupportsEagle3, SupportsMultiModal"),
    ("SupportsPP):", "SupportsPP, SupportsEagle3):"),
    "        self.media_placeholder: int",
)

# From 0.15.0 on: the language model has its head; 0.24.0 added a protocol.
WHOLE = Shape(
    '''"""A Kimi-VL look-alike."""

from torch import nn

from vllm.model_executor.models.interfaces import (
    SupportsLoRA,
    SupportsMultiModal,
    SupportsPP,
)


class KimiVLForConditionalGeneration(
    nn.Module, SupportsMultiModal, SupportsLoRA, SupportsPP
):
    supports_encoder_tp_data = True

    def __init__(self, vllm_config, prefix=""):
        super().__init__()
        with self._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(
                vllm_config=vllm_config,
                architectures=["DeepseekV2ForCausalLM"],
            )
        self.media_placeholder: int = vllm_config.media_placeholder_token_id

    def forward(self, input_ids, **kwargs):
        return self.language_model(input_ids)
''',
    (
        "    SupportsMultiModal,\n",
        "    SupportsEagle3,\n    SupportsMultiModal,\n",
    ),
    ("SupportsLoRA, SupportsPP\n", "SupportsLoRA, SupportsPP, SupportsEagle3\n"),
)

SHAPES = {"0.8.5": OLD, "0.10.2": STAGED, "0.15.0": WHOLE}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_before_and_after(shape: Shape) -> None:
    check_patched(PATCH, shape.before.encode(), shape.after().encode())


@pytest.mark.parametrize("shape", [OLD, STAGED], ids=["0.8.5", "0.10.2"])
def test_without_the_protocol_the_methods_and_the_sharing_are_all(shape: Shape) -> None:
    """As up to 0.10.0, where the model runner calls them by name."""
    before, after = shape.before.encode(), shape.after(protocol=False).encode()
    assert PATCH.apply(before, "kimi_vl.py", protocol=False) == after
    assert PATCH.apply(after, "kimi_vl.py", protocol=False) == after


def test_a_bare_language_model_without_the_sharing_is_not_done() -> None:
    assert refusal(PATCH, changed(OLD.after(), (SHARED, "")))[2] == 0


def run(source: str) -> Any:
    return build(source, OWNER, vocab_size=8, media_placeholder_token_id=163605)


@pytest.mark.parametrize("protocol", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_proposer_finds_what_it_shares(shape: Shape, protocol: bool) -> None:
    wrapper = run(shape.after(protocol=protocol))
    language_model = wrapper.get_language_model()
    bare = shape.below_head is not None
    inner = language_model if bare else language_model.registered["model"]
    assert language_model.model.embed_tokens is inner.embed_tokens
    assert language_model.lm_head is (wrapper.lm_head if bare else language_model.lm_head)


@pytest.mark.parametrize("shape", [OLD, STAGED], ids=["0.8.5", "0.10.2"])
@pytest.mark.parametrize("kind", [Module, Parameter])
def test_nothing_is_registered_twice(shape: Shape, kind: type) -> None:
    """Kimi-VL's own load_weights goes through named_parameters()."""
    assert names_of(run(shape.after()), kind) == names_of(run(shape.before), kind)
