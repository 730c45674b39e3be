"""The names of the installed Keras, read from its files: importing it would take a backend."""

import ast
import functools
import importlib.util
from pathlib import Path

from unisono.compat.lookup import canonical


def is_in_keras(dotted: str) -> bool:
    """Whether Keras has a name, in the home that it is asked for in.

    >>> is_in_keras("keras.utils.to_categorical")
    True
    """
    rest = canonical(dotted).removeprefix("keras").removeprefix(".")
    home = "" if canonical(dotted) == dotted else "_tf_keras/keras"
    parts = rest.split(".") if rest else []
    folder = ""
    for i, part in enumerate(parts):
        names = _names(f"{home}/{folder}".strip("/"))
        if names is None:
            return False
        if part not in names:
            return False
        folder = f"{folder}/{part}".strip("/")
        if _names(f"{home}/{folder}".strip("/")) is None:
            return True  # A class or a function; what is inside of it is not looked at.
        if i + 1 == len(parts):
            return True
    return True


@functools.cache
def _names(folder: str) -> frozenset[str] | None:
    """What a package of Keras' interface has; None where there is no such package."""
    spec = importlib.util.find_spec("keras")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], folder, "__init__.py")
    if not path.is_file():
        return None
    tree = ast.parse(path.read_bytes())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    inner = {each.name for each in path.parent.iterdir() if (each / "__init__.py").is_file()}
    return frozenset(names | inner | {"__version__"})
