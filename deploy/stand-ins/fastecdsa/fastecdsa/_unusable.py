"""What a stand-in hands out: objects that have a name and refuse every use of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


class StandInUsed(RuntimeError):
    """Something tried to compute with the stand-in; install the real fastecdsa to do that."""


class Unusable:
    """A named object that can be imported, annotated with and stored, and refuses everything else."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<stand-in for {self._name}>"

    def _refuse(self, *_args: object, **_keywords: object) -> NoReturn:
        raise StandInUsed(
            f"{self._name} was used, but only Kvasir's stand-in for fastecdsa is installed: keys on the "
            "curve P-256 are not supported"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # so that copy, inspect and typing find nothing rather than a trap
        self._refuse()

    __call__ = __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __pow__ = __rpow__ = __neg__ = __int__ = __index__ = __bytes__ = _refuse
    __hash__ = object.__hash__


def unusable(module: str) -> Callable[[str], Unusable]:
    """The `__getattr__` of a stand-in module: any name but a dunder exists and is unusable."""

    def getattr_of_module(name: str) -> Unusable:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Unusable(f"{module}.{name}")

    return getattr_of_module
