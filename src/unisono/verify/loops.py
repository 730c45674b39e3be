"""Records the steps of custom training loops, from one batch of a distributed data set to the next.

A loop's optimizers belong to no model, so models and optimizers of the process are searched. A
stateless loop of JAX keeps its weights in variables of the program, where they are read: in the
frame that iterates the data set. Loops without a distributed data set are recorded where an
optimizer is applied outside of compiled functions.
"""

import contextlib
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono.verify.records import sample
from unisono.verify.sites import is_of_user, user_site

if TYPE_CHECKING:
    from unisono.verify.record import ProgramRecorder

_MOST_IN_STEP = 256
_MOST_LEAVES = 2000


class LoopRecorder:
    """See strategy.LoopObserver."""

    def __init__(self, recorder: "ProgramRecorder") -> None:
        self._recorder = recorder
        self._batch: tuple[int | None, int] | None = None
        self.is_in_step = False

    def before(self, batch: Any, num_rows: int) -> None:
        from unisono.verify.calls import checksum_and_rows

        self._batch = checksum_and_rows(batch)
        self.is_in_step = True
        recorder = self._recorder
        recorder.record.num_distributed += 1
        site = user_site()
        if site is not None and site not in recorder.record.loop_sites:
            recorder.record.loop_sites.append(site)
        recorder.find_loop_models()

    def after(self) -> bool:
        self.is_in_step = False
        recorder = self._recorder
        recorder.add_loop_step(self._batch)
        if recorder.record.backend == "jax":
            self._add_program_values(_user_frame())
        return not recorder.is_enough

    def _add_program_values(self, frame: FrameType | None) -> None:
        """Arrays of JAX among the variables of the function that has the loop."""
        if frame is None:
            return
        import jax

        step = self._recorder.record.steps[-1]
        for name, value in list(frame.f_locals.items()):
            if name.startswith("__") or isinstance(value, (type(sys), type)):
                continue
            with contextlib.suppress(Exception):
                leaves = jax.tree.leaves(value)
                arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
                if not arrays or len(arrays) != len(leaves) or len(leaves) > _MOST_LEAVES:
                    continue
                found = [sample(_own(array), _MOST_IN_STEP) for array in arrays]
                step.program[name] = found


def _own(array: Any) -> Any:
    """The values of an array of JAX, of this process' copy where all have one."""
    if not array.is_fully_addressable:
        if not array.is_fully_replicated:
            raise ValueError("sharded over processes")
        array = array.addressable_data(0)
    return np.asarray(array)


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_of_user(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def watch_native_steps(recorder: "ProgramRecorder") -> None:
    """Record steps of optimizers that a loop applies by itself, outside of `fit`."""
    import keras

    from unisono.replication.callback_ranks import is_alone

    def note() -> None:
        if recorder.is_recording_step or is_alone():
            return
        recorder.find_loop_models()
        recorder.add_loop_step(None)
        site = user_site()
        if site is not None and site not in recorder.record.loop_sites:
            recorder.record.loop_sites.append(site)
        recorder.end_loop_if_enough()

    plain = keras.optimizers.Optimizer.apply

    def apply(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(optimizer, *args, **kwargs)
        if _is_eager():
            note()
        return result

    if keras.backend.backend() != "jax":  # There optimizers are applied inside of compiled steps.
        keras.optimizers.Optimizer.apply = apply
    if keras.backend.backend() == "torch":
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda *call: note())


def _is_eager() -> bool:
    tensorflow = sys.modules.get("tensorflow")
    import keras

    if keras.backend.backend() != "tensorflow" or tensorflow is None:
        return True
    return bool(tensorflow.executing_eagerly())
