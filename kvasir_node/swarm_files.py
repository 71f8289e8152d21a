"""What a node remembers of its swarm on disk: manifest, term proof, fence, plan, recovery key.

Every file appears whole or not at all and survives a power cut once written: a vote or a fence that could be
forgotten is worth nothing. Files that hold keys can be read by this user only. What is written raises
`DiskFull` when there is no room, `ConfigurationInvalid` when it may not be written; what was there before is
kept then. It decides nothing about who may be backbone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node.durable_file import durable_file, unwritable
from kvasir_proto.errors import ConfigurationInvalid, RemoteProtocolError
from kvasir_proto.ids import ModelDigest, node_id_of
from kvasir_proto.limits import INT63_MAX, SIGNED_SIZE_MAX, UINT32_MAX
from kvasir_proto.placement.plan import Plan, open_plan
from kvasir_proto.swarm_manifest import (
    AdmissionRule,
    ElectorateRule,
    FoundedSwarm,
    SwarmManifest,
    Thresholds,
    open_swarm_manifest,
    sign_swarm_manifest,
)
from kvasir_proto.term_proof import (
    FOUNDING_EPOCH,
    FOUNDING_TERM,
    ProvenTerm,
    cast_vote,
    founding_electorate,
    make_term_proof,
    verify_term_proof,
)

REFERENCE_CLASS: Final = "ggml-activations"
"""The activation formats the swarm's kernels share: those that ggml's CPU backend rounds to."""

_MANIFEST: Final = "swarm-manifest"
_PROOF: Final = "term-proof"
_FENCE: Final = "fence.json"
_RECOVERY_KEY: Final = "recovery-key"
_GENERATION: Final = "engine-generation"
_PLAN: Final = "plan"


@dataclass(frozen=True, slots=True)
class Founding:
    """A swarm as its founder holds it: the signed manifest and the proof that it is backbone in (0, 1)."""

    swarm: FoundedSwarm
    signed_manifest: bytes
    term: ProvenTerm
    proof: bytes


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """The plan that was saved last, opened, and the signed bytes that it came from."""

    plan: Plan
    signed: bytes


class SwarmFiles:
    """The swarm's files in one directory, which only this user can read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def is_founder(self) -> bool:
        """Whether a swarm was founded here."""
        return self._exists(_PROOF)

    def check_undamaged(self, node_key: Ed25519PrivateKey) -> None:
        """Read every file that a daemon will need, so that damage ends its start and not each later attempt.

        Raises `ConfigurationInvalid` with the name of the first file that is damaged or cannot be read.
        """
        self.load()
        self._load_generation()
        if self.is_founder:
            self.load_plan(self.load_founding(node_key))
        else:
            self.load_joined()

    @property
    def recovery_key_file(self) -> Path:
        """Where `found` wrote the recovery key."""
        return self._directory / _RECOVERY_KEY

    def found(
        self,
        node_key: Ed25519PrivateKey,
        model_digest: bytes,
        model_name: str,
        *,
        compact_activations: bool = False,
        partial_sums: bool = False,
        admission: AdmissionRule = "open",
        electorate: ElectorateRule = "pinned",
    ) -> Founding:
        """Found a swarm for a model, once. The recovery key is written beside; keep it off the node.

        The founder's own signed vote is the proof of (0, 1); it is on disk before anybody hears of it. Raises
        `ConfigurationInvalid` like `check_unfounded`.
        """
        self.check_unfounded(node_key)
        public_key = node_key.public_key().public_bytes_raw()
        recovery_key = Ed25519PrivateKey.generate()
        manifest = SwarmManifest(
            model_digest=ModelDigest(model_digest),
            model_name=model_name,
            reference_class=REFERENCE_CLASS,
            thresholds=Thresholds(),
            admission=admission,
            compact_activations=compact_activations,
            partial_sums=partial_sums,
            founder_public_key=public_key,
            recovery_public_key=recovery_key.public_key().public_bytes_raw(),
            electorate=electorate,
        )
        signed = sign_swarm_manifest(manifest, node_key)
        swarm = open_swarm_manifest(signed)
        term = ProvenTerm(FOUNDING_EPOCH, FOUNDING_TERM, node_id_of(public_key))
        alone = founding_electorate(public_key)
        proof = make_term_proof(alone, term, [cast_vote(node_key, swarm.digest, alone, term)])
        self._write(_RECOVERY_KEY, recovery_key.private_bytes_raw())
        self._write(_MANIFEST, signed)
        self._write(_PROOF, proof)
        return Founding(swarm, signed, term, proof)

    def check_unfounded(self, node_key: Ed25519PrivateKey) -> None:
        """Raise `ConfigurationInvalid` unless a swarm can be founded here.

        A home stays in the swarm it founded or joined. A founding that was interrupted before its proof was
        written can be done again: nobody has heard of it.
        """
        if self.is_founder:
            raise ConfigurationInvalid(f"a swarm was founded here already: {self._directory}")
        joined = self.load_joined()
        if joined is None:
            return
        if joined.manifest.founder_public_key != node_key.public_key().public_bytes_raw():
            raise ConfigurationInvalid(
                f"this home belongs to swarm {joined.digest.hex()[:12]} already ({self._directory}): found "
                "another one in another --home"
            )

    def load_founding(self, node_key: Ed25519PrivateKey) -> Founding:
        """The swarm that was founded here. Raises `ConfigurationInvalid` when its files are damaged."""
        signed, proof = self._read(_MANIFEST), self._read(_PROOF)
        try:
            swarm = open_swarm_manifest(signed)
        except RemoteProtocolError as error:
            raise ConfigurationInvalid(f"{self._directory / _MANIFEST} is damaged: {error}") from error
        public_key = node_key.public_key().public_bytes_raw()
        if swarm.manifest.founder_public_key != public_key:
            raise ConfigurationInvalid(f"{self._directory} belongs to another identity")
        try:
            term = verify_term_proof(proof, swarm.digest, founding_electorate(public_key))
        except RemoteProtocolError as error:
            raise ConfigurationInvalid(f"{self._directory / _PROOF} is damaged: {error}") from error
        return Founding(swarm, signed, term, proof)

    def load_joined(self) -> FoundedSwarm | None:
        """The swarm this node joined before, or None. Raises `ConfigurationInvalid` when damaged."""
        if not self._exists(_MANIFEST):
            return None
        try:
            return open_swarm_manifest(self._read(_MANIFEST))
        except RemoteProtocolError as error:
            raise ConfigurationInvalid(f"{self._directory / _MANIFEST} is damaged: {error}") from error

    def save_joined(self, signed_manifest: bytes) -> None:
        """Remember the swarm that was joined, so that this home is never taken into another one."""
        self._write(_MANIFEST, signed_manifest)

    def load(self) -> tuple[int, int]:
        """The fence saved last, or (0, 0) (see `ports.FenceStore`)."""
        path = self._directory / _FENCE
        if not self._exists(_FENCE):
            return (0, 0)
        try:
            fields = json.loads(self._read(_FENCE))
            epoch, term = fields["epoch"], fields["term"]
            if type(epoch) is not int or type(term) is not int:
                raise ValueError("not two whole numbers")
            if not 0 <= epoch <= UINT32_MAX or not 0 <= term <= UINT32_MAX:
                raise ValueError("out of bounds")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigurationInvalid(f"{path} is damaged: {error}") from error
        return epoch, term

    def save(self, epoch: int, term: int) -> None:
        """Persist a fence; refuses to go back."""
        if (epoch, term) < self.load():
            raise ConfigurationInvalid(f"the fence in {self._directory} cannot go back to ({epoch}, {term})")
        self._write(_FENCE, json.dumps({"epoch": epoch, "term": term}).encode())

    def load_plan(self, founding: Founding) -> SavedPlan | None:
        """The plan saved last, or None. Raises `ConfigurationInvalid` when it is damaged."""
        path = self._directory / _PLAN
        if not self._exists(_PLAN):
            return None
        signed = self._read(_PLAN)
        try:
            return SavedPlan(open_plan(signed, founding.swarm.digest, founding.term.backbone), signed)
        except RemoteProtocolError as error:
            raise ConfigurationInvalid(f"{path} is damaged: {error}") from error

    def save_plan(self, signed_plan: bytes) -> None:
        """Persist a plan before anybody hears of it: a revision is never used for two plans."""
        self._write(_PLAN, signed_plan)

    def next_generation(self) -> int:
        """A number for the next engine, higher than any before on this home."""
        generation = self._load_generation() + 1
        self._write(_GENERATION, str(generation).encode())
        return generation

    def _load_generation(self) -> int:
        path = self._directory / _GENERATION
        if not self._exists(_GENERATION):
            return 0
        text = self._read(_GENERATION)
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
            with path.open("rb") as file:
                data = file.read(SIGNED_SIZE_MAX + 1)
        except OSError as error:
            raise ConfigurationInvalid(f"{path} cannot be read: {error.strerror or error}") from error
        if len(data) > SIGNED_SIZE_MAX:
            raise ConfigurationInvalid(f"{path} is damaged: it is larger than {SIGNED_SIZE_MAX} bytes")
        return data

    def _write(self, name: str, data: bytes) -> None:
        path = self._directory / name
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with durable_file(path) as file:
                file.write(data)
        except OSError as error:
            raise unwritable(f"{path} cannot be written", error) from error
