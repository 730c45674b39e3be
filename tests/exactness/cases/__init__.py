"""All cases of the exactness contract, by group, in the order of the table."""

from exactness.case import Case, Group
from exactness.cases import custom_loops as custom_loops
from exactness.cases.added_losses import EXTRA_LOSSES
from exactness.cases.callbacks import CALLBACKS
from exactness.cases.calls import BATCHES, FIT, ORDER
from exactness.cases.dropout import DROPOUT
from exactness.cases.inputs import INPUTS, WEIGHTS
from exactness.cases.losses import LOSSES
from exactness.cases.metrics import METRICS
from exactness.cases.models import MODELS
from exactness.cases.norms import NORMS
from exactness.cases.optimizers import GRADIENTS, OPTIMIZERS, SCHEDULES
from exactness.cases.precision import PRECISION
from exactness.cases.sequences import SEQUENCES
from exactness.cases.sizes import SIZES
from exactness.cases.sources import SOURCES
from exactness.cases.train_steps import TRAIN_STEPS
from exactness.cases.variables import VARIABLES

GROUPS: tuple[Group, ...] = (
    OPTIMIZERS,
    SCHEDULES,
    GRADIENTS,
    PRECISION,
    NORMS,
    SEQUENCES,
    DROPOUT,
    LOSSES,
    EXTRA_LOSSES,
    METRICS,
    INPUTS,
    WEIGHTS,
    VARIABLES,
    MODELS,
    TRAIN_STEPS,
    SIZES,
    FIT,
    BATCHES,
    ORDER,
    SOURCES,
    CALLBACKS,
)
CASES: tuple[Case, ...] = tuple(case for group in GROUPS for case in group.cases)
