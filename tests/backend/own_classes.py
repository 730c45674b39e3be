"""Classes of a user, registered with Keras or not, for files that must load without unisono."""

import keras


@keras.saving.register_keras_serializable("own_classes")
class Scale(keras.layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    def call(self, x):
        return x * self.factor


class Shift(keras.layers.Layer):
    """Not registered: whoever loads it must name it."""

    def build(self, shape):
        self.offset = self.add_weight(shape=(shape[-1],), initializer="zeros", name="offset")

    def call(self, x):
        return x + self.offset


@keras.saving.register_keras_serializable("own_classes")
class Net(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.scale = Scale(name="scale")
        self.out = keras.layers.Dense(1, name="out")

    def call(self, x):
        return self.out(self.scale(x))


def with_shift() -> keras.Model:
    hidden = keras.layers.Dense(3, name="hidden")
    out = keras.layers.Dense(1, name="out")
    return keras.Sequential(
        [keras.Input((4,), name="inputs"), hidden, Shift(name="shift"), out], name="net"
    )


def mixed() -> keras.Model:
    """Functional, with batch norm and two outputs."""
    inputs = keras.Input((4,), name="inputs")
    hidden = keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(3, name="a")(inputs))
    outputs = {name: keras.layers.Dense(1, name=name)(hidden) for name in ("left", "right")}
    return keras.Model(inputs, outputs, name="net")
