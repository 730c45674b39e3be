"""Names of files that Keras 3 does not take: where a program spells one out, a person decides."""

import libcst as cst

from unisono.compat.migrate.expressions import source_of

FILE_NAMES = (
    "Keras 3 names files of weights *.weights.h5, and checkpoints of models *.keras or *.h5: "
    "rename this one, and where it is loaded."
)


def has_old_file_name(call: cst.Call) -> bool:
    """Whether a call names a file of weights or a checkpoint as Keras 2 allowed it."""
    function = call.func
    name = source_of(function.attr if isinstance(function, cst.Attribute) else function)
    if name not in ("save_weights", "ModelCheckpoint") or not call.args:
        return False
    by_name = {source_of(arg.keyword): arg.value for arg in call.args if arg.keyword is not None}
    first = by_name.get("filepath") or call.args[0].value
    if not isinstance(first, cst.SimpleString):
        return False
    only = by_name.get("save_weights_only")
    is_weights = name == "save_weights" or (only is not None and source_of(only) == "True")
    endings = (".weights.h5",) if is_weights else (".keras", ".h5")
    return not str(first.raw_value).endswith(endings)
