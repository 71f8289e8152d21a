"""Types of command-line values that click's own let pass: a number that is none, a name that is empty."""

from __future__ import annotations

import math
import os
from typing import Any

import click


class NumberRange(click.FloatRange):
    """A number within bounds; `nan` is never below or above one, so click's own range takes it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or a usage error."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


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
