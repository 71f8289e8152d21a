"""The training corpus: documents read out of unpacked Debian packages, and their split.

Decides what a document is, how each source is cleaned, and which documents are held out.
It is apart from the tokeniser so that the split can be tested with nothing but the standard
library. It does not fetch packages (make_demo_model.sh does) and knows nothing of tokens.

A document's *key* names the passage it treats. The two Bibles and the commentary share the key
"B:Book.Chapter", so that a chapter held out of one of them is held out of all three.
"""

from __future__ import annotations

import bz2
import gzip
import html
import json
import lzma
import os
import random
import re
import struct
import subprocess
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

HELD_OUT_SHARE = 0.05
SPLIT_SEED = 7
HELD_OUT_ORDER_SEED = 1

OSIS_BOOKS = (
    "Gen", "Exod", "Lev", "Num", "Deut", "Josh", "Judg", "Ruth", "1Sam", "2Sam", "1Kgs", "2Kgs",
    "1Chr", "2Chr", "Ezra", "Neh", "Esth", "Job", "Ps", "Prov", "Eccl", "Song", "Isa", "Jer", "Lam",
    "Ezek", "Dan", "Hos", "Joel", "Amos", "Obad", "Jonah", "Mic", "Nah", "Hab", "Zeph", "Hag",
    "Zech", "Mal", "Matt", "Mark", "Luke", "John", "Acts", "Rom", "1Cor", "2Cor", "Gal", "Eph",
    "Phil", "Col", "1Thess", "2Thess", "1Tim", "2Tim", "Titus", "Phlm", "Heb", "Jas", "1Pet",
    "2Pet", "1John", "2John", "3John", "Jude", "Rev",
)  # fmt: skip

ASCII_FOR = {
    "\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--", "\u2013": "-",
    "\u2026": "...", "\u00a0": " ", "\u00e6": "ae", "\u00c6": "Ae", "\ufeff": "",
}  # fmt: skip

# Jargon File entries with these words are left out: a demo should not learn to say them.
OBSCENE = re.compile(r"fuck|cunt|\bnigger|\bshit|\bcock\b|\bpiss", re.IGNORECASE)

# Marks put into the text in place of markup, then split on; neither occurs in the sources.
CHAPTER_MARK, KEY_END, PARAGRAPH_MARK = "\x01", "\x03", "\x02"


@dataclass(frozen=True)
class Document:
    """One document: where it is from, the passage it treats, and its cleaned text."""

    source: str
    key: str
    text: str

    @property
    def size_bytes(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True)
class Split:
    """The training documents and the held-out documents; no key is on both sides."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]


def to_ascii_punctuation(text: str) -> str:
    """Curly quotes, dashes and ligatures in their ASCII spelling."""
    for character, replacement in ASCII_FOR.items():
        text = text.replace(character, replacement)
    return text


def one_line(text: str) -> str:
    """The text with every run of white space (hard wraps included) made one space."""
    return re.sub(r"\s+", " ", text).strip()


def read_king_james(program: Path, data_directory: Path) -> Iterator[Document]:
    """The King James Version, one document a chapter: its heading, then one verse a line.

    Its data file is compressed in a way of its own, so the package's reader program unpacks it.
    Raises `ValueError` for a line that is neither a heading nor a verse.
    """
    environment = {**os.environ, "COLUMNS": "100000", "HOME": "."}
    printed = subprocess.run(
        [program, "-p", data_directory, "gen1:1-rev22:21"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, check=True,
    ).stdout  # fmt: skip
    books: list[str] = []
    heading = ""
    verses: list[str] = []

    def chapter() -> Document:
        key = f"B:{OSIS_BOOKS[len(books) - 1]}.{heading.rsplit(' ', 1)[1]}"
        return Document("kjv", key, "\n".join([heading, *verses]))

    for line in printed.split("\n"):
        if found := re.match(r"^((?:[1-3] )?[A-Z][A-Za-z ]+?) (\d+)\s*$", line):
            if verses:
                yield chapter()
            heading, verses = line.strip(), []
            if not books or books[-1] != found[1]:
                books.append(found[1])
        elif found := re.match(r"^\s*(\d+) (.*)$", line):
            verses.append(found[2].strip())
        elif line.strip():
            raise ValueError(f"neither a chapter's heading nor a verse: {line[:80]!r}")
    if verses:
        yield chapter()


def read_sword_books(module_directory: Path) -> Iterator[str]:
    """The OSIS XML of each book of a SWORD zText or zCom module.

    The `.bzs` index has 12-byte records (offset, packed size, raw size; little endian), each
    naming one zlib block of the `.bzz` file.
    """
    for testament in ("ot", "nt"):
        index = (module_directory / f"{testament}.bzs").read_bytes()
        blocks = (module_directory / f"{testament}.bzz").read_bytes()
        for offset, size, _raw_size in struct.iter_unpack("<III", index):
            if size:
                yield zlib.decompress(blocks[offset : offset + size]).decode("utf-8", "replace")


def chapters_of(osis: str, paragraph: str, dropped: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(OSIS chapter id, paragraphs) of one book; `paragraph` is the pattern that starts one."""
    for element in dropped:
        osis = re.sub(rf"<{element}\b[^>]*>.*?</{element}>", "", osis, flags=re.DOTALL)
    osis = re.sub(r'<chapter\b[^>]*osisID="([^"]*)"[^>]*sID[^>]*/?>', rf"{CHAPTER_MARK}\1{KEY_END}", osis)
    osis = re.sub(paragraph, PARAGRAPH_MARK, osis)
    osis = re.sub(r"<l [^>]*sID[^>]*>", " ", osis)
    plain = html.unescape(re.sub(r"<[^>]*>", "", osis))
    for chapter in plain.split(CHAPTER_MARK)[1:]:
        key, text = chapter.split(KEY_END, 1)
        yield key, [to_ascii_punctuation(one_line(part)) for part in text.split(PARAGRAPH_MARK)]


def read_world_english(module_directory: Path) -> Iterator[Document]:
    """The World English Bible with the deuterocanonical books, one document a chapter."""
    paragraph = r'<(div sID="[^"]*" type="x-p"|lg sID)[^>]*>'
    for book in read_sword_books(module_directory):
        for key, paragraphs in chapters_of(book, paragraph, ("note", "title")):
            kept = [text for text in paragraphs if text]
            if sum(map(len, kept)) > 100:
                yield Document("web", f"B:{key}", "\n".join(kept))


def read_henry(module_directory: Path) -> Iterator[Document]:
    """Matthew Henry's Concise Commentary, one document a chapter."""
    paragraph = r'<div sID="[^"]*" type="x-p"/>'
    for book in read_sword_books(module_directory):
        for key, paragraphs in chapters_of(book, paragraph, ("table", "title")):
            kept = [text for text in paragraphs if len(text) > 20]
            if kept:
                yield Document("mhcc", f"B:{key}", "\n".join(kept))


def read_r_objects(database: Path) -> Iterator[bytes]:
    """The serialised objects of an R lazy-load database (`.rdb`), unpacked.

    Each is a 4-byte big-endian size and a compressed stream: zlib bare, the others after a letter.
    """
    packed = database.read_bytes()
    position = 0
    while position < len(packed):
        kind = packed[position + 4 : position + 5]
        opener: zlib._Decompress | lzma.LZMADecompressor | bz2.BZ2Decompressor
        if kind == b"x":
            opener, start = zlib.decompressobj(), position + 4
        elif kind == b"Z":
            opener, start = lzma.LZMADecompressor(), position + 5
        elif kind == b"2":
            opener, start = bz2.BZ2Decompressor(), position + 5
        else:
            raise ValueError(f"unknown compression {kind!r} at byte {position} of {database.name}")
        yield opener.decompress(packed[start:])
        position = len(packed) - len(opener.unused_data)


def lines_of_character_vector(serialised: bytes) -> list[str]:
    """The strings of the first character vector in R's XDR serialisation; NA becomes ''."""
    lines: list[str] = []
    position = serialised.find(b"\x00\x04\x00\x09")
    while 0 <= position < len(serialised) - 8:
        flags, size = struct.unpack_from(">Ii", serialised, position)
        if flags & 0xFF != 9:  # no longer a CHARSXP: the vector has ended
            break
        position += 8
        lines.append(serialised[position : position + max(size, 0)].decode("utf-8", "replace"))
        position += max(size, 0)
    return lines


def read_austen(database: Path) -> Iterator[Document]:
    """Jane Austen's six novels, one document a chapter, headings dropped."""
    chapters: list[list[str]] = []
    for lines in map(lines_of_character_vector, read_r_objects(database)):
        if len(lines) < 2_000:  # a title or a lookup table, not a novel
            continue
        chapter: list[str] = []
        for block in "\n".join(lines).split("\n\n"):
            paragraph = to_ascii_punctuation(one_line(block))
            if re.match(r"^(CHAPTER|Chapter|VOLUME|Volume)\b", paragraph) and len(paragraph) < 40:
                if chapter:
                    chapters.append(chapter)
                chapter = []
            elif paragraph:
                chapter.append(paragraph.replace("_", ""))
        if chapter:
            chapters.append(chapter)
    for index, chapter in enumerate(chapters):
        text = "\n".join(chapter)
        if len(text) > 400:
            yield Document("austen", f"A:{index}", text)


def read_devil(dictionary: Path) -> Iterator[Document]:
    """The Devil's Dictionary, one document an entry; verse keeps its line breaks."""
    with gzip.open(dictionary, "rt", encoding="latin-1") as file:
        text = file.read()
    text = text[text.find("ABASEMENT, n.") :]
    entries = re.split(
        r"\n\n(?=[A-Z][A-Z \-']{1,30},? ?(?:n|adj|v|adv|pp|x|pro|interj|p|prep)[.\w]*\.)", text
    )
    for index, entry in enumerate(entries):
        paragraphs = []
        for block in entry.strip().split("\n\n"):
            if block.startswith("    "):
                paragraphs.append("\n".join(line.strip() for line in block.split("\n")))
            else:
                paragraphs.append(one_line(block))
        joined = "\n".join(paragraph for paragraph in paragraphs if paragraph)
        yield Document("devil", f"D:{index}", joined.replace("_", ""))


def jargon_paragraphs(text: str) -> str:
    """Jargon File text unwrapped: no figures, no cross-reference braces, mostly letters."""
    blocks = [one_line(block) for block in re.split(r"\n\s*\n", text)]
    kept = [
        re.sub(r"[{}]", "", block)
        for block in blocks
        if len(block) > 1 and not re.search(r"[\u2500-\u259f]{5}", block)
    ]

    def is_prose(block: str) -> bool:
        return sum(character.isalpha() or character == " " for character in block) / len(block) > 0.75

    return "\n".join(block for index, block in enumerate(kept) if index == 0 or is_prose(block))


def read_jargon_entries(jargon: str) -> Iterator[Document]:
    """The Jargon File's lexicon, one document an entry."""
    entries = re.split(r"\n   :(?=[^\n]{1,60}?:)", jargon)[1:]
    for index, entry in enumerate(entries):
        if index == len(entries) - 1:  # the appendices follow the last entry
            entry = entry[:3_000]
        text = re.sub(r"^([^:]{1,60}):\s*(/[^/]{1,60}/,?)?\s*", r"\1: ", jargon_paragraphs(entry))
        if len(text) > 60 and not OBSCENE.search(text[:20_000]):
            yield Document("jargon", f"J:{index}", text[:20_000])


def read_jargon_introduction(jargon: str) -> Iterator[Document]:
    """The Jargon File's introductory chapters, 40 paragraphs a document."""
    introduction = jargon_paragraphs(re.split(r"\n   :(?=[^\n]{1,60}?:)", jargon)[0])
    start = max(introduction.find("This document is a collection of slang"), 0)
    paragraphs = [line for line in introduction[start:].split("\n") if len(line) > 60]
    for first in range(0, len(paragraphs), 40):
        yield Document("jargon", f"JI:{first}", "\n".join(paragraphs[first : first + 40]))


def read_corpus(packages: Path) -> list[Document]:
    """Every document of the six sources; `packages` has one folder for each unpacked package."""
    sword = "usr/share/sword/modules"
    jargon_path = packages / "jargon-text/usr/share/doc/jargon-text/jargon.txt.gz"
    with gzip.open(jargon_path, "rt", encoding="utf-8", errors="replace") as file:
        jargon = to_ascii_punctuation(file.read())
    documents = [
        *read_king_james(packages / "bible-kjv/usr/bin/bible", packages / "bible-kjv-text/usr/lib"),
        *read_world_english(packages / "sword-text-web" / sword / "texts/ztext/engWEB2015eb"),
        *read_austen(packages / "r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"),
        *read_devil(packages / "dict-devil/usr/share/dictd/devil.dict.dz"),
        *read_jargon_entries(jargon),
        *read_henry(packages / "sword-comm-mhcc" / sword / "comments/zcom/mhcc"),
        *read_jargon_introduction(jargon),
    ]
    return [Document(document.source, document.key, without_drawing(document.text)) for document in documents]


def without_drawing(text: str) -> str:
    """The text without control characters and without box-drawing and later symbols."""
    return "".join(c for c in text if c == "\n" or " " <= c < "\u2500")


def split_by_key(documents: Sequence[Document], share: float = HELD_OUT_SHARE) -> Split:
    """Holds out `share` of each key family's bytes, by a seeded shuffle of the keys.

    A family is a key's part before the colon. All documents of one key go to the same side.
    """
    size_bytes: Counter[str] = Counter()
    for document in documents:
        size_bytes[document.key] += document.size_bytes
    keys = sorted(size_bytes)
    random.Random(SPLIT_SEED).shuffle(keys)
    families: defaultdict[str, list[str]] = defaultdict(list)
    for key in keys:
        families[key.split(":")[0]].append(key)
    held_out: set[str] = set()
    for members in families.values():
        wanted = share * sum(size_bytes[key] for key in members)
        taken = 0
        for key in members:
            if taken >= wanted:
                break
            held_out.add(key)
            taken += size_bytes[key]
    train = [document for document in documents if document.key not in held_out]
    rest = [document for document in documents if document.key in held_out]
    random.Random(HELD_OUT_ORDER_SEED).shuffle(rest)
    return Split(tuple(train), tuple(rest))


def statistics(split: Split) -> dict[str, dict[str, dict[str, int]]]:
    """Documents and bytes by side and source."""
    table: dict[str, dict[str, dict[str, int]]] = {}
    for side, documents in (("train", split.train), ("held_out", split.held_out)):
        counts: defaultdict[str, dict[str, int]] = defaultdict(lambda: {"documents": 0, "size_bytes": 0})
        for document in documents:
            counts[document.source]["documents"] += 1
            counts[document.source]["size_bytes"] += document.size_bytes
        table[side] = dict(counts)
    return table


def write_split(split: Split, path: Path) -> None:
    """The split as one JSON object: {"train": [...], "held_out": [...]}."""
    path.write_text(json.dumps(asdict(split)), encoding="utf-8")


def read_split(path: Path) -> Split:
    """What `write_split` wrote."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    train, held_out = (
        tuple(Document(**document) for document in stored[side]) for side in ("train", "held_out")
    )
    return Split(train, held_out)
