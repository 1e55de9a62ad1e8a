"""What ``verify`` showed in an installation, kept by the contents that it ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_eagle3_patch.ground.errors import NotReadableError
from vllm_eagle3_patch.ground.os_errors import explained
from vllm_eagle3_patch.ground.text import one_line
from vllm_eagle3_patch.transaction.state.documents import SCHEMA, decode, encode
from vllm_eagle3_patch.transaction.state.layout import VERIFIED, document_in, opened

if TYPE_CHECKING:
    from vllm_eagle3_patch.ground.folder import Folder


@dataclass(frozen=True)
class Verified:
    """What running a model's code showed.

    Attributes:
        architecture: Its name in vLLM's registry.
        verdict: ``proven``, ``refuted`` or ``unproven``.
        files: The SHA-256, in hex, of each file that this holds for, by its path from the root; at
            least those that ``rests_on`` in ``assess/grounds.py`` names.
        difference: The first thing that was wrong, on one line, where it is refuted.
    """

    architecture: str
    verdict: str
    files: Mapping[str, str]
    difference: str | None = None


def verified_bytes(tool: str, results: Iterable[Verified]) -> bytes:
    """What the file of these results holds."""
    return encode(
        {
            "schema": SCHEMA,
            "tool": tool,
            "results": [{**vars(result), "files": dict(result.files)} for result in results],
        }
    )


def read_verified(root: Path, tool: str) -> tuple[Verified, ...]:
    """What this version of the tool showed in an installation.

    Raises:
        StateCorruptError: It cannot be trusted.
        NotReadableError: It may not be read.
    """
    with explained(NotReadableError), opened(root) as state:
        return () if state is None else verified_in(state, tool)


def verified_in(state: Folder, tool: str) -> tuple[Verified, ...]:
    """What an open state folder says; raises as ``read_verified`` does."""
    data = document_in(state, VERIFIED)
    if data is None:
        return ()
    fields = decode(data, one_line(state.path / VERIFIED), "run verify: it writes that file anew")
    if fields.text("tool") != tool:
        return ()
    return tuple(
        Verified(
            item.text("architecture"),
            item.one_of("verdict", "proven", "refuted"),
            item.digests("files"),
            item.optional_text("difference"),
        )
        for item in fields.each("results")
    )
