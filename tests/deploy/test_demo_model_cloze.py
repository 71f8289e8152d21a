"""The cloze items of deploy/demo-model: the right word among others that are as common, nothing twice."""

from __future__ import annotations

import json
from pathlib import Path

from tests.deploy.demo_model_scripts import load_script

corpus = load_script("corpus")
cloze = load_script("cloze")

LAST = ("stone", "river", "bread", "house", "light", "water", "field", "tree")


def shelf() -> list[object]:
    documents = []
    for source in (*cloze.SOURCES, "devil"):
        for index in range(60):
            body = " ".join(f"word{index}x{n}" for n in range(40))
            documents.append(corpus.Document(source, f"k{index}", f"{body} {LAST[index % 8]}. Short one."))
    return documents


def test_items_have_the_right_word_in_its_place_and_others_that_end_sentences() -> None:
    items = cloze.cloze_items(shelf(), LAST)
    assert len(items) == 4 * 60
    for item in items:
        assert len(set(item["choices"])) == 4
        assert set(item["choices"]) <= set(LAST)
        index = int(item["context"].split()[0].removeprefix("word").partition("x")[0])
        assert item["choices"][item["answer"]] == LAST[index % 8]
        assert item["source"] in cloze.SOURCES
        assert not set(item["choices"]) & set(item["context"].split())
    assert len({item["answer"] for item in items}) == 4
    assert cloze.cloze_items(shelf(), LAST) == items


def test_only_words_that_the_tokeniser_has_whole_are_asked(tmp_path: Path) -> None:
    vocabulary = {f"\u0120{word}": number for number, word in enumerate(LAST[:5])} | {"tree": 9}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": vocabulary}}))
    words = cloze.words_of(path)
    assert words == set(LAST[:5])
    asked = {choice for item in cloze.cloze_items(shelf(), words) for choice in item["choices"]}
    assert asked == set(LAST[:5])


def test_text_is_of_whole_sentences_from_every_source_in_turn(tmp_path: Path) -> None:
    size_bytes, n_item = cloze.write(shelf(), LAST, tmp_path / "text", tmp_path / "items")
    text = (tmp_path / "text").read_text()
    assert size_bytes == len(text.encode())
    assert all(passage.endswith(".") for passage in text.strip().split("\n\n"))
    assert len((tmp_path / "items").read_text().splitlines()) == n_item
