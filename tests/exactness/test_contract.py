"""The exactness contract: each case on several replicas gives what one device gives.

By default the cases that engines find hardest run on every backend and each of the others on one
of them (elsewhere than on torch only where slow tests are wanted), on one number of replicas, such
that each group of features meets 2, 3 and 4 of them; `--full` runs them all. `python -m
exactness.__main__` writes the table.
"""

import functools

import keras
import numpy as np
import pytest

import unisono
from exactness.case import FLOAT32, Case, run_case
from exactness.cases import CASES, GROUPS
from exactness.results import flatten, largest_deviation

BACKEND = keras.backend.backend()
REPLICAS = (2, 3, 4)
TURNS = (2, 2, 3, 2, 2, 4)  # More replicas find little more and take longer.
HARDEST = {
    "adam",
    "built_before",
    "global_clipnorm",
    "accumulation",
    "float16_adam",
    "batch_norm_conv",
    "batch_norm_masking",
    "embedding_adam",
    "embedding_rmsprop_one_row",
    "masked_gru",
    "dice",
    "contrastive",
    "add_loss",
    "add_loss_batch_norm",
    "unseeded",
    "auc",
    "custom_maximum",
    "dicts_functional",
    "sample_weight_masked",
    "no_gradient_sometimes",
    "frozen_later",
    "subclassed",
    "kept_in_attributes",
    "own_train_step",
    "two_optimizers",
    "losses_of_examples",
    "loop_built_in_scope",
    "rows_47_batch_24",
    "rows_9_batch_2",
    "rows_1_batch_4",
    "predict_sizes",
    "validation_options",
    "shuffle",
    "train_on_batch_odd",
    "two_models",
    "shared_layers",
    "compiled_before",
    "generator",
    "tf_data",
    "py_dataset",
    "grain_map",
    "meddler",
    "checkpoint",
    "backup",
}
BACKENDS = ("jax", "tensorflow", "torch")
ON_ONE_REPLICA = ("adam", "batch_norm_conv", "masked_gru", "own_train_step", "rows_47_batch_24")


def pairs(*, full: bool) -> list[tuple[Case, int]]:
    """The cases that this backend promises, each with numbers of replicas."""
    if full:
        chosen = [(case, count) for case in CASES for count in (1, *REPLICAS)]
    else:
        chosen = [pair for group in GROUPS for pair in spread(group.cases)]
        chosen = [pair for pair in chosen if BACKEND in backends_of(pair[0])]
        chosen += [(case, 1) for case in CASES if case.name in ON_ONE_REPLICA]
    return [(case, count) for case, count in chosen if case.reason_to_skip(BACKEND) is None]


def backends_of(case: Case) -> list[str]:
    """The backends that run a case by default: all, or those that promise it in turns."""
    able = [backend for backend in BACKENDS if case.reason_to_skip(backend) is None]
    return able if case.name in HARDEST else [able[CASES.index(case) % len(able)]]


def spread(cases: list[Case]) -> list[tuple[Case, int]]:
    """One number of replicas for each case, in turns; the first cases get those left over."""
    turns = [(case, case.sharpest or TURNS[index % len(TURNS)]) for index, case in enumerate(cases)]
    met = {count for _, count in turns}
    missing = [count for count in REPLICAS if count not in met]
    return turns + [(cases[index % len(cases)], count) for index, count in enumerate(missing)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"case", "replicas"} <= set(metafunc.fixturenames):
        chosen = pairs(full=metafunc.config.getoption("--full"))
        names = [f"{case.name}-{replicas}" for case, replicas in chosen]
        marked = [pytest.param(*pair, marks=marks_of(pair[0])) for pair in chosen]
        metafunc.parametrize(("case", "replicas"), marked, ids=names)


def marks_of(case: Case) -> list[pytest.MarkDecorator]:
    """The others trace and compile for seconds what torch runs in one."""
    is_slow = BACKEND != "torch" and case.name not in HARDEST
    return [pytest.mark.slow] if is_slow else []


def test_replicas_agree_with_one_device(case, replicas, reference):
    expected = reference(case)
    actual = run_case(case, functools.partial(unisono.parallel, replicas=replicas))
    found = largest_deviation(expected, actual)
    assert found.value <= case.tolerance, f"{found.value:.1e} at {found.where}"


REFUSED = [case for case in CASES if BACKEND in case.lacks]


@pytest.mark.parametrize("case", REFUSED, ids=[case.name for case in REFUSED])
def test_what_the_table_leaves_out_is_refused_by_keras(case):
    with pytest.raises((ValueError, TypeError, NotImplementedError)):
        run_case(case, lambda model: model)


def test_only_half_precision_has_another_tolerance():
    for case in CASES:
        assert case.tolerance == FLOAT32 or case.group == "Mixed precision"


def test_every_case_runs_somewhere():
    assert {case.name for case in CASES} >= HARDEST
    assert all(backends_of(case) for case in CASES)


def test_every_group_meets_all_numbers_of_replicas():
    for group in GROUPS:
        assert {count for _, count in spread(group.cases)} == set(REPLICAS)


# -- the suite itself: it must notice what goes wrong ---------------------------------------------


def forgetting_a_row(model):
    """Wrong on purpose: the loss of each batch leaves out its last row."""
    whole = type(model).compute_loss

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return whole(self, x, y[:-1], y_pred[:-1], sample_weight, training)

    model.__class__ = type("Forgetting", (type(model),), {"compute_loss": compute_loss})
    return model


@pytest.mark.parametrize("name", ["sgd_momentum", "adam", "global_clipnorm"])
def test_a_forgotten_row_is_noticed(name, reference):
    case = next(case for case in CASES if case.name == name)
    expected = reference(case)
    found = largest_deviation(expected, run_case(case, forgetting_a_row))
    assert found.value > 100 * case.tolerance


def test_results_are_numbers_that_training_moved(reference):
    case = next(case for case in CASES if case.name == "batch_norm_conv")
    results = reference(case)
    numbers = [np.asarray(leaf, "float64") for _, leaf in flatten(results)]
    assert all(np.isfinite(number).all() for number in numbers)
    losses = results["history"]["loss"]
    assert losses[-1] < losses[0]
    assert {"weights", "optimizer", "history", "evaluate", "predict"} <= set(results)
