"""All cases of the exactness contract, by group, in the order of the table."""

from unisono.bench.case import Case, Group
from unisono.bench.cases.added_losses import EXTRA_LOSSES
from unisono.bench.cases.callbacks import CALLBACKS
from unisono.bench.cases.calls import BATCHES, FIT, ORDER
from unisono.bench.cases.dropout import DROPOUT
from unisono.bench.cases.inputs import INPUTS, WEIGHTS
from unisono.bench.cases.losses import LOSSES
from unisono.bench.cases.metrics import METRICS
from unisono.bench.cases.models import MODELS
from unisono.bench.cases.norms import NORMS
from unisono.bench.cases.optimizers import GRADIENTS, OPTIMIZERS, SCHEDULES
from unisono.bench.cases.precision import PRECISION
from unisono.bench.cases.sequences import SEQUENCES
from unisono.bench.cases.sizes import SIZES
from unisono.bench.cases.sources import SOURCES
from unisono.bench.cases.train_steps import TRAIN_STEPS
from unisono.bench.cases.variables import VARIABLES

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
