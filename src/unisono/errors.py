"""Every exception that unisono raises.

    UnisonoError
    ├── DeviceError (ValueError)      devices were asked for that are not there
    ├── ModelError (TypeError)        what was given is not a model we can train
    ├── StartedError (RuntimeError)   the backend fixed its devices before we were asked
    ├── StrategyError (RuntimeError)  a part of an own training loop was used where it cannot be
    └── WorkerError (RuntimeError)    a replica's process died or does not answer

Each message says what was asked, what was found, and what to do.
"""


class UnisonoError(Exception):
    """Base of all of unisono's own errors."""


class DeviceError(UnisonoError, ValueError):
    """Devices were asked for that this machine does not have, or that make no sense."""


class ModelError(UnisonoError, TypeError):
    """The object given is not a Keras model, or one that cannot be split over replicas."""


class StartedError(UnisonoError, RuntimeError):
    """The backend has already fixed its devices in a way that forbids the request."""


class StrategyError(UnisonoError, RuntimeError):
    """A part of a user's own training loop was used where it cannot be."""


class WorkerError(UnisonoError, RuntimeError):
    """A replica's process ended or stopped answering."""
