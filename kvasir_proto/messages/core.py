"""Everything that the cores of two nodes say to each other, as one family on one stream protocol.

The families stay apart in their modules, since the cores are strangers; a stream between two nodes carries
them all. Which core a message is for follows from its type.
"""

from __future__ import annotations

from typing import Final, TypeAlias, get_args

from kvasir_proto.limits import SWARM_FRAME_SIZE_MAX
from kvasir_proto.messages import Family
from kvasir_proto.messages.admission import AdmissionMessage
from kvasir_proto.messages.certification import CertificationMessage
from kvasir_proto.messages.election import ElectionMessage
from kvasir_proto.messages.membership import MembershipMessage
from kvasir_proto.messages.plan import PlanMessage
from kvasir_proto.messages.records import RecordMessage

CoreMessage: TypeAlias = (
    MembershipMessage
    | ElectionMessage
    | RecordMessage
    | AdmissionMessage
    | PlanMessage
    | CertificationMessage
)

MEMBERSHIP_MESSAGES: Final = get_args(MembershipMessage)
ELECTION_MESSAGES: Final = get_args(ElectionMessage)
RECORD_MESSAGES: Final = get_args(RecordMessage)
ADMISSION_MESSAGES: Final = get_args(AdmissionMessage)
PLAN_MESSAGES: Final = get_args(PlanMessage)
CERTIFICATION_MESSAGES: Final = get_args(CertificationMessage)

CORE: Final[Family[CoreMessage]] = Family(
    "core",
    (
        *(*MEMBERSHIP_MESSAGES, *ELECTION_MESSAGES, *RECORD_MESSAGES),
        *(*ADMISSION_MESSAGES, *PLAN_MESSAGES, *CERTIFICATION_MESSAGES),
    ),
    SWARM_FRAME_SIZE_MAX,
)
