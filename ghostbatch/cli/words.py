"""Sorts the words of a command into names and the values of flags, and refuses what is neither."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

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
    values: dict[str, Any] = field(default_factory=dict)
    """The value of each flag, by its name without hyphens; the last one counts."""
    help: bool = False
    """Whether help is wanted; then values are the words as they were given."""


class Option(NamedTuple):
    """A field of a dataclass of options."""

    field: Field[Any]
    name: str
    """Its flag without hyphens, or for a nested dataclass what its flags begin with."""
    hint: Any
    nested: list[Any]
    """The dataclasses of which its value may be one; their fields are flags, too."""
    positional: bool


def options_of(kind: type, prefix: str = "") -> Iterator[Option]:
    """Yield the fields of a dataclass, whose flags begin with ``prefix``."""
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        hint = hints[each.name]
        hint, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        own = (mark.name for mark in marks if getattr(mark, "name", None) is not None)
        name = prefix + next(own, each.name.replace("_", "-"))
        nested = [one for one in (hint, *get_args(hint)) if is_dataclass(one)]
        if nested and name:
            name += "."
        yield Option(each, name, hint, nested, tyro.conf.Positional in marks)


def field_types(kind: type, prefix: str = "") -> dict[str, Any]:
    """Return the type of each flag of a dataclass, by its name: "batch", "regime.lr".

    If a field is one of several dataclasses, such as the optimizer, it has the flags of all.
    """
    types: dict[str, Any] = {}
    for option in options_of(kind, prefix):
        for one in option.nested:
            types |= field_types(one, option.name)
        if not (option.nested or option.positional):
            types[option.name] = option.hint
    return types


def sort_words(kind: type, argv: Sequence[str], command: str) -> Words:
    """Return the words of a command whose flags are the fields of ``kind``.

    Flags may stand before or after names. If help is wanted, nothing is refused.
    """
    types = field_types(kind)
    words = Words(help=bool(set(HELP) & set(argv)))
    rest = [word for word in argv if word not in HELP]
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            words.names.append(word)
            continue
        flag, equals, value = word.partition("=")
        name = flag.lstrip("-").replace("_", "-")
        switch = re.sub(r"^((?:.*\.)?)no-", r"\1", name)
        is_long = flag.startswith("--")
        if is_long and types.get(switch) is bool:
            given = equals or (rest and rest[0].lower() in ("true", "false", "yes", "no"))
            if given and not words.help:
                choices = f"write --{switch} or {_opposite(switch)}"
                raise InputError(name, "this flag takes no value", choices)
            words.values[switch] = name == switch
        elif is_long and name in types:
            if not equals and (not rest or _is_flag(rest[0])):
                if words.help:
                    continue
                raise InputError(name, "its value is missing", f"give {wanted_value(types[name])}")
            value = value if equals else rest.pop(0)
            words.values[name] = value if words.help else read_value(name, types[name], value)
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
