"""What the system refuses, said so that a user knows what to do."""

import errno
import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_eagle3_patch.ground.errors import BlockedError, NotReadableError, NotWritableError
from vllm_eagle3_patch.ground.text import one_line

_HINTS = {
    "read-only": "remount the file system for writing, or patch where it is built (an image)",
    "disk-full": "free some space (see df and quota), then run it again",
    "open-files": "raise the limit of open files (ulimit -n), then run it again",
    "io-error": "look into the system's log: the disk or its server may be failing",
    "linked-folder": "act on the folder that the link leads to, with --site-packages",
}
_CODES = {
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EROFS: "read-only",
    errno.ENOSPC: "disk-full",
    errno.EDQUOT: "disk-full",
    errno.EMFILE: "open-files",
    errno.ENFILE: "open-files",
    errno.EIO: "io-error",
    errno.ELOOP: "linked-folder",
    errno.ENOTDIR: "linked-folder",
}


@contextmanager
def explained(kind: type[BlockedError] = NotWritableError) -> Iterator[None]:
    """Turn an ``OSError`` into an error that says what to do.

    Args:
        kind: ``NotReadableError`` where nothing is written.
    """
    try:
        yield
    except OSError as error:
        raise refused(error, kind) from error


def refused(error: OSError, kind: type[BlockedError] = NotWritableError) -> BlockedError:
    """What the system refused, and what to do about it."""
    code = _CODES.get(error.errno or 0, kind.default_code)
    name = error.filename
    path = Path(os.fsdecode(name)) if isinstance(name, (str, bytes)) else Path()
    reason = error.strerror or str(error) or type(error).__name__
    if code == "permission":
        hint = _who_may(path, "readable" if kind is NotReadableError else "writable")
    else:
        hint = _HINTS.get(code, "mend what the system reports, then run it again")
    return kind(f"{one_line(path)}: {reason}", hint, code)


def _who_may(path: Path, what: str) -> str:
    user = user_name(os.geteuid())
    for folder in path.parents:
        try:
            owner = user_name(folder.stat().st_uid)
        except OSError:
            continue  # Not there, or not to be looked into: the next one up tells.
        if owner == user:
            return f"{one_line(folder)} is yours ({user}): make it {what} (chmod, chattr)"
        return f"{one_line(folder)} belongs to {owner} and you are {user}: run it as {owner}"
    return f"you are {user}: run it as the user who installed vLLM"


def user_name(number: int) -> str:
    """A user's name, or the number where there is no name for it."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
