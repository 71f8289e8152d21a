"""Texts become the tokens that the backbone's engine makes of them; a child that is lost costs one text."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from kvasir_node.backbone.trunk import Trunk, TrunkSettings
from kvasir_node.gateway.ports import CompletionRefused
from kvasir_node.model.gguf_format import (
    MetadataEntry,
    ValueType,
    integer_entry,
    metadata_sha256,
    text_entry,
)
from kvasir_node.model.gguf_reader import read_gguf
from kvasir_node.model.gguf_writer import lay_out
from kvasir_node.model.store import DEMO_MODEL
from kvasir_node.tokenizer.child_tokenizer import ChildTokenizer
from kvasir_node.tokenizer.tokenizer_child import REQUEST_BYTES_MAX
from kvasir_proto.errors import ModelUnusable, NotReady, UsageError
from kvasir_proto.tensor_types import TENSOR_TYPES

TEXTS = (
    "",
    " ",
    "Once upon a time there was a dog.",
    "  two  spaces\n\n\tand tabs ",
    "Grüße 😀 Ελλάδα 世界 \u200d \ufeff",
    "<|endoftext|>",
    "a\0b",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 20,
    "1234567890 1e-5 0x7f",
)


def header_of(path: Path) -> bytes:
    return metadata_sha256(read_gguf(path).metadata)


DEMO = (DEMO_MODEL, header_of(DEMO_MODEL))


@asynccontextmanager
async def tokenizer(**options: Any) -> AsyncIterator[ChildTokenizer]:
    made = ChildTokenizer(**options)
    try:
        yield made
    finally:
        if made.child is not None:
            await made.child.close()


async def test_a_text_has_the_tokens_that_the_backbones_engine_makes_of_it() -> None:
    trunk = Trunk(DEMO_MODEL, TrunkSettings(32, 32, 1), None, header_only=True)
    async with tokenizer() as made:
        vocabulary = await made.read(*DEMO)
        for text in TEXTS:
            assert list(await made.tokens_of(text, is_template=False)) == trunk.tokenize(text), text
        assert vocabulary.n_tokens == trunk.n_vocab
        for token in range(trunk.n_vocab):
            assert made.bytes_of(token) == trunk.piece(token)
        ends = [token for token in range(trunk.n_vocab) if trunk.is_end_of_generation(token)]
        assert list(vocabulary.stop_token_ids) == ends != []
        assert vocabulary.chat_template is None
        # Written out in a template, and only there, a control token is itself.
        assert await made.tokens_of(vocabulary.last_text, is_template=True) == tuple(ends)
        assert await made.tokens_of(vocabulary.last_text, is_template=False) != tuple(ends)
        for text in ("a" * 600_000, "a" * (REQUEST_BYTES_MAX + 1)):
            with pytest.raises(CompletionRefused) as refused:
                await made.tokens_of(text, is_template=False)
            assert refused.value.kind == "too_long"
    trunk.close()


async def test_a_child_has_no_file_thread_or_variable_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "secret")
    async with tokenizer() as made:
        await made.read(*DEMO)
        assert made.child is not None
        assert made.child.process is not None
        process = Path(f"/proc/{made.child.process.pid}")
        assert b"secret" not in (process / "environ").read_bytes()
        open_files = {str(each.readlink()) for each in (process / "fd").iterdir()}
        assert all(each == "/dev/null" or each.startswith("pipe:") for each in open_files), open_files
        assert len(list((process / "task").iterdir())) == 1
        limits = (process / "limits").read_text()
        for name in ("Max file size", "Max processes", "Max core file size"):
            assert f"{name:<26}0 " in limits, limits
        assert f"{'Max open files':<26}3 " in limits
        assert f"{'Max address space':<26}unlimited" not in limits


async def test_a_child_that_was_killed_while_it_had_nothing_to_do_is_replaced() -> None:
    async with tokenizer() as made:
        await made.read(*DEMO)
        assert made.child is not None
        assert made.child.process is not None
        made.child.process.send_signal(signal.SIGKILL)
        await made.child.process.wait()
        assert len(await made.tokens_of("Once", is_template=False)) == 2


async def test_a_child_that_nobody_needs_is_ended_and_started_again() -> None:
    async with tokenizer() as made:
        await made.read(*DEMO)
        child = made.child
        assert child is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.end_when_idle, 0.05)
            for _ in range(2):
                process = child.process
                assert process is not None
                with trio.fail_after(60):
                    await process.wait()
                assert made.bytes_of(3287) == b"On"
                assert await made.tokens_of("Once", is_template=False) == (3287, 335)
            nursery.cancel_scope.cancel()
        assert child.process is None


async def test_another_file_than_the_manifests_is_not_opened(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(DEMO_MODEL.read_bytes()[:1000])
    async with tokenizer() as made:
        with pytest.raises(NotReady):
            await made.tokens_of("x", is_template=False)
        for path, metadata, why in (
            (DEMO_MODEL, bytes(32), "are not the manifest's"),
            (broken, bytes(32), "cut short"),
            (tmp_path / "nothing.gguf", bytes(32), "cannot be read"),
        ):
            with pytest.raises(ModelUnusable, match=why):
                await made.read(path, metadata)


async def test_only_a_text_that_no_template_made_begins_as_the_models_texts_do(tmp_path: Path) -> None:
    path = tmp_path / "begins.gguf"
    entries = dict(read_gguf(DEMO_MODEL).metadata) | {
        each.key: each
        for each in (
            MetadataEntry("tokenizer.ggml.add_bos_token", ValueType.BOOL, b"\1"),
            integer_entry("tokenizer.ggml.bos_token_id", 3),
        )
    }
    write_header(path, tuple(entries.values()))
    async with tokenizer() as made:
        vocabulary = await made.read(path, header_of(path))
        assert await made.tokens_of("Once", is_template=False) == (3, 3287, 335)
        assert await made.tokens_of("Once", is_template=True) == (3287, 335)
        assert vocabulary.first_text == vocabulary.bytes_of(3).decode()
        assert vocabulary.last_text == "<|endoftext|>"


def write_header(path: Path, metadata: tuple[MetadataEntry, ...]) -> None:
    """A file with these entries and one tensor of zeros."""
    header, _, size_bytes = lay_out(metadata, (("token_embd.weight", TENSOR_TYPES[0], (8, 8)),), 32)
    path.write_bytes(header.ljust(size_bytes, b"\0"))


async def test_a_model_without_a_tokenizer_has_tokens_without_bytes(tmp_path: Path) -> None:
    path = tmp_path / "none.gguf"
    metadata = (
        text_entry("general.architecture", "llama"),
        text_entry("tokenizer.ggml.model", "none"),
        text_entry("tokenizer.chat_template", "{{ messages }}"),
    )
    write_header(path, metadata)
    async with tokenizer() as made:
        vocabulary = await made.read(path, header_of(path))
        assert vocabulary.stop_token_ids == ()
        assert vocabulary.chat_template == "{{ messages }}"
        assert made.bytes_of(0) == b""
        with pytest.raises(UsageError, match="give token ids"):
            await made.tokens_of("x", is_template=False)


async def test_nothing_that_a_child_says_is_believed() -> None:
    async with tokenizer() as made:
        await made.read(*DEMO)
        assert made.child is not None
        for said, error in (
            (b"", CompletionRefused),
            (b"\xff\xff\xff\xff", CompletionRefused),
            (b"\0\0\0\0", ModelUnusable),
            (b"\2\0\0\0t\0", ModelUnusable),
            (b"\5\0\0\0t\xff\xff\xff\x7f", ModelUnusable),
            (b"\2\0\0\0v\x90", ModelUnusable),
        ):
            await made.child.close()
            program = f"import os; os.write(1, {said!r}); os.read(0, 9)"
            made.child.command = [sys.executable, "-S", "-c", program]
            with pytest.raises(error):
                await made.tokens_of("x", is_template=False)


async def test_a_machine_with_too_much_to_do_is_nobodys_fault() -> None:
    async with tokenizer(timeout_s=0.01) as made:
        with pytest.raises(NotReady, match="no answer within"):
            await made.read(*DEMO)
