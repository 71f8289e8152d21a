"""What a node remembers of its swarm on disk: manifest, ways into it, recovery key, what its core persisted.

Every file appears whole or not at all and survives a power cut once written: a vote or a fence that could be
forgotten is worth nothing. Files that hold keys or secrets can be read by this user only. What is written
raises `DiskFull` when there is no room, `ConfigurationInvalid` when it may not be written; what was there
before is kept then. What a slot holds is its core's affair; nothing here decides who may be backbone.

The first time that a slot with a promise is saved, `slots-owner` notes it, after the slot and before anybody
is told: a power cut between the two leaves a slot more than was noted, which is taken, and never one less.
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node.durable_file import durable_file, remove_leftovers, unwritable
from kvasir_node.sealed_file import seal, unseal
from kvasir_node.slot_saves import SLOTS, SavedSlot, last_saves, pack, unpack, whose
from kvasir_node.small_file import read_small_file
from kvasir_proto.admission import Invite, parse_invite
from kvasir_proto.effects import Slot
from kvasir_proto.errors import ConfigurationInvalid, RemoteProtocolError
from kvasir_proto.ids import ModelDigest, NodeId, SwarmDigest, is_node_id
from kvasir_proto.limits import ADDRESSES_MAX, INT63_MAX
from kvasir_proto.stored_slots import check_readable
from kvasir_proto.swarm_manifest import (
    AdmissionRule,
    CertificateRule,
    ElectorateRule,
    FoundedSwarm,
    SwarmManifest,
    Thresholds,
    open_swarm_manifest,
    sign_swarm_manifest,
)

REFERENCE_CLASS: Final = "ggml-activations"
"""The activation formats the swarm's kernels share: those that ggml's CPU backend rounds to."""

_MANIFEST: Final = "swarm-manifest"
_INVITE: Final = "invite"
_BOOTSTRAP: Final = "bootstrap"
_RECOVERY_KEY: Final = "recovery-key"
_GENERATION: Final = "engine-generation"
_OWNER: Final = "slots-owner"
"""Whose the slots are, and which have been saved: what was promised there and so counts nowhere else."""
_OWNER_OF_EARLIER_BUILDS: Final = re.compile(rb"[0-9a-f]{64} [0-9A-Za-z]+\n")
_OF_EARLIER_BUILDS: Final = "term-proof"
"""A file that only builds without elections wrote."""
_RETOLD: Final[dict[Slot, str]] = {
    "plan": "remove it: the swarm tells it again",
    "records": "remove it: the swarm tells it again",
    "verdicts": "remove it: what is wrong with a node is found again",
}
"""What may be lost, and why; of other slots some hold a vote or a fence, which must never be forgotten."""
_PROMISE_LOST: Final = (
    "put it back as it was last, not an older copy; where there is none, enter or found a swarm in a new "
    "--home, as a new node (going on without it forgets what this node promised, and two backbones could "
    "serve)"
)
_FILE_SIZE_MAX: Final = 4 << 20
"""Bytes of the largest slot: all that was ever revoked in a swarm."""


class KnownSwarm(NamedTuple):
    """The swarm that a home belongs to, and its manifest as it was signed."""

    swarm: FoundedSwarm
    signed_manifest: bytes


class _Owner(NamedTuple):
    """What `slots-owner` says. `saved`: the names of the files that must be here."""

    swarm: SwarmDigest
    node_id: NodeId
    saved: frozenset[str]


class SwarmFiles:
    """The swarm's files in one directory, which only this user can read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._saving = threading.Lock()
        self._last_saves: dict[Slot, int] | None = None
        """The number of each slot's last save, once this object has looked."""

    def check_undamaged(self) -> None:
        """Read every file that a daemon will need, so that damage ends its start and not each later attempt.

        Raises `ConfigurationInvalid` with the name of the first file that is damaged or cannot be read.
        """
        if self._exists(_OF_EARLIER_BUILDS):
            raise ConfigurationInvalid(
                f"{self._directory} was made by a build without elections: found or join a swarm in a "
                "new --home"
            )
        self._load_owner()
        self._load_generation()
        known, invite = self.load_swarm(), self.load_invite()
        if known is not None and invite is not None and invite.swarm != known.swarm.digest:
            raise ConfigurationInvalid(
                f"{self._directory / _INVITE} is for another swarm than {known.swarm.digest.hex()[:12]}, "
                "which this home belongs to: remove it, and enter the other swarm with another --home"
            )
        self.load_bootstrap()
        for slot, data in self.load_slots().items():
            try:
                check_readable(slot, data)
            except RemoteProtocolError as error:
                reason = f"it has nothing that this build can read ({error})"
                raise self.slot_damaged(slot, reason) from error

    def slot_damaged(self, slot: Slot, reason: str) -> ConfigurationInvalid:
        """The error, with path and remedy, for a slot without what a core persisted, for ``reason``."""
        return self._unusable(_name_of(slot), f"is damaged: {reason}")

    def _unusable(self, name: str, what: str) -> ConfigurationInvalid:
        """The error for a file with what this node remembers; ``what`` follows its path."""
        remedies = {_name_of(slot): remedy for slot, remedy in _RETOLD.items()}
        return ConfigurationInvalid(f"{self._directory / name} {what}; {remedies.get(name, _PROMISE_LOST)}")

    @property
    def recovery_key_file(self) -> Path:
        """Where `found` wrote the recovery key."""
        return self._directory / _RECOVERY_KEY

    def is_founder(self, node_key: Ed25519PrivateKey) -> bool:
        """Whether this identity founded the swarm of this home."""
        known = self.load_swarm()
        public_key = node_key.public_key().public_bytes_raw()
        return known is not None and known.swarm.manifest.founder_public_key == public_key

    def found(
        self,
        node_key: Ed25519PrivateKey,
        model_digest: bytes,
        model_name: str,
        *,
        compact_activations: bool = False,
        partial_sums: bool = False,
        admission: AdmissionRule = "open",
        electorate: ElectorateRule = "open",
        certificates: CertificateRule = "claimed",
    ) -> KnownSwarm:
        """Found a swarm for a model, once. The recovery key is written beside; keep it off the node.

        Raises `ConfigurationInvalid` like `check_unfounded`.
        """
        self.check_unfounded()
        recovery_key = self._recovery_key()
        manifest = SwarmManifest(
            model_digest=ModelDigest(model_digest),
            model_name=model_name,
            reference_class=REFERENCE_CLASS,
            thresholds=Thresholds(),
            admission=admission,
            compact_activations=compact_activations,
            partial_sums=partial_sums,
            founder_public_key=node_key.public_key().public_bytes_raw(),
            recovery_public_key=recovery_key.public_key().public_bytes_raw(),
            electorate=electorate,
            certificates=certificates,
        )
        signed = sign_swarm_manifest(manifest, node_key)
        self._write(_MANIFEST, signed)
        return KnownSwarm(open_swarm_manifest(signed), signed)

    def _recovery_key(self) -> Ed25519PrivateKey:
        """A new one, kept; or the one that is here, of a founding that did not end: none is written over."""
        if not self._exists(_RECOVERY_KEY):
            self._write(_RECOVERY_KEY, Ed25519PrivateKey.generate().private_bytes_raw())
        try:
            return Ed25519PrivateKey.from_private_bytes(self._read(_RECOVERY_KEY))
        except ValueError:
            path = self._directory / _RECOVERY_KEY
            raise ConfigurationInvalid(f"{path} is damaged: it is not a key; move it away") from None

    def check_unfounded(self) -> None:
        """Raise `ConfigurationInvalid` unless a swarm can be founded here: a home stays in its swarm."""
        known = self.load_swarm()
        if known is not None:
            raise ConfigurationInvalid(
                f"this home belongs to swarm {known.swarm.digest.hex()[:12]} already ({self._directory}): "
                "found another one in another --home"
            )
        for name in (_INVITE, _BOOTSTRAP):
            if self._exists(name):
                raise ConfigurationInvalid(
                    f"this home was told to enter a swarm ({self._directory / name}): found another one in "
                    "another --home, or remove that file"
                )
        if self.has_slots():
            raise ConfigurationInvalid(
                f"{self._directory} has votes and fences of a swarm whose {_MANIFEST} is missing: put back a "
                "copy of that file, or found another swarm in another --home"
            )

    def has_slots(self) -> bool:
        """Whether anything that a core persisted is here."""
        return any(self._slots_here())

    def _slots_here(self) -> list[Slot]:
        return [slot for slot in SLOTS if self._exists(_name_of(slot))]

    def claim_slots(self, swarm: SwarmDigest, node_id: NodeId) -> None:
        """Have the slots belong to this node in this swarm; to be called before they are used.

        Raises `ConfigurationInvalid` where they are another's: a node that took over votes and fences that it
        never gave would neither keep those promises nor its own.
        """
        self.require_owner(swarm, node_id)
        with self._saving:
            owner = self._load_owner()
            promises_here = self._load_slots(owner).keys() - _RETOLD.keys()
            self._note_saved(owner or _Owner(swarm, node_id, frozenset()), map(_name_of, promises_here))

    def require_owner(self, swarm: SwarmDigest, node_id: NodeId | None) -> None:
        """Raise `ConfigurationInvalid` where the slots are of another swarm, or of another node than this."""
        owner = self._load_owner()
        if owner is None:
            return
        away = f"or move the files slot-* and {_OWNER} out of {self._directory}"
        if node_id is not None and owner.node_id != node_id:
            raise ConfigurationInvalid(
                f"what {self._directory} remembers is node {owner.node_id}'s, and the identity of this home "
                f"is {node_id}: put back the identity, {away} to be a new node"
            )
        if owner.swarm != swarm:
            raise ConfigurationInvalid(
                f"what {self._directory} remembers is of swarm {owner.swarm.hex()[:12]}, and this is swarm "
                f"{swarm.hex()[:12]}: use another --home, {away} to forget the other swarm"
            )

    def _load_owner(self) -> _Owner | None:
        if not self._exists(_OWNER):
            return None
        file = self._read(_OWNER)
        if _OWNER_OF_EARLIER_BUILDS.fullmatch(file):
            raise ConfigurationInvalid(
                f"{self._directory} is of a build before this one, and cannot be gone on with: enter or "
                "found a swarm in a new --home"
            )
        try:
            digest, node_id, *saved = unseal(_OWNER, file).decode("ascii").split()
            return _Owner(SwarmDigest(bytes.fromhex(digest)), NodeId(node_id), frozenset(saved))
        except ValueError as error:
            raise self._unusable(_OWNER, f"is damaged: {error}") from error

    def _note_saved(self, owner: _Owner, names: Iterable[str]) -> None:
        """Have these files be missed from now on. To be called when they are there, and before it is said."""
        saved = owner.saved.union(names)
        if saved != owner.saved or not self._exists(_OWNER):
            text = " ".join((owner.swarm.hex(), owner.node_id, *sorted(saved)))
            self._write(_OWNER, seal(_OWNER, text.encode("ascii")))

    def load_swarm(self) -> KnownSwarm | None:
        """The swarm of this home, or None. Raises `ConfigurationInvalid` when its manifest is damaged."""
        if not self._exists(_MANIFEST):
            return None
        signed = self._read(_MANIFEST)
        try:
            return KnownSwarm(open_swarm_manifest(signed), signed)
        except RemoteProtocolError as error:
            raise ConfigurationInvalid(f"{self._directory / _MANIFEST} is damaged: {error}") from error

    def save_swarm(self, signed_manifest: bytes) -> None:
        """Remember the swarm that was joined, so that this home is never taken into another one.

        Raises `ConfigurationInvalid` where the slots are another swarm's.
        """
        if self._exists(_OWNER):
            self.require_owner(open_swarm_manifest(signed_manifest).digest, None)
        self._write(_MANIFEST, signed_manifest)

    def load_invite(self) -> Invite | None:
        """The invite that was given to this home, or None. Raises `ConfigurationInvalid` when damaged."""
        if not self._exists(_INVITE):
            return None
        try:
            return parse_invite(self._read(_INVITE).decode("ascii", "replace"))
        except RemoteProtocolError as error:
            raise ConfigurationInvalid(f"{self._directory / _INVITE} is damaged: {error}") from error

    def save_invite(self, text: str) -> None:
        """Keep an invite, whose text was parsed, for the next start; it replaces one given before.

        Raises `ConfigurationInvalid` where this home belongs to another swarm.
        """
        invite, known = parse_invite(text), self.load_swarm()
        if known is not None and known.swarm.digest != invite.swarm:
            raise ConfigurationInvalid(
                f"this home belongs to swarm {known.swarm.digest.hex()[:12]}, and the invite is for another: "
                "use another --home"
            )
        self._write(_INVITE, "".join(text.split()).encode("ascii"))

    def load_bootstrap(self) -> tuple[str, ...]:
        """Addresses of members that this home was told to enter by, the newest first.

        Raises `ConfigurationInvalid` when the file is damaged.
        """
        if not self._exists(_BOOTSTRAP):
            return ()
        addresses = tuple(self._read(_BOOTSTRAP).decode("utf-8", "replace").split())
        if len(addresses) > ADDRESSES_MAX or not all(
            is_node_id(each.rpartition("/p2p/")[2]) for each in addresses
        ):
            raise ConfigurationInvalid(f"{self._directory / _BOOTSTRAP} is damaged: it has no addresses")
        return addresses

    def save_bootstrap(self, addresses: Iterable[str]) -> None:
        """Keep these members' addresses, and of those given before as many as there is room for."""
        kept = list(dict.fromkeys((*addresses, *self.load_bootstrap())))[:ADDRESSES_MAX]
        self._write(_BOOTSTRAP, "".join(f"{each}\n" for each in kept).encode())

    def load_slots(self) -> dict[Slot, bytes]:
        """What the core persisted, by slot.

        Raises `ConfigurationInvalid` for a file that cannot be read, or whose checksum is not its content's;
        that is another node's, or of another swarm; for a promise that is missing, or older than another slot
        has seen it.
        """
        return {slot: saved.data for slot, saved in self._load_slots(self._load_owner()).items()}

    def _load_slots(self, owner: _Owner | None) -> dict[Slot, SavedSlot]:
        here = self._slots_here()
        if owner is None:
            if here:
                raise self._unusable(_OWNER, "is missing")
            return {}
        slots = {slot: self._load_slot(slot, whose(owner.swarm, owner.node_id)) for slot in here}
        last = last_saves(slots.values())
        for slot in SLOTS:
            if slot in _RETOLD:
                continue
            name = _name_of(slot)
            if slot not in slots and (last[slot] or name in owner.saved):
                raise self._unusable(name, "is missing")
            if slot in slots and slots[slot].numbers[slot] < last[slot]:
                raise self._unusable(name, "is an older copy: other slots were saved after a newer one")
        self._last_saves = last
        return slots

    def _load_slot(self, slot: Slot, owner: bytes) -> SavedSlot:
        try:
            saved = unpack(unseal(slot, self._read(_name_of(slot))))
        except ValueError as error:
            raise self.slot_damaged(slot, str(error)) from error
        if saved.whose != owner:
            raise self._unusable(_name_of(slot), "is another node's, or of another swarm")
        return saved

    def remove_leftovers(self) -> None:
        """Remove what writers that were killed have left half written here."""
        remove_leftovers(self._directory)

    def save_slot(self, slot: Slot, data: bytes) -> None:
        """Make this the whole content of a slot; returns when it would survive a power cut.

        Raises `ConfigurationInvalid` also where nobody has claimed the slots.
        """
        name = _name_of(slot)
        with self._saving:
            owner = self._load_owner()
            if owner is None:
                raise self._unusable(_OWNER, "is missing")
            if self._last_saves is None:
                self._load_slots(owner)
            assert self._last_saves is not None
            numbers = self._last_saves | {slot: max(self._last_saves.values()) + 1}
            self._write(name, seal(slot, pack(SavedSlot(whose(owner.swarm, owner.node_id), numbers, data))))
            self._last_saves = numbers
            if slot not in _RETOLD:
                self._note_saved(owner, [name])

    def next_generation(self) -> int:
        """A number for the next engine, higher than any before on this home."""
        with self._saving:
            owner, generation = self._load_owner(), self._load_generation() + 1
            self._write(_GENERATION, seal(_GENERATION, str(generation).encode()))
            if owner is not None:
                self._note_saved(owner, [_GENERATION])
            return generation

    def _load_generation(self) -> int:
        if not self._exists(_GENERATION):
            owner = self._load_owner()
            if owner is not None and _GENERATION in owner.saved:
                raise self._unusable(_GENERATION, "is missing")
            return 0
        try:
            text = unseal(_GENERATION, self._read(_GENERATION))
        except ValueError as error:
            raise self._unusable(_GENERATION, f"is damaged: {error}") from error
        if not text.isdigit() or len(text) > 19 or int(text) >= INT63_MAX:
            raise self._unusable(_GENERATION, "is damaged: it is not a count")
        return int(text)

    def _exists(self, name: str) -> bool:
        """Whether there is such a file; a directory that hides it is no answer (`ConfigurationInvalid`)."""
        path = self._directory / name
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise ConfigurationInvalid(f"{path} cannot be read: {error.strerror or error}") from error
        return True

    def _read(self, name: str) -> bytes:
        path = self._directory / name
        try:
            return read_small_file(path, _FILE_SIZE_MAX)
        except OSError as error:
            what = "is damaged" if error.errno == errno.EFBIG else "cannot be read"
            raise ConfigurationInvalid(f"{path} {what}: {error.strerror or error}") from error

    def _write(self, name: str, data: bytes) -> None:
        path = self._directory / name
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with durable_file(path) as file:
                file.write(data)
        except OSError as error:
            raise unwritable(f"{path} cannot be written", error) from error


def _name_of(slot: Slot) -> str:
    return f"slot-{slot}"
