"""The errors a user can meet: each says what is wrong, what to do, and its exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_eagle3_patch.installation.find import Installation
    from vllm_eagle3_patch.verify.verification import Verification


class PatchError(Exception):
    """Something this tool refuses or cannot do.

    Args:
        message: What is wrong, one line.
        hint: What to do about it, one line.
        code: The stable problem code of the JSON output; a class has a default.
    """

    exit_code: ClassVar[int] = 1
    default_code: ClassVar[str] = "error"

    def __init__(self, message: str, hint: str, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code or self.default_code
        self.installation: Installation | None = None
        """The vLLM that it is about, once one was found."""
        self.verification: Verification | None = None
        """What running it showed, if that is what failed."""


class WrongUsageError(PatchError):
    """The options do not go together."""

    exit_code = 2
    default_code = "usage"


class VllmNotFoundError(PatchError):
    """No vLLM here, or the interpreter that was named does not work."""

    exit_code = 3
    default_code = "not-found"


class BrokenVllmError(VllmNotFoundError):
    """A vLLM that cannot be judged, as what its installer wrote of it cannot be read.

    Args:
        root: The folder that holds the package folder, where our state folder would be.
    """

    def __init__(self, message: str, hint: str, root: Path) -> None:
        super().__init__(message, hint)
        self.root = root


class VllmRemovedError(BrokenVllmError):
    """No vLLM here any more, but what this tool kept of one that it had patched."""

    default_code = "stale-state"


class UnsupportedError(PatchError):
    """This release or this source cannot be patched."""

    exit_code = 4
    default_code = "unsupported"


class AnchorNotFoundError(UnsupportedError):
    """A codemod did not find the place that it changes, or found it more than once.

    Args:
        patch: The patch's name.
        path: The file, relative to the directory that holds the package.
        anchor: What was looked for, in words.
        where: The class or function it was looked for in.
        found: How often it was found; exactly once is expected.
    """

    default_code = "anchor-missing"

    def __init__(self, patch: str, path: str, anchor: str, where: str, found: int) -> None:
        super().__init__(
            f"{path}: {anchor} in {where}: expected once, found {found} times (patch {patch})",
            "this source is not one the patch knows; compare it with the release it was built from",
        )
        self.patch = patch
        self.path = path
        self.anchor = anchor
        self.where = where
        self.found = found


class ModifiedFileError(PatchError):
    """A file was changed by someone else."""

    exit_code = 5
    default_code = "modified"


class VerificationError(PatchError):
    """The result is not what was planned; everything was rolled back."""

    exit_code = 6
    default_code = "verification"


class NotWritableError(PatchError):
    """Could not write: no permission, read-only, disk full, or another run holds the lock."""

    exit_code = 7
    default_code = "not-writable"


class InterruptedRunError(PatchError):
    """A journal of an unfinished run was found."""

    exit_code = 8
    default_code = "interrupted"
