"""A user's defaults for `unisono submit`, so that a cluster's names are written down once.

`[tool.unisono.slurm]` of the nearest pyproject.toml, or `[slurm]` of the nearest unisono.toml, from
the folder of the call upwards. Tables `cluster.NAME` and `partitions.NAME` inside it hold what is
different there; the narrower wins, and the command line over all.
"""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.errors import LaunchError

_NUMBERS = ("nodes", "gpus-per-node", "replicas-per-node", "cpus-per-node", "warn-before")
_TEXTS = ("partition", "time", "job-name", "comment", "account", "qos", "venv", "conda")
_LISTS = ("module", "sbatch")
_IN_PYPROJECT = ("tool", "unisono", "slurm")
_ALL = (*_NUMBERS, *_TEXTS, *_LISTS, "requeue", "env")


def read_settings(folder: Path) -> tuple[dict[str, Any], str]:
    """The nearest table of settings, and the file that it is from; an empty one without a file."""
    for parent in (folder, *folder.parents):
        for name, keys in (("unisono.toml", ("slurm",)), ("pyproject.toml", _IN_PYPROJECT)):
            path = parent / name
            if path.is_file() and (table := _table(path, keys)) is not None:
                return table, str(path)
    return {}, ""


def defaults(
    table: Mapping[str, Any], source: str, *, cluster: str, partition: str | None
) -> dict[str, Any]:
    """The settings that hold on a cluster, for a partition or the one that they name."""
    clusters = _tables(table, "cluster", source)
    found = _plain(table, source, is_replicated=True)
    here = clusters.get(cluster, {})
    found |= _plain(here, f"{source}, cluster {cluster}", is_replicated=True)
    name = partition or found.get("partition")
    for place in (table, here):
        each = _tables(place, "partitions", source).get(name or "", {})
        found |= _plain(each, f"{source}, partition {name}", is_replicated=False)
    return found


def _plain(table: Mapping[str, Any], source: str, *, is_replicated: bool) -> dict[str, Any]:
    inner = ("cluster", "partitions") if is_replicated else ()
    found = {}
    for key, value in table.items():
        if key in inner:
            continue
        if key not in _ALL:
            near = difflib.get_close_matches(key, _ALL, 1)
            hint = f" Did you mean {near[0]}?" if near else f" Known are {', '.join(_ALL)}."
            raise LaunchError(f"Found the setting {key!r} in {source}, which has no meaning.{hint}")
        found[key] = _checked(key, value, source)
    return found


def _checked(key: str, value: Any, source: str) -> Any:
    if key in _NUMBERS:
        is_good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        what = "a whole number"
    elif key in _LISTS:
        value = [value] if isinstance(value, str) else value
        is_good = isinstance(value, list) and all(isinstance(each, str) for each in value)
        what = "a text or a list of texts"
    elif key == "env":
        is_good = isinstance(value, dict)
        what = "a table of names and values"
        if is_good:
            return [f"{name}={each}" for name, each in value.items()]
    elif key == "requeue":
        is_good, what = isinstance(value, bool), "true or false"
    else:
        is_good, what = isinstance(value, str), "a text"
    if not is_good:
        raise LaunchError(f"Found {key} = {value!r} in {source}. Make it {what}.")
    return value


def _tables(table: Mapping[str, Any], key: str, source: str) -> Mapping[str, Mapping[str, Any]]:
    found = table.get(key, {})
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise LaunchError(
            f"Found {key} = {found!r} in {source}. Make it tables: [slurm.{key}.NAME]."
        )
    return found


def _table(path: Path, keys: tuple[str, ...]) -> dict[str, Any] | None:
    try:
        found: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LaunchError(f"Looked for settings in {path}: {error}. Mend the file.") from error
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    if found is not None and not isinstance(found, dict):
        raise LaunchError(f"Found {'.'.join(keys)} = {found!r} in {path}. Make it a table.")
    return found
