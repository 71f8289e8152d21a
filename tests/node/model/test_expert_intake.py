"""Experts that come in answers of any size: whole and right, or not there; and what a shelf gives of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvasir_node.model.expert_files import ExpertFiles, partial_of, slices_of
from kvasir_node.model.expert_intake import ExpertIntake
from kvasir_node.model.expert_shelf import ExpertShelf
from kvasir_node.model.model_manifest import build_manifest
from kvasir_proto.errors import LocalProtocolError, ModelUnusable
from kvasir_proto.expert_sources import ExpertRun, WantedExpert
from kvasir_proto.manifest import ModelManifest, ShardSet
from tests.model_makers import MAKERS, ModelShape

UP = "blk.0.ffn_up_exps.weight"
SHARD = ShardSet(((0, 1, 4),))


class Case:
    """A model's file, and a directory into which its experts come."""

    def __init__(self, path: Path) -> None:
        self.source = MAKERS["gpt-oss"](path / "model.gguf", ModelShape(n_layer=1, n_expert=5))
        self.manifest: ModelManifest = build_manifest(self.source)
        self.files = ExpertFiles(path / "experts")
        self.counted: dict[str, int] = {}
        self.intake = self.new_intake()
        tensor = self.manifest.tensor(UP)
        self.size = tensor.expert_size_bytes
        begin = tensor.offset + self.size
        self.data = self.source.read_bytes()[begin : begin + 3 * self.size]

    def new_intake(self) -> ExpertIntake:
        def note(size_bytes: int, giver: str) -> None:
            self.counted[giver] = self.counted.get(giver, 0) + size_bytes

        return ExpertIntake(self.manifest, self.files, note)

    def wanted(self) -> list[WantedExpert]:
        missing = [each for each in self.files.missing(self.manifest, SHARD) if each.tensor.name == UP]
        return self.intake.wanted(missing)

    def run(self) -> ExpertRun:
        return ExpertRun(tuple(self.wanted()))

    def have(self, expert: int) -> bool:
        return self.files.path_of(UP, expert).exists()


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


@pytest.mark.parametrize("seed", range(6))
def test_bytes_in_any_portions_give_whole_experts_also_through_another_process(case: Case, seed: int) -> None:
    draws = random.Random(seed)
    came = 0
    run = case.run()
    while came < len(case.data):
        portion = case.data[came : came + draws.choice((1, 100, case.size, 2 * case.size + 7))]
        assert case.intake.take(run, came, portion, "A") == ()
        came += len(portion)
        if came < len(case.data) and draws.random() < 0.3:
            case.intake = case.new_intake()
            assert case.intake.wanted([])[:1] == []
            wanted = case.wanted()
            assert sum(each.size_bytes - each.begun_bytes for each in wanted) == len(case.data) - came
    assert case.wanted() == []
    assert case.counted == {"A": len(case.data)}
    for each in slices_of(case.manifest, SHARD):
        if each.tensor.name == UP:
            assert not partial_of(case.files.path_of(UP, each.expert)).exists()
    assert case.files.damaged(case.manifest, SHARD) == []


def test_a_wrong_expert_is_named_and_nothing_of_it_is_kept(case: Case) -> None:
    bad = bytearray(case.data)
    bad[case.size] ^= 1
    run = case.run()
    assert [each.expert for each in case.intake.take(run, 0, bytes(bad), "A")] == [2]
    assert (case.have(1), case.have(2), case.have(3)) == (True, False, True)
    assert [(each.expert, each.begun_bytes) for each in case.wanted()] == [(2, 0)]
    assert case.counted == {"A": 2 * case.size}
    again = case.run()
    assert case.intake.take(again, 0, case.data[case.size : 2 * case.size], "B") == ()
    assert case.wanted() == []


@pytest.mark.parametrize("junk", [lambda size: size, lambda size: size + 5])
def test_what_is_too_much_already_begins_again(case: Case, junk: Callable[[int], int]) -> None:
    partial = partial_of(case.files.path_of(UP, 1))
    partial.parent.mkdir(parents=True)
    partial.write_bytes(bytes(junk(case.size)))
    assert [each.begun_bytes for each in case.wanted()] == [0, 0, 0]


def test_what_a_power_cut_left_is_not_believed(case: Case) -> None:
    """A file of the right length so far, with zeros in the place of what never reached the disk."""
    partial = partial_of(case.files.path_of(UP, 1))
    partial.parent.mkdir(parents=True)
    partial.write_bytes(bytes(100))
    run = case.run()
    assert run.experts[0].begun_bytes == 100
    assert [each.expert for each in case.intake.take(run, 100, case.data[100:], "A")] == [1]
    assert case.have(2)
    assert not partial.exists()


def test_a_link_in_the_place_of_an_expert_is_not_followed(case: Case, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"theirs")
    partial = partial_of(case.files.path_of(UP, 1))
    partial.parent.mkdir(parents=True)
    partial.symlink_to(target)
    run = ExpertRun((WantedExpert(UP, 0, 1, case.size),))
    with pytest.raises(ModelUnusable, match="cannot be written"):
        case.intake.take(run, 0, case.data[:50], "A")
    assert target.read_bytes() == b"theirs"


# -- the shelf -------------------------------------------------------------------------------------


def test_a_shelf_gives_the_files_bytes_from_any_byte_on(case: Case) -> None:
    shelf = ExpertShelf(case.source, case.manifest)
    for offset in (0, 1, case.size - 1, case.size, 3 * case.size - 1):
        for most in (1, 100, 10 * case.size):
            assert shelf.read(UP, 1, 4, offset, most) == case.data[offset : offset + most]


def test_a_shelf_of_fetched_experts_gives_them_up_to_the_first_that_is_not_here(case: Case) -> None:
    case.intake.take(case.run(), 0, case.data, "A")
    shelf = ExpertShelf(case.files.directory, case.manifest)
    assert shelf.read(UP, 1, 4, 7, 10 * case.size) == case.data[7:]
    case.files.path_of(UP, 3).rename(partial_of(case.files.path_of(UP, 3)))
    assert shelf.read(UP, 1, 4, 7, 10 * case.size) == case.data[7 : 2 * case.size]
    assert shelf.read(UP, 3, 4, 0, 10) == b"", "of what is not whole nothing is given"
    assert shelf.read(UP, 0, 4, 0, 10) == b""


def test_a_shelf_whose_file_has_gone_gives_nothing(case: Case) -> None:
    shelf = ExpertShelf(case.source, case.manifest)
    case.source.unlink()
    assert shelf.read(UP, 1, 4, 0, 10) == b""


@pytest.mark.parametrize(
    "name, first, end, offset",
    [
        ("nothing", 0, 1, 0),
        ("output.weight", 0, 1, 0),
        (UP, 0, 6, 0),
        (UP, 5, 6, 0),
        (UP, 3, 3, 0),
        (UP, 4, 2, 0),
        (UP, 0, 1, 1 << 40),
        (UP, 0, 0, 0),
    ],
)
def test_what_the_model_has_not_is_an_error(case: Case, name: str, first: int, end: int, offset: int) -> None:
    with pytest.raises(LocalProtocolError):
        ExpertShelf(case.source, case.manifest).read(name, first, end, offset, 10)
