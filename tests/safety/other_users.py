"""Letting users who are not the one that runs the tests reach a test's folder."""

import os
from pathlib import Path


def let_in(folder: Path) -> None:
    """Let everybody pass through the folders above this one, and read it.

    pytest makes its temporary folders for one user, one folder deeper in each of several processes.
    """
    for above in (folder, *folder.parents):
        status = above.stat()
        if status.st_uid == os.geteuid() and status.st_mode & 0o055 != 0o055:
            above.chmod(status.st_mode | 0o055)
