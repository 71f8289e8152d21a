"""The models of one home: for each a manifest, a backbone file, and where its expert bytes are.

Decides what is on disk for a model and whether it can still be trusted. One directory a model, named by the
manifest's digest; the entry file is written last, so a directory without a fitting one is the rest of an
interrupted `add` and is built again. A model file of this machine stays where the user has it, remembered and
not copied; of one at an address what was fetched lies beside the manifest. It knows nothing of swarms, and
opens nothing with llama.cpp.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

from kvasir_node.durable_file import PARTIAL_PREFIX, remove_leftovers
from kvasir_node.model.backbone_file import (
    BackboneCopy,
    backbone_tensors,
    has_digest,
    verify_backbone_file,
    write_backbone_file,
)
from kvasir_node.model.expert_files import EXPERTS_DIRECTORY, PARTIAL_SUFFIX, ExpertFiles
from kvasir_node.model.gguf_format import GgufFile, GgufTensor
from kvasir_node.model.gguf_reader import memory_for, read_gguf
from kvasir_node.model.gguf_split import model_name
from kvasir_node.model.gguf_writer import new_file
from kvasir_node.model.model_manifest import Progress, manifest_of, moved_manifest
from kvasir_node.model.model_url import Location, ModelUrl, location_of
from kvasir_node.model.pull_journal import JOURNAL, PullJournal
from kvasir_node.model.reference_file import verify_reference_file, write_reference_file
from kvasir_node.model.verified_files import VerifiedFiles, identity_of
from kvasir_node.small_file import read_small_file
from kvasir_node.telemetry import get_logger
from kvasir_proto.errors import ModelUnusable, RemoteProtocolError, UsageError
from kvasir_proto.manifest import MANIFEST_SIZE_BYTES_MAX, ModelManifest, is_expert_name

log = get_logger()

SPARE_BYTES: Final = 64 << 20
"""Room that stays free on the disk beside what a model takes."""

DEMO_MODEL: Final = Path(__file__).parents[1] / "data" / "demo-q8_0.gguf"
"""What comes with the package; every home has it by these names, also before it was taken into its store."""
_DEMO_NAMES: Final = ("demo", DEMO_MODEL.stem)

PULL_KEPT_S: Final = 7 * 86400
"""How long what came of a pull that did not end is kept for the next one of the same address."""

ENTRY_SCHEMA_VERSION: Final = 2
DIGEST_PREFIX_LENGTH_MIN: Final = 6

_PULL_PREFIX: Final = f"{PARTIAL_PREFIX}pull-"
_ENTRY: Final = "entry.json"
_MANIFEST: Final = "manifest.msgpack"
_BACKBONE: Final = "backbone.gguf"
_REFERENCE: Final = "reference.gguf"
_MENDING: Final = ".mending"
"""The file of each model that whoever makes its backbone or reference file again has locked; the store is
not: a server may take its time."""
_ENTRY_SIZE_BYTES_MAX: Final = 1 << 18
"""It has five numbers for each part of a model: of 1,024 parts about 130,000 bytes."""

_DIGEST: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)

_VERIFIED: Final = VerifiedFiles()
"""What this process has read and found right: an engine that is started again waits for no digests."""


@dataclass(frozen=True)
class StoredModel:
    """One model of the store. `source` is the user's file or an address: it may have gone meanwhile.

    None where only its manifest is here: members give its experts, and nobody its backbone file.
    """

    name: str
    digest: str
    manifest: ModelManifest
    manifest_path: Path
    backbone_path: Path
    source: Location | None

    @property
    def source_path(self) -> Path:
        """Where engines read experts: the user's file, or the directory of those fetched from an address."""
        return self.source if isinstance(self.source, Path) else self.experts.directory

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others can fetch it: its address, but not one whose query may be a key."""
        source = self.source
        return (source.url,) if isinstance(source, ModelUrl) and source.url == str(source) else ()

    @property
    def experts(self) -> ExpertFiles:
        """The experts that were fetched."""
        return ExpertFiles(self.manifest_path.with_name(EXPERTS_DIRECTORY))

    @property
    def has_source(self) -> bool:
        """Whether its experts can be had: its file is there, it has an address, or members give them."""
        return not isinstance(self.source, Path) or self.source.exists()

    def taken_in_at_s(self) -> int:
        """When it was taken into the store, in seconds of Unix time; 0 where that cannot be said."""
        try:
            return int(self.manifest_path.stat().st_mtime)
        except OSError:
            return 0

    def context_length(self, wanted: int) -> int:
        """Positions of a context for this model: as many as wanted, at most what it was trained for."""
        return min(wanted, self.manifest.n_ctx_train or wanted)

    def verified_backbone_path(self, progress: Progress | None = None) -> Path:
        """The backbone file, every byte of its trunk compared with the manifest's digests.

        To be asked for before llama.cpp opens the file, in a thread: reading takes as long as SHA-256 does,
        about 1.5 GB/s, once in a process as long as the file is not touched. A damaged file is made again
        from the source. `progress` is told (bytes done, bytes in all), from the start again where it is made
        again. Raises `ModelUnusable`, naming the file and the tensor, when it is damaged and the source has
        gone, is damaged too, or the disk has no room.
        """
        needed = self.manifest.data_offset + self.manifest.trunk_size_bytes()
        total = self.manifest.trunk_size_bytes()

        def write() -> None:
            _require_space(self.backbone_path.parent, needed, "the backbone file")
            source = self._source_of_files()
            write_backbone_file(source, self.manifest, self.backbone_path, _counted(progress, total))

        return self._verified(
            self.backbone_path,
            lambda: verify_backbone_file(self.backbone_path, self.manifest, _counted(progress, total)),
            write,
        )

    def reference_path(self, progress: Progress | None = None) -> Path:
        """The whole model as Kvasir wrote it, made now if it is not there yet or damaged.

        Every byte of it is compared with the manifest's digests, the experts' too, at the cost that
        `verified_backbone_path` names. `progress` is told (bytes done, bytes in all). Raises `ModelUnusable`
        when the source has gone or changed, or the disk has no room.
        """
        path = self.manifest_path.with_name(_REFERENCE)
        total = sum(each.size_bytes for each in self.manifest.tensors)

        def write() -> None:
            _require_space(path.parent, self.manifest.file_size_bytes, "the reference file")
            source = self._source_of_files()
            write_reference_file(source, self.manifest, path, _counted(progress, total))

        return self._verified(
            path, lambda: verify_reference_file(path, self.manifest, _counted(progress, total)), write
        )

    def _source_of_files(self) -> Location:
        """Where files of it are made from. Raises `ModelUnusable` where that is not known."""
        if self.source is None:
            raise ModelUnusable(
                f"of {self.name} only the manifest is here: give its file or its address with "
                "'kvasir-node models add' or 'models pull'"
            )
        return self.source

    def _verified(self, path: Path, verify: Callable[[], None], write: Callable[[], None]) -> Path:
        """`path`, after `verify` found it right now or before, or `write` made it, which checks as it does.

        Several processes may find the same damage: one mends it, the others find it mended.
        """
        with memory_for(path):
            self._verify_or_write(path, verify, write)
        return path

    def _verify_or_write(self, path: Path, verify: Callable[[], None], write: Callable[[], None]) -> None:
        try:
            _VERIFIED.check(path, _sha256_of(self.manifest), verify)
        except ModelUnusable:
            with _alone_with(self.manifest_path.with_name(_MENDING)):
                remove_leftovers(self.manifest_path.parent)
                try:
                    _VERIFIED.check(path, _sha256_of(self.manifest), verify)
                except ModelUnusable as damage:
                    is_there = path.exists()
                    if is_there:
                        log.warning("model_file_damaged", reason=str(damage))
                    try:
                        write()
                    except ModelUnusable as error:
                        if not is_there:
                            raise
                        raise ModelUnusable(f"{damage}, and it cannot be made again: {error}") from error
                    _VERIFIED.remember(path, _sha256_of(self.manifest))


class ModelStore:
    """The models kept under `directory`, which is made when the first one is added.

    Several processes may use one store: `add` holds a lock, and every file appears whole or not at all.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def add(
        self,
        path: Path,
        progress: Progress | None = None,
        judge: Callable[[Path], None] | None = None,
    ) -> StoredModel:
        """Take the model at `path` into the store: manifest, backbone file, and where the source is.

        Reads the whole file once, unless this very file (same inode, size and change time) is in the store
        already; what is there is checked and made again where it is damaged. `progress` is told (bytes done,
        bytes in all). `judge` is shown the backbone file before the model counts as added, and raises when
        it is no good. Raises `ModelUnusable` when the model cannot be used or the disk has no room.
        """
        path = path.absolute()
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise ModelUnusable(f"{path} cannot be used: its path is not valid UTF-8; rename it") from None
        with memory_for(path):
            return self._add(path, progress, judge)

    def _add(
        self, path: Path, progress: Progress | None, judge: Callable[[Path], None] | None
    ) -> StoredModel:
        gguf = read_gguf(path)
        identity = identity_of([each for each in gguf.paths if isinstance(each, Path)])
        self._prepare()
        with _locked(self._directory):
            known = self._unchanged(path, identity)
            if known is not None and known.manifest.header_sha256 == gguf.header_sha256:
                try:
                    _check_backbone(known.backbone_path, known.manifest)
                except ModelUnusable:
                    pass  # it is made again
                else:
                    _ask(judge, path, known.backbone_path)
                    return known
            hashed = sum(each.size_bytes for each in gguf.tensors)
            total = hashed + sum(each.size_bytes for each in gguf.tensors if not is_expert_name(each.name))
            manifest = manifest_of(gguf, progress and (lambda done, _: progress(done, total)))
            return self._build(path, identity, manifest, _counted(progress, total, hashed), judge)

    def pull(
        self,
        url: ModelUrl,
        progress: Progress | None = None,
        judge: Callable[[Path], None] | None = None,
        *,
        manifest: ModelManifest | None = None,
        experts_bytes_max: int | None = None,
    ) -> StoredModel:
        """Take the model at `url` into the store: manifest, backbone file and, if they are kept, experts.

        Every byte is fetched once: those of the trunk go into the backbone file as they are hashed, those of
        experts into files of their own, where all of them have room, and are `experts_bytes_max` at most.
        With a `manifest` only header and trunk are fetched, and must be the manifest's, in whatever parts; so
        it is with a model that is here from that address. Others may use the store meanwhile. `progress`,
        `judge` and what is raised are as for `add`.
        """
        with memory_for(url):
            gguf = read_gguf(url)
            self._prepare()
            with _locked(self._directory):
                manifest = self._known_at(url, gguf) if manifest is None else moved_manifest(manifest, gguf)
                if manifest is not None and self._has_backbone(manifest):
                    return self._build(url, (), manifest, _counted(None, 0), judge)
            with _staging(self._directory, url if manifest is None else None) as staging:
                if manifest is None:
                    manifest = self._fetch_all(gguf, staging, progress, experts_bytes_max)
                else:
                    needed = manifest.data_offset + manifest.trunk_size_bytes()
                    _require_space(self._directory, needed, "the backbone file")
                    on_bytes = _counted(progress, manifest.trunk_size_bytes())
                    write_backbone_file(url, manifest, staging / _BACKBONE, on_bytes)
                _ask(judge, url, staging / _BACKBONE)
                with _locked(self._directory):
                    return self._take_in(staging, url, manifest)

    def take_manifest(self, manifest: ModelManifest) -> StoredModel:
        """Take a model in by its manifest alone: its experts come from others, and it has no backbone file.

        Nothing changes where it is here already. Raises `ModelUnusable` when the disk refuses.
        """
        self._prepare()
        with _locked(self._directory):
            directory = self._directory / manifest.digest().hex()
            with contextlib.suppress(ModelUnusable):
                return self._load(directory.name)
            directory.mkdir(mode=0o700, exist_ok=True)
            return self._described_as(directory, None, (), manifest)

    def _has_backbone(self, manifest: ModelManifest) -> bool:
        try:
            _check_backbone(self._directory / manifest.digest().hex() / _BACKBONE, manifest)
        except ModelUnusable:
            return False
        return True

    def _fetch_all(
        self, gguf: GgufFile, staging: Path, progress: Progress | None, experts_bytes_max: int | None
    ) -> ModelManifest:
        experts_bytes = sum(each.size_bytes for each in gguf.tensors if is_expert_name(each.name))
        needed = gguf.size_bytes - experts_bytes
        here_bytes = sum(each.stat().st_blocks * 512 for each in staging.rglob("*") if each.is_file())
        _require_space(self._directory, needed - here_bytes, "the backbone file")
        free_bytes = shutil.disk_usage(self._directory).free + here_bytes
        keep_experts = experts_bytes_max is None or experts_bytes <= experts_bytes_max
        keep_experts = keep_experts and free_bytes >= needed + experts_bytes + SPARE_BYTES
        experts = ExpertFiles(staging / EXPERTS_DIRECTORY) if keep_experts else None
        with _PulledBytes(gguf, staging, experts) as pulled:
            manifest = manifest_of(gguf, progress, pulled.copy_of, pulled)
            pulled.finish()
            return manifest

    def _take_in(self, staging: Path, url: ModelUrl, manifest: ModelManifest) -> StoredModel:
        """Move what was fetched to where it belongs, and describe it; the store is locked."""
        directory = self._directory / manifest.digest().hex()
        for path in sorted(staging.rglob("*")):
            target = directory / path.relative_to(staging)
            if path.is_file():
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.replace(target)
        _VERIFIED.remember(directory / _BACKBONE, _sha256_of(manifest))
        return self._described_as(directory, url, (), manifest)

    def _known_at(self, url: ModelUrl, gguf: GgufFile) -> ModelManifest | None:
        """The manifest of the model that came from this address, if its header says the same still."""
        for digest in self._digests():
            with contextlib.suppress(ModelUnusable):
                known = self._described(digest)
                if known.source == url and moved_manifest(known.manifest, gguf) == known.manifest:
                    return known.manifest
        return None

    def _prepare(self) -> None:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ModelUnusable(f"{self._directory} cannot be made: {error.strerror or error}") from error

    def list(self) -> tuple[StoredModel, ...]:
        """Every usable model, by name. Rests of an interrupted `add` are not among them."""
        return self.list_with_damage()[0]

    def list_with_damage(self) -> tuple[tuple[StoredModel, ...], tuple[str, ...]]:
        """Every usable model, by name, and a sentence for each that was added once and is damaged."""
        models, damage = [], []
        for each in self._digests():
            try:
                models.append(self._load(each))
            except ModelUnusable as error:
                # The entry is written last: without one this is the rest of an interrupted `add`.
                if (self._directory / each / _ENTRY).exists():
                    damage.append(str(error))
        return tuple(sorted(models, key=lambda each: (each.name, each.digest))), tuple(damage)

    def get(self, name: str) -> StoredModel:
        """The model called `name`, or whose digest begins with it (6 digits at least).

        The demo model is taken in now where it is meant and nothing else has its name. Raises `ModelUnusable`
        when there is none, more than one, or it is damaged.
        """
        named = [each for each in self.list() if name in (each.name, each.manifest.name)]
        if not named and len(name) >= DIGEST_PREFIX_LENGTH_MIN:
            named = [self._load(each) for each in self._digests() if each.startswith(name.lower())]
        if len(named) > 1:
            digests = ", ".join(each.digest[:12] for each in named)
            raise ModelUnusable(f"{name!r} means several models; give one of these digests: {digests}")
        if not named and name in _DEMO_NAMES:
            return self.add(DEMO_MODEL)
        if not named:
            raise ModelUnusable(f"there is no model {name!r} here; add one with 'kvasir-node models add'")
        return named[0]

    def mended(self, digest: str) -> StoredModel | None:
        """The model of this digest, its backbone file made again if even its header is damaged.

        None when there is none, or its entry or manifest is damaged. Raises `ModelUnusable` as
        `StoredModel.verified_backbone_path` does.
        """
        try:
            model = self._described(digest)
        except ModelUnusable:
            return None
        model.verified_backbone_path()
        return model

    def remove(self, model: StoredModel) -> None:
        """Remove all that is here of a model; its file stays where the user has it."""
        with _locked(self._directory):
            (model.manifest_path.with_name(_ENTRY)).unlink(missing_ok=True)
            shutil.rmtree(model.manifest_path.parent)

    def _digests(self) -> tuple[str, ...]:
        """The digests that have a directory here, whatever is in it."""
        try:
            names = [each.name for each in self._directory.iterdir()]
        except OSError:
            return ()
        return tuple(sorted(each for each in names if _DIGEST.fullmatch(each)))

    def _unchanged(self, path: Path, identity: tuple[int, ...]) -> StoredModel | None:
        """The stored model that was made from this very file, if there is one."""
        for digest in self._digests():
            with contextlib.suppress(ModelUnusable):
                entry = self._entry(digest)
                if entry["source"] == str(path) and entry["source_identity"] == list(identity):
                    return self._load(digest)
        return None

    def _build(
        self,
        source: Location,
        identity: tuple[int, ...],
        manifest: ModelManifest,
        on_bytes: Callable[[int], None],
        judge: Callable[[Path], None] | None,
    ) -> StoredModel:
        """Make or mend the directory of one model, the entry last."""
        directory = self._directory / manifest.digest().hex()
        directory.mkdir(mode=0o700, exist_ok=True)
        backbone = directory / _BACKBONE
        try:
            _check_backbone(backbone, manifest)
        except ModelUnusable:
            backbone.unlink(missing_ok=True)
            needed = manifest.data_offset + manifest.trunk_size_bytes()
            _require_space(directory, needed, "the backbone file")
            write_backbone_file(source, manifest, backbone, on_bytes)
            _VERIFIED.remember(backbone, _sha256_of(manifest))
        try:
            _ask(judge, source, backbone)
        except ModelUnusable:
            if not (directory / _ENTRY).exists():  # nothing is kept of what was never added
                shutil.rmtree(directory, ignore_errors=True)
            raise
        return self._described_as(directory, source, identity, manifest)

    def _described_as(
        self, directory: Path, source: Location | None, identity: tuple[int, ...], manifest: ModelManifest
    ) -> StoredModel:
        """Write what tells that the model in this directory is whole."""
        encoded = manifest.encode()
        with new_file(directory / _MANIFEST) as file:
            file.write(encoded)
        entry = {
            "schema_version": ENTRY_SCHEMA_VERSION,
            "name": manifest.name if source is None else model_name(source),
            "source": source.url if isinstance(source, ModelUrl) else str(source or ""),
            "source_identity": identity,
            "manifest_sha256": hashlib.sha256(encoded).hexdigest(),
        }
        with new_file(directory / _ENTRY) as file:
            file.write(json.dumps(entry, indent=1).encode())
        return self._load(directory.name)

    def _load(self, digest: str) -> StoredModel:
        """The model of one directory, after checks that read no weights."""
        model = self._described(digest)
        if model.source is None:
            return model
        backbone = read_gguf(model.backbone_path)
        expected = backbone_tensors(model.manifest)
        if [(each.name, each.type, each.shape) for each in backbone.tensors] != expected:
            raise ModelUnusable(f"{backbone.path} is damaged: it does not have the manifest's tensors")
        return model

    def _described(self, digest: str) -> StoredModel:
        """The model of one directory by its entry and manifest, whatever is in its backbone file."""
        directory = self._directory / digest
        with memory_for(directory / _MANIFEST):
            return self._read_description(directory, digest)

    def _read_description(self, directory: Path, digest: str) -> StoredModel:
        entry = self._entry(digest)
        try:
            data = _read_bounded(directory / _MANIFEST, MANIFEST_SIZE_BYTES_MAX)
            manifest = ModelManifest.decode(data)
        except RemoteProtocolError as error:
            raise ModelUnusable(f"{directory / _MANIFEST} is damaged: {error.reason}") from error
        if manifest.digest().hex() != digest:
            raise ModelUnusable(f"{directory / _MANIFEST} is damaged: its digest is not its name")
        if hashlib.sha256(data).hexdigest() != entry["manifest_sha256"]:
            raise ModelUnusable(f"{directory / _MANIFEST} is damaged: it is not the one that was written")
        return StoredModel(
            name=str(entry["name"]),
            digest=digest,
            manifest=manifest,
            manifest_path=directory / _MANIFEST,
            backbone_path=directory / _BACKBONE,
            source=location_of(str(entry["source"])) if entry["source"] else None,
        )

    def _entry(self, digest: str) -> dict[str, Any]:
        """The entry file's fields; `ModelUnusable` when it is missing or not one of ours."""
        path = self._directory / digest / _ENTRY
        try:
            entry = json.loads(_read_bounded(path, _ENTRY_SIZE_BYTES_MAX))
            if entry["schema_version"] != ENTRY_SCHEMA_VERSION:
                raise ModelUnusable(f"{path} was written by another version of Kvasir")
            known = {"name": entry["name"], "source": entry["source"]}
            if not all(isinstance(each, str) for each in known.values()) or not known["name"]:
                raise ModelUnusable(f"{path} is damaged: a name is not a text")
            location_of(known["source"])
            return known | {each: entry[each] for each in ("source_identity", "manifest_sha256")}
        except (ValueError, KeyError, TypeError, RecursionError, UsageError) as error:
            raise ModelUnusable(f"{path} is damaged: it is not an entry") from error


class _PulledBytes:
    """What a pull has had of a model's bytes before, and what it writes them to (`PartsHad`, `CopyOf`).

    A context manager. Nothing is believed that is not in the journal, nor any bytes that are not as it says.
    """

    def __init__(self, gguf: GgufFile, staging: Path, experts: ExpertFiles | None) -> None:
        """``experts``: where they go; None where they are not kept."""
        self._gguf = gguf
        self._staging = staging
        self._experts = experts
        self._journal: PullJournal | None = None
        self._backbone = BackboneCopy(gguf, staging / _BACKBONE)

    def begin(self, versions: tuple[str, ...]) -> None:
        """See `PartsHad`."""
        gguf = self._gguf
        identity = (str(gguf.path), gguf.header_sha256.hex(), str(gguf.size_bytes), *versions)
        if all(versions):  # otherwise nothing tells whether it is the same file the next time
            self._journal = PullJournal(self._staging, identity)
        if self._journal is None or not self._journal.has_begun or self._experts is None:
            shutil.rmtree(self._staging / EXPERTS_DIRECTORY, ignore_errors=True)

    def may_have(self, tensor: GgufTensor, part: int) -> bool:
        """See `PartsHad`."""
        return self._journal is not None and self._journal.digest_of(tensor.name, part) is not None

    def digest_of(self, tensor: GgufTensor, part: int) -> bytes | None:
        """See `PartsHad`."""
        digest = None if self._journal is None else self._journal.digest_of(tensor.name, part)
        if digest is None or self._is_here(tensor, part, digest):
            return digest
        return None

    def _is_here(self, tensor: GgufTensor, part: int, digest: bytes) -> bool:
        if not is_expert_name(tensor.name):
            return self._backbone.is_here(tensor, digest)
        if self._experts is None:
            return True  # its bytes are wanted by nobody, and its digest is of what came
        path = self._experts.path_of(tensor.name, part)
        return has_digest(path, 0, tensor.size_bytes // tensor.shape[-1], digest)

    def note(self, tensor: GgufTensor, part: int, digest: bytes) -> None:
        """See `PartsHad`."""
        if self._journal is not None:
            self._journal.note(tensor.name, part, digest)

    def copy_of(self, tensor: GgufTensor, part: int) -> AbstractContextManager[BinaryIO | None]:
        """See `CopyOf`."""
        if self._experts is not None and is_expert_name(tensor.name):
            return self._experts.writing(tensor.name, part)
        return self._backbone.copy_of(tensor, part)

    def finish(self) -> None:
        """Everything has come: what is left are the model's files."""
        self._backbone.finish()
        (self._staging / JOURNAL).unlink(missing_ok=True)
        for path in self._staging.rglob(f"*{PARTIAL_SUFFIX}"):
            path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._backbone.__exit__(kind, error, trace)
        if self._journal is not None:
            self._journal.close()


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Nobody else adds to the store at `directory` meanwhile; waits for who does. What others left behind
    that were killed goes, but for what a pull has had of a model in the last days.
    """
    with _alone_with(directory / ".lock"):
        for model in directory.glob("*/"):
            remove_leftovers(model)
        for staging in directory.glob(f"{PARTIAL_PREFIX}*"):
            if not _is_used(staging) and not _may_be_gone_on_with(staging):
                shutil.rmtree(staging, ignore_errors=True)
        yield


@contextlib.contextmanager
def _alone_with(path: Path) -> Iterator[None]:
    """Nobody else has this file locked meanwhile; waits for who does."""
    try:
        with open(path, "a", opener=_open_unless_pipe) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise ModelUnusable(f"{path.parent} cannot be used: {error.strerror or error}") from error


@contextlib.contextmanager
def _staging(directory: Path, url: ModelUrl | None) -> Iterator[Path]:
    """A directory for what has no name yet; it goes with the block, or, where its process has ended, when
    the lock is next taken.

    That of a pull of all that is at `url` stays for the next one, until all has come. Of two at once the
    second has one of its own, and begins anew.
    """
    try:
        with _locked(directory):
            staging = _directory_of_pull(directory, url) if url is not None else None
            if staging is None or (staging.exists() and _is_used(staging)):
                staging = Path(tempfile.mkdtemp(prefix=PARTIAL_PREFIX, dir=directory))
            staging.mkdir(mode=0o700, exist_ok=True)
            handle = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield staging
        finally:
            if not _may_be_gone_on_with(staging):
                shutil.rmtree(staging, ignore_errors=True)
            os.close(handle)
    except OSError as error:
        raise ModelUnusable(f"{directory} cannot be used: {error.strerror or error}") from error


def _may_be_gone_on_with(staging: Path) -> bool:
    """Whether what a pull left here is for the next one: something came of it, and not too long ago."""
    if not staging.name.startswith(_PULL_PREFIX):
        return False
    try:
        age_s = time.time() - (staging / JOURNAL).stat().st_mtime
    except OSError:
        return False
    return age_s < PULL_KEPT_S


def _directory_of_pull(directory: Path, url: ModelUrl) -> Path:
    """Where a pull of this address has what came; an address that is signed anew each time is one."""
    return directory / (_PULL_PREFIX + hashlib.sha256(str(url).encode()).hexdigest()[:16])


def _is_used(staging: Path) -> bool:
    """Whether the process that made this directory is still at it."""
    try:
        handle = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _open_unless_pipe(path: str, flags: int) -> int:
    """As `open` does, but for a pipe in the file's place, where it would wait for a reader."""
    return os.open(path, flags | os.O_NONBLOCK, 0o600)


def _counted(progress: Progress | None, total: int, done: int = 0) -> Callable[[int], None]:
    """A function that is told the size of each piece, and tells `progress` (bytes done, `total`)."""

    def add(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        if progress is not None:
            progress(done, total)

    return add


def _check_backbone(path: Path, manifest: ModelManifest) -> None:
    """Raise `ModelUnusable` unless the backbone file is right, reading it unless that is known."""
    _VERIFIED.check(path, _sha256_of(manifest), lambda: verify_backbone_file(path, manifest))


def _sha256_of(manifest: ModelManifest) -> str:
    """What a file was compared with: not the model's name, for a file of it may be laid out otherwise."""
    return hashlib.sha256(manifest.encode()).hexdigest()


def _ask(judge: Callable[[Path], None] | None, source: Location, backbone: Path) -> None:
    """Show the backbone file to `judge`; its refusal names the file that the user knows."""
    if judge is not None:
        try:
            judge(backbone)
        except ModelUnusable as error:
            raise ModelUnusable(f"{source} cannot be used: {error}") from error


def _require_space(directory: Path, needed_bytes: int, what: str) -> None:
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes + SPARE_BYTES:
        raise ModelUnusable(
            f"there is no space for {what} in {directory}: it takes {needed_bytes >> 20} MiB and "
            f"{SPARE_BYTES >> 20} MiB must stay free, but only {free_bytes >> 20} MiB are"
        )


def _read_bounded(path: Path, size_bytes_max: int) -> bytes:
    try:
        return read_small_file(path, size_bytes_max)
    except OSError as error:
        raise ModelUnusable(f"{path} cannot be read: {error.strerror or error}") from error
