"""One target under Atheris in this process: `python -m tests.fuzz.one_target NAME LIBRARY [OPTIONS]`.

The code under test is instrumented as it is imported, so this module imports nothing of it at its top. More
memory than the target's own start took is a finding, and so is an input that takes seconds: libFuzzer ends
the process with a status of its own and leaves the input in a file.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Final

import atheris

from tests.fuzz.mutation import mutate_document

MEMORY_BYTES_MAX: Final = 1 << 30
"""Address space that a run may take beyond what the process has when it begins."""

INSTRUMENTED: Final = [
    *(
        "kvasir_proto",
        "kvasir_node.model",
        "kvasir_node.worker",
        "kvasir_node.backbone",
        "kvasir_node.engine",
        "kvasir_node.gateway",
        "h11",
    ),
    # Its branches tell of native code, which is not instrumented, what the targets can see of it.
    "tests.fuzz.targets",
]


def main(arguments: list[str]) -> None:
    """Fuzz the target named first, with the native library named second if that is not empty.

    The rest is libFuzzer's. Does not return.
    """
    name, sanitised, *options = arguments
    with atheris.instrument_imports(include=INSTRUMENTED):
        from kvasir_node.telemetry import configure_telemetry
        from tests.fuzz.targets import TARGETS
    if sanitised:
        from kvasir_node import native_library

        native_library._library_path = lambda: sanitised
    configure_telemetry("error", "console", {})  # a worker logs each refusal, and here nearly all are
    target = TARGETS[name]
    for seed in target.seeds():
        target.run(seed)
    if not sanitised:  # a sanitizer reserves terabytes of addresses; there libFuzzer's own bound has to do
        size_bytes = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (size_bytes + MEMORY_BYTES_MAX,) * 2)

    def mutate(data: bytes, size_bytes_max: int, seed: int) -> bytes:
        begin = target.document_offset
        document = mutate_document(data[begin:], seed) if begin >= 0 and seed % 4 else None
        if document is None:
            return bytes(atheris.Mutate(data, size_bytes_max))
        return (data[:begin] + document)[:size_bytes_max]

    atheris.Setup([name, *options], target.run, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
