"""Reads the words of a command into typed options; an error is one line."""

import io
import os
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr
from dataclasses import MISSING, fields
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

import tyro

from ghostbatch.cli.values import REGISTRY, wanted_value
from ghostbatch.cli.words import Words, field_types, sort_words
from ghostbatch.errors import InputError

Options = TypeVar("Options")


def cores() -> int:
    """Return the number of cores that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def take_name(words: Words, what: str, choices: Iterable[str]) -> str | None:
    """Return the one name among the words of a command; None if there is none but help is wanted.

    Whether the name is one of ``choices`` is left to who looks it up.
    """
    if words.help:
        return words.names[0] if words.names else None
    if len(words.names) > 1:
        names = " and ".join(words.names)
        raise InputError(what, f"{len(words.names)} names were given, {names}", "give one")
    if not words.names:
        raise InputError(what, "no name was given", f"choose one of {', '.join(choices)}")
    return words.names[0]


def parse(
    kind: type[Options],
    argv: Sequence[str],
    command: str,
    default: Options | None = None,
    about: str | None = None,
) -> Options:
    """Read words into ``kind``, or print its help and exit; raise `InputError` for wrong words.

    Args:
        kind: a dataclass; its fields are the flags, and those marked as positional are names.
        argv: the words after the command.
        command: the command's name, and what belongs to it, for the help.
        default: the values of flags that are not given.
        about: what the help says above the flags; by default the docstring of ``kind``.

    """
    words = sort_words(kind, argv, command)
    if not words.help:
        _check_complete(kind, words, command, default)
    given = ["--help"] if words.help else [*words.names, *words.flags]
    extra: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with redirect_stderr(io.StringIO()):  # the parser's own account of an error
            return tyro.cli(  # type: ignore[no-any-return]
                kind,
                args=given,
                prog=f"ghostbatch {command}",
                description=about,
                registry=REGISTRY,
                config=(tyro.conf.AvoidSubcommands,),  # an optimizer's options are flags
                **extra,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise _cause(stop) or InputError(
            "flags", "they cannot be read", f"see ghostbatch {command} --help"
        ) from None


def print_help(
    kind: type[Options], command: str, about: str, default: Options | None = None
) -> NoReturn:
    """Print the help of a command, and exit."""
    parse(kind, ["--help"], command, default, about)
    raise AssertionError("the parser exits after its help")


def _check_complete(kind: type, words: Words, command: str, default: object | None) -> None:
    """Refuse too many names, and a missing name or flag that has no default."""
    hints = get_type_hints(kind, include_extras=True)
    types = field_types(kind)
    names = [f for f in fields(kind) if tyro.conf.Positional in get_args(hints[f.name])]
    if len(words.names) > len(names):
        problem = f"{words.names[len(names)]!r} is one name too many"
        raise InputError(names[-1].name if names else command, problem, "leave it out")
    given = {each.name for each in names[: len(words.names)]}
    for each in fields(kind):
        name = each.name.replace("_", "-")
        has_default = default is not None or not each.default is each.default_factory is MISSING
        if has_default or each.name in given or name in words.values:
            continue
        if each in names:
            remedy = f"write ghostbatch {command} {each.name.upper()}"
            raise InputError(each.name, "no name was given", remedy)
        raise InputError(name, "this flag is required", f"give {wanted_value(types[name])}")


def _cause(stop: BaseException) -> InputError | None:
    """Return the `InputError` for which the parser gave up, if there is one."""
    error: BaseException | None = stop
    while error is not None and not isinstance(error, InputError):
        error = error.__context__
    return error
