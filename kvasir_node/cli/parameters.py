"""Types of command-line values that click's own let pass: a number that is none, a name that is empty."""

from __future__ import annotations

import math
import os
import re
from typing import Any, Final

import click

from kvasir_proto.errors import UsageError
from kvasir_proto.instants import Duration, seconds
from kvasir_proto.limits import RANKS, Rank

_SECONDS_IN: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class NumberRange(click.FloatRange):
    """A number within bounds; `nan` is never below or above one, so click's own range takes it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or a usage error."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


class DurationText(click.ParamType[Duration]):
    """How long, as a whole number and a unit: `90s`, `30m`, `1h`, `7d`; a `Duration`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Duration:
        """The duration, or a usage error."""
        match = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", str(value), re.ASCII)
        if match is None:
            self.fail(f"{value} is not a time such as 90s, 30m, 1h or 7d.", param, ctx)
        return seconds(int(match[1]) * _SECONDS_IN[match[2]])


class RankList(click.ParamType[tuple[Rank, ...]]):
    """Ranks separated by commas, each once."""

    name = "ranks"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Rank, ...]:
        """The ranks in the order of `RANKS`, or a usage error."""
        parts = [part.strip() for part in str(value).split(",")]
        if not set(parts) <= set(RANKS) or len(set(parts)) != len(parts):
            self.fail(f"{value} is not a list of {', '.join(RANKS)}, each at most once.", param, ctx)
        return tuple(rank for rank in RANKS if rank in parts)


class NonEmptyPath(click.Path):
    """A path that is not empty: to Python the empty one is the current directory, which nobody named."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        """The path, or a usage error."""
        if value == "":
            self.fail("a path cannot be empty.", param, ctx)
        return super().convert(value, param, ctx)


class NonEmptyText(click.types.StringParamType):
    """A text that is not empty."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text, or a usage error."""
        text = str(super().convert(value, param, ctx))
        if not text.strip():
            self.fail("it cannot be empty.", param, ctx)
        return text


def those_named(text: str, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    """Those of the known values that a comma-separated list names, in their own order.

    Raises `UsageError` for any other, and for an empty list.
    """
    parts = {part.strip() for part in text.split(",")}
    unknown = sorted(parts - set(known))
    if unknown:
        raise UsageError(f"{option} takes {', '.join(known)}, and not {unknown[0]!r}")
    return tuple(each for each in known if each in parts)
