"""The errors a user can meet: each says what is wrong, what to do, and its exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pathlib import Path


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
        self.document: dict[str, Any] = {}
        """What a command that failed adds to the JSON document: the vLLM that it is about."""


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


class UnknownStatementError(AnchorNotFoundError):
    """A function holds a statement beside which a codemod cannot be sure of its own."""

    def __init__(self, patch: str, path: str, statement: str, where: str) -> None:
        super().__init__(patch, path, statement, where, 1)
        self.message = f"{path}: {statement} in {where} is not known there (patch {patch})"
        self.args = (self.message,)


class ModifiedFileError(PatchError):
    """A file was changed by someone else."""

    exit_code = 5
    default_code = "modified"


class VerificationError(PatchError):
    """The result is not what was planned; everything was rolled back."""

    exit_code = 6
    default_code = "verification"


class BlockedError(PatchError):
    """The system, or another run, is in the way."""

    exit_code = 7
    default_code = "blocked"


class NotWritableError(BlockedError):
    """Could not write: no permission, read-only, disk full."""

    default_code = "not-writable"


class NotReadableError(BlockedError):
    """Could not read: no permission, or the disk fails."""

    default_code = "unreadable"


class BusyError(BlockedError):
    """Another run holds the lock, or took it over."""

    default_code = "busy"


class InterruptedRunError(PatchError):
    """A journal of an unfinished run was found."""

    exit_code = 8
    default_code = "interrupted"


class StateCorruptError(PatchError):
    """What our state folder holds is damaged, incomplete or forged."""

    exit_code = 5
    default_code = "state-corrupt"


class UnsafeStateError(StateCorruptError):
    """Our state folder is a link, or belongs to someone whose word does not count here."""

    default_code = "state-unsafe"
