"""Any data size and any global batch: remainders, fewer rows than replicas, a single row."""

import math
from typing import Any

from keras import layers

from exactness.case import Adopt, Group, Results, state_of
from exactness.exercise import NUM_FEATURES, evaluate, fit, predict, regression, sgd, stacked

SIZES = Group("Data sizes")
STEPS = 20


def fit_rows(adopt: Adopt, rows: int, global_batch: int) -> Results:
    """About 20 steps of a model with batch norm, then evaluate and predict at other batches."""
    task = regression()
    x, y = task.x[:rows], task.y[:rows]
    model = adopt(normed())
    model.compile(sgd(), "mse", metrics=["mae"])
    epochs = max(2, STEPS // math.ceil(rows / global_batch))
    other = global_batch + 1
    return {
        "history": fit(model, x, y, batch_size=global_batch, epochs=epochs),
        "evaluate": evaluate(model, x, y, batch_size=other),
        "predict": predict(model, x, batch_size=other),
        **state_of(model),
    }


def normed() -> Any:
    return stacked(
        layers.Dense(4, use_bias=False),
        # Two rows that nearly agree are pulled apart by up to 1/sqrt(epsilon), rounding included.
        layers.BatchNormalization(momentum=0.8, epsilon=0.1),
        layers.Activation("tanh"),
        layers.Dense(2),
        shape=(NUM_FEATURES,),
    )


for rows, global_batch, sharpest, title in (
    (36, 12, 2, "36 rows, global batch 12: divides for 2, 3 and 4 replicas"),
    (47, 24, 3, "47 rows, global batch 24: a remainder of 23"),
    (25, 12, 3, "25 rows, global batch 12: a remainder of one row"),
    (26, 12, 4, "26 rows, global batch 12: a remainder of two rows"),
    (28, 7, 2, "28 rows, global batch 7: never divides"),
    (21, 10, 3, "21 rows, global batch 10: divides for 2 alone"),
    (9, 2, 4, "9 rows, global batch 2: fewer rows than replicas in every step"),
    (5, 1, 2, "5 rows, global batch 1"),
    (5, 8, 4, "5 rows, global batch 8: one short batch"),
    (3, 32, 4, "3 rows, global batch 32: the data set is smaller than 4 replicas"),
    (1, 4, 3, "1 row in all"),
):

    def run(adopt: Adopt, rows: int = rows, global_batch: int = global_batch) -> Results:
        return fit_rows(adopt, rows, global_batch)

    SIZES.add(f"rows_{rows}_batch_{global_batch}", title, run, sharpest=sharpest)


@SIZES.case("predict at every remainder: 1 to 9 rows, global batch 4")
def predict_sizes(adopt: Adopt) -> Results:
    x = regression().x
    model = adopt(normed())
    return {str(count): predict(model, x[:count], batch_size=4) for count in range(1, 10)}
