"""What of a folder would still be there if the power failed, as the change points announce it.

The model promises as little as POSIX does: a file's bytes, mode and times are on disk once that
file was synced after they were written, the names in a folder once that folder was synced. A
rename that crosses folders is two changes. That a file which has been renamed does not lose both
its names is taken for granted in mixtures only, as every journalling file system has it.
"""

import copy
import os
import random
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vllm_eagle3_patch.ground.filesystem import Moment

Content = tuple[int, int, bytes]
"""Mode, time of change and bytes of a file, or where a link leads."""

NEVER_SYNCED: Content = (0o100600, 0, b"")


@dataclass(eq=False)
class Inode:
    """A file, link or folder: what it is now, and what it would be after a loss of power."""

    kind: int
    mode: int
    content: Content = NEVER_SYNCED
    durable_content: Content = NEVER_SYNCED
    names: "dict[str, Inode]" = field(default_factory=dict)
    durable_names: "dict[str, Inode]" = field(default_factory=dict)

    def sync(self) -> None:
        """Take what it is now for durable."""
        self.durable_content = self.content
        self.durable_names = dict(self.names)


@dataclass
class Survivors:
    """Says what of each inode survives."""

    names_of: Callable[[Inode], dict[str, Inode]]
    content_of: Callable[[Inode], Content]


class Disk:
    """Everything below a folder; all of it is durable at first.

    Args:
        folder: The folder, which itself is durable.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[int, Inode] = {}
        self.top = self._look()
        for inode in self.known.values():
            inode.sync()

    def step(self, moment: Moment, operation: str, path: Path) -> None:
        """Follow one point, as ``filesystem.step`` announces it."""
        if moment == "after":
            self.top = self._look()
            if operation == "fsync":
                self.inode(path).sync()

    def inode(self, path: Path) -> Inode:
        """What is at a path now."""
        inode = self.top
        for name in path.relative_to(self.folder).parts:
            inode = inode.names[name]
        return inode

    def moment(self) -> "Disk":
        """A copy of this, as it is at the moment."""
        return copy.deepcopy(self)

    def _look(self) -> Inode:
        seen: dict[int, Inode] = {}
        top = self._look_at(self.folder, seen)
        # The number of an inode that is gone is given to another one.
        self.known = seen
        return top

    def _look_at(self, path: Path, seen: dict[int, Inode]) -> Inode:
        status = path.lstat()
        inode = seen.get(status.st_ino)
        if inode is not None:
            return inode
        kind = stat.S_IFMT(status.st_mode)
        inode = self.known.get(status.st_ino)
        if inode is None or inode.kind != kind:
            inode = Inode(kind, status.st_mode)
        seen[status.st_ino] = inode
        inode.mode = status.st_mode
        if kind == stat.S_IFDIR:
            names = sorted(os.listdir(path))  # noqa: PTH208  the names, not paths
            inode.names = {name: self._look_at(path / name, seen) for name in names}
        elif kind == stat.S_IFLNK:
            text = os.fsencode(path.readlink())
            inode.content = inode.durable_content = (status.st_mode, status.st_mtime_ns, text)
        else:
            content = (status.st_mode, status.st_mtime_ns)
            if inode.content[:2] != content or len(inode.content[2]) != status.st_size:
                inode.content = (*content, path.read_bytes())
        return inode

    def restore(self, survivors: Survivors) -> None:
        """Put what survives in the place of the folder."""
        shutil.rmtree(self.folder)
        self._restore(self.top, self.folder, survivors, {})

    def _restore(
        self, inode: Inode, path: Path, survivors: Survivors, made: dict[int, Path]
    ) -> None:
        if inode.kind == stat.S_IFDIR:
            path.mkdir()
            path.chmod(stat.S_IMODE(inode.mode))
            for name, inner in survivors.names_of(inode).items():
                self._restore(inner, path / name, survivors, made)
            return
        if id(inode) in made:
            path.hardlink_to(made[id(inode)])
            return
        made[id(inode)] = path
        mode, changed, data = survivors.content_of(inode)
        if inode.kind == stat.S_IFLNK:
            path.symlink_to(os.fsdecode(data))
        else:
            path.write_bytes(data)
            path.chmod(stat.S_IMODE(mode))
        os.utime(path, ns=(changed, changed), follow_symlinks=False)

    def inodes(self) -> Iterator[Inode]:
        """Every inode that is there now or would be after a loss of power."""
        seen, waiting = {id(self.top)}, [self.top]
        while waiting:
            inode = waiting.pop()
            yield inode
            for inner in (*inode.names.values(), *inode.durable_names.values()):
                if id(inner) not in seen:
                    seen.add(id(inner))
                    waiting.append(inner)

    def nothing_unsynced(self) -> Survivors:
        """Only what was synced survives."""
        return Survivors(lambda inode: inode.durable_names, lambda inode: inode.durable_content)

    def names_without_data(self) -> Survivors:
        """Every name survives, but of the files only what was synced."""
        return Survivors(lambda inode: inode.names, lambda inode: inode.durable_content)

    def mixture(self, chance: random.Random) -> Survivors:
        """By chance, each name and each file is as it was synced last or as it is now."""
        names: dict[int, dict[str, Inode]] = {}
        contents: dict[int, Content] = {}
        inodes = list(self.inodes())
        for inode in inodes:
            chosen = names[id(inode)] = {}
            for name in {**inode.durable_names, **inode.names}:
                found = chance.choice((inode.durable_names, inode.names)).get(name)
                if found is not None:
                    chosen[name] = found
            mode, changed, data = inode.content
            torn = (mode, changed, data[: chance.randrange(len(data) + 1)])
            states = [inode.durable_content, inode.content]
            if inode.content != inode.durable_content:
                states.append(torn)
            contents[id(inode)] = chance.choice(states)
        kept = Counter(id(inner) for chosen in names.values() for inner in chosen.values())
        now = Counter(id(inner) for inode in inodes for inner in inode.names.values())
        synced = Counter(id(inner) for inode in inodes for inner in inode.durable_names.values())
        for inode in inodes:
            for name, inner in inode.durable_names.items():
                renamed = kept[id(inner)] < min(now[id(inner)], synced[id(inner)])
                if renamed and name not in names[id(inode)]:
                    names[id(inode)][name] = inner
                    kept[id(inner)] += 1
        return Survivors(lambda inode: names[id(inode)], lambda inode: contents[id(inode)])
