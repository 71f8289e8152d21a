"""A model written again with experts in F16: the same numbers, everything else untouched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from kvasir_node.model.f16_experts import write_f16_experts
from kvasir_node.model.gguf_reader import read_gguf
from kvasir_proto.errors import ModelUnusable
from kvasir_proto.manifest import is_expert_name
from tests.model_makers import ModelShape, make_qwen3moe, quantise


def test_experts_are_what_they_were_to_the_precision_of_f16(tmp_path: Path) -> None:
    plain = make_qwen3moe(tmp_path / "plain.gguf", ModelShape(n_layer=2, n_embd=64, n_ff=32))
    source = quantise(plain, tmp_path / "source.gguf", "Q8_0")
    destination = tmp_path / "f16.gguf"
    write_f16_experts(source, destination)
    before, after = read_gguf(source), read_gguf(destination)
    assert after.metadata == before.metadata
    old, new = source.read_bytes(), destination.read_bytes()
    n_matrix = 0
    for one, other in zip(before.tensors, after.tensors, strict=True):
        assert (one.name, one.shape) == (other.name, other.shape)
        bytes_before = old[one.offset : one.offset + one.size_bytes]
        bytes_after = new[other.offset : other.offset + other.size_bytes]
        if not is_expert_name(one.name):
            assert (other.type, bytes_after) == (one.type, bytes_before)
            continue
        n_matrix += 1
        assert (one.type.name, other.type.name) == ("q8_0", "f16")
        n_row = int(np.prod(one.shape[1:]))
        rows = np.frombuffer(bytes_before, np.uint8).reshape(n_row, -1)
        expected = quants.dequantize(rows, GGMLQuantizationType(one.type.id))
        values = np.frombuffer(bytes_after, np.float16).reshape(expected.shape)
        assert (values == expected.astype(np.float16)).all()
    assert n_matrix == 2 * 3


def test_a_file_that_is_no_model_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelUnusable):
        write_f16_experts(tmp_path / "no.gguf", tmp_path / "f16.gguf")
    assert not (tmp_path / "f16.gguf").exists()
