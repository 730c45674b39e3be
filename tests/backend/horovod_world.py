"""Run by test_horovod.py in two processes: checks of unisono.horovod, their results as JSON.

`python horovod_world.py FOLDER [check ...]`; FOLDER is for files.
"""

import json
import sys

import unisono.horovod as hvd

told = {}
try:
    hvd.rank()
except ValueError as error:
    told["before"] = str(error)
hvd.init()

import horovod_checks
import horovod_training

CHECKS = {
    name.removeprefix("check_"): function
    for module in (horovod_checks, horovod_training)
    for name, function in vars(module).items()
    if name.startswith("check_")
}

if __name__ == "__main__":
    for name in sys.argv[2:] or CHECKS:
        told[name] = CHECKS[name]()
    print(json.dumps(told))
