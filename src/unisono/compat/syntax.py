"""Explains why a file is not Python 3, and where."""

import ast
import re
import warnings

from unisono.errors import DataError

_PYTHON_2 = (
    ("a print statement", r"print\b\s*(?![(=.])\S"),
    ("an exec statement", r"exec\b\s*(?![(=.])\S"),
    ("`except Error, name`", r"except\b[^:]*,\s*\w+\s*:"),
    ("`raise Error, text`", r"raise\s+[\w.]+\s*,"),
    ("the operator <>", r".*<>"),
    ("backticks", r".*`"),
    ("a number such as 0777 or 10L", r".*\b(0\d+|\d+[lL])\b"),
    ("a string such as ur''", r".*\bur['\"]"),
)


def check_syntax(code: bytes | str, place: str, first_line: int = 1) -> None:
    """Raise DataError if code does not parse; `first_line` is the number of its first line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Old programs have "\d" in plain strings.
            ast.parse(code)
    except SyntaxError as error:
        raise DataError(_explain(error, place, first_line)) from error
    except (RecursionError, MemoryError) as error:
        raise DataError(too_deep(place)) from error
    except ValueError as error:
        raise DataError(f"{place} is not Python: {error}.") from error


def too_deep(place: str) -> str:
    """The message for code that exceeds the parser's recursion limit."""
    return f"{place} is nested too deeply to be read."


def _explain(error: SyntaxError, place: str, first_line: int) -> str:
    if not error.lineno or (error.text is None and "decode" in str(error.msg)):
        return f"{place} is not Python: {error.msg}."
    number = error.lineno + first_line - 1
    text = (error.text or "").strip()
    for what, pattern in _PYTHON_2:
        if re.match(pattern, text):
            return (
                f"{place}, line {number} is Python 2: {what} ({text[:60]!r}). Make it Python 3 "
                "first, for instance with 2to3 of Python 3.12 or earlier."
            )
    return f"{place}, line {number} is not Python: {error.msg} ({text[:60]!r})."
