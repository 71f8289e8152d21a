"""The content of a slot as it lies in its file: behind a checksum that binds it to the slot's name.

A bit that a disk turned can leave bytes that still decode, with another term in them; a fence or a vote that
was never given would be believed. So every byte of the file counts. It is no signature: who may write here
may write anything. What the content says, and whose it is, is for others to judge.
"""

from __future__ import annotations

import hashlib
from typing import Final

from kvasir_proto.effects import Slot

_MARK: Final = b"kvslot1\n"
"""No message begins like this: a file without it is one that builds before checksums wrote."""
_DIGEST_BYTES: Final = 32
SEAL_BYTES: Final = len(_MARK) + _DIGEST_BYTES


def seal(slot: Slot, data: bytes) -> bytes:
    """The bytes of the slot's file."""
    return _MARK + _checksum(slot, data) + data


def is_sealed(file: bytes) -> bool:
    """Whether the file begins as a sealed one does; else it is what earlier builds wrote, or damaged."""
    return file.startswith(_MARK)


def unseal(slot: Slot, file: bytes) -> bytes:
    """The content of a sealed file. Raises `ValueError` where that is not what was sealed for this slot."""
    checksum, data = file[len(_MARK) : SEAL_BYTES], file[SEAL_BYTES:]
    if not is_sealed(file) or checksum != _checksum(slot, data):
        raise ValueError("its checksum does not fit its content")
    return data


def _checksum(slot: Slot, data: bytes) -> bytes:
    return hashlib.sha256(slot.encode("ascii") + b"\0" + data).digest()
