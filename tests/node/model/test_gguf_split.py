"""A split model is one model: the same tensors, the same experts, and every way parts can lie is named."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from kvasir_node.model.expert_bytes import ExpertSource
from kvasir_node.model.gguf_reader import read_gguf
from kvasir_node.model.gguf_split import PARTS_MAX, part_locations
from kvasir_node.model.model_manifest import build_manifest
from kvasir_node.model.store import ModelStore
from kvasir_proto.errors import ModelUnusable
from tests.model_makers import ModelShape, make_qwen3moe, quantise
from tests.node.model.test_gguf_reader import container, entry, tensor
from tests.node.test_quantisations import require_exact

SHAPE = ModelShape(n_layer=2, tokenizer=True)
SPLIT = ModelShape(n_layer=2, tokenizer=True, tensors_a_part=7)


def part_paths(first: Path) -> tuple[Path, ...]:
    return tuple(each for each in part_locations(first) if isinstance(each, Path))


def test_a_split_model_is_the_model(tmp_path: Path) -> None:
    whole = make_qwen3moe(tmp_path / "whole.gguf", SHAPE)
    first = make_qwen3moe(tmp_path / "model.gguf", SPLIT)
    assert first.name.startswith("model-00001-of-0000")
    paths = part_paths(first)
    assert len(paths) > 2
    header, header_whole = read_gguf(first), read_gguf(whole)
    assert header.paths == paths
    assert header.size_bytes == sum(each.stat().st_size for each in paths)
    # What speaks of parts is gone: llama.cpp would look for the parts of whatever is written from this.
    assert dict(header.metadata) == dict(header_whole.metadata)
    assert [(t.name, t.type, t.shape) for t in header.tensors] == [
        (t.name, t.type, t.shape) for t in header_whole.tensors
    ]
    manifest, manifest_whole = build_manifest(first), build_manifest(whole)
    assert manifest.metadata_sha256 == manifest_whole.metadata_sha256
    assert manifest.digest() == manifest_whole.digest()
    assert [t.digests for t in manifest.tensors] == [t.digests for t in manifest_whole.tensors]
    with ExpertSource(first, manifest) as split, ExpertSource(whole, manifest_whole) as other:
        for each in manifest.tensors:
            if each.is_expert:
                assert split.read(each.name, 5) == other.read(each.name, 5)


def test_a_split_model_is_stored_served_and_mended_like_any_other(tmp_path: Path) -> None:
    first = make_qwen3moe(tmp_path / "model.gguf", SPLIT)
    store = ModelStore(tmp_path / "models")
    stored = store.add(first)
    assert stored.name == "model"
    assert stored.source_path == first
    assert store.add(first) == stored
    # The reference file is whole; its parts' bytes were checked on the way.
    reference = read_gguf(stored.reference_path())
    assert reference.paths == (stored.reference_path(),)
    assert [t.name for t in reference.tensors] == [t.name for t in stored.manifest.tensors]
    third = part_paths(first)[2]
    data = bytearray(third.read_bytes())
    data[-1] ^= 1
    third.write_bytes(data)
    assert store.add(first).digest != stored.digest  # another part has changed, so it is another model
    third.unlink()
    with pytest.raises(ModelUnusable, match=r"model-00003-of-\d+\.gguf cannot be read: No such file"):
        store.add(first)
    with pytest.raises(ModelUnusable, match=r"model-00003-of-\d+\.gguf cannot be read: No such file"):
        ExpertSource(first, stored.manifest)


@pytest.mark.slow
def test_a_split_quantised_model_is_exact(tmp_path: Path) -> None:
    """Plain llama.cpp opens the parts itself; the swarm's files are ours."""
    shape = ModelShape(n_layer=2, n_embd=256, n_ff=256, n_expert=5, head_size=64, tensors_a_part=5)
    source = make_qwen3moe(tmp_path / "source.gguf", shape)
    quantise(source, tmp_path / "quantised", "Q4_K_M", keep_split=True)
    first = next(tmp_path.glob("quantised-00001-of-*.gguf"))
    manifest = require_exact(first)
    assert {each.type.name for each in manifest.tensors if each.is_expert} >= {"q4_K", "q6_K"}


def test_only_names_of_parts_have_other_parts() -> None:
    too_many = f"m-00001-of-{PARTS_MAX + 1:05}.gguf"
    wrong = ("m-00001-of-00001.gguf", "m-00003-of-00002.gguf", "m-1-of-2.gguf", "m-00001-of-00002")
    for name in ("m.gguf", *wrong, too_many):
        assert part_locations(Path(name)) == (Path(name),)
    assert part_locations(Path("a/m-00002-of-00003.gguf")) == tuple(
        Path(f"a/m-0000{each}-of-00003.gguf") for each in (1, 2, 3)
    )


def split_entries(
    number: int, count: int, n_tensor: int = 2, kinds: Mapping[str, str] = MappingProxyType({})
) -> tuple[bytes, ...]:
    """The keys of one part; `kinds` gives a key another type than llama.cpp's."""
    letters = {"no": "H", "count": "H", "tensors": "i"} | dict(kinds)
    numbers = {"B": 0, "H": 2, "I": 4, "i": 5, "f": 6, "Q": 10, "q": 11}
    values = {"no": number, "count": count, "tensors": n_tensor}
    names = {"no": b"split.no", "count": b"split.count", "tensors": b"split.tensors.count"}
    return tuple(
        entry(names[key], numbers[letter], struct.pack("<" + letter, values[key]))
        for key, letter in letters.items()
    )


def two_parts(kinds: Mapping[str, str] = MappingProxyType({})) -> dict[int, bytes]:
    return {
        1: container(entries=split_entries(0, 2, 2, kinds), tensors=(tensor(b"a"),), data=32),
        2: container(entries=split_entries(1, 2), tensors=(tensor(b"b"),), data=32),
    }


def part(number: int, count: int = 2, *, name: bytes = b"b", n_tensor: int = 2, data: int = 32) -> bytes:
    return container(entries=split_entries(number, count, n_tensor), tensors=(tensor(name),), data=data)


BROKEN: dict[str, tuple[Callable[[dict[int, bytes]], object], str]] = {
    "missing part": (lambda parts: parts.pop(2), r"m-00002-of-00002\.gguf cannot be read: No such file"),
    "missing first part": (lambda parts: parts.pop(1), r"m-00001-of-00002\.gguf cannot be read: No such"),
    "the same part twice": (
        lambda parts: parts.update({2: parts[1]}),
        r"00002\.gguf .*its split.no is not 1",
    ),
    "parts in a circle": (
        lambda parts: parts.update({1: part(1, name=b"a"), 2: part(0)}),
        r"split.no 1, so its name must end in -00002-of-00002\.gguf",
    ),
    "a part beyond the last": (lambda parts: parts.update({2: part(7)}), "its split.no is not 1"),
    "a part of another model": (lambda parts: parts.update({2: part(1, 3)}), "its split.count is not 2"),
    "a part without its number": (
        lambda parts: parts.update({2: container(tensors=(tensor(b"b"),), data=32)}),
        "split.no is missing",
    ),
    "one tensor in two parts": (
        lambda parts: parts.update({2: part(1, name=b"a")}),
        "the tensor a is in two of its parts",
    ),
    "a part that is cut short": (
        lambda parts: parts.update({2: part(1, data=31)}),
        r"00002\.gguf cannot be used: it is cut short or lies about its sizes: b ends at byte",
    ),
    "a part that is no model": (lambda parts: parts.update({2: b"GGML"}), r"00002\.gguf is not a GGUF file"),
    "an empty part": (lambda parts: parts.update({2: b""}), r"00002\.gguf is not a GGUF file"),
    "fewer tensors than announced": (
        lambda parts: parts.update({1: part(0, name=b"a", n_tensor=3)}),
        "its split.tensors.count is not 2, the number in all its parts",
    ),
    "more parts than the name says": (
        lambda parts: parts.update({1: part(0, 3, name=b"a")}),
        r"split.count is 3 and split.no 0, so its name must end in -00001-of-00003\.gguf",
    ),
    "an absurd number of parts": (
        lambda parts: parts.update({1: part(0, 65535, name=b"a")}),
        f"split.count is 65535, not in 0..{PARTS_MAX}",
    ),
    "no number of its own": (
        lambda parts: parts.update(
            {1: container(entries=split_entries(0, 2)[1:], tensors=(tensor(b"a"),), data=32)}
        ),
        "split.no is missing",
    ),
    "a count that is no number": (
        lambda parts: parts.update(two_parts({"count": "f"})),
        "split.count is not a whole number",
    ),
    "a negative number": (
        lambda parts: parts.update(
            {1: container(entries=split_entries(-1, 2, 2, {"no": "q"}), tensors=(tensor(b"a"),), data=32)}
        ),
        "split.no is -1, not in 0..1",
    ),
    "no tensor in any part": (
        lambda parts: parts.update(
            {
                1: container(entries=split_entries(0, 2, 0), tensors=(), data=0),
                2: container(entries=split_entries(1, 2, 0), tensors=(), data=0),
            }
        ),
        "the number of tensors, 0, is not in",
    ),
}


def write_parts(directory: Path, parts: dict[int, bytes]) -> Path:
    for number, data in parts.items():
        (directory / f"m-{number:05}-of-00002.gguf").write_bytes(data)
    return directory / "m-00001-of-00002.gguf"


@pytest.mark.parametrize("case", BROKEN)
def test_parts_that_do_not_fit_are_refused_by_name(case: str, tmp_path: Path) -> None:
    change, sentence = BROKEN[case]
    parts = two_parts()
    change(parts)
    with pytest.raises(ModelUnusable, match=sentence) as caught:
        read_gguf(write_parts(tmp_path, parts))
    assert caught.value.exit_code == 7


@pytest.mark.parametrize("kinds", [{}, {"no": "I", "count": "Q"}, {"count": "B", "tensors": "q"}])
def test_two_parts_are_one_whatever_the_width_of_their_numbers(kinds: dict[str, str], tmp_path: Path) -> None:
    header = read_gguf(write_parts(tmp_path, two_parts(kinds)))
    assert [each.name for each in header.tensors] == ["a", "b"]
    assert len(header.paths) == 2
    assert not header.metadata


def test_a_model_that_was_merged_says_that_it_has_no_parts(tmp_path: Path) -> None:
    """llama-gguf-split leaves a count of 0 in what it merges."""
    path = tmp_path / "merged.gguf"
    path.write_bytes(container(entries=split_entries(0, 0, 5), tensors=(tensor(b"a"),), data=32))
    header = read_gguf(path)
    assert (header.paths, [each.name for each in header.tensors], dict(header.metadata)) == (
        (path,),
        ["a"],
        {},
    )


def test_a_first_part_may_have_no_tensors(tmp_path: Path) -> None:
    """As llama-gguf-split writes with --no-tensor-first-split, without padding."""
    parts = two_parts()
    parts[1] = container(entries=split_entries(0, 2, 1), tensors=(), data=0).rstrip(b"\0") + bytes(3)
    header = read_gguf(write_parts(tmp_path, parts))
    assert [(each.name, each.offset > len(parts[1])) for each in header.tensors] == [("b", True)]


def test_another_part_than_the_first_points_to_the_first(tmp_path: Path) -> None:
    first = write_parts(tmp_path, two_parts())
    with pytest.raises(ModelUnusable, match=r"part 2 of a split model; give the first, m-00001-of-"):
        read_gguf(first.with_name("m-00002-of-00002.gguf"))


def test_a_renamed_first_part_is_refused_by_name(tmp_path: Path) -> None:
    first = write_parts(tmp_path, two_parts())
    with pytest.raises(ModelUnusable, match=r"must end in -00001-of-00002\.gguf, with the other parts"):
        read_gguf(first.rename(tmp_path / "model.gguf"))


def test_a_part_that_is_a_pipe_or_a_loop_of_links_is_refused_without_waiting(tmp_path: Path) -> None:
    first = write_parts(tmp_path, two_parts())
    second = first.with_name("m-00002-of-00002.gguf")
    second.unlink()
    os.mkfifo(second)
    with pytest.raises(ModelUnusable, match="not a regular file"):
        read_gguf(first)
    second.unlink()
    second.symlink_to(second.name)
    with pytest.raises(ModelUnusable, match="symbolic links"):
        read_gguf(first)


def test_all_headers_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvasir_node.model import gguf_reader

    first = write_parts(tmp_path, two_parts())
    size_bytes = first.stat().st_size - 32
    monkeypatch.setattr(gguf_reader, "HEADER_SIZE_BYTES_MAX", 2 * size_bytes - 64)
    with pytest.raises(ModelUnusable, match=r"00002\.gguf .*makes the header larger than"):
        read_gguf(first)


@pytest.mark.parametrize(
    "what, limit", [("tensors", "TENSORS_MAX"), ("metadata entries", "METADATA_ENTRIES_MAX")]
)
def test_tensors_and_entries_of_all_parts_together_are_bounded(
    what: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvasir_node.model import gguf_reader

    first = write_parts(tmp_path, two_parts())
    in_both = {"tensors": 2, "metadata entries": 6}[what]
    monkeypatch.setattr(gguf_reader, limit, in_both)
    assert len(read_gguf(first).tensors) == 2
    monkeypatch.setattr(gguf_reader, limit, in_both - 1)
    with pytest.raises(
        ModelUnusable, match=rf"00002\.gguf .*the number of {what} of this part and those before"
    ):
        read_gguf(first)
