"""Reads command-line flags into typed options; an error is one line."""

import io
import os
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from fractions import Fraction
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, TypeVar, get_args

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from ghostbatch.errors import InputError
from ghostbatch.optim import Drop

Options = TypeVar("Options")

REGISTRY = ConstructorRegistry()


def _one_word(
    metavar: str, kind: type, read: Callable[[str], Any], show: Callable[[Any], str]
) -> PrimitiveConstructorSpec[Any]:
    """Return how to read a value from one word, and how to show a default."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [show(value)],
    )


@REGISTRY.primitive_rule
def _our_types(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Return how to read drops, paths, and epochs that are a fraction such as 50/3."""
    if get_args(info.type) == (Drop, ...):
        return _one_word("EPOCH:LR[:WD],...", tuple, _read_drops, _show_drops)
    if info.type is Fraction:
        return _one_word("FRACTION", Fraction, _read_fraction, str)
    if info.type is Path:
        return _one_word("PATH", Path, _read_path, str)
    return None


def _show_drops(drops: tuple[Drop, ...]) -> str:
    return ",".join(":".join(map(str, drop)) for drop in drops)


def _read_drops(text: str) -> tuple[Drop, ...]:
    """Read drops such as 81:0.01,122:0.001; a third part is a new weight decay."""
    drops = []
    for word in filter(None, text.split(",")):
        try:
            epoch, *rates = word.split(":")
            drops.append((_number(epoch), *map(float, rates)))
        except (ValueError, ZeroDivisionError):
            raise InputError(
                "regime.drops", f"{word!r} is not a drop", "write EPOCH:LR, for example 81:0.01"
            ) from None
    return tuple(drops)  # type: ignore[arg-type]  # Regime checks the lengths


def _read_fraction(text: str) -> Fraction:
    try:
        return Fraction(text)
    except ZeroDivisionError:
        raise ValueError(f"{text} divides by zero") from None


def _read_path(text: str) -> Path:
    if not text:  # Python takes it for the current folder
        raise ValueError("the path is empty")
    return Path(text)


def _number(text: str) -> int | float | Fraction:
    if "/" in text:
        return Fraction(text)
    return int(text) if text.isdecimal() else float(text)


def cores() -> int:
    """Return the number of cores that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def name_first(argv: Sequence[str], what: str, command: str) -> tuple[str, Sequence[str]]:
    """Return the name that follows a command, and the flags after it."""
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: ghostbatch {command} {what.upper()} [flags]; see {what.upper()} --help")
        raise SystemExit(0)
    if not argv or argv[0].startswith("-"):
        raise InputError(what, "no name was given", f"write ghostbatch {command} NAME")
    return argv[0], argv[1:]


def parse(
    kind: type[Options], argv: Sequence[str], command: str, default: Options | None = None
) -> Options:
    """Read flags into ``kind``; turn an error of the parser into an `InputError`."""
    prog = f"ghostbatch {command}"
    message = io.StringIO()
    extra = {} if default is None else {"default": default}
    try:
        with redirect_stderr(message):
            return tyro.cli(kind, args=argv, prog=prog, registry=REGISTRY, **extra)  # type: ignore[no-any-return, call-overload]
    except SystemExit as stop:
        if not stop.code:
            raise
        raise _parse_error(message.getvalue(), prog) from None


def _parse_error(box: str, prog: str) -> InputError:
    """Return the first paragraph of the parser's framed message as an `InputError`."""
    lines = (line.strip(" │") for line in box.splitlines()[1:])  # below the title
    inside = dropwhile(_is_rule, lines)
    text = " ".join(takewhile(lambda line: line and not _is_rule(line), inside))
    flag = re.search(r"--([\w.-]+)", text)
    text = re.sub(r"^Error parsing \S+: ", "", text)
    ours = re.fullmatch(r"([a-z_.]+): (.*); (.*)", text)
    if ours:
        return InputError(*ours.groups())
    return InputError(flag[1] if flag else "flags", text.rstrip("."), f"see {prog} --help")


def _is_rule(line: str) -> bool:
    """Return whether a line is part of the frame, which may be made of hyphens."""
    return bool(line) and set(line) <= set("─-╭╮╰╯")
