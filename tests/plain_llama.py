"""llama.cpp without anything of ours: what a single process computes from a file."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt


def decode_plainly(path: Path, tokens: Sequence[int], *, n_ubatch: int = 64) -> npt.NDArray[np.float32]:
    """Logits of every position of `tokens`, [position, vocabulary], on one thread, without repacking."""
    import llama_cpp

    silence()
    model_parameters = llama_cpp.llama_model_default_params()
    model_parameters.n_gpu_layers = 0
    model_parameters.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(bytes(path), model_parameters)
    if not model:
        raise AssertionError(f"llama.cpp does not open {path.name}: {''.join(_log)}")
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = max(64, len(tokens))
    parameters.n_batch = max(64, len(tokens))
    parameters.n_ubatch = n_ubatch
    parameters.n_threads = parameters.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        llama_cpp.llama_model_free(model)
        raise AssertionError(f"llama.cpp makes no context of {path.name}: {''.join(_log)}")
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    try:
        batch.n_tokens = len(tokens)
        for position, token in enumerate(tokens):
            batch.token[position] = token
            batch.pos[position] = position
            batch.n_seq_id[position] = 1
            batch.seq_id[position][0] = 0
            batch.logits[position] = 1
        code = llama_cpp.llama_decode(context, batch)
        assert code == 0, f"llama_decode of {path.name} gave {code}"
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        logits = llama_cpp.llama_get_logits(context)
        return np.ctypeslib.as_array(logits, (len(tokens), n_vocab)).copy()
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


_log: list[str] = []
_callbacks: list[object] = []


def last_words() -> str:
    """What llama.cpp complained of since `silence`."""
    return "".join(_log)


def silence() -> None:
    """Keep llama.cpp's last lines for an error's text, instead of the terminal."""
    import llama_cpp

    _log.clear()
    if not _callbacks:

        @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
        def keep(level: int, text: bytes, _: ctypes.c_void_p) -> None:
            if level >= 3:
                _log.append(text.decode(errors="replace"))

        _callbacks.append(keep)
        llama_cpp.llama_log_set(keep, ctypes.c_void_p())
