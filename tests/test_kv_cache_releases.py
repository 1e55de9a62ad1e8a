"""Which KV caches an MLA target and a draft model get, by each old release's own code.

The model runner's ``get_kv_cache_spec`` and the whole of the KV cache manager's
``kv_cache_utils`` are taken out of the release and run on stand-ins for its attention layers,
without torch. This is what the reasons and the patch ``draft-attention-metadata`` rest on.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tools.fetch_release import fetch
from vllm_eagle3_patch.patches.draft_attention_metadata import DraftAttentionMetadata
from vllm_eagle3_patch.vllm_source.paths import RUNNER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

ONE_PAGE_SIZE = (
    "0.8.5",
    "0.8.5.post1",
    "0.9.0",
    "0.9.0.1",
    "0.9.1",
    "0.9.2",
    "0.10.0",
    "0.10.1",
    "0.10.1.1",
    "0.10.2",
)
NUM_LAYERS = 4
BLOCK = 64
BFLOAT16 = "bfloat16"

# What the code below reads of the configs.
CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(max_model_len=4096),
    parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    scheduler_config=SimpleNamespace(
        disable_hybrid_kv_cache_manager=False, max_num_batched_tokens=2048
    ),
    cache_config=SimpleNamespace(
        num_gpu_blocks_override=None, gpu_memory_utilization=0.9, block_size=BLOCK
    ),
)


class Anything(ModuleType):
    """A module that has whatever is imported from it."""

    __path__: list[str] = []  # noqa: RUF012  a package, for the import system

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)

    def __call__(self, *_: object, **__: object) -> Any:
        return Anything(self.__name__)

    def __getitem__(self, _: object) -> Any:
        return self


class StandIns:
    """Finds a module for every import from some packages: empty ones, but for a few functions."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages
        self.given = {
            "cdiv": lambda a, b: -(-a // b),
            "get_dtype_size": {BFLOAT16: 2}.__getitem__,
            "GiB_bytes": 1 << 30,
            "dtype": str,
        }

    def find_spec(self, name: str, *_: object) -> Any:
        if name.partition(".")[0] in self.packages:
            return importlib.util.spec_from_loader(name, self)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> ModuleType:
        module = Anything(spec.name)
        vars(module).update(self.given)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it is complete."""


class Layer:
    """An attention layer, as ``vllm.attention.layer.Attention``."""

    kv_sharing_target_layer_name = None
    attn_type = "decoder"
    sliding_window = None

    def __init__(self, num_kv_heads: int, head_size: int, *, use_mla: bool = False) -> None:
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.use_mla = use_mla


MLA = Layer(1, 576, use_mla=True)
WITHOUT_MLA = Layer(16, 192)
GROUPED_QUERY = Layer(8, 128)


class Engine:
    """The part of a release that decides on KV caches."""

    def __init__(self, root: Path, runner: bytes) -> None:
        self.interface = self.load("vllm.v1.kv_cache_interface", root)
        self.manager = self.load("vllm.v1.core.kv_cache_utils", root)
        self.runner = runner

    def load(self, name: str, root: Path) -> Any:
        file = root / f"{name.replace('.', '/')}.py"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    def specs(self, layers: Iterable[Layer], *, use_mla: bool) -> dict[str, Any]:
        """What the runner says of each layer's KV cache."""
        (function,) = (
            node
            for node in ast.walk(ast.parse(self.runner))
            if isinstance(node, ast.FunctionDef) and node.name == "get_kv_cache_spec"
        )
        named = {f"model.layers.{index}.attn": layer for index, layer in enumerate(layers)}
        kinds = {kind: object() for kind in ("MambaBase", "MambaMixer2", "DeepseekV32IndexerCache")}
        namespace: dict[str, Any] = {
            **vars(self.interface),
            **kinds,
            "Attention": Layer,
            "ChunkedLocalAttention": StandIns,
            "AttentionType": SimpleNamespace(
                DECODER="decoder", ENCODER="e", ENCODER_ONLY="o", ENCODER_DECODER="c"
            ),
            "get_layers_from_vllm_config": lambda _, kind: named if kind is Layer else {},
        }
        exec(compile(ast.Module([function], []), RUNNER, "exec"), namespace)
        runner = SimpleNamespace(
            vllm_config=SimpleNamespace(
                cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype="auto"),
                model_config=SimpleNamespace(use_mla=use_mla),
            ),
            kv_cache_dtype=BFLOAT16,
            shared_kv_cache_layers={},
            attention_chunk_size=None,
        )
        specs: dict[str, Any] = namespace["get_kv_cache_spec"](runner)
        return specs

    def configure(self, target: Layer, draft: Layer) -> Any:
        """The KV cache config for a target's layers and a draft model's one."""
        specs = self.specs([*[target] * NUM_LAYERS, draft], use_mla=target.use_mla)
        if hasattr(self.manager, "get_kv_cache_configs"):
            (config,) = self.manager.get_kv_cache_configs(CONFIG, [specs], [1 << 30])
            return config
        return self.manager.get_kv_cache_config(CONFIG, specs, 1 << 30)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of torch or vLLM is really imported, and nothing stays imported."""
    assert not imported(), "these tests cannot run beside a real torch or vLLM"
    first, last = StandIns("torch", "vllm"), StandIns("typing_extensions")
    monkeypatch.setattr(sys, "meta_path", [first, *sys.meta_path, last])
    yield
    for name in imported():
        del sys.modules[name]


def imported() -> list[str]:
    """What there is of torch and vLLM, real or not, and other stand-ins."""
    return [
        name
        for name, module in sys.modules.items()
        if name.partition(".")[0] in ("torch", "vllm") or isinstance(module, Anything)
    ]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("release", ONE_PAGE_SIZE)
def test_one_page_size_only(release: str) -> None:
    root = fetch(release)
    engine = Engine(root, (root / RUNNER).read_bytes())
    for target in (MLA, WITHOUT_MLA):
        with pytest.raises(NotImplementedError):
            engine.configure(target, GROUPED_QUERY)
    config = engine.configure(WITHOUT_MLA, Layer(16, 192))
    (group,) = config.kv_cache_groups
    assert len(group.layer_names) == NUM_LAYERS + 1


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("release", [*ONE_PAGE_SIZE, "0.11.0"])
def test_beside_mla_a_draft_models_page_has_no_room_for_its_values(release: str) -> None:
    root = fetch(release)
    engine = Engine(root, (root / RUNNER).read_bytes())
    *_, draft = engine.specs([MLA, GROUPED_QUERY], use_mla=True).values()
    keys = BLOCK * GROUPED_QUERY.num_kv_heads * GROUPED_QUERY.head_size * 2
    assert draft.page_size_bytes == keys


@pytest.mark.usefixtures("stand_ins")
def test_0_11_0_holds_both_once_each_layer_is_asked() -> None:
    root = fetch("0.11.0")
    stock = (root / RUNNER).read_bytes()
    with pytest.raises(AssertionError):
        Engine(root, stock).configure(MLA, GROUPED_QUERY)

    engine = Engine(root, DraftAttentionMetadata().apply(stock, RUNNER))
    config = engine.configure(MLA, GROUPED_QUERY)
    (group,) = config.kv_cache_groups
    assert type(group.kv_cache_spec).__name__ == "UniformTypeKVCacheSpecs"
    *_, target, draft = group.kv_cache_spec.kv_cache_specs.values()
    assert (type(target).__name__, target.page_size_bytes) == ("MLAAttentionSpec", BLOCK * 576 * 2)
    assert (type(draft).__name__, draft.page_size_bytes) == (
        "FullAttentionSpec",
        2 * BLOCK * 8 * 128 * 2,
    )
    sizes = {tensor.size // config.num_blocks for tensor in config.kv_cache_tensors}
    assert sizes == {target.page_size_bytes, draft.page_size_bytes}


@pytest.mark.usefixtures("stand_ins")
def test_0_11_0_without_mla_needs_no_patch() -> None:
    root = fetch("0.11.0")
    stock = (root / RUNNER).read_bytes()
    for runner in (stock, DraftAttentionMetadata().apply(stock, RUNNER)):
        config = Engine(root, runner).configure(WITHOUT_MLA, GROUPED_QUERY)
        (group,) = config.kv_cache_groups
        assert len({s.page_size_bytes for s in group.kv_cache_spec.kv_cache_specs.values()}) == 2
