"""Finds what the table of `knowledge.py` says of a name, however a program has imported it."""

from unisono.compat.knowledge import CHANGES, KERAS_HOMES, MODULES, TENSORFLOW_HOMES, Change

_BY_NAME = {change.old: change for change in CHANGES}


def canonical(dotted: str) -> str:
    """A dotted name as the table has it, whichever home it was imported from.

    >>> canonical("tensorflow.keras.utils.multi_gpu_model")
    'keras.utils.multi_gpu_model'
    """
    for home in KERAS_HOMES:
        if dotted == home or dotted.startswith(home + "."):
            return "keras" + dotted.removeprefix(home)
    for home in TENSORFLOW_HOMES:
        if dotted == home or dotted.startswith(home + "."):
            return "tensorflow" + dotted.removeprefix(home)
    return dotted


def today(dotted: str) -> str:
    """A canonical name with a module that went replaced by the one that has its names.

    >>> today("keras.utils.training_utils.multi_gpu_model")
    'keras.utils.multi_gpu_model'
    """
    module, _, rest = dotted, "", ""
    while module:
        if module in MODULES:
            return MODULES[module] + rest
        module, _, last = module.rpartition(".")
        rest = f".{last}{rest}"
    return dotted


def change_of(dotted: str) -> Change | None:
    """What the table says of a name, as it was written in a program; None if it has nothing."""
    name = canonical(dotted)
    return _BY_NAME.get(name) or _BY_NAME.get(today(name))


def gone_with(dotted: str) -> Change | None:
    """The entry that says why a name, or the module that it is in, has no successor."""
    name = canonical(dotted)
    while name:
        change = _BY_NAME.get(name)
        if change is not None and change.why is not None:
            return change
        name = name.rpartition(".")[0]
    return None
