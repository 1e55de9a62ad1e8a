"""What a file is known by: its bytes, whatever it is called."""

import hashlib


def sha256(content: bytes) -> str:
    """In hexadecimal."""
    return hashlib.sha256(content).hexdigest()
