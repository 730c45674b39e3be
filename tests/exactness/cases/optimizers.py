"""Optimizers, schedules and what is done to the reduced gradient."""

from collections.abc import Callable
from typing import Any

import keras
from keras import optimizers
from keras.optimizers import schedules

from exactness.case import Adopt, Group, Results, Run
from exactness.exercise import exercise, fit, mlp, regression, sgd, train

OPTIMIZERS = Group("Optimizers")
SCHEDULES = Group("Learning-rate schedules")
GRADIENTS = Group("Clipping, accumulation, several steps at once")

# Since 3.16 Keras takes it on torch too.
IS_REFUSED = tuple(map(int, keras.__version__.split(".")[:2])) < (3, 16)
NO_SEVERAL_STEPS = (
    {"torch": "Keras refuses `steps_per_execution` > 1 on torch"} if IS_REFUSED else {}
)


def trained_by(make_optimizer: Callable[[], Any], **compile_options: Any) -> Run:
    def run(adopt: Adopt) -> Results:
        return train(adopt(mlp()), optimizer=make_optimizer(), **compile_options)

    return run


for name, title, make in (
    ("sgd", "SGD", lambda: optimizers.SGD(0.1)),
    ("sgd_momentum", "SGD with momentum", sgd),
    ("sgd_nesterov", "SGD with Nesterov momentum", lambda: optimizers.SGD(0.05, 0.9, True)),
    ("adam", "Adam", lambda: optimizers.Adam(0.01)),
    ("adam_amsgrad", "Adam, AMSGrad", lambda: optimizers.Adam(0.01, amsgrad=True)),
    (
        "rmsprop",
        "RMSprop, centered",
        lambda: optimizers.RMSprop(0.005, momentum=0.5, centered=True),
    ),
    ("adagrad", "Adagrad", lambda: optimizers.Adagrad(0.05)),
    ("nadam", "Nadam", lambda: optimizers.Nadam(0.01)),
    ("lamb", "Lamb", lambda: optimizers.Lamb(0.01)),
    ("adafactor", "Adafactor", lambda: optimizers.Adafactor(0.05)),
    ("lion", "Lion", lambda: optimizers.Lion(0.003)),
    ("muon", "Muon", lambda: optimizers.Muon(0.01)),
    (
        "multi_optimizer",
        "MultiOptimizer: SGD on biases, Adam on the rest",
        lambda: optimizers.MultiOptimizer(
            optimizers.OptimizerMap(optimizers.Adam(0.01), {".*/bias": optimizers.SGD(0.05)})
        ),
    ),
    (
        "ema",
        "SGD with an average of the weights (EMA)",
        lambda: optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9),
    ),
    (
        "ema_overwrite",
        "Adam with EMA that overwrites the weights every 3 steps",
        lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
    ),
):
    OPTIMIZERS.add(name, title, trained_by(make))


@OPTIMIZERS.case("AdamW, biases excluded from the decay")
def adamw(adopt: Adopt) -> Results:
    optimizer = optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return train(adopt(mlp()), optimizer=optimizer)


@OPTIMIZERS.case("Adam, built for the model before this is made parallel")
def built_before(adopt: Adopt) -> Results:
    model, optimizer = mlp(), optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    return train(adopt(model), optimizer=optimizer)


@OPTIMIZERS.case("ScheduleFreeAdamW")
def schedule_free(adopt: Adopt) -> Results:
    model, optimizer = adopt(mlp()), optimizers.ScheduleFreeAdamW(0.01)
    # Built by `fit` on TensorFlow, its averages would start from 0 in plain Keras.
    optimizer.build(model.trainable_variables)
    return train(model, optimizer=optimizer)


for name, title, make in (
    (
        "exponential_decay",
        "ExponentialDecay",
        lambda: optimizers.SGD(schedules.ExponentialDecay(0.1, 3, 0.7), momentum=0.9),
    ),
    (
        "cosine_warmup",
        "CosineDecay with warm-up, under Adam",
        lambda: optimizers.Adam(
            schedules.CosineDecay(0.001, 15, warmup_target=0.02, warmup_steps=5)
        ),
    ),
    (
        "piecewise",
        "PiecewiseConstantDecay",
        lambda: optimizers.SGD(schedules.PiecewiseConstantDecay([4, 11], [0.1, 0.03, 0.01])),
    ),
):
    SCHEDULES.add(name, title, trained_by(make))


for name, title, make in (
    ("clipnorm", "`clipnorm`", lambda: optimizers.SGD(0.3, momentum=0.9, clipnorm=0.1)),
    ("global_clipnorm", "`global_clipnorm`", lambda: optimizers.Adam(0.01, global_clipnorm=0.05)),
    ("clipvalue", "`clipvalue`", lambda: optimizers.SGD(0.3, momentum=0.9, clipvalue=0.02)),
    (
        "accumulation",
        "`gradient_accumulation_steps=3`",
        lambda: optimizers.Adam(0.02, gradient_accumulation_steps=3),
    ),
    (
        "accumulation_clip_ema",
        "accumulation, `global_clipnorm` and EMA together",
        lambda: optimizers.AdamW(
            0.02,
            gradient_accumulation_steps=2,
            global_clipnorm=0.1,
            use_ema=True,
            ema_momentum=0.9,
            ema_overwrite_frequency=4,
        ),
    ),
    (
        "loss_scale_factor",
        "`loss_scale_factor` in float32",
        lambda: optimizers.SGD(0.05, momentum=0.9, loss_scale_factor=128.0),
    ),
):
    GRADIENTS.add(name, title, trained_by(make))


GRADIENTS.add(
    "steps_per_execution",
    "`steps_per_execution=3` on 4 steps an epoch",
    trained_by(sgd, metrics=["mae"], steps_per_execution=3),
    lacks=NO_SEVERAL_STEPS,
)


@GRADIENTS.case("`steps_per_execution=2` and accumulation", lacks=NO_SEVERAL_STEPS)
def steps_and_accumulation(adopt: Adopt) -> Results:
    optimizer = optimizers.Adam(0.02, gradient_accumulation_steps=2)
    return train(adopt(mlp()), optimizer=optimizer, steps_per_execution=2)


@GRADIENTS.case("an epoch that ends between two accumulated steps, continued by a second `fit`")
def accumulation_across_fits(adopt: Adopt) -> Results:
    model = adopt(mlp())
    model.compile(optimizers.SGD(0.05, gradient_accumulation_steps=3), "mse")
    task = regression()
    return {"first": fit(model, task.x, task.y, epochs=2), **exercise(model, task, epochs=3)}
