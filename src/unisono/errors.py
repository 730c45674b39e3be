"""Every exception that unisono raises, by the phase in which it is raised.

    UnisonoError
    ├── ConfigurationError (ValueError)  before training: a setting, a version, a call out of place
    │   ├── DeviceError (ValueError)         devices that are not there, or counts below one
    │   ├── StartedError (RuntimeError)      the backend fixed its devices before the call
    │   ├── VersionError (RuntimeError)      a framework newer than those tested
    │   ├── StrategyError (RuntimeError)     a part of a custom training loop used out of place
    │   └── LegacyError (RuntimeError)       an old program does what Keras 3 cannot do
    │       └── LegacyImportError (ImportError)  or imports a name that has no replacement
    ├── ModelError (TypeError)           the model cannot be trained on replicas
    ├── DataError (ValueError)           data or a source file is missing, damaged or malformed
    ├── LaunchError (RuntimeError)       processes, or a Slurm job, could not be started
    ├── WorkerError (RuntimeError)       during the run: a process died or does not answer
    │   ├── PeerLostError (RuntimeError)     seen from another process, whose work it ended
    │   └── DisagreementError (RuntimeError) processes of one run make different calls
    └── OutputError (OSError)            a file cannot be written where it was asked for

    Preempted (SystemExit)               training was stopped by a preemption; not an error

`unisono` exports the first level and `Preempted`; the leaves are imported from `unisono.errors`.
Each message says what was asked, what was found, and what to do.
"""

PREEMPTED_CODE = 75
"""Exit code of a preempted run, which can be resumed: EX_TEMPFAIL of sysexits.h."""


class UnisonoError(Exception):
    """Base class of all errors of unisono."""


# Both built-in classes: the errors that it replaces were one or the other.
class ConfigurationError(UnisonoError, ValueError, RuntimeError):
    """What was asked for cannot be done: settings, versions, or a call in the wrong place."""


class DeviceError(ConfigurationError):
    """Devices were asked for that this machine does not have, or a count that makes no sense."""


class StartedError(ConfigurationError):
    """The backend has already fixed its devices, which rules out the request."""


class StrategyError(ConfigurationError):
    """A part of a custom training loop was used where it cannot be."""


class LegacyError(ConfigurationError):
    """An old program does something that cannot be translated to Keras 3."""


class LegacyImportError(LegacyError, ImportError):
    """An old program imports a name that has no replacement."""


class VersionError(ConfigurationError):
    """A framework is newer than those that were tested."""


class ModelError(UnisonoError, TypeError):
    """The object is not a Keras model, or not one that can be trained on replicas."""


class DataError(UnisonoError, ValueError):
    """Training data, or a source file to migrate, is missing, damaged or malformed."""


class LaunchError(UnisonoError, RuntimeError):
    """Processes of a run, or a Slurm job, could not be started."""


class WorkerError(UnisonoError, RuntimeError):
    """A process of the run ended or stopped answering."""


class PeerLostError(WorkerError):
    """Another process of the run is gone: a consequence of its failure, not the cause."""


class DisagreementError(WorkerError):
    """Processes of one run made different calls, or one of them ended before a collective."""


class OutputError(UnisonoError, OSError):
    """A model or the results of a training cannot be written where they were asked for."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # OSError's own would leave out the advice.


class Preempted(SystemExit):
    """Training was stopped by a preemption, after all callbacks ended; it ends the program.

    Not an `Exception`: a program that handles errors must not continue as if training were
    complete.
    """

    def __init__(self) -> None:
        super().__init__(PREEMPTED_CODE)


# Names of earlier releases.
SettingError = ConfigurationError
BenchError = LaunchError
SlurmError = LaunchError
SourceError = DataError
