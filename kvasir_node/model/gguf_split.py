"""Split models: one model in several GGUF files, as llama.cpp's tools write them.

Decides which files belong together and whether they fit, and makes one header of theirs. The names are
llama.cpp's (`NAME-00001-of-00003.gguf`), so the first part tells where the others are; every part says under
`split.no` which one it is. To the rest of Kvasir a split model is one file: its parts, one after the other.
It reads nothing itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from kvasir_node.model.gguf_format import INTEGER_TYPES, GgufFile
from kvasir_node.model.model_url import Location
from kvasir_proto.errors import ModelUnusable
from kvasir_proto.manifest import FILE_SIZE_BYTES_MAX, TENSORS_MAX

PARTS_MAX: Final = 1024
"""Most parts of one model; a thousand of the usual 50 GB are 50 TB."""

SPLIT_PREFIX: Final = "split."
"""Keys that speak of parts. They are not carried on: what Kvasir writes is whole."""

_NUMBER: Final = "split.no"
_COUNT: Final = "split.count"
_TENSOR_COUNT: Final = "split.tensors.count"
_NAME: Final = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.ASCII | re.DOTALL)


def part_locations(location: Location) -> tuple[Location, ...]:
    """Where all parts are when `location` has the name of one of several; otherwise `location` alone."""
    match = _NAME.fullmatch(location.name)
    count = int(match[3]) if match else 1
    if match is None or not 1 < count <= PARTS_MAX or not 1 <= int(match[2]) <= count:
        return (location,)
    return tuple(
        location.with_name(f"{match[1]}-{each:05}-of-{count:05}.gguf") for each in range(1, count + 1)
    )


def model_name(location: Location) -> str:
    """A file's name without what says that it is a GGUF file, or which part of one."""
    match = _NAME.fullmatch(location.name)
    return match[1] if match and len(part_locations(location)) > 1 else location.stem


def other_parts(first: GgufFile) -> tuple[Location, ...]:
    """Where the other parts are of the model that begins with `first`; none when it is whole.

    Raises `ModelUnusable` when it is another part than the first, or has not the name of a first part.
    """
    count = _integer(first, _COUNT, 0, PARTS_MAX, missing=1)
    if count <= 1:
        return ()
    number = _integer(first, _NUMBER, 0, count - 1)
    paths = part_locations(first.path)
    if len(paths) != count or paths[number] != first.path:
        raise _refusal(
            first,
            f"{_COUNT} is {count} and {_NUMBER} {number}, so its name must end in "
            f"-{number + 1:05}-of-{count:05}.gguf, with the other parts beside it",
        )
    if number != 0:
        raise _refusal(first, f"it is part {number + 1} of a split model; give the first, {paths[0].name}")
    return paths[1:]


def joined(parts: Sequence[GgufFile]) -> GgufFile:
    """One header for a model in these parts, the first part's metadata without what speaks of parts.

    Offsets count from the begin of the first part through all of them. Raises `ModelUnusable` when the
    parts contradict each other.
    """
    first = parts[0]
    tensors = []
    begin = 0
    for index, part in enumerate(parts):
        if index and _integer(part, _NUMBER, 0, PARTS_MAX) != index:
            raise _refusal(part, f"its {_NUMBER} is not {index}, so it is another part than its name says")
        if _integer(part, _COUNT, 0, PARTS_MAX, missing=len(parts)) != len(parts) and len(parts) > 1:
            raise _refusal(part, f"its {_COUNT} is not {len(parts)}, the first part's")
        tensors += [replace(each, offset=begin + each.offset) for each in part.tensors]
        begin += part.size_bytes
    if not 1 <= len(tensors) <= TENSORS_MAX:
        raise _refusal(first, f"the number of tensors, {len(tensors)}, is not in 1..{TENSORS_MAX}")
    if begin > FILE_SIZE_BYTES_MAX:
        raise _refusal(first, "its parts together are larger than any model")
    n_tensor = _integer(first, _TENSOR_COUNT, 0, TENSORS_MAX, missing=len(tensors))
    if len(parts) > 1 and n_tensor != len(tensors):
        raise _refusal(first, f"its {_TENSOR_COUNT} is not {len(tensors)}, the number in all its parts")
    for name in _repeated([each.name for each in tensors]):
        raise _refusal(first, f"the tensor {name} is in two of its parts")
    metadata = {key: each for key, each in first.metadata.items() if not key.startswith(SPLIT_PREFIX)}
    return replace(
        first,
        paths=tuple(each.path for each in parts),
        metadata=MappingProxyType(metadata),
        tensors=tuple(tensors),
        size_bytes=begin,
    )


def _repeated(names: Sequence[str]) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield name
        seen.add(name)


def _integer(part: GgufFile, key: str, low: int, high: int, missing: int | None = None) -> int:
    entry = part.metadata.get(key)
    if entry is None:
        if missing is None:
            raise _refusal(part, f"{key} is missing")
        return missing
    if entry.type not in INTEGER_TYPES:
        raise _refusal(part, f"{key} is not a whole number")
    value = int(entry.scalars()[0])
    if not low <= value <= high:
        raise _refusal(part, f"{key} is {value}, not in {low}..{high}")
    return value


def _refusal(part: GgufFile, reason: str) -> ModelUnusable:
    return ModelUnusable(f"{part.path} cannot be used: {reason}")
