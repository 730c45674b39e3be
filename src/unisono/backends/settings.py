"""Applies the policy of this process to the backend that Keras uses, before its devices start.

What a backend reads from the environment is set at once, what takes a call on the framework right
after its import. No framework is imported here: a call may come before Keras has chosen one.
"""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from unisono.backends.jax.devices import JaxSettings
from unisono.backends.tensorflow.settings import TensorFlowSettings
from unisono.backends.torch.settings import TorchSettings
from unisono.devices import Grant, Policy, grant_of, select, set_policy
from unisono.errors import StartedError
from unisono.imports import after_import, keras_backend


class Settings(Protocol):
    """One backend's way of keeping to a policy."""

    framework: str
    module: str
    first_use: str

    def why_too_late(self, module: Any, policy: Policy) -> str | None:
        """What has started and fixed what the policy would set; None while there is time."""

    def set_variables(self, grant: Grant) -> None:
        """Set what the framework reads from the environment."""

    def apply(self, module: Any, grant: Grant) -> None:
        """Set what takes a call; the framework is imported and has not started."""


_SETTINGS: dict[str, Settings] = {
    settings.module: settings for settings in (JaxSettings(), TensorFlowSettings(), TorchSettings())
}


def apply_policy(policy: Policy, before: Policy) -> None:
    """Put a policy in force that adds to the one before, which stays as it is on an error."""
    added = _difference(policy, before)
    backend = keras_backend()
    settings = _SETTINGS.get(backend)
    if settings is not None and backend in sys.modules:
        _refuse_if_too_late(settings, added)
    selection = select(policy.gpus if before.gpus is None else None)
    granted = grant_of(dataclasses.replace(added, memory=policy.memory), selection)
    with _environment_restored_on_error():
        if added.gpus is not None:
            selection.hide_others()
        for each in _SETTINGS.values():
            each.set_variables(granted)
        for name, each in _SETTINGS.items():
            # Others than the backend, say TensorFlow for its tf.data, take devices as well.
            if name not in sys.modules or not each.why_too_late(sys.modules[name], added):
                after_import(name, functools.partial(each.apply, grant=granted))
    set_policy(policy)


@contextlib.contextmanager
def _environment_restored_on_error() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    except BaseException:
        os.environ.clear()
        os.environ.update(before)
        raise


def _refuse_if_too_late(settings: Settings, added: Policy) -> None:
    started = settings.why_too_late(sys.modules[settings.module], added)
    if started:
        raise StartedError(
            f"Asked for unisono.configure({added}); {started}, and what it took stays. Move the "
            "line `unisono.configure(...)` above the first line that uses "
            f"{settings.framework} ({settings.first_use}), best right below `import unisono`."
        )


def _difference(policy: Policy, before: Policy) -> Policy:
    """What of a policy was not in force before."""
    changed = {key: value for key, value in vars(policy).items() if value != getattr(before, key)}
    return Policy(**changed)
