"""Tests of one Keras backend, the one that KERAS_BACKEND names: run this folder once for each."""

import keras


def pytest_configure() -> None:
    """Graphs that run a few times need not be rewritten; the table is measured with it."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def pytest_report_header() -> str:
    return f"keras {keras.__version__} on {keras.backend.backend()}"
