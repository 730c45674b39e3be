"""Every exception that unisono raises.

    UnisonoError
    ├── DeviceError (ValueError)          devices were asked for that are not there
    ├── DisagreementError (RuntimeError)  processes of one run do different things
    ├── LaunchError (RuntimeError)        a run of several processes could not begin
    ├── LegacyError (RuntimeError)        an old program does what has no meaning today
    │   └── LegacyImportError (ImportError)   or asks for a name that nothing takes the place of
    ├── ModelError (TypeError)            what was given is not a model we can train
    ├── SourceError (ValueError)          a file to be migrated cannot be read or written
    ├── StartedError (RuntimeError)       the backend fixed its devices before we were asked
    ├── StrategyError (RuntimeError)      a part of an own training loop was used where it cannot be
    └── WorkerError (RuntimeError)        a replica's process died or does not answer
        └── PeerLostError (WorkerError)   seen from another process, whose work it ended

Each message says what was asked, what was found, and what to do.
"""


class UnisonoError(Exception):
    """Base of all of unisono's own errors."""


class DeviceError(UnisonoError, ValueError):
    """Devices were asked for that this machine does not have, or that make no sense."""


class DisagreementError(UnisonoError, RuntimeError):
    """Processes of one run came to the same point with different things to do, or not at all."""


class LaunchError(UnisonoError, RuntimeError):
    """A run of several processes could not begin: its description or its meeting point is wrong."""


class LegacyError(UnisonoError, RuntimeError):
    """An old program does something that cannot be translated to today's Keras."""


class LegacyImportError(LegacyError, ImportError):
    """An old program asks for a name that nothing takes the place of."""


class ModelError(UnisonoError, TypeError):
    """The object given is not a Keras model, or one that cannot be split over replicas."""


class SourceError(UnisonoError, ValueError):
    """A file that was to be migrated is not what it seems, or could not be replaced."""


class StartedError(UnisonoError, RuntimeError):
    """The backend has already fixed its devices in a way that forbids the request."""


class StrategyError(UnisonoError, RuntimeError):
    """A part of a user's own training loop was used where it cannot be."""


class WorkerError(UnisonoError, RuntimeError):
    """A replica's process ended or stopped answering."""


class PeerLostError(WorkerError):
    """Another process of the run is gone: an echo of its failure, and not the cause."""
