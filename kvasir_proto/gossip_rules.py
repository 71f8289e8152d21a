"""What may be passed on by gossip and kept in the DHT: validity alone, whoever it came from.

Plain functions of the bytes, so that a transport can ask them in the middle of its work: signatures are
checked once and remembered. Whether something is news, and who may be a member, is the books' affair; an
honest node may pass on what it has no use for.
"""

from __future__ import annotations

from kvasir_proto.accusation import open_any_accusation
from kvasir_proto.admission import REVOCATION
from kvasir_proto.capability import OpenedRecord, judge_times, open_sealed
from kvasir_proto.codec import decode
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import SwarmDigest, node_id_of
from kvasir_proto.instants import WallTime
from kvasir_proto.messages.election import ELECTION, Evidence, Knowledge, LeaseRelease
from kvasir_proto.signing import open_signed
from kvasir_proto.swarm_manifest import FoundedSwarm
from kvasir_proto.tolerance_certificate import AUDITOR_VERDICT, VERDICT_SIZE_MAX


def is_record(data: bytes, swarm: FoundedSwarm) -> bool:
    """Whether this is what a node said of itself, a revocation by the founder's key, or what somebody says of
    a node as an auditor or by evidence: whether it may, each receiver judges.
    """
    try:
        open_sealed(data, swarm.digest)
    except RemoteProtocolError as error:
        return error.code == "wrong_kind" and (
            _is_revocation(data, swarm) or _is_verdict(data, swarm) or _is_accusation(data, swarm)
        )
    return True


def _is_accusation(data: bytes, swarm: FoundedSwarm) -> bool:
    try:
        open_any_accusation(data, swarm.digest)
    except RemoteProtocolError:
        return False
    return True


def _is_verdict(data: bytes, swarm: FoundedSwarm) -> bool:
    try:
        verdict, signer = open_signed(data, AUDITOR_VERDICT, swarm.digest)
    except RemoteProtocolError:
        return False
    return verdict.node_id != signer and len(data) <= VERDICT_SIZE_MAX


def _is_revocation(data: bytes, swarm: FoundedSwarm) -> bool:
    try:
        _, signer = open_signed(data, REVOCATION, swarm.digest)
    except RemoteProtocolError:
        return False
    return signer == node_id_of(swarm.manifest.founder_public_key)


def is_announcement(data: bytes) -> bool:
    """Whether this may be said to everybody about terms: what it proves is judged by each receiver."""
    try:
        return isinstance(decode(data, ELECTION), Knowledge | Evidence | LeaseRelease)
    except RemoteProtocolError:
        return False


def record_in_store(data: bytes, swarm: SwarmDigest, now: WallTime) -> OpenedRecord | None:
    """The record in these bytes if the DHT may keep it: signed by its node and unexpired."""
    try:
        opened = open_sealed(data, swarm)
        judge_times(opened.said, now)
    except RemoteProtocolError:
        return None
    return opened
