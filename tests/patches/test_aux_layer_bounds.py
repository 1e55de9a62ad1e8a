"""``aux-layer-bounds`` on look-alikes: before and after, what is left alone, what is refused."""

from pathlib import Path

import deepseek_v2_sources
import pytest
from aux_layer_bounds_sources import (
    AFTER,
    BEFORE,
    FLAG,
    FLAG_AFTER,
    GATHERED,
    GATHERED_AFTER,
    KEEP,
    KEEP_LAST,
    KEPT,
    LAST_SUM,
    MARKER,
    NORM,
    SHAPES,
    SHAPES_AFTER,
    SPARSE_AFTER,
    SPARSE_BEFORE,
    SUMMING_NORM,
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
    refusal,
)

from vllm_eagle3_patch.patches.aux_layer_bounds import PATHS, AuxLayerBounds, AuxLayerBoundsCodemod
from vllm_eagle3_patch.patches.deepseek_v2 import DeepseekV2
from vllm_eagle3_patch.vllm_source.sources import Sources, parse

PATCH = AuxLayerBounds()

STRATEGIES = {
    "kept as a sum": (BEFORE, AFTER),
    "gathered, the last one kept": (changed(BEFORE, *GATHERED), changed(AFTER, *GATHERED_AFTER)),
    "sparse": (SPARSE_BEFORE, SPARSE_AFTER),
    "sparse, sharded by shape": (
        changed(SPARSE_BEFORE, *SHAPES),
        changed(SPARSE_AFTER, *SHAPES_AFTER),
    ),
    "sparse, sharded by a flag, packed": (
        changed(SPARSE_BEFORE, *FLAG),
        changed(SPARSE_AFTER, *FLAG_AFTER),
    ),
}


class TestBeforeAndAfter(CodemodTest):
    TRANSFORM = AuxLayerBoundsCodemod

    def test_the_whole_change(self) -> None:
        for before, after in STRATEGIES.values():
            self.assertCodemod(before, after)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("before", "after"), STRATEGIES.values(), ids=STRATEGIES)
def test_bytes_around_the_change_are_kept(before: str, after: str, layout: Layout) -> None:
    check_patched(PATCH, layout(before), layout(after))


@pytest.mark.parametrize(("before", "after"), STRATEGIES.values(), ids=STRATEGIES)
def test_a_file_indented_with_tabs(before: str, after: str) -> None:
    check_tabs(PATCH, before, after)


LOOP = "        for idx, layer in enumerate(\n"
ASKS = "            if idx in self.aux_hidden_state_layers:\n"
CALL = "            hidden_states, residual = layer(positions, hidden_states, residual)\n"
SETS = "        self.model.aux_hidden_state_layers = layers\n"
COUNTS = "        num_layers = len(self.model.layers)\n"
CLASS = "class DeepseekV2Model(nn.Module):\n"
DEFAULT = f"{MARKER[4:]}    aux_hidden_state_layers: tuple[int, ...] = ()\n"
IN_CONSTRUCTOR = "        self.aux_hidden_state_layers = tuple[int, ...]()\n"

PATCHED = {
    "another name for the index": (
        [("idx, layer", "index, layer"), ("if idx in", "if index in")],
        None,
    ),
    "loop on one line": (
        [
            (
                f"{LOOP}            islice(self.layers, self.start_layer, self.end_layer),\n"
                "            start=self.start_layer,\n        ):\n",
                "        for idx, layer in enumerate("
                "islice(self.layers, self.start_layer, self.end_layer), start=self.start_layer):\n",
            )
        ],
        None,
    ),
    "another argument to the layer": (
        [
            (
                "layer(positions, hidden_states, residual)",
                "layer(positions, hidden_states, residual, x=1)",
            )
        ],
        None,
    ),
    "annotated in the constructor": (
        [(IN_CONSTRUCTOR, "        self.aux_hidden_state_layers: tuple[int, ...] = ()\n")],
        None,
    ),
    "other ids in the constructor": ([(IN_CONSTRUCTOR, "")], None),
    "comments where states are kept": (
        [(KEEP, f"                # the stream\n{KEEP[:-1]}  # before the layer\n")],
        [
            (
                KEPT,
                f"                # the stream\n                # before the layer\n{KEPT}",
            )
        ],
    ),
    "comments at the norm": (
        [(NORM, f"        # last\n{NORM[:-1]}  # fused\n")],
        [(NORM, f"        # last\n{NORM[:-1]}  # fused\n")],
    ),
    "comments in the outer class": (
        [(SETS, f"        # plainly\n{SETS[:-1]}  # all\n"), (COUNTS, f"        # all\n{COUNTS}")],
        None,
    ),
    "docstrings in the outer class": (
        [(SETS, f'        """Set."""\n{SETS}'), (COUNTS, f'        """Get."""\n\n{COUNTS}')],
        [
            (
                f'{MARKER}        if hasattr(self.model, "set_aux',
                f'        """Set."""\n{MARKER}        if hasattr(self.model, "set_aux',
            ),
            (
                f'{MARKER}        if hasattr(self.model, "get_eagle3',
                f'        """Get."""\n\n{MARKER}        if hasattr(self.model, "get_eagle3',
            ),
        ],
    ),
    "none kept as its own buffer": (
        [
            (
                "append(hidden_states + residual)",
                "append(hidden_states if residual is None else hidden_states + residual)",
            )
        ],
        [],
    ),
}


@pytest.mark.parametrize(("before", "after"), PATCHED.values(), ids=PATCHED)
def test_other_layouts_are_patched(before: list[Change], after: list[Change] | None) -> None:
    """No changes for ``after`` of its own: the same ones as for ``before``."""
    expected = changed(AFTER, *(before if after is None else after))
    check_patched(PATCH, changed(BEFORE, *before).encode(), expected.encode())


def test_the_sum_over_ranks_is_imported_once() -> None:
    imported = ("get_pp_group, get_tp_group", "get_pp_group, tensor_model_parallel_all_reduce")
    at_first = ("import tensor_model_parallel_all_reduce, get_pp_group, get_tp_group", imported[1])
    before = changed(SPARSE_BEFORE, imported)
    after = changed(SPARSE_AFTER, (at_first[0], f"import {at_first[1]}"))
    check_patched(PATCH, before.encode(), after.encode())


V2, V32 = "DeepseekV2Model.forward", "DeepseekV32Model.forward"
NORMS = "hidden_states, _ = self.norm(...) or fused_allreduce_rms_norm(...)"
KEPT_SUM = "hidden_states + residual kept"
ENUMERATE = "for ..., layer in enumerate(islice(...), start=self.start_layer)"
LAST = "if self.end_layer in self.aux_hidden_state_layers before the last norm"
OUTER = "DeepseekV2ForCausalLM"
METHODS = ("set_aux_hidden_state_layers", "get_eagle3_aux_hidden_state_layers")

REFUSED = {
    "inner class renamed": (
        [("class DeepseekV2Model", "class DeepseekV9Model")],
        ("class DeepseekV2Model or DeepseekV32Model", "the module", 0),
    ),
    "outer class renamed": (
        [("class DeepseekV2For", "class DeepseekV9For")],
        ("class DeepseekV2ForCausalLM", "the module", 0),
    ),
    "two inner classes": (
        [(CLASS, f"class DeepseekV32Model(nn.Module):\n    pass\n\n\n{CLASS}")],
        ("class DeepseekV2Model or DeepseekV32Model", "the module", 2),
    ),
    "ids on the class already": (
        [("    compiled = False\n", "    aux_hidden_state_layers = ()\n")],
        ("class DeepseekV2Model without aux_hidden_state_layers", "the module", 0),
    ),
    "a setter in the inner class already": (
        [(CLASS, f"{CLASS}    def {METHODS[0]}(self, ids):\n        pass\n\n")],
        (f"class DeepseekV2Model without def {METHODS[0]}", "the module", 0),
    ),
    "a default for the runners already": (
        [
            (
                "    model_cls = DeepseekV2Model\n",
                "    def get_eagle3_default_aux_hidden_state_layers(self):\n        pass\n\n",
            )
        ],
        (f"class {OUTER} without def get_eagle3_default_aux_hidden_state_layers", "the module", 0),
    ),
    "the setter renamed": (
        [(f"    def {METHODS[0]}(", "    def set_layers(")],
        (f"def {METHODS[0]}", OUTER, 0),
    ),
    "the default renamed": (
        [(f"    def {METHODS[1]}(", "    def get_layers(")],
        (f"def {METHODS[1]}", OUTER, 0),
    ),
    "the setter calls something": (
        [(SETS, "        self.model.keep(layers)\n")],
        ("self.model.aux_hidden_state_layers = ...", f"{OUTER}.{METHODS[0]}", 0),
    ),
    "the default is computed elsewhere": (
        [(COUNTS, ""), ("(2, num_layers // 2, num_layers - 3)", "default_ids(self.model)")],
        ("num_layers = ...", f"{OUTER}.{METHODS[1]}", 0),
    ),
    "class split": (
        [
            (
                "    def forward(self, input_ids, positions, intermediate_tensors):",
                "    def run(self):",
            )
        ],
        ("def forward", "DeepseekV2Model", 0),
    ),
    "layers counted otherwise": (
        [(LOOP, LOOP.replace("enumerate", "numbered"))],
        (ENUMERATE, V2, 0),
    ),
    "ids counted from this stage": (
        [("            start=self.start_layer,\n", "")],
        (ENUMERATE, V2, 0),
    ),
    "loop inside an if": (
        [(LOOP, f"        if True:\n         {LOOP.lstrip()}")],
        (ENUMERATE, V2, 0),
    ),
    "another loop": (
        [(NORM, f"        for hook in self.hooks:\n            hook()\n{NORM}")],
        ("one loop", V2, 2),
    ),
    "nothing asked": (
        [(ASKS, "            if idx in layer_ids:\n")],
        ("if idx in self.aux_hidden_state_layers", f"the loop of {V2}", 0),
    ),
    "asked for another id": (
        [(ASKS, "            if idx + 1 in self.aux_hidden_state_layers:\n")],
        ("if idx in self.aux_hidden_state_layers", f"the loop of {V2}", 0),
    ),
    "asked with an else": (
        [(KEEP, f"{KEEP}            else:\n                pass\n")],
        ("if idx in self.aux_hidden_state_layers", f"the loop of {V2}", 0),
    ),
    "kept after the layer": (
        [(ASKS + KEEP + CALL, CALL + ASKS + KEEP)],
        ("if idx in self.aux_hidden_state_layers before the layer", f"the loop of {V2}", 0),
    ),
    "kept in a list of another name": (
        [("append(hidden_states + residual)", "extend([hidden_states + residual])")],
        (KEPT_SUM, f"the loop of {V2}", 0),
    ),
    "kept otherwise": (
        [("append(hidden_states + residual)", "append(residual)")],
        (KEPT_SUM, f"the loop of {V2}", 0),
    ),
    "kept twice": ([(KEEP, KEEP * 2)], (KEPT_SUM, f"the loop of {V2}", 2)),
    "layer called otherwise": (
        [("= layer(positions", "= layer.run(positions")],
        ("hidden_states, residual = layer(...)", f"the loop of {V2}", 0),
    ),
    "no norm": ([(NORM, "")], (NORMS, V2, 0)),
    "two norms": ([(NORM, NORM * 2)], (NORMS, V2, 2)),
    "norm inside an if": ([(NORM, f"        if True:\n    {NORM}")], (NORMS, V2, 0)),
    "the last one kept after the norm": ([(NORM, NORM + KEEP_LAST)], (LAST, V2, 0)),
    "the last one kept twice": ([(NORM, KEEP_LAST * 2 + NORM)], (LAST, V2, 2)),
    "the last one kept otherwise": (
        [(NORM, KEEP_LAST.replace("hidden_states + residual", "residual") + NORM)],
        (LAST, V2, 0),
    ),
    "ids used elsewhere": (
        [(NORM, f"        log(self.aux_hidden_state_layers)\n{NORM}")],
        (LAST, V2, 0),
    ),
}


@pytest.mark.parametrize(("changes", "expected"), REFUSED.values(), ids=REFUSED)
def test_unknown_source_is_refused(changes: list[Change], expected: tuple[str, str, int]) -> None:
    assert refusal(PATCH, changed(BEFORE, *changes)) == expected


SPARSE_REFUSED = {
    "the summing norm called otherwise": (
        [
            (
                SUMMING_NORM,
                SUMMING_NORM.replace("(hidden_states, residual", "(residual, hidden_states"),
            )
        ],
        (NORMS, V32, 0),
    ),
    "sharded by something else": (
        [*FLAG, ("if self.use_sequence_parallel:", "if self.is_sharded:")],
        (NORMS, V32, 2),
    ),
    "the norms the other way round": (
        [*FLAG, ("if self.use_sequence_parallel:", "if not self.use_sequence_parallel:")],
        (NORMS, V32, 2),
    ),
    "a third norm": ([*FLAG, ("        if len(", f"{NORM}        if len(")], (NORMS, V32, 3)),
    "the last one kept before a summing norm": (
        [(SUMMING_NORM, KEEP_LAST + SUMMING_NORM)],
        (LAST, V32, 0),
    ),
    "nothing to import from": (
        [("import get_pp_group, get_tp_group", "import get_tp_group")],
        ("import of get_pp_group without tensor_model_parallel_all_reduce", "the module", 0),
    ),
}


@pytest.mark.parametrize(("changes", "expected"), SPARSE_REFUSED.values(), ids=SPARSE_REFUSED)
def test_unknown_sparse_source_is_refused(
    changes: list[Change], expected: tuple[str, str, int]
) -> None:
    assert refusal(PATCH, changed(SPARSE_BEFORE, *changes)) == expected


def test_what_deepseek_v2_writes_is_left_alone() -> None:
    check_unchanged(PATCH, deepseek_v2_sources.AFTER)


FEW = 'raise ValueError(\n                f"no default'


def errors(instead: str) -> list[Change]:
    """Something else than an error for both kinds of bad ids."""
    found = [
        f'raise ValueError(\n                    f"EAGLE-3 aux hidden state layer id {{layer_id!r}} is {kind}'
        for kind in ("not valid", "repeated")
    ]
    return [(error, error.replace("raise ValueError", instead)) for error in found]


BY_HAND = {
    "ids on the class by a mixin": [
        (DEFAULT, ""),
        (CLASS, "class DeepseekV2Model(nn.Module, EagleModelMixin):\n"),
    ],
    "a setter of the mixin's name": [
        (
            '    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:\n        """',
            '    def _set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:\n        """',
        ),
        ("            self.model.set_aux", "            self.model._set_aux"),
    ],
    "id 0 in a branch of its own": [
        (
            KEPT,
            "                if residual is None:\n"
            "                    aux_hidden_states.append(hidden_states.clone())\n"
            "                else:\n"
            "                    aux_hidden_states.append(hidden_states + residual)\n",
        )
    ],
    "checked in the outer class": [
        (SETS, f"        if min(layers) < 0:\n            raise ValueError(layers)\n{SETS}"),
        *errors("print"),
    ],
}


@pytest.mark.parametrize("changes", BY_HAND.values(), ids=BY_HAND)
def test_done_by_hand_in_another_way_is_left_alone(changes: list[Change]) -> None:
    check_unchanged(PATCH, changed(AFTER, *changes))


NOT_HOLDING = {
    "no ids on the class": (AFTER, [(DEFAULT, "")]),
    "ids declared on the class only": (AFTER, [(DEFAULT, DEFAULT.replace(" = ()", ""))]),
    "no class": (AFTER, [(CLASS, CLASS.replace("V2", "V9"))]),
    "no forward": (
        AFTER,
        [("forward(self, input_ids, positions, intermediate_tensors):", "run():")],
    ),
    "another error": (
        AFTER,
        errors("raise TypeError"),
    ),
    "the outer class goes past the check": (
        AFTER,
        [("            self.model.set_aux_hidden_state_layers(layers)\n", "            pass\n")],
    ),
    "the outer default goes past the check": (
        AFTER,
        [
            (
                "            return self.model.get_eagle3_aux_hidden_state_layers()\n",
                "            pass\n",
            )
        ],
    ),
    "no error for too few layers": (
        AFTER,
        [(FEW, FEW.replace("raise ValueError", "print"))],
    ),
    "id 0 not copied": (AFTER, [("hidden_states.clone()", "hidden_states")]),
    "id 0 not handled": (
        AFTER,
        [("hidden_states.clone() if residual is None else hidden_states", "hidden_states")],
    ),
    "the last one dropped": (AFTER, [(MARKER + KEEP_LAST, "")]),
    "the last one kept after the norm": (AFTER, [(KEEP_LAST + NORM, NORM + KEEP_LAST)]),
    "the last one kept where states are not sharded only": (
        STRATEGIES["sparse, sharded by a flag, packed"][1],
        [("".join(f"    {line}" for line in KEEP_LAST.splitlines(keepends=True)), "")],
    ),
    "one rank's part kept": (
        SPARSE_AFTER,
        [
            (
                "aux_hidden_state = tensor_model_parallel_all_reduce(hidden_states) + residual",
                "aux_hidden_state = hidden_states + residual",
            )
        ],
    ),
    "one rank's part kept last": (
        SPARSE_AFTER,
        [(LAST_SUM, KEEP_LAST)],
    ),
}


@pytest.mark.parametrize(("source", "changes"), NOT_HOLDING.values(), ids=NOT_HOLDING)
def test_the_postcondition_wants_every_part(source: str, changes: list[Change]) -> None:
    assert PATCH.holds(parse(source.encode(), ""))
    assert not PATCH.holds(parse(changed(source, *changes).encode(), ""))


def test_only_files_that_collect_are_concerned(tmp_path: Path) -> None:
    assert PATCH.paths(Sources(tmp_path)) == ()
    v2, nvidia, amd = PATHS
    plain = deepseek_v2_sources.BEFORE.encode()
    assert PATCH.paths(Sources(tmp_path, {v2: plain})) == ()
    sources = Sources(tmp_path, {v2: BEFORE.encode(), amd: SPARSE_BEFORE.encode(), nvidia: b""})
    assert PATCH.paths(sources) == (v2, amd)
    after = Sources(tmp_path, {v2: DeepseekV2().apply(plain, v2)})
    assert PATCH.paths(after) == (v2,)
