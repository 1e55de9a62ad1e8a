"""``deepseek-v2`` on look-alikes: before and after, and what is left as it is."""

from pathlib import Path

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
    SLICED_AFTER,
    SLICED_BEFORE,
    SLICED_LOOP,
    WITHOUT_PROTOCOL,
)
from libcst.codemod import CodemodTest
from patch_checks import (
    LAYOUTS,
    Change,
    Layout,
    changed,
    check_patched,
    check_tabs,
    check_unchanged,
)

from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.patches.deepseek_v2 import DeepseekV2, DeepseekV2Codemod
from vllm_eagle3_patch.vllm_source.sources import Sources, parse

PATCH = DeepseekV2()

ALL_BASES = (
    "    nn.Module, SupportsPP, MixtureOfExperts, SupportsLoRA, SupportsEagle, SupportsEagle3\n"
)
ALL_IMPORT = IMPORT.replace("SupportsEagle, ", "SupportsEagle, SupportsEagle3, ")
LOOP_END = "), start=self.start_layer\n        ):\n"
MARKER = "# vllm-eagle3-patch: deepseek-v2\n"
ATTRIBUTE = f"    {MARKER}    aux_hidden_state_layers: tuple[int, ...] = ()\n"


class TestBeforeAndAfter(CodemodTest):
    TRANSFORM = DeepseekV2Codemod

    def test_the_whole_change(self) -> None:
        self.assertCodemod(BEFORE, AFTER)

    def test_a_loop_through_a_slice(self) -> None:
        self.assertCodemod(SLICED_BEFORE, SLICED_AFTER)

    def test_no_protocol(self) -> None:
        after = changed(SLICED_AFTER, *WITHOUT_PROTOCOL)
        self.assertCodemod(SLICED_BEFORE, after, models=FAMILY, protocol=False)


def test_as_vllm_does_it_itself_is_left_alone() -> None:
    native = changed(BEFORE, *IMPORT_AND_BASE, *METHODS, *DEFAULT, *COLLECTING)
    check_unchanged(PATCH, native)


def test_with_the_default_method_under_its_later_name_is_left_alone() -> None:
    later = ("get_eagle3_aux_hidden_state_layers", "get_eagle3_default_aux_hidden_state_layers")
    native = changed(BEFORE, *IMPORT_AND_BASE, *METHODS, *DEFAULT, *COLLECTING)
    check_unchanged(PATCH, changed(native, later))


def test_patched_by_hand_with_a_counter_is_left_alone() -> None:
    check_unchanged(PATCH, changed(BEFORE, *IMPORT_AND_BASE, *METHODS, *DEFAULT, *COUNTING))


NATIVE = changed(BEFORE, *IMPORT_AND_BASE, *METHODS, *DEFAULT, *COLLECTING)
IN_INIT = "        self.aux_hidden_state_layers = ()\n"
DEFAULTS_BY_HAND = {
    "as vLLM has it": [(IN_INIT, IN_INIT.replace("()", "tuple[int, ...]()"))],
    "annotated in the constructor": [(IN_INIT, IN_INIT.replace(" =", ": tuple[int, ...] ="))],
    "under a condition": [(IN_INIT, f"        if True:\n    {IN_INIT}")],
    "two at once": [(IN_INIT, IN_INIT.replace(" = ()", ", self.more = (), ()"))],
    "on the class": [(IN_INIT, ""), (INNER, f"{INNER}    aux_hidden_state_layers = ()\n")],
    "from a base": [(IN_INIT, ""), (INNER, INNER.replace("nn.Module", "nn.Module, EagleMixin"))],
    "where it is read": [
        (IN_INIT, ""),
        ("if idx in self.aux_hidden_state_layers:", "if idx in aux_hidden_state_layers:"),
        (
            "        aux_hidden_states = []\n",
            "        aux_hidden_states = []\n"
            '        aux_hidden_state_layers = getattr(self, "aux_hidden_state_layers", ())\n',
        ),
    ],
}


@pytest.mark.parametrize("changes", DEFAULTS_BY_HAND.values(), ids=DEFAULTS_BY_HAND)
def test_any_default_of_the_ids_is_left_alone(changes: list[Change]) -> None:
    check_unchanged(PATCH, changed(NATIVE, *changes))


PATCHED = {
    "another argument to the layer": (
        [
            (
                "layer(positions, hidden_states, residual)",
                "layer(positions, hidden_states, residual, x=1)",
            )
        ],
        None,
    ),
    "layer call over several lines": (
        [(CALL, CALL.replace("(positions, ", "(\n                positions, "))],
        None,
    ),
    "names in brackets": (
        [("hidden_states, residual = layer", "(hidden_states, residual) = layer")],
        None,
    ),
    "loop over several lines": (
        [(LOOP, LOOP.replace("(", "(\n            ").replace("):", "\n        ):"))],
        [],
    ),
    "loop call one argument a line": (
        [
            (
                LOOP,
                "        for layer in islice(\n            self.layers,\n"
                "            self.start_layer,\n            self.end_layer,\n        ):\n",
            )
        ],
        [],
    ),
    "type annotations": (
        [
            (
                FORWARD,
                FORWARD.replace("tensors)", "tensors: T | None = None) -> T | IntermediateTensors"),
            )
        ],
        None,
    ),
    "other lines between": (
        [
            ("from torch import nn\n", "import torch\nfrom torch import nn\n\nlogger = init()\n"),
            (
                "make_layers(config)\n",
                "make_layers(config)\n\n    def embed(self):\n        pass\n",
            ),
            (
                "            residual = None\n",
                "            residual = None\n            log(hidden_states)\n",
            ),
        ],
        None,
    ),
    "classes decorated": (
        [(INNER, f"@support_torch_compile\n{INNER}"), (OUTER, f"@final\n{OUTER}")],
        None,
    ),
    "forward with a docstring": (
        [(FORWARD, f'{FORWARD}        """Run."""\n')],
        None,
    ),
    "docstring in the class": (
        [(INNER, f'{INNER}    """All layers."""\n\n')],
        [
            (INNER, f'{INNER}    """All layers."""\n'),
            (" = ()\n    compiled", " = ()\n\n    compiled"),
        ],
    ),
    "docstring, then a method": (
        [("    compiled = False\n", '    """All layers."""\n')],
        [
            (f"{ATTRIBUTE}    compiled = False\n", f'    """All layers."""\n{ATTRIBUTE}'),
        ],
    ),
    "constructor first": (
        [("    compiled = False\n\n", "")],
        [("    compiled = False\n\n", "\n")],
    ),
    "comment above the first attribute": (
        [("    compiled =", "    # off by default\n    compiled =")],
        None,
    ),
    "import one name a line": (
        [(IMPORT, "from .interfaces import (\n    SupportsEagle,\n    SupportsLoRA,\n)\n")],
        [
            (
                ALL_IMPORT,
                "from .interfaces import (\n    SupportsEagle,\n    SupportsEagle3,\n"
                "    SupportsLoRA,\n)\n",
            )
        ],
    ),
    "import with comments": (
        [
            (
                IMPORT,
                "from .interfaces import (\n    SupportsEagle,  # draft\n    # adapters\n"
                "    SupportsLoRA,  # why\n    SupportsPP,\n)\n",
            )
        ],
        [
            (
                ALL_IMPORT,
                "from .interfaces import (\n    SupportsEagle,  # draft\n    # adapters\n"
                "    SupportsEagle3,\n    SupportsLoRA,  # why\n    SupportsPP,\n)\n",
            )
        ],
    ),
    "import of one name": (
        [(IMPORT, "from vllm.interfaces import SupportsLoRA\n")],
        [(ALL_IMPORT, "from vllm.interfaces import SupportsEagle3, SupportsLoRA\n")],
    ),
    "another base": (
        [("SupportsEagle\n", "SupportsEagle, SupportsMore\n")],
        [("SupportsEagle, SupportsEagle3\n", "SupportsEagle, SupportsMore, SupportsEagle3\n")],
    ),
    "bases on the line of the class": (
        [(f"{OUTER}{BASES})", "class DeepseekV2ForCausalLM(nn.Module, SupportsLoRA)")],
        [
            (
                f"{OUTER}{ALL_BASES})",
                "class DeepseekV2ForCausalLM(nn.Module, SupportsLoRA, SupportsEagle3)",
            )
        ],
    ),
    "one base": (
        [(f"{OUTER}{BASES})", "class DeepseekV2ForCausalLM(nn.Module)")],
        [(f"{OUTER}{ALL_BASES})", "class DeepseekV2ForCausalLM(nn.Module, SupportsEagle3)")],
    ),
    "base one a line": (
        [(BASES, "    nn.Module,\n    SupportsPP,\n    SupportsLoRA,\n")],
        [(ALL_BASES, "    nn.Module,\n    SupportsPP,\n    SupportsLoRA,\n    SupportsEagle3,\n")],
    ),
    "base one a line, no comma at the end": (
        [(BASES, "    nn.Module,\n    SupportsPP\n")],
        [(ALL_BASES, "    nn.Module,\n    SupportsPP,\n    SupportsEagle3\n")],
    ),
    "comments between the bases": (
        [(BASES, "    nn.Module,  # first\n    SupportsPP,\n    # adapters\n    SupportsLoRA,\n")],
        [
            (
                ALL_BASES,
                "    nn.Module,  # first\n    SupportsPP,\n    # adapters\n    SupportsLoRA,\n"
                "    SupportsEagle3,\n",
            )
        ],
    ),
    "comment beside the last base": (
        [(BASES, "    nn.Module,\n    SupportsLoRA,  # adapters\n")],
        [(ALL_BASES, "    nn.Module,\n    SupportsLoRA,  # adapters\n    SupportsEagle3,\n")],
    ),
    "bases and a keyword": (
        [("SupportsEagle\n", "SupportsEagle, metaclass=Meta\n")],
        [("SupportsEagle3\n)", "SupportsEagle3, metaclass=Meta\n)")],
    ),
    "comment above the loop": (
        [(LOOP, f"        # every layer\n{LOOP}")],
        [("        for layer_id, layer", "        # every layer\n        for layer_id, layer")],
    ),
    "comment beside the loop": (
        [(LOOP, LOOP.replace(":\n", ":  # of this rank\n"))],
        [(LOOP_END, LOOP_END.replace(":\n", ":  # of this rank\n"))],
    ),
    "comments at the layer call": (
        [(CALL, f"            # the stream\n{CALL[:-1]}  # fused\n")],
        None,
    ),
    "comments at the norm and the return": (
        [
            (
                f"{NORM}        return",
                f"        # last\n{NORM[:-1]}  # fused\n        # plain\n        return",
            )
        ],
        [
            (f"{NORM}", f"        # last\n{NORM[:-1]}  # fused\n"),
            (
                "            return hidden_states, aux_hidden_states\n",
                "            return hidden_states, aux_hidden_states\n        # plain\n",
            ),
        ],
    ),
    "blank line above the return": (
        [(RETURN, RETURN.replace("\n", "\n\n", 1))],
        [(f"{NORM}        #", f"{NORM}\n        #")],
    ),
}


@pytest.mark.parametrize(("before", "after"), PATCHED.values(), ids=PATCHED)
def test_other_layouts_are_patched(before: list[Change], after: list[Change] | None) -> None:
    """No changes for ``after`` of its own: the same ones as for ``before``."""
    expected = changed(AFTER, *(before if after is None else after))
    check_patched(PATCH, changed(BEFORE, *before).encode(), expected.encode())


def test_comments_inside_the_loop_header_are_kept() -> None:
    loop = LOOP.replace("self.layers, ", "self.layers,  # all\n            ")
    assert b"# all" in PATCH.apply(changed(BEFORE, (LOOP, loop)).encode(), "deepseek_v2.py")


SLICED = {
    "as formatted with blanks": SLICED_LOOP.replace(":self", " : self"),
    "over several lines": SLICED_LOOP.replace("[", "[\n            ").replace("]:", "\n        ]:"),
}


@pytest.mark.parametrize("loop", SLICED.values(), ids=SLICED)
def test_other_layouts_of_a_slice_are_patched(loop: str) -> None:
    check_patched(
        PATCH, changed(SLICED_BEFORE, (SLICED_LOOP, loop)).encode(), SLICED_AFTER.encode()
    )


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("protocol", [True, False])
def test_bytes_around_the_change_to_a_slice_are_kept(layout: Layout, protocol: bool) -> None:
    before, after = layout(SLICED_BEFORE), layout(SLICED_AFTER)
    if not protocol:
        after = layout(changed(SLICED_AFTER, *WITHOUT_PROTOCOL))
    result = PATCH.apply(before, "deepseek_v2.py", protocol=protocol)
    assert result == after
    assert PATCH.holds(parse(result, ""), protocol=protocol)
    assert PATCH.apply(result, "deepseek_v2.py", protocol=protocol) == result


def test_without_the_protocol_the_methods_count_and_with_it_the_base_too() -> None:
    without = parse(changed(SLICED_AFTER, *WITHOUT_PROTOCOL).encode(), "")
    assert PATCH.holds(without, protocol=False)
    assert not PATCH.holds(without, protocol=True)
    assert not PATCH.holds(parse(SLICED_BEFORE.encode(), ""), protocol=False)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_bytes_around_the_change_are_kept(layout: Layout) -> None:
    check_patched(PATCH, layout(BEFORE), layout(AFTER))


@pytest.mark.parametrize(("before", "after"), [(BEFORE, AFTER), (SLICED_BEFORE, SLICED_AFTER)])
def test_a_file_indented_with_tabs(before: str, after: str) -> None:
    check_tabs(PATCH, before, after)


def test_the_file_where_there_is_one(tmp_path: Path) -> None:
    path = "vllm/model_executor/models/deepseek_v2.py"
    assert PATCH.paths(Sources(tmp_path)) == ()
    assert PATCH.paths(Sources(tmp_path, {path: b""})) == (path,)
