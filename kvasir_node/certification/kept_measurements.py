"""What was measured of kernels, kept on disk: a node that starts again need not ask the same questions again.

A measurement is kept under a key of all that it depends on; whatever of that changes, another is looked for.
A file that is damaged, or of another key, counts as none. It refuses to know how old is too old.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from kvasir_node.durable_file import durable_file
from kvasir_node.small_file import read_small_file
from kvasir_node.telemetry import get_logger
from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.measured_kernel import KEPT_MEASUREMENT, MEASURED_SIZE_MAX, KeptMeasurement

log = get_logger()

KEPT_MAX: Final = 32
"""Measurements that are kept; the oldest goes."""

_DIGEST_BYTES: Final = 32
_SUFFIX: Final = ".measurement"


class KeptMeasurements:
    """The measurements in a directory, which is made when something is saved."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self, key: bytes) -> KeptMeasurement | None:
        """What was kept under this key, if it is whole."""
        path = self._path_of(key)
        try:
            data = read_small_file(path, _DIGEST_BYTES + MEASURED_SIZE_MAX)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("measurement_unreadable", path=str(path), reason=str(error))
            return None
        digest, payload = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        try:
            if digest != hashlib.sha256(key + payload).digest():
                raise RemoteProtocolError("it is damaged, or of another kernel", "bad_digest")
            return decode(payload, KEPT_MEASUREMENT)
        except RemoteProtocolError as error:
            log.warning("measurement_damaged", path=str(path), reason=error.reason)
            return None

    def save(self, key: bytes, kept: KeptMeasurement) -> None:
        """Keep it. A disk that takes nothing costs the next start its time, and this one nothing."""
        payload = encode(kept)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with durable_file(self._path_of(key)) as file:
                file.write(hashlib.sha256(key + payload).digest() + payload)
            files = sorted(self._directory.glob(f"*{_SUFFIX}"), key=_last_written)
            for oldest in files[:-KEPT_MAX]:
                oldest.unlink(missing_ok=True)
        except OSError as error:
            log.warning("measurement_not_kept", directory=str(self._directory), reason=str(error))

    def _path_of(self, key: bytes) -> Path:
        return self._directory / f"{key.hex()[:32]}{_SUFFIX}"


def _last_written(path: Path) -> float:
    """When, in seconds; 0 for a file that another node of this directory has removed meanwhile."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
