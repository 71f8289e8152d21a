"""The kernel port: what a backend that computes routed experts must do, and its guarantees.

Apart from the kernels because workers, the backbone and the measurements see only this. It refuses to know
which backend it is and where rows come from.
"""

from __future__ import annotations

from typing import Protocol

from kvasir_proto.program import ExpertProgram


class ExpertKernel(Protocol):
    """Routed experts of one model, ready to compute.

    Guarantees: a call is checked completely before anything is computed, so a refused call has written
    nothing; refusals are `RemoteProtocolError` with one of the codes below, since what is wrong came from a
    request; no request, however strange, ends the process. A row's result depends on its own input and
    expert only, not on the other pairs of the call, except as the backend's `batch_invariant` says.

    Codes: `unknown_layer`, `unknown_program`, `program_unfit`, `foreign_expert`, `row_out_of_range`,
    `shape_invalid`; `kernel_failed` is `EngineFailed` instead, since it is our own trouble.
    """

    @property
    def backend(self) -> str:
        """Which backend this is, as capability records name it: "ggml-cpu", "reference"."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights held."""

    def add_program(self, program: ExpertProgram) -> int:
        """Make a program known and return its number in this kernel; the same number for the same program.

        Raises `RemoteProtocolError` (`program_unfit`) when it fits no layer that is held.
        """

    def row_widths(self, layer: int, program_index: int) -> tuple[int, int]:
        """Floats of an input row and of an output row. Raises `RemoteProtocolError` as `compute` does."""

    def compute(
        self,
        layer: int,
        program_index: int,
        n_rows: int,
        n_pairs: int,
        x_address: int,
        row_of_pair_address: int,
        expert_of_pair_address: int,
        out_address: int,
    ) -> None:
        """Run a program on `n_pairs` pairs: pair p takes row `row_of_pair[p]` through expert
        `expert_of_pair[p]`, a number in the model, and writes row p of the output.

        Addresses are of host memory: x F32 [n_rows, width in], the two tables I32 [n_pairs], out F32
        [n_pairs, width out], contiguous, of exactly those sizes. 1 <= n_rows <= n_pairs. Releases the GIL.
        One call at a time; others wait.
        """

    def close(self) -> None:
        """Free the weights. Idempotent; no call may be running."""
