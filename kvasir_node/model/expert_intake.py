"""Bytes of experts that come in answers of any size, until each expert is whole and has its digest.

Decides what becomes of them: an expert that is whole gets its name, one with other bytes than the manifest's
goes, and of one that breaks off everything is kept, to be gone on with at the byte by whoever gives the rest.
Who gave them is not its concern; `expert_fetch` does the same for sources that are read in order.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from kvasir_node.model.expert_files import ExpertFiles, Slice, partial_of
from kvasir_node.model.own_files import hasher_of_start, private, unwritable
from kvasir_proto.expert_sources import ExpertRun, WantedExpert
from kvasir_proto.manifest import ModelManifest


class ExpertIntake:
    """Takes in experts of one model into ``files``. Threads may share one, each with experts of its own.

    ``on_bytes`` is told how many bytes came and of whom, a negative number where they were thrown away.
    """

    def __init__(
        self, manifest: ModelManifest, files: ExpertFiles, on_bytes: Callable[[int, str], None]
    ) -> None:
        self._manifest = manifest
        self._files = files
        self._on_bytes = on_bytes
        self._hashers: dict[tuple[str, int], tuple[int, hashlib._Hash]] = {}
        self._lock = threading.Lock()

    def wanted(self, slices: Sequence[Slice]) -> list[WantedExpert]:
        """These, each with how much of it is here. One of which too much is here begins again."""
        found = []
        for each in slices:
            partial = partial_of(self._files.path_of(each.tensor.name, each.expert))
            try:
                begun_bytes = partial.stat().st_size
            except OSError:
                begun_bytes = 0
            if begun_bytes >= each.size_bytes:
                partial.unlink(missing_ok=True)
                begun_bytes = 0
            layer = each.tensor.layer
            assert layer is not None
            found.append(WantedExpert(each.tensor.name, layer, each.expert, each.size_bytes, begun_bytes))
        return found

    def take(self, run: ExpertRun, offset: int, data: bytes, giver: str) -> tuple[WantedExpert, ...]:
        """Take in these bytes of a run, which begin at byte ``offset`` of its first expert.

        Each byte of it comes once, in order. Returns the experts that are whole now and have not their
        digest, of which nothing is kept. Raises `ModelUnusable` when the disk refuses.
        """
        damaged = []
        for each in run.experts:
            if offset >= each.size_bytes:
                offset -= each.size_bytes
                continue
            if not data:
                break
            part, data = data[: each.size_bytes - offset], data[each.size_bytes - offset :]
            if not self._append(each, offset, part, giver):
                damaged.append(each)
            offset = 0
        return tuple(damaged)

    def _append(self, each: WantedExpert, offset: int, part: bytes, giver: str) -> bool:
        """Put the next part of one expert behind what is there; False where it is whole now and not right."""
        path = self._files.path_of(each.tensor, each.expert)
        partial = partial_of(path)
        try:
            if not offset:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = os.O_WRONLY | os.O_CREAT | (0 if offset else os.O_TRUNC)
            with open(private(str(partial), mode), "wb") as file:
                hasher = self._hasher_at(each, offset, partial)
                file.seek(offset)
                file.write(part)
            hasher.update(part)
            self._tell(len(part), giver)
            here = offset + len(part)
            if here < each.size_bytes:
                self._hashers[each.tensor, each.expert] = here, hasher
                return True
            self._hashers.pop((each.tensor, each.expert), None)
            if hasher.digest() == self._manifest.tensor(each.tensor).expert_sha256(each.expert):
                partial.replace(path)
                return True
            partial.unlink()
        except OSError as error:
            raise unwritable(partial, error) from error
        self._tell(-each.size_bytes, giver)
        return False

    def _hasher_at(self, each: WantedExpert, offset: int, partial: Path) -> hashlib._Hash:
        """A hasher that has been given what is there of an expert."""
        if offset:
            at, hasher = self._hashers.get((each.tensor, each.expert), (0, None))
            if hasher is not None and at == offset:
                return hasher
        return hasher_of_start(partial, offset)

    def _tell(self, size_bytes: int, giver: str) -> None:
        with self._lock:
            self._on_bytes(size_bytes, giver)
