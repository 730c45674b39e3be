"""Words of a user in a batch script: as the shell reads them, and as sbatch reads `#SBATCH` lines.

The two have rules of their own. Whatever the text is, it arrives as one word and does nothing else.
"""

import re
import shlex

from unisono.errors import LaunchError

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]-]*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST_CHARACTERS = 1000
"""sbatch keeps an option in a buffer of a few thousand bytes."""


def for_shell(word: str) -> str:
    """A word of a command.

    >>> for_shell("it's $HOME")
    '\\'it\\'"\\'"\\'s $HOME\\''
    """
    if "\0" in word:
        raise LaunchError(
            f"Found a zero byte in {word!r}. No program can be given one: take it out."
        )
    return shlex.quote(word)


def for_option(name: str, value: str) -> str:
    """A line `#SBATCH --name=value`; LaunchError for a value that no line can hold.

    >>> for_option("comment", 'my "best" run')
    '#SBATCH --comment="my \\\\"best\\\\" run"'
    """
    if any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise LaunchError(
            f"Asked for --{name} {value!r}; a line of a batch script cannot hold line breaks and "
            "control characters. Take them out."
        )
    if not value or len(value.encode(errors="surrogateescape")) > _MOST_CHARACTERS:
        found = "nothing" if not value else f"more than {_MOST_CHARACTERS} bytes"
        raise LaunchError(f"Asked for --{name} with {found} for a value. Give it a short one.")
    if not _PLAIN.fullmatch(value):
        # In quotes a backslash still takes away a character's meaning.
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        value = f'"{escaped}"'
    return f"#SBATCH --{name}={value}"


def for_variable(assignment: str) -> tuple[str, str]:
    """Name and value of `NAME=VALUE`; LaunchError where it is none."""
    name, equals, value = assignment.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise LaunchError(
            f"Asked for --env {assignment!r}. Write NAME=VALUE, with a name of letters, digits and "
            "underscores."
        )
    return name, value
