"""A nursery that lets one error out as itself instead of in a group.

trio wraps what leaves a nursery in an exception group, since several tasks may fail at once. Where a nursery
is an implementation detail its caller wants the error: the engine failed, the model is unusable. Groups of
errors that are neither ours nor the system's pass unchanged: those are bugs and should be seen whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import trio

from kvasir_proto.errors import KvasirError, ProtocolError


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


@contextlib.asynccontextmanager
async def open_unwrapping_nursery() -> AsyncIterator[trio.Nursery]:
    """Like `trio.open_nursery`; when all that failed are errors of ours or the system's, raises the first."""
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        errors = list(_leaves(group))
        if all(isinstance(error, KvasirError | ProtocolError | OSError) for error in errors):
            raise errors[0] from None
        if len(errors) == 1:
            raise errors[0] from None
        raise
