"""What a node remembers survives, stays private, and is refused by name when it is damaged."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node.swarm_files import Founding, SwarmFiles
from kvasir_proto.errors import ConfigurationInvalid, DiskFull, KvasirError
from kvasir_proto.ids import node_id_of
from kvasir_proto.limits import SIGNED_SIZE_MAX
from kvasir_proto.placement.plan import make_plan
from kvasir_proto.signing import sign_message

MODEL_DIGEST = bytes(range(32))


@pytest.fixture
def key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


@pytest.fixture
def files(tmp_path: Path) -> SwarmFiles:
    return SwarmFiles(tmp_path / "state")


def found(files: SwarmFiles, key: Ed25519PrivateKey) -> Founding:
    return files.found(key, MODEL_DIGEST, "model")


def test_what_was_founded_is_loaded_again(files: SwarmFiles, key: Ed25519PrivateKey) -> None:
    founding = found(files, key)
    assert files.is_founder
    assert files.load_founding(key) == founding
    assert founding.swarm.manifest.model_digest == MODEL_DIGEST
    assert (founding.term.epoch, founding.term.term) == (0, 1)
    assert founding.term.backbone == node_id_of(key.public_key().public_bytes_raw())


def test_every_file_is_readable_by_its_owner_only(
    files: SwarmFiles, key: Ed25519PrivateKey, tmp_path: Path
) -> None:
    found(files, key)
    files.save(0, 1)
    files.save_plan(b"plan")
    files.next_generation()
    directory = tmp_path / "state"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    names = {each.name: stat.S_IMODE(each.stat().st_mode) for each in directory.iterdir()}
    assert len(names) == 6
    assert set(names.values()) == {0o600}, names


def test_the_recovery_key_is_another_key_than_the_nodes(files: SwarmFiles, key: Ed25519PrivateKey) -> None:
    founding = found(files, key)
    recovery = Ed25519PrivateKey.from_private_bytes(files.recovery_key_file.read_bytes())
    public = recovery.public_key().public_bytes_raw()
    assert public == founding.swarm.manifest.recovery_public_key
    assert public != founding.swarm.manifest.founder_public_key


def test_a_swarm_is_founded_once(files: SwarmFiles, key: Ed25519PrivateKey) -> None:
    founding = found(files, key)
    recovery_key = files.recovery_key_file.read_bytes()
    with pytest.raises(ConfigurationInvalid, match="founded here already"):
        found(files, key)
    assert files.load_founding(key) == founding
    assert files.recovery_key_file.read_bytes() == recovery_key


def test_a_home_that_joined_a_swarm_founds_no_other(
    files: SwarmFiles, key: Ed25519PrivateKey, tmp_path: Path
) -> None:
    founding = found(SwarmFiles(tmp_path / "founder"), Ed25519PrivateKey.generate())
    files.save_joined(founding.signed_manifest)
    with pytest.raises(ConfigurationInvalid, match="belongs to swarm"):
        found(files, key)
    assert not files.is_founder
    joined = files.load_joined()
    assert joined is not None
    assert joined.digest == founding.swarm.digest


def test_a_founding_that_was_interrupted_can_be_done_again(
    files: SwarmFiles, key: Ed25519PrivateKey, tmp_path: Path
) -> None:
    found(files, key)
    (tmp_path / "state" / "term-proof").unlink()
    assert not files.is_founder
    founding = found(files, key)
    assert files.load_founding(key) == founding


def test_another_identity_cannot_take_the_founding_over(files: SwarmFiles, key: Ed25519PrivateKey) -> None:
    found(files, key)
    with pytest.raises(ConfigurationInvalid, match="another identity"):
        files.load_founding(Ed25519PrivateKey.generate())


def test_nothing_was_joined_in_a_fresh_home(files: SwarmFiles) -> None:
    assert not files.is_founder
    assert files.load_joined() is None
    assert files.load() == (0, 0)


def cut(data: bytes) -> bytes:
    return data[:-1]


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def empty(_data: bytes) -> bytes:
    return b""


def swell(data: bytes) -> bytes:
    return data + bytes(SIGNED_SIZE_MAX)


@pytest.mark.parametrize("damage", [cut, flip, empty, swell])
@pytest.mark.parametrize("name", ["swarm-manifest", "term-proof"])
def test_a_damaged_founding_is_refused_by_name(
    files: SwarmFiles,
    key: Ed25519PrivateKey,
    tmp_path: Path,
    name: str,
    damage: Callable[[bytes], bytes],
) -> None:
    found(files, key)
    path = tmp_path / "state" / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigurationInvalid, match=name):
        files.load_founding(key)


def test_a_founding_without_its_manifest_is_refused_by_name(
    files: SwarmFiles, key: Ed25519PrivateKey, tmp_path: Path
) -> None:
    found(files, key)
    (tmp_path / "state" / "swarm-manifest").unlink()
    with pytest.raises(ConfigurationInvalid, match="swarm-manifest cannot be read"):
        files.load_founding(key)


def test_a_damaged_joined_manifest_is_refused_by_name(files: SwarmFiles, tmp_path: Path) -> None:
    files.save_joined(b"nonsense")
    with pytest.raises(ConfigurationInvalid, match="swarm-manifest is damaged"):
        files.load_joined()


def test_the_fence_is_kept_and_never_goes_back(files: SwarmFiles) -> None:
    for fence in [(0, 1), (0, 1), (0, 7), (1, 0)]:
        files.save(*fence)
        assert files.load() == fence
    for lower in [(0, 9), (0, 0)]:
        with pytest.raises(ConfigurationInvalid, match="cannot go back"):
            files.save(*lower)
    assert files.load() == (1, 0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"{}",
        b'{"epoch": 0}',
        b'{"epoch": "0", "term": 1}',
        b'{"epoch": 0, "term": 1.0}',
        b'{"epoch": true, "term": 1}',
        b'{"epoch": -1, "term": 1}',
        b'{"epoch": 0, "term": 4294967296}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_damaged_fence_is_refused_by_name_and_not_overwritten(
    files: SwarmFiles, tmp_path: Path, content: bytes
) -> None:
    """A node that took a damaged fence for none would follow a backbone that it had outlived."""
    files.save(0, 5)
    path = tmp_path / "state" / "fence.json"
    path.write_bytes(content)
    for attempt in (files.load, lambda: files.save(0, 6)):
        with pytest.raises(ConfigurationInvalid, match=r"fence\.json is damaged"):
            attempt()
    assert path.read_bytes() == content


def test_generations_only_grow(files: SwarmFiles, tmp_path: Path) -> None:
    assert [files.next_generation() for _ in range(3)] == [1, 2, 3]
    assert SwarmFiles(tmp_path / "state").next_generation() == 4


@pytest.mark.parametrize("content", [b"", b"x", b"-1", b"1.5", b"9223372036854775807", "٣".encode()])
def test_a_damaged_generation_is_refused_by_name(files: SwarmFiles, tmp_path: Path, content: bytes) -> None:
    files.next_generation()
    (tmp_path / "state" / "engine-generation").write_bytes(content)
    with pytest.raises(ConfigurationInvalid, match="engine-generation is damaged"):
        files.next_generation()


def sign_plan(founding: Founding, key: Ed25519PrivateKey, revision: int) -> bytes:
    plan = make_plan([0], 2, [founding.term.backbone], epoch=0, term=1, revision=revision)
    return sign_message(key, founding.swarm.digest, plan)


def test_the_plan_is_kept(files: SwarmFiles, key: Ed25519PrivateKey) -> None:
    founding = found(files, key)
    assert files.load_plan(founding) is None
    for revision in (1, 2):
        files.save_plan(sign_plan(founding, key, revision))
    saved = files.load_plan(founding)
    assert saved is not None
    assert (saved.plan.revision, saved.signed) == (2, sign_plan(founding, key, 2))


@pytest.mark.parametrize("name", ["swarm-manifest", "term-proof", "fence.json", "engine-generation", "plan"])
@pytest.mark.parametrize("damage", [b"", b"x", None])
def test_a_damaged_file_ends_a_start_and_is_named(
    files: SwarmFiles, key: Ed25519PrivateKey, tmp_path: Path, name: str, damage: bytes | None
) -> None:
    founding = found(files, key)
    files.save(0, 1)
    files.next_generation()
    files.save_plan(sign_plan(founding, key, 1))
    files.check_undamaged(key)
    path = tmp_path / "state" / name
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    with pytest.raises(ConfigurationInvalid, match=f"{name} is damaged"):
        files.check_undamaged(key)


def test_a_worker_has_fewer_files_to_check(files: SwarmFiles, key: Ed25519PrivateKey, tmp_path: Path) -> None:
    files.check_undamaged(key)
    files.save_joined(b"x")
    with pytest.raises(ConfigurationInvalid, match="swarm-manifest is damaged"):
        files.check_undamaged(key)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigurationInvalid, match=r"fence\.json cannot be written: File exists"):
        SwarmFiles(tmp_path / "file").save(0, 1)
    (tmp_path / "state" / "fence.json").mkdir(parents=True)
    with pytest.raises(ConfigurationInvalid, match="cannot be read"):
        SwarmFiles(tmp_path / "state").load()


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

    files.save(0, 1)
    monkeypatch.setattr(os, "fsync", refuse)
    writes: dict[str, Callable[[], object]] = {
        "fence.json": lambda: files.save(0, 2),
        "plan": lambda: files.save_plan(b"plan"),
        "engine-generation": files.next_generation,
        "swarm-manifest": lambda: files.save_joined(b"manifest"),
    }
    for name, write in writes.items():
        with pytest.raises(kind, match=f"{name} cannot be written: {os.strerror(number)}") as caught:
            write()
        assert caught.value.exit_code == kind.exit_code
    assert files.load() == (0, 1)
    assert [each.name for each in (tmp_path / "state").iterdir()] == ["fence.json"]


def test_a_directory_that_hides_its_files_is_said(tmp_path: Path, key: Ed25519PrivateKey) -> None:
    """As one without permissions does, which stops everybody but the root user."""
    (tmp_path / "state").symlink_to(tmp_path / "state")
    files = SwarmFiles(tmp_path / "state")
    for read in (files.load, files.load_joined, lambda: files.is_founder, lambda: files.check_undamaged(key)):
        with pytest.raises(ConfigurationInvalid, match="cannot be read: Too many levels"):
            read()
