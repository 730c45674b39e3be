"""Metrics as Keras computes them on one device, not means of what replicas found."""

import functools
from typing import Any

import keras
from keras import metrics, ops

from exactness.case import Adopt, Group, Results
from exactness.cases.sequences import tagger
from exactness.exercise import (
    GLOBAL_BATCH,
    TEST_ROWS,
    binary,
    classes,
    mlp,
    row_weights,
    tagged_tokens,
    train,
)

METRICS = Group("Metrics")
watch = functools.partial(train, test_batch=GLOBAL_BATCH)  # two test batches of different sizes
CROSSENTROPY = "sparse_categorical_crossentropy"


@METRICS.case("AUC, ROC and PR curves")
def auc(adopt: Adopt) -> Results:
    curves = [metrics.AUC(20, name="roc"), metrics.AUC(20, curve="PR", name="pr")]
    model = adopt(mlp(1, "sigmoid"))
    return watch(model, binary(), loss="binary_crossentropy", metrics=curves)


@METRICS.case("precision, recall and precision at recall")
def precision_recall(adopt: Adopt) -> Results:
    watched = [
        metrics.Precision(name="precision"),
        metrics.Recall(thresholds=[0.3, 0.6], name="recall"),
        metrics.PrecisionAtRecall(0.5, num_thresholds=20, name="at_recall"),
    ]
    model = adopt(mlp(1, "sigmoid"))
    return watch(model, binary(), loss="binary_crossentropy", metrics=watched)


@METRICS.case("F1 score")
def f1(adopt: Adopt) -> Results:
    task = classes(one_hot=True)
    watched = [metrics.F1Score(average="macro", name="macro"), metrics.F1Score(name="each")]
    model = adopt(mlp(4, "softmax"))
    return watch(model, task, loss="categorical_crossentropy", metrics=watched)


@METRICS.case("accuracy and top-k accuracy")
def top_k(adopt: Adopt) -> Results:
    watched = ["accuracy", metrics.SparseTopKCategoricalAccuracy(2, name="top2")]
    return watch(adopt(mlp(4, "softmax")), classes(), loss=CROSSENTROPY, metrics=watched)


@METRICS.case("mean IoU")
def mean_iou(adopt: Adopt) -> Results:
    watched = [metrics.MeanIoU(4, sparse_y_pred=False, name="iou")]
    return watch(adopt(mlp(4, "softmax")), classes(), loss=CROSSENTROPY, metrics=watched)


@METRICS.case("R2, root mean squared error, Pearson correlation")
def r2(adopt: Adopt) -> Results:
    watched = [
        metrics.R2Score(name="r2"),
        metrics.RootMeanSquaredError(name="rmse"),
        metrics.PearsonCorrelation(axis=0, name="pearson"),
    ]
    return watch(adopt(mlp()), metrics=watched)


class LargestError(keras.metrics.Metric):
    """Keeps a maximum: states of replicas can't be added."""

    def __init__(self, name: str = "largest_error") -> None:
        super().__init__(name=name)
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(y_true - y_pred))))

    def result(self) -> Any:
        return self.largest.value


@METRICS.case("custom class that keeps a maximum")
def custom_maximum(adopt: Adopt) -> Results:
    return watch(adopt(mlp()), metrics=[LargestError()])


class LastBatch(keras.metrics.Metric):
    """Remembers the last row of the last batch and counts the batches."""

    def __init__(self, name: str = "last_batch") -> None:
        super().__init__(name=name)
        self.last = self.add_variable((), "zeros", name="last")
        self.batches = self.add_variable((), "zeros", name="batches")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.last.assign(ops.sum(y_pred[-1]))
        self.batches.assign_add(1.0)

    def result(self) -> Any:
        return {"last_row": self.last.value, "num_batches": self.batches.value}


@METRICS.case("custom class that depends on order, with several results")
def custom_order(adopt: Adopt) -> Results:
    return watch(adopt(mlp()), metrics=[LastBatch()])


@METRICS.case("plain functions, of samples and of the batch")
def functions(adopt: Adopt) -> Results:
    def largest(y_true: Any, y_pred: Any) -> Any:
        return ops.max(ops.abs(y_true - y_pred))

    def bias(y_true: Any, y_pred: Any) -> Any:
        return ops.mean(y_pred - y_true, axis=-1)

    return watch(adopt(mlp()), metrics=[largest, bias])


@METRICS.case("`metrics` and `weighted_metrics` with sample weights")
def weighted_metrics(adopt: Adopt) -> Results:
    return watch(
        adopt(mlp(4, "softmax")),
        classes(),
        weights=(row_weights(), row_weights(TEST_ROWS)),
        loss=CROSSENTROPY,
        metrics=["accuracy"],
        weighted_metrics=["accuracy", metrics.SparseCategoricalCrossentropy(name="entropy")],
    )


@METRICS.case("metrics of masked sequences")
def masked_metrics(adopt: Adopt) -> Results:
    return watch(
        adopt(tagger(keras.layers.Dense(3))),
        tagged_tokens(),
        loss=CROSSENTROPY,
        metrics=["accuracy"],
        weighted_metrics=[metrics.SparseTopKCategoricalAccuracy(2, name="top2")],
    )
