"""``aux-layer-bounds`` on every release of vLLM that collects aux hidden states itself."""

from __future__ import annotations

from functools import cache

import pytest

from parallel_ranks import NUM_LAYERS, Parallel
from semantics import Subject, check_all
from tools.fetch_release import fetch
from vllm_eagle3_patch.codemod.patch import has_protocol
from vllm_eagle3_patch.patches.aux_layer_bounds import AuxLayerBounds
from vllm_eagle3_patch.patches.deepseek_v2 import DeepseekV2
from vllm_eagle3_patch.vllm_source.sources import Sources, parse

NATIVE = (
    *("0.18.0", "0.18.1", "0.19.0", "0.19.1", "0.20.0", "0.20.1", "0.20.2", "0.21.0"),
    *("0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0"),
    *("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
)
OLDER = (
    *("0.8.5", "0.8.5.post1", "0.9.0", "0.9.0.1", "0.9.1", "0.9.2", "0.10.0", "0.10.1"),
    *("0.10.1.1", "0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.13.0", "0.14.0"),
    *("0.14.1", "0.15.0", "0.15.1", "0.16.0", "0.17.0", "0.17.1"),
)
INTERFACES = "vllm/model_executor/models/interfaces.py"
DEEPSEEK = "vllm/model_executor/models/deepseek_v2.py"
NVIDIA = "vllm/models/deepseek_v32/nvidia/model.py"
AMD = "vllm/models/deepseek_v32/amd/model.py"
FAILED_RULES = {"first", "last", "subclass", "bad_ids", "default_ids"}
PATCH = AuxLayerBounds()


@pytest.fixture(scope="module", params=NATIVE)
def sources(request: pytest.FixtureRequest) -> Sources:
    """A native release."""
    return Sources(fetch(str(request.param)))


def number(sources: Sources) -> tuple[int, ...]:
    return tuple(int(part) for part in sources.root.name.split("."))


def read(sources: Sources, path: str) -> bytes:
    content = sources.read(path)
    assert content is not None
    return content


@cache
def patched(content: bytes, path: str) -> bytes:
    return PATCH.apply(content, path)


@cache
def failing(model: bytes, outer: bytes, interfaces: bytes) -> dict[str, str]:
    """The rules that a model breaks, reached through its outer class, and how."""
    if model == outer:
        subject = Subject(model, extra_sources=[interfaces])
    else:
        names = ("DeepseekV32Model", "DeepseekV32ForCausalLM")
        subject = Subject(model, *names, extra_sources=[outer, interfaces])
    for file in subject.files:
        # There is one rank.
        file.namespace["tensor_model_parallel_all_reduce"] = lambda states: states
    return {rule: result for rule, result in check_all(subject).items() if result != "ok"}


def test_the_files_that_collect(sources: Sources) -> None:
    expected = [DEEPSEEK]
    if number(sources) >= (0, 25):
        expected.append(NVIDIA)
    if number(sources) >= (0, 27):
        expected.append(AMD)
    assert PATCH.paths(sources) == tuple(expected)


def test_as_published_the_ends_are_wrong_and_afterwards_every_rule_holds(sources: Sources) -> None:
    outer, interfaces = read(sources, DEEPSEEK), read(sources, INTERFACES)
    for path in PATCH.paths(sources):
        content = read(sources, path)
        # vLLM's pull request 46973.
        mended = {"last"} if path == DEEPSEEK and number(sources) >= (0, 25) else set()
        assert set(failing(content, outer, interfaces)) == FAILED_RULES - mended, path
        after = patched(content, path)
        assert failing(after, patched(outer, DEEPSEEK), interfaces) == {}, path


def test_the_postcondition(sources: Sources) -> None:
    for path in PATCH.paths(sources):
        content = read(sources, path)
        after = patched(content, path)
        assert not PATCH.holds(parse(content, path), path=path)
        assert PATCH.holds(parse(after, path), path=path)
        assert PATCH.apply(after, path) == after
        compile(parse(after, path, feature_version=(3, 10)), path, "exec", dont_inherit=True)


def test_one_file_without_the_others_works_as_before(sources: Sources) -> None:
    outer, interfaces = read(sources, DEEPSEEK), read(sources, INTERFACES)
    for path in PATCH.paths(sources)[1:]:
        content = read(sources, path)
        as_published = failing(content, outer, interfaces)
        assert failing(content, patched(outer, DEEPSEEK), interfaces) == as_published
        after = failing(patched(content, path), outer, interfaces)
        assert set(after) == {"bad_ids", "default_ids"}


IDS = tuple(range(NUM_LAYERS + 1))
STEPS = ((7, 2, 5), (7, 2, 5, 3))
"""Token ids, with and without padding to the number of ranks."""


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_rank_gets_whole_states(sources: Sources, sequence_parallel: bool) -> None:
    for path in PATCH.paths(sources):
        content = patched(read(sources, path), path)
        model = Parallel(content, sequence_parallel=sequence_parallel)
        for ids in ((), (0,), (NUM_LAYERS,), IDS):
            for token_ids in STEPS:
                assert model.wrong(ids, token_ids) == [], (path, ids)


def test_as_published_the_sparse_model_keeps_one_ranks_part(sources: Sources) -> None:
    whole = IDS[1:-1]
    for path in PATCH.paths(sources):
        model = Parallel(read(sources, path), sequence_parallel=False)
        wrong = [] if path == DEEPSEEK else [f"the state of id {layer}" for layer in whole]
        assert model.wrong(whole, STEPS[0]) == wrong, path


@pytest.mark.parametrize("release", OLDER)
def test_a_release_that_does_not_collect_is_not_concerned(release: str) -> None:
    assert PATCH.paths(Sources(fetch(release))) == ()


@pytest.mark.parametrize("release", ["0.8.5", "0.10.2", "0.11.1", "0.17.1"])
def test_what_deepseek_v2_wrote_is_left_alone(release: str) -> None:
    sources = Sources(fetch(release))
    content = read(sources, DEEPSEEK)
    after = DeepseekV2().apply(content, DEEPSEEK, protocol=has_protocol(sources))
    assert PATCH.paths(sources.with_overlay({DEEPSEEK: after})) == (DEEPSEEK,)
    assert PATCH.holds(parse(after, DEEPSEEK), path=DEEPSEEK)
    assert PATCH.apply(after, DEEPSEEK) == after
