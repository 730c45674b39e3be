"""`unisono doctor`: whether this machine is set up for training on many devices, in words.

A check is a function that returns results; what touches a framework, a GPU or NCCL runs in a child
process with a time limit (child.py), so that a crash or a hang is a verdict like any other.
"""

from unisono.doctor.examination import CHECKS, Examination, Report, examine
from unisono.doctor.results import Result, Verdict

__all__ = ["CHECKS", "Examination", "Report", "Result", "Verdict", "examine"]
