"""What `CertifyKernel` asks a worker engine for: its kernel's arithmetic, in the swarm model's shapes.

Apart from the engine because most of its lives it is not asked, and what measures takes a while to import.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvasir_node.certification.certify import certification_steps, certify_kernel
from kvasir_node.certification.probe import is_probed
from kvasir_node.certification.synthetic_model import expert_shape_of, expert_types_of
from kvasir_node.kernels.choice import make_kernel
from kvasir_node.kernels.liars import face_of
from kvasir_node.model.manifest_file import read_manifest
from kvasir_proto.capability import BATCH_CLASSES
from kvasir_proto.limits import as_sentence
from kvasir_proto.messages.engine import CertificationAdvanced, CertifyKernel, KernelCertified


@dataclass(frozen=True, slots=True)
class _Steps:
    """Tells control of each step."""

    request: int
    n_all: int
    count: itertools.count[int]
    send: Callable[[CertificationAdvanced], None]

    def __call__(self, found: str) -> None:
        self.send(CertificationAdvanced(self.request, next(self.count), self.n_all, as_sentence(found)))


def certify(message: CertifyKernel, send: Callable[[CertificationAdvanced], None]) -> KernelCertified:
    """Measure, and say how far it is on the way. Raises as the kernel does, and `OSError`."""
    manifest = read_manifest(Path(message.manifest_path))
    shape, types = expert_shape_of(manifest), expert_types_of(manifest)
    n_probed = sum(is_probed(each, shape) for each in types)
    n_all = certification_steps(n_probed, len(BATCH_CLASSES))
    certification = certify_kernel(
        lambda manifest, shard, read: make_kernel(
            face_of(message.kernel), manifest, shard, read, message.threads, message.kernel_device
        ),
        shape,
        types,
        seed=message.seed,
        say=_Steps(message.request, n_all, itertools.count(1), send),
    )
    measured = certification.measured(
        backend=face_of(message.kernel),
        device=message.device,
        kernel_build=message.kernel_build,
        model_digest=manifest.digest(),
        seed=message.seed,
    )
    return KernelCertified(message.request, measured, as_sentence(certification.fit.reason))
