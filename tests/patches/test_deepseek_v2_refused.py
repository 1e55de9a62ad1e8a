"""``deepseek-v2`` on sources that it must not touch, and forwards that do not collect."""

import pytest
from deepseek_v2_sources import (
    AFTER,
    BASES,
    BEFORE,
    CALL,
    COLLECTING,
    COUNTING,
    DEFAULT,
    FORWARD,
    IMPORT,
    IMPORT_AND_BASE,
    INNER,
    LOOP,
    METHODS,
    NORM,
    OUTER,
    RETURN,
    SLICED_BEFORE,
    SLICED_LOOP,
    WITHOUT_PROTOCOL,
)
from patch_checks import Change, changed, refusal

from vllm_eagle3_patch.patches.deepseek_v2 import DeepseekV2
from vllm_eagle3_patch.vllm_source.sources import parse

PATCH = DeepseekV2()


HALVES = {
    "base only": (*IMPORT_AND_BASE,),
    "methods only": METHODS,
    "forward only": (*DEFAULT, *COLLECTING),
    "forward only, with a counter": (*DEFAULT, *COUNTING),
    "all but the base": (*METHODS, *DEFAULT, *COLLECTING),
    "all but the methods": (*IMPORT_AND_BASE, *DEFAULT, *COLLECTING),
    "all but the default": (*IMPORT_AND_BASE, *METHODS, *COLLECTING),
    "all but the import": (IMPORT_AND_BASE[1], *METHODS, *DEFAULT, *COLLECTING),
    "all but the forward": (*IMPORT_AND_BASE, *METHODS, *DEFAULT),
    "default on the class only": ((INNER, f"{INNER}    aux_hidden_state_layers = ()\n"),),
    "default in the constructor only": DEFAULT,
}


@pytest.mark.parametrize("changes", HALVES.values(), ids=HALVES)
def test_half_of_the_patch_done_by_hand_is_refused(changes: tuple[Change, ...]) -> None:
    refusal(PATCH, changed(BEFORE, *changes))


IN_FORWARD = "DeepseekV2Model.forward"
LAYERS = (
    "for layer in islice(self.layers, self.start_layer, self.end_layer)"
    " or self.layers[self.start_layer:self.end_layer]"
)
NO_IMPORT = ("import of SupportsLoRA without SupportsEagle3", "the module")

REFUSED = {
    "import gone": ([(IMPORT, "from .interfaces import MixtureOfExperts\n")], (*NO_IMPORT, 0)),
    "import of everything": ([(IMPORT, "from .interfaces import *\n")], (*NO_IMPORT, 0)),
    "protocols beside it renamed": (
        [(IMPORT, IMPORT.replace("SupportsLoRA, SupportsPP", "SupportsAdapters, SupportsStages"))],
        (*NO_IMPORT, 0),
    ),
    "imported twice": (
        [(IMPORT, f"{IMPORT}from .others import SupportsLoRA\n")],
        (*NO_IMPORT, 2),
    ),
    "inner class renamed": (
        [(INNER, INNER.replace("V2Model", "V2Stack"))],
        ("class DeepseekV2Model", "the module", 0),
    ),
    "outer class renamed": (
        [(OUTER, OUTER.replace("V2For", "V9For"))],
        ("class DeepseekV2ForCausalLM", "the module", 0),
    ),
    "outer class twice": (
        [(OUTER, f"class DeepseekV2ForCausalLM(nn.Module):\n    pass\n\n\n{OUTER}")],
        ("class DeepseekV2ForCausalLM", "the module", 2),
    ),
    "inner class inside an if": (
        [(INNER, "if True:\n  class DeepseekV2Model:\n    pass\n\n\nclass Other:\n")],
        ("class DeepseekV2Model", "the module", 0),
    ),
    "outer class without bases": (
        [(f"{OUTER}{BASES})", "class DeepseekV2ForCausalLM")],
        ("bases of class DeepseekV2ForCausalLM without SupportsEagle3", "the module", 0),
    ),
    "protocol as an attribute among the bases": (
        [("SupportsEagle\n", "SupportsEagle, interfaces.SupportsEagle3\n")],
        ("bases of class DeepseekV2ForCausalLM without SupportsEagle3", "the module", 0),
    ),
    "class split": (
        [(FORWARD, f"\nclass DeepseekV2Runner(DeepseekV2Model):\n{FORWARD}")],
        ("def forward", "DeepseekV2Model", 0),
    ),
    "outer forward inherited": (
        [
            (
                "    def forward(self, input_ids, positions, intermediate_tensors=None)",
                "    def run(self)",
            )
        ],
        ("def forward", "DeepseekV2ForCausalLM", 0),
    ),
    "inner methods there": (
        [
            (
                "    compiled = False\n",
                "    def set_aux_hidden_state_layers(self, ids):\n        pass\n",
            )
        ],
        ("class DeepseekV2Model without def set_aux_hidden_state_layers", "the module", 0),
    ),
    "loop renamed": ([("for layer in", "for block in")], (LAYERS, IN_FORWARD, 0)),
    "loop over all layers": (
        [("islice(self.layers, self.start_layer, self.end_layer)", "self.layers")],
        (LAYERS, IN_FORWARD, 0),
    ),
    "loop inside an if": (
        [(LOOP + CALL, f"        if True:\n    {LOOP}    {CALL}")],
        (LAYERS, IN_FORWARD, 0),
    ),
    "two loops": ([(LOOP + CALL, (LOOP + CALL) * 2)], ("one loop", IN_FORWARD, 2)),
    "another loop nested": (
        [(CALL, f"{CALL}            for hook in self.hooks:\n                hook()\n")],
        ("one loop", IN_FORWARD, 2),
    ),
    "no loop": ([(LOOP + CALL, "        run(self.layers)\n")], ("one loop", IN_FORWARD, 0)),
    "layer called otherwise": (
        [("= layer(positions", "= layer.run(positions")],
        ("hidden_states, residual = layer(...)", f"the loop of {IN_FORWARD}", 0),
    ),
    "layer called twice": (
        [(CALL, CALL * 2)],
        ("hidden_states, residual = layer(...)", f"the loop of {IN_FORWARD}", 2),
    ),
    "norm gone": (
        [(NORM, "")],
        ("hidden_states, _ = self.norm(...)", IN_FORWARD, 0),
    ),
    "norm twice": (
        [(NORM, NORM * 2)],
        ("hidden_states, _ = self.norm(...)", IN_FORWARD, 2),
    ),
    "no return at the end": (
        [(RETURN, "residual)\n        self.out = hidden_states\n")],
        ("return hidden_states at the end", IN_FORWARD, 0),
    ),
    "more after the return": (
        [(RETURN, f"{RETURN}        self.done = True\n")],
        ("return hidden_states at the end", IN_FORWARD, 0),
    ),
    "another return at the end": (
        [(RETURN, "residual)\n        return hidden_states.float()\n")],
        ("return hidden_states at the end", IN_FORWARD, 0),
    ),
}


@pytest.mark.parametrize(("changes", "expected"), REFUSED.values(), ids=REFUSED)
def test_unknown_source_is_refused(changes: list[Change], expected: tuple[str, str, int]) -> None:
    assert refusal(PATCH, changed(BEFORE, *changes)) == expected


SLICES = {
    "all layers": "self.layers",
    "from the first layer": "self.layers[:self.end_layer]",
    "to the last layer": "self.layers[self.start_layer:]",
    "every second layer": "self.layers[self.start_layer:self.end_layer:2]",
    "backwards": "self.layers[self.end_layer:self.start_layer]",
    "one layer": "self.layers[self.start_layer]",
    "other layers": "self.mtp_layers[self.start_layer:self.end_layer]",
    "another model's layers": "model.layers[self.start_layer:self.end_layer]",
    "numbered by hand": "enumerate(self.layers[self.start_layer:self.end_layer])",
}


@pytest.mark.parametrize("layers", SLICES.values(), ids=SLICES)
def test_a_loop_through_another_slice_is_refused(layers: str) -> None:
    loop = f"        for layer in {layers}:\n"
    assert refusal(PATCH, changed(SLICED_BEFORE, (SLICED_LOOP, loop))) == (LAYERS, IN_FORWARD, 0)


@pytest.mark.parametrize("change", WITHOUT_PROTOCOL, ids=["import only", "base only"])
def test_half_of_the_protocol_by_hand_is_refused(change: Change) -> None:
    before = changed(SLICED_BEFORE, (change[1], change[0]))
    refusal(PATCH, before)


def test_a_slice_with_half_of_the_rest_by_hand_is_refused() -> None:
    init = "        self.model = DeepseekV2Model(config)\n"
    by_hand = f"{init}\n    def set_aux_hidden_state_layers(self, layers):\n        pass\n"
    assert refusal(PATCH, changed(SLICED_BEFORE, (init, by_hand))) == (
        "class DeepseekV2ForCausalLM without def set_aux_hidden_state_layers",
        "the module",
        0,
    )


def test_the_interface_without_a_collecting_forward_does_not_hold() -> None:
    source = changed(BEFORE, *IMPORT_AND_BASE, *METHODS, *DEFAULT)
    assert not PATCH.holds(parse(source.encode(), ""))


NOT_COLLECTING = {
    "nothing is returned": ("hidden_states, aux_hidden_states\n", "hidden_states, others\n"),
    "only the list is returned": (
        "return hidden_states, aux_hidden_states",
        "return aux_hidden_states",
    ),
    "no list is filled": ("                aux_hidden_states.append(\n", "                keep(\n"),
    "no ids are asked for": ("if layer_id in self.aux_hidden_state_layers:", "if layer_id in ids:"),
    "the loop is gone": ("        for layer_id, layer in enumerate(", "        while next("),
    "the forward is gone": (FORWARD, FORWARD.replace("forward", "run")),
    "the class is gone": (INNER, INNER.replace("Model", "Stack")),
    "a method is gone": (
        "def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:\n        return self",
        "def layers(self) -> tuple[int, ...]:\n        return self",
    ),
}


@pytest.mark.parametrize("change", NOT_COLLECTING.values(), ids=NOT_COLLECTING)
def test_the_postcondition_wants_every_part(change: Change) -> None:
    assert PATCH.holds(parse(AFTER.encode(), ""))
    assert not PATCH.holds(parse(changed(AFTER, change).encode(), ""))


NATIVE = changed(BEFORE, *IMPORT_AND_BASE, *METHODS, *DEFAULT, *COLLECTING)

ASKS = "            if idx in self.aux_hidden_state_layers:\n"
KEEP = "                aux_hidden_states.append(hidden_states + residual)\n"

WRONG_BY_HAND: dict[str, list[Change]] = {
    "appended after the layer": [(ASKS + KEEP + CALL, CALL + ASKS + KEEP)],
    "the residual left out": [(KEEP, KEEP.replace(" + residual", ""))],
    "only the residual": [(KEEP, KEEP.replace("hidden_states + ", ""))],
    "never asked": [(ASKS, ASKS.replace("if idx", "if False and idx"))],
    "asked for the other ids": [(ASKS, ASKS.replace(" in ", " not in "))],
    "another id": [(ASKS, ASKS.replace("idx", "idx + 1"))],
    "ids counted from this stage": [("            start=self.start_layer,\n", "")],
    "states changed in between": [(KEEP, f"{KEEP}            hidden_states = scaled()\n")],
    "an empty list returned too": [("if len(aux_hidden_states) > 0", "if True")],
}


@pytest.mark.parametrize("changes", WRONG_BY_HAND.values(), ids=WRONG_BY_HAND)
def test_by_hand_and_wrong_does_not_hold(changes: list[Change]) -> None:
    assert PATCH.holds(parse(NATIVE.encode(), ""))
    assert not PATCH.holds(parse(changed(NATIVE, *changes).encode(), ""))


def test_a_counter_that_is_ahead_does_not_hold() -> None:
    by_hand = changed(BEFORE, *IMPORT_AND_BASE, *METHODS, *DEFAULT, *COUNTING)
    counts = "            idx += 1\n"
    early = changed(by_hand, (counts, ""), (ASKS, counts + ASKS))
    assert PATCH.holds(parse(by_hand.encode(), ""))
    assert not PATCH.holds(parse(early.encode(), ""))


IN_INIT = "        self.aux_hidden_state_layers = ()\n"
SET = "        self.model.aux_hidden_state_layers = layers\n"

INCOMPLETE = {
    "no default of the ids": (IN_INIT, ""),
    "an annotation and no default": (IN_INIT, "        self.aux_hidden_state_layers: tuple\n"),
    "a default of another name": (IN_INIT, IN_INIT.replace("layers", "layer_ids")),
    "a default of another object": (IN_INIT, IN_INIT.replace("self.", "config.")),
    "a default that is local": (IN_INIT, IN_INIT.replace("self.", "")),
    "a default in another method": (IN_INIT, f"\n    def reset(self):\n{IN_INIT}"),
    "the protocol not imported": ("SupportsEagle, SupportsEagle3, Sup", "SupportsEagle, Sup"),
    "the protocol imported by another name": (
        "SupportsEagle3, SupportsLoRA\n",
        "SupportsEagle3 as Eagle3, SupportsLoRA\n",
    ),
    "a setter that passes": (SET, "        pass\n"),
    "a setter of dots": (SET, "        ...\n"),
    "a setter with a docstring only": (SET, '        """Set them."""\n'),
    "a setter that raises": (SET, "        raise NotImplementedError\n"),
    "a getter that passes": ("        return 2, 30, 58\n", "        pass\n"),
    "a getter that returns nothing": ("        return 2, 30, 58\n", "        return None\n"),
}


@pytest.mark.parametrize("change", INCOMPLETE.values(), ids=INCOMPLETE)
def test_by_hand_with_a_part_that_does_nothing_does_not_hold(change: Change) -> None:
    assert PATCH.holds(parse(NATIVE.encode(), ""))
    refusal(PATCH, changed(NATIVE, change))


def test_the_import_counts_only_where_there_is_a_protocol() -> None:
    source = changed(NATIVE, INCOMPLETE["the protocol not imported"])
    assert PATCH.holds(parse(source.encode(), ""), protocol=False)


def test_our_own_without_its_default_does_not_hold() -> None:
    source = changed(AFTER, ("    aux_hidden_state_layers: tuple[int, ...] = ()\n", ""))
    assert not PATCH.holds(parse(source.encode(), ""))
