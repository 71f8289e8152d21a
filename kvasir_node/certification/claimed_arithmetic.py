"""What a node says of its sums and of how it takes rows, as a referee holds it to that.

Apart from the audit, because whoever recomputes a row for any other reason asks the same. It refuses to know
whether the claim is true.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir_node.kernels.activation_formats import ACTIVATION_ROUNDINGS


@dataclass(frozen=True, slots=True)
class Claim:
    """What a node says of its sums: whether they are in F32, and in which format it takes rows, by the name
    that classes have; empty as the reference class does. `certificate` is the digest of what makes it say so.
    """

    adds_in_f32: bool = True
    activation: str = ""
    certificate: bytes = b""

    @property
    def form(self) -> str | None:
        """The format by the kernels' names; None for the reference class's, or one that nobody knows."""
        return next((each for each in ACTIVATION_ROUNDINGS if each.upper() == self.activation.upper()), None)

    @property
    def can_be_held_to(self) -> bool:
        """Whether rows can be held to an F32 gate. Who claims what nobody can compute is judged by whether
        rows are right at all.
        """
        return self.adds_in_f32 and (not self.activation or self.form is not None)
