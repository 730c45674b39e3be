"""What Keras saves of a parallel model is written completely, or not at all, and by one process.

`save`, `save_weights` and `export` write to a draft beside the file or folder that they are given,
which takes its place when it is complete (`unisono.checkpoint.atomic`). Keras' callbacks call
these methods of the model. Its functions, such as `keras.saving.save_model(model, path)`, do not:
those by which they write are replaced while there are parallel models. Remote paths and open files
are passed on as they are.

In a run of several processes the chief writes and the others wait until the file is there. A
process that saves to a path that the chief does not save to at the same time writes by itself.
What fails in the chief raises in all.
"""

import builtins
import contextlib
import functools
import inspect
import itertools
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import keras

from unisono.checkpoint.atomic import Draft, output_error_of, replacing
from unisono.errors import OutputError
from unisono.hooks import Patch, bind, original, unbind
from unisono.keras_internals import (
    BACKUP_EPOCH_PATH,
    SAVE_BACKUP,
    ask_to_proceed_with_overwrite,
    is_remote_path,
    legacy_h5_format,
    saving_lib,
)
from unisono.launch.client import World
from unisono.replication.callback_ranks import is_alone

SAVES = ("save", "save_weights", "export")
_SAVE_BY_FUNCTION = "_unisono_save_by_function"

_INDEX_ENDING, _SHARD_ENDING = ".weights.json", ".weights.h5"
_SHARD = re.compile(r"(?P<base>.*)_(?P<number>[0-9]{5})(?P<ours>-[0-9]+)?\.weights\.h5")
_FILE_BYTES, _VARIABLE_BYTES = 1 << 15, 1 << 11  # What HDF5 adds, generously.
_temporary: ContextVar[Path | None] = ContextVar("temporary", default=None)
_being_saved: ContextVar[tuple[keras.Model, ...]] = ContextVar("being_saved", default=())


def safely(model: keras.Model, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that writes a file, or a folder, in a way that a kill does no harm to."""

    def save(*args: Any, **kwargs: Any) -> Any:
        token = _being_saved.set((*_being_saved.get(), model))
        try:
            return replace(*args, **kwargs)
        finally:
            _being_saved.reset(token)

    def replace(*args: Any, **kwargs: Any) -> Any:
        given = _given(method, args, kwargs)
        path = _local_path(args[0] if args else kwargs.get("filepath"))
        is_sharded = given.get("max_shard_size") is not None
        if path is None or (is_sharded and path.is_symlink()):  # Shards belong beside the link.
            return method(*args, **kwargs)
        # Keras would ask whether to overwrite the draft, which is never there.
        is_asked = not given.get("overwrite", True) and path.exists()
        if is_asked and not ask_to_proceed_with_overwrite(str(path)):
            return None
        num_bytes = _num_bytes(model)
        if is_sharded:
            return _save_shards(method, path, num_bytes, args, kwargs)
        with replacing(path) as draft:
            if name != "export":
                draft.check_room(num_bytes)
            printing = _printing_target(draft) if name == "export" else contextlib.nullcontext()
            with printing:
                return _write(method, draft, draft.path, args, kwargs)

    return save


def _save_shards(
    method: Callable[..., Any], path: Path, num_bytes: int, args: Any, kwargs: Any
) -> Any:
    # Keras writes an index of this name whatever it was given.
    with replacing(path.with_suffix(".json")) as draft:
        draft.check_room(num_bytes)
        result = _write(method, draft, draft.path.with_suffix(path.suffix), args, kwargs)
        replaced = _rename_shards(draft) if draft.path.is_file() else []
    for shard in replaced:
        shard.unlink(missing_ok=True)
    return result


def protect_functions(model: keras.Model, save: Callable[..., Any]) -> None:
    """Have Keras' functions write a model by `save(name, function, path, ...)`."""
    bind(model, _SAVE_BY_FUNCTION, save)
    for patch in _functions:
        patch.apply()


def restore_functions(model: keras.Model) -> None:
    """Undo `protect_functions`."""
    unbind(model, _SAVE_BY_FUNCTION)
    for patch in _functions:
        patch.lift()


def _by_function(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def write(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
            save = getattr(model, "__dict__", {}).get(_SAVE_BY_FUNCTION)
            if save is None or any(each is model for each in _being_saved.get()):
                return plain(model, filepath, *args, **kwargs)
            return save(name, functools.partial(plain, model), filepath, *args, **kwargs)

        return write

    return make


# Those that `keras.saving` calls, which programs may have imported by name before.
_functions = [
    Patch(lambda: saving_lib, "save_model", _by_function("save")),
    Patch(lambda: saving_lib, "save_weights_only", _by_function("save_weights")),
    Patch(lambda: legacy_h5_format, "save_model_to_hdf5", _by_function("save")),
]


def protect_backups(callbacks: Iterable[Any]) -> None:
    """Let BackupAndRestore replace its note of the epoch as a whole; it writes that file itself."""
    for callback in callbacks:
        is_backup = isinstance(callback, keras.callbacks.BackupAndRestore)
        if is_backup and SAVE_BACKUP not in vars(callback):
            bind(callback, SAVE_BACKUP, _backup(callback))


def _backup(callback: Any) -> Callable[[], None]:
    def save() -> None:
        plain = original(callback, SAVE_BACKUP)
        path = getattr(callback, BACKUP_EPOCH_PATH)
        if _local_path(path) is None:
            plain()
            return
        os.makedirs(callback.backup_dir, exist_ok=True)
        with replacing(path) as draft:
            with contextlib.suppress(FileNotFoundError):  # It may be told to keep the one before.
                draft.path.write_bytes(Path(path).read_bytes())
            setattr(callback, BACKUP_EPOCH_PATH, str(draft.path))
            try:
                plain()
            finally:
                setattr(callback, BACKUP_EPOCH_PATH, path)

    return save


def _write(method: Callable[..., Any], draft: Draft, path: Path, args: Any, kwargs: Any) -> Any:
    """Call a method with the draft's path, of the kind that it was given."""
    given = args[0] if args else kwargs["filepath"]
    written = str(path) if isinstance(given, str) else path
    if args:
        args = (written, *args[1:])
    else:
        kwargs = {**kwargs, "filepath": written}
    token = _temporary.set(draft.temporary)
    try:
        with _get_temp_dir.applied():
            return method(*args, **kwargs)
    except Exception as error:
        if any(kind.__name__ == "OpError" for kind in type(error).__mro__):
            raise OSError(str(error)) from error  # TensorFlow's errors of files are none of Python.
        error.args = tuple(
            draft.told_of_target(arg) if isinstance(arg, str) else arg for arg in error.args
        )
        raise
    finally:
        _temporary.reset(token)


def _in_draft(plain: Callable[[], str]) -> Callable[[], str]:
    """Keras' folder for what it writes first, which a kill would leave in the system's."""

    def get_temp_dir() -> str:
        folder = _temporary.get()
        return plain() if folder is None else tempfile.mkdtemp(dir=folder)

    return get_temp_dir


_get_temp_dir = Patch(lambda: saving_lib, "get_temp_dir", _in_draft)


class _Renaming:
    """An output whose texts name the target instead of the draft."""

    def __init__(self, output: Any, draft: Draft) -> None:
        self._output = output
        self._draft = draft

    def write(self, text: str) -> Any:
        return self._output.write(self._draft.told_of_target(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)


@contextlib.contextmanager
def _printing_target(draft: Draft) -> Iterator[None]:
    with contextlib.redirect_stdout(_Renaming(sys.stdout, draft)):
        yield


def _rename_shards(draft: Draft) -> list[Path]:
    """Give shards of weights names that are free; returns those to remove afterwards.

    The index names its shards, so putting the index in its place goes from all of the old shards to
    all of the new ones at once.
    """
    folder, index = draft.target.parent, json.loads(draft.path.read_text())
    names = {name: _free_name(name, folder) for name in _shards(index)}
    for name, free in names.items():
        os.rename(draft.path.with_name(name), draft.path.with_name(free))
    index["weight_map"] = {
        key: [names[name] for name in _listed(value)] for key, value in index["weight_map"].items()
    }
    draft.path.write_text(json.dumps(index, indent=4))
    before: list[str] = []
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        before = _shards(json.loads(draft.target.read_text()))
    base_name = draft.target.name.removesuffix(_INDEX_ENDING)
    outdated = []
    for name in os.listdir(folder):
        found = _SHARD.fullmatch(name)
        if not found or found["base"] != base_name or name in names.values():
            continue
        # Ours, of the old index, or one that Keras would have overwritten.
        if found["ours"] or name in before or int(found["number"]) < len(names):
            outdated.append(folder / name)
    return outdated


def _num_bytes(model: Any) -> int:
    """About what a file of the model's variables takes.

    It has to be known before: HDF5 ends the process with a segmentation fault when it cannot write
    what it has in its buffers.
    """
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    num_bytes = _FILE_BYTES + _VARIABLE_BYTES * len(variables)
    for variable in variables:
        num_bytes += math.prod(variable.shape) * _item_bytes(variable.dtype)
    return num_bytes


def _item_bytes(dtype: str) -> int:
    bits = re.search("[0-9]+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def _shards(index: Any) -> list[str]:
    return sorted({name for value in index["weight_map"].values() for name in _listed(value)})


def _listed(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


def _free_name(name: str, folder: Path) -> str:
    names = (f"{name.removesuffix(_SHARD_ENDING)}-{n}{_SHARD_ENDING}" for n in itertools.count(1))
    return next(n for n in itertools.chain([name], names) if not os.path.lexists(folder / n))


def _local_path(path: Any) -> Path | None:
    """A path of this machine's file system; None for what is none."""
    if not isinstance(path, (str, os.PathLike)):
        return None
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "://" in text or is_remote_path(text):
        return None
    return Path(text)


def _given(method: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    try:
        return inspect.signature(method).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return {}  # The method itself will say what is wrong.


# -- files of a run of several processes ---------------------------------------------------------


def write_as_chief(world: World, what: str, write: Callable[[], Any]) -> Any:
    """Write in the chief; elsewhere wait for it, and write only what the chief does not."""
    if is_alone():
        return write()
    # With a count, as a file may be written many times.
    topic = f"{what} at point {world.num_points}"
    if world.is_chief:
        try:
            result = write()
        except BaseException as error:
            is_output = isinstance(error, OutputError)
            world.announce(topic, error=_kind_of(error), text=str(error), is_output=is_output)
            raise
        world.announce(topic)
        return result
    said = world.wait_for_chief(topic)
    if said is None:
        return write()
    if "error" in said:
        raise _error_of_chief(what, said)
    return None


def _kind_of(error: BaseException) -> str:
    """The built-in class of an error: what another process can catch it as."""
    found = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return found.__name__


def _error_of_chief(what: str, said: dict[str, Any]) -> Exception:
    """The chief's error as it is raised in the other processes, of the same built-in class."""
    text = f"Rank 0 failed in {what}: {said['text']}"
    kind = getattr(builtins, said["error"])
    if said["is_output"]:
        kind = output_error_of(kind)
    try:
        error: Exception = kind(text) if issubclass(kind, Exception) else RuntimeError(text)
    except TypeError:  # Of a class that is made of more than a text.
        error = RuntimeError(text)
    error.is_echo = True  # type: ignore[attr-defined]  # The launcher shows the chief's.
    return error
