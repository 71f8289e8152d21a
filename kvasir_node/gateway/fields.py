"""Reading one JSON object of a request, field by field: what each must be, and that nothing else is there.

A parameter that is silently ignored gives an answer that nobody asked for, so every field that was not taken
is refused by its name. ``null`` is what OpenAI's clients send for a parameter that was left out. It knows no
endpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar

from kvasir_node.gateway.refusal import Refusal

ValueT = TypeVar("ValueT")
Parse = Callable[[object, str], ValueT]
"""Turns a value into what it means, or raises `Refusal`; its second argument names the field."""

_SHOWN_MAX: Final = 64
MARKS_MAX: Final = 150_000
"""Opening brackets and colons in a body, and `COMMAS_MAX` commas, those in texts included.

Whoever reads JSON holds up everything else in this process: a megabyte of text takes a millisecond, and 4 MiB
of brackets took 0.7 s and 108 MiB. The longest prompt of tokens has 262,143 commas.
"""
COMMAS_MAX: Final = 400_000


def refuse(name: str, expected: str, code: str | None = None) -> NoReturn:
    """Raise the refusal of a field that is not what it must be."""
    shown = name[:_SHOWN_MAX]
    raise Refusal(400, f"{shown} must be {expected}", parameter=shown, code=code)


def parsed_body(body: bytes) -> Fields:
    """The object that a request's body is. Raises `Refusal` for anything but one JSON object in UTF-8."""
    if sum(body.count(mark) for mark in (b"[", b"{", b":")) > MARKS_MAX or body.count(b",") > COMMAS_MAX:
        raise Refusal(413, "the body has too many brackets, colons or commas", code="body_too_large")

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number of JSON")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        document = dict(items)
        if len(document) != len(items):
            raise ValueError("an object names a field twice")
        return document

    try:
        document = json.loads(body.decode("utf-8"), parse_constant=constant, object_pairs_hook=pairs)
    except UnicodeDecodeError:
        raise Refusal(400, "the body is not text in UTF-8", code="invalid_json") from None
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(document, dict):
        raise Refusal(400, "the body must be a JSON object", code="invalid_json")
    return Fields(document)


class Fields:
    """One object, and which of its fields were taken. ``path`` is where it stands, such as `messages[2].`."""

    def __init__(self, document: dict[str, Any], path: str = "") -> None:
        self._left = {name: value for name, value in document.items() if value is not None}
        self._path = path

    def take(self, name: str, parse: Parse[ValueT], default: ValueT) -> ValueT:
        """The field's value, or ``default`` when it is not there."""
        if name not in self._left:
            return default
        return parse(self._left.pop(name), self._path + name)

    def require(self, name: str, parse: Parse[ValueT]) -> ValueT:
        """The value of a field that must be there."""
        if name not in self._left:
            shown = self._path + name
            raise Refusal(400, f"{shown} is missing", parameter=shown, code="missing_required_parameter")
        return parse(self._left.pop(name), self._path + name)

    def allow_only(self, name: str, *neutral: object) -> None:
        """Accept a parameter that is not supported where its value asks for nothing."""
        if name in self._left:
            value = self._left[name]
            if any(type(value) is type(each) and value == each for each in neutral):
                del self._left[name]

    def finish(self) -> None:
        """Raise `Refusal` if anything is left that nobody took."""
        for name in sorted(self._left):
            shown = (self._path + name)[:_SHOWN_MAX]
            raise Refusal(
                400, f"{shown} is not supported here", parameter=shown, code="unsupported_parameter"
            )


def text(length_min: int, length_max: int) -> Parse[str]:
    """A string of so many characters, each of which UTF-8 has."""

    def parse(value: object, name: str) -> str:
        if not isinstance(value, str) or not length_min <= len(value) <= length_max:
            refuse(name, f"a string of {length_min} to {length_max} characters")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            refuse(name, "text: half of a surrogate pair is none")
        return value

    return parse


def truth(value: object, name: str) -> bool:
    """A boolean."""
    if not isinstance(value, bool):
        refuse(name, "true or false")
    return value


def integer(low: int, high: int) -> Parse[int]:
    """A whole number. 3.0 is none: nobody who means a count writes it so."""

    def parse(value: object, name: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            refuse(name, f"a whole number from {low} to {high}")
        return value

    return parse


def number(low: float, high: float) -> Parse[float]:
    """A finite number."""

    def parse(value: object, name: str) -> float:
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not low <= value <= high
            or not math.isfinite(value)
        ):
            refuse(name, f"a number from {low:g} to {high:g}")
        return float(value)

    return parse


def nested(value: object, name: str) -> Fields:
    """An object inside the object."""
    if not isinstance(value, dict):
        refuse(name, "an object")
    return Fields(value, name + ".")
