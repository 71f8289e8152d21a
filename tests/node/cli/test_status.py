"""`status`, `peers`, `ping` and `invite` against a control socket that answers what the test says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from kvasir_node import control
from kvasir_node.driver.status_report import StatusSources, status_document
from kvasir_node.home_lock import HomeLock
from kvasir_node.locations import locate
from kvasir_node.swarm_files import SwarmFiles
from kvasir_proto.admission import Invite, format_invite
from kvasir_proto.codec import encode
from kvasir_proto.effects import Slot
from kvasir_proto.election.elector import StoredPromises
from kvasir_proto.election.knowledge import StoredElectorates, StoredFence
from kvasir_proto.election.states import Role
from kvasir_proto.errors import TransportUnavailable
from kvasir_proto.ids import NodeId, SwarmDigest, node_id_of
from kvasir_proto.instants import Instant, seconds
from kvasir_proto.messages.local import InviteRequest, PingRequest
from kvasir_proto.swarm_manifest import sign_swarm_manifest
from kvasir_proto.term_proof import ProvenTerm, cast_vote, make_electorate, make_term_proof
from kvasir_proto.verdicts_in_force import VerdictInForce
from tests.node.cli.daemon_twin import twin_daemon
from tests.node.cli.invocation import TIMEOUT_S, Outcome, call
from tests.node.driver import test_status_report as views

pytestmark = pytest.mark.loopback

OWN, SECOND, THIRD, FOURTH, FIFTH = views.OWN, views.SECOND, views.THIRD, views.FOURTH, views.FIFTH
WIDE_REASON = "no answer to a direct probe nor to three indirect ones, and it has not refuted that yet; " * 2


def joining() -> dict[str, Any]:
    """What a daemon says before it knows anything."""
    return status_document(
        StatusSources(node_id=OWN, state="joining", reason="looking for the swarm", started=Instant(0)),
        Instant(seconds(1)),
    )


def backbone(**changes: Any) -> dict[str, Any]:
    """What the backbone of a swarm of five says: one well, one dead, one slow, one that loads."""
    term = ProvenTerm(2, 31, OWN)
    members = (
        views.member(SECOND, reason="it answers"),
        views.member(THIRD, state="dead", reason=WIDE_REASON, rtt=None),
        views.member(FOURTH, path="indirect", condition="indirect", last_seen=None),
        views.member(FIFTH, condition="clock_wrong", clock_offset=seconds(700)),
    )
    view = views.served(
        views.plan_of_equals(epoch=2, term=31, degraded="no other node adds in F32"),
        SECOND,
        fence=term,
        role=Role.BACKBONE,
        members=members,
        electorate=make_electorate(2, "open", views.PUBLIC_KEYS[:4]),
        clock_offset=seconds(-700),
    )
    known = {
        SECOND: views.record(SECOND, accumulation="F32"),
        THIRD: views.record(THIRD),
        FOURTH: views.record(FOURTH, backend="ggml-vulkan", accumulation="F16"),
    }
    connections = [{"node_id": SECOND, "state": "serving", "reason": "", "shard_bytes": 1 << 20}]
    return views.document(
        view,
        known,
        swarm=views.swarm_with(admission="invite"),
        state="degraded",
        reason="no other node adds in F32",
        addresses=(f"/ip4/127.0.0.1/tcp/40001/p2p/{OWN}", f"/ip4/192.0.2.7/tcp/40001/p2p/{OWN}"),
        backbone={"holders": connections},
        last_error={
            "last_error": "the worker engine has ended: killed by SIGKILL, and what it said was lost",
            "last_error_at": "2026-11-30T09:00:00+00:00",
            "last_error_recovered": True,
        },
        **changes,
    )


def test_a_member_in_quarantine_says_why_and_for_how_long(tmp_path: Path) -> None:
    until = Instant(views.NOW + seconds(540))
    for claim, n_electors, ends in (
        (None, 0, "planned without for another 9 min"),
        (bytes(32), 0, "planned without until it is certified anew"),
        (bytes(32), 3, "3 electors recomputed its rows; planned without until it is certified anew"),
    ):
        entry = VerdictInForce(SECOND, "quarantined", "malformed: not an answer", until, claim, n_electors)
        members = (views.member(SECOND),)
        document = views.document(views.view_with(members=members, verdicts=(entry,)))
        with twin_daemon(tmp_path, document):
            out = call("status", home=tmp_path).out
        expected = f"quarantined: malformed: not an answer; {ends}"
        assert expected in " ".join(out.split())


def test_a_plan_that_is_not_in_force_is_not_shown_as_if_it_were(tmp_path: Path) -> None:
    document = views.document(views.served(views.plan_of_equals(), SECOND, fence=ProvenTerm(0, 4, THIRD)))
    with twin_daemon(tmp_path, document):
        out = call("status", home=tmp_path).out
    assert "plan      term 3, revision 7 is the last this node was told of" in out
    assert "experts held" not in out


def lines_of(outcome: Outcome) -> list[str]:
    assert outcome.err == ""
    return outcome.out.splitlines()


@pytest.mark.parametrize("document", [joining(), backbone()])
def test_what_people_see_fits_80_columns_and_has_no_colour(tmp_path: Path, document: dict[str, Any]) -> None:
    with twin_daemon(tmp_path, document):
        outcome = call("status", home=tmp_path)
    assert outcome.status == 0
    assert max(map(len, lines_of(outcome))) <= 80
    assert "\x1b" not in outcome.out


def test_a_backbone_shows_term_electors_coverage_members_and_the_last_error(tmp_path: Path) -> None:
    with twin_daemon(tmp_path, backbone()):
        out = call("status", home=tmp_path).out
    for line in (
        "state     degraded (no other node adds in F32)",
        f"node      {OWN}, elector",
        "backbone  this node, epoch 2, term 31",
        "electors  4 electors, quorum 3, open",
        "plan      term 31, revision 7, 16 of 32 experts held, at least 0 holder(s)",
        "degraded  no other node adds in F32",
        "missing   and 1 more ranges: see --json",
        "clock     700 s ahead of most members: set it right",
        "address   /ip4/192.0.2.7/tcp/40001",
    ):
        assert line in out.splitlines(), line
    assert "certificates claimed, by invitation" in out
    assert "killed by SIGKILL" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith("…")}
    assert rows[f"…{SECOND[-8:]}"][1:] == [
        *("serving", "ggml-cpu", "F32", "claimed", "out+bulk", "16", "2.0ms", "direct", "0.5s"),
    ]
    words = [
        line.split()[1]
        for line in out.splitlines()
        if line.startswith("…") and not line.split()[1].endswith(":")
    ]
    assert words == ["serving", "dead", "indirect", "clock"]
    assert f"…{THIRD[-8:]}  dead: no answer to a direct probe" in out
    assert "it answers" not in out, "what is well needs no reason"


@pytest.mark.parametrize(
    "said, line",
    [
        ({"is_answering": True, "address": "http://[::1]:8585"}, "http://[::1]:8585/v1"),
        (
            {"is_answering": True, "address": "http://0.0.0.0:1", "needs_token": True},
            "http://0.0.0.0:1/v1, with a token",
        ),
        ({"reason": "port 8585 is in use"}, "none: port 8585 is in use"),
        ({"is_enabled": False}, None),
    ],
)
def test_where_openai_clients_are_answered(tmp_path: Path, said: dict[str, Any], line: str | None) -> None:
    document = joining()
    document["gateway"] |= {"is_enabled": True, "reason": ""} | said
    with twin_daemon(tmp_path, document):
        lines = lines_of(call("status", home=tmp_path))
    found = [each.partition(" ")[2].strip() for each in lines if each.startswith("gateway ")]
    assert found == ([] if line is None else [line])


def test_a_node_that_joins_says_what_it_knows(tmp_path: Path) -> None:
    with twin_daemon(tmp_path, joining()):
        lines = lines_of(call("status", home=tmp_path))
    assert lines[:2] == ["state     joining (looking for the swarm)", f"node      {OWN}"]
    assert [line.split()[0] for line in lines if line] == ["state", "node", "MEMBER", "this"]


def test_what_other_nodes_say_cannot_steer_the_terminal(tmp_path: Path) -> None:
    document = backbone()
    document["members"][0] |= {"backend": "\x1b[31mred", "reason": "two\nlines \x07"}
    with twin_daemon(tmp_path, document):
        outcomes = [call("status", home=tmp_path), call("peers", home=tmp_path)]
    assert not any(set(each.out) & {"\x1b", "\x07"} for each in outcomes)


@pytest.mark.parametrize("state, status", [("ready", 0), ("degraded", 0), ("joining", 1), ("electing", 1)])
def test_check_is_one_line_and_a_status(tmp_path: Path, state: str, status: int) -> None:
    with twin_daemon(tmp_path, joining() | {"state": state, "reason": "for this"}) as daemon:
        outcome = call("status", "--check", home=tmp_path)
        assert (outcome.status, outcome.out) == (status, f"{state}: for this\n")
        daemon.document["reason"] = ""
        assert call("status", "--check", home=tmp_path).out == f"{state}\n"
        assert call("status", "--check", "--json", home=tmp_path).document == {
            "schema_version": 1,
            "state": state,
            "reason": "",
        }


def remember(home: Path) -> tuple[NodeId, SwarmDigest]:
    """A home whose node was in a swarm, in (0, 4)."""
    node_id = NodeId(call("init", "--json", home=home).document["node_id"])
    swarm = views.swarm_with()
    files = SwarmFiles(home / "state")
    files.save_swarm(sign_swarm_manifest(swarm.manifest, views.KEYS[0]))
    alone = make_electorate(0, "pinned", views.PUBLIC_KEYS[:1])
    term = ProvenTerm(0, 4, OWN)
    proof = make_term_proof(alone, term, [cast_vote(views.KEYS[0], swarm.digest, alone, term)])
    files.claim_slots(swarm.digest, node_id)
    files.save_slot("fence", encode(StoredFence(proof)))
    return node_id, swarm.digest


def test_without_a_daemon_it_says_what_the_home_remembers(tmp_path: Path) -> None:
    node_id, swarm = remember(tmp_path)
    outcome = call("status", "--json", home=tmp_path)
    assert outcome.status == 3
    document = outcome.document
    assert document.pop("reason").startswith("no daemon runs in this home")
    assert document == {
        "schema_version": 1,
        "state": "not running",
        "node_id": node_id,
        "swarm": swarm.hex(),
        "model_name": "tiny",
        "epoch": 0,
        "term": 4,
        "backbone": OWN,
        "damaged": "",
    }
    outcome = call("status", home=tmp_path)
    assert outcome.status == 3
    assert lines_of(outcome)[0].startswith("state     not running (no daemon runs in this home")
    assert f"backbone  last known: …{OWN[-8:]}, epoch 0, term 4" in lines_of(outcome)
    assert f"node      {node_id}" in lines_of(outcome)
    assert max(map(len, lines_of(outcome))) <= 80


def test_a_home_that_knows_nothing_and_a_damaged_one_are_said_so(tmp_path: Path) -> None:
    outcome = call("status", home=tmp_path / "new")
    assert outcome.status == 3
    assert "node      none: this home has no identity yet" in lines_of(outcome)
    assert "swarm     none: this home has founded or joined no swarm" in lines_of(outcome)
    assert not (tmp_path / "new").exists(), "looking makes nothing"
    node_id, _ = remember(tmp_path)
    (tmp_path / "state" / "swarm-manifest").write_bytes(b"damaged")
    outcome = call("status", "--json", home=tmp_path)
    assert (outcome.status, outcome.document["node_id"]) == (3, node_id)
    assert "swarm-manifest is damaged" in outcome.document["damaged"]


@pytest.mark.parametrize("name", ["slot-fence", "slot-election", "slots-owner"])
def test_any_damaged_file_is_named_and_the_rest_is_said(tmp_path: Path, name: str) -> None:
    node_id, swarm = remember(tmp_path)
    (tmp_path / "state" / name).write_bytes(b"damaged")
    outcome = call("status", "--json", home=tmp_path)
    assert outcome.status == 3
    document = outcome.document
    assert (document["node_id"], document["swarm"]) == (node_id, swarm.hex())
    assert f"{name} is damaged" in document["damaged"]


@pytest.mark.parametrize("slot", get_args(Slot))
def test_what_a_core_would_refuse_in_a_slot_is_named_with_its_path(tmp_path: Path, slot: Slot) -> None:
    """Damage below the outermost frame ended `run` with 1, and the sentence had no path."""
    remember(tmp_path)
    files = SwarmFiles(tmp_path / "state")
    inside: dict[Slot, bytes] = {
        "election": encode(StoredPromises(b"no", (), 0, 0, b"", b"")),
        "electorate": encode(StoredElectorates(True, (b"no",), ())),
        "fence": encode(StoredFence(b"no")),
    }
    files.save_slot(slot, inside.get(slot, b"no"))
    said = f"{tmp_path / 'state'}/slot-{slot} is damaged: "
    assert said in call("status", "--json", home=tmp_path).document["damaged"]
    outcome = call("run", home=tmp_path)
    assert outcome.status == 6
    assert said in outcome.sentence


def test_another_identity_than_the_slots_is_said(tmp_path: Path) -> None:
    node_id, _ = remember(tmp_path)
    (tmp_path / "identity.pem").unlink()
    other = call("init", "--json", home=tmp_path).document["node_id"]
    said = call("status", "--json", home=tmp_path).document["damaged"]
    assert f"is node {node_id}'s, and the identity of this home is {other}" in said
    outcome = call("run", home=tmp_path)
    assert (outcome.status, outcome.sentence) == (6, said)


def test_check_without_a_daemon_is_3_and_with_a_deaf_one_1(tmp_path: Path) -> None:
    outcome = call("status", "--check", home=tmp_path)
    assert (outcome.status, len(lines_of(outcome))) == (3, 1)
    assert outcome.out.startswith("not running: ")
    with HomeLock(tmp_path / "lock"):
        outcome = call("status", "--check", home=tmp_path)
    assert outcome.status == 1
    assert outcome.out.startswith("unreachable: ")


@pytest.fixture
def mute_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A daemon that holds its home and its socket, and says nothing, as after SIGSTOP."""
    monkeypatch.setattr(control, "REQUEST_TIMEOUT_S", 0.2)
    locations = locate(tmp_path, {})
    locations.prepare()
    with HomeLock(locations.lock_file), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(locations.control_socket))
        listener.listen()
        yield


@pytest.mark.usefixtures("mute_daemon")
def test_a_mute_daemon_is_unreachable_in_every_form_of_status(tmp_path: Path) -> None:
    """`status --json` and `--check` printed nothing on standard output, where the page promises an object."""
    forms: list[tuple[str, ...]] = [(), ("--json",), ("--check",), ("--check", "--json")]
    outcomes = {form: call("status", *form, home=tmp_path) for form in forms}
    assert {each.status for each in outcomes.values()} == {1}
    assert "unreachable (the daemon did not answer within 0.2 s)" in outcomes[()].out
    assert outcomes[("--check",)].out == "unreachable: the daemon did not answer within 0.2 s\n"
    for form in [("--json",), ("--check", "--json")]:
        document = outcomes[form].document
        assert (document["state"], document["reason"]) == (
            "unreachable",
            "the daemon did not answer within 0.2 s",
        )


def watch(home: Path, *arguments: str, seconds_long: float) -> tuple[int, str]:
    """What `status --watch` shows until it is interrupted after so long, and its exit status."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvasir_node", "--home", str(home), "status", "--watch", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(seconds_long)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert err == b"", err
    return process.returncode, (first + out).decode()


def test_watch_shows_it_again_until_ctrl_c(tmp_path: Path) -> None:
    with twin_daemon(tmp_path, joining()):
        status, out = watch(tmp_path, "--json", seconds_long=2.5)
    shown = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [each["state"] for each in shown] == ["joining"] * 2
    assert shown[0]["node_id"] == OWN


@pytest.mark.slow
def test_watch_goes_on_without_a_daemon(tmp_path: Path) -> None:
    status, out = watch(tmp_path, seconds_long=2.5)
    assert status == 0
    assert out.count("state     not running") == 2


def test_check_and_watch_exclude_each_other(tmp_path: Path) -> None:
    assert call("status", "--check", "--watch", home=tmp_path).status == 2


# --- `peers` ------------------------------------------------------------------------------------------------


def test_members_are_listed_with_path_and_round_trip_and_their_addresses_below(tmp_path: Path) -> None:
    with twin_daemon(tmp_path, backbone()):
        outcome = call("peers", home=tmp_path)
        members = call("peers", "--json", home=tmp_path).document["members"]
    lines = [line.split() for line in lines_of(outcome)]
    assert lines[:5] == [
        [OWN, "this", "node", "-", "-"],
        ["/ip4/127.0.0.1/tcp/40001"],
        ["/ip4/192.0.2.7/tcp/40001"],
        [SECOND, "serving", "direct", "2.0ms"],
        ["/ip4/127.0.0.1/tcp/4001"],
    ]
    assert [line[0] for line in lines if len(line) > 1] == [OWN, SECOND, THIRD, FOURTH, FIFTH]
    assert lines[5][1:3] == ["dead", "direct"]
    assert max(map(len, lines_of(outcome))) <= 80
    assert [each["node_id"] for each in members] == [SECOND, THIRD, FOURTH, FIFTH]
    assert members[0]["addresses"] == [f"/ip4/127.0.0.1/tcp/4001/p2p/{SECOND}"]


@pytest.mark.parametrize("word, n_electors", [("quarantined", 3), ("unfit", 3), ("unfit", 0)])
def test_what_electors_have_found_of_a_member_is_said_with_its_reason(
    tmp_path: Path, word: Any, n_electors: int
) -> None:
    """By `peers` and `status` alike, on a member that is not the backbone too."""
    why = "3 of 3 rows that it gave differ by what explains nothing"
    entry = VerdictInForce(SECOND, word, why, views.NOW, bytes(32), n_electors)
    plan = views.plan_of_equals()
    view = views.served(
        plan, SECOND, fence=ProvenTerm(0, 4, THIRD), members=(views.member(SECOND),), verdicts=(entry,)
    )
    with twin_daemon(tmp_path, views.document(view)):
        (said,) = call("peers", "--json", home=tmp_path).document["members"]
        printed = [call(command, home=tmp_path).out for command in ("peers", "status")]
    assert (said["verdict"]["word"], said["verdict"]["electors"]) == (word, n_electors)
    for out in printed:
        flat = " ".join(out.split())
        assert word in flat
        assert why in flat
        assert ("3 electors recomputed its rows" in flat) == bool(n_electors)


@pytest.mark.parametrize("command", [("peers",), ("ping", "all"), ("invite",)])
def test_without_a_daemon_there_is_nobody_to_ask(tmp_path: Path, command: tuple[str, ...]) -> None:
    outcome = call(*command, home=tmp_path)
    assert outcome.status == 3
    assert outcome.sentence.startswith("no daemon runs in this home")


@pytest.mark.parametrize("output", [">/dev/full", "| exec 0<&-"])
@pytest.mark.parametrize(
    "command", ["status --json", "peers", "ping all --count 2 --interval 0", "ping all --json"]
)
def test_an_output_that_takes_nothing_is_status_1(tmp_path: Path, command: str, output: str) -> None:
    """A full disk, and a reader that has gone: `| head` has as much as it wanted."""
    with twin_daemon(tmp_path, backbone()):
        line = f'{sys.executable} -m kvasir_node --home "$0" {command}'
        shell = f"{line} {output}" if output[0] == ">" else f"({line}; echo $? >&3) 3>&2 {output}"
        done = subprocess.run(
            ["/bin/bash", "-c", shell, str(tmp_path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    said = done.stderr.decode().splitlines()
    if output[0] == ">":
        assert done.returncode == 1, said
        assert len(said) == 1, said
        assert said[0].startswith("kvasir-node: standard output cannot be written: No space left"), said
    else:
        assert said == ["1"], said


# --- ping ---------------------------------------------------------------------------------------------------


def test_ping_measures_as_often_as_it_is_told(tmp_path: Path) -> None:
    with twin_daemon(tmp_path, backbone()) as daemon:
        outcome = call(
            "ping", SECOND[-8:], "--count", "2", "--interval", "0", "--timeout", "2", home=tmp_path
        )
    assert daemon.pinged == [PingRequest(SECOND, 2000)] * 2
    short = f"…{SECOND[-8:]}"
    assert lines_of(outcome) == [
        f"answer from {short}: number=1 time=1.50 ms",
        f"answer from {short}: number=2 time=1.50 ms",
        "",
        f"{short}: 2 sent, 2 answered, 0 % lost; min/mean/max 1.50/1.50/1.50 ms",
    ]
    assert outcome.status == 0


def test_a_member_that_does_not_answer_is_counted_and_is_status_1(tmp_path: Path) -> None:
    def answer(request: PingRequest) -> int:
        if request.node_id == FOURTH:
            raise TransportUnavailable("nobody listens there")
        return 2_000_000

    with twin_daemon(tmp_path, backbone()) as daemon:
        daemon.round_trip = answer
        outcome = call("ping", "all", "--count", "1", "--json", home=tmp_path)
        shown = call("ping", FOURTH, "--count", "1", home=tmp_path)
    assert outcome.status == 1
    members = {each["node_id"]: each for each in outcome.document["members"]}
    assert set(members) == {SECOND, FOURTH, FIFTH}, "the dead are not asked"
    assert (members[SECOND]["answered"], members[SECOND]["mean_ms"]) == (1, 2.0)
    assert (members[FOURTH]["sent"], members[FOURTH]["answered"], members[FOURTH]["mean_ms"]) == (1, 0, None)
    assert members[FOURTH]["last_reason"] == "nobody listens there"
    assert shown.status == 1
    assert "1 sent, 0 answered, 100 % lost" in shown.out


@pytest.mark.parametrize(
    "target, sentence",
    [
        ("nosuch", "no member's id ends with 'nosuch'"),
        (OWN, "that is this node itself"),
        ("", "no member's id ends with ''"),
    ],
)
def test_a_target_that_is_nobody_is_a_wrong_call(tmp_path: Path, target: str, sentence: str) -> None:
    with twin_daemon(tmp_path, backbone()):
        outcome = call("ping", target, home=tmp_path)
    assert outcome.status == 2
    assert sentence in outcome.sentence


def test_an_ending_of_several_ids_is_a_wrong_call(tmp_path: Path) -> None:
    document = backbone()
    document["members"].append(document["members"][0] | {"node_id": "X" + SECOND[1:]})
    with twin_daemon(tmp_path, document):
        outcome = call("ping", f"…{SECOND[-8:]}", home=tmp_path)
    assert outcome.status == 2
    assert "2 members' ids end" in outcome.sentence


def test_pinging_all_where_there_is_nobody_is_a_wrong_call(tmp_path: Path) -> None:
    with twin_daemon(tmp_path, joining()):
        assert call("ping", "all", home=tmp_path).status == 2


# --- invite -------------------------------------------------------------------------------------------------


def invite_for(
    request: InviteRequest | None = None, *, lasts: int = seconds(3600), host: str = "192.0.2.7"
) -> str:
    return format_invite(
        Invite(
            swarm=views.swarm_with().digest,
            electorate_digest=bytes(32),
            issuer=OWN,
            secret=bytes(16),
            expires=time.time_ns() + lasts,
            ranks=request.ranks if request is not None else ("bulk",),
            addresses=(f"/ip4/{host}/tcp/4001/p2p/{OWN}",),
        )
    )


def test_an_invite_alone_is_on_standard_output(tmp_path: Path) -> None:
    with twin_daemon(tmp_path, backbone()) as daemon:
        daemon.invite = invite_for
        outcome = call("invite", "--ranks", "bulk,output", "--expires", "30m", home=tmp_path)
        document = call("invite", "--json", home=tmp_path).document
    assert daemon.invited == [
        InviteRequest(("output", "bulk"), seconds(1800)),
        InviteRequest(("backbone", "output", "bulk"), seconds(3600)),
    ]
    assert outcome.out.startswith("kvasir-invite-1:")
    assert len(outcome.out.splitlines()) == 1
    assert "admits one node, as output, bulk, until" in outcome.err
    assert "this machine only" not in outcome.err
    assert document["issuer"] == OWN
    assert document["ranks"] == ["backbone", "output", "bulk"]
    assert document["swarm"] == views.swarm_with().digest.hex()
    assert document["expires_in_s"] == 3600


def test_an_invite_that_leads_nowhere_else_is_said_to(tmp_path: Path) -> None:
    with twin_daemon(tmp_path, backbone()) as daemon:
        daemon.invite = lambda request: invite_for(request, host="127.0.0.1")
        assert "leads to this machine only" in call("invite", home=tmp_path).err


def test_a_node_that_may_not_invite_says_so(tmp_path: Path) -> None:
    with twin_daemon(tmp_path, joining()):
        outcome = call("invite", home=tmp_path)
    assert outcome.status == 1
    assert outcome.sentence == "only an elector or the founder invites"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--expires", "1"),
        ("--expires", "0s"),
        ("--expires", "31d"),
        ("--ranks", "chief"),
        ("--ranks", "bulk,bulk"),
    ],
)
def test_an_invite_asked_for_wrongly_is_status_2(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with twin_daemon(tmp_path, backbone()) as daemon:
        assert call("invite", *arguments, home=tmp_path).status == 2
    assert daemon.invited == []


# --- init --join --------------------------------------------------------------------------------------------


def test_an_invite_is_kept_for_the_daemon(tmp_path: Path) -> None:
    text = invite_for()
    outcome = call("init", "--join", text, "--json", home=tmp_path)
    assert outcome.status == 0
    assert outcome.document["joins"] == views.swarm_with().digest.hex()
    kept = SwarmFiles(tmp_path / "state").load_invite()
    assert kept is not None
    assert format_invite(kept) == text
    assert (
        f"Enter the swarm with: kvasir-node --home {tmp_path} run"
        in call("init", "--join", text, home=tmp_path).out
    )


def test_an_address_is_kept_for_the_daemon(tmp_path: Path) -> None:
    first, second = (f"/ip4/192.0.2.{number}/tcp/4001/p2p/{OWN}" for number in (1, 2))
    for address in (first, second, first):
        assert call("init", "--join", address, home=tmp_path).status == 0
    assert SwarmFiles(tmp_path / "state").load_bootstrap() == (first, second)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("nonsense", "--join takes an invite, which begins with kvasir-invite-1:, or the address"),
        ("kvasir-invite-9:AAAA", "an invite begins with kvasir-invite-1:"),
        (invite_for()[:-3], "the invite was not copied whole and unchanged"),
        (invite_for().swapcase(), "--join takes an invite"),
        (invite_for(lasts=-seconds(7200)), "the invite expired at"),
    ],
)
@pytest.mark.parametrize("command", ["init", "run"])
def test_an_invite_nobody_can_use_is_a_wrong_call(
    tmp_path: Path, command: str, text: str, sentence: str
) -> None:
    outcome = call(command, "--join", text, home=tmp_path / "home")
    assert outcome.status == 2
    assert sentence in outcome.sentence
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("text", ["/ip4/192.0.2.7/tcp/4001", "/nonsense", ""])
def test_an_address_that_is_none_is_a_wrong_call(tmp_path: Path, text: str) -> None:
    assert call("init", "--join", text, home=tmp_path).status == 2


def test_one_cannot_found_and_join(tmp_path: Path) -> None:
    assert call("init", "--found", "--join", invite_for(), home=tmp_path).status == 2


def test_a_home_stays_in_its_swarm(tmp_path: Path) -> None:
    SwarmFiles(tmp_path / "state").save_swarm(
        sign_swarm_manifest(views.swarm_with(partial_sums=False).manifest, views.KEYS[0])
    )
    outcome = call("init", "--join", invite_for(), home=tmp_path)
    assert outcome.status == 6
    assert "the invite is for another" in outcome.sentence


def test_an_invite_can_come_on_standard_input(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvasir_node", "--home", str(tmp_path), "init", "--join", "-", "--json"],
        input=invite_for().encode() + b"\n",
        capture_output=True,
        timeout=TIMEOUT_S,
        check=True,
        env=os.environ,
    )
    assert json.loads(done.stdout)["joins"] == views.swarm_with().digest.hex()


def test_ids_used_here_are_ids() -> None:
    assert node_id_of(views.PUBLIC_KEYS[0]) == OWN
