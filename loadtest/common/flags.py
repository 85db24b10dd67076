"""Numbers and lists on the command lines of benchmarks, each with its bounds or its allowed values.

Each function returns an argparse type. If the text is invalid, argparse names the flag and the expected value, and
exits with 2.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least`, at most `most`."""
    wanted = f"from {least} to {most}" if most is not None else f"over {least - 1}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise ArgumentTypeError(f"{text!r} is not an integer {wanted}")
        return value

    return parse


def number(most: float = float("inf")) -> Callable[[str], float]:
    """Return a parser of finite numbers from 0, at most `most`."""
    wanted = "from 0" if most == float("inf") else f"from 0 to {most:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= most or value == float("inf"):
            raise ArgumentTypeError(f"{text!r} is not a number {wanted}")
        return value

    return parse


def positive(most: float = float("inf")) -> Callable[[str], float]:
    """Return a parser of finite numbers over 0, at most `most`."""
    any_number = number(most)

    def parse(text: str) -> float:
        if not (value := any_number(text)):
            raise ArgumentTypeError(f"{text!r} is not above 0")
        return value

    return parse


def make_list_parser(one: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Return a parser of comma-separated lists, each item parsed by `one`."""

    def parse(text: str) -> tuple[T, ...]:
        return tuple(map(one, text.split(",")))

    return parse


def make_choices_parser(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of comma-separated lists of known names."""

    def name(text: str) -> str:
        if text not in known:
            raise ArgumentTypeError(f"{text}: not among {', '.join(known)}")
        return text

    return make_list_parser(name)
