"""Hosts on loopback: each an sshd of its own, with its own home, temporary folder and processes.

Debian's sshd is unpacked into the user's cache where the machine has none; nothing is installed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from tools.fetch_release import default_cache

PACKAGES = ("openssh-server", "libwrap0")
"""Debian's sshd, and the one library of it that a machine with the ssh client lacks."""

STARTS = 15.0
"""Seconds that an sshd may take to answer."""

TIMEOUT = 120.0
"""Seconds that one command may take."""

CONFIG = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {key}.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin yes
Subsystem sftp internal-sftp
SetEnv PATH={path} TMPDIR={folder}/tmp
"""

START = """
set -e
mount --bind {folder}/passwd /etc/passwd
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -m 755 /run/sshd
{mounts}
exec {sshd} -D -e -f {folder}/config
"""


class NeededError(Exception):
    """The machine lacks what the tests need: they fail, for nothing was proven."""


def key_pair(path: Path) -> Path:
    """Make a key without a passphrase; returns its private half."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(command, check=True)
    return path


def find_sshd() -> tuple[Path, dict[str, str]]:
    """The machine's sshd, or Debian's unpacked; and the environment that it needs.

    Raises:
        NeededError: There is none and none can be had.
    """
    installed = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin")
    if installed:
        return Path(installed), {}
    folder = default_cache().parent / "sshd"
    if not (folder / "usr/sbin/sshd").exists():
        _unpack(folder)
    libraries = [str(path.parent) for path in folder.rglob("lib*.so.*")]
    return folder / "usr/sbin/sshd", {"LD_LIBRARY_PATH": os.pathsep.join(dict.fromkeys(libraries))}


def _unpack(folder: Path) -> None:
    unfinished = folder.with_name(f".sshd-{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        download = ["apt-get", "download", "--quiet", *PACKAGES]
        for command in (download, ["apt-get", "update", "--quiet"], download):
            ended = subprocess.run(
                command, cwd=unfinished, capture_output=True, text=True, check=False
            )
            if command == download and ended.returncode == 0:
                break
        else:
            raise NeededError(f"no sshd here, and none to be had: {ended.stderr}")
        for package in unfinished.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(unfinished)], check=True)
            package.unlink()
        unfinished.rename(folder)
    except OSError as error:
        raise NeededError(f"no sshd here, and it cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Host:
    """An sshd that is a machine of its own as far as these tests look at it.

    Args:
        folder: Where all of it is.
        key: The private key that opens it.
        path: Folders that come first on the PATH of its commands.
        read_only: What nobody on this host can write to.
    """

    def __init__(
        self, folder: Path, key: Path, *, path: tuple[Path, ...] = (), read_only: Path | None = None
    ) -> None:
        self.folder, self.key = folder, key
        self.home, self.temporary = folder / "home", folder / "tmp"
        self.port = free_port()
        self._path = [*map(str, path), "/usr/local/bin", "/usr/bin", "/bin"]
        self._read_only = read_only
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Host:
        """Start it, and wait until it answers."""
        for folder in (self.home, self.temporary):
            folder.mkdir(parents=True)
        key_pair(self.folder / "host_key")
        users = [f"root:x:0:0:root:{self.home}:/bin/bash", "nobody:x:65534:65534::/:/bin/false"]
        users.append("sshd:x:74:65534::/run/sshd:/bin/false")
        (self.folder / "passwd").write_text("".join(f"{user}\n" for user in users))
        config = CONFIG.format(
            port=self.port, folder=self.folder, key=self.key, path=os.pathsep.join(self._path)
        )
        (self.folder / "config").write_text(config)
        sshd, environ = find_sshd()
        kept = shlex.quote(str(self._read_only))
        mounts = f"mount --bind {kept} {kept}; mount -o remount,bind,ro {kept}"
        script = START.format(
            folder=self.folder, sshd=sshd, mounts=mounts if self._read_only else ""
        )
        # With the process number space every session of this host ends, whatever it started.
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("unshare", "--mount", "--propagation=private", "--pid", "--fork"),
                    *("--kill-child=KILL", "sh", "-c", script),
                ],
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **environ},
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        deadline = time.monotonic() + STARTS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise NeededError(f"sshd does not start: {(self.folder / 'log').read_text()}")
            time.sleep(0.05)
        return self

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        """End it and everything that was started on it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def options(self) -> list[str]:
        """What ssh is told, so that it looks at no file of the user."""
        return [
            *("-F", "none", "-i", str(self.key), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes"),
            *("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"),
            *("-o", "LogLevel=ERROR"),
        ]

    def ssh(self, command: str, *, stdin: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a shell command there, without a terminal."""
        with (stdin or Path(os.devnull)).open("rb") as given:
            return subprocess.run(
                ["ssh", *self.options, "-p", str(self.port), "root@127.0.0.1", command],
                stdin=given,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                check=False,
            )


def need_root() -> None:
    """Fail where mounts and processes of a host's own cannot be had."""
    if os.geteuid() != 0:
        raise NeededError("these tests make mount and process namespaces: run them as root")
    if sys.platform != "linux":
        raise NeededError("these tests need Linux")
