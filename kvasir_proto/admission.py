"""Who may be a member: invites, the credentials they are redeemed for, and what the founder's key took back.

An invite's secret is the seed of a key pair. Its issuer keeps the public half alone; who redeems it signs,
with the private half, that it is for one node at one issuer. So the secret is never said, not even to the
issuer; what is overheard or stolen from an issuer admits nobody; no nonce is needed, since a copy says the
same again. An invite is redeemed at its issuer and nowhere else: one node decides, in order, on disk before
it answers, which is what makes it count once; an issuer lost for good costs its open invites.

A credential is signed by an elector or the founder. It counts while its signer is an elector or was one as
far as this node knows; members renew at a present elector when theirs has left. A revocation counts for
good, in open swarms too; since gossip is lost on who is away, nodes compare what they know of them, and one
that has just started judges nobody before it has heard from an elector, or has waited long enough for one.
Whether a member computes well is not asked here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, NamedTuple, TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.capability import CapabilityRecord, has_expired
from kvasir_proto.codec import decode, encode
from kvasir_proto.effects import Effect, Now, Persist, Publish, Send
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.ids import NodeId, NodeIdField, SwarmDigest, SwarmDigestField, node_id_of, public_key_of
from kvasir_proto.instants import Duration, Instant, WallTime, after, seconds
from kvasir_proto.limits import (
    Address,
    Digest,
    Length,
    Nanoseconds,
    PublicKey,
    Rank,
    Sequence63,
    as_sentence,
)
from kvasir_proto.messages import Family
from kvasir_proto.messages.admission import (
    REVOCATIONS_A_MESSAGE_MAX,
    AdmissionMessage,
    Admitted,
    NotAdmitted,
    Redeem,
    Renew,
    Revocations,
    RevocationsRequest,
)
from kvasir_proto.signing import open_signed, sign_message
from kvasir_proto.swarm_manifest import FoundedSwarm

if TYPE_CHECKING:
    from random import Random

INVITES_MAX: Final = 256
"""Invites that one elector has open, or redeemed and not yet expired; one more is not issued."""
REVOCATIONS_MAX: Final = REVOCATIONS_A_MESSAGE_MAX
"""What can ever be revoked in a swarm. Only the founder's key revokes, so only it can use them up."""
FORMER_ELECTORS_MAX: Final = 64
"""Electors of the past whose credentials still count; beyond that those that left first are forgotten."""
CREDENTIAL_LIFETIME: Final[Duration] = seconds(90 * 24 * 3600)
RENEW_BEFORE: Final[Duration] = seconds(30 * 24 * 3600)
"""How long before its end a member asks for a newer one: a swarm without electors may last for so long."""
RETRY_INTERVAL: Final[Duration] = seconds(10)
"""How often a node asks again that was not answered: a redemption is one small message."""
CATCH_UP_PATIENCE: Final[Duration] = seconds(2)
"""How long a node that has started waits to be told what was revoked while it was away."""
COMPARE_INTERVAL: Final[Duration] = seconds(60)
"""How often a member compares with another what was revoked: two small messages, where they know the same."""
COMPARED_MAX: Final = 8
"""Nodes that are asked at a time."""
INVITE_PREFIX: Final = "kvasir-invite-1:"
_CHECKSUM_LENGTH: Final = 4
_SEED_DOMAIN: Final = b"kvasir/1 invite"

Ranks: TypeAlias = Annotated[tuple[Rank, ...], Length(1, 3)]
SecretBytes: TypeAlias = Annotated[bytes, Length(16, 16)]


@dataclass(frozen=True, slots=True)
class Invite:
    """What a person is handed: where to go, which swarm is the right one, the secret that admits one node."""

    kind: ClassVar[str] = "invite"
    swarm: SwarmDigestField
    electorate_digest: Digest
    issuer: NodeIdField
    secret: SecretBytes
    expires: Nanoseconds
    ranks: Ranks
    addresses: Annotated[tuple[Address, ...], Length(1, 8)]


@dataclass(frozen=True, slots=True)
class Redemption:
    """Signed with an invite's key: it is for this node, at this issuer."""

    kind: ClassVar[str] = "redemption"
    node_id: NodeIdField
    issuer: NodeIdField


@dataclass(frozen=True, slots=True)
class Credential:
    """Signed by an elector or the founder: this node is a member and may fill these ranks.

    `invite` is the public key of the invite that was redeemed for it, kept when it is renewed: an auditor and
    its subject never have it in common. `issued` and `expires` are wall time.
    """

    kind: ClassVar[str] = "credential"
    node_id: NodeIdField
    ranks: Ranks
    issued: Nanoseconds
    expires: Nanoseconds
    invite: PublicKey


@dataclass(frozen=True, slots=True)
class Revocation:
    """Signed by the founder's key: this node, what came of this invite, or all this elector issued, is out.

    `key` is the public key of whichever it is. Nothing takes it back; `sequence` only tells them apart.
    """

    kind: ClassVar[str] = "revocation"
    sequence: Sequence63
    of: Literal["node", "invite", "issuer"]
    key: PublicKey


INVITE: Final = Family("invite", (Invite,), 8 << 10)
REDEMPTION: Final = Family("redemption", (Redemption,), 2048)
CREDENTIAL: Final = Family("credential", (Credential,), 2048)
REVOCATION: Final = Family("revocation", (Revocation,), 2048)


# --- invites as text ----------------------------------------------------------------------------------------


def format_invite(invite: Invite) -> str:
    """The invite as one line of text to be copied: base64url, with a checksum."""
    data = encode(invite)
    return INVITE_PREFIX + base64.urlsafe_b64encode(data + _checksum(data)).decode().rstrip("=")


def parse_invite(text: str) -> Invite:
    """The invite in a text, which may have been broken into lines.

    Raises `RemoteProtocolError` (`bad_invite`) with a sentence that says what is wrong with the text.
    """
    plain = "".join(text.split())
    if not plain.startswith(INVITE_PREFIX):
        raise RemoteProtocolError(f"an invite begins with {INVITE_PREFIX}", "bad_invite")
    if len(plain) > 2 * INVITE.size_bytes_max:
        raise RemoteProtocolError("the invite is longer than any can be", "bad_invite")
    coded = plain[len(INVITE_PREFIX) :]
    try:
        # Standard base64 passes over characters it does not know, and over bits that mean nothing.
        whole = base64.b64decode(coded + "=" * (-len(coded) % 4), b"-_", validate=True)
    except (binascii.Error, ValueError):
        whole = b""
    data, checksum = whole[:-_CHECKSUM_LENGTH], whole[-_CHECKSUM_LENGTH:]
    spelt = base64.urlsafe_b64encode(whole).decode().rstrip("=")
    if not data or checksum != _checksum(data) or spelt != coded:
        raise RemoteProtocolError("the invite was not copied whole and unchanged", "bad_invite")
    try:
        return decode(data, INVITE)
    except RemoteProtocolError as error:
        reason = f"the invite is not one of this version: {error.reason}"
        raise RemoteProtocolError(reason, "bad_invite") from None


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_CHECKSUM_LENGTH]


def invite_key(secret: bytes) -> Ed25519PrivateKey:
    """The key pair that an invite's secret stands for."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(_SEED_DOMAIN + secret).digest())


def redeem(invite: Invite, node_id: NodeId) -> Redeem:
    """What this node says to the invite's issuer; the same each time."""
    return Redeem(sign_message(invite_key(invite.secret), invite.swarm, Redemption(node_id, invite.issuer)))


# --- credentials and revocations ----------------------------------------------------------------------------


class OpenedCredential(NamedTuple):
    """A credential with a good signature, and the public key of who signed it."""

    credential: Credential
    issuer: bytes


@lru_cache(maxsize=4096)
def open_credential(data: bytes, swarm: SwarmDigest) -> OpenedCredential:
    """The credential in an encoded `Signed`; whether its signer may issue is not asked. Remembered.

    Raises `RemoteProtocolError` as `open_signed` does.
    """
    credential, signer = open_signed(data, CREDENTIAL, swarm)
    return OpenedCredential(credential, public_key_of(signer))


def verify_credential(
    data: bytes, swarm: FoundedSwarm, electors: Collection[bytes], node_id: NodeId, now: WallTime
) -> OpenedCredential:
    """The credential, if the founder or one of these electors issued it to this node and it has not expired.

    Raises `RemoteProtocolError`: as `open_credential` does, or `wrong_node`, `unknown_issuer`,
    `credential_expired`.
    """
    opened = open_credential(data, swarm.digest)
    if opened.credential.node_id != node_id:
        raise RemoteProtocolError("the credential is another node's", "wrong_node")
    if opened.issuer != swarm.manifest.founder_public_key and opened.issuer not in electors:
        raise RemoteProtocolError("the credential is by nobody known to be an elector", "unknown_issuer")
    if has_expired(opened.credential.expires, now):
        raise RemoteProtocolError("the credential has expired", "credential_expired")
    return opened


def may_audit(auditor: Credential, subject: Credential) -> bool:
    """Whether one may judge the other, as far as how they came here goes."""
    return auditor.node_id != subject.node_id and auditor.invite != subject.invite


def sign_revocation(founder_key: Ed25519PrivateKey, swarm: FoundedSwarm, revocation: Revocation) -> bytes:
    """The encoded `Signed` that revokes. Raises `LocalProtocolError` for a key that is not the founder's."""
    if founder_key.public_key().public_bytes_raw() != swarm.manifest.founder_public_key:
        raise LocalProtocolError("only the founder's key revokes")
    return sign_message(founder_key, swarm.digest, revocation)


# --- what the book is told and tells ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KnowElectors:
    """These public keys are the present electorate's; those in `former` were in earlier ones."""

    keys: tuple[bytes, ...]
    former: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class IssueInvite:
    """Make an invite for one node. `secret` is 16 bytes that nobody can guess, drawn by the caller."""

    secret: bytes
    electorate_digest: bytes
    ranks: tuple[Rank, ...]
    addresses: tuple[str, ...]
    lifetime: Duration


@dataclass(frozen=True, slots=True)
class UseInvite:
    """Redeem this invite for ourselves, and ask until there is an answer."""

    invite: Invite


@dataclass(frozen=True, slots=True)
class Revoke:
    """Take in this signed revocation and spread it."""

    data: bytes


@dataclass(frozen=True, slots=True)
class CompareRevocations:
    """Ask these nodes, or the first few, what was revoked that is not known here; tell who knows less."""

    node_ids: tuple[NodeId, ...]


AdmissionCommand: TypeAlias = KnowElectors | IssueInvite | UseInvite | Revoke | CompareRevocations


@dataclass(frozen=True, slots=True)
class InviteIssued:
    """An invite may be handed out: it is on disk."""

    invite: Invite


@dataclass(frozen=True, slots=True)
class CredentialGained:
    """We are a member with this credential from now on: it belongs into our record."""

    data: bytes


@dataclass(frozen=True, slots=True)
class AdmissionFailed:
    """The issuer refuses our invite, or it has expired unanswered; asking is over."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class MembershipChanged:
    """Who may be a member has changed: records are to be judged anew."""


@dataclass(frozen=True, slots=True)
class ComparisonDue:
    """It is time to `CompareRevocations` with somebody who lives; the book knows nobody."""


AdmissionEvent: TypeAlias = (
    InviteIssued | CredentialGained | AdmissionFailed | MembershipChanged | ComparisonDue
)


# --- what is kept -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IssuedInvite:
    """What an issuer keeps of an invite: its public key, and the node it was redeemed by."""

    key: PublicKey
    expires: Nanoseconds
    ranks: Ranks
    redeemed_by: NodeIdField | None


@dataclass(frozen=True, slots=True)
class AdmissionKept:
    """The slot `admission`: invites issued, our credential, revocations as signed, electors gone by."""

    kind: ClassVar[str] = "admission_kept"
    invites: Annotated[tuple[IssuedInvite, ...], Length(0, INVITES_MAX)]
    credential: Annotated[bytes, Length(1, 2048)] | None
    revocations: Annotated[tuple[Annotated[bytes, Length(1, 2048)], ...], Length(0, REVOCATIONS_MAX)]
    electors: Annotated[tuple[PublicKey, ...], Length(0, 64)]
    former_electors: Annotated[tuple[PublicKey, ...], Length(0, FORMER_ELECTORS_MAX)]


ADMISSION_KEPT: Final = Family("admission kept", (AdmissionKept,), 3 << 20)


class AdmissionBook:
    """What one node knows of who may be a member. Five verbs; `judge` and questions change nothing."""

    def __init__(
        self,
        *,
        private_key: Ed25519PrivateKey,
        swarm: FoundedSwarm,
        stored: bytes | None,
        entropy: Random,
        now: Now,
    ) -> None:
        """`stored` is what the slot `admission` held. Raises `RemoteProtocolError` when it is damaged."""
        kept = decode(stored, ADMISSION_KEPT) if stored is not None else AdmissionKept((), None, (), (), ())
        self._private_key = private_key
        self._public_key = private_key.public_key().public_bytes_raw()
        self._node_id = node_id_of(self._public_key)
        self._swarm = swarm
        self._entropy = entropy
        self._now = now
        self._invites = {each.key: each for each in kept.invites}
        self._credential = kept.credential
        self._revoked: dict[tuple[str, bytes], bytes] = {}
        for data in kept.revocations:
            revocation = self._open_revocation(data)
            self._revoked[revocation.of, revocation.key] = data
        self._electors = kept.electors
        self._former_electors = kept.former_electors
        self._using: Invite | None = None
        self._ask_at: Instant | None = None
        is_founder = self._public_key == swarm.manifest.founder_public_key
        self._caught_up_at: Instant | None = None if is_founder else after(now.instant, CATCH_UP_PATIENCE)
        """When it stops waiting to be told what was revoked; None once it has been told, or has stopped, and
        where revocations are made."""
        self._asked: dict[NodeId, None] = {}
        self._answered: dict[NodeId, None] = {}
        self._compare_at = after(now.instant, COMPARE_INTERVAL)
        self._effects: list[Effect | AdmissionEvent] = []
        self._plan_renewal()

    # -- questions -----------------------------------------------------------------------------------

    @property
    def credential(self) -> bytes | None:
        """Our own credential, for our record."""
        return self._credential

    @property
    def may_issue(self) -> bool:
        """Whether what we sign admits anybody."""
        return self._is_issuer(self._public_key)

    @property
    def revoked_reason(self) -> str:
        """Why this node is no member any more, by the founder's signed word; empty while nothing says so."""
        if ("node", self._public_key) in self._revoked:
            return "the founder has revoked this node's membership"
        is_by_credential = self._credential is not None and self._public_key != self.founder
        if self._swarm.manifest.admission == "open" or not is_by_credential:
            return ""
        assert self._credential is not None
        credential, issuer = open_credential(self._credential, self._swarm.digest)
        if ("invite", credential.invite) in self._revoked:
            return "the founder has revoked the invite that this node came with"
        is_issuer_out = ("issuer", issuer) in self._revoked
        return (
            "the founder has revoked all that the issuer of its credential admitted" if is_issuer_out else ""
        )

    @property
    def founder(self) -> bytes:
        """The public key that founded the swarm."""
        return self._swarm.manifest.founder_public_key

    @property
    def is_asking(self) -> bool:
        """Whether an invite was used and its issuer has not answered."""
        return self._using is not None

    @property
    def is_waiting(self) -> bool:
        """Whether it waits to be told what was revoked, and judges nobody."""
        return self._caught_up_at is not None

    def judge(self, record: CapabilityRecord, now: WallTime) -> None:
        """Refuse a record whose node may not be a member, or not with these ranks.

        Raises `RemoteProtocolError`: `not_caught_up`, `revoked`, `credential_missing`, `rank_not_allowed`, or
        as `verify_credential` does. The founder's own node needs no credential.
        """
        if self.is_waiting and record.node_id != self._node_id:
            raise RemoteProtocolError("this node does not know yet what was revoked", "not_caught_up")
        key = public_key_of(record.node_id)
        if ("node", key) in self._revoked:
            raise RemoteProtocolError("the node's membership was revoked", "revoked")
        if self._swarm.manifest.admission == "open" or key == self._swarm.manifest.founder_public_key:
            return
        if record.credential is None:
            reason = "this swarm is by invitation, and the record has no credential"
            raise RemoteProtocolError(reason, "credential_missing")
        credential = self._verify(record.credential, record.node_id, now)
        if not set(record.ranks) <= set(credential.ranks):
            reason = "the credential does not allow every rank the record stands for"
            raise RemoteProtocolError(reason, "rank_not_allowed")

    def issuer_of(self, record: CapabilityRecord, now: WallTime) -> bytes | None:
        """The key of who issued the record's credential, if it is good; the founder vouches for itself."""
        key = public_key_of(record.node_id)
        if key == self._swarm.manifest.founder_public_key:
            return key
        if record.credential is None:
            return None
        try:
            self._verify(record.credential, record.node_id, now)
        except RemoteProtocolError:
            return None
        return open_credential(record.credential, self._swarm.digest).issuer

    def _verify(self, data: bytes, node_id: NodeId, now: WallTime) -> Credential:
        electors = (*self._electors, *self._former_electors)
        credential, issuer = verify_credential(data, self._swarm, electors, node_id, now)
        key = public_key_of(node_id)
        for of, revoked in (("node", key), ("invite", credential.invite), ("issuer", issuer)):
            if (of, revoked) in self._revoked:
                raise RemoteProtocolError(f"the {of} was revoked", "revoked")
        return credential

    def _is_issuer(self, key: bytes) -> bool:
        may = key == self._swarm.manifest.founder_public_key or key in self._electors
        return may and ("issuer", key) not in self._revoked

    # -- the five verbs ------------------------------------------------------------------------------

    def receive(self, message: AdmissionMessage, sender: NodeId, now: Now) -> None:
        """Answer what is asked of an issuer, take in what an issuer answers."""
        self._now = now
        match message:
            case Redeem(redemption):
                self._answer(sender, lambda: self._redeemed(redemption, sender))
            case Renew(credential):
                self._answer(sender, lambda: self._renewed(credential, sender))
            case Admitted(credential, revocations):
                self._take_all(revocations)
                self._take_credential(credential)
            case NotAdmitted(code, reason):
                self._take_refusal(sender, code, reason)
            case RevocationsRequest(known):
                told = () if known == self._revoked_digest() else self._all_revoked()
                self._effects.append(Send(sender, Revocations(self._revoked_digest(), told)))
            case Revocations(known, revocations):
                self._take_all(revocations)
                self._note_answer(sender, known)

    def take(self, data: bytes, now: Now) -> str:
        """Take in a revocation that came by gossip: `accepted`, `known`, or the code it is refused with."""
        self._now = now
        try:
            return "accepted" if self._take_revocation(data) else "known"
        except RemoteProtocolError as error:
            return error.code

    def command(self, request: AdmissionCommand, now: Now) -> None:
        """Do as asked. Raises `LocalProtocolError` for what we may not do, `RemoteProtocolError` for a
        revocation that is not the founder's."""
        self._now = now
        match request:
            case KnowElectors(keys, former):
                self._know_electors(tuple(sorted(set(keys))), former)
            case CompareRevocations(node_ids):
                self._compare(node_ids)
            case IssueInvite():
                self._issue(request)
            case UseInvite(invite):
                if invite.swarm != self._swarm.digest:
                    raise LocalProtocolError("the invite is into another swarm")
                self._using, self._ask_at = invite, now.instant
                self.tick(now)
            case Revoke(data):
                if self._take_revocation(data):
                    self._effects.append(Publish("records", data))

    def tick(self, now: Now) -> None:
        """Ask again where nobody answered, renew in time, compare with others now and then."""
        self._now = now
        if self._caught_up_at is not None and self._caught_up_at <= now.instant:
            self._stop_waiting()
        if self._compare_at <= now.instant:
            self._compare_at = after(now.instant, COMPARE_INTERVAL)
            self._effects.append(ComparisonDue())
        if self._ask_at is None or self._ask_at > now.instant:
            return
        self._ask_at = after(now.instant, RETRY_INTERVAL)
        if self._using is not None:
            if has_expired(self._using.expires, now.wall):
                self._using = None
                self._effects.append(AdmissionFailed("expired", "the invite has expired"))
                self._plan_renewal()
                return
            self._effects.append(Send(self._using.issuer, redeem(self._using, self._node_id)))
            return
        others = [key for key in self._electors if key != self._public_key]
        if self._credential is None or not others:
            self._plan_renewal()
            return
        elector = others[self._entropy.randrange(len(others))]
        self._effects.append(Send(node_id_of(elector), Renew(self._credential)))

    def next_deadline(self) -> Instant | None:
        """When `tick` has something to do."""
        deadline = self._compare_at
        for due in (self._ask_at, self._caught_up_at):
            if due is not None and due < deadline:
                deadline = due
        return deadline

    def drain(self) -> list[Effect | AdmissionEvent]:
        """What is to be done, in order, each once."""
        drained, self._effects = self._effects, []
        return drained

    # -- issuing -------------------------------------------------------------------------------------

    def _issue(self, request: IssueInvite) -> None:
        if not self.may_issue:
            raise LocalProtocolError("only an elector or the founder invites")
        self._forget_invites()
        if len(self._invites) >= INVITES_MAX:
            raise LocalProtocolError(f"{INVITES_MAX} invites are open: wait until one expires")
        invite = Invite(
            swarm=self._swarm.digest,
            electorate_digest=request.electorate_digest,
            issuer=self._node_id,
            secret=request.secret,
            expires=after(self._now.wall, request.lifetime),
            ranks=request.ranks,
            addresses=request.addresses,
        )
        encode(invite)
        key = invite_key(invite.secret).public_key().public_bytes_raw()
        if key in self._invites:
            raise LocalProtocolError("an invite with this secret was issued before")
        self._invites[key] = IssuedInvite(key, invite.expires, invite.ranks, None)
        self._persist()
        self._effects.append(InviteIssued(invite))

    def _forget_invites(self) -> None:
        """Our own clock set their end; what has expired on it with all tolerance cannot be redeemed again."""
        for key in [each.key for each in self._invites.values() if has_expired(each.expires, self._now.wall)]:
            del self._invites[key]

    def _answer(self, asker: NodeId, credential: Callable[[], Credential]) -> None:
        try:
            if not self.may_issue:
                raise RemoteProtocolError("this node is no elector", "not_an_elector")
            data = sign_message(self._private_key, self._swarm.digest, credential())
        except RemoteProtocolError as error:
            self._effects.append(Send(asker, NotAdmitted(error.code, as_sentence(error.reason))))
            return
        self._effects.append(Send(asker, Admitted(data, self._all_revoked())))

    def _redeemed(self, redemption: bytes, sender: NodeId) -> Credential:
        """The credential for who redeems an invite first, and again for the same node if it asks again."""
        claim, signer = open_signed(redemption, REDEMPTION, self._swarm.digest)
        if claim.node_id != sender or claim.issuer != self._node_id:
            raise RemoteProtocolError("the redemption is another node's, or for another issuer", "wrong_node")
        key = public_key_of(signer)
        invite = self._invites.get(key)
        if invite is None:
            raise RemoteProtocolError("no such invite is open here", "unknown_invite")
        if invite.redeemed_by not in (None, sender):
            raise RemoteProtocolError("the invite was redeemed by another node", "redeemed")
        if invite.redeemed_by is None and self._now.wall > invite.expires:
            raise RemoteProtocolError("the invite has expired", "expired")
        for of, revoked in (("node", public_key_of(sender)), ("invite", key)):
            if (of, revoked) in self._revoked:
                raise RemoteProtocolError(f"the {of} was revoked", "revoked")
        if invite.redeemed_by is None:
            self._invites[key] = replace(invite, redeemed_by=sender)
            self._persist()
        return self._new_credential(sender, invite.ranks, key)

    def _renewed(self, data: bytes, sender: NodeId) -> Credential:
        old = self._verify(data, sender, self._now.wall)
        return self._new_credential(sender, old.ranks, old.invite)

    def _new_credential(self, node_id: NodeId, ranks: tuple[Rank, ...], invite: bytes) -> Credential:
        now = self._now.wall
        return Credential(node_id, ranks, now, after(now, CREDENTIAL_LIFETIME), invite)

    # -- our own credential --------------------------------------------------------------------------

    def _take_credential(self, data: bytes) -> None:
        """Keep a credential of ours that is longer good than the one we have, from who may issue it."""
        expected = (*self._electors, *([public_key_of(self._using.issuer)] if self._using else ()))
        try:
            opened = verify_credential(data, self._swarm, expected, self._node_id, self._now.wall)
        except RemoteProtocolError:
            return
        if self._credential is not None and not self._using:
            kept = open_credential(self._credential, self._swarm.digest)
            if opened.credential.expires <= kept.credential.expires and self._is_issuer(kept.issuer):
                return
        self._credential, self._using = data, None
        self._persist()
        self._effects.append(CredentialGained(data))
        self._plan_renewal()

    def _take_refusal(self, sender: NodeId, code: str, reason: str) -> None:
        if self._using is not None and sender == self._using.issuer:
            self._using = None
            self._effects.append(AdmissionFailed(code, reason))
            self._plan_renewal()

    def _plan_renewal(self) -> None:
        """Ask when ours has not long to go, or at once when its issuer is no elector any more."""
        if self._using is not None:
            return
        self._ask_at = None
        if self._credential is None or self._swarm.manifest.admission == "open":
            return
        credential, issuer = open_credential(self._credential, self._swarm.digest)
        if not any(key != self._public_key for key in self._electors):
            return
        wait = credential.expires - RENEW_BEFORE - self._now.wall if self._is_issuer(issuer) else 0
        self._ask_at = after(self._now.instant, Duration(max(0, wait)))

    # -- electors and revocations --------------------------------------------------------------------

    def _know_electors(self, keys: tuple[bytes, ...], former: tuple[bytes, ...]) -> None:
        left = [key for key in self._electors if key not in keys]
        stayed = [key for key in self._former_electors if key not in keys]
        known = {*keys, *stayed, *left}
        earlier = [key for key in former if key not in known]
        formerly = tuple([*earlier, *stayed, *left][-FORMER_ELECTORS_MAX:])
        if (keys, formerly) == (self._electors, self._former_electors):
            return
        self._electors, self._former_electors = keys, formerly
        self._persist()
        self._effects.append(MembershipChanged())
        self._plan_renewal()
        if any(self._is_issuer(public_key_of(each)) for each in self._answered):
            self._stop_waiting()

    def _open_revocation(self, data: bytes) -> Revocation:
        revocation, signer = open_signed(data, REVOCATION, self._swarm.digest)
        if public_key_of(signer) != self._swarm.manifest.founder_public_key:
            raise RemoteProtocolError("only the founder's key revokes", "wrong_founder")
        return revocation

    def _take_revocation(self, data: bytes) -> bool:
        """Whether it was news. Raises `RemoteProtocolError`: not the founder's, or `full`."""
        revocation = self._open_revocation(data)
        if (revocation.of, revocation.key) in self._revoked:
            return False
        if len(self._revoked) >= REVOCATIONS_MAX:
            raise RemoteProtocolError(f"{REVOCATIONS_MAX} revocations are known", "full")
        self._revoked[revocation.of, revocation.key] = data
        self._persist()
        self._effects.append(MembershipChanged())
        return True

    def _take_all(self, revocations: tuple[bytes, ...]) -> None:
        known = frozenset(self._revoked.values())
        for data in revocations:
            if data not in known:
                self.take(data, self._now)

    def _compare(self, node_ids: tuple[NodeId, ...]) -> None:
        request = RevocationsRequest(self._revoked_digest())
        for node_id in [each for each in node_ids if each != self._node_id][:COMPARED_MAX]:
            self._asked.pop(node_id, None)
            self._asked[node_id] = None
            self._effects.append(Send(node_id, request))
        while len(self._asked) > COMPARED_MAX:
            del self._asked[next(iter(self._asked))]

    def _note_answer(self, sender: NodeId, known: bytes) -> None:
        """Tell who was asked what it does not know; trust others once an elector has answered."""
        if sender not in self._asked:
            return
        del self._asked[sender]
        if known != self._revoked_digest():
            self._effects.append(Send(sender, Revocations(self._revoked_digest(), self._all_revoked())))
        self._answered[sender] = None
        while len(self._answered) > COMPARED_MAX:
            del self._answered[next(iter(self._answered))]
        if self._is_issuer(public_key_of(sender)):
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._caught_up_at is not None:
            self._caught_up_at = None
            self._effects.append(MembershipChanged())

    def _revoked_digest(self) -> bytes:
        """Equal on two nodes that know the same revocations."""
        known = (b"%b:%b" % (of.encode("ascii"), key) for of, key in sorted(self._revoked))
        return hashlib.sha256(b"".join(known)).digest()

    def _all_revoked(self) -> tuple[bytes, ...]:
        return tuple(self._revoked[each] for each in sorted(self._revoked))

    def _persist(self) -> None:
        kept = AdmissionKept(
            invites=tuple(self._invites[key] for key in sorted(self._invites)),
            credential=self._credential,
            revocations=self._all_revoked(),
            electors=self._electors,
            former_electors=self._former_electors,
        )
        # One a drain is enough: the last holds all.
        self._effects = [
            each for each in self._effects if not (isinstance(each, Persist) and each.slot == "admission")
        ]
        self._effects.append(Persist("admission", encode(kept)))
