"""The fetched experts of a home, all models' together: what must be there, and what goes when room is needed.

Decides how much they may take, that nothing is fetched that has no room, and which slices are given up for
others: those used longest ago, never those of a shard that somebody serves. Who serves a shard says so by a
locked file beside it, which ends with its process however that ends; who makes room, or begins to serve, is
alone for that moment. How slices come is `expert_fetch`'s part.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from kvasir_node.durable_file import PARTIAL_PREFIX
from kvasir_node.model.expert_fetch import ExpertFetch
from kvasir_node.model.expert_files import EXPERTS_DIRECTORY, PARTIAL_SUFFIX, Slice, partial_of, slices_of
from kvasir_node.model.expert_intake import ExpertIntake
from kvasir_node.model.model_manifest import Progress
from kvasir_node.model.model_url import Location
from kvasir_node.model.own_files import unwritable
from kvasir_node.model.store import SPARE_BYTES, StoredModel
from kvasir_node.small_file import read_small_file
from kvasir_proto.errors import NoRoomOnDisk, RemoteProtocolError
from kvasir_proto.limits import SHARD_SIZE_MAX
from kvasir_proto.manifest import ShardSet

AskMembers: TypeAlias = Callable[[ExpertIntake, Sequence[Slice]], None]
"""Has members give of these slices what they can, into this intake."""

_SERVED: Final = "served-"
"""How the names of files begin that say what is served."""
_FETCHING: Final = ".fetching"
"""The file of each model that whoever fetches its experts has locked, and how many bytes they will be."""
_ROOM: Final = ".room"
"""The file that is locked, for moments, while room is made among all models, or somebody begins to serve."""
_COUNT_LENGTH_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class _Stored:
    """A slice on the disk, or what there is of one."""

    path: Path
    used_ns: int
    size_bytes: int


class ExpertCache:
    """The fetched experts of all models in `directory`: at most `size_bytes_max` bytes, if that is given.

    Several processes may use one; only one fetches experts of a model at a time, the others wait. What any
    of them has yet to fetch has its room.
    """

    def __init__(self, directory: Path, size_bytes_max: int | None = None) -> None:
        self._directory = directory
        self._size_bytes_max = size_bytes_max

    def ensure(
        self,
        model: StoredModel,
        shard: ShardSet,
        progress: Progress | None = None,
        *,
        others: Sequence[Location] = (),
        is_damaged: bool = False,
        ask_members: AskMembers | None = None,
        note: Callable[[int, str], None] | None = None,
    ) -> None:
        """Have every expert of `shard` on the disk: from members, the model's source, then from `others`.

        `ask_members` has members give what they can of what is missing; `note` is told how many bytes came
        and of whom, a negative number where they were thrown away. Nothing is done for a model whose whole
        file is here. Where something `is_damaged`, what is there is compared with its digests before.
        `progress` is told (bytes done, bytes in all), and may raise to end the fetch. Raises `NoRoomOnDisk`,
        or `ModelUnusable` when no source gives the experts.
        """
        if isinstance(model.source, Path):
            return
        manifest, files = model.manifest, model.experts
        directory = model.manifest_path.parent
        wanted = slices_of(manifest, shard)
        with _locked(directory / _FETCHING) as lock:
            os.truncate(lock, 0)  # whoever had it has no need of room any more
            if is_damaged:
                for each in files.damaged(manifest, shard):
                    files.remove(each)
            missing = [each for each in wanted if not files.has(each)]
            if missing:
                counted = _Counted(progress, note)
                self._fetch(model, wanted, missing, counted, others, ask_members, lock)
            elif self._size_bytes_max is not None:
                self._make_room(model, wanted, 0, lock)
            _touch([files.path_of(each.tensor.name, each.expert) for each in wanted])

    def _fetch(
        self,
        model: StoredModel,
        wanted: Sequence[Slice],
        missing: Sequence[Slice],
        counted: _Counted,
        others: Sequence[Location],
        ask_members: AskMembers | None,
        lock: int,
    ) -> None:
        files = model.experts
        paths = {files.path_of(each.tensor.name, each.expert) for each in missing}
        _remove_partials(files.directory, paths)
        total = sum(each.size_bytes for each in missing)
        have = sum(_size_of(partial_of(path)) for path in paths)
        self._make_room(model, wanted, total - have, lock)
        counted.begin(have, total)
        if ask_members is not None:
            ask_members(ExpertIntake(model.manifest, files, counted.add), missing)
            missing = [each for each in missing if not files.has(each)]
        locations = (*others,) if model.source is None else (model.source, *others)
        ExpertFetch(model.manifest, files, locations, counted.add).fetch(missing)

    def remove_unused(self, model: StoredModel) -> int:
        """Give up every expert of a model that nobody serves; the bytes that this gave."""
        gone = 0
        with self._alone():
            served = self._served()
            for each in _stored_in(model.experts.directory):
                if each.path not in served:
                    each.path.unlink(missing_ok=True)
                    gone += each.size_bytes
        return gone

    def room_bytes(self) -> int | None:
        """How many bytes more these may take without one going; None: as many as the disk has."""
        if self._size_bytes_max is None:
            return None
        if not self._directory.exists():
            return self._size_bytes_max
        with self._alone():
            return max(0, self._size_bytes_max - _taken(self._stored()) - self._promised_bytes())

    @contextlib.contextmanager
    def serving(self, model: StoredModel, shard: ShardSet) -> Iterator[None]:
        """The experts of `shard` are not given up while the block runs."""
        directory = model.manifest_path.parent
        try:
            handle, name = tempfile.mkstemp(prefix=".serving-", dir=directory)
            with open(handle, "wb", closefd=False) as file:
                file.write(shard.encode())
            fcntl.flock(handle, fcntl.LOCK_EX)  # before it has the name that others look for
            with self._alone():  # whoever makes room either sees it or is done before
                path = Path(name).rename(directory / (_SERVED + Path(name).name.rpartition("-")[2]))
        except OSError as error:
            raise unwritable(directory, error) from error
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(handle)

    # -- room --------------------------------------------------------------------------------------

    def _alone(self) -> contextlib.AbstractContextManager[int]:
        return _locked(self._directory / _ROOM)

    def _make_room(self, model: StoredModel, wanted: Sequence[Slice], needed_bytes: int, lock: int) -> None:
        """Give up what was used longest ago until `needed_bytes` more fit, and have others leave them to us
        while `lock` is held. Raises `NoRoomOnDisk`, but not where nothing is needed.
        """
        with self._alone():
            self._give_up_oldest(model, wanted, needed_bytes)
            taken_bytes = _taken(_stored_in(model.experts.directory))
            os.pwrite(lock, str(taken_bytes + needed_bytes).encode(), 0)

    def _give_up_oldest(self, model: StoredModel, wanted: Sequence[Slice], needed_bytes: int) -> None:
        stored = self._stored()
        promised_bytes = self._promised_bytes(without=model)
        used_bytes = _taken(stored) + promised_bytes
        free_bytes = shutil.disk_usage(self._directory).free - SPARE_BYTES - promised_bytes
        missing_bytes = needed_bytes - free_bytes if needed_bytes else 0
        if self._size_bytes_max is not None:
            missing_bytes = max(missing_bytes, used_bytes + needed_bytes - self._size_bytes_max)
        if missing_bytes <= 0:
            return
        kept = self._served() | {model.experts.path_of(each.tensor.name, each.expert) for each in wanted}
        candidates = sorted(
            (each for each in stored if _whole(each.path) not in kept),
            key=lambda each: (each.used_ns, str(each.path)),
        )
        room_bytes = sum(each.size_bytes for each in candidates)
        if room_bytes < missing_bytes and needed_bytes:
            need_bytes = sum(each.size_bytes for each in wanted)
            have_bytes = max(0, need_bytes - missing_bytes + room_bytes)
            limit = "" if self._size_bytes_max is None else f" of the {self._size_bytes_max >> 20} allowed"
            raise NoRoomOnDisk(
                f"there is no room for the experts in {self._directory}: they need "
                f"{_mebibytes_up(need_bytes)} MiB and {have_bytes >> 20} MiB{limit} can be had",
                need_bytes,
                have_bytes,
            )
        for each in candidates:
            if missing_bytes <= 0:
                break
            each.path.unlink(missing_ok=True)
            missing_bytes -= each.size_bytes

    def _served(self) -> set[Path]:
        """The slices that somebody serves."""
        served: set[Path] = set()
        for path in sorted(self._directory.glob(f"*/{_SERVED}*")):
            shard = _served_by(path)
            for layer in shard.layers if shard is not None else ():
                experts = shard.experts_of(layer) if shard is not None else ()
                for tensor in (path.parent / EXPERTS_DIRECTORY / str(layer)).glob("*"):
                    served.update(tensor / str(expert) for expert in experts)
        return served

    def _stored(self) -> list[_Stored]:
        """The slices of all models, but for those of one that is being pulled."""
        directories = sorted(self._directory.glob(f"*/{EXPERTS_DIRECTORY}"))
        of_models = (each for each in directories if not each.parent.name.startswith(PARTIAL_PREFIX))
        return [each for directory in of_models for each in _stored_in(directory)]

    def _promised_bytes(self, without: StoredModel | None = None) -> int:
        """What others have yet to fetch, of other models than that one."""
        own = None if without is None else without.manifest_path.parent
        locks = (each for each in self._directory.glob(f"*/{_FETCHING}") if each.parent != own)
        return sum(_promised_by(each) for each in locks)


class _Counted:
    """Adds up pieces for a `Progress`, and says whose they are."""

    def __init__(self, progress: Progress | None, note: Callable[[int, str], None] | None) -> None:
        self._progress = progress
        self._note = note
        self._done = self._total = 0

    def begin(self, done: int, total: int) -> None:
        self._done, self._total = done, total

    def add(self, size_bytes: int, giver: str) -> None:
        self._done = max(0, self._done + size_bytes)
        if self._note is not None:
            self._note(size_bytes, giver)
        if self._progress is not None:
            self._progress(self._done, self._total)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Nobody else has this file locked meanwhile, whose descriptor this is; waits for who does."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def _promised_by(path: Path) -> int:
    """The bytes that somebody has yet to fetch of the model with this file."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return 0
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        said = os.pread(handle, _COUNT_LENGTH_MAX, 0)
        in_the_end = int(said) if said.isdigit() else 0
        return max(0, in_the_end - _taken(_stored_in(path.with_name(EXPERTS_DIRECTORY))))
    finally:
        os.close(handle)
    return 0  # nobody fetches any


def _taken(stored: Iterable[_Stored]) -> int:
    return sum(each.size_bytes for each in stored)


def _served_by(path: Path) -> ShardSet | None:
    """The shard in a file that says what is served; None, and the file goes, where its process has ended."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        with contextlib.suppress(OSError, RemoteProtocolError):
            return ShardSet.decode(read_small_file(path, SHARD_SIZE_MAX))
        return None
    else:
        path.unlink(missing_ok=True)
        return None
    finally:
        os.close(handle)


def _touch(paths: Iterable[Path]) -> None:
    """Note on the disk that these are used now, in time that is finer than the disk's own."""
    now_ns = time.time_ns()
    for path in paths:
        with contextlib.suppress(OSError):
            os.utime(path, ns=(now_ns, now_ns))


def _stored_in(directory: Path) -> list[_Stored]:
    """Every slice of one model, and what there is of unfinished ones."""
    stored = []
    for path in directory.glob("*/*/*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            stored.append(_Stored(path, status.st_mtime_ns, status.st_size))
    return stored


def _remove_partials(directory: Path, wanted: Collection[Path]) -> None:
    """Remove what there is of slices that nobody wants any more."""
    for path in directory.glob(f"*/*/*{PARTIAL_SUFFIX}"):
        if _whole(path) not in wanted:
            path.unlink(missing_ok=True)


def _whole(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(PARTIAL_SUFFIX))


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _mebibytes_up(size_bytes: int) -> int:
    return -(-size_bytes >> 20)
