"""``draft-attention-metadata`` on look-alikes of the four files, before, after and run."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from patch_checks import (
    LAYOUTS,
    Change,
    Layout,
    changed,
    comments,
    difference,
    lines_without_replacement,
)

from vllm_eagle3_patch.ground.errors import AnchorNotFoundError
from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.patches.draft_attention_metadata import DraftAttentionMetadata
from vllm_eagle3_patch.vllm_source.paths import DRAFT_MODEL, FLASH_ATTENTION, PROPOSER, RUNNER
from vllm_eagle3_patch.vllm_source.sources import Sources, parse

PATCH = DraftAttentionMetadata()
MARKER = "# vllm-eagle3-patch: draft-attention-metadata\n"

BEFORE = {
    RUNNER: """
class GPUModelRunner:

    def get_kv_cache_spec(self):
        use_mla = self.vllm_config.model_config.use_mla
        kv_cache_spec = {}
        attn_layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        for layer_name, attn_module in attn_layers.items():
            if attn_module.shared is not None:
                continue

            # all of them decode
            if use_mla:
                kv_cache_spec[layer_name] = MLAAttentionSpec(
                    attn_module.num_kv_heads)
            else:
                kv_cache_spec[layer_name] = FullAttentionSpec(
                    attn_module.num_kv_heads)
        return kv_cache_spec
""",
    PROPOSER: """
class EagleProposer:

    def propose(self, common_attn_metadata):
        assert self.runner is not None

        # FIXME: need to consider multiple kv_cache_groups
        ubatch_id = dbo_current_ubatch_id()
        attn_metadata_builder = \\
            self.runner.attn_groups[0][0].metadata_builders[ubatch_id]
        return attn_metadata_builder.build(common_attn_metadata)

    def propose_tree(self):
        return self.runner.attn_groups[0][0].get_metadata_builder()

    def _get_attention_metadata_builder(self):
        for group in self.runner.attn_groups[0]:
            if self.attn_layer_names[0] in group.layer_names:
                return group.metadata_builders[0]
""",
    FLASH_ATTENTION: '''
def _get_sliding_window_configs(vllm_config):
    """Get the set of all sliding window configs used in the model."""
    sliding_window_configs = set()
    layers = get_layers_from_vllm_config(vllm_config, Attention)
    for layer in layers.values():
        assert isinstance(layer.impl, FlashAttentionImpl)
        sliding_window_configs.add(layer.impl.sliding_window)
    return sliding_window_configs


class FlashAttentionMetadataBuilder:

    def build(self):
        return _get_sliding_window_configs(self.vllm_config)
''',
    DRAFT_MODEL: """
from vllm.config import VllmConfig, get_current_vllm_config


class LlamaDecoderLayer:

    def __init__(self, vllm_config):
        self.quant_config = vllm_config.quant_config


class LlamaModel:

    def __init__(self, *, vllm_config: VllmConfig):
        self.vocab_size = 1

        current_vllm_config = get_current_vllm_config()

        self.layers = [LlamaDecoderLayer(current_vllm_config)]
""",
}

CHANGES: dict[str, Change] = {
    RUNNER: (
        "            if attn_module.shared",
        f"            {MARKER}            use_mla = attn_module.use_mla\n"
        "            if attn_module.shared",
    ),
    PROPOSER: (
        "        attn_metadata_builder = \\\n"
        "            self.runner.attn_groups[0][0].metadata_builders[ubatch_id]\n",
        f"        {MARKER}        attn_metadata_builder = self._get_attention_metadata_builder()\n",
    ),
    FLASH_ATTENTION: (
        "        assert",
        f"        {MARKER}        if layer.use_mla:\n            continue\n        assert",
    ),
    DRAFT_MODEL: (
        "get_current_vllm_config()\n",
        f"""get_current_vllm_config()
        {MARKER}        if current_vllm_config.model_config.is_deepseek_mla:
            from copy import copy

            current_vllm_config = copy(current_vllm_config)
            current_vllm_config.quant_config = VllmConfig.get_quantization_config(
                vllm_config.speculative_config.draft_model_config, vllm_config.load_config
            )
""",
    ),
}
AFTER = {path: changed(BEFORE[path], CHANGES[path]) for path in BEFORE}

EACH_FILE = pytest.mark.parametrize("path", BEFORE, ids=lambda path: Path(path).name)


def patched(path: str, source: str) -> str:
    return PATCH.apply(source.encode(), path).decode()


@EACH_FILE
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_before_and_after(path: str, layout: Layout) -> None:
    before, after = layout(BEFORE[path]), layout(AFTER[path])
    assert not PATCH.holds(parse(before, path), path=path)
    result = PATCH.apply(before, path)
    assert result == after, difference(after, result)
    assert PATCH.holds(parse(result, path), path=path)
    assert PATCH.apply(result, path) == result
    compile(result, path, "exec")
    assert lines_without_replacement(before, result) == []
    others = iter(comments(result))
    assert all(comment in others for comment in comments(before)), "a comment is lost or moved"


@EACH_FILE
def test_a_file_indented_with_tabs(path: str) -> None:
    result = patched(path, BEFORE[path].replace("    ", "\t"))
    assert not [line for line in result.splitlines() if line.startswith(" ")]
    compile(result, path, "exec")


@EACH_FILE
def test_the_oldest_python_of_the_release_can_read_it(path: str) -> None:
    parse(AFTER[path].encode(), path, feature_version=(3, 9))


# What somebody may have done by hand, or vLLM later.
BY_HAND = {
    "the layer asked where it counts": (
        RUNNER,
        ("            if use_mla:", "            if use_mla and attn_module.use_mla:"),
    ),
    "the builder found as 0.11.1 does": (
        PROPOSER,
        (
            CHANGES[PROPOSER][0],
            "        attn_metadata_builder = self.attn_metadata_builder or \\\n"
            "            self._get_attention_metadata_builder()\n",
        ),
    ),
    "other layers left out instead of asserted": (
        FLASH_ATTENTION,
        (
            "        assert isinstance(layer.impl, FlashAttentionImpl)\n",
            "        if not isinstance(layer.impl, FlashAttentionImpl):\n            continue\n",
        ),
    ),
    "the draft model's own quantization": (
        DRAFT_MODEL,
        (
            "LlamaDecoderLayer(current_vllm_config)",
            "LlamaDecoderLayer(current_vllm_config, "
            "VllmConfig.get_quantization_config(vllm_config.draft, vllm_config.load))",
        ),
    ),
}


@pytest.mark.parametrize(("path", "change"), BY_HAND.values(), ids=BY_HAND)
def test_done_otherwise_is_left_alone(path: str, change: Change) -> None:
    source = changed(BEFORE[path], change)
    assert PATCH.holds(parse(source.encode(), path), path=path)
    assert patched(path, source) == source


SPECS, WINDOWS = "get_kv_cache_spec", "_get_sliding_window_configs"
REFUSED: dict[str, tuple[str, Change, tuple[str, str, int]]] = {
    "specs made elsewhere": (
        RUNNER,
        (f"def {SPECS}", "def make_specs"),
        (f"class with def {SPECS}", "the module", 0),
    ),
    "config not asked": (
        RUNNER,
        ("self.vllm_config.model_config.use_mla", "self.use_mla"),
        ("use_mla = ....model_config.use_mla", SPECS, 0),
    ),
    "config asked twice": (
        RUNNER,
        (
            "        kv_cache_spec = {}\n",
            "        use_mla = self.model_config.use_mla\n        kv_cache_spec = {}\n",
        ),
        ("use_mla = ....model_config.use_mla", SPECS, 2),
    ),
    "another loop": (
        RUNNER,
        ("attn_layers.items()", "sorted(attn_layers.items())"),
        ("for layer_name, attn_module in attn_layers.items()", SPECS, 0),
    ),
    "no method that finds the builder": (
        PROPOSER,
        ("def _get_attention_metadata_builder", "def _find_builder"),
        ("def _get_attention_metadata_builder", "EagleProposer", 0),
    ),
    "another builder": (
        PROPOSER,
        (".metadata_builders[ubatch_id]", ".get_metadata_builder()"),
        (
            "attn_metadata_builder = self.runner.attn_groups[0][0].metadata_builders[...]",
            "propose",
            0,
        ),
    ),
    "the builder chosen in a branch": (
        PROPOSER,
        (
            "        attn_metadata_builder = \\\n            self",
            "        if ubatch_id:\n          attn_metadata_builder = \\\n            self",
        ),
        (
            "attn_metadata_builder = self.runner.attn_groups[0][0].metadata_builders[...]",
            "propose",
            0,
        ),
    ),
    "windows found elsewhere": (
        FLASH_ATTENTION,
        (f"def {WINDOWS}", "def get_windows"),
        (f"def {WINDOWS}", "the module", 0),
    ),
    "windows of other layers": (
        FLASH_ATTENTION,
        ("in layers.values()", "in mine(layers)"),
        ("for layer in layers.values()", WINDOWS, 0),
    ),
    "two assertions": (
        FLASH_ATTENTION,
        ("        assert", "        assert layer.impl\n        assert"),
        ("assert ...", f"the loop of {WINDOWS}", 2),
    ),
    "another draft class": (
        DRAFT_MODEL,
        ("class LlamaModel", "class DraftModel"),
        ("class LlamaModel", "the module", 0),
    ),
    "another config": (
        DRAFT_MODEL,
        ("= get_current_vllm_config()", "= vllm_config"),
        ("current_vllm_config = get_current_vllm_config()", "LlamaModel.__init__", 0),
    ),
    "config not imported": (
        DRAFT_MODEL,
        ("import VllmConfig, ", "import "),
        ("import of VllmConfig", "the module", 0),
    ),
}


@pytest.mark.parametrize(("path", "change", "expected"), REFUSED.values(), ids=REFUSED)
def test_unknown_source_is_refused(
    path: str, change: Change, expected: tuple[str, str, int]
) -> None:
    with pytest.raises(AnchorNotFoundError) as caught:
        patched(path, changed(BEFORE[path], change))
    error = caught.value
    assert (error.anchor, error.where, error.found) == expected
    assert (error.patch, error.path, error.exit_code) == (PATCH.name, path, 4)


@EACH_FILE
def test_a_file_without_the_place_does_not_hold(path: str) -> None:
    assert not PATCH.holds(parse(b"pass\n", path), path=path)


def sources(files: dict[str, str], root: Path) -> Sources:
    return Sources(root, {path: text.encode() for path, text in files.items()})


def test_all_four_files_before_and_after(tmp_path: Path) -> None:
    assert PATCH.paths(sources(BEFORE, tmp_path)) == tuple(BEFORE)
    assert PATCH.paths(sources(AFTER, tmp_path)) == tuple(BEFORE)
    assert PATCH.missing(sources(BEFORE, tmp_path), FAMILY[0])
    assert not PATCH.missing(sources(AFTER, tmp_path), FAMILY[0])


@EACH_FILE
def test_each_file_is_missed(tmp_path: Path, path: str) -> None:
    assert PATCH.missing(sources({**AFTER, path: BEFORE[path]}, tmp_path), FAMILY[0])


def test_no_file_where_layers_answer_for_their_kv_cache(tmp_path: Path) -> None:
    """As from 0.11.1 on; up to 0.10.2 there is one class for the specs of both kinds."""
    for spec in ("attn_module.get_kv_cache_spec(self.vllm_config)", "FullAttentionSpec(use_mla)"):
        source = BEFORE[RUNNER].replace("MLAAttentionSpec(", f"{spec} or (")
        later = sources({**BEFORE, RUNNER: source}, tmp_path)
        assert PATCH.paths(later) == ()
        assert not PATCH.missing(later, FAMILY[0])


# What the patched code does


@dataclass(frozen=True)
class Layer:
    """An attention layer: of the target with MLA, or of a draft model."""

    use_mla: bool
    num_kv_heads: int = 1
    shared: str | None = None
    impl: Any = None


@dataclass(frozen=True)
class FlashAttentionImpl:
    sliding_window: tuple[int, int] = (-1, -1)


TARGET, DRAFT = Layer(use_mla=True), Layer(use_mla=False, num_kv_heads=8)


def run(path: str, source: str, **names: object) -> dict[str, Any]:
    namespace: dict[str, Any] = {"Attention": object, **names}
    code = textwrap.dedent(source).replace("from vllm.config import", "# ")
    exec(compile(code, path, "exec"), namespace)
    return namespace


def specs(source: str, *layers: Layer, use_mla: bool = True) -> list[tuple[str, int]]:
    """The kind of KV cache and its heads for each layer."""
    namespace = run(
        RUNNER,
        source,
        get_layers_from_vllm_config=lambda *_: dict(enumerate(layers)),
        MLAAttentionSpec=lambda heads: ("MLA", heads),
        FullAttentionSpec=lambda heads: ("full", heads),
    )
    runner = namespace["GPUModelRunner"]()
    runner.vllm_config = SimpleNamespace(model_config=SimpleNamespace(use_mla=use_mla))
    return list(runner.get_kv_cache_spec().values())


def test_a_draft_model_gets_the_kv_cache_of_its_own_kind() -> None:
    assert specs(BEFORE[RUNNER], TARGET, DRAFT) == [("MLA", 1), ("MLA", 8)]
    assert specs(AFTER[RUNNER], TARGET, DRAFT) == [("MLA", 1), ("full", 8)]


def test_without_mla_the_kv_caches_are_as_before() -> None:
    layers = (replace(DRAFT, num_kv_heads=16), DRAFT, replace(DRAFT, shared="0"))
    before = specs(BEFORE[RUNNER], *layers, use_mla=False)
    assert specs(AFTER[RUNNER], *layers, use_mla=False) == before == [("full", 16), ("full", 8)]


@pytest.mark.parametrize(("files", "builder"), [(BEFORE, "target"), (AFTER, "draft")])
def test_the_builder_is_the_draft_models(files: dict[str, str], builder: str) -> None:
    proposer = run(PROPOSER, files[PROPOSER], dbo_current_ubatch_id=lambda: 0)["EagleProposer"]()
    groups = [
        SimpleNamespace(
            layer_names=[name], metadata_builders=[SimpleNamespace(build=lambda _, name=name: name)]
        )
        for name in ("target", "draft")
    ]
    proposer.runner = SimpleNamespace(attn_groups=[groups])
    proposer.attn_layer_names = ["draft"]
    assert proposer.propose(None) == builder


def windows(source: str, *layers: Layer) -> set[tuple[int, int]]:
    namespace = run(
        FLASH_ATTENTION,
        source,
        get_layers_from_vllm_config=lambda *_: dict(enumerate(layers)),
        FlashAttentionImpl=FlashAttentionImpl,
    )
    found: set[tuple[int, int]] = namespace[WINDOWS](None)
    return found


def test_flash_attention_passes_mla_layers_over_and_still_asserts_of_the_others() -> None:
    with_window = replace(DRAFT, impl=FlashAttentionImpl((128, 0)))
    with pytest.raises(AssertionError):
        windows(BEFORE[FLASH_ATTENTION], TARGET, with_window)
    assert windows(AFTER[FLASH_ATTENTION], TARGET, with_window) == {(128, 0)}
    with pytest.raises(AssertionError):
        windows(AFTER[FLASH_ATTENTION], TARGET, DRAFT)


@pytest.mark.parametrize(
    ("files", "mla", "quantization"),
    [(BEFORE, True, "target's"), (AFTER, True, "draft's"), (AFTER, False, "target's")],
    ids=["before", "after", "after, beside another target"],
)
def test_the_draft_models_layers_have_its_own_quantization(
    files: dict[str, str], mla: bool, quantization: str
) -> None:
    target_config = SimpleNamespace(
        quant_config="target's",
        load_config="load",
        model_config=SimpleNamespace(is_deepseek_mla=mla),
        speculative_config=SimpleNamespace(draft_model_config="draft"),
    )
    own = SimpleNamespace(
        get_quantization_config=lambda model, load: {("draft", "load"): "draft's"}[model, load]
    )
    namespace = run(
        DRAFT_MODEL,
        files[DRAFT_MODEL],
        VllmConfig=own,
        get_current_vllm_config=lambda: target_config,
    )
    draft_model = namespace["LlamaModel"](vllm_config=target_config)
    assert [layer.quant_config for layer in draft_model.layers] == [quantization]
    assert target_config.quant_config == "target's"
