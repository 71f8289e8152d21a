"""Writes a model again with its routed experts in F16, for kernels that differ in how they add.

What a weight type is multiplied with decides what a kernel's accumulator can do to it; with quantised weights
ggml adds whole numbers, with F16 weights floats. So a demonstration of nodes that add in another precision
needs experts in F16, and this makes them from a model that is there. Every other tensor and all metadata are
carried through unchanged. It is another model than its source: its manifest has another digest.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, quants

from kvasir_node.model.gguf_format import GgufTensor
from kvasir_node.model.gguf_reader import read_gguf
from kvasir_node.model.gguf_writer import lay_out, new_file
from kvasir_node.model.model_bytes import ModelBytes
from kvasir_proto.errors import ModelUnusable
from kvasir_proto.manifest import is_expert_name
from kvasir_proto.tensor_types import TENSOR_TYPES_BY_NAME


def write_f16_experts(source: Path, destination: Path) -> None:
    """Write the model at `source` with its experts' matrices in F16; it appears whole or not at all.

    Raises `ModelUnusable` when a type cannot be expanded, or a file cannot be read or written.
    """
    gguf = read_gguf(source)
    f16 = TENSOR_TYPES_BY_NAME["f16"]
    header, placed, size_bytes = lay_out(
        tuple(gguf.metadata.values()),
        [(each.name, f16 if _is_matrix(each) else each.type, each.shape) for each in gguf.tensors],
        gguf.alignment,
    )
    with ModelBytes(source, gguf.size_bytes) as model, new_file(destination) as output:
        output.write(header)
        for tensor, place in zip(gguf.tensors, placed, strict=True):
            output.seek(place.offset)
            if _is_matrix(tensor):
                output.write(_in_f16(model, tensor))
            else:
                for piece in model.pieces(tensor.offset, tensor.size_bytes):
                    output.write(piece)
        output.truncate(size_bytes)


def _is_matrix(tensor: GgufTensor) -> bool:
    return is_expert_name(tensor.name) and tensor.name.endswith(".weight")


def _in_f16(model: ModelBytes, tensor: GgufTensor) -> bytes:
    """All experts of one tensor."""
    data = np.frombuffer(model.read(tensor.offset, tensor.size_bytes), np.uint8)
    n_row = int(np.prod(tensor.shape[1:]))
    try:
        values = quants.dequantize(data.reshape(n_row, -1), GGMLQuantizationType(tensor.type.id))
    except (ValueError, NotImplementedError) as error:
        raise ModelUnusable(f"{tensor.name} is {tensor.type.name}, which cannot be expanded") from error
    return values.astype(np.float16).tobytes()
