"""Completion in a shell: its script, and the values that options take.

A shell asks at every press of Tab, so nothing here may import LibCST.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from click.shell_completion import CompletionItem, get_completion_class

if TYPE_CHECKING:
    from collections.abc import Iterable

    import click

PROGRAM = "vllm-eagle3-patch"
_ASKED_BY = "_VLLM_EAGLE3_PATCH_COMPLETE"  # what click derives from the program's name


def print_script(program: click.Command, shell: str) -> None:
    """Write what a shell has to read to complete this program's command lines."""
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(program, {}, PROGRAM, _ASKED_BY).source()
    sys.stdout.write(script if script.endswith("\n") else f"{script}\n")


def patch_names() -> tuple[str, ...]:
    """The name of every patch, as the modules of ``patches/`` and the family say, unimported."""
    from vllm_eagle3_patch.ground.family import FAMILY
    from vllm_eagle3_patch.patches._discovery import module_names

    modules = {*module_names()} - {"wrappers"}
    wrappers = {model.wrapper.patch for model in FAMILY if model.wrapper is not None}
    return tuple(sorted({name.replace("_", "-") for name in modules} | wrappers))


def patches_beginning(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Patches for ``--only`` and ``--skip``, without those that the command line has."""
    given = [*context.params.get("only", ()), *context.params.get("skip", ())]
    return _beginning(incomplete, (name for name in patch_names() if name not in given))


def models_beginning(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Model types and architectures for ``--model``, without those that the command line has."""
    from vllm_eagle3_patch.ground.family import FAMILY

    types = (name for model in FAMILY for name in model.model_types)
    architectures = (model.architecture for model in FAMILY)
    given = context.params.get("model") or ()
    names = dict.fromkeys((*types, *architectures))
    return _beginning(incomplete, (name for name in names if name not in given))


def releases_beginning(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Releases of the matrix for ``--release``."""
    from vllm_eagle3_patch.ground import matrix

    return _beginning(incomplete, matrix.names())


def files(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Let the shell complete files, where a name may be something else too."""
    return [CompletionItem(incomplete, type="file")]


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
