"""The options of ``vllm serve`` that matter here, as vLLM names them, and which were assumed."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from vllm_eagle3_patch.doctor.checkpoint import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DEFAULT_TOKENS = 3
"""Draft tokens a step in the configuration that the doctor writes; the public figures' k."""

LONGEST_COMMAND = 64 * 1024
"""Characters."""


class ServeError(CheckpointError):
    """A command line that cannot be read."""

    default_code = "serve"


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server; None where none was given.

    Attributes:
        decode_context_parallel_size: Ranks that share one sequence's KV cache.
        attention_backend: A backend set for the target.
        kv_transfer_role: ``kv_role`` of ``--kv-transfer-config``, ``unknown`` if it names none.
        newer_runner: What VLLM_USE_V2_MODEL_RUNNER says.
        mla_disabled: What VLLM_MLA_DISABLE says.
        speculates: Whether a command line was given without a speculative config: False; None
            too if it names a file of options, ``--config``, which is not read.
    """

    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    decode_context_parallel_size: int | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    attention_backend: str | None = None
    num_speculative_tokens: int | None = None
    method: str | None = None
    draft_attention_backend: str | None = None
    draft_tensor_parallel_size: int | None = None
    enable_dbo: bool = False
    enable_expert_parallel: bool = False
    trust_remote_code: bool = False
    kv_transfer_role: str | None = None
    draft_model: str | None = None
    newer_runner: bool | None = None
    mla_disabled: bool = False
    speculates: bool | None = None

    def over(self, other: ServeOptions) -> ServeOptions:
        """These options, and where nothing was given here those of ``other``."""
        unset = ServeOptions()
        given = {
            entry.name: value
            for entry in fields(self)
            if (value := getattr(self, entry.name)) != getattr(unset, entry.name)
        }
        return replace(other, **given)

    @property
    def tensor_parallel(self) -> int:
        """Ranks that share each layer; vLLM's default is 1."""
        return self.tensor_parallel_size or 1

    @property
    def pipeline_parallel(self) -> int:
        """Stages of layers; vLLM's default is 1."""
        return self.pipeline_parallel_size or 1

    @property
    def data_parallel(self) -> int:
        """Copies of the engine; vLLM's default is 1."""
        return self.data_parallel_size or 1

    @property
    def decode_context_parallel(self) -> int:
        """Ranks that share one sequence's KV cache; vLLM's default is 1."""
        return self.decode_context_parallel_size or 1


_SHORT = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "dcp": "decode-context-parallel-size",
    "ep": "enable-expert-parallel",
    "sc": "speculative-config",
    "ac": "attention-config",
}
_INTEGERS = (
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "data-parallel-size",
    "decode-context-parallel-size",
)
_TEXTS = ("dtype", "kv-cache-dtype", "attention-backend")
_FLAGS = ("enable-dbo", "enable-expert-parallel", "trust-remote-code")
_SPECULATIVE = {
    "method": ("method", str),
    "num_speculative_tokens": ("num_speculative_tokens", int),
    "model": ("draft_model", str),
    "attention_backend": ("draft_attention_backend", str),
    "draft_tensor_parallel_size": ("draft_tensor_parallel_size", int),
}
_SPECULATIVE_OPTIONS = {
    "speculative-model": "model",
    "num-speculative-tokens": "num_speculative_tokens",
    "spec-method": "method",
    "spec-model": "model",
    "spec-tokens": "num_speculative_tokens",
}
"""Options that fill one key of the speculative config (``--spec-*``: from 0.22.0 on)."""
_HUMAN = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}
_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_serve(command: str) -> ServeOptions:
    """The options of a ``vllm serve ...`` command line, with environment variables before it.

    Args:
        command: As it would be typed; quotes and continuation lines as a shell takes them.

    Raises:
        ServeError: It is not a command line, or a value is not what the option takes.
    """
    if len(command) > LONGEST_COMMAND:
        raise ServeError("--serve: the command line is too long", "give the command only")
    try:
        words = shlex.split(command.replace("\\\n", " "), comments=False)
    except ValueError as error:
        raise ServeError(
            f"--serve: not a command line: {error}", "quote it as a shell would take it"
        ) from error
    values: dict[str, Any] = dict(_environment(words))
    speculative: dict[str, Any] = {}
    options = list(_options(words))
    for name, value in options:
        _take(name, value, values, speculative)
    elsewhere = any(name == "config" for name, _ in options)
    values["speculates"] = True if speculative else None if elsewhere else False
    values.update(_speculative_values(speculative))
    return ServeOptions(**values)


def _environment(words: list[str]) -> Iterator[tuple[str, Any]]:
    """``NAME=value`` in vLLM's meaning, of the names that decide something here.

    Anywhere: before the program, after ``cd folder &&``, ``env`` or ``export``, or behind the
    ``-e`` or ``--env`` of a container.
    """
    for word in words:
        found = re.fullmatch(r"(?:-e|--env=)?(VLLM_[A-Z0-9_]+)=(.*)", word, re.DOTALL)
        if found is None:
            continue
        name, value = found[1], found[2].rstrip(";")
        on = value.strip().lower() in ("1", "true")
        if name == "VLLM_USE_V2_MODEL_RUNNER":
            yield "newer_runner", on
        elif name == "VLLM_MLA_DISABLE":
            yield "mla_disabled", on
        elif name == "VLLM_ATTENTION_BACKEND":
            yield "attention_backend", value


def _options(words: list[str]) -> Iterator[tuple[str, str | None]]:
    """Each option with its value; one without a value has None."""
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("-") or word == "-" or _is_number(word):
            continue
        name, separator, value = word.lstrip("-").partition("=")
        head, dot, rest = name.partition(".")
        head = _SHORT.get(head, head).replace("_", "-")
        name = f"{head}{dot}{rest}"
        if separator:
            yield name, value
        elif position < len(words) and (
            not words[position].startswith("-") or _is_number(words[position])
        ):
            yield name, words[position]
            position += name not in _FLAGS
        else:
            yield name, None


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-\d+(\.\d+)?", word) is not None


def _take(
    name: str, value: str | None, values: dict[str, Any], speculative: dict[str, Any]
) -> None:
    option = name.replace("-", "_")
    if name in _FLAGS:
        values[option] = True
    elif name in _INTEGERS:
        values[option] = _positive(name, value)
    elif name == "max-model-len":
        values[option] = length(value)
    elif name in _TEXTS:
        values[option] = value
    elif name == "attention-config":
        values["attention_backend"] = _object(name, value).get("backend")
    elif name == "attention-config.backend":
        values["attention_backend"] = value
    elif name == "speculative-config":
        speculative.update(_object(name, value))
    elif name.startswith("speculative-config."):
        speculative[name.partition(".")[2].replace("-", "_")] = value
    elif name in _SPECULATIVE_OPTIONS:
        speculative[_SPECULATIVE_OPTIONS[name]] = value
    elif name == "kv-transfer-config":
        values["kv_transfer_role"] = str(_object(name, value).get("kv_role", "unknown"))
    elif name.startswith("kv-transfer-config."):
        role = name.endswith(".kv_role") or name.endswith(".kv-role")
        values["kv_transfer_role"] = value if role else values.get("kv_transfer_role", "unknown")


def _speculative_values(speculative: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, (name, kind) in _SPECULATIVE.items():
        value = speculative.get(key)
        if value is None:
            continue
        if kind is int:
            yield name, _positive(f"speculative-config {key}", value)
        elif not isinstance(value, str):
            raise ServeError(
                f"--serve: {key} of the speculative config is {json.dumps(value)[:60]}",
                "it must be a string",
            )
        else:
            yield name, value


def _positive(name: str, value: Any) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ServeError(
            f"--serve: --{name} is {str(value)[:60]!r}", "it must be a whole number above 0"
        )
    return number


def length(value: str | None) -> int | None:
    """A length in tokens as vLLM takes it: ``131072``, ``128k`` (thousands), ``128K`` (of 1024).

    Raises:
        ServeError: It is no such number. ``auto`` and ``-1`` are None: vLLM then decides.
    """
    if value in ("auto", "-1"):
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", value or "")
    if found is None:
        raise ServeError(f"--max-model-len is {str(value)[:60]!r}", "it must be a number of tokens")
    number, unit = found.groups()
    factor = {**_HUMAN, **_BINARY}.get(unit, 1)
    tokens = int(float(number) * factor)
    if tokens < 1:
        raise ServeError("--max-model-len is 0", "it must be a number of tokens")
    return tokens


def _object(name: str, value: str | None) -> dict[str, Any]:
    try:
        parsed = json.loads(value or "")
    except (ValueError, RecursionError) as error:
        raise ServeError(
            f"--serve: --{name} is not JSON: {str(value)[:60]!r}",
            "it must be a JSON object in one pair of quotes",
        ) from error
    if not isinstance(parsed, dict):
        raise ServeError(f"--serve: --{name} is not a JSON object", "it must be a JSON object")
    return parsed
