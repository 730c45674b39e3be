"""The exactness contract on one Keras backend, the one that KERAS_BACKEND names."""

from collections.abc import Callable

import keras
import pytest

from exactness.case import Case, Results, run_case


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="every case of the contract on 1, 2, 3 and 4 replicas"
    )


def pytest_configure() -> None:
    """Graphs that run a few times need not be rewritten; the table is measured with it."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


@pytest.fixture(scope="session")
def reference() -> Callable[[Case], Results]:
    """What plain Keras on one device gives for a case, run once in a session."""
    results: dict[str, Results] = {}

    def run(case: Case) -> Results:
        if case.name not in results:
            results[case.name] = run_case(case, lambda model: model)
        return results[case.name]

    return run
