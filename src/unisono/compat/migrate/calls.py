"""Translations of calls whose arguments change."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import libcst as cst

from unisono.compat.knowledge import LOADING, METHODS
from unisono.compat.lookup import canonical, parse_devices
from unisono.compat.migrate.steps import (
    bound,
    call,
    expression,
    keyword,
    literal,
    named,
    source_of,
    without_last_comma,
)
from unisono.errors import DeviceError

OPTIMIZERS = "keras.optimizers."
_SCHEDULE = "InverseTimeDecay"
_DEFAULT_RATE = {"SGD": "0.01", "sgd": "0.01"}
_METHODS = {method.old: method for method in METHODS if method.parameters}
_LOADING_DEFAULTS = {"max_queue_size": 10, "workers": 1, "use_multiprocessing": False}
_UNISONO = "import unisono"


@dataclass(frozen=True)
class Caller:
    """The context of a call that is translated."""

    need: Callable[[str], None]
    remark: Callable[[str], None]
    dotted: str
    """The called name, as it was imported."""
    original: cst.Call


def translate_optimizer(node: cst.Call, caller: Caller) -> cst.Call:
    """Translate `lr=`, and `decay=` to an equivalent schedule."""
    *_, kind = canonical(caller.dotted).removeprefix(OPTIMIZERS).split(".")
    args = bound(node.args, ("learning_rate", *(f"#{i}" for i in range(1, 9))))
    if args is None:
        return _with_unknown(node, caller)
    is_old = bool({"lr", "decay"} & set(args))
    if not is_old or not kind[:1].isalpha() or "schedules" in caller.dotted:
        return node
    rate, decay = args.get("lr") or args.get("learning_rate"), args.get("decay")
    value = rate.value if rate is not None else expression(_DEFAULT_RATE.get(kind, "0.001"))
    if isinstance(literal(value), int):
        value = expression(f"{literal(value)}.0")  # Keras 3 takes only a float.
    if decay is not None and literal(decay.value) not in (0, None):
        value = _decayed(value, decay.value, node, caller)
    elif rate is None:
        return _with_args(node, [arg for arg in node.args if arg is not decay])
    new = keyword("learning_rate", value)
    if rate is not None and rate.keyword is None:
        new = cst.Arg(value)
    place = rate if rate is not None else decay
    kept = [arg for arg in node.args if arg is place or arg not in (rate, decay)]
    return _with_args(
        node, [new.with_changes(comma=arg.comma) if arg is place else arg for arg in kept]
    )


def _with_unknown(node: cst.Call, caller: Caller) -> cst.Call:
    """A call with `*args` or `**kwargs`, whose arguments are not all known."""
    names = {arg.keyword.value for arg in node.args if arg.keyword is not None}
    if {"lr", "decay"} & names:
        caller.remark(
            "lr= is learning_rate= in Keras 3, and decay= a schedule: "
            "keras.optimizers.schedules.InverseTimeDecay(lr, decay_steps=1, decay_rate=decay)."
        )
    return node


def _with_args(node: cst.Call, args: list[cst.Arg]) -> cst.Call:
    return node.with_changes(args=without_last_comma(args, node.args))


def _decayed(
    rate: cst.BaseExpression, decay: cst.BaseExpression, node: cst.Call, caller: Caller
) -> cst.Call:
    function = node.func
    if isinstance(function, cst.Attribute):
        schedules = f"{source_of(function.value)}.schedules.{_SCHEDULE}"
    else:
        home = caller.dotted.rpartition(".")[0]
        caller.need(f"from {home}.schedules import {_SCHEDULE}")
        schedules = _SCHEDULE
    return call(
        schedules,
        cst.Arg(rate),
        keyword("decay_steps", expression("1")),
        keyword("decay_rate", decay),
    )


def translate_method(name: str, node: cst.Call, remark: Callable[[str], None]) -> cst.Call:
    """Translate `fit_generator` and similar, and arguments that moved to the dataset."""
    method = _METHODS.get(name)
    if method is None:
        return _without_loading(node, remark) if name in ("fit", "evaluate", "predict") else node
    assert isinstance(node.func, cst.Attribute)
    args = bound(node.args, method.parameters)
    if args is None:
        remark(f"{name} is gone; write {method.write}, with arguments of today.")
        return node
    for parameter in method.dropped:
        if parameter in args:
            _remark_on_loading(parameter, args.pop(parameter), remark)
    data = args.pop("generator", None)
    for parameter, default in method.defaults.items():
        args.setdefault(parameter, keyword(parameter, expression(default)))
    rest = named({method.renamed.get(key, key): arg for key, arg in args.items()})
    first = (
        [] if data is None else [data.with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT)]
    )
    return node.with_changes(
        func=node.func.with_changes(attr=cst.Name(method.new)),
        args=without_last_comma([*first, *rest], node.args),
    )


def _without_loading(node: cst.Call, remark: Callable[[str], None]) -> cst.Call:
    kept = []
    for arg in node.args:
        name = arg.keyword.value if arg.keyword is not None else ""
        if name in LOADING:
            _remark_on_loading(name, arg, remark)
        else:
            kept.append(arg)
    if len(kept) == len(node.args):
        return node
    return node.with_changes(args=without_last_comma(kept, node.args))


def _remark_on_loading(name: str, arg: cst.Arg, remark: Callable[[str], None]) -> None:
    if literal(arg.value) != _LOADING_DEFAULTS[name]:
        value = source_of(arg.value)
        remark(
            f"{name}={value} is an argument of keras.utils.PyDataset today: set it on the data, "
            f"as in data.{name} = {value}."
        )


def _multi_gpu(node: cst.Call, caller: Caller) -> cst.Call:
    args = bound(node.args, ("model", "gpus", "cpu_merge", "cpu_relocation"))
    if args is not None:
        args.pop("cpu_merge", None)
        relocation = args.pop("cpu_relocation", None)
        if relocation is not None and literal(relocation.value) is not False:
            args = None
    if args is None or "model" not in args or not set(args) <= {"model", "gpus"}:
        caller.need("import unisono.compat")
        return node.with_changes(func=expression("unisono.compat.multi_gpu_model"))
    caller.need(_UNISONO)
    model = args.pop("model").with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT)
    if "gpus" in args and literal(args["gpus"].value) in (None, 0):
        del args["gpus"]
    return node.with_changes(
        func=expression("unisono.parallel"),
        args=without_last_comma([model, *named(args)], node.args),
    )


def _mirrored(node: cst.Call, caller: Caller) -> cst.Call:
    args = bound(node.args, ("devices", "cross_device_ops"))
    devices = None if args is None else args.get("devices")
    names: Any = None if devices is None else literal(devices.value)
    if args is not None and names is None:
        caller.need(_UNISONO)
        return node.with_changes(func=expression("unisono.Strategy"), args=[])
    try:
        kind, ids = parse_devices(names)
    except (DeviceError, TypeError):
        kind, ids = "", []
    if kind == "gpu":
        caller.need(_UNISONO)
        return call("unisono.Strategy", keyword("gpus", expression(repr(ids))))
    caller.need("import unisono.compat")
    return node.with_changes(func=expression("unisono.compat.MirroredStrategy"))


def _get_value(node: cst.Call, caller: Caller) -> cst.Call:
    caller.need("import keras")
    return node.with_changes(func=expression("keras.ops.convert_to_numpy"))


def _set_value(node: cst.Call, caller: Caller) -> cst.Call:
    args = bound(node.args, ("x", "value"))
    if args is None or set(args) != {"x", "value"}:
        caller.remark("keras.backend.set_value is gone: write variable.assign(value).")
        return node
    return cst.Call(
        cst.Attribute(args["x"].value, cst.Name("assign")), [cst.Arg(args["value"].value)]
    )


def _list_devices(node: cst.Call, caller: Caller) -> Any:
    args = bound(node.args, ("device_type",))
    if args is None or literal(args["device_type"].value if args else None) != "GPU":
        return node
    caller.need(_UNISONO)
    return expression('[device for device in unisono.devices() if device.kind == "gpu"]')


def _set_growth(node: cst.Call, caller: Caller) -> Any:
    args = bound(node.args, ("device", "enable"))
    if args is None or "enable" not in args:
        caller.remark('set_memory_growth is old: write unisono.configure(memory="grow").')
        return node
    caller.need(_UNISONO)
    enable = args["enable"].value
    texts = {True: '"grow"', False: '"all"'}
    text = texts.get(literal(enable), f'"grow" if {source_of(enable)} else "all"')
    return call("unisono.configure", keyword("memory", expression(text)))


def _divide(node: cst.Call, caller: Caller) -> Any:
    args = bound(node.args, ("device", "logical_devices"))
    parts = args.get("logical_devices") or args.get("virtual_devices") if args else None
    limit = None
    if parts is not None and isinstance(parts.value, cst.List) and len(parts.value.elements) == 1:
        part = parts.value.elements[0].value
        inner = bound(part.args, ("memory_limit",)) if isinstance(part, cst.Call) else None
        limit = literal(inner["memory_limit"].value) if inner and len(inner) == 1 else None
    if not isinstance(limit, int):
        caller.remark('To limit the memory of a GPU write unisono.configure(memory="1GiB").')
        return node
    caller.need(_UNISONO)
    return call("unisono.configure", keyword("memory", expression(f'"{limit}MiB"')))


def _set_visible(node: cst.Call, caller: Caller) -> Any:
    args = bound(node.args, ("devices", "device_type"))
    if args is not None and "device_type" in args and literal(args["device_type"].value) != "GPU":
        return node
    gpus = _chosen(args["devices"].value) if args is not None and "devices" in args else None
    if gpus is None:
        caller.remark("Choose GPUs by their ids: write unisono.configure(gpus=[0, 1]).")
        return node
    caller.need(_UNISONO)
    if gpus == "local":
        return call("unisono.configure")  # `unisono run` has done it: an empty call is removed.
    return call("unisono.configure", keyword("gpus", expression(gpus)))


def _chosen(node: cst.BaseExpression) -> str | None:
    """The GPU ids of `gpus[0]`, `gpus[:2]` or `[gpus[0], gpus[2]]`, as source."""
    if isinstance(node, cst.List):
        parts = [_chosen(element.value) for element in node.elements]
        ids = [literal(expression(part)) if part and part != "local" else None for part in parts]
        flat = [i for each in ids if isinstance(each, list) for i in each]
        return repr(flat) if len(flat) == len(parts) and parts else None
    if not isinstance(node, cst.Subscript) or len(node.slice) != 1:
        return None
    index = node.slice[0].slice
    if isinstance(index, cst.Index):
        if "local_rank" in source_of(index):
            return "local"
        number = literal(index.value)
        return f"[{number}]" if isinstance(number, int) and number >= 0 else None
    assert isinstance(index, cst.Slice)
    first = 0 if index.lower is None else literal(index.lower)
    last = literal(index.upper)
    if (
        index.step is None
        and isinstance(first, int)
        and isinstance(last, int)
        and 0 <= first < last
    ):
        return repr(list(range(first, last)))
    return None


CALLS: dict[str, Callable[[cst.Call, Caller], Any]] = {
    "keras.utils.multi_gpu_model": _multi_gpu,
    "keras.backend.get_value": _get_value,
    "keras.backend.set_value": _set_value,
    "tensorflow.distribute.MirroredStrategy": _mirrored,
    "tensorflow.config.experimental.list_physical_devices": _list_devices,
    "tensorflow.config.list_physical_devices": _list_devices,
    "tensorflow.config.experimental.set_memory_growth": _set_growth,
    "tensorflow.config.experimental.set_visible_devices": _set_visible,
    "tensorflow.config.set_visible_devices": _set_visible,
    "tensorflow.config.experimental.set_virtual_device_configuration": _divide,
    "tensorflow.config.set_logical_device_configuration": _divide,
}
"""The translation of a call, by the old name."""
