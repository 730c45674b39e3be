"""Lines of the package go to stdout and stderr, and a program can redirect or silence them."""

import logging
import subprocess
import sys

from unisono.log import logger

PROGRAM = """
import logging
logging.basicConfig(format="root: %(message)s")
from unisono.log import logger
logger.info("announced")
logger.warning("warned")
logging.getLogger("unisono").setLevel("WARNING")
logger.info("silenced")
"""


def test_announcements_and_warnings_are_printed_once_and_can_be_silenced():
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("unisono: announced\n", "unisono: warned\n")


def test_the_logger_has_the_name_of_the_package():
    assert logger is logging.getLogger("unisono")
