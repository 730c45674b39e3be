"""cloudpickle, which also pickles modules that are objects of a class of their own.

It follows a function's globals to the submodules that the function may use, by their names: a
function that uses `torch` and `keras.ops` leads it to `torch.ops`. It knows plain modules only, but
any module that can be imported by its name can be sent as that name.
"""

import importlib
import io
import pickle
import sys
import types
from typing import Any


def dumps(obj: Any) -> bytes:
    """The pickle of an object, for another process of the same program."""
    import cloudpickle  # Here, as `import unisono` is to load nothing that it may not need.

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, unused-ignore]
        def reducer_override(self, obj: Any) -> Any:
            reduced = reduce_module(obj)
            return super().reducer_override(obj) if reduced is None else reduced

    buffer = io.BytesIO()
    Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


def reduce_module(obj: Any) -> tuple[Any, tuple[str]] | None:
    """How a module of a class of its own is pickled; None for everything else."""
    if not isinstance(obj, types.ModuleType) or type(obj) is types.ModuleType:
        return None
    is_importable = sys.modules.get(obj.__name__) is obj
    return (importlib.import_module, (obj.__name__,)) if is_importable else None
