"""What a node remembers survives, stays private, and is refused by name when it is damaged."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node.durable_file import durable_file
from kvasir_node.swarm_files import KnownSwarm, SwarmFiles
from kvasir_proto.admission import AdmissionKept, Invite, format_invite
from kvasir_proto.codec import encode
from kvasir_proto.effects import Slot
from kvasir_proto.election.elector import StoredPromises
from kvasir_proto.election.knowledge import StoredElectorates, StoredFence
from kvasir_proto.errors import ConfigurationInvalid, DiskFull, KvasirError
from kvasir_proto.ids import NodeId, SwarmDigest, node_id_of
from kvasir_proto.messages.membership import ReservedIncarnations
from kvasir_proto.placement.plan import Plan
from kvasir_proto.records import RecordsKept
from kvasir_proto.term_proof import ProvenTerm, cast_vote, make_electorate, make_term_proof
from kvasir_proto.verdicts_in_force import VerdictsKept
from tests.proto.declared import example_of

MODEL_DIGEST = bytes(range(32))
KEPT = encode(ReservedIncarnations(64))


def contents() -> dict[Slot, bytes]:
    """Something in every slot that a core could have persisted."""
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    public_key, swarm = key.public_key().public_bytes_raw(), SwarmDigest(bytes(32))
    alone = make_electorate(0, "pinned", [public_key])
    term = ProvenTerm(0, 95, node_id_of(public_key))
    vote = cast_vote(key, swarm, alone, term)
    return {
        "admission": encode(AdmissionKept((), None, (), (public_key,), ())),
        "election": encode(StoredPromises(encode(vote), (), 0, 95, b"", b"")),
        "electorate": encode(StoredElectorates(True, (), ())),
        "fence": encode(StoredFence(make_term_proof(alone, term, [vote]))),
        "incarnation": KEPT,
        "plan": encode(example_of(Plan)),
        "records": encode(RecordsKept(0, 0, ())),
        "verdicts": encode(example_of(VerdictsKept)),
    }


@pytest.fixture
def key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


@pytest.fixture
def files(tmp_path: Path) -> SwarmFiles:
    return SwarmFiles(tmp_path / "state")


def found(files: SwarmFiles, key: Ed25519PrivateKey) -> KnownSwarm:
    return files.found(key, MODEL_DIGEST, "model")


OTHER_SWARM = SwarmDigest(bytes(32))
OTHER_NODE = node_id_of(bytes(32))


def claimed(files: SwarmFiles) -> SwarmFiles:
    """With slots that some node of some swarm may write."""
    files.claim_slots(OTHER_SWARM, OTHER_NODE)
    return files


def invite_to(swarm: SwarmDigest) -> str:
    address = f"/ip4/10.0.0.1/tcp/4001/p2p/{node_id_of(bytes(32))}"
    return format_invite(Invite(swarm, bytes(32), node_id_of(bytes(32)), bytes(16), 1, ("bulk",), (address,)))


def test_what_was_founded_is_loaded_again(files: SwarmFiles, key: Ed25519PrivateKey) -> None:
    founded = found(files, key)
    assert files.is_founder(key)
    assert not files.is_founder(Ed25519PrivateKey.generate())
    assert files.load_swarm() == founded
    assert founded.swarm.manifest.model_digest == MODEL_DIGEST


def test_every_file_is_readable_by_its_owner_only(
    files: SwarmFiles, key: Ed25519PrivateKey, tmp_path: Path
) -> None:
    founded = found(claimed(files), key)
    for slot in get_args(Slot):
        files.save_slot(slot, b"kept")
    files.save_invite(invite_to(founded.swarm.digest))
    files.next_generation()
    directory = tmp_path / "state"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    names = {each.name: stat.S_IMODE(each.stat().st_mode) for each in directory.iterdir()}
    assert len(names) == 5 + len(get_args(Slot))
    assert set(names.values()) == {0o600}, names


def test_slots_are_one_nodes_in_one_swarm(files: SwarmFiles, key: Ed25519PrivateKey, tmp_path: Path) -> None:
    """Whoever took over votes and fences that it never gave would keep neither those promises nor its own."""
    swarm, node_id = found(files, key).swarm.digest, node_id_of(key.public_key().public_bytes_raw())
    files.claim_slots(swarm, node_id)
    files.save_slot("incarnation", KEPT)
    files.claim_slots(swarm, node_id)
    files.check_undamaged()
    with pytest.raises(ConfigurationInvalid, match=f"is node {node_id}'s, and the identity of this home is"):
        files.claim_slots(swarm, OTHER_NODE)
    with pytest.raises(ConfigurationInvalid, match="use another --home"):
        files.claim_slots(OTHER_SWARM, node_id)
    another = SwarmFiles(tmp_path / "another")
    signed = another.found(Ed25519PrivateKey.generate(), MODEL_DIGEST, "model").signed_manifest
    manifest = (tmp_path / "state" / "swarm-manifest").read_bytes()
    with pytest.raises(ConfigurationInvalid, match=r"move the files slot-\* and slots-owner"):
        files.save_swarm(signed)
    assert (tmp_path / "state" / "swarm-manifest").read_bytes() == manifest
    (tmp_path / "state" / "slots-owner").write_bytes(b"damaged")
    with pytest.raises(ConfigurationInvalid, match="slots-owner is damaged"):
        files.check_undamaged()


def test_no_swarm_is_founded_over_what_is_left_of_another(
    files: SwarmFiles, key: Ed25519PrivateKey, tmp_path: Path
) -> None:
    founded = found(files, key)
    files.claim_slots(founded.swarm.digest, OTHER_NODE)
    files.save_slot("incarnation", KEPT)
    (tmp_path / "state" / "swarm-manifest").unlink()
    before = {each.name: each.read_bytes() for each in (tmp_path / "state").iterdir()}
    with pytest.raises(ConfigurationInvalid, match="swarm-manifest is missing: put back a copy"):
        found(files, key)
    assert {each.name: each.read_bytes() for each in (tmp_path / "state").iterdir()} == before
    files.save_swarm(founded.signed_manifest)
    assert files.load_swarm() == founded


def test_no_recovery_key_is_ever_written_over(
    files: SwarmFiles, key: Ed25519PrivateKey, tmp_path: Path
) -> None:
    found(files, key)
    recovery_key = files.recovery_key_file.read_bytes()
    (tmp_path / "state" / "swarm-manifest").unlink()
    again = found(files, key)
    assert files.recovery_key_file.read_bytes() == recovery_key
    public = Ed25519PrivateKey.from_private_bytes(recovery_key).public_key().public_bytes_raw()
    assert again.swarm.manifest.recovery_public_key == public
    files.recovery_key_file.write_bytes(b"damaged")
    (tmp_path / "state" / "swarm-manifest").unlink()
    with pytest.raises(ConfigurationInvalid, match="recovery-key is damaged"):
        found(files, key)


def test_the_recovery_key_is_another_key_than_the_nodes(files: SwarmFiles, key: Ed25519PrivateKey) -> None:
    founded = found(files, key)
    recovery = Ed25519PrivateKey.from_private_bytes(files.recovery_key_file.read_bytes())
    public = recovery.public_key().public_bytes_raw()
    assert public == founded.swarm.manifest.recovery_public_key
    assert public != founded.swarm.manifest.founder_public_key


def test_a_home_stays_in_its_swarm(files: SwarmFiles, key: Ed25519PrivateKey, tmp_path: Path) -> None:
    founded = found(files, key)
    recovery_key = files.recovery_key_file.read_bytes()
    with pytest.raises(ConfigurationInvalid, match="belongs to swarm"):
        found(files, key)
    assert files.load_swarm() == founded
    assert files.recovery_key_file.read_bytes() == recovery_key
    other = found(SwarmFiles(tmp_path / "other"), Ed25519PrivateKey.generate())
    with pytest.raises(ConfigurationInvalid, match="for another"):
        files.save_invite(invite_to(other.swarm.digest))
    joined = SwarmFiles(tmp_path / "joined")
    joined.save_swarm(other.signed_manifest)
    with pytest.raises(ConfigurationInvalid, match="belongs to swarm"):
        found(joined, key)
    assert not joined.is_founder(key)


def test_a_founding_that_was_interrupted_can_be_done_again(
    files: SwarmFiles, key: Ed25519PrivateKey, tmp_path: Path
) -> None:
    found(files, key)
    (tmp_path / "state" / "swarm-manifest").unlink()
    assert not files.is_founder(key)
    assert files.load_swarm() is None
    assert found(files, key) == files.load_swarm()


def test_a_home_of_a_build_without_elections_is_said(files: SwarmFiles, tmp_path: Path) -> None:
    files.next_generation()
    (tmp_path / "state" / "term-proof").write_bytes(b"x")
    with pytest.raises(ConfigurationInvalid, match="without elections"):
        files.check_undamaged()


def test_nothing_is_known_in_a_fresh_home(files: SwarmFiles, key: Ed25519PrivateKey) -> None:
    files.check_undamaged()
    assert not files.is_founder(key)
    assert (files.load_swarm(), files.load_invite(), files.load_slots()) == (None, None, {})


def test_an_invite_is_kept_until_another_comes(files: SwarmFiles) -> None:
    for number in (1, 2):
        text = invite_to(SwarmDigest(bytes([number]) * 32))
        files.save_invite(f"  {text[:40]}\n{text[40:]}\n")
        invite = files.load_invite()
        assert invite is not None
        assert invite.swarm == bytes([number]) * 32


@pytest.mark.parametrize("told", ["invite", "bootstrap"])
def test_no_swarm_is_founded_in_a_home_that_was_told_to_enter_one(
    files: SwarmFiles, key: Ed25519PrivateKey, told: str
) -> None:
    """Its daemon went to the other swarm's members, and both saw one that answered nothing they asked."""
    if told == "invite":
        files.save_invite(invite_to(OTHER_SWARM))
    else:
        files.save_bootstrap([f"/ip4/10.0.0.1/tcp/4001/p2p/{OTHER_NODE}"])
    path = files.recovery_key_file.parent / told
    with pytest.raises(ConfigurationInvalid, match=f"told to enter a swarm .{path}.: .* or remove that file"):
        found(files, key)
    assert not files.recovery_key_file.exists()
    path.unlink()
    found(files, key)


def test_an_invite_beside_another_swarms_manifest_ends_a_start(
    files: SwarmFiles, key: Ed25519PrivateKey, tmp_path: Path
) -> None:
    """As builds before this one let a home come to have."""
    files.save_invite(invite_to(OTHER_SWARM))
    files.check_undamaged()
    founded = found(SwarmFiles(tmp_path / "other"), key)
    files.save_swarm(founded.signed_manifest)
    with pytest.raises(
        ConfigurationInvalid, match=r"/invite is for another swarm than .*: remove it"
    ) as caught:
        files.check_undamaged()
    assert caught.value.exit_code == 6
    files.save_invite(invite_to(founded.swarm.digest))
    files.check_undamaged()


def test_slots_are_kept_whole(files: SwarmFiles, tmp_path: Path) -> None:
    claimed(files)
    for data in (b"one", b"two"):
        files.save_slot("fence", data)
        files.save_slot("election", data * 2)
    assert SwarmFiles(tmp_path / "state").load_slots() == {"fence": b"two", "election": b"twotwo"}


def test_generations_only_grow(files: SwarmFiles, tmp_path: Path) -> None:
    assert [files.next_generation() for _ in range(3)] == [1, 2, 3]
    assert SwarmFiles(tmp_path / "state").next_generation() == 4


@pytest.mark.parametrize("content", [b"", b"x", b"-1", b"1.5", b"9223372036854775807", "٣".encode()])
def test_a_damaged_generation_is_refused_by_name(files: SwarmFiles, tmp_path: Path, content: bytes) -> None:
    files.next_generation()
    (tmp_path / "state" / "engine-generation").write_bytes(content)
    with pytest.raises(ConfigurationInvalid, match="engine-generation is damaged"):
        files.next_generation()


def test_every_turned_bit_of_a_generation_is_found(files: SwarmFiles, tmp_path: Path) -> None:
    """A number that still is one would give an engine a number that another had."""
    for _ in range(12):
        files.next_generation()
    path = tmp_path / "state" / "engine-generation"
    written = path.read_bytes()
    for place in range(8 * len(written)):
        turned = bytearray(written)
        turned[place // 8] ^= 1 << place % 8
        path.write_bytes(bytes(turned))
        with pytest.raises(ConfigurationInvalid, match="engine-generation is damaged"):
            files.check_undamaged()
    path.write_bytes(written)
    assert files.next_generation() == 13


def cut(data: bytes) -> bytes:
    return data[:-1]


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def empty(_data: bytes) -> bytes:
    return b""


def swell(data: bytes) -> bytes:
    return data + bytes(5 << 20)


@pytest.mark.parametrize("damage", [cut, flip, empty, swell])
@pytest.mark.parametrize("name", ["swarm-manifest", "invite", "engine-generation", "slot-incarnation"])
def test_a_damaged_file_ends_a_start_and_is_named(
    files: SwarmFiles,
    key: Ed25519PrivateKey,
    tmp_path: Path,
    name: str,
    damage: Callable[[bytes], bytes],
) -> None:
    founded = found(claimed(files), key)
    files.next_generation()
    files.save_invite(invite_to(founded.swarm.digest))
    files.save_slot("incarnation", KEPT)
    files.check_undamaged()
    path = tmp_path / "state" / name
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    with pytest.raises(ConfigurationInvalid, match=f"{name} is damaged"):
        files.check_undamaged()
    assert path.read_bytes() == damaged


PROMISES: tuple[Slot, ...] = ("admission", "election", "electorate", "fence", "incarnation")
RETOLD = ("plan", "records", "verdicts")


def with_every_slot(files: SwarmFiles, rounds: int = 1) -> Path:
    """The directory of a home whose node promised things: each slot saved, `election` last."""
    for _ in range(rounds):
        for slot, data in sorted(contents().items(), key=lambda each: (each[0] == "election", each[0])):
            files.save_slot(slot, data)
    return Path(files.recovery_key_file).parent


def refused(files: SwarmFiles, match: str) -> str:
    """The sentence with which a start on these files ends, as a start and as a look into them."""
    with pytest.raises(ConfigurationInvalid, match=match) as looked:
        SwarmFiles(files.recovery_key_file.parent).check_undamaged()
    with pytest.raises(ConfigurationInvalid, match=match) as started:
        claimed(SwarmFiles(files.recovery_key_file.parent))
    assert str(started.value) == str(looked.value)
    assert looked.value.exit_code == 6
    return str(looked.value)


@pytest.mark.parametrize("slot", get_args(Slot))
def test_only_what_the_swarm_tells_again_may_be_removed(files: SwarmFiles, slot: Slot) -> None:
    claimed(files).save_slot(slot, b"no")
    with pytest.raises(ConfigurationInvalid, match=f"slot-{slot} is damaged") as caught:
        files.check_undamaged()
    assert ("; remove it: " in str(caught.value)) == (slot in RETOLD)
    assert ("; put it back" in str(caught.value)) == (slot in PROMISES)


@pytest.mark.parametrize("slot", get_args(Slot))
def test_a_slot_that_is_missing_is_missed_unless_the_swarm_tells_it_again(
    files: SwarmFiles, slot: Slot
) -> None:
    """A vote or a fence that is gone was taken for one that was never given."""
    path = with_every_slot(claimed(files)) / f"slot-{slot}"
    path.unlink()
    if slot in RETOLD:
        again = claimed(SwarmFiles(path.parent))
        again.check_undamaged()
        again.save_slot(slot, contents()[slot])
        assert SwarmFiles(path.parent).load_slots() == contents()
    else:
        said = refused(files, f"{path} is missing; put it back as it was last, .* in a new --home")
        assert "forgets what this node promised" in said


@pytest.mark.parametrize("slot", PROMISES)
def test_a_slot_that_nothing_was_saved_after_is_missed_too(files: SwarmFiles, slot: Slot) -> None:
    claimed(files).save_slot(slot, contents()[slot])
    path = files.recovery_key_file.parent / f"slot-{slot}"
    path.unlink()
    refused(files, f"slot-{slot} is missing")


def test_a_generation_that_is_missing_is_missed(files: SwarmFiles, tmp_path: Path) -> None:
    claimed(files).next_generation()
    (tmp_path / "state" / "engine-generation").unlink()
    with pytest.raises(ConfigurationInvalid, match="engine-generation is missing; put it back"):
        files.check_undamaged()
    with pytest.raises(ConfigurationInvalid, match="engine-generation is missing; put it back"):
        files.next_generation()


def test_an_owner_that_is_missing_is_missed(files: SwarmFiles) -> None:
    (with_every_slot(claimed(files)) / "slots-owner").unlink()
    refused(files, "slots-owner is missing; put it back")
    with pytest.raises(ConfigurationInvalid, match="slots-owner is missing"):
        files.save_slot("fence", b"x")


def test_no_turned_bit_of_the_owner_is_believed(files: SwarmFiles) -> None:
    """Another digest was read as another swarm's slots, and the advice was to forget the promises."""
    path = with_every_slot(claimed(files)) / "slots-owner"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(ConfigurationInvalid, match="slots-owner is damaged: its checksum"):
            files.check_undamaged()
    path.write_bytes(b"")
    refused(files, "slots-owner is damaged: it is empty; put it back")


@pytest.mark.parametrize("slot", get_args(Slot))
@pytest.mark.parametrize(
    "swarm, node", [(OTHER_SWARM, node_id_of(bytes([1] * 32))), (bytes([1] * 32), OTHER_NODE)]
)
def test_no_slot_of_another_node_or_swarm_is_taken(
    files: SwarmFiles, tmp_path: Path, slot: Slot, swarm: bytes, node: NodeId
) -> None:
    mine = with_every_slot(claimed(files)) / f"slot-{slot}"
    other = SwarmFiles(tmp_path / "other")
    other.claim_slots(SwarmDigest(swarm), node)
    mine.write_bytes((with_every_slot(other) / mine.name).read_bytes())
    said = refused(files, f"{mine} is another node's, or of another swarm; ")
    assert said.endswith("remove it: what is wrong with a node is found again") == (slot == "verdicts")


@pytest.mark.parametrize("slot", PROMISES)
def test_an_older_copy_is_told_as_soon_as_another_slot_was_saved_after_the_newer_one(
    files: SwarmFiles, slot: Slot
) -> None:
    path = with_every_slot(claimed(files)) / f"slot-{slot}"
    older = path.read_bytes()
    files.save_slot(slot, contents()[slot])
    newer = path.read_bytes()
    path.write_bytes(older)
    SwarmFiles(path.parent).check_undamaged()  # what cannot be told: nothing was saved after the newer one
    path.write_bytes(newer)
    SwarmFiles(path.parent).save_slot("plan", contents()["plan"])
    SwarmFiles(path.parent).check_undamaged()
    path.write_bytes(older)
    refused(files, f"{path} is an older copy: other slots were saved after a newer one; put it back")


@pytest.mark.parametrize("slot", RETOLD)
def test_older_copies_of_what_is_told_again_do_no_harm(files: SwarmFiles, slot: Slot) -> None:
    path = with_every_slot(claimed(files)) / f"slot-{slot}"
    older = path.read_bytes()
    with_every_slot(files)
    path.write_bytes(older)
    claimed(SwarmFiles(path.parent)).check_undamaged()


class PowerCut(Exception):
    """Everything ends here."""


def test_wherever_the_power_is_cut_the_node_starts_again_and_nothing_it_said_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after each step of each write: a file in its place or not, the second of two not begun."""
    node_id, replace, left = OTHER_NODE, Path.replace, 0

    def cut_before(path: Path, target: Path) -> Path:
        nonlocal left
        left -= 1
        if left == 0:
            raise PowerCut
        done = replace(path, target)
        left -= 1
        if left == 0:
            raise PowerCut
        return done

    def live(files: SwarmFiles, returned: dict[str, bytes | int]) -> None:
        """Save everything twice; ``returned`` is what the node may have said to others."""
        swarm = OTHER_SWARM
        files.claim_slots(swarm, node_id)
        for round_number in (1, 2):
            for slot in sorted(get_args(Slot)):
                data = contents()[slot]
                files.save_slot(slot, data)
                returned[slot] = data
            generation = files.next_generation()
            assert generation >= round_number
            returned["generation"] = generation

    monkeypatch.setattr(Path, "replace", cut_before)
    cuts = 0
    while True:
        cuts += 1
        directory, returned = tmp_path / str(cuts), dict[str, bytes | int]()
        left = cuts
        try:
            live(SwarmFiles(directory), returned)
        except PowerCut:
            pass
        else:
            break
        left = 0
        after = SwarmFiles(directory)
        after.check_undamaged()
        after.claim_slots(OTHER_SWARM, node_id)
        assert after.load_slots().keys() >= returned.keys() - {"generation"}
        assert after.next_generation() > int(returned.get("generation", 0))
        for slot in PROMISES:  # whatever is here from now on is missed when it goes
            path = directory / f"slot-{slot}"
            if path.exists():
                whole = path.read_bytes()
                path.unlink()
                refused(after, f"slot-{slot} is missing")
                path.write_bytes(whole)
        live(SwarmFiles(directory), {})
    assert cuts > 2 * (1 + 2 * len(get_args(Slot)) + 2 + len(PROMISES))


@pytest.mark.parametrize("name", ["slots-owner", "slot-fence", "engine-generation"])
def test_a_home_of_a_build_before_is_said(files: SwarmFiles, tmp_path: Path, name: str) -> None:
    with_every_slot(claimed(files))
    files.next_generation()
    if name == "slots-owner":
        (tmp_path / "state" / name).write_bytes(f"{OTHER_SWARM.hex()} {OTHER_NODE}\n".encode())
        refused(files, "state is of a build before this one, and cannot be gone on with: .* in a new --home")
    else:
        (tmp_path / "state" / name).write_bytes(b"kvslot1\n" + bytes(40))
        with pytest.raises(
            ConfigurationInvalid, match=f"{name} is damaged: a build before this one wrote it"
        ):
            files.check_undamaged()


@pytest.mark.parametrize("slot", get_args(Slot))
def test_any_byte_of_a_slot_that_turned_is_found(files: SwarmFiles, tmp_path: Path, slot: Slot) -> None:
    """A fence with another term in it decodes, and was believed."""
    claimed(files).save_slot(slot, contents()[slot])
    files.check_undamaged()
    path = tmp_path / "state" / f"slot-{slot}"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(ConfigurationInvalid, match=f"slot-{slot} is damaged") as caught:
            files.check_undamaged()
        assert str(path) in str(caught.value)
        assert caught.value.exit_code == 6


@pytest.mark.parametrize("slot", get_args(Slot))
def test_a_slot_is_not_taken_for_another(files: SwarmFiles, tmp_path: Path, slot: Slot) -> None:
    other: Slot = "fence" if slot != "fence" else "plan"
    claimed(files).save_slot(slot, b"data")
    (tmp_path / "state" / f"slot-{slot}").rename(tmp_path / "state" / f"slot-{other}")
    with pytest.raises(ConfigurationInvalid, match=f"slot-{other} is damaged: its checksum"):
        files.load_slots()


def test_what_a_killed_writer_left_is_removed_and_what_is_being_written_is_not(
    files: SwarmFiles, tmp_path: Path
) -> None:
    claimed(files).save_slot("fence", b"whole")
    (tmp_path / "state" / ".partial-left").write_bytes(b"ha")
    with durable_file(tmp_path / "state" / "slot-plan") as file:
        file.write(b"x")
        files.remove_leftovers()
    assert sorted(each.name for each in (tmp_path / "state").iterdir()) == [
        "slot-fence",
        "slot-plan",
        "slots-owner",
    ]
    SwarmFiles(tmp_path / "nowhere").remove_leftovers()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigurationInvalid, match="swarm-manifest cannot be written: File exists"):
        SwarmFiles(tmp_path / "file").save_swarm(b"x")
    files = claimed(SwarmFiles(tmp_path / "state"))
    (tmp_path / "state" / "slot-fence").mkdir()
    with pytest.raises(ConfigurationInvalid, match="cannot be read"):
        files.load_slots()


@pytest.mark.parametrize(
    "number, kind",
    [
        (errno.ENOSPC, DiskFull),
        (errno.EDQUOT, DiskFull),
        (errno.EROFS, ConfigurationInvalid),
        (errno.EACCES, ConfigurationInvalid),
    ],
)
def test_what_cannot_be_written_is_named_and_what_was_there_is_kept(
    files: SwarmFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[KvasirError]
) -> None:
    def refuse(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    other = found(SwarmFiles(tmp_path / "other"), Ed25519PrivateKey.generate())
    files.claim_slots(other.swarm.digest, OTHER_NODE)
    files.save_slot("fence", b"kept")
    monkeypatch.setattr(os, "fsync", refuse)
    writes: dict[str, Callable[[], object]] = {
        "slot-fence": lambda: files.save_slot("fence", b"other"),
        "slot-election": lambda: files.save_slot("election", b"vote"),
        "engine-generation": files.next_generation,
        "swarm-manifest": lambda: files.save_swarm(other.signed_manifest),
    }
    for name, write in writes.items():
        with pytest.raises(kind, match=f"{name} cannot be written: {os.strerror(number)}") as caught:
            write()
        assert caught.value.exit_code == kind.exit_code
    assert files.load_slots() == {"fence": b"kept"}
    assert sorted(each.name for each in (tmp_path / "state").iterdir()) == ["slot-fence", "slots-owner"]


def test_a_directory_that_hides_its_files_is_said(tmp_path: Path) -> None:
    """As one without permissions does, which stops everybody but the root user."""
    (tmp_path / "state").symlink_to(tmp_path / "state")
    files = SwarmFiles(tmp_path / "state")
    for read in (files.load_slots, files.load_swarm, files.load_invite, files.check_undamaged):
        with pytest.raises(ConfigurationInvalid, match="cannot be read: Too many levels"):
            read()
