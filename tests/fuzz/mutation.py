"""Changes of msgpack documents that keep them documents.

libFuzzer changes bytes, and a changed byte in msgpack is mostly the end of it: the decoder is C and tells
nothing of how near a miss was. Here a document is taken apart, one value of it is changed, and it is packed
again, so that inputs reach the code that judges values. What cannot be taken apart is left to libFuzzer.
"""

from __future__ import annotations

import random
from typing import Any, Final

import msgpack

_NUMBERS: Final = (0, 1, -1, 2, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32)
_LARGE: Final = (2**50, 2**50 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63))
_OTHERS: Final[tuple[Any, ...]] = (None, True, False, "", b"", [], {}, 0.5, float("nan"), float("inf"), "v")
_DEPTH_MAX: Final = 8


def mutate_document(data: bytes, seed: int) -> bytes | None:
    """`data`, one msgpack document, with a few values changed; None when it is no document."""
    draws = random.Random(seed)
    try:
        document = msgpack.unpackb(data, raw=False, strict_map_key=False, use_list=True)
    except Exception:  # whatever msgpack cannot read
        return None
    for _ in range(draws.choice((1, 1, 1, 2, 4))):
        document = _changed(document, draws, 0)
    try:
        return bytes(msgpack.packb(document, use_bin_type=True))
    except (ValueError, TypeError, OverflowError, UnicodeEncodeError):
        return None


def _changed(value: Any, draws: random.Random, depth: int) -> Any:
    """`value` with one change somewhere in it."""
    is_nested = isinstance(value, list | dict) and len(value) > 0 and depth < _DEPTH_MAX
    if not is_nested or draws.random() < (0.15 if depth else 0.01):
        return _replaced(value, draws)
    if isinstance(value, dict):
        changed = dict(value)
        key = draws.choice(list(changed))
        match draws.randrange(8):
            case 0:
                del changed[key]
            case 1:
                changed[f"{key}_"] = changed[key]
            case _:
                changed[key] = _changed(changed[key], draws, depth + 1)
        return changed
    listed = list(value)
    index = draws.randrange(len(listed))
    match draws.randrange(10):
        case 0:
            del listed[index]
        case 1:
            listed.insert(index, listed[index])
        case 2:
            other = draws.randrange(len(listed))
            listed[index], listed[other] = listed[other], listed[index]
        case _:
            listed[index] = _changed(listed[index], draws, depth + 1)
    return listed


def _replaced(value: Any, draws: random.Random) -> Any:
    """Another value in the place of `value`, most of the time of its own type."""
    choice = draws.random()
    if choice < 0.15:
        return draws.choice(_OTHERS)
    if type(value) is int:
        if choice < 0.5:
            return value + draws.choice((-1, 1, 2, 8, 32, -32))
        return draws.choice(_NUMBERS if choice < 0.8 else _LARGE)
    if isinstance(value, str) and value:
        index = draws.randrange(len(value))
        return value[:index] + draws.choice(("", "x", "\0", "é", "\n", value)) + value[index + 1 :]
    if isinstance(value, bytes) and value:
        index = draws.randrange(len(value))
        return value[:index] + draws.choice((b"", b"\xff", b"\0", value[:64])) + value[index + 1 :]
    return draws.choice(_NUMBERS)
