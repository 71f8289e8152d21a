"""What a node must remember rightly as it lies in its file: behind a checksum that binds it to a name.

A bit that a disk turned can leave bytes that still decode, with another term in them; a fence or a vote that
was never given would be believed, or a number given twice. So every byte of the file counts. It is no
signature: who may write here may write anything. What the content says, and whose it is, is for others to
judge.
"""

from __future__ import annotations

import hashlib
from typing import Final

_MARK: Final = b"kvslot2\n"
_MARK_OF_EARLIER_BUILDS: Final = b"kvslot1\n"
"""Of builds whose slots said neither whose they are nor which others had been saved."""
_DIGEST_BYTES: Final = 32
SEAL_BYTES: Final = len(_MARK) + _DIGEST_BYTES


def seal(name: str, data: bytes) -> bytes:
    """The bytes of the file of this name, a slot's for instance."""
    return _MARK + _checksum(name, data) + data


def unseal(name: str, file: bytes) -> bytes:
    """The content of a sealed file. Raises `ValueError`, in words, where this name did not seal it."""
    if not file:
        raise ValueError("it is empty")
    if file.startswith(_MARK_OF_EARLIER_BUILDS):
        raise ValueError("a build before this one wrote it")
    checksum, data = file[len(_MARK) : SEAL_BYTES], file[SEAL_BYTES:]
    if not file.startswith(_MARK) or checksum != _checksum(name, data):
        raise ValueError("its checksum does not fit its content")
    return data


def _checksum(name: str, data: bytes) -> bytes:
    return hashlib.sha256(name.encode("ascii") + b"\0" + data).digest()
