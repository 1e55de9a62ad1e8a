"""``dual-batch-overlap`` on look-alikes of the micro-batch wrapper, before and since 0.22.0."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
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

from vllm_eagle3_patch.patches.dual_batch_overlap import DualBatchOverlap, DualBatchOverlapCodemod
from vllm_eagle3_patch.vllm_source.paths import MICRO_BATCHES
from vllm_eagle3_patch.vllm_source.sources import Sources

PATCH = DualBatchOverlap()

# As in vLLM 0.11.0 to 0.21.0.
PLAIN = '''"""A micro-batch wrapper look-alike."""

import threading

logger = init_logger(__name__)


class UBatchWrapper:
    def _capture_ubatches(self, ubatch_metadata, model):
        results = self._results(ubatch_metadata, model)
        with torch.graph():
            # In the order of the micro-batches.
            sorted_results = [value for position, value in sorted(results)]
            result = torch.cat(sorted_results, dim=0)
            self.outputs = result
        return self.outputs

    def _run_ubatches(self, ubatch_metadata, model):
        results = self._results(ubatch_metadata, model)
        sorted_results = [value for position, value in sorted(results)]
        result = torch.cat(sorted_results, dim=0)
        return result

    def _results(self, ubatch_metadata, model):
        return [(-i, model(tokens)) for i, tokens in enumerate(ubatch_metadata)]
'''
FUNCTION = '''\
# vllm-eagle3-patch: dual-batch-overlap
def _cat_ubatch_outputs(sorted_results):
    """Concatenate what a model returned for each micro-batch, with EAGLE-3 a tensor and a list."""
    if isinstance(sorted_results[0], (tuple, list)):
        return tuple(_cat_ubatch_outputs(parts) for parts in zip(*sorted_results))
    return torch.cat(sorted_results, dim=0)


'''
CAT, CALL = "torch.cat(sorted_results, dim=0)", "_cat_ubatch_outputs(sorted_results)"
PLAIN_AFTER = PLAIN.replace(CAT, CALL).replace("class UB", f"{FUNCTION}class UB")

# As in vLLM 0.22.0 to 0.33.0.
TUPLES = PLAIN.replace(CAT, CALL).replace(
    "class UB",
    '''\
def _cat_ubatch_outputs(
    sorted_results: list,
) -> "torch.Tensor | tuple[torch.Tensor, ...]":
    """Concatenate per-ubatch model outputs along the batch dim."""
    if sorted_results and isinstance(sorted_results[0], tuple):
        return tuple(torch.cat(parts, dim=0) for parts in zip(*sorted_results))
    return torch.cat(sorted_results, dim=0)


class UB''',
)
TEST = "    if sorted_results and isinstance(sorted_results[0], tuple):\n"
PARTS = "tuple(torch.cat(parts, dim=0) for"
TUPLES_AFTER = changed(
    TUPLES,
    (
        TEST,
        "    # vllm-eagle3-patch: dual-batch-overlap\n" + TEST.replace("tuple)", "(tuple, list))"),
    ),
    (PARTS, "tuple(_cat_ubatch_outputs(parts) for"),
)

LAYOUTS_OF_VLLM = {
    "torch.cat in both places, 0.11.0 to 0.21.0": (PLAIN, PLAIN_AFTER),
    "a function for tuples, 0.22.0 to 0.33.0": (TUPLES, TUPLES_AFTER),
}


class TestBeforeAndAfter(CodemodTest):
    TRANSFORM = DualBatchOverlapCodemod

    def test_both_places_call_one_function(self) -> None:
        self.assertCodemod(PLAIN, PLAIN_AFTER)

    def test_the_function_of_vllms_own_takes_lists_apart_too(self) -> None:
        self.assertCodemod(TUPLES, TUPLES_AFTER)


@pytest.mark.parametrize(("before", "after"), LAYOUTS_OF_VLLM.values(), ids=LAYOUTS_OF_VLLM)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_bytes_around_the_change_are_kept(before: str, after: str, layout: Layout) -> None:
    check_patched(PATCH, layout(before), layout(after))


@pytest.mark.parametrize(("before", "after"), LAYOUTS_OF_VLLM.values(), ids=LAYOUTS_OF_VLLM)
def test_a_file_indented_with_tabs(before: str, after: str) -> None:
    check_tabs(PATCH, before, after)


def test_comments_beside_the_branch_stay() -> None:
    comments = [
        (TEST, f"\n    # parts\n{TEST[:-1]}  # aux\n        # each\n"),
        ("zip(*sorted_results))", "zip(*sorted_results))  # all"),
    ]
    marker = "    # vllm-eagle3-patch: dual-batch-overlap\n"
    after = changed(
        changed(TUPLES, *comments),
        ("    # parts\n", f"    # parts\n{marker}"),
        ("_results[0], tuple)", "_results[0], (tuple, list))"),
        (PARTS, "tuple(_cat_ubatch_outputs(parts) for"),
    )
    check_patched(PATCH, changed(TUPLES, *comments).encode(), after.encode())


def test_a_function_under_another_name_is_left_alone() -> None:
    check_unchanged(PATCH, PLAIN_AFTER.replace("_cat_ubatch_outputs", "merged"))


CAT_IN = ("torch.cat(sorted_results, dim=0)", "UBatchWrapper._run_ubatches")
BRANCH = (
    "if sorted_results and isinstance(sorted_results[0], tuple): return tuple(...)",
    "_cat_ubatch_outputs",
)
LAST_RESULT = "        result = torch.cat(sorted_results, dim=0)\n        return result\n"

REFUSED = {
    "class renamed": (PLAIN, [("class UB", "class Ub")], ("class UBatchWrapper", "the module", 0)),
    "method renamed": (
        PLAIN,
        [("def _run_ubatches", "def _run")],
        ("def _run_ubatches", "UBatchWrapper", 0),
    ),
    "results renamed": (PLAIN, [(LAST_RESULT, LAST_RESULT.replace("sorted_", ""))], (*CAT_IN, 0)),
    "another dimension": (PLAIN, [(LAST_RESULT, LAST_RESULT.replace("=0", "=1"))], (*CAT_IN, 0)),
    "concatenated twice": (PLAIN, [(LAST_RESULT, LAST_RESULT * 2)], (*CAT_IN, 2)),
    "a slice of the result": (
        PLAIN,
        [("        return result\n", "        return result[:3]\n")],
        ("`result[:3]`", CAT_IN[1], 1),
    ),
    "a slice of the call": (
        PLAIN,
        [(LAST_RESULT, LAST_RESULT.replace("dim=0)", "dim=0)[:3]"))],
        ("`torch.cat(sorted_results, dim=0)[:3]`", CAT_IN[1], 1),
    ),
    "one place done by hand": (
        PLAIN,
        [(LAST_RESULT, LAST_RESULT.replace("torch.cat", "merge"))],
        (*CAT_IN, 0),
    ),
    "no branch for tuples": (TUPLES, [(TEST, TEST.replace("tuple", "dict"))], (*BRANCH, 0)),
    "lists known, but not in tuples": (
        TUPLES,
        [(TEST, TEST.replace("tuple)", "(tuple, list))"))],
        (*BRANCH, 0),
    ),
    "a branch that does more": (TUPLES, [(TEST, f"{TEST}        warn()\n")], (*BRANCH, 0)),
    "an else": (
        TUPLES,
        [("    return torch.cat(sort", "    else:\n        return torch.cat(sort")],
        (*BRANCH, 0),
    ),
    "parts taken apart in another way": (
        TUPLES,
        [(PARTS, PARTS.replace("torch.cat(parts, dim=0)", "merge(parts)"))],
        (*BRANCH, 0),
    ),
}


@pytest.mark.parametrize(("source", "changes", "expected"), REFUSED.values(), ids=REFUSED)
def test_unknown_source_is_refused(
    source: str, changes: list[Change], expected: tuple[str, str, int]
) -> None:
    assert refusal(PATCH, changed(source, *changes)) == expected


def test_a_function_that_one_place_does_not_call_does_not_hold() -> None:
    last = LAST_RESULT.replace(CAT, CALL)
    half = changed(PLAIN_AFTER, (last, LAST_RESULT))
    assert refusal(PATCH, half)[1:] == ("_cat_ubatch_outputs", 0)


class Tensor:
    """A row of numbers."""

    def __init__(self, *values: int) -> None:
        self.values = values


def cat(tensors: Any, dim: int) -> Tensor:
    """What torch.cat does, and refuses."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected Tensor as element, but got {type(tensor).__name__}")
    return Tensor(*(value for tensor in tensors for value in tensor.values))


class Graph:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def merged(source: str, method: str, model: Any) -> Any:
    """What the wrapper of a source makes of two micro-batches that the model ran on."""
    names: dict[str, Any] = {
        "__name__": "wrapper",
        "init_logger": lambda name: None,
        "torch": SimpleNamespace(cat=cat, graph=Graph),
    }
    exec(source, names)
    return getattr(names["UBatchWrapper"](), method)([3, 1], model)


def flat(output: Any) -> Any:
    return output.values if isinstance(output, Tensor) else [flat(part) for part in output]


MODELS = {
    "hidden states": (Tensor, (1, 3)),
    "hidden states and three aux hidden states": (
        lambda n: (Tensor(n), [Tensor(n + 10), Tensor(n + 20), Tensor(n + 30)]),
        [(1, 3), [(11, 13), (21, 23), (31, 33)]],
    ),
    "hidden states and two more tensors": (
        lambda n: (Tensor(n), Tensor(n + 10), Tensor(n + 20)),
        [(1, 3), (11, 13), (21, 23)],
    ),
}


@pytest.mark.parametrize(("model", "expected"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("method", ["_capture_ubatches", "_run_ubatches"])
@pytest.mark.parametrize("before", [PLAIN, TUPLES], ids=LAYOUTS_OF_VLLM)
def test_what_the_model_returned_for_both_is_put_together(
    before: str, method: str, model: Any, expected: Any
) -> None:
    result = merged(PATCH.apply(before.encode(), "wrapper.py").decode(), method, model)
    assert flat(result) == expected


@pytest.mark.parametrize("before", [PLAIN, TUPLES], ids=LAYOUTS_OF_VLLM)
def test_without_the_patch_aux_hidden_states_are_an_error(before: str) -> None:
    model, _ = MODELS["hidden states and three aux hidden states"]
    with pytest.raises(TypeError, match="expected Tensor as element, but got"):
        merged(before, "_run_ubatches", model)


def test_the_file_is_concerned_where_there_is_one(tmp_path: Path) -> None:
    assert PATCH.paths(Sources(tmp_path)) == ()
    assert PATCH.paths(Sources(tmp_path, {MICRO_BATCHES: PLAIN.encode()})) == (MICRO_BATCHES,)
    assert PATCH.companion
