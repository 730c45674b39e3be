"""How a program hands over what it finds: one JSON record per line, at once."""

import json
import sys
from typing import Any


def record(stage: str, **found: Any) -> None:
    """Append a record to the file that is the program's first argument."""
    with open(sys.argv[1], "a", encoding="utf-8") as file:
        file.write(json.dumps({"stage": stage, **found}) + "\n")


def short(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
