"""Fetches the slices of experts that are missing, from the first of several places that gives them.

Decides which ranges are asked of whom, and what follows when they do not come or are not what they should
be: a slice counts only with the manifest's digest, a damaged one is fetched again from elsewhere, and a place
that fails or gives several damaged ones is given up for the others. What there is of a slice is kept and gone
on with, also by the next process. Room and who may fetch at one time are `expert_cache`'s affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from kvasir_node.model.byte_ranges import InOrder, Pieces
from kvasir_node.model.expert_files import ExpertFiles, Slice, partial_of
from kvasir_node.model.model_bytes import ModelBytes
from kvasir_node.model.model_url import Location
from kvasir_node.model.own_files import hasher_of_start, private, unwritable
from kvasir_proto.errors import SourceFailed
from kvasir_proto.manifest import ModelManifest

DAMAGED_MAX: Final = 3
"""Damaged slices after which a place is given up: the next byte from it is worth no more."""
ROUNDS_MAX: Final = 2
"""How often all places are gone through: once more for what was damaged, perhaps only on its way."""


class _Damaged(Exception):
    """A slice that came whole from one place has not its digest."""


class ExpertFetch:
    """Fetches slices of one model into `files` from `locations`, tried in this order.

    `on_bytes` is told the size of each piece that came and of whom, or a negative size where what came was
    thrown away; it may raise to end the fetch, and what has come until then is kept.
    """

    def __init__(
        self,
        manifest: ModelManifest,
        files: ExpertFiles,
        locations: Sequence[Location],
        on_bytes: Callable[[int, str], None],
    ) -> None:
        self._manifest = manifest
        self._files = files
        self._locations = locations
        self._on_bytes = on_bytes
        self._given_up: dict[Location, str] = {}
        self._damaged: dict[Location, int] = {}

    def fetch(self, wanted: Sequence[Slice]) -> None:
        """Have all of these slices, each compared with its digest.

        Raises `SourceFailed` when no place gives some of them, with what is wrong with each; `ModelUnusable`
        when the disk refuses.
        """
        left = sorted(wanted, key=lambda each: each.offset)
        for _ in range(ROUNDS_MAX):
            for location in self._locations:
                if left and location not in self._given_up:
                    left = self._fetch_from(location, left)
        if left:
            reasons = [*self._given_up.values(), *map(self._damage_of, self._still_tried())]
            raise SourceFailed(
                f"{len(left)} parts of experts, of which the first is {left[0]}, could not be fetched: "
                + ("; ".join(reasons) or "nobody has them")
            )

    def _still_tried(self) -> list[Location]:
        return [each for each in self._locations if each not in self._given_up and self._damaged.get(each)]

    def _damage_of(self, location: Location) -> str:
        return f"{location} gave {self._damaged[location]} damaged ones"

    def _fetch_from(self, location: Location, wanted: Sequence[Slice]) -> list[Slice]:
        """Those of the slices that did not come from there."""
        done = 0
        damaged: list[Slice] = []
        try:
            with ModelBytes(location, self._manifest.file_size_bytes) as model:
                for run in _runs(wanted):
                    source: InOrder | None = None
                    for each in run:
                        begin = each.offset + self._prepare(each)
                        end = run[-1].offset + run[-1].size_bytes
                        source = source or InOrder(model, begin, end)
                        try:
                            self._complete(each, source, model)
                        except _Damaged:
                            damaged.append(each)
                        done += 1
                        if damaged and damaged[-1] is each:
                            self._note_damage(location, each)
        except SourceFailed as error:
            self._given_up[location] = str(error)
        return sorted([*damaged, *wanted[done:]], key=lambda each: each.offset)

    def _note_damage(self, location: Location, each: Slice) -> None:
        self._damaged[location] = self._damaged.get(location, 0) + 1
        if self._damaged[location] >= DAMAGED_MAX:
            raise SourceFailed(f"{self._damage_of(location)}, of which the last is {each}")

    # -- one slice ---------------------------------------------------------------------------------

    def _prepare(self, each: Slice) -> int:
        """How many bytes of a slice are there already; its directory is made."""
        partial = self._partial_of(each)
        try:
            partial.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            have = partial.stat().st_size
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise unwritable(partial, error) from error
        if have > each.size_bytes:
            partial.unlink(missing_ok=True)
            return 0
        return have

    def _complete(self, each: Slice, source: InOrder, model: ModelBytes) -> None:
        """Fetch what is missing of a slice, and all of it again where what was there was worth nothing."""
        had = self._prepare(each)
        if self._append(each, source, had):
            return
        if had and self._append(each, model, 0):  # what was there was of another place, or another day
            return
        raise _Damaged

    def _append(self, each: Slice, source: Pieces, had: int) -> bool:
        """Bring a slice of which `had` bytes are there to its end; whether it has its digest then."""
        partial = self._partial_of(each)
        try:
            with open(partial, "ab", opener=private) as file:
                hasher = hasher_of_start(partial, had)
                for piece in source.pieces(each.offset + had, each.size_bytes - had):
                    file.write(piece)
                    hasher.update(piece)
                    self._on_bytes(len(piece), source.name)
            if hasher.digest() == each.sha256:
                partial.replace(self._files.path_of(each.tensor.name, each.expert))
                return True
            partial.unlink()
        except OSError as error:
            raise unwritable(partial, error) from error
        self._on_bytes(-each.size_bytes, source.name)
        return False

    def _partial_of(self, each: Slice) -> Path:
        return partial_of(self._files.path_of(each.tensor.name, each.expert))


def _runs(slices: Sequence[Slice]) -> Iterator[list[Slice]]:
    """The slices in runs without a gap, each worth one request."""
    run: list[Slice] = []
    for each in slices:
        if run and each.offset != run[-1].offset + run[-1].size_bytes:
            yield run
            run = []
        run.append(each)
    if run:
        yield run
