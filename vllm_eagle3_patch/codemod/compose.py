"""Compose: one file with all its patches in it.

There are two ways. The full one parses each text, asks each patch before and after whether it
holds, and refuses what LibCST does not reproduce exactly. The quick one is for a file that is as a
release of the matrix published it: the codemods run on its outline, and what comes of it counts
only if it has the sha256 that the matrix pins for exactly these patches; else the full way decides.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from vllm_eagle3_patch.codemod.outline import outline
from vllm_eagle3_patch.ground.digest import sha256
from vllm_eagle3_patch.ground.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm_eagle3_patch.codemod.patch import Patch
    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.ground.matrix import FilePin
    from vllm_eagle3_patch.vllm_source.sources import Text


class Task(NamedTuple):
    """What is to become of one file.

    Attributes:
        text: Its content as it is.
        patches: What is to be in it, in the order of application.
        models: The models that the installation ships.
        protocol: Whether its vLLM has the protocol ``SupportsEagle3``.
        pin: What the matrix knows of it, if the content is the original of a release.
    """

    text: Text
    patches: tuple[Patch, ...]
    models: tuple[FamilyModel, ...]
    protocol: bool
    pin: FilePin | None


class Composed(NamedTuple):
    """What became of one file.

    Attributes:
        content: Its bytes with the patches in it.
        patches: Those that changed something.
        failures: Those that could not be applied, each with the reason.
    """

    content: bytes
    patches: tuple[str, ...]
    failures: tuple[tuple[Patch, UnsupportedError], ...] = ()


@lru_cache(maxsize=64)
def compose(task: Task) -> Composed:
    """Put the patches in; asked again for the plan after writing, and by others."""
    return pinned(task) or _one_by_one(task)


def pinned(task: Task) -> Composed | None:
    """The quick way; None if the matrix does not prove the result."""
    if task.pin is None:
        return None
    names = tuple(patch.name for patch in task.patches)
    kinds = [patch.codemod(task.text.path) for patch in task.patches]
    small = outline(task.text.content, {name for kind in kinds for name in kind.looks_into})
    if small is None:
        return None
    import libcst
    from libcst.codemod import CodemodContext

    context = CodemodContext(filename=task.text.path)
    try:
        tree = libcst.parse_module(small.content)
        for kind in kinds:
            tree = kind(context, task.models, task.protocol).transform_module_impl(tree)
        content = small.restored(tree.bytes)
    except Exception:
        return None  # A codemod looks further than it says, or an anchor is missing.
    known = {task.pin.hardened}
    if set(names) == set(task.pin.patches):
        known.add(task.pin.patched)
    if content is None or sha256(content) not in known - {task.pin.original}:
        return None
    return Composed(content, names)


def _one_by_one(task: Task) -> Composed:
    """The full way.

    Raises:
        VerificationError: A patch does not do what it should.
    """
    text = task.text
    patches, failures = [], []
    for patch in task.patches:
        try:
            changed = patch.apply_to(text, task.models, protocol=task.protocol)
        except UnsupportedError as error:
            failures.append((patch, error))
            continue
        if changed is not text:
            patches.append(patch.name)
            text = changed
    return Composed(text.content, tuple(patches), tuple(failures))
