"""For training programs: options, data, placement of replicas, progress and results.

    run = training.begin(__doc__, epochs=20, batch_per_replica=64, learning_rate=0.01)

The recipes use it, and your own programs can. Importing it loads no framework, since the options
decide on the backend and the number of processes.
"""

from unisono.training.run import Run, begin

__all__ = ["Run", "begin"]
