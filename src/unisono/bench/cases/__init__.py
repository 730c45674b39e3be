"""All cases of the exactness contract, by group, in the order of the table."""

from unisono.bench.case import Case, Group
from unisono.bench.cases.added_losses import EXTRA_LOSSES
from unisono.bench.cases.norms import NORMS
from unisono.bench.cases.optimizers import GRADIENTS, OPTIMIZERS, SCHEDULES
from unisono.bench.cases.precision import PRECISION
from unisono.bench.cases.sequences import SEQUENCES
from unisono.bench.cases.variables import VARIABLES

GROUPS: tuple[Group, ...] = (
    OPTIMIZERS,
    SCHEDULES,
    GRADIENTS,
    PRECISION,
    NORMS,
    SEQUENCES,
    EXTRA_LOSSES,
    VARIABLES,
)
CASES: tuple[Case, ...] = tuple(case for group in GROUPS for case in group.cases)
