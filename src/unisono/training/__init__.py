"""What training programs share: options, data, the place of replicas, progress and results.

    run = training.begin(__doc__, epochs=20, batch_per_replica=64, learning_rate=0.01)

The recipes are written with it, and so can be programs of your own. Importing it loads no
framework, since the options decide which backend there will be and in how many processes.
"""

from unisono.training.beginning import begin
from unisono.training.run import Run

__all__ = ["Run", "begin"]
