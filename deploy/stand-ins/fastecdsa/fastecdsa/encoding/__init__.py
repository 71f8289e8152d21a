"""Stand-in for `fastecdsa.encoding`: see the package."""

from fastecdsa._unusable import unusable
from fastecdsa.encoding import der, pem, sec1, util

__all__ = ["der", "pem", "sec1", "util"]
__getattr__ = unusable(__name__)
