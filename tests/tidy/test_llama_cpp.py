"""llama.cpp trusts what it opens, so two modules open files with it, and few decide which."""

from __future__ import annotations

import re

from tests.tidy.repository import python_files, text_of

OPENING = re.compile(r"llama_model_load|llama_model_quantize|llama_state_load|lora_init|llama_cpp\.Llama\(")
TRUNK = re.compile(r"(?<![A-Za-z])Trunk\(")
OPENERS = {"kvasir_node/backbone/trunk.py", "kvasir_node/tokenizer/vocabulary_reader.py"}
"""The second reads a header only, in a process of its own, whose digest must be the manifest's."""
USERS = {
    "kvasir_node/backbone/engine.py",
    "kvasir_node/backbone/trial.py",
    "kvasir_node/measure/in_process.py",
}
"""The engine is told paths of a store's backbone and reference files; the trial is shown
a backbone file; measurements open those of a stored model."""


def test_two_modules_open_files_with_llama_cpp() -> None:
    opening = {path for path in python_files("kvasir_proto", "kvasir_node") if OPENING.search(source(path))}
    assert opening == OPENERS
    assert {path for path in python_files("kvasir_node") if TRUNK.search(source(path))} <= USERS


def source(path: str) -> str:
    return text_of(path) or ""
