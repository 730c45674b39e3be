"""Every exception that unisono raises.

    UnisonoError
    ├── BenchError (RuntimeError)         a benchmark could not be run, or a process of it ended
    ├── DataError (ValueError)            data is missing, damaged, or not of the form it has to be
    ├── DeviceError (ValueError)          devices were asked for that are not there
    ├── DisagreementError (RuntimeError)  processes of one run do different things
    ├── LaunchError (RuntimeError)        a run of several processes could not begin
    ├── LegacyError (RuntimeError)        an old program does what has no meaning today
    │   └── LegacyImportError (ImportError)   or asks for a name that nothing takes the place of
    ├── ModelError (TypeError)            what was given is not a model we can train
    ├── OutputError (OSError)             a file cannot be written where it was asked for
    ├── SettingError (ValueError)         a number or a name that training cannot go by
    ├── SlurmError (RuntimeError)         Slurm cannot do what was asked of it, or a job of it
    ├── SourceError (ValueError)          a file to be migrated cannot be read or written
    ├── StartedError (RuntimeError)       the backend fixed its devices before we were asked
    ├── StrategyError (RuntimeError)      a part of an own training loop was used where it cannot be
    ├── VersionError (RuntimeError)       a framework is newer than those that were tested
    └── WorkerError (RuntimeError)        a replica's process died or does not answer
        └── PeerLostError (WorkerError)   seen from another process, whose work it ended

    Preempted (SystemExit)                training has made room, as a cluster asked it to

Each message says what was asked, what was found, and what to do.
"""

PREEMPTED_CODE = 75
"""The exit code of a run that has made room and wants to go on later, as of a temporary failure."""


class UnisonoError(Exception):
    """Base of all of unisono's own errors."""


class BenchError(UnisonoError, RuntimeError):
    """A benchmark was asked for what is not there, or a process of it ended before it should."""


class DataError(UnisonoError, ValueError):
    """Data for training is missing, damaged, or not of the form that it has to be."""


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


class OutputError(UnisonoError, OSError):
    """A model or the results of a training cannot be written where they were asked for."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # OSError's own would leave out the advice.


class SettingError(UnisonoError, ValueError):
    """A setting of a training makes no sense, or contradicts another one."""


class SlurmError(UnisonoError, RuntimeError):
    """Slurm is not there, refuses, or was asked for what it does not have."""


class SourceError(UnisonoError, ValueError):
    """A file that was to be migrated is not what it seems, or could not be replaced."""


class StartedError(UnisonoError, RuntimeError):
    """The backend has already fixed its devices in a way that forbids the request."""


class StrategyError(UnisonoError, RuntimeError):
    """A part of a user's own training loop was used where it cannot be."""


class VersionError(UnisonoError, RuntimeError):
    """Keras or its backend is newer than the releases that unisono was tested with."""


class WorkerError(UnisonoError, RuntimeError):
    """A replica's process ended or stopped answering."""


class PeerLostError(WorkerError):
    """Another process of the run is gone: an echo of its failure, and not the cause."""


class Preempted(SystemExit):
    """Training has stopped to make room, after all callbacks were told; it ends the program.

    No `Exception`, as it is no failure: a program that deals with those must not go on as if the
    training were complete.
    """

    def __init__(self) -> None:
        super().__init__(PREEMPTED_CODE)
