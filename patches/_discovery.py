"""Which patches there are, and which of them an installation gets.

Every module here is a patch, or makes one for each of a kind, unless its name begins with ``_``.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_eagle3_patch.codemod.patch import REGISTERED, Patch

if TYPE_CHECKING:
    from collections.abc import Collection


def module_names() -> tuple[str, ...]:
    """The modules that define patches; none is imported for that."""
    found = pkgutil.iter_modules([str(Path(__file__).parent)])
    return tuple(module.name for module in found if not module.name.startswith("_"))


@cache
def all_patches() -> tuple[Patch, ...]:
    """Every patch of ``patches/``, by name; importing them needs LibCST."""
    for name in module_names():
        importlib.import_module(f"{__package__}.{name}")
    return tuple(sorted((kind() for kind in REGISTERED), key=lambda patch: patch.name))


ANCHOR_OF_COMPANIONS = "deepseek-v2"


def chosen_patches(
    lacking: Collection[str],
    *,
    harden: bool = False,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    in_place: Collection[str] = (),
) -> tuple[Patch, ...]:
    """The patches that an installation gets, in the order in which they are applied.

    Args:
        lacking: What the models in question lack to be ready.
        harden: Whether patches that change models that already start are wanted too.
        only: The names chosen by the user; others are left out.
        skip: The names that the user does not want.
        in_place: What we put there earlier: it stays, whatever is chosen now.
    """

    def wanted(patch: Patch) -> bool:
        if patch.name in skip or (only and patch.name not in only):
            return False
        if patch.harden:
            return harden or patch.name in only
        if patch.companion:
            beside = ANCHOR_OF_COMPANIONS in lacking or ANCHOR_OF_COMPANIONS in in_place
            return beside or harden or patch.name in only
        return patch.name in lacking

    return tuple(p for p in all_patches() if p.name in in_place or wanted(p))
