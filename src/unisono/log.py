"""The logger of the package, and where its lines go unless a program decides otherwise.

Announcements go to stdout and warnings to stderr, as `unisono: ...`. They are not passed on to the
root logger, which notebooks configure to print each record once more. A program changes all of it
as for any logger: `logging.getLogger("unisono").setLevel("WARNING")` silences announcements.
"""

import logging
import sys

logger = logging.getLogger("unisono")


class _Printing(logging.Handler):
    """Writes to the present stdout or stderr, which tests and notebooks replace."""

    def emit(self, record: logging.LogRecord) -> None:
        is_warning = record.levelno >= logging.WARNING
        stream = sys.stderr if is_warning else sys.stdout
        try:
            # A progress bar leaves the cursor behind it.
            start = "\n" if is_warning and stream.isatty() else ""
            stream.write(f"{start}unisono: {self.format(record)}\n")
            stream.flush()
        except Exception:
            self.handleError(record)


if not logger.handlers:
    logger.addHandler(_Printing())
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
