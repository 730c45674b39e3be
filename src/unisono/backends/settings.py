"""Apply the device policy of this process to every framework, before its devices start.

What a framework reads from the environment is set at once; what takes a call, right after its
import. No framework is imported here: a call may come before Keras has chosen one.
"""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator

from unisono.backends import FRAMEWORKS, Framework
from unisono.devices import Policy, grant_of, select, set_policy
from unisono.errors import StartedError
from unisono.imports import after_import, keras_backend


def apply_policy(policy: Policy, before: Policy) -> None:
    """Apply a policy that adds to the one before, which stays in force on an error."""
    added = _difference(policy, before)
    framework = FRAMEWORKS.get(keras_backend())
    if framework is not None and framework.name in sys.modules:
        _refuse_if_too_late(framework, added)
    selection = select(policy.gpus if before.gpus is None else None)
    granted = grant_of(dataclasses.replace(added, memory=policy.memory), selection)
    with _environment_restored_on_error():
        if added.gpus is not None:
            selection.hide_others()
        for each in FRAMEWORKS.values():
            each.set_variables(granted)
        for name, each in FRAMEWORKS.items():
            # Not only Keras' backend: TensorFlow takes devices for tf.data as well.
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


def _refuse_if_too_late(framework: Framework, added: Policy) -> None:
    started = framework.why_too_late(sys.modules[framework.name], added)
    if started:
        raise StartedError(
            f"Asked for unisono.configure({added}); {started}, and what it took stays. Move the "
            "line `unisono.configure(...)` above the first line that uses "
            f"{framework.title} ({framework.first_use}), best right below `import unisono`."
        )


def _difference(policy: Policy, before: Policy) -> Policy:
    """What of a policy was not in force before."""
    changed = {key: value for key, value in vars(policy).items() if value != getattr(before, key)}
    return Policy(**changed)
