"""What is to become of one file."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """What is to become of one file.

    Attributes:
        path: Relative to the root, with forward slashes.
        expected: The SHA-256, in hex, of the bytes that must be there now.
        keep_aside: For a file of ours that someone edited: keep a copy of the edited bytes. The
            original stays the recorded one. Without it, a file that is not as we left it
            counts as newly installed: what is there becomes the original.
        made_of: The SHA-256 of the original that what is there was made of, if we made it: as long
            as that is the recorded one, it stays that, whatever the manifest says was written.
    """

    path: str
    expected: str
    after: bytes
    patches: tuple[str, ...]
    keep_aside: bool = False
    made_of: str | None = None
