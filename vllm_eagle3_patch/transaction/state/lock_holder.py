"""Who holds a lock, and whether he is alive.

A holder is dead if the kernel's lock (``flock``) on his record is free and

* he ran under this very kernel, and his process is gone;
* or his host has our name but was started again since;
* or he is elsewhere and the lock is older than an hour, by the file system's own clock.

Limits: two hosts of one name that share a file system without sharing its kernel locks are taken
for one host that was started again.
"""

import errno
import fcntl
import os
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass

from vllm_eagle3_patch.ground.errors import StateCorruptError
from vllm_eagle3_patch.ground.folder import Folder, naming
from vllm_eagle3_patch.ground.processes import PROC, is_running, started_at
from vllm_eagle3_patch.transaction.state.documents import SCHEMA, decode, encode

LONGEST_RUN_NS = 3600 * 10**9
_LARGEST_RECORD = 2**16


@dataclass(frozen=True)
class Holder:
    """A process that has the lock, or had it.

    Attributes:
        boot: What the kernel calls the time since the host was started.
        namespace: The PID namespace in which its number counts.
        started: When it was started, as ``processes.started_at`` says.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: str | None

    def encoded(self) -> bytes:
        """The record."""
        return encode({"schema": SCHEMA, **asdict(self)})

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host!a}" if self.pid else "an unknown process"


UNKNOWN = Holder("", "", "", 0, None)


def this_process() -> Holder:
    """The running process."""
    boot = namespace = ""
    with suppress(OSError):  # Only Linux has these; the rest tells enough then.
        boot = (PROC / "sys/kernel/random/boot_id").read_text("ascii").strip()
        namespace = str((PROC / "self/ns/pid").readlink())
    return Holder(os.uname().nodename, boot, namespace, os.getpid(), started_at(os.getpid()))


def living_holder(lock: Folder, now: int) -> Holder | None:
    """Who holds a lock, None if nobody alive does, by the time ``now`` of its file system in ns."""
    holders = (living(lock, token, now) for token in lock.names())
    return next(filter(None, holders), None)


def living(lock: Folder, token: str, now: int) -> Holder | None:
    """Whose record this is, None if he is dead."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with naming(lock.path / token):
            record = os.open(token, flags, dir_fd=lock.descriptor)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(record)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", os.fspath(lock.path / token))
        kernel = _kernel_lock(record)
        age = now - status.st_mtime_ns
        holder = _holder(os.read(record, _LARGEST_RECORD))
    finally:
        os.close(record)
    return holder if _is_alive(holder, kernel, age) else None


def _is_alive(holder: Holder, kernel: str | None, age: int) -> bool:
    if kernel == "taken":
        return True
    us = this_process()
    recent = age <= LONGEST_RUN_NS
    if holder is UNKNOWN:  # Nobody's lock is incomplete: this was never one.
        return kernel is None and recent
    if holder.boot == us.boot and (us.boot or holder.host == us.host):
        if holder.namespace != us.namespace:
            return kernel is None and recent
        given_up = kernel == "free" and holder.pid == us.pid
        return not given_up and is_running(holder.pid, holder.started)
    return holder.host != us.host and recent


def _kernel_lock(record: int) -> str | None:
    """Return ``taken`` or ``free``, None where the file system has no such locks."""
    try:
        fcntl.flock(record, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(record, fcntl.LOCK_UN)
    except BlockingIOError:
        return "taken"
    except OSError:
        return None
    return "free"


def _holder(data: bytes) -> Holder:
    try:
        fields = decode(data, "", "")
        return Holder(
            fields.text("host"),
            fields.text("boot"),
            fields.text("namespace"),
            fields.number("pid", 2**31 - 1),
            fields.optional_text("started"),
        )
    except StateCorruptError:
        return UNKNOWN
