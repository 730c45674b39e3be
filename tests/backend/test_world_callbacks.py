"""Callbacks of other packages in a run of several processes: the real ones."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_world import HERE, run

# Imported once in each of two processes, they take longer than all that they do.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("callbacks")
    (folder / "wandb").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        done = run(str(HERE / "callbacks_program.py"), str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    failed = [
        check["failed"] for rank in ranks for check in rank.values() if "failed" in str(check)
    ]
    assert not failed, failed[0]
    return folder, ranks


def results(found: Any, name: str) -> list[Any]:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return [rank[name] for rank in found[1]]


def test_tensorboard_is_written_once(found):
    first, second = results(found, "tensorboard")
    assert first == second
    assert len(list((found[0] / "tensorboard" / "train").iterdir())) == 1


def test_mlflow_has_one_run(found):
    results(found, "mlflow")
    metrics = list((found[0] / "mlflow").glob("*/*/metrics/loss"))
    assert len(metrics) == 1
    assert len(metrics[0].read_text().splitlines()) == 2


def test_wandb_has_one_run(found):
    results(found, "wandb")
    assert len(list((found[0] / "wandb" / "wandb").glob("offline-run-*/*.wandb"))) == 1


def test_orbax_saves_what_was_trained(found):
    first, second = results(found, "orbax")
    assert first == second
    assert [path.name for path in (found[0] / "orbax").iterdir()] == ["1"]
    import jax
    import orbax.checkpoint as ocp

    path, files = found[0] / "orbax" / "1" / "pytree", ocp.PyTreeCheckpointer()
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    args = jax.tree.map(lambda _: as_numpy, files.metadata(path).item_metadata.tree)
    saved = files.restore(path, restore_args=args)["trainable_variables"]
    assert first[1] in [leaf.tolist() for leaf in jax.tree.leaves(saved)]
