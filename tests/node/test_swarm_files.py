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
from kvasir_proto.ids import SwarmDigest, node_id_of
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
    founded = found(files, key)
    for slot in get_args(Slot):
        files.save_slot(slot, b"kept")
    files.save_invite(invite_to(founded.swarm.digest))
    files.next_generation()
    directory = tmp_path / "state"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    names = {each.name: stat.S_IMODE(each.stat().st_mode) for each in directory.iterdir()}
    assert len(names) == 4 + len(get_args(Slot))
    assert set(names.values()) == {0o600}, names


OTHER_SWARM = SwarmDigest(bytes(32))
OTHER_NODE = node_id_of(bytes(32))


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


def test_slots_are_kept_whole(files: SwarmFiles, tmp_path: Path) -> None:
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


def test_a_generation_of_an_earlier_build_is_gone_on_from(files: SwarmFiles, tmp_path: Path) -> None:
    path = tmp_path / "state" / "engine-generation"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"41")
    assert files.next_generation() == 42
    assert path.read_bytes() != b"42"


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
    founded = found(files, key)
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


@pytest.mark.parametrize("slot", get_args(Slot))
def test_only_what_the_swarm_tells_again_may_be_removed(files: SwarmFiles, slot: Slot) -> None:
    files.save_slot(slot, b"no")
    with pytest.raises(ConfigurationInvalid, match=f"slot-{slot} is damaged") as caught:
        files.check_undamaged()
    assert ("remove it" in str(caught.value)) == (slot in ("plan", "records", "verdicts"))


@pytest.mark.parametrize("slot", get_args(Slot))
def test_any_byte_of_a_slot_that_turned_is_found(files: SwarmFiles, tmp_path: Path, slot: Slot) -> None:
    """A fence with another term in it decodes, and was believed."""
    files.save_slot(slot, contents()[slot])
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
    files.save_slot(slot, b"data")
    (tmp_path / "state" / f"slot-{slot}").rename(tmp_path / "state" / f"slot-{other}")
    with pytest.raises(ConfigurationInvalid, match=f"slot-{other} is damaged: its checksum"):
        files.load_slots()


def test_slots_of_earlier_builds_are_taken_over_and_get_checksums(files: SwarmFiles, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    for slot, data in contents().items():
        (tmp_path / "state" / f"slot-{slot}").write_bytes(data)
    files.check_undamaged()
    assert files.load_slots() == contents()
    files.claim_slots(OTHER_SWARM, OTHER_NODE)
    assert files.load_slots() == contents()
    path = tmp_path / "state" / "slot-fence"
    path.write_bytes(path.read_bytes().replace(bytes([95]), bytes([96])))
    with pytest.raises(ConfigurationInvalid, match="slot-fence is damaged"):
        files.check_undamaged()


def test_what_a_killed_writer_left_is_removed_and_what_is_being_written_is_not(
    files: SwarmFiles, tmp_path: Path
) -> None:
    files.save_slot("fence", b"whole")
    (tmp_path / "state" / ".partial-left").write_bytes(b"ha")
    with durable_file(tmp_path / "state" / "slot-plan") as file:
        file.write(b"x")
        files.remove_leftovers()
    assert sorted(each.name for each in (tmp_path / "state").iterdir()) == ["slot-fence", "slot-plan"]
    SwarmFiles(tmp_path / "nowhere").remove_leftovers()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigurationInvalid, match="slot-fence cannot be written: File exists"):
        SwarmFiles(tmp_path / "file").save_slot("fence", b"x")
    (tmp_path / "state" / "slot-fence").mkdir(parents=True)
    with pytest.raises(ConfigurationInvalid, match="cannot be read"):
        SwarmFiles(tmp_path / "state").load_slots()


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

    files.save_slot("fence", b"kept")
    monkeypatch.setattr(os, "fsync", refuse)
    writes: dict[str, Callable[[], object]] = {
        "slot-fence": lambda: files.save_slot("fence", b"other"),
        "slot-election": lambda: files.save_slot("election", b"vote"),
        "engine-generation": files.next_generation,
        "swarm-manifest": lambda: files.save_swarm(b"manifest"),
    }
    for name, write in writes.items():
        with pytest.raises(kind, match=f"{name} cannot be written: {os.strerror(number)}") as caught:
            write()
        assert caught.value.exit_code == kind.exit_code
    assert files.load_slots() == {"fence": b"kept"}
    assert [each.name for each in (tmp_path / "state").iterdir()] == ["slot-fence"]


def test_a_directory_that_hides_its_files_is_said(tmp_path: Path) -> None:
    """As one without permissions does, which stops everybody but the root user."""
    (tmp_path / "state").symlink_to(tmp_path / "state")
    files = SwarmFiles(tmp_path / "state")
    for read in (files.load_slots, files.load_swarm, files.load_invite, files.check_undamaged):
        with pytest.raises(ConfigurationInvalid, match="cannot be read: Too many levels"):
            read()
