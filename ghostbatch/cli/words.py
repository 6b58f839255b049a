"""Splits the words of a command into names and flags, and refuses what is neither."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro

from ghostbatch.cli.values import read_value, wanted_value
from ghostbatch.errors import InputError

OTHER_NAMES = {
    "batch-size": "batch",
    "learning-rate": "regime.lr",
    "wd": "regime.weight-decay",
    "gpu": "device",
    "output": "out",
}
"""What other programs call some of our flags."""

HELP = ("-h", "--help")


@dataclass(frozen=True)
class Words:
    """The words of a command, sorted."""

    names: list[str] = field(default_factory=list)
    """Words that are neither a flag nor a flag's value."""
    values: dict[str, str] = field(default_factory=dict)
    """The value of each flag, by its name without hyphens; the last one counts."""
    switches: dict[str, str] = field(default_factory=dict)
    """For each flag without a value, the flag itself: --augment or --no-augment."""
    help: bool = False
    """Whether help is wanted."""

    @property
    def flags(self) -> list[str]:
        """The flags as `parse` takes them."""
        return [
            *(["--help"] if self.help else []),
            *(f"--{name}={value}" for name, value in self.values.items()),
            *self.switches.values(),
        ]


def sort_words(kind: type, argv: Sequence[str], command: str) -> Words:
    """Return the words of a command whose flags are the fields of ``kind``.

    Flags may stand before or after names. If help is wanted, nothing is refused.
    """
    if set(HELP) & set(argv):
        return _sort(kind, argv, command, Words(help=True))
    words = _sort(kind, argv, command, Words())
    hints = field_types(kind)
    for name, value in words.values.items():
        read_value(name, hints[name], value)
    return words


def field_types(kind: type, prefix: str = "") -> dict[str, Any]:
    """Return the type of each flag of a dataclass, by its name: "batch", "regime.lr".

    If a field is one of several dataclasses, such as the optimizer, it has the flags of all.
    """
    types: dict[str, Any] = {}
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        hint, *marks = _without_marks(hints[each.name])
        names = [mark.name for mark in marks if getattr(mark, "name", None) is not None]
        name = prefix + (names[0] if names else each.name.replace("_", "-"))
        if nested := [one for one in (hint, *get_args(hint)) if is_dataclass(one)]:
            for one in nested:
                types |= field_types(one, f"{name}." if name else "")  # type: ignore[arg-type]
        elif tyro.conf.Positional not in marks:
            types[name] = hint
    return types


def _without_marks(hint: Any) -> tuple[Any, ...]:
    """Return a type and the marks with which it is annotated."""
    return get_args(hint) if get_origin(hint) is Annotated else (hint,)


def _sort(kind: type, argv: Sequence[str], command: str, words: Words) -> Words:
    types = field_types(kind)
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word in HELP:
            continue
        if not word.startswith("-"):
            words.names.append(word)
            continue
        flag, equals, value = word.partition("=")
        name = flag.lstrip("-").replace("_", "-")
        positive = re.sub(r"^((?:.*\.)?)no-", r"\1", name)
        is_long = flag.startswith("--")
        if is_long and types.get(positive) is bool:
            if equals or (rest and rest[0].lower() in ("true", "false", "yes", "no")):
                choices = f"write --{positive} or {_opposite(positive)}"
                raise InputError(name, "this flag takes no value", choices)
            words.switches[positive] = flag.replace("_", "-")
        elif is_long and name in types:
            if not equals and (not rest or _is_flag(rest[0])):
                if words.help:
                    continue
                raise InputError(name, "its value is missing", f"give {wanted_value(types[name])}")
            words.values[name] = value if equals else rest.pop(0)
        elif not words.help:
            hint = _hint(name, types, command)
            raise InputError(name or "flags", f"there is no flag {flag}", hint)
    return words


def _is_flag(word: str) -> bool:
    """Return whether a word is a flag; a negative number is a value."""
    return bool(re.match(r"-(?!\d|\.\d|inf|nan)", word))


def _opposite(name: str) -> str:
    """Return the flag that turns a switch off: --no-augment, --optimizer.no-nesterov."""
    group, dot, last = name.rpartition(".")
    return f"--{group}{dot}no-{last}"


def _hint(name: str, types: dict[str, Any], command: str) -> str:
    """Return the flag that was probably meant, else where to find all."""
    group, _, last = name.rpartition(".")
    inside = [flag for flag in types if flag.startswith(f"{group or name}.")]
    known = {flag.rpartition(".")[2]: flag for flag in inside or types}
    known |= {other: flag for other, flag in OTHER_NAMES.items() if flag in (inside or types)}
    if not inside:
        known |= {flag: flag for flag in (*types, "help")}
    close = [last] if last in known else get_close_matches(last, known, n=1)
    if close:
        return f"did you mean --{known[close[0]]}?"
    if last in types:
        return f"did you mean --{last}?"
    if inside:
        return f"use {' or '.join(f'--{flag}' for flag in inside)}"
    return f"see ghostbatch {command} --help"
