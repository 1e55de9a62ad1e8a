"""Our own documents, and the last steps of a run: what it needed goes, its journal at last."""

from vllm_eagle3_patch.ground import filesystem
from vllm_eagle3_patch.ground.folder import Attributes, Folder, is_there, parent_of
from vllm_eagle3_patch.transaction.git_exclude import add_exclude, remove_exclude
from vllm_eagle3_patch.transaction.state import readme
from vllm_eagle3_patch.transaction.state.journal import Site
from vllm_eagle3_patch.transaction.state.layout import (
    CONCLUDED,
    COPIES,
    EDITED,
    FOLDER,
    JOURNAL,
    MANIFEST,
    ORIGINALS,
    PREVIOUS,
    VERIFIED,
    discard,
    document_in,
    folder_mode,
    made_parent,
    opened_in,
)
from vllm_eagle3_patch.transaction.state.manifest import (
    Manifest,
    ManifestEntry,
    bytes_at,
    manifest_bytes,
)

NEW = ".new"
"""What the name of a document ends with until all of it is written."""


def settle(site: Site, manifest: Manifest | None) -> None:
    """Have this manifest in the state folder, or none."""
    data = manifest_bytes(manifest)
    if data is None:
        if filesystem.remove(site.state, MANIFEST):
            filesystem.sync_directory(site.state)
    elif data != document_in(site.state, MANIFEST):
        write_document(site.root, site.state, MANIFEST, data)


def conclude(site: Site) -> None:
    """Say that the run is done: from here on it is not undone any more, only tidied up."""
    filesystem.replace(site.state, JOURNAL, site.state, CONCLUDED)


def finish(site: Site) -> None:
    """Remove what a complete run does not need any more, its journal at last."""
    # That it is done must be on disk before the first thing goes that undoing it would need.
    filesystem.sync_directory(site.state)
    journal = site.journal
    for file in journal.files:
        if not journal.keeps_original(file.path):
            discard(site.state, journal.shelf(file.path))
    for entry in journal.dropped():
        if entry.path in journal.saved:
            _set_aside(site, entry)
        for shelf in (ORIGINALS, COPIES):
            discard(site.state, f"{shelf}/{entry.kept}/{entry.path}")
    if journal.after is None:
        dissolve(site.root, site.state)
    end(site.root, site.state)


def _set_aside(site: Site, entry: ManifestEntry) -> None:
    """Move the last copy of an original to where nothing is deleted; once is enough."""
    aside = site.journal.aside(entry.path)
    for shelf in (COPIES, ORIGINALS):
        kept = f"{shelf}/{entry.kept}/{entry.path}"
        if is_there(site.state, aside) or bytes_at(site.state, kept, entry.original) is None:
            continue
        with (
            parent_of(site.state, kept) as (folder, name),
            made_parent(site.root, site.state, aside) as place,
        ):
            filesystem.replace(folder, name, place, name)
            # In this order, as a name that is lost in one and not yet had in the other is lost.
            filesystem.sync_directory(place)
            filesystem.sync_directory(folder)


def write_document(root: Folder, state: Folder, name: str, data: bytes) -> None:
    """Write one of our own files, all of it or nothing."""
    filesystem.remove(state, name + NEW)
    filesystem.write_new_file(state, name + NEW, data, Attributes(folder_mode(root) & 0o644))
    filesystem.replace(state, name + NEW, state, name)
    filesystem.sync_directory(state)


def begun(root: Folder, name: str, data: bytes) -> Folder:
    """Write a document into the state folder, which is made if need be, and return it open."""
    if root.status(FOLDER) is None:
        filesystem.make_directory(root, FOLDER, folder_mode(root))
        filesystem.sync_directory(root)
    state = opened_in(root)
    try:
        if state.status(readme.NAME) is None:
            write_document(root, state, readme.NAME, readme.TEXT.encode())
        write_document(root, state, name, data)
        add_exclude(root)
    except BaseException:
        state.close()
        raise
    return state


def dissolve(root: Folder, state: Folder) -> None:
    """Remove all that a state folder holds but its journal and what was kept aside."""
    filesystem.remove(state, VERIFIED)
    for shelf in (PREVIOUS, ORIGINALS, COPIES):
        filesystem.remove_tree(state, shelf)
    if EDITED not in state.names():
        filesystem.remove(state, readme.NAME)
        remove_exclude(root)


def end(root: Folder, state: Folder) -> None:
    """Remove the journal, and the state folder if it is empty then."""
    # Nothing that is removed may come back once nothing says any more that it is to go.
    filesystem.sync_directory(state)
    filesystem.remove(state, CONCLUDED)
    filesystem.remove(state, JOURNAL)
    filesystem.sync_directory(state)
    if filesystem.remove_directory(root, FOLDER):
        filesystem.sync_directory(root)
