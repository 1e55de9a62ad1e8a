"""Packages ``vllm`` of a handful of files, enough for one question each."""

from collections.abc import Mapping
from pathlib import Path

from vllm_eagle3_patch.vllm_source.sources import Sources


def write_package(folder: Path, files: Mapping[str, str | bytes]) -> Sources:
    """Write the files, named relative to the package folder, and open the installation."""
    for name, content in files.items():
        file = folder / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return Sources(folder)
