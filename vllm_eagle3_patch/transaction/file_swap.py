"""Replacing one file so that it can come back: keep it, stage the new one, swap, put back."""

import errno
import os
from dataclasses import replace

from vllm_eagle3_patch.ground import filesystem
from vllm_eagle3_patch.ground.digest import sha256
from vllm_eagle3_patch.ground.errors import ModifiedFileError
from vllm_eagle3_patch.ground.folder import GONE, Folder, is_there, parent_of, passing_over
from vllm_eagle3_patch.transaction.state.journal import REVERT, Replacement, Site
from vllm_eagle3_patch.transaction.state.layout import COPIES, ORIGINALS, made_parent
from vllm_eagle3_patch.transaction.state.manifest import (
    ManifestEntry,
    bytes_at,
    lost_original,
    original_is_kept,
    original_is_usable,
)


def current_digest(root: Folder, path: str) -> str | None:
    """The SHA-256 of what is at a path now, None if no file is there."""
    parent, _, name = path.rpartition("/")
    with passing_over(GONE), root.below(parent) as folder:
        return sha256(folder.snapshot(name, follow=True).data)
    return None


def changed_meanwhile(path: str) -> ModifiedFileError:
    """The error that says that a file is not the one that was planned for."""
    return ModifiedFileError(
        f"{path} was changed by someone else meanwhile",
        "look at the change, then run it again; everything else is as it was",
    )


def stage(site: Site, path: str, data: bytes) -> None:
    """Write a new file, like the old one but for its bytes, beside it."""
    with parent_of(site.root, path) as (folder, name):
        like = replace(folder.snapshot(name, follow=True).attributes, times=None)
        filesystem.write_new_file(folder, site.journal.staged(name), data, like)
        filesystem.sync_directory(folder)


def keep(site: Site, file: Replacement) -> None:
    """Keep what is about to be replaced. Whatever is to be staged is staged before.

    Raises:
        ModifiedFileError: It is not what the journal says.
    """
    journal = site.journal
    original = journal.keeps_original(file.path)
    with parent_of(site.root, file.path) as (folder, name):
        with made_parent(site.root, site.state, journal.shelf(file.path)) as shelf:
            linked = _keep_inode(folder, name, shelf)
            snapshot = folder.snapshot(name, follow=True)
            if sha256(snapshot.data) != file.before:
                raise changed_meanwhile(file.path)
            if not linked and not original:
                filesystem.write_new_file(shelf, name, snapshot.data, snapshot.attributes)
            elif linked and shelf.link_text(name) is None:
                filesystem.sync_file(shelf, name)
            filesystem.sync_directory(shelf)
        copies = [journal.copy(file.path)] if original else []
        copies += [journal.aside(file.path)] if file.aside else []
        for copy in copies:
            with made_parent(site.root, site.state, copy) as copied:
                filesystem.write_new_file(copied, name, snapshot.data, snapshot.attributes)
                filesystem.sync_directory(copied)


def swap(site: Site, file: Replacement) -> None:
    """Put the new file in its place: the staged one, or the original on ``revert``.

    Raises:
        ModifiedFileError: What is there is not what was kept.
        StateCorruptError: The original cannot be used.
    """
    if current_digest(site.root, file.path) != file.before:
        raise changed_meanwhile(file.path)
    if site.journal.operation == REVERT:
        _put_original(site, site.journal.entry_of(file.path))
        return
    with parent_of(site.root, file.path) as (folder, name):
        filesystem.replace(folder, site.journal.staged(name), folder, name)
        filesystem.sync_directory(folder)


def put_back(site: Site, file: Replacement) -> str:
    """Undo a replacement as far as it happened, judging by what is there.

    Returns:
        ``restored``, ``untouched`` if it was not replaced, or ``foreign`` if someone replaced what
        the run wrote: that stays.

    Raises:
        StateCorruptError: What was kept cannot be used.
    """
    entry = site.journal.entry_of(file.path)
    digest = current_digest(site.root, file.path)
    replaced = _was_replaced(site, file.path)
    # `revert` may put the original in the place of an equal file: then only that tells.
    if _is_kept_inode(site, file.path) or (digest == file.before != file.after):
        outcome = "untouched"
    elif digest != file.after:
        outcome = "foreign" if replaced else "untouched"
    elif file.before == file.after and not replaced:
        outcome = "untouched"
    else:
        if site.journal.operation == REVERT:
            _keep_original_again(site, entry)
        if site.journal.keeps_original(file.path):
            _put_original(site, entry)
        else:
            _put_previous(site, file.path)
        outcome = "restored"
    unstage(site, file.path)
    return outcome


def unstage(site: Site, path: str) -> None:
    """Have no new file beside a path, and the names that are there on disk."""
    with passing_over(GONE), parent_of(site.root, path) as (folder, name):
        filesystem.remove(folder, site.journal.staged(name))
        filesystem.sync_directory(folder)


def _put_original(site: Site, entry: ManifestEntry) -> None:
    copies = f"{COPIES}/{entry.kept}/{entry.path}"
    with parent_of(site.root, entry.path) as (folder, name):
        if original_is_kept(site.root, site.state, entry):
            with parent_of(site.state, f"{ORIGINALS}/{entry.kept}/{entry.path}") as (kept, _):
                _move(site, kept, folder, name)
            return
        data = bytes_at(site.state, copies, entry.original)
        if data is None:
            raise lost_original(entry)
        with parent_of(site.state, copies) as (copied, _):
            extended = copied.snapshot(name).attributes.extended
        staged = site.journal.staged(name)
        filesystem.remove(folder, staged)
        filesystem.write_new_file(folder, staged, data, entry.attributes(extended))
        filesystem.replace(folder, staged, folder, name)
        filesystem.sync_directory(folder)


def _put_previous(site: Site, path: str) -> None:
    # Its content is not compared: it is the very file that was there.
    shelf_path = site.journal.shelf(path)
    if not is_there(site.state, shelf_path):
        raise lost_original(site.journal.entry_of(path))
    with (
        parent_of(site.root, path) as (folder, name),
        parent_of(site.state, shelf_path) as (shelf, _),
    ):
        _move(site, shelf, folder, name)


def _move(site: Site, shelf: Folder, folder: Folder, name: str) -> None:
    """Move what was kept to its place; to another file system, a copy of it."""
    with passing_over({errno.EXDEV}):
        filesystem.replace(shelf, name, folder, name)
        # In this order, as a name that is lost in one and not yet had in the other is lost.
        filesystem.sync_directory(folder)
        filesystem.sync_directory(shelf)
        return
    staged = site.journal.staged(name)
    filesystem.remove(folder, staged)
    if shelf.link_text(name) is None:
        snapshot = shelf.snapshot(name)
        filesystem.write_new_file(folder, staged, snapshot.data, snapshot.attributes)
    else:
        filesystem.copy_symlink(shelf, name, folder, staged)
    filesystem.replace(folder, staged, folder, name)
    filesystem.sync_directory(folder)


def _keep_original_again(site: Site, entry: ManifestEntry) -> None:
    with (
        parent_of(site.root, entry.path) as (folder, name),
        made_parent(site.root, site.state, f"{ORIGINALS}/{entry.kept}/{entry.path}") as kept,
    ):
        same_kind = folder.link_text(name) == entry.symlink
        if kept.status(name) is None and same_kind and _keep_inode(folder, name, kept):
            filesystem.sync_directory(kept)
            return
    if not original_is_usable(site.root, site.state, entry):
        raise lost_original(entry)


def _keep_inode(folder: Folder, name: str, shelf: Folder) -> bool:
    with passing_over(filesystem.LINK_REFUSED):
        filesystem.link(folder, name, shelf, name)
        return True
    if folder.link_text(name) is None:
        return False
    filesystem.copy_symlink(folder, name, shelf, name)
    return True


def _is_kept_inode(site: Site, path: str) -> bool:
    with (
        passing_over(GONE),
        parent_of(site.root, path) as (folder, name),
        parent_of(site.state, site.journal.shelf(path)) as (shelf, _),
    ):
        there, kept = folder.status(name), shelf.status(name)
        return there is not None and kept is not None and os.path.samestat(there, kept)
    return False


def _was_replaced(site: Site, path: str) -> bool:
    """Whether a file had been staged and kept and then left its place beside the target."""
    journal = site.journal
    kept = journal.copy(path) if journal.keeps_original(path) else journal.shelf(path)
    parent, _, name = path.rpartition("/")
    staged = f"{parent}/{journal.staged(name)}"
    return is_there(site.state, kept) and not is_there(site.root, staged)
