"""What a node must remember rightly as it lies in its file: behind a checksum that binds it to a name.

A bit that a disk turned can leave bytes that still decode, with another term in them; a fence or a vote that
was never given would be believed, or a number given twice. So every byte of the file counts. It is no
signature: who may write here may write anything. What the content says, and whose it is, is for others to
judge.
"""

from __future__ import annotations

import hashlib
from typing import Final

_MARK: Final = b"kvslot1\n"
"""No message begins like this: a file without it is one that builds before checksums wrote."""
_DIGEST_BYTES: Final = 32
SEAL_BYTES: Final = len(_MARK) + _DIGEST_BYTES


def seal(name: str, data: bytes) -> bytes:
    """The bytes of the file of this name, a slot's for instance."""
    return _MARK + _checksum(name, data) + data


def is_sealed(file: bytes) -> bool:
    """Whether the file begins as a sealed one does; else it is what earlier builds wrote, or damaged."""
    return file.startswith(_MARK)


def unseal(name: str, file: bytes) -> bytes:
    """The content of a sealed file. Raises `ValueError` where that is not what was sealed under this name."""
    checksum, data = file[len(_MARK) : SEAL_BYTES], file[SEAL_BYTES:]
    if not is_sealed(file) or checksum != _checksum(name, data):
        raise ValueError("its checksum does not fit its content")
    return data


def _checksum(name: str, data: bytes) -> bytes:
    return hashlib.sha256(name.encode("ascii") + b"\0" + data).digest()
