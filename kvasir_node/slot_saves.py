"""What stands before a slot's content in its file: whose it is, and which saves of all slots came before it.

Slots are files, and files can be lost, taken from another home or put back from an old copy, each by itself.
So each names its node and swarm, and has of every slot the number of its last save: a slot that others have
seen with a higher number than its own is an older copy. What nothing was saved after cannot be told from its
older copies. It reads and writes no files, and knows no content.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, get_args

from kvasir_proto.effects import Slot
from kvasir_proto.ids import NodeId, SwarmDigest

SLOTS: Final[tuple[Slot, ...]] = tuple(sorted(get_args(Slot)))
_NUMBERS: Final = struct.Struct(f">{len(SLOTS)}Q")
"""By slot, in the order of their names. Another set of slots needs another mark of sealed files."""
_WHOSE_BYTES: Final = 32


class SavedSlot(NamedTuple):
    """One slot as it was saved. `numbers` has each slot's last save by then, its own included; from 1."""

    whose: bytes
    numbers: Mapping[Slot, int]
    data: bytes


def whose(swarm: SwarmDigest, node_id: NodeId) -> bytes:
    """What names this node in this swarm, in a slot: 32 bytes."""
    return hashlib.sha256(swarm + node_id.encode("ascii")).digest()


def pack(saved: SavedSlot) -> bytes:
    """The bytes to seal."""
    return saved.whose + _NUMBERS.pack(*(saved.numbers.get(slot, 0) for slot in SLOTS)) + saved.data


def unpack(content: bytes) -> SavedSlot:
    """What `pack` made. Raises `ValueError` where it is too short for that."""
    begin = _WHOSE_BYTES + _NUMBERS.size
    if len(content) < begin:
        raise ValueError("it is too short")
    numbers = _NUMBERS.unpack(content[_WHOSE_BYTES:begin])
    return SavedSlot(content[:_WHOSE_BYTES], dict(zip(SLOTS, numbers, strict=True)), content[begin:])


def last_saves(saved: Iterable[SavedSlot]) -> dict[Slot, int]:
    """The number of each slot's last save, as far as these tell; 0 where none does."""
    last = dict.fromkeys(SLOTS, 0)
    for each in saved:
        for slot in SLOTS:
            last[slot] = max(last[slot], each.numbers.get(slot, 0))
    return last
