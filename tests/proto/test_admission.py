"""An invite admits one node, once; a credential counts for whom it names; what is revoked stays out."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from itertools import permutations
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto import admission, records
from kvasir_proto.admission import (
    CATCH_UP_PATIENCE,
    COMPARE_INTERVAL,
    CREDENTIAL_LIFETIME,
    INVITE_PREFIX,
    RENEW_BEFORE,
    RETRY_INTERVAL,
    AdmissionBook,
    AdmissionFailed,
    CompareRevocations,
    ComparisonDue,
    Credential,
    CredentialGained,
    Invite,
    InviteIssued,
    IssueInvite,
    KnowElectors,
    MembershipChanged,
    Redemption,
    Revocation,
    Revoke,
    UseInvite,
    format_invite,
    invite_key,
    may_audit,
    open_credential,
    parse_invite,
    redeem,
    sign_revocation,
    verify_credential,
)
from kvasir_proto.capability import CLOCK_SKEW_MAX
from kvasir_proto.effects import Now, Persist, Publish, Send
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.ids import NodeId, SwarmDigest
from kvasir_proto.instants import WallTime, seconds
from kvasir_proto.messages.admission import (
    AdmissionMessage,
    Admitted,
    NotAdmitted,
    Redeem,
    Renew,
    Revocations,
    RevocationsRequest,
)
from kvasir_proto.records import LAN, JudgeAnew, NoteLive, RecordBook
from kvasir_proto.signing import sign_message
from kvasir_proto.swarm_manifest import open_swarm_manifest, sign_swarm_manifest
from tests.proto.test_records import START, effects_of, key_of, later, node_of, of_type, record_of
from tests.proto.test_swarm_manifest import MANIFEST

FOUNDER, ELECTOR, NODE, STRANGER = 100, 101, 1, 2


def public(number: int) -> bytes:
    return key_of(number).public_key().public_bytes_raw()


def swarm_with(rule: Any) -> Any:
    manifest = dataclasses.replace(MANIFEST, admission=rule, founder_public_key=public(FOUNDER))
    return open_swarm_manifest(sign_swarm_manifest(manifest, key_of(FOUNDER)))


SWARM, OPEN_SWARM = swarm_with("invite"), swarm_with("open")
SECRET = bytes(range(16))
REQUEST = IssueInvite(
    secret=SECRET,
    electorate_digest=bytes(32),
    ranks=("bulk", "output"),
    addresses=(f"/ip4/192.0.2.7/tcp/4001/p2p/{node_of(ELECTOR)}",),
    lifetime=seconds(3600),
)
INVITE = Invite(
    swarm=SWARM.digest,
    electorate_digest=bytes(32),
    issuer=node_of(ELECTOR),
    secret=SECRET,
    expires=START.wall + seconds(3600),
    ranks=("bulk", "output"),
    addresses=REQUEST.addresses,
)


def book(
    number: int,
    *,
    stored: bytes | None = None,
    swarm: Any = SWARM,
    now: Now = START,
    is_waiting: bool = False,
) -> AdmissionBook:
    """A book that knows the one elector, and that has been told what was revoked."""
    made = AdmissionBook(
        private_key=key_of(number), swarm=swarm, stored=stored, entropy=random.Random(number), now=now
    )
    if stored is None:
        made.command(KnowElectors((public(ELECTOR),)), now)
    if not is_waiting:
        made._stop_waiting()
    effects_of(made)
    return made


NOTHING_REVOKED = hashlib.sha256(b"").digest()


def asks_at(node: AdmissionBook) -> int | None:
    """When it asks next for a credential."""
    return node._ask_at


def issuer_with_invite() -> AdmissionBook:
    issuer = book(ELECTOR)
    issuer.command(REQUEST, START)
    assert of_type(InviteIssued, effects_of(issuer)) == [InviteIssued(INVITE)]
    return issuer


def ask(issuer: AdmissionBook, message: Any, sender: NodeId, now: Now = START) -> Any:
    """What the issuer answers."""
    issuer.receive(message, sender, now)
    (answer,) = of_type(Send, effects_of(issuer))
    assert answer.to == sender
    return answer.message


def credential_of(number: int = NODE, by: int = ELECTOR, **changes: Any) -> bytes:
    plain = Credential(
        node_of(number), ("bulk", "output"), START.wall, START.wall + CREDENTIAL_LIFETIME, bytes(32)
    )
    return sign_message(key_of(by), SWARM.digest, dataclasses.replace(plain, **changes))


def revocation_of(of: Any, key: bytes, by: int = FOUNDER) -> bytes:
    return sign_message(key_of(by), SWARM.digest, Revocation(1, of, key))


# --- invites as text ----------------------------------------------------------------------------------------


def test_invite_comes_back_from_its_text_however_it_was_broken() -> None:
    text = format_invite(INVITE)
    assert text.startswith(INVITE_PREFIX)
    assert len(text) < 700
    broken = "  " + "\r\n\t".join(text[each : each + 60] for each in range(0, len(text), 60)) + "\n"
    assert parse_invite(text) == parse_invite(broken) == INVITE


GOLDEN_INVITE = "8f43906a2b9f24e75fd679faaefda07d989d8e7cddaf942831097e6cfb666eaa"
"""SHA-256 of its text."""


def test_invite_has_the_text_it_always_had() -> None:
    assert hashlib.sha256(format_invite(INVITE).encode()).hexdigest() == GOLDEN_INVITE


def test_every_typing_error_is_noticed() -> None:
    text = format_invite(INVITE)
    wrong = [
        text[:place] + ("B" if text[place] == "A" else "A") + text[place + 1 :] for place in range(len(text))
    ]
    wrong += [text[:place] + text[place + 1 :] for place in range(len(text))]
    wrong += [text[:place] + "A" + text[place:] for place in range(len(text) + 1)]
    wrong += [
        text[:place] + text[place + 1] + text[place] + text[place + 2 :]
        for place in range(len(text) - 1)
        if text[place] != text[place + 1]
    ]
    for each in wrong:
        with pytest.raises(RemoteProtocolError) as caught:
            parse_invite(each)
        assert caught.value.code == "bad_invite"


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "begins with"),
        ("kvasir-invite-2:AAAA", "begins with"),
        (INVITE_PREFIX, "copied whole"),
        (INVITE_PREFIX + "AAAA", "copied whole"),
        (INVITE_PREFIX + "\N{LATIN SMALL LETTER ETH}", "copied whole"),
        (INVITE_PREFIX + "A" * 100_000, "longer"),
    ],
)
def test_what_is_no_invite_is_said_to_be_none(text: str, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        parse_invite(text)


@given(st.text(max_size=200))
def test_any_text_is_an_invite_or_one_error(text: str) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_invite(INVITE_PREFIX + text)


# --- redeeming ----------------------------------------------------------------------------------------------


def test_secret_is_not_said_and_not_kept() -> None:
    issuer = book(ELECTOR)
    issuer.command(REQUEST, START)
    (kept,) = of_type(Persist, effects_of(issuer))
    private = invite_key(SECRET).private_bytes_raw()
    said = redeem(INVITE, node_of(NODE)).redemption
    for secret in (SECRET, private):
        assert secret not in said
        assert secret not in kept.data


def test_invite_is_redeemed_for_a_credential_that_is_on_disk_first() -> None:
    issuer = issuer_with_invite()
    issuer.receive(redeem(INVITE, node_of(NODE)), node_of(NODE), START)
    persist, send = effects_of(issuer)
    assert isinstance(persist, Persist)
    assert persist.slot == "admission"
    assert isinstance(send.message, Admitted)
    opened = verify_credential(send.message.credential, SWARM, {public(ELECTOR)}, node_of(NODE), START.wall)
    assert opened.credential.ranks == ("bulk", "output")
    assert opened.credential.invite == invite_key(SECRET).public_key().public_bytes_raw()


@pytest.mark.parametrize("order", list(permutations((1, 2, 3))))
@pytest.mark.parametrize("restarts", [False, True])
def test_one_invite_admits_one_node_whatever_the_order(order: tuple[int, ...], restarts: bool) -> None:
    issuer = issuer_with_invite()
    admitted = []
    for turn in range(3):
        for number in order:
            issuer.receive(redeem(INVITE, node_of(number)), node_of(number), later(turn))
            drained = effects_of(issuer)
            (answer,) = of_type(Send, drained)
            if isinstance(answer.message, Admitted):
                admitted.append(number)
            else:
                assert answer.message.code == "redeemed"
            if restarts and of_type(Persist, drained):
                issuer = book(ELECTOR, stored=of_type(Persist, drained)[-1].data)
    assert admitted == [order[0]] * 3


def test_what_is_refused_at_the_issuer() -> None:
    issuer = issuer_with_invite()
    other_secret = dataclasses.replace(INVITE, secret=bytes(16))
    elsewhere = dataclasses.replace(INVITE, issuer=node_of(FOUNDER))
    by_hand = sign_message(key_of(NODE), SWARM.digest, Redemption(node_of(NODE), node_of(ELECTOR)))
    of_another_swarm = dataclasses.replace(INVITE, swarm=SwarmDigest(bytes(32)))
    table: list[tuple[Redeem, int, str]] = [
        (redeem(INVITE, node_of(NODE)), STRANGER, "wrong_node"),
        (redeem(elsewhere, node_of(NODE)), NODE, "wrong_node"),
        (redeem(other_secret, node_of(NODE)), NODE, "unknown_invite"),
        (Redeem(by_hand), NODE, "unknown_invite"),
        (redeem(of_another_swarm, node_of(NODE)), NODE, "bad_signature"),
        (Redeem(b"\x00"), NODE, "malformed"),
    ]
    for message, sender, code in table:
        answer = ask(issuer, message, node_of(sender))
        assert isinstance(answer, NotAdmitted)
        assert answer.code == code
    assert isinstance(ask(issuer, redeem(INVITE, node_of(NODE)), node_of(NODE)), Admitted)


def test_invite_expires_on_its_issuers_clock_and_a_lost_answer_is_given_again() -> None:
    issuer = issuer_with_invite()
    end = later(seconds(3600))
    assert ask(issuer, redeem(INVITE, node_of(NODE)), node_of(NODE), later(1, end)).code == "expired"
    assert isinstance(ask(issuer, redeem(INVITE, node_of(NODE)), node_of(NODE), end), Admitted)
    assert isinstance(ask(issuer, redeem(INVITE, node_of(NODE)), node_of(NODE), later(1, end)), Admitted)


def test_who_is_no_elector_issues_nothing() -> None:
    plain = book(NODE)
    with pytest.raises(LocalProtocolError, match="elector"):
        plain.command(REQUEST, START)
    assert ask(plain, redeem(INVITE, node_of(STRANGER)), node_of(STRANGER)).code == "not_an_elector"
    assert ask(plain, Renew(credential_of(STRANGER)), node_of(STRANGER)).code == "not_an_elector"
    issuer = issuer_with_invite()
    issuer.command(KnowElectors((public(FOUNDER),)), START)
    effects_of(issuer)
    assert ask(issuer, redeem(INVITE, node_of(NODE)), node_of(NODE)).code == "not_an_elector"


def test_founder_issues_without_being_an_elector() -> None:
    founder = book(FOUNDER)
    founder.command(REQUEST, START)
    (issued,) = of_type(InviteIssued, effects_of(founder))
    assert isinstance(ask(founder, redeem(issued.invite, node_of(NODE)), node_of(NODE)), Admitted)


def test_open_invites_are_bounded_and_make_room_when_they_expire() -> None:
    issuer = book(ELECTOR)
    for number in range(admission.INVITES_MAX):
        issuer.command(dataclasses.replace(REQUEST, secret=number.to_bytes(16, "big")), START)
    with pytest.raises(LocalProtocolError, match="open"):
        issuer.command(dataclasses.replace(REQUEST, secret=b"x" * 16), START)
    much_later = later(seconds(3600) + CLOCK_SKEW_MAX + 1)
    issuer.command(dataclasses.replace(REQUEST, secret=b"x" * 16), much_later)
    with pytest.raises(LocalProtocolError, match="before"):
        issuer.command(dataclasses.replace(REQUEST, secret=b"x" * 16), much_later)


@pytest.mark.parametrize("change", [{"secret": b"short"}, {"ranks": ()}, {"addresses": ()}])
def test_invite_outside_its_declaration_is_not_issued(change: dict[str, Any]) -> None:
    issuer = book(ELECTOR)
    with pytest.raises(LocalProtocolError):
        issuer.command(dataclasses.replace(REQUEST, **change), START)
    assert effects_of(issuer) == []


# --- a node's own side --------------------------------------------------------------------------------------


def test_node_asks_until_it_is_answered_and_keeps_what_it_gets() -> None:
    issuer, node = issuer_with_invite(), book(NODE)
    node.command(UseInvite(INVITE), START)
    assert effects_of(node) == [Send(node_of(ELECTOR), redeem(INVITE, node_of(NODE)))]
    assert asks_at(node) == START.instant + RETRY_INTERVAL
    node.tick(later(RETRY_INTERVAL))
    (again,) = effects_of(node)
    node.receive(ask(issuer, again.message, node_of(NODE)), node_of(ELECTOR), later(RETRY_INTERVAL))
    drained = effects_of(node)
    (gained,), (kept,) = of_type(CredentialGained, drained), of_type(Persist, drained)
    assert gained.data == node.credential == book(NODE, stored=kept.data).credential
    deadline = asks_at(node)
    assert deadline == START.instant + CREDENTIAL_LIFETIME - RENEW_BEFORE


def test_refusal_ends_the_asking_and_only_the_issuers_does() -> None:
    node = book(NODE)
    node.command(UseInvite(INVITE), START)
    effects_of(node)
    node.receive(NotAdmitted("redeemed", "too late"), node_of(STRANGER), START)
    assert effects_of(node) == []
    node.receive(NotAdmitted("redeemed", "too late"), node_of(ELECTOR), START)
    assert effects_of(node) == [AdmissionFailed("redeemed", "too late")]
    assert asks_at(node) is None


def test_asking_ends_when_the_invite_has_expired_with_tolerance() -> None:
    node = book(NODE)
    node.command(UseInvite(INVITE), START)
    at_the_end = later(seconds(3600) + CLOCK_SKEW_MAX)
    node.tick(at_the_end)
    assert of_type(Send, effects_of(node))
    node.tick(later(RETRY_INTERVAL, at_the_end))
    (failed,) = of_type(AdmissionFailed, effects_of(node))
    assert failed.code == "expired"
    assert asks_at(node) is None


def test_invite_into_another_swarm_is_not_used() -> None:
    with pytest.raises(LocalProtocolError, match="another swarm"):
        book(NODE).command(UseInvite(dataclasses.replace(INVITE, swarm=SwarmDigest(bytes(32)))), START)


@pytest.mark.parametrize(
    "data",
    [credential_of(STRANGER), credential_of(NODE, STRANGER), credential_of(NODE, expires=1), b"\x00"],
    ids=["another's", "by a stranger", "expired", "nonsense"],
)
def test_what_is_no_credential_of_ours_is_not_kept(data: bytes) -> None:
    node = book(NODE)
    node.receive(Admitted(data, ()), node_of(ELECTOR), START)
    assert effects_of(node) == []
    assert node.credential is None


def test_member_renews_in_time_and_keeps_its_invite() -> None:
    issuer, node = book(ELECTOR), book(NODE)
    node.receive(Admitted(credential_of(invite=b"i" * 32), ()), node_of(ELECTOR), START)
    effects_of(node)
    deadline = asks_at(node)
    assert deadline is not None
    due = later(deadline - START.instant)
    node.tick(due)
    (renew,) = of_type(Send, effects_of(node))
    assert renew == Send(node_of(ELECTOR), Renew(credential_of(invite=b"i" * 32)))
    node.receive(ask(issuer, renew.message, node_of(NODE), due), node_of(ELECTOR), due)
    assert node.credential is not None
    renewed = open_credential(node.credential, SWARM.digest).credential
    assert renewed.invite == b"i" * 32
    assert renewed.expires == due.wall + CREDENTIAL_LIFETIME


def test_member_renews_at_once_when_its_issuer_has_left_the_electorate() -> None:
    node = book(NODE)
    node.receive(Admitted(credential_of(), ()), node_of(ELECTOR), START)
    effects_of(node)
    node.command(KnowElectors((public(STRANGER),)), START)
    assert asks_at(node) == START.instant
    node.tick(START)
    (renew,) = of_type(Send, effects_of(node))
    assert renew == Send(node_of(STRANGER), Renew(credential_of()))


# --- judging ------------------------------------------------------------------------------------------------


def judged(judge: AdmissionBook, now: WallTime = START.wall, number: int = NODE, **changes: Any) -> str:
    try:
        judge.judge(record_of(number, **changes), now)
    except RemoteProtocolError as error:
        return error.code
    return "member"


def test_record_needs_a_credential_of_its_node_by_an_elector_for_its_ranks() -> None:
    judge = book(STRANGER)
    good = credential_of()
    table: list[tuple[dict[str, Any], str]] = [
        ({}, "credential_missing"),
        ({"credential": good}, "member"),
        ({"credential": good, "ranks": ("bulk",)}, "member"),
        ({"credential": good, "ranks": ("bulk", "backbone")}, "rank_not_allowed"),
        ({"credential": credential_of(STRANGER)}, "wrong_node"),
        ({"credential": credential_of(by=STRANGER)}, "unknown_issuer"),
        ({"credential": credential_of(by=NODE)}, "unknown_issuer"),
        ({"credential": credential_of(by=FOUNDER)}, "member"),
        ({"credential": good[:-1] + bytes([good[-1] ^ 1])}, "bad_signature"),
        ({"credential": b"\x00"}, "malformed"),
        ({"number": FOUNDER}, "member"),
    ]
    for changes, outcome in table:
        assert judged(judge, **changes) == outcome, changes
    assert judged(book(STRANGER, swarm=OPEN_SWARM)) == "member"


def test_credential_expires_with_tolerance() -> None:
    judge = book(STRANGER)
    end = START.wall + CREDENTIAL_LIFETIME
    assert judged(judge, WallTime(end + CLOCK_SKEW_MAX), credential=credential_of()) == "member"
    late = WallTime(end + CLOCK_SKEW_MAX + 1)
    assert judged(judge, late, credential=credential_of()) == "credential_expired"


def test_credential_outlives_its_issuers_seat_and_a_restart() -> None:
    judge = book(STRANGER)
    judge.command(KnowElectors((public(FOUNDER),)), START)
    (kept,) = of_type(Persist, effects_of(judge))
    for each in (judge, book(STRANGER, stored=kept.data)):
        assert judged(each, credential=credential_of()) == "member"


@pytest.mark.parametrize(
    "of, key", [("node", public(NODE)), ("invite", bytes(32)), ("issuer", public(ELECTOR))]
)
def test_revocation_is_for_good_everywhere(of: Any, key: bytes) -> None:
    judge = book(STRANGER)
    data = revocation_of(of, key)
    assert judge.take(data, START) == "accepted"
    assert judge.take(data, START) == "known"
    drained = effects_of(judge)
    assert MembershipChanged() in drained
    (kept,) = of_type(Persist, drained)
    for each in (judge, book(STRANGER, stored=kept.data)):
        assert judged(each, credential=credential_of()) == "revoked"
        assert judged(each, number=FOUNDER) == "member"
    issuer = issuer_with_invite()
    issuer.take(data, START)
    effects_of(issuer)
    assert isinstance(ask(issuer, Renew(credential_of()), node_of(NODE)), NotAdmitted)


def test_revoked_node_is_out_of_an_open_swarm_too_and_redeems_nothing() -> None:
    judge = book(STRANGER, swarm=OPEN_SWARM)
    in_open = sign_message(key_of(FOUNDER), OPEN_SWARM.digest, Revocation(1, "node", public(NODE)))
    assert judge.take(in_open, START) == "accepted"
    assert judged(judge) == "revoked"
    issuer = issuer_with_invite()
    issuer.take(revocation_of("node", public(NODE)), START)
    effects_of(issuer)
    assert ask(issuer, redeem(INVITE, node_of(NODE)), node_of(NODE)).code == "revoked"
    assert isinstance(ask(issuer, redeem(INVITE, node_of(STRANGER)), node_of(STRANGER)), Admitted)


def test_only_the_founder_revokes() -> None:
    judge = book(STRANGER)
    assert judge.take(revocation_of("node", public(NODE), by=ELECTOR), START) == "wrong_founder"
    assert judge.take(b"\x00", START) == "malformed"
    assert effects_of(judge) == []
    with pytest.raises(LocalProtocolError, match="founder"):
        sign_revocation(key_of(ELECTOR), SWARM, Revocation(1, "node", public(NODE)))
    judge.command(Revoke(sign_revocation(key_of(FOUNDER), SWARM, Revocation(1, "node", public(NODE)))), START)
    assert of_type(Publish, effects_of(judge)) == [Publish("records", revocation_of("node", public(NODE)))]


def test_revocations_are_handed_on() -> None:
    first, second, third = book(ELECTOR), book(NODE), book(STRANGER)
    first.take(revocation_of("node", public(STRANGER)), START)
    first.take(revocation_of("invite", bytes(32)), START)
    effects_of(first)
    second.receive(ask(first, RevocationsRequest(NOTHING_REVOKED), node_of(NODE)), node_of(ELECTOR), START)
    effects_of(second)
    third.receive(ask(second, RevocationsRequest(NOTHING_REVOKED), node_of(STRANGER)), node_of(NODE), START)
    assert ask(third, RevocationsRequest(NOTHING_REVOKED), node_of(NODE)) == ask(
        first, RevocationsRequest(NOTHING_REVOKED), node_of(NODE)
    )


def test_a_node_that_has_started_trusts_nobody_before_an_elector_has_told_it_what_was_revoked() -> None:
    """It was away when the revocation was gossiped; what it kept of the revoked one is judged no better."""
    informed, node = book(ELECTOR), book(NODE, is_waiting=True)
    informed.take(revocation_of("node", public(STRANGER)), START)
    effects_of(informed)
    told = credential_of(STRANGER)
    assert judged(node, number=STRANGER, credential=told) == "not_caught_up"
    assert judged(node, number=NODE, credential=credential_of()) == "member", "itself it knows"
    node.command(CompareRevocations((node_of(STRANGER), node_of(NODE), node_of(ELECTOR))), START)
    requests = of_type(Send, effects_of(node))
    assert [each.to for each in requests] == [node_of(STRANGER), node_of(ELECTOR)]
    node.receive(Revocations(NOTHING_REVOKED, ()), node_of(STRANGER), START)
    assert effects_of(node) == []
    assert judged(node, number=STRANGER, credential=told) == "not_caught_up", "the revoked one's word"
    node.receive(ask(informed, requests[1].message, node_of(NODE)), node_of(ELECTOR), START)
    assert MembershipChanged() in effects_of(node)
    assert judged(node, number=STRANGER, credential=told) == "revoked"


def test_a_node_that_nobody_tells_waits_no_longer_than_it_must_and_the_founder_not_at_all() -> None:
    node = book(NODE, is_waiting=True)
    assert node.next_deadline() == START.instant + CATCH_UP_PATIENCE
    node.tick(later(CATCH_UP_PATIENCE - 1))
    assert node.is_waiting
    node.tick(later(CATCH_UP_PATIENCE))
    assert effects_of(node) == [MembershipChanged()]
    assert judged(node, number=STRANGER, credential=credential_of(STRANGER)) == "member"
    assert not book(FOUNDER, is_waiting=True).is_waiting


def test_who_answered_before_it_was_known_to_be_an_elector_counts_once_it_is() -> None:
    node = book(NODE, is_waiting=True)
    node.command(CompareRevocations((node_of(STRANGER),)), START)
    node.receive(Revocations(NOTHING_REVOKED, ()), node_of(STRANGER), START)
    assert node.is_waiting
    node.command(KnowElectors((public(STRANGER),)), START)
    assert not node.is_waiting


def test_two_members_that_compare_know_the_same_afterwards_and_fall_silent() -> None:
    """Also where each has another signature over the same: the founder may have signed it twice."""
    one, other = book(NODE), book(STRANGER)
    one.take(revocation_of("node", public(3)), START)
    one.take(revocation_of("node", public(4)), START)
    other.take(sign_message(key_of(FOUNDER), SWARM.digest, Revocation(9, "node", public(4))), START)
    other.take(revocation_of("invite", bytes(32)), START)
    effects_of(one), effects_of(other)
    one.command(CompareRevocations((node_of(STRANGER),)), START)
    said = 0
    messages = [(other, one, each.message) for each in of_type(Send, effects_of(one))]
    while messages:
        to, sender, message = messages.pop()
        to.receive(message, node_of(NODE if sender is one else STRANGER), START)
        messages += [(sender, to, each.message) for each in of_type(Send, effects_of(to))]
        said += 1
    assert said == 3, "a question, an answer, and what the one who answered did not know"
    assert one._revoked_digest() == other._revoked_digest()
    assert len(one._revoked) == 3
    other.receive(RevocationsRequest(one._revoked_digest()), node_of(NODE), START)
    (answer,) = of_type(Send, effects_of(other))
    assert answer.message == Revocations(one._revoked_digest(), ()), "who knows the same is told nothing"


def test_once_a_minute_it_is_time_to_compare() -> None:
    node = book(NODE)
    assert node.next_deadline() == START.instant + COMPARE_INTERVAL
    for turn in (1, 2):
        node.tick(later(turn * COMPARE_INTERVAL))
        assert effects_of(node) == [ComparisonDue()]


def test_electors_of_the_past_that_the_chain_shows_count_like_those_that_were_seen_to_leave() -> None:
    judge = book(STRANGER)
    judge.command(KnowElectors((public(FOUNDER),), ()), START)
    unknown = credential_of(by=55)
    assert judged(judge, credential=unknown) == "unknown_issuer"
    effects_of(judge)
    judge.command(KnowElectors((public(FOUNDER),), (public(55), public(FOUNDER), public(ELECTOR))), START)
    drained = effects_of(judge)
    assert MembershipChanged() in drained
    assert judge._former_electors == (public(55), public(ELECTOR)), "no one twice, no present one"
    (kept,) = of_type(Persist, drained)
    for each in (judge, book(STRANGER, stored=kept.data)):
        assert judged(each, credential=unknown) == "member"
        assert judged(each, credential=credential_of()) == "member"
    judge.command(KnowElectors((public(FOUNDER),), (public(55),)), START)
    assert effects_of(judge) == [], "nothing new"
    many = tuple(number.to_bytes(32, "big") for number in range(100))
    judge.command(KnowElectors((public(FOUNDER),), many), START)
    assert len(judge._former_electors) == admission.FORMER_ELECTORS_MAX
    assert judge._former_electors[-2:] == (public(55), public(ELECTOR)), "those seen to leave stay longest"


def test_revocations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "REVOCATIONS_MAX", 2)
    judge = book(STRANGER)
    outcomes = [judge.take(revocation_of("node", public(number)), START) for number in (3, 4, 5)]
    assert outcomes == ["accepted", "accepted", "full"]


def test_auditor_and_subject_have_no_invite_in_common() -> None:
    one = open_credential(credential_of(NODE), SWARM.digest).credential
    same = open_credential(credential_of(STRANGER), SWARM.digest).credential
    other = open_credential(credential_of(STRANGER, invite=b"i" * 32), SWARM.digest).credential
    assert not may_audit(one, one)
    assert not may_audit(one, same)
    assert may_audit(one, other)


def test_records_of_who_may_not_be_a_member_are_refused_and_removed() -> None:
    judge = book(STRANGER)
    held = record_book(judge)

    def told(**changes: Any) -> bytes:
        return sign_message(key_of(NODE), SWARM.digest, record_of(NODE, **changes))

    assert held.take(told(), START).code == "credential_missing"
    assert held.take(told(credential=credential_of()), START).verdict == "accepted"
    judge.take(revocation_of("node", public(NODE)), START)
    held.command(JudgeAnew(), START)
    assert len(held) == 0
    refused = held.take(told(sequence=2, credential=credential_of()), START)
    assert (refused.code, refused.is_sender_at_fault) == ("revoked", False)


def record_book(judge: AdmissionBook) -> RecordBook:
    return RecordBook(
        private_key=key_of(STRANGER),
        swarm=judge._swarm.digest,
        options=LAN,
        stored=None,
        entropy=random.Random(1),
        now=START,
        admission=judge,
    )


def test_records_that_come_before_it_is_known_what_was_revoked_are_judged_once_it_is() -> None:
    judge = book(STRANGER, is_waiting=True)
    held = record_book(judge)
    for number in (NODE, 3):
        data = sign_message(key_of(number), SWARM.digest, record_of(number, credential=credential_of(number)))
        assert held.take(data, START).code == "not_caught_up"
    judge.take(revocation_of("node", public(3)), START)
    judge._stop_waiting()
    held.command(JudgeAnew(), START)
    assert [each.node_id for each in held] == [node_of(NODE)]


def full_of(
    judge: AdmissionBook, monkeypatch: pytest.MonkeyPatch, numbers: Any, **credential: Any
) -> RecordBook:
    """A full book of records of living nodes; `credential` makes the same for each."""
    numbers = list(numbers)
    monkeypatch.setattr(records, "RECORDS_MAX", len(numbers))
    monkeypatch.setattr(records, "ISSUER_SHARE_MAX", len(numbers) // 4)
    full = record_book(judge)
    for number in numbers:
        assert full.take(with_credential(judge, number, **credential), START).verdict == "accepted"
        full.command(NoteLive(node_of(number), is_live=True), START)
    return full


def with_credential(judge: AdmissionBook, number: int, by: int | None = ELECTOR) -> bytes:
    swarm = judge._swarm.digest
    plain = Credential(node_of(number), ("bulk",), START.wall, START.wall + CREDENTIAL_LIFETIME, bytes(32))
    credential = None if by is None else sign_message(key_of(by), swarm, plain)
    return sign_message(key_of(number), swarm, record_of(number, credential=credential))


def test_in_an_open_swarm_full_of_living_strangers_an_invited_node_has_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Identities cost nothing there, and whoever answers probes lives. An invite is the way out."""
    judge = book(STRANGER, swarm=OPEN_SWARM)
    full = full_of(judge, monkeypatch, range(1000, 1008), by=None)
    assert full.take(with_credential(judge, 50, by=None), START).code == "full"
    assert full.take(with_credential(judge, 50, by=66), START).code == "full", "by nobody who may invite"
    assert full.take(with_credential(judge, 50), START).verdict == "accepted"
    known = {each.node_id for each in full}
    assert known == {node_of(number) for number in (50, *range(1000, 1007))}, "the youngest stranger went"


def test_an_elector_that_vouches_for_whoever_it_invents_fills_no_swarm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = book(STRANGER)
    judge.command(KnowElectors((public(ELECTOR), public(FOUNDER), public(66))), START)
    full = full_of(judge, monkeypatch, range(1000, 1008), by=66)
    assert full.take(with_credential(judge, 2000, by=66), START).code == "full"
    for number in (50, 51):
        assert full.take(with_credential(judge, number), START).verdict == "accepted"
        full.command(NoteLive(node_of(number), is_live=True), START)
    assert full.take(with_credential(judge, 52), START).code == "full", "another elector has its share too"
    for number in range(53, 57):
        assert full.take(with_credential(judge, number, by=FOUNDER), START).verdict == "accepted"
        full.command(NoteLive(node_of(number), is_live=True), START)
    assert full.take(with_credential(judge, 57, by=FOUNDER), START).code == "full", "all within their shares"
    known = {each.node_id for each in full}
    assert known == {node_of(number) for number in (1000, 1001, 50, 51, 53, 54, 55, 56)}


def test_damaged_memory_is_an_error_and_not_a_fresh_start() -> None:
    with pytest.raises(RemoteProtocolError):
        book(NODE, stored=b"damaged")


def test_every_kind_of_message_is_answered_or_taken_in() -> None:
    """No message of a stranger's raises, whatever is in it."""
    issuer = issuer_with_invite()
    messages = (
        Redeem(b"x"),
        Renew(b"x"),
        Admitted(b"x", (b"y",)),
        NotAdmitted("x", ""),
        RevocationsRequest(NOTHING_REVOKED),
        Revocations(bytes(32), (b"x",)),
    )
    assert {type(each) for each in messages} == set(get_args(AdmissionMessage))
    answers = []
    for message in messages:
        issuer.receive(message, node_of(STRANGER), START)
        answers += [type(each.message) for each in effects_of(issuer) if isinstance(each, Send)]
    assert answers == [NotAdmitted, NotAdmitted, Revocations]
