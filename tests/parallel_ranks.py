"""Model code run for all tensor-parallel ranks at once, without torch or vLLM.

`semantics` runs models on one rank, where no state is sharded and no sum is pending. Here an array
holds one matrix a rank, so that all of them go through the real forward of the model and of its
decoder layers in lockstep, and collective operations are plain arithmetic. Only attention, the
feed-forward blocks and the norms are stand-ins: those of `semantics`, and where vLLM leaves their
output unreduced, each rank gets a part of it.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

from semantics import (
    HIDDEN_SIZE,
    Matrix,
    ModelFile,
    Module,
    Row,
    Stub,
    Tokens,
    attention,
    embedding,
    feed_forward,
    reference,
    rms_norm,
)

PARTS = (0.75, 0.25)
"""What each rank holds of an output that is not summed yet."""
NUM_RANKS = len(PARTS)
NUM_LAYERS = 6
NUM_DENSE_LAYERS = 2


class Ranks:
    """A `[num_tokens, hidden_size]` tensor on each rank: views share rows, writes are in place."""

    dtype = "bfloat16"

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self.matrices = list(matrices)

    @property
    def shape(self) -> tuple[int, int]:
        (shape,) = {(len(matrix), len(matrix[0])) for matrix in self.matrices}
        return shape

    def map(self, function: Callable[[Row], Row]) -> "Ranks":
        return Ranks([[function(row) for row in matrix] for matrix in self.matrices])

    def parts(self) -> "Ranks":
        """The same values as a sum over the ranks."""
        pairs = zip(PARTS, self.matrices, strict=True)
        return Ranks([[[part * v for v in row] for row in matrix] for part, matrix in pairs])

    def write(self, other: "Ranks") -> None:
        for matrix, values in zip(self.matrices, other.matrices, strict=True):
            for row, new in zip(matrix, values, strict=True):
                row[:] = new

    def clone(self) -> "Ranks":
        return self.map(list)

    def contiguous(self) -> "Ranks":
        return self

    def __add__(self, other: "Ranks") -> "Ranks":
        assert self.shape == other.shape, f"{self.shape} + {other.shape}"
        pairs = zip(self.matrices, other.matrices, strict=True)
        return Ranks([add_matrices([left, right]) for left, right in pairs])

    def __getitem__(self, rows: slice) -> "Ranks":
        return Ranks([matrix[rows] for matrix in self.matrices])

    def split(self, sizes: int | list[int], dim: int) -> "list[Ranks]":
        assert dim == -1
        width = self.shape[1]
        if isinstance(sizes, int):
            sizes = [sizes] * (width // sizes)
        assert sum(sizes) == width
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [
            self.map(lambda row, start=start, size=size: row[start : start + size])
            for start, size in zip(starts, sizes, strict=True)
        ]

    def chunk(self, chunks: int, dim: int) -> "list[Ranks]":
        return self.split(self.shape[1] // chunks, dim)


def add_matrices(matrices: Sequence[Matrix]) -> Matrix:
    return [
        [sum(values) for values in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)
    ]


def cat(tensors: Sequence[Ranks], dim: int) -> Ranks:
    assert dim == -1
    matrices = zip(*(tensor.matrices for tensor in tensors), strict=True)
    return Ranks([[[*chain(*rows)] for rows in zip(*group, strict=True)] for group in matrices])


def pad(tensor: Ranks, padding: tuple[int, int, int, int]) -> Ranks:
    before, after, above, below = padding
    assert before == after == above == 0
    width = tensor.shape[1]
    return Ranks([[*matrix, *([0.0] * width for _ in range(below))] for matrix in tensor.matrices])


# What vllm.distributed and vllm.models.common.ops.sequence_parallel do.


def all_reduce(tensor: Ranks) -> Ranks:
    return Ranks([add_matrices(tensor.matrices) for _ in PARTS])


def all_gather(tensor: Ranks, dim: int = 0) -> Ranks:
    assert dim == 0
    return Ranks([[list(row) for matrix in tensor.matrices for row in matrix] for _ in PARTS])


def shard(tensor: Ranks) -> Ranks:
    tensor = pad(tensor, (0, 0, 0, -tensor.shape[0] % NUM_RANKS))
    size = tensor.shape[0] // NUM_RANKS
    slices = [slice(rank * size, (rank + 1) * size) for rank in range(NUM_RANKS)]
    return Ranks([matrix[rows] for matrix, rows in zip(tensor.matrices, slices, strict=True)])


def reduce_scatter(tensor: Ranks, dim: int = 0) -> Ranks:
    assert dim == 0
    return shard(all_reduce(tensor))


def fused_allreduce_rms_norm(hidden: Ranks, residual: Ranks, norm: "Norm") -> tuple[Ranks, Ranks]:
    normed: tuple[Ranks, Ranks] = norm(all_reduce(hidden), residual)
    return normed


class Norm(Module):
    def forward(self, hidden_states: Ranks, residual: Ranks | None = None) -> Any:
        if residual is None:
            return hidden_states.map(rms_norm)
        residual.write(residual + hidden_states)
        hidden_states.write(residual.map(rms_norm))
        return hidden_states, residual


class Block(Module):
    """Attention or a feed-forward block: row by row, its output whole or in parts."""

    def __init__(self, index: int, function: Callable[[int, Row], Row], whole: bool) -> None:
        super().__init__()
        self.index = index
        self.function = function
        self.whole = whole

    def forward(
        self,
        *args: object,
        hidden_states: Ranks | None = None,
        already_sequence_parallel: bool = False,
        **_: object,
    ) -> Ranks:
        tensors = [arg for arg in (*args, hidden_states) if isinstance(arg, Ranks)]
        result = tensors[0].map(lambda row: self.function(self.index, row))
        return result if self.whole or already_sequence_parallel else result.parts()


class Attention(Block):
    pass


class Dense(Block):
    pass


class Experts(Block):
    pass


class Parallel:
    """A collecting model on all ranks of a tensor-parallel group.

    Args:
        source: The file of `DeepseekV2Model` or `DeepseekV32Model` and of its decoder layer.
        sequence_parallel: Whether tokens are sharded between the mixture-of-experts blocks.
    """

    def __init__(self, source: bytes, *, sequence_parallel: bool) -> None:
        nn = Stub(Module=Module, ModuleList=list, functional=Stub(pad=pad))
        stand_ins = {
            "torch": Stub(Tensor=Ranks, nn=nn, cat=cat),
            "nn": nn,
            "DeepseekV2MoE": Experts,
            "DeepseekV2MLP": Dense,
            "get_pp_group": lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True),
            "get_tensor_model_parallel_world_size": lambda: NUM_RANKS,
            "tensor_model_parallel_all_reduce": all_reduce,
            "tensor_model_parallel_all_gather": all_gather,
            "tensor_model_parallel_reduce_scatter": reduce_scatter,
            "sequence_parallel_chunk": shard,
            "sp_shard": shard,
            "sp_all_gather": all_gather,
            "sp_reduce_scatter": reduce_scatter,
            "fused_allreduce_rms_norm": fused_allreduce_rms_norm,
            "is_forward_context_available": lambda: False,
        }
        file = ModelFile(source, stand_ins)
        self.sparse = "DeepseekV32Model" in file.classes
        self.scatters_attention = b"reduce_results=not self.use_sequence_parallel_moe" in source
        self.shards_dense = b"is_sequence_parallel=self.use_sequence_parallel" in source
        self.sequence_parallel = sequence_parallel
        prefix = "DeepseekV32" if self.sparse else "DeepseekV2"
        self.layer_class: Any = file.execute_class(f"{prefix}DecoderLayer", (Module,))
        model_class = file.execute_class(f"{prefix}Model", (Module,))
        self.model: Any = model_class.__new__(model_class)
        vars(self.model).update(
            config=SimpleNamespace(),
            hidden_size=HIDDEN_SIZE,
            start_layer=0,
            end_layer=NUM_LAYERS,
            layers=[self.layer(index) for index in range(NUM_LAYERS)],
            norm=Norm(),
            use_sequence_parallel=sequence_parallel,
            replicated_embed=False,
            aux_hidden_state_layers=(),
        )

    def layer(self, index: int) -> Any:
        """A decoder layer with its real forward, around stand-ins for its blocks.

        All blocks of the sparse model leave the sum over the ranks to the norm that follows, but
        for those that get whole weights under sequence parallelism.
        """
        dense = index < NUM_DENSE_LAYERS
        sharded = self.sequence_parallel and not dense
        attention_whole = not self.sparse and not (sharded and self.scatters_attention)
        block = Dense if dense else Experts
        block_whole = not self.sparse or (self.sequence_parallel and dense and self.shards_dense)
        layer = self.layer_class.__new__(self.layer_class)
        vars(layer).update(
            layer_idx=index,
            use_mha=False,
            tp_size=NUM_RANKS,
            zero_mlp_output=False,
            use_sequence_parallel=self.sequence_parallel,
            use_sequence_parallel_moe=sharded,
            input_layernorm=Norm(),
            post_attention_layernorm=Norm(),
            self_attn=Attention(index, attention, attention_whole),
            mlp=block(index, feed_forward, block_whole),
        )
        return layer

    def wrong(self, ids: tuple[int, ...], token_ids: Sequence[int]) -> list[str]:
        """Runs a step with these ids set; what is not as it should be on every rank, in words."""
        self.model.aux_hidden_state_layers = ids
        embedded = [embedding(token_id) for token_id in token_ids]
        inputs = Ranks([[list(row) for row in embedded] for _ in PARTS])
        result = self.model.forward(None, Tokens(token_ids), None, inputs)
        hidden_states, captured = result if ids else (result, [])
        streams = [boundary.stream for boundary in reference(NUM_LAYERS, embedded)]
        found = [("the hidden states", [rms_norm(row) for row in streams[-1]], hidden_states)]
        if len(captured) != len(ids):
            return [f"{len(captured)} states for {len(ids)} ids"]
        for layer, state in zip(sorted(ids), captured, strict=True):
            found.append((f"the state of id {layer}", streams[layer], state))
        return [what for what, expected, state in found if not everywhere(state, expected)]


def everywhere(state: Ranks, expected: Matrix) -> bool:
    """Whether each rank has all rows of a matrix, up to rounding."""
    return all(
        len(matrix) == len(expected)
        and all(
            abs(value - other) < 1e-9
            for row, others in zip(matrix, expected, strict=True)
            for value, other in zip(row, others, strict=True)
        )
        for matrix in state.matrices
    )
