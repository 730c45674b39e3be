"""Trace the train step of nets as a process of a run with one GPU each, and read its graph.

    unisono run --replicas 2 -m gpu.tensorflow_graph FILE NET...

The program goes through `unisono.parallel` and `fit`, up to the first step that would run: the
devices that TensorFlow lists are replaced, and tracing a function ends it.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import unisono  # isort: skip  # Joins the run, before TensorFlow starts.

import tensorflow as tf

from gpu import nets

_plain_visible, _plain_function = tf.config.get_visible_devices, tf.function


class Traced(Exception):
    """A step was traced, which is as far as it goes without a device."""

    def __init__(self, graph: Any) -> None:
        super().__init__("traced")
        self.graph = graph


class _EndingFunction:
    def __init__(self, function: Any, **options: Any) -> None:
        self._function = _plain_function(function, **options)

    def get_concrete_function(self, *args: Any) -> Any:
        raise Traced(self._function.get_concrete_function(*args).graph)


def install() -> None:
    """Have programs see one GPU."""
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")

    def visible(kind: str | None = None) -> list[Any]:
        return [gpu] if kind == "GPU" else _plain_visible(kind)

    def function(step: Any = None, **options: Any) -> Any:
        is_step = options == {"reduce_retracing": True, "autograph": False}
        return (_EndingFunction if is_step else _plain_function)(step, **options)

    tf.config.get_visible_devices, tf.function = visible, function


def traced_step(net: str) -> Any:
    """The graph of a train step."""
    model = unisono.parallel(nets.make(net))
    x, y = nets.data(net, 2 * unisono.topology().world_size)
    try:
        model.fit(x, y, batch_size=len(x), verbose=0)
    except Traced as traced:
        return traced.graph
    raise AssertionError("fit has traced no step")


def summary(graph: Any) -> dict[str, float]:
    collectives = [op for op in graph.get_operations() if op.type.startswith("Collective")]
    sizes = [sum(_num_bytes(out) for out in op.outputs) for op in collectives]
    largest = max(sizes)
    gradients = [op for op, size in zip(collectives, sizes, strict=True) if size > largest / 100]
    backward = {op for op in graph.get_operations() if "Backprop" in op.type or "Grad" in op.type}
    before = _ancestors(gradients[0])
    order = [collectives.index(op) for op in gradients]
    assert order == sorted(order)
    return {
        "collectives": len(collectives),
        "mib": sum(sizes) / 2**20,
        "gradient_collectives": len(gradients),
        "waits_for": 100 * len(backward & before) / len(backward),
    }


def _ancestors(op: Any) -> set[Any]:
    """All ops that one waits for, by data or by control dependencies."""
    found, open_ops = set(), [op]
    while open_ops:
        one = open_ops.pop()
        before = [tensor.op for tensor in one.inputs] + list(one.control_inputs)
        new = [each for each in before if each not in found]
        found.update(new)
        open_ops += new
    return found


def _num_bytes(tensor: Any) -> int:
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def main() -> None:
    install()
    out, *names = sys.argv[1:]
    found = {net: summary(traced_step(net)) for net in names}
    if unisono.topology().rank == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
