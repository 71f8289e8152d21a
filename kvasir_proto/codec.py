"""Messages to bytes and back: one map of msgpack, checked field by field against its declaration.

The dataclass is the schema. Each message class is compiled once into a tree of small checkers, which both
directions use, so that what we send is always what we would accept. Arbitrary bytes give a message or a
`RemoteProtocolError`, nothing else. Encoding is canonical (`v`, `kind`, then the fields in the order they are
declared); decoding ignores fields it does not know, so that a later version may add some. The codec knows no
particular message, no stream and no signature.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NoReturn,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgpack

from kvasir_proto import PROTOCOL_VERSION
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.limits import Check, Length, Range
from kvasir_proto.messages import Family, Message, MessageT

_ENVELOPE: Final = ("v", "kind")
_UNKNOWN_FIELDS_MAX: Final = 32
"""Fields of a later version that one map may have beside those we know."""
_UNKNOWN_LIST_LENGTH_MAX: Final = 256
"""Items of a list in such a field, where none of our own lists may be longer."""


class _Unfit(ValueError):
    """A value that does not fit its declaration; which side's error it is, is decided further out."""

    def __init__(self, reason: str, code: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code

    def within(self, place: str) -> _Unfit:
        return _Unfit(f"{place}: {self.reason}", self.code)


class _Checker(Protocol):
    """Checks one value in both directions. Raises `_Unfit`."""

    def pack(self, value: Any) -> Any:
        """The value as msgpack packs it."""

    def unpack(self, value: Any) -> Any:
        """The value as the dataclass holds it, from what msgpack unpacked."""


def _wrong_type(value: object, wanted: str) -> NoReturn:
    raise _Unfit(f"is of type {type(value).__name__} and must be {wanted}", "wrong_type")


def _out_of_bounds(reason: str) -> NoReturn:
    raise _Unfit(reason, "out_of_bounds")


@dataclasses.dataclass(frozen=True, slots=True)
class _Number:
    """An integer or a finite float within its range."""

    type: type[int] | type[float]
    low: int | float
    high: int | float

    def pack(self, value: Any) -> Any:
        if type(value) is int:
            if self.type is int and self.low <= value <= self.high:
                return value  # nearly all numbers, at the price of one call
            if self.type is float:
                value = float(value) if abs(value) < 1 << 53 else _out_of_bounds("is too large")
        return self.unpack(value)

    def unpack(self, value: Any) -> Any:
        if type(value) is not self.type:
            _wrong_type(value, self.type.__name__)
        if not self.low <= value <= self.high:  # also refuses NaN
            _out_of_bounds(f"is {value:.17g} and must be from {self.low} to {self.high}")
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class _Truth:
    def pack(self, value: Any) -> Any:
        return value if type(value) is bool else _wrong_type(value, "bool")

    unpack = pack


@dataclasses.dataclass(frozen=True, slots=True)
class _Choice:
    """One of a few texts."""

    texts: tuple[str, ...]

    def pack(self, value: Any) -> Any:
        if type(value) is not str:
            _wrong_type(value, "str")
        if value not in self.texts:
            _out_of_bounds(f"must be one of {', '.join(self.texts)}")
        return value

    unpack = pack


@dataclasses.dataclass(frozen=True, slots=True)
class _Text:
    """A text or a byte string within its length and its further checks."""

    type: type[str] | type[bytes]
    low: int
    high: int
    checks: tuple[Check, ...]

    def pack(self, value: Any) -> Any:
        if type(value) is not self.type:
            _wrong_type(value, self.type.__name__)
        if not self.low <= len(value) <= self.high:
            _wrong_length(value, self.low, self.high)
        for check in self.checks:
            if not check.holds(value):
                _out_of_bounds(f"is not {check.what}")
        return value

    unpack = pack


@dataclasses.dataclass(frozen=True, slots=True)
class _Maybe:
    """None, or what the inner checker accepts."""

    inner: _Checker

    def pack(self, value: Any) -> Any:
        return None if value is None else self.inner.pack(value)

    def unpack(self, value: Any) -> Any:
        return None if value is None else self.inner.unpack(value)


@dataclasses.dataclass(frozen=True, slots=True)
class _Series:
    """A tuple of any number of equals: a list on the wire."""

    inner: _Checker
    low: int
    high: int

    def pack(self, value: Any) -> Any:
        if type(value) is not tuple:
            _wrong_type(value, "tuple")
        if not self.low <= len(value) <= self.high:
            _wrong_length(value, self.low, self.high)
        return [self.inner.pack(item) for item in value]

    def unpack(self, value: Any) -> Any:
        if type(value) is not list:
            _wrong_type(value, "a list")
        if not self.low <= len(value) <= self.high:
            _wrong_length(value, self.low, self.high)
        return tuple([self.inner.unpack(item) for item in value])


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """A tuple with a kind for each of its items: a list on the wire."""

    inners: tuple[_Checker, ...]

    def pack(self, value: Any) -> Any:
        if type(value) is not tuple:
            _wrong_type(value, "tuple")
        self._check_length(value)
        return [inner.pack(item) for inner, item in zip(self.inners, value, strict=True)]

    def unpack(self, value: Any) -> Any:
        if type(value) is not list:
            _wrong_type(value, "a list")
        self._check_length(value)
        return tuple([inner.unpack(item) for inner, item in zip(self.inners, value, strict=True)])

    def _check_length(self, value: Any) -> None:
        if len(value) != len(self.inners):
            _wrong_length(value, len(self.inners), len(self.inners))


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    """A frozen dataclass: a map on the wire, by the names of its fields."""

    type: type[Any]
    fields: tuple[tuple[str, _Checker], ...]

    def pack(self, value: Any) -> dict[str, Any]:
        if type(value) is not self.type:
            _wrong_type(value, self.type.__name__)
        packed = {}
        name = ""
        try:
            for name, checker in self.fields:
                packed[name] = checker.pack(getattr(value, name))
        except _Unfit as unfit:
            raise unfit.within(name) from None
        return packed

    def unpack(self, value: Any) -> Any:
        if type(value) is not dict:
            _wrong_type(value, "a map")
        arguments = []
        for name, checker in self.fields:
            if name not in value:
                raise _Unfit(f"{name} is missing", "missing_field")
            try:
                arguments.append(checker.unpack(value[name]))
            except _Unfit as unfit:
                raise unfit.within(name) from None
        return self.type(*arguments)


def _wrong_length(value: Any, low: int, high: int) -> NoReturn:
    _out_of_bounds(f"has length {len(value)} and must have from {low} to {high}")


# --- compiling declarations ---------------------------------------------------------------------------------


@cache
def _checker_of(message_type: Any) -> _Record:
    """The compiled declaration of one dataclass. Raises `TypeError` for a field that has no bound."""
    hints = get_type_hints(message_type, include_extras=True)
    fields = []
    for field in dataclasses.fields(message_type):
        try:
            fields.append((field.name, _compile(hints[field.name])))
        except TypeError as error:
            raise TypeError(f"{message_type.__name__}.{field.name}: {error}") from None
    return _Record(message_type, tuple(fields))


def _compile(annotation: Any) -> _Checker:
    constraints: tuple[Any, ...] = ()
    if get_origin(annotation) is Annotated:
        annotation, *rest = get_args(annotation)
        constraints = tuple(rest)
    while hasattr(annotation, "__supertype__"):  # a NewType
        annotation = annotation.__supertype__

    if annotation is bool:
        return _Truth()
    if annotation is int or annotation is float:
        bounds = _the_one(Range, constraints)
        return _Number(annotation, bounds.low, bounds.high)
    if annotation is str or annotation is bytes:
        checks = tuple(c for c in constraints if isinstance(c, Check))
        length = _the_one(Length, constraints)
        return _Text(annotation, length.low, length.high, checks)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _checker_of(annotation)

    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal and all(type(text) is str for text in arguments):
        return _Choice(arguments)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        length = _the_one(Length, constraints)
        return _Series(_compile(arguments[0]), length.low, length.high)
    if origin is tuple and arguments and Ellipsis not in arguments and not constraints:
        return _Row(tuple(_compile(each) for each in arguments))
    if origin in (Union, types.UnionType) and len(arguments) == 2 and arguments[1] is type(None):
        return _Maybe(_compile(arguments[0]))
    raise TypeError(f"a message cannot hold {annotation}")


_Constraint = TypeVar("_Constraint", Range, Length)


def _the_one(wanted: type[_Constraint], constraints: tuple[Any, ...]) -> _Constraint:
    found = [constraint for constraint in constraints if isinstance(constraint, wanted)]
    if len(found) != 1:
        raise TypeError(f"needs exactly one {wanted.__name__}")
    return found[0]


@dataclasses.dataclass(frozen=True, slots=True)
class _Schema:
    """A compiled family: its messages by kind, and how large an honest list or map can be."""

    by_kind: Mapping[str, _Record]
    list_length_max: int
    map_length_max: int


@cache
def _schema_of(family: Family[Any]) -> _Schema:
    members: dict[str, Any] = dict(family.by_kind)
    by_kind: dict[str, _Record] = {}
    lists, maps = [_UNKNOWN_LIST_LENGTH_MAX], [0]
    for kind, member in members.items():
        by_kind[kind] = _checker_of(member)
        _measure(by_kind[kind], lists, maps)
    return _Schema(by_kind, max(lists), max(maps) + len(_ENVELOPE) + _UNKNOWN_FIELDS_MAX)


def _measure(checker: _Checker, lists: list[int], maps: list[int]) -> None:
    if isinstance(checker, _Series):
        lists.append(checker.high)
        _measure(checker.inner, lists, maps)
    elif isinstance(checker, _Maybe):
        _measure(checker.inner, lists, maps)
    elif isinstance(checker, _Row):
        lists.append(len(checker.inners))
        for inner in checker.inners:
            _measure(inner, lists, maps)
    elif isinstance(checker, _Record):
        maps.append(len(checker.fields))
        for _, inner in checker.fields:
            _measure(inner, lists, maps)


# --- the two directions -------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """The message's canonical bytes. Raises `LocalProtocolError` if a field is outside its declaration."""
    try:
        fields = _checker_of(type(message)).pack(message)
        packed = msgpack.packb({"v": PROTOCOL_VERSION, "kind": message.kind, **fields}, use_bin_type=True)
    except _Unfit as unfit:
        raise LocalProtocolError(f"{message.kind}: {unfit.reason}") from None
    except UnicodeEncodeError:
        raise LocalProtocolError(f"{message.kind}: a text is not Unicode") from None
    assert isinstance(packed, bytes)
    return packed


def decode(data: bytes, family: Family[MessageT]) -> MessageT:
    """The message that these bytes are, which must be one of the family's.

    Raises `RemoteProtocolError`, and nothing else, with one of these codes: `oversize`, `malformed` (not one
    map of msgpack, cut short, something after it, or one key twice), `unsupported_version`, `unknown_kind`,
    `missing_field`, `wrong_type`, `out_of_bounds`.
    """
    if len(data) > family.size_bytes_max:
        raise RemoteProtocolError(
            f"a {family.name} message of {len(data)} bytes is over the limit of {family.size_bytes_max}",
            "oversize",
        )
    schema = _schema_of(family)
    try:
        document = _unpack(data, schema)
    except _Unfit as unfit:
        raise RemoteProtocolError(f"{family.name} message: {unfit.reason}", unfit.code) from None

    if document.get("v") != PROTOCOL_VERSION or type(document["v"]) is not int:
        raise RemoteProtocolError(
            f"this build speaks version {PROTOCOL_VERSION} of the protocol and no other",
            "unsupported_version",
        )
    kind = document.get("kind")
    record = schema.by_kind.get(kind) if isinstance(kind, str) else None
    if record is None:
        raise RemoteProtocolError(f"not a message of the {family.name} family", "unknown_kind")
    try:
        message: MessageT = record.unpack(document)
    except _Unfit as unfit:
        raise RemoteProtocolError(f"{kind}: {unfit.reason}", unfit.code) from None
    return message


def _unpack(data: bytes, schema: _Schema) -> dict[Any, Any]:
    """One map, with no list or map in it that claims to be longer than an honest one."""
    try:
        document = msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=True,
            object_pairs_hook=_map_without_duplicates,
            ext_hook=_no_extension,
            max_array_len=schema.list_length_max,
            max_map_len=schema.map_length_max,
        )
    except _Unfit:
        raise
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException):
        # msgpack's own words are not passed on: they vary, and some quote what was received.
        raise _Unfit("not one map of msgpack within our limits", "malformed") from None
    if type(document) is not dict:
        raise _Unfit("not a map", "malformed")
    return document


def _map_without_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise _Unfit("one key twice in a map", "malformed")
    return document


def _no_extension(code: int, data: bytes) -> NoReturn:
    raise _Unfit("an extension type", "malformed")
