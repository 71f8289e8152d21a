"""Whether llama.cpp takes a backbone file, found out in a process of its own before a swarm depends on it.

Our reader knows no architecture: which hyper-parameters a model needs, and whether they fit its tensors,
only llama.cpp can say. So it loads the file and decodes two tokens, the experts' rows being zeros, in a child
process with a bound on time and memory: an abort in there is an answer like any other. Of a trunk too large
to be loaded for that it reads the header and builds one graph, without the bytes of a single tensor. The
module decides no more than what sentence comes of it.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from kvasir_proto.errors import EngineFailed, ModelUnusable
from kvasir_proto.limits import as_sentence

if TYPE_CHECKING:
    from kvasir_node.backbone.trunk import TrunkSettings

TIMEOUT_S: Final = 120
"""A header with the largest vocabularies takes a few seconds, the largest trunk that is loaded some more."""

MEMORY_BYTES_MAX: Final = 8 << 30
"""Memory of the child; the holes of the experts take address space besides."""

DECODED_BYTES_MAX: Final = 2 << 30
"""Of a trunk with more bytes only the header is judged: a machine that only adds a model may be small."""

DECODED_FILE_BYTES_MAX: Final = 32 << 30
"""With its holes, which llama.cpp reads too, at some GB/s."""

N_CTX: Final = 512

_OUTPUT_LENGTH_MAX: Final = 65536


def try_backbone_file(path: Path) -> None:
    """Let llama.cpp judge the backbone file at `path`; about half a second for a small one.

    Raises `ModelUnusable`, with llama.cpp's own reason, when it refuses the file or does not survive it.
    """
    command = [sys.executable, "-P", "-m", "kvasir_node.backbone.trial", str(path)]
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelUnusable(f"llama.cpp did not finish trying the model in {TIMEOUT_S} s") from error
    if ended.returncode == 0:
        return
    said = ended.stdout[:_OUTPUT_LENGTH_MAX].decode(errors="replace").strip()
    if ended.returncode == ModelUnusable.exit_code and said:
        raise ModelUnusable(as_sentence(said))
    raise ModelUnusable(f"llama.cpp does not survive this model: it ended with {_end_of(ended.returncode)}")


def _within(limit: int, allowed: int) -> int:
    """The limit, or what this user may have at most: a tighter bound is no fault of the model."""
    return limit if allowed == resource.RLIM_INFINITY else min(limit, allowed)


def _end_of(returncode: int) -> str:
    """A process's end in words."""
    return signal.Signals(-returncode).name if returncode < 0 else f"status {returncode}"


def main(path: Path) -> int:
    """In the child: load the model, decode two tokens, say what is wrong with it."""
    limits = {
        resource.RLIMIT_DATA: MEMORY_BYTES_MAX,
        resource.RLIMIT_AS: MEMORY_BYTES_MAX + path.stat().st_size,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        bound = _within(limit, resource.getrlimit(kind)[1])
        resource.setrlimit(kind, (bound, bound))

    from kvasir_node.backbone.trunk import Trunk, TrunkSettings
    from kvasir_node.engine.llama_log import capture_llama_log, tell_abort
    from kvasir_node.telemetry import configure_telemetry

    configure_telemetry("error", "console", {})  # standard output is for the one sentence
    capture_llama_log()
    tell_abort(_end_with)
    settings = TrunkSettings(n_ctx=N_CTX, n_ubatch=N_CTX, n_threads=1)
    try:
        if is_decoded(path):
            _decode_tokens(path, settings)
        else:
            Trunk(path, settings, None, header_only=True)
    except ModelUnusable as error:
        _end_with(str(error))
    return 0


def is_decoded(path: Path) -> bool:
    """Whether the file's trunk is small enough to be loaded, here and now."""
    status = path.stat()
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    stored_bytes_max = min(DECODED_BYTES_MAX, memory_bytes // 4)
    return status.st_blocks * 512 <= stored_bytes_max and status.st_size <= DECODED_FILE_BYTES_MAX


def _decode_tokens(path: Path, settings: TrunkSettings) -> None:
    """Decode token 0 twice with experts whose rows are zeros. Raises `ModelUnusable`.

    Twice, because at position 0 no base of the rotation does any harm. The largest logit has to be finite, as
    `sampling` asks for: what zeros cannot make finite, no experts can.
    """
    import numpy as np

    from kvasir_node.backbone.hook import ExpertHook, fill_with_zeros
    from kvasir_node.backbone.trunk import Trunk

    hook = ExpertHook(fill_with_zeros)
    trunk = Trunk(path, settings, hook)
    try:
        for position in range(2):
            trunk.decode([0])
            if not np.isfinite(trunk.logits().max()):
                raise ModelUnusable(f"the model gives no finite logits at position {position}")
    except EngineFailed as error:
        raise ModelUnusable(f"llama.cpp could not decode a token: {error}") from error


def _end_with(sentence: str) -> NoReturn:
    """Say why the model is unusable and end at once, from whatever thread."""
    os.write(1, sentence.encode())
    os._exit(ModelUnusable.exit_code)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
