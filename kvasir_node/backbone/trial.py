"""Whether llama.cpp takes a backbone file, found out in a process of its own before a swarm depends on it.

Our reader knows no architecture: which hyper-parameters a model needs, and whether they fit its tensors, only
llama.cpp can say. So it reads the file's header and builds one graph, without the bytes of a single tensor,
in a child process with a bound on time and memory: an abort in there is an answer like any other. The module
decides no more than what sentence comes of it.
"""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from kvasir_proto.errors import ModelUnusable
from kvasir_proto.limits import as_sentence

TIMEOUT_S: Final = 120
"""A header with the largest vocabularies takes a few seconds."""

MEMORY_BYTES_MAX: Final = 8 << 30
"""Address space of the child; a header has at most 128 MiB, and no tensor is allocated."""

N_CTX: Final = 512

_ASSERTION: Final = re.compile(r"GGML_ASSERT\(.{1,200}\) failed|GGML_ABORT.{0,200}", re.ASCII)
_OUTPUT_LENGTH_MAX: Final = 65536


def try_backbone_file(path: Path) -> None:
    """Let llama.cpp judge the backbone file at `path`; about half a second.

    Raises `ModelUnusable`, with llama.cpp's own reason, when it refuses the file or does not survive it.
    """
    command = [sys.executable, "-P", "-m", "kvasir_node.backbone.trial", str(path)]
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelUnusable(f"llama.cpp did not finish reading the header in {TIMEOUT_S} s") from error
    if ended.returncode == 0:
        return
    said = ended.stdout[:_OUTPUT_LENGTH_MAX].decode(errors="replace").strip()
    if ended.returncode == ModelUnusable.exit_code and said:
        raise ModelUnusable(as_sentence(said))
    assertion = _ASSERTION.search(ended.stderr[:_OUTPUT_LENGTH_MAX].decode(errors="replace"))
    what = assertion[0] if assertion else f"it ended with {_end_of(ended.returncode)}"
    raise ModelUnusable(f"llama.cpp does not survive this model: {what}")


def _within(limit: int, allowed: int) -> int:
    """The limit, or what this user may have at most: a tighter bound is no fault of the model."""
    return limit if allowed == resource.RLIM_INFINITY else min(limit, allowed)


def _end_of(returncode: int) -> str:
    """A process's end in words."""
    return signal.Signals(-returncode).name if returncode < 0 else f"status {returncode}"


def main(path: Path) -> int:
    """In the child: read the header, make a context, say what is wrong with it."""
    for kind, limit in ((resource.RLIMIT_AS, MEMORY_BYTES_MAX), (resource.RLIMIT_CORE, 0)):
        bound = _within(limit, resource.getrlimit(kind)[1])
        resource.setrlimit(kind, (bound, bound))

    from kvasir_node.backbone.trunk import Trunk, TrunkSettings
    from kvasir_node.engine.llama_log import capture_llama_log
    from kvasir_node.telemetry import configure_telemetry

    configure_telemetry("error", "console", {})  # standard output is for the one sentence
    capture_llama_log()
    try:
        Trunk(path, TrunkSettings(n_ctx=N_CTX, n_ubatch=N_CTX, n_threads=1), None, header_only=True)
    except ModelUnusable as error:
        sys.stdout.write(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
