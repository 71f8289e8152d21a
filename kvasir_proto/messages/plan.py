"""How a plan reaches those it names: the backbone offers it, each of them answers.

Offers repeat until they are answered, so an answer names the plan it is for. Within a term a backbone never
loses the plan it made, because a backbone that was restarted has to win another term: an offer older than the
plan that is followed was overtaken on its way, and is passed over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias, get_args

from kvasir_proto.ids import Epoch, Term
from kvasir_proto.limits import (
    SWARM_FRAME_SIZE_MAX,
    Count,
    Digest,
    ProofBytes,
    Sentence,
    Sequence63,
    SignedBytes,
    Word,
)
from kvasir_proto.messages import Family


@dataclass(frozen=True, slots=True)
class PlanOffer:
    """The backbone's signed plan, with the proof that the signer is the backbone."""

    kind: ClassVar[str] = "plan_offer"
    plan: SignedBytes
    proof: ProofBytes


@dataclass(frozen=True, slots=True)
class PlanAccept:
    """The sender holds its shard of that plan (SHA-256 of the encoded `ShardSet`) and can serve it."""

    kind: ClassVar[str] = "plan_accept"
    epoch: Epoch
    term: Term
    revision: Sequence63
    shard_digest: Digest
    memory_bytes: Count


@dataclass(frozen=True, slots=True)
class PlanRefusal:
    """The sender cannot serve its shard of that plan. `need_bytes` is 0 unless memory is the reason."""

    kind: ClassVar[str] = "plan_refusal"
    epoch: Epoch
    term: Term
    revision: Sequence63
    code: Word
    reason: Sentence
    need_bytes: Count
    have_bytes: Count


PlanMessage: TypeAlias = PlanOffer | PlanAccept | PlanRefusal

PLAN_EXCHANGE: Final[Family[PlanMessage]] = Family(
    "plan_exchange", get_args(PlanMessage), SWARM_FRAME_SIZE_MAX
)
