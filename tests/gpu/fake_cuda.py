"""torch with GPUs that are not there: `cuda` tensors that have a device, shape and type, no values.

Mixed devices, copies between host and device, kernels and collectives of a step show as on GPUs.
What does not: values, streams and their order, memory, more than one process. torch without CUDA
cannot record a graph on such tensors, so `backward` only fills in gradients, last variables first,
and calls the hooks on them. Use it in a process of its own, before Keras is imported: it replaces
parts of torch for good.
"""

import contextlib
import gc
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

_current = 0


@contextlib.contextmanager
def fake_gpus(num_gpus: int = 4) -> Iterator[None]:
    """Have torch believe in GPUs inside."""
    torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
    torch.cuda.device_count, torch.cuda.current_device = (lambda: num_gpus), (lambda: _current)
    torch.cuda.set_device = _set_device
    torch.cuda._lazy_call = lambda function: function()
    torch.cuda.Stream, torch.cuda.stream = _Stream, lambda stream: contextlib.nullcontext()
    torch.cuda.current_stream = _Stream
    torch.Generator = _Generator
    torch.cuda.default_generators = tuple(_Generator() for _ in range(num_gpus))
    torch.Tensor.pin_memory = lambda tensor, *device: tensor
    torch.Tensor.record_stream = lambda tensor, stream: None
    dist.ProcessGroupNCCL = StubNCCL
    FakeTensor.__reduce_ex__ = _reduce
    torch.Tensor.backward = _backward
    torch.Tensor.register_post_accumulate_grad_hook = _register_hook
    modes = (torch.no_grad(), _WithoutDriver(allow_non_fake_inputs=True), _CurrentDevice())
    with contextlib.ExitStack() as stack:
        for mode in (*modes, _Values()):
            stack.enter_context(mode)
        yield


# -- autograd -------------------------------------------------------------------------------------

_hooks: dict[int, dict[int, Any]] = {}


def _register_hook(parameter: Any, hook: Any) -> Any:
    hooks = _hooks.setdefault(id(parameter), {})
    hooks[id(hook)] = hook
    return _Handle(lambda: hooks.pop(id(hook), None))


class _Handle:
    def __init__(self, remove: Any) -> None:
        self.remove = remove


def _backward(loss: Any, *args: Any, **kwargs: Any) -> None:
    import keras

    # There is no graph to ask for the variables: all that could be trained are.
    variables = [o for o in gc.get_objects() if issubclass(type(o), keras.Variable)]
    for parameter in reversed([variable._value for variable in variables]):
        if parameter is not None and parameter.requires_grad and parameter.device == loss.device:
            parameter.grad = torch.zeros_like(parameter)
            for hook in list(_hooks.get(id(parameter), {}).values()):
                hook(parameter)


# -- the device -----------------------------------------------------------------------------------


def _set_device(device: Any) -> None:
    global _current
    _current = device if isinstance(device, int) else torch.device(device).index


_dispatching = threading.RLock()


class _WithoutDriver(FakeTensorMode):
    avoid_device_init = property(lambda self: True)

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        # The mode notes in itself that an op runs, and other threads run ops meanwhile.
        with _dispatching:
            return super().__torch_dispatch__(*args, **kwargs)


class _CurrentDevice(TorchFunctionMode):
    """`cuda` without a number is the current device, which torch would ask the driver for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _numbered(value) for name, value in (kwargs or {}).items()}
        kwargs.pop("generator", None)  # Those of GPUs are in a library that is not here.
        # Past Python's own methods, which ask for the driver.
        if getattr(func, "__name__", "") in _READS and args[0].device.type == "cuda":
            return _READS[func.__name__](torch.ops.aten._local_scalar_dense.default(args[0]))
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args, **kwargs)
        if func is torch.Tensor.__getitem__ and args[0].device.type == "cuda":
            return _part_of(*args)
        if func == torch.Tensor.data.__set__ and args[0].device != args[1].device:
            args[0].fake_device = args[1].device  # It would keep its own.
        if func is torch.device and len(args) > 1:
            return func(*args)
        return func(*map(_numbered, args), **kwargs)


def _part_of(tensor: Any, key: Any) -> Any:
    dim = 0
    for part in key if isinstance(key, tuple) else (key,):
        if isinstance(part, int):
            tensor = torch.select(tensor, dim, part)
            continue
        if part is None:
            tensor = torch.unsqueeze(tensor, dim)
        elif part is Ellipsis:
            dim = tensor.ndim - 1 - key.index(Ellipsis)
            continue
        else:
            assert isinstance(part, slice), f"an index of type {type(part)}"
            stop = tensor.shape[dim] if part.stop is None else part.stop
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, part.start, stop, part.step or 1)
        dim += 1
    return tensor


_READS = {"__int__": int, "__float__": float, "__bool__": bool, "__index__": int} | {
    "item": lambda value: value,
    "tolist": lambda value: value,
    "__array__": np.asarray,
}


def _numbered(value: Any) -> Any:
    is_bare = (
        value == "cuda"
        if isinstance(value, str)
        else isinstance(value, torch.device) and (value.type == "cuda" and value.index is None)
    )
    return torch.device("cuda", _current) if is_bare else value


class _Values(torch.utils._python_dispatch.TorchDispatchMode):
    """A value for who reads one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::_local_scalar_dense":
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func._schema.name == "aten::equal":
            return True
        return func(*args, **(kwargs or {}))


def _reduce(tensor: Any, protocol: int) -> Any:
    return _restored, (tuple(tensor.shape), tensor.dtype, tensor.device.type)


def _restored(shape: Any, dtype: Any, device: str) -> Any:
    assert device == "cpu", "a process that sees another GPU cannot load this tensor"
    return torch.empty(shape, dtype=dtype)


class _Generator(torch.Generator):
    """Of the CPU, whatever the device."""

    def __new__(cls, device: Any = None) -> "_Generator":
        return super().__new__(cls)


class _Stream:
    def __init__(self, *device: Any) -> None:
        """Of any device."""

    def wait_stream(self, other: Any) -> None:
        """Nothing is ever under way."""

    def synchronize(self) -> None:
        """Nothing is ever under way."""


class _Done:
    def wait(self) -> bool:
        return True


class StubNCCL:
    """Checks of its tensors what ProcessGroupNCCL checks."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        self._size = size
        self.is_aborted = self.is_shut_down = False

    def size(self) -> int:
        return self._size

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any) -> _Done:
        return _taken(*tensors)

    def allgather(self, outputs: Any, inputs: Any) -> _Done:
        return _taken(*inputs, *outputs[0])

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor) -> _Done:
        return _taken(output, own)

    def alltoall_base(self, output: torch.Tensor, own: torch.Tensor, *sizes: Any) -> _Done:
        return _taken(output, own)

    def broadcast(self, tensor: torch.Tensor, root: int) -> _Done:
        return _taken(tensor)

    def abort(self) -> None:
        self.is_aborted = True

    def shutdown(self) -> None:
        self.is_shut_down = True


def _taken(*tensors: torch.Tensor) -> _Done:
    for tensor in tensors:
        assert tensor.device.type == "cuda", f"a collective of a tensor on {tensor.device}"
        assert tensor.is_contiguous(), "a collective of a tensor that is not contiguous"
    return _Done()


# -- workers --------------------------------------------------------------------------------------


class StandInWorkers:
    """In the place of launch.workers.Workers: processes that answer, and read their rows."""

    def __init__(self, module: str, size: int, arguments: Any, envs: Any) -> None:
        self.size = size
        self.sent: list[str] = []
        self._workers = [_StandIn(rank, size) for rank in range(1, size)]

    def __iter__(self) -> Iterator["_StandIn"]:
        return iter(self._workers)

    @property
    def are_alive(self) -> bool:
        return all(worker.is_alive for worker in self._workers)

    def send(self, message: Any) -> None:
        self.sent.append(message[0])
        for worker in self._workers:
            worker.take(message)

    def receive(self, timeout_s: float) -> list[str]:
        return ["ready"] * len(self._workers)

    def pending(self, timeout_s: float) -> Any:
        return next(((worker, worker.report) for worker in self._workers if worker.report), None)

    def end(self) -> None:
        for worker in self._workers:
            worker.channel.close()

    kill = end


class _StandIn:
    def __init__(self, rank: int, size: int) -> None:
        from unisono.launch.channel import Channel

        self.rank = rank
        self.is_alive = True
        self.report: Any = None
        self._size = size
        self.channel, self._theirs = Channel.pair()
        self._memory: Any = None
        self.channel.send_memory = self._map

    def take(self, message: Any) -> None:
        if message[0] == "step":
            np.frombuffer(self._memory.buffer, np.int64, self._size)[self.rank] += 1

    def fail(self, error: BaseException) -> None:
        """Report an error and end, as a worker does."""
        from unisono.launch.workers import dumps

        self.report, self.is_alive = ("error", dumps(error), "Traceback of the worker"), False
        self._theirs.close()
        time.sleep(0.1)

    def how_it_ended(self) -> str:
        return f"Replica {self.rank} exited with code 1."

    def _map(self, memory: Any) -> None:
        self._memory = memory


class InlineExecutor:
    """Runs functions at once: a fake tensor mode does not work in two threads."""

    def __init__(self, *args: Any) -> None:
        """As of a thread pool."""

    def __enter__(self) -> "InlineExecutor":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is under way."""

    def submit(self, function: Any, *args: Any) -> "_Ran":
        return _Ran(function(*args))


class _Ran:
    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        return self._value
