"""Modes, groups, access lists and attributes, under whatever umask."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest
from whole_tree import STATE, check_apply_check_diff, revert_and_check, whole_tree

from command_line import run
from safety_table import Tried

GROUP = "Installations as they are"
DEEPSEEK = "vllm/model_executor/models/deepseek_v2.py"
ACCESS, DEFAULT, NOTE = "system.posix_acl_access", "system.posix_acl_default", "user.note"
OTHER_USER, OTHER_GROUP = 12345, 23456

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o777])
def test_an_unusual_umask(mask: int, site_packages: Path, tried: Tried) -> None:
    (site_packages / DEEPSEEK).chmod(0o640)
    before = whole_tree(site_packages)
    here = ("--site-packages", site_packages)
    old = os.umask(mask)
    try:
        changed = check_apply_check_diff(*here)
        patched = whole_tree(site_packages)
        for path in changed:
            assert patched[path].mode == before[path].mode
        ours = {name: node for name, node in patched.items() if name.startswith(STATE)}
        assert not [name for name, node in ours.items() if node.mode & 0o022]
        assert all(node.mode & 0o400 for node in ours.values())
        revert_and_check(*here)
    finally:
        os.umask(old)
    assert whole_tree(site_packages) == before
    tried(
        GROUP,
        "unusual umask",
        how="umask 000, 077 and 777; check, apply, check, diff, revert",
        result="patched files keep their modes, nothing of ours is writable for others; after "
        "revert all as before",
    )


@as_root
def test_an_unusual_umask_without_the_rights_of_root(site_packages: Path, tried: Tried) -> None:
    owner = site_packages.parent
    check_apply_check_diff("--site-packages", site_packages)  # Whatever is imported, is now.
    revert_and_check("--site-packages", site_packages)
    for path in (owner, *owner.rglob("*")):
        os.chown(path, OTHER_USER, OTHER_GROUP, follow_symlinks=False)
    before = whole_tree(site_packages)
    reached = [folder for folder in owner.parents if not folder.stat().st_mode & 0o001]
    modes = {folder: folder.stat().st_mode for folder in reached}
    for folder in reached:
        folder.chmod(modes[folder] | 0o011)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(OTHER_GROUP)
            os.setuid(OTHER_USER)
            os.umask(0o777)
            check_apply_check_diff("--site-packages", site_packages)
            revert_and_check("--site-packages", site_packages)
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    for folder in reached:
        folder.chmod(modes[folder])
    assert status == 0
    assert whole_tree(site_packages) == before
    tried(
        GROUP,
        "umask 777 for a user who is not root",
        how="a process of that user; check, apply, check, diff, revert",
        result="after revert all as before",
    )


@as_root
def test_folders_that_hand_their_group_down(site_packages: Path, tried: Tried) -> None:
    for folder in (site_packages, *(p for p in site_packages.rglob("*") if p.is_dir())):
        os.chown(folder, OTHER_USER, OTHER_GROUP)
        folder.chmod(0o2775)
    os.chown(site_packages / DEEPSEEK, OTHER_USER, 0)
    before = whole_tree(site_packages)
    here = ("--site-packages", site_packages)
    changed = check_apply_check_diff(*here)
    patched = whole_tree(site_packages)
    for path in changed:
        assert (patched[path].owner, patched[path].mode) == (before[path].owner, before[path].mode)
    revert_and_check(*here)
    assert whole_tree(site_packages) == before
    tried(
        GROUP,
        "folders with set-group-id and files of other owners",
        how="mode 2775 and another group on every folder; check, apply, check, diff, revert",
        result="owner, group and mode of each patched file stay; after revert all as before",
    )


def access_list(user: int) -> bytes:
    """An access list as the kernel has it: the owner and one user may write, others may read."""
    nobody = 0xFFFFFFFF
    entries = ((1, 6, nobody), (2, 6, user), (4, 4, nobody), (16, 6, nobody), (32, 4, nobody))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def test_access_lists_and_extended_attributes_stay(site_packages: Path, tried: Tried) -> None:
    file = site_packages / DEEPSEEK
    attributes = {ACCESS: access_list(OTHER_USER), NOTE: b"checked by \x00\xff"}
    try:
        for name, value in attributes.items():
            os.setxattr(file, name, value)
        os.setxattr(file.parent, DEFAULT, access_list(OTHER_USER + 1))
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOTSUP, errno.EPERM):
            raise
        pytest.skip(f"the file system of the temporary folder has no such attributes: {error}")
    before = whole_tree(site_packages)
    here = ("--site-packages", site_packages)
    changed = check_apply_check_diff(*here)
    patched = whole_tree(site_packages)
    assert dict(patched[DEEPSEEK].extended) == attributes
    for path in changed:
        # The folder would give new files an access list that the old ones did not have.
        assert patched[path].extended == before[path].extended
        assert patched[path].mode == before[path].mode
    copies = list((site_packages / STATE).rglob("deepseek_v2.py"))
    assert len(copies) == 2
    (site_packages / STATE / "originals/1" / DEEPSEEK).unlink()
    assert run("revert", *here).exit_code == 0
    after = whole_tree(site_packages)
    assert dict(after[DEEPSEEK].extended) == attributes, "from the copy, too"
    assert after[DEEPSEEK].content == before[DEEPSEEK].content
    assert {n: e for n, e in after.items() if n != DEEPSEEK} == {
        n: e for n, e in before.items() if n != DEEPSEEK
    }
    tried(
        GROUP,
        "access lists and extended attributes",
        how="`system.posix_acl_access`, a default list on the folder and `user.*`; check, apply, "
        "check, diff, revert, the kept file lost and only its copy left",
        result="the patched file has the same ones, and so has the file after revert",
    )
