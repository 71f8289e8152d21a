"""What a pull has had of a model's bytes, on the disk, so that one that was killed goes on where it was.

One line for each part (a tensor, or one expert's slice of it) with the digest of the bytes as they came. It
decides which lines count: those of the same address, header and version of the file, whole, and up to the
first that is not. A line says what came and never that it is still there: where a part's bytes were kept
they are hashed again and compared with it, so a power cut costs what it took and no more. Nothing is flushed.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import BinaryIO, Final

from kvasir_node.model.own_files import private, unwritable
from kvasir_node.small_file import read_small_file

JOURNAL: Final = "pull-journal"
"""What the file is called."""
_SIZE_BYTES_MAX: Final = 64 << 20
_CHECK_LENGTH: Final = 8
_PART: Final = re.compile(r"([0-9a-f]{64}) (\d{1,5}) ([!-~]{1,63})", re.ASCII)


class PullJournal:
    """The journal in ``directory`` of a pull of what ``identity`` tells apart: address, header, version."""

    def __init__(self, directory: Path, identity: tuple[str, ...]) -> None:
        self._path = directory / JOURNAL
        self._first = _line(json.dumps(identity))
        self._digests: dict[tuple[str, int], bytes] = {}
        self._file: BinaryIO | None = None
        self._whole_bytes = self._read()

    @property
    def has_begun(self) -> bool:
        """Whether there is one of this identity; otherwise what is in the directory is of something else."""
        return self._whole_bytes > 0 or self._file is not None

    def digest_of(self, name: str, part: int) -> bytes | None:
        """The digest of the bytes that came of this part; None where they have not all come."""
        return self._digests.get((name, part))

    def note(self, name: str, part: int, digest: bytes) -> None:
        """This part has come. Raises `ModelUnusable` when the disk refuses."""
        try:
            if self._file is None:
                self._file = self._begin()
            self._file.write(_line(f"{digest.hex()} {part} {name}"))
        except OSError as error:
            raise unwritable(self._path, error) from error

    def close(self) -> None:
        """No part can be noted afterwards. Idempotent."""
        if self._file is not None:
            self._file.close()

    def _begin(self) -> BinaryIO:
        """The file, behind its last line that counts: what follows one that is torn would never be read."""
        file = open(self._path, "ab", buffering=0, opener=private)  # noqa: SIM115 - closed by `close`
        file.truncate(self._whole_bytes)
        if not self._whole_bytes:
            file.write(self._first)
        return file

    def _read(self) -> int:
        """How many bytes of it count."""
        try:
            lines = read_small_file(self._path, _SIZE_BYTES_MAX).splitlines(keepends=True)
        except OSError:
            return 0
        if not lines or lines[0] != self._first:
            return 0
        whole_bytes = len(lines[0])
        for line in lines[1:]:
            content = _content(line)
            match = _PART.fullmatch(content) if content is not None else None
            if match is None:
                break
            self._digests[match[3], int(match[2])] = bytes.fromhex(match[1])
            whole_bytes += len(line)
        return whole_bytes


def _line(content: str) -> bytes:
    return f"{_check(content)} {content}\n".encode()


def _content(line: bytes) -> str | None:
    """What a whole line says."""
    try:
        check, _, content = line.decode("ascii").removesuffix("\n").partition(" ")
    except UnicodeDecodeError:
        return None
    return content if line.endswith(b"\n") and check == _check(content) else None


def _check(content: str) -> str:
    """Tells a line that was written whole from one that a power cut left."""
    return hashlib.sha256(content.encode()).hexdigest()[:_CHECK_LENGTH]
