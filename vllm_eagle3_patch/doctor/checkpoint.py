"""A checkpoint as far as the doctor reads it: its config, and the headers of its weights.

A folder, a ``config.json``, or a model id in the local Hugging Face cache. Weights are never
loaded: of a safetensors file the first bytes are read, which name each tensor and its shape.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_eagle3_patch.ground.errors import PatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CONFIG = "config.json"
LARGEST_CONFIG = 16 * 1024 * 1024
LARGEST_HEADER = 128 * 1024 * 1024
"""Bytes. Configs have a few thousand; the safetensors library refuses headers above 100 MB."""
LENGTH = 8
"""Bytes of a safetensors file that say how long its header is, little-endian."""
MOST_SHARDS = 4096

_CACHE = "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")


class CheckpointError(PatchError):
    """A checkpoint that is not there, or cannot be read as one."""

    exit_code: ClassVar[int] = 2
    default_code: ClassVar[str] = "checkpoint"


@dataclass(frozen=True)
class Weights:
    """What the headers of a checkpoint's safetensors files say.

    Attributes:
        dtypes: By tensor name, its type as safetensors calls it, such as ``BF16``.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    files: tuple[str, ...]

    def shape(self, *endings: str) -> tuple[int, ...] | None:
        """The shape of the tensor whose name is, or ends in a dot and, one of these."""
        name = self.name(*endings)
        return None if name is None else self.shapes[name]

    def name(self, *endings: str) -> str | None:
        """The first such tensor's name."""
        for ending in endings:
            for name in self.shapes:
                if name == ending or name.endswith(f".{ending}"):
                    return name
        return None

    def rows(self, *endings: str) -> int | None:
        """The first dimension of such a tensor; None without one."""
        shape = self.shape(*endings)
        return shape[0] if shape else None

    def having(self, part: str) -> tuple[str, ...]:
        """The tensors with a part in their name."""
        return tuple(sorted(name for name in self.shapes if part in name))


@dataclass(frozen=True)
class Checkpoint:
    """A target or a draft model.

    Attributes:
        role: ``target model`` or ``draft model``.
        given: As the user named it.
        folder: Its folder, None if only a config file was named.
        weights: What the weights' headers say, None if there are none to see.
    """

    role: str
    given: str
    path: Path
    folder: Path | None
    config: Mapping[str, Any]
    weights: Weights | None = None
    speculators: Mapping[str, Any] | None = field(default=None)

    @cached_property
    def text(self) -> Mapping[str, Any]:
        """The config of the language model: nested for a multimodal model, else the config."""
        for name in _TEXT_CONFIGS:
            nested = self.config.get(name)
            if isinstance(nested, dict) and nested:
                return nested
        return self.config

    @property
    def multimodal(self) -> bool:
        """Whether the config nests a language model's and describes another modality."""
        return self.text is not self.config and any(
            "vision" in key or "audio" in key or "media" in key or "image" in key
            for key in self.config
        )

    @property
    def architecture(self) -> str | None:
        """The first of ``architectures``."""
        names = self.config.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else None

    @property
    def model_type(self) -> str | None:
        """``model_type`` of the config itself."""
        value = self.config.get("model_type")
        return value if isinstance(value, str) else None

    @property
    def text_type(self) -> str | None:
        """``model_type`` of the language model's config, or of the config."""
        value = self.text.get("model_type", self.config.get("model_type"))
        return value if isinstance(value, str) else None

    def integer(self, key: str) -> int | None:
        """A key's value as an integer, of the language model's config first; else None."""
        for config in (self.text, self.config):
            value = config.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None

    def value(self, key: str) -> Any:
        """A key's value, of the language model's config first, then of the config."""
        return self.text.get(key, self.config.get(key))

    @property
    def eagle_config(self) -> Mapping[str, Any]:
        """What stands under ``eagle_config``; empty without it."""
        nested = self.config.get("eagle_config")
        return nested if isinstance(nested, dict) else {}

    @property
    def dtype(self) -> str | None:
        """``dtype`` or ``torch_dtype``, without ``torch.``."""
        for config in (self.config, self.text):
            for key in ("dtype", "torch_dtype"):
                value = config.get(key)
                if isinstance(value, str):
                    return value.removeprefix("torch.")
        return None

    @property
    def quantization(self) -> Mapping[str, Any]:
        """``quantization_config``; Kimi-K2.5 has it in its language model's config."""
        value = self.config.get("quantization_config") or self.text.get("quantization_config")
        return value if isinstance(value, dict) else {}

    @property
    def mla(self) -> bool:
        """Whether its attention is MLA."""
        rank = self.value("kv_lora_rank")
        return isinstance(rank, int) and rank > 0

    @property
    def experts(self) -> bool:
        """Whether it is a mixture of experts."""
        names = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
        return any((self.integer(name) or 0) > 0 for name in names)


def read_target(given: str) -> Checkpoint:
    """The target model. Raises :class:`CheckpointError`."""
    checkpoint = _read(given, "target model", with_weights=False)
    _check_types(checkpoint)
    return checkpoint


def read_draft(given: str) -> Checkpoint:
    """The draft model, with its weights' headers; a speculators config as vLLM would read it.

    Raises:
        CheckpointError: It is not there, or cannot be read.
    """
    checkpoint = _read(given, "draft model", with_weights=True)
    _check_types(checkpoint)
    return checkpoint


def _read(given: str, role: str, *, with_weights: bool) -> Checkpoint:
    path = _find(given, role)
    config = _read_config(path, role)
    folder = path.parent if Path(given).is_dir() or not Path(given).exists() else None
    weights = _read_weights(folder, role) if with_weights and folder is not None else None
    return Checkpoint(role, given, path, folder, config, weights)


def _find(given: str, role: str) -> Path:
    if "\0" in given or not given.strip():
        raise _missing(given, role, "it names nothing")
    path = Path(given).expanduser()
    try:
        status = path.stat()
    except (OSError, ValueError):
        return _in_cache(given, role)
    if stat.S_ISDIR(status.st_mode):
        config = path / CONFIG
        if not config.is_file():
            raise _missing(given, role, f"the folder has no {CONFIG}")
        return config
    if not stat.S_ISREG(status.st_mode):
        raise _missing(given, role, "it is neither a folder nor a file")
    return path


def _missing(given: str, role: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"no {role} at {given[:200]}: {why}",
        f"name a folder with {CONFIG}, a {CONFIG}, or a model id in the local Hugging Face cache",
        code="checkpoint-missing",
    )


def _in_cache(given: str, role: str) -> Path:
    """The config of a model id in the Hugging Face cache, as huggingface_hub lays it out."""
    parts = given.split("/")
    plain = all(part and part.strip(".") and len(part) <= 96 for part in parts)  # noqa: PLR2004
    if len(parts) > 2 or not plain or Path(given).is_absolute():  # noqa: PLR2004
        raise _missing(given, role, "there is no such path")
    repository = hugging_face_cache() / f"models--{'--'.join(parts)}"
    try:
        revision = (repository / "refs" / "main").read_text(encoding="utf-8")[:128].strip()
    except (OSError, UnicodeDecodeError):
        revision = ""
    snapshots = repository / "snapshots"
    if revision and "/" not in revision and (snapshots / revision / CONFIG).is_file():
        return snapshots / revision / CONFIG
    why = "there is no such path, and the local Hugging Face cache has no such model"
    if repository.is_dir():
        why = f"the local Hugging Face cache has it without {CONFIG} of its main revision"
    raise _missing(given, role, why)


def hugging_face_cache() -> Path:
    """Where huggingface_hub keeps models: HF_HUB_CACHE, else below HF_HOME."""
    for name in _CACHE:
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def _read_config(path: Path, role: str) -> dict[str, Any]:
    content = _read_bytes(path, LARGEST_CONFIG, role)
    try:
        config = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _unreadable(path, role, "it is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, role, "it is not JSON") from error
    if not isinstance(config, dict):
        raise _unreadable(path, role, "it is not a JSON object")
    return config


def _read_bytes(path: Path, largest: int, role: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _unreadable(path, role, "it is no regular file")
            content = opened.read(largest + 1)
    except OSError as error:
        raise _unreadable(path, role, error.strerror or str(error)) from error
    if len(content) > largest:
        raise _unreadable(path, role, f"it is larger than {largest} bytes")
    return content


def _unreadable(path: Path, role: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"the {role}'s {path} cannot be read: {why}",
        "check that it was copied or downloaded whole",
        code="checkpoint-unreadable",
    )


def _read_weights(folder: Path, role: str) -> Weights | None:
    """The headers of every safetensors file of a folder, by its index if it has one."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    files = tuple(_weight_files(folder, role))
    for name in files:
        for tensor, (dtype, shape) in _header(folder / name, role):
            shapes[tensor] = shape
            dtypes[tensor] = dtype
    return Weights(shapes, dtypes, files) if files else None


def _weight_files(folder: Path, role: str) -> Iterator[str]:
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if not indexes:
        found = sorted(path.name for path in folder.glob("*.safetensors"))
        yield from found[:MOST_SHARDS]
        return
    index = _read_config(indexes[0], role)
    mapping = index.get("weight_map")
    if not isinstance(mapping, dict):
        raise _unreadable(indexes[0], role, "it has no weight_map")
    names = dict.fromkeys(mapping.values())
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise _unreadable(indexes[0], role, f"it names no file of its folder: {name!r}")
        if not (folder / name).is_file():
            raise _unreadable(folder / name, role, "the index names it, but it is not there")
        yield name


def _header(path: Path, role: str) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _unreadable(path, role, "it is no regular file")
            size = os.fstat(descriptor).st_size
            length = int.from_bytes(opened.read(LENGTH), "little")
            if size < LENGTH or length > min(size - LENGTH, LARGEST_HEADER):
                why = f"its header claims {length} bytes of a file of {size}"
                raise _unreadable(path, role, why)
            content = opened.read(length)
    except OSError as error:
        raise _unreadable(path, role, error.strerror or str(error)) from error
    try:
        header = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, role, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _unreadable(path, role, "its header is not a JSON object")
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise _unreadable(path, role, f"its header gives {name[:100]!r} no shape")
        yield name, (str(entry.get("dtype")), tuple(shape))


_TYPES: dict[str, tuple[type, ...]] = {
    "architectures": (list,),
    "model_type": (str,),
    "hidden_size": (int,),
    "target_hidden_size": (int,),
    "num_hidden_layers": (int,),
    "num_attention_heads": (int,),
    "num_key_value_heads": (int,),
    "vocab_size": (int,),
    "draft_vocab_size": (int,),
    "max_position_embeddings": (int,),
    "kv_lora_rank": (int,),
    "num_aux_hidden_states": (int,),
    "eagle_config": (dict,),
    "text_config": (dict,),
    "auto_map": (dict,),
    "rope_scaling": (dict,),
    "rope_parameters": (dict,),
    "quantization_config": (dict,),
    "tie_word_embeddings": (bool,),
    "speculators_config": (dict,),
    "transformer_layer_config": (dict,),
}
_IN_WORDS = {int: "an integer", str: "a string", list: "a list", dict: "an object", bool: "a bool"}
_COUNTS = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")


def _check_types(checkpoint: Checkpoint) -> None:
    """Refuse keys of a type that neither Transformers nor vLLM could use; null counts as absent."""
    for config in (checkpoint.config, checkpoint.text):
        for key, kinds in _TYPES.items():
            value = config.get(key)
            if value is None:
                continue
            wrong = not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)
            if wrong:
                expected = _IN_WORDS[kinds[0]]
                why = f"its key {key} is {json.dumps(value)[:60]}, not {expected}"
                raise _unreadable(checkpoint.path, checkpoint.role, why)
            if key in _COUNTS and value < 0:
                why = f"its key {key} is {value}"
                raise _unreadable(checkpoint.path, checkpoint.role, why)
        names = config.get("architectures")
        if names is not None and not all(isinstance(name, str) for name in names):
            why = "its key architectures is not a list of strings"
            raise _unreadable(checkpoint.path, checkpoint.role, why)
