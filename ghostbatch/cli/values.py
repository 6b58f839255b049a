"""Reads the value of a flag by the type of its field; an error says what was wanted."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from ghostbatch.errors import InputError, check_choice
from ghostbatch.optim import Drop


@dataclass(frozen=True)
class Kind:
    """A kind of value: how help texts and errors call it, and how to read it from a word."""

    metavar: str
    name: str
    read: Callable[[str], Any]
    """Raises ValueError if the word is no such value."""
    example: str = ""
    """Follows the name where an error says what to give."""


def read_value(field: str, hint: Any, word: str) -> Any:
    """Return the value of a word for a field of type ``hint``; raise `InputError` if it has none.

    >>> read_value("ghost", int | None, "none"), read_value("epochs", int | Fraction, "50/3")
    (None, Fraction(50, 3))
    """
    kinds = _kinds(hint)
    for kind in sorted(kinds, key=lambda kind: kind is not NONE):  # "none" is also text
        try:
            return kind.read(word)
        except InputError as error:  # which names a part of the word
            raise InputError(field, error.problem, error.remedy) from None
        except (ValueError, ZeroDivisionError):
            continue
    if choices := get_args(hint) if get_origin(hint) is Literal else ():
        check_choice(field, word, choices)
    what = next(kind for kind in kinds if kind is not NONE).name
    plain = _plain_number(word, whole=what == KINDS[int].name)
    remedy = f"write {plain}" if plain else f"give {wanted_value(hint)}"
    raise InputError(field, f"{word!r} is not {what}", remedy)


def wanted_value(hint: Any) -> str:
    """Return what a field of type ``hint`` takes, in words."""
    *others, last = dict.fromkeys(kind.name + kind.example for kind in _kinds(hint))
    return f"{', '.join(others)} or {last}" if others else last


def _rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Tell tyro how to show the types that this module knows."""
    if info.type is bool or not (kinds := _kinds(info.type)):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="|".join(dict.fromkeys(kind.metavar for kind in kinds)),
        instance_from_str=lambda words: words[0],  # tyro only prints the help
        is_instance=lambda _: True,
        str_from_instance=lambda value: [_show(value)],
    )


REGISTRY = ConstructorRegistry()
REGISTRY.primitive_rule(_rule)


def _kinds(hint: Any) -> list[Kind]:
    """Return the kinds of value that a type allows; none if one of them is unknown here."""
    kinds = []
    alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for each in alternatives:
        if each is int and float in alternatives:
            kinds.append(NUMBER)
        elif each is float and int in alternatives:
            continue
        elif get_origin(each) is Literal:
            kinds.append(_choice(get_args(each)))
        elif get_args(each) == (Drop, ...):
            kinds.append(DROPS)
        elif each in KINDS:
            kinds.append(KINDS[each])
        else:
            return []
    return kinds


def _choice(choices: tuple[str, ...]) -> Kind:
    def read(word: str) -> str:
        if word not in choices:
            raise ValueError(word)
        return word

    metavar = choices[0] if len(choices) == 1 else f"{{{','.join(choices)}}}"
    return Kind(metavar, ", ".join(choices), read)


def _read_none(word: str) -> None:
    if word.lower() != "none":
        raise ValueError(word)


def _read_path(word: str) -> Path:
    if not word:  # Python takes it for the current folder
        raise ValueError(word)
    return Path(word)


def _read_drops(text: str) -> tuple[Drop, ...]:
    """Read drops such as 81:0.01,122:0.001; a third part is a new weight decay.

    Without any drop the text is "none", or a comma alone.
    """
    drops = []
    for word in filter(None, text.split(",") if text.lower() != "none" else ()):
        try:
            epoch, *rates = word.split(":")
            drops.append((_read_number(epoch), *map(float, rates)))
            if len(drops[-1]) not in (2, 3):
                raise ValueError(word)
        except (ValueError, ZeroDivisionError):
            raise InputError(
                "drops",
                f"{word!r} is not a drop",
                "write EPOCH:LR or EPOCH:LR:WEIGHT_DECAY, for example 81:0.01,122:0.001",
            ) from None
    return tuple(drops)  # type: ignore[arg-type]  # their lengths were checked


def _read_number(text: str) -> int | float | Fraction:
    if "/" in text:
        return Fraction(text)
    return int(text) if text.isdecimal() else float(text)


def _plain_number(word: str, whole: bool) -> str | None:
    """Return a number that is written in another way as we would read it: 1e3 is 1000."""
    try:
        number = float(word.replace(",", "") if whole else word.replace(",", "."))
    except ValueError:
        return None
    if not whole:
        return f"{number:g}"
    return str(int(number)) if number.is_integer() else None


def _show(value: Any) -> str:
    """Return a default as one would write it."""
    if isinstance(value, tuple):
        return ",".join(":".join(map(str, drop)) for drop in value) or "None"
    return str(value)


NONE = Kind("None", "None", _read_none)
NUMBER = Kind("NUMBER", "a number", _read_number, " such as 0.5")
DROPS = Kind("EPOCH:LR[:WD],...", "a list of drops", _read_drops, " such as 81:0.01,122:0.001")
KINDS: dict[Any, Kind] = {
    NoneType: NONE,
    int: Kind("INT", "a whole number", int, " such as 32"),
    float: Kind("FLOAT", "a number", float, " such as 0.1"),
    Fraction: Kind("FRACTION", "a fraction", Fraction, " such as 50/3"),
    str: Kind("TEXT", "a value", str),
    Path: Kind("PATH", "a path", _read_path, " such as runs/one"),
}
