"""What a node remembers of its swarm on disk: manifest, ways into it, recovery key, what its core persisted.

Every file appears whole or not at all and survives a power cut once written: a vote or a fence that could be
forgotten is worth nothing. Files that hold keys or secrets can be read by this user only. What is written
raises `DiskFull` when there is no room, `ConfigurationInvalid` when it may not be written; what was there
before is kept then. What a slot holds is its core's affair; nothing here decides who may be backbone.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple, get_args

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node.durable_file import durable_file, remove_leftovers, unwritable
from kvasir_node.sealed_file import is_sealed, seal, unseal
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
"""Whose the slots are: a swarm's digest and a node id. What was promised there and so counts nowhere else."""
_OF_EARLIER_BUILDS: Final = "term-proof"
"""A file that only builds without elections wrote."""
_SLOTS: Final[tuple[Slot, ...]] = get_args(Slot)
_REMEDIES: Final[dict[Slot, str]] = {
    "plan": "; remove it: the swarm tells it again",
    "records": "; remove it: the swarm tells it again",
    "verdicts": "; remove it: what is wrong with a node is found again",
}
"""What may be lost; of the other slots some hold a vote or a fence, which must never be forgotten."""
_FILE_SIZE_MAX: Final = 4 << 20
"""Bytes of the largest slot: all that was ever revoked in a swarm."""


class KnownSwarm(NamedTuple):
    """The swarm that a home belongs to, and its manifest as it was signed."""

    swarm: FoundedSwarm
    signed_manifest: bytes


class SwarmFiles:
    """The swarm's files in one directory, which only this user can read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def check_undamaged(self) -> None:
        """Read every file that a daemon will need, so that damage ends its start and not each later attempt.

        Raises `ConfigurationInvalid` with the name of the first file that is damaged or cannot be read.
        """
        if self._exists(_OF_EARLIER_BUILDS):
            raise ConfigurationInvalid(
                f"{self._directory} was made by a build without elections: found or join a swarm in a "
                "new --home"
            )
        self._load_generation()
        self.load_swarm()
        self._load_owner()
        self.load_invite()
        self.load_bootstrap()
        for slot, data in self.load_slots().items():
            try:
                check_readable(slot, data)
            except RemoteProtocolError as error:
                raise self.slot_damaged(slot, str(error)) from error

    def slot_damaged(self, slot: Slot, reason: str) -> ConfigurationInvalid:
        """The error, with the path, for a slot that does not hold what a core persisted, for ``reason``."""
        path = self._directory / _name_of(slot)
        return ConfigurationInvalid(f"{path} is damaged: {reason}{_REMEDIES.get(slot, '')}")

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
        if self.has_slots():
            raise ConfigurationInvalid(
                f"{self._directory} has votes and fences of a swarm whose {_MANIFEST} is missing: put back a "
                "copy of that file, or found another swarm in another --home"
            )

    def has_slots(self) -> bool:
        """Whether anything that a core persisted is here."""
        return any(self._slots_here())

    def _slots_here(self) -> list[Slot]:
        return [slot for slot in _SLOTS if self._exists(_name_of(slot))]

    def claim_slots(self, swarm: SwarmDigest, node_id: NodeId) -> None:
        """Have the slots belong to this node in this swarm; to be called before they are used.

        Those that earlier builds wrote get their checksums.

        Raises `ConfigurationInvalid` where they are another's: a node that took over votes and fences that it
        never gave would neither keep those promises nor its own.
        """
        self.require_owner(swarm, node_id)
        if self._load_owner() is None:
            self._write(_OWNER, f"{swarm.hex()} {node_id}\n".encode())
        for slot in self._slots_here():
            file = self._read(_name_of(slot))
            if not is_sealed(file):
                self.save_slot(slot, file)

    def require_owner(self, swarm: SwarmDigest, node_id: NodeId | None) -> None:
        """Raise `ConfigurationInvalid` where the slots are of another swarm, or of another node than this."""
        owner = self._load_owner()
        if owner is None:
            return
        away = f"or move the files slot-* and {_OWNER} out of {self._directory}"
        if node_id is not None and owner[1] != node_id:
            raise ConfigurationInvalid(
                f"what {self._directory} remembers is node {owner[1]}'s, and the identity of this home is "
                f"{node_id}: put back the identity, {away} to be a new node"
            )
        if owner[0] != swarm:
            raise ConfigurationInvalid(
                f"what {self._directory} remembers is of swarm {owner[0].hex()[:12]}, and this is swarm "
                f"{swarm.hex()[:12]}: use another --home, {away} to forget the other swarm"
            )

    def _load_owner(self) -> tuple[SwarmDigest, NodeId] | None:
        if not self._exists(_OWNER):
            return None
        digest, _, node_id = self._read(_OWNER).decode("ascii", "replace").strip().partition(" ")
        if not re.fullmatch("[0-9a-f]{64}", digest) or not is_node_id(node_id):
            raise ConfigurationInvalid(f"{self._directory / _OWNER} is damaged: put back a copy of it")
        return SwarmDigest(bytes.fromhex(digest)), NodeId(node_id)

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

        Raises `ConfigurationInvalid` for a file that cannot be read, or whose checksum is not its content's.
        """
        return {slot: self._load_slot(slot) for slot in self._slots_here()}

    def _load_slot(self, slot: Slot) -> bytes:
        file = self._read(_name_of(slot))
        if not is_sealed(file):
            return file  # an earlier build's, or damaged, and then no message any more
        try:
            return unseal(slot, file)
        except ValueError as error:
            raise self.slot_damaged(slot, str(error)) from error

    def remove_leftovers(self) -> None:
        """Remove what writers that were killed have left half written here."""
        remove_leftovers(self._directory)

    def save_slot(self, slot: Slot, data: bytes) -> None:
        """Make this the whole content of a slot; returns when it would survive a power cut."""
        self._write(_name_of(slot), seal(slot, data))

    def next_generation(self) -> int:
        """A number for the next engine, higher than any before on this home."""
        generation = self._load_generation() + 1
        self._write(_GENERATION, seal(_GENERATION, str(generation).encode()))
        return generation

    def _load_generation(self) -> int:
        path = self._directory / _GENERATION
        if not self._exists(_GENERATION):
            return 0
        text = self._read(_GENERATION)
        if is_sealed(text):  # else an earlier build's, or damaged, and then no count any more
            try:
                text = unseal(_GENERATION, text)
            except ValueError as error:
                raise ConfigurationInvalid(f"{path} is damaged: {error}") from error
        if not text.isdigit() or len(text) > 19 or int(text) >= INT63_MAX:
            raise ConfigurationInvalid(f"{path} is damaged: it is not a count")
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
