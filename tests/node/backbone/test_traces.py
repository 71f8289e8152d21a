"""What was seen inside comes back from its file as it was, and from no other file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvasir_node.backbone.hook import LayerCall
from kvasir_node.backbone.traces import TraceRecorder, Traces, joined_traces, read_traces, write_traces
from kvasir_proto.errors import EngineFailed


def traces(asked: bool) -> Traces:
    draws = np.random.default_rng(2)
    experts = draws.integers(0, 8, (2, 5, 3)).astype(np.int32)
    return Traces(
        layers=(0, 1, 2),
        moe_layers=(1, 2),
        hidden=draws.standard_normal((3, 5, 4)).astype(np.float32),
        router=draws.standard_normal((2, 5, 8)).astype(np.float32),
        experts=experts,
        asked=experts.copy() if asked else None,
    )


@pytest.mark.parametrize("asked", [True, False])
def test_a_file_holds_all_of_it(tmp_path: Path, asked: bool) -> None:
    written = traces(asked)
    write_traces(tmp_path / "x.npz", written)
    found = read_traces(tmp_path / "x.npz")
    assert (found.layers, found.moe_layers) == (written.layers, written.moe_layers)
    for name in ("hidden", "router", "experts"):
        assert np.array_equal(getattr(found, name), getattr(written, name))
        assert getattr(found, name).dtype == getattr(written, name).dtype
    assert (found.asked is None) is not asked
    joined = joined_traces([found, found])
    assert joined.hidden.shape == (3, 10, 4)
    assert (None if joined.asked is None else joined.asked.shape) == ((2, 10, 3) if asked else None)
    assert joined_traces([traces(True), traces(False)]).asked is None, "half of it is nothing"


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04"])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(EngineFailed, match=r"x\.npz does not hold what was seen inside"):
        read_traces(tmp_path / "x.npz")
    np.savez(tmp_path / "x.npz", hidden=np.zeros(3))
    with pytest.raises(EngineFailed, match="does not hold"):
        read_traces(tmp_path / "x.npz")


def test_what_is_asked_twice_or_not_at_all_is_no_answer() -> None:
    ids = np.array([[3, 1], [0, 2]], np.int32)
    call = LayerCall(layer=4, n_tokens=2, n_slots=2, ids_address=ids.ctypes.data)
    recorder = TraceRecorder()
    recorder._seen = {("ffn_moe_topk", 4): [ids], ("ffn_moe_logits", 4): [np.zeros((2, 8), np.float32)]}
    assert recorder.traces(2).asked is None, "no hook was asked"
    recorder.note(call)
    ids[:] = 7  # the memory is the hook's, and used again
    asked = recorder.traces(2).asked
    assert asked is not None
    assert asked.tolist() == [[[3, 1], [0, 2]]]
    recorder.note(call)
    with pytest.raises(EngineFailed, match="exactly once"):
        recorder.traces(2)
    recorder.clear()
    assert recorder.traces(2).moe_layers == ()
