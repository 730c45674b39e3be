"""What a program's variables are, as far as their assignments tell."""

import libcst as cst

from unisono.compat.knowledge import KEYS
from unisono.compat.lookup import canonical, today
from unisono.compat.migrate.statements import Step

_OPTIMIZERS = "keras.optimizers."


class Facts(Step):
    """Looks at a program and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizers = {"optimizer"}
        """Names of variables that hold an optimizer..."""
        self.histories: set[str] = {"logs"}
        """...or a dictionary of losses and metrics."""
        self.metrics: set[str] = set()
        """Names of variables that are given to `compile` as its metrics."""
        self.has_old_keys = False
        """Whether "acc" or its like is in the program, and not told to be something else."""
        self.bound: set[str] = set()
        """Every name that the program gives something to."""
        self.imported: dict[str, str] = {}

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        if isinstance(node.target, cst.Name):
            self.bound.add(node.target.value)

    def visit_Assign(self, node: cst.Assign) -> None:
        names = {t.target.value for t in node.targets if isinstance(t.target, cst.Name)}
        if isinstance(node.value, cst.Call):
            dotted = self.dotted(node.value.func) or ""
            if today(canonical(dotted)).startswith(_OPTIMIZERS):
                self.optimizers |= names
        elif isinstance(node.value, cst.Attribute) and node.value.attr.value == "history":
            self.histories |= names

    def visit_Arg(self, node: cst.Arg) -> None:
        is_metrics = node.keyword is not None and node.keyword.value == "metrics"
        if is_metrics and isinstance(node.value, cst.Name):
            self.metrics.add(node.value.value)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        self.has_old_keys |= node.raw_value in KEYS

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        if isinstance(node.names, cst.ImportStar) or node.module is None:
            return
        module = cst.Module([]).code_for_node(node.module)
        for alias in node.names:
            name = cst.Module([]).code_for_node(alias.name)
            known_as = alias.asname.name if alias.asname is not None else alias.name
            self.imported[cst.Module([]).code_for_node(known_as)] = f"{module}.{name}"

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.bound.add(node.name.value)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.bound.add(node.name.value)

    def visit_Param(self, node: cst.Param) -> None:
        self.bound.add(node.name.value)

    def is_free(self, name: str, dotted: str) -> bool:
        """Whether a name may be bound to an import of `dotted` without taking it from another."""
        return name not in self.bound and canonical(self.imported.get(name, dotted)) == dotted
