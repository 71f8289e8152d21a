"""The corpus of deploy/demo-model: what is held out is held out of every source."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.demo_model_scripts import load_script

corpus = load_script("corpus")


def shelf() -> list[Any]:
    """Two versions and a commentary of 200 passages, and 50 entries of a dictionary."""
    documents = [
        corpus.Document(source, f"B:Book.{chapter}", f"{source} {chapter} " * (10 + chapter % 7))
        for source in ("kjv", "web", "mhcc")
        for chapter in range(200)
    ]
    return documents + [corpus.Document("devil", f"D:{i}", f"entry {i}") for i in range(50)]


def test_no_passage_is_on_both_sides() -> None:
    split = corpus.split_by_key(shelf())
    trained, held_out = ({document.key for document in side} for side in (split.train, split.held_out))
    assert trained
    assert held_out
    assert not trained & held_out
    assert len(split.train) + len(split.held_out) == len(shelf())


def test_every_family_gives_its_share() -> None:
    split = corpus.split_by_key(shelf(), share=0.1)
    for family, sources in (("B", 3), ("D", 1)):
        total = sum(d.size_bytes for d in shelf() if d.key.startswith(family))
        held = [d for d in split.held_out if d.key.startswith(family)]
        largest_key = sources * max(d.size_bytes for d in shelf())
        assert 0.1 * total <= sum(d.size_bytes for d in held) <= 0.1 * total + largest_key
        assert len(held) % sources == 0


def test_the_split_does_not_depend_on_the_order_of_the_documents() -> None:
    forwards, backwards = corpus.split_by_key(shelf()), corpus.split_by_key(shelf()[::-1])
    assert set(forwards.held_out) == set(backwards.held_out)


def test_split_survives_the_disk(tmp_path: Path) -> None:
    split = corpus.split_by_key(shelf())
    corpus.write_split(split, tmp_path / "corpus.json")
    assert corpus.read_split(tmp_path / "corpus.json") == split


def test_reads_a_sword_commentary(tmp_path: Path) -> None:
    book = (
        '<chapter osisID="Gen.1" sID="a"/><title>Chapter 1</title><div sID="x" type="x-p"/>'
        "In the beginning\nthere was a paragraph &amp; a half\u2019s worth."
        '<chapter osisID="Gen.2" sID="b"/><div sID="y" type="x-p"/>too short'
    ).encode()
    block = zlib.compress(book)
    for testament, record in (("ot", struct.pack("<III", 0, len(block), len(book))), ("nt", b"")):
        (tmp_path / f"{testament}.bzs").write_bytes(record)
        (tmp_path / f"{testament}.bzz").write_bytes(block)
    assert list(corpus.read_henry(tmp_path)) == [
        corpus.Document("mhcc", "B:Gen.1", "In the beginning there was a paragraph & a half's worth.")
    ]


def test_reads_an_r_character_vector() -> None:
    strings = [b"Emma", b"", b"by Jane Austen"]
    vector = b"".join(struct.pack(">Ii", 0x00040009, len(s)) + s for s in strings)
    assert corpus.lines_of_character_vector(b"head" + vector + struct.pack(">Ii", 0xFE, 0)) == [
        "Emma", "", "by Jane Austen",
    ]  # fmt: skip


def test_unknown_compression_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.rdb").write_bytes(b"\x00\x00\x00\x05?xxxx")
    with pytest.raises(ValueError, match="unknown compression"):
        list(corpus.read_r_objects(tmp_path / "data.rdb"))
