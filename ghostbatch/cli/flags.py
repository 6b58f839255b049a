"""Reads the words of a command into typed options; an error is one line."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, replace
from typing import Any, NoReturn, TypeVar, cast

import tyro

from ghostbatch.cli.values import REGISTRY, read_value, wanted_value
from ghostbatch.cli.words import Words, options_of, sort_words
from ghostbatch.errors import InputError

Options = TypeVar("Options")


def cores() -> int:
    """Return the number of cores that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def take_name(words: Words, what: str, choices: Iterable[str]) -> str | None:
    """Remove and return the one name among words; None if there is none but help is wanted.

    It need not be one of ``choices``: the caller looks it up.
    """
    if len(words.names) > 1 and not words.help:
        names = " and ".join(words.names)
        raise InputError(what, f"{len(words.names)} names were given, {names}", "give one")
    if not (words.names or words.help):
        raise InputError(what, "no name was given", f"choose one of {', '.join(choices)}")
    return words.names.pop(0) if words.names else None


def parse(kind: type[Options], argv: Sequence[str], command: str) -> Options:
    """Read words into ``kind``, or print its help and exit; raise `InputError` for wrong words."""
    return parse_words(kind, sort_words(kind, argv, command), command)


def parse_words(
    kind: type[Options],
    words: Words,
    command: str,
    default: Options | None = None,
    about: str | None = None,
) -> Options:
    """Return the options that sorted words give, or print the help and exit.

    Args:
        kind: a dataclass; its fields are the flags, and those marked as positional are names.
        words: the words after the command.
        command: the command's name, and what belongs to it, for the help.
        default: the values of flags that are not given.
        about: what the help says above the flags; by default the docstring of ``kind``.

    """
    if words.help:
        print_help(kind, command, about, default)
    places = [option.field.name for option in options_of(kind) if option.positional]
    if len(words.names) > len(places):
        problem = f"{words.names[len(places)]!r} is one name too many"
        raise InputError(places[-1] if places else command, problem, "leave it out")
    return cast(Options, _build(kind, words, command, default))


def _build(kind: type, words: Words, command: str, default: Any, prefix: str = "") -> Any:
    """Return a ``kind`` with the values of its flags; others are those of ``default``."""
    given: dict[str, Any] = {}
    names = iter(words.names)
    for option in options_of(kind, prefix):
        field, flag = option.field, option.name
        has_default = default is not None or not field.default is field.default_factory is MISSING
        if option.nested:
            nested = option.nested[0]() if default is None else getattr(default, field.name)
            given[field.name] = _build(type(nested), words, command, nested, flag)
        elif option.positional and (name := next(names, None)) is not None:
            given[field.name] = read_value(field.name, option.hint, name)
        elif flag in words.values:
            given[field.name] = words.values[flag]
        elif not has_default and option.positional:
            remedy = f"write ghostbatch {command} {field.name.upper()}"
            raise InputError(field.name, "no name was given", remedy)
        elif not has_default:
            raise InputError(flag, "this flag is required", f"give {wanted_value(option.hint)}")
    return kind(**given) if default is None else replace(default, **given)


def print_help(
    kind: type[Options], command: str, about: str | None, default: Options | None = None
) -> NoReturn:
    """Print the help of a command, and exit."""
    extra: dict[str, Any] = {} if default is None else {"default": default}
    tyro.cli(
        kind,
        args=["--help"],
        prog=f"ghostbatch {command}",
        description=about,
        registry=REGISTRY,
        config=(tyro.conf.AvoidSubcommands,),  # an optimizer's options are flags
        **extra,
    )
    raise AssertionError("the parser exits after its help")
