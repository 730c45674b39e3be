"""Keys of histories and logs (`acc` becomes `accuracy`), and what a program's variables hold."""

import re
from typing import Any

import libcst as cst

from unisono.compat.knowledge import KEYS
from unisono.compat.lookup import canonical, today
from unisono.compat.migrate.steps import MigrationStep, literal, source_of, text_like

_OPTIMIZERS = "keras.optimizers."


class KnownVariables(MigrationStep):
    """What is known about a program's variables from their assignments."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizers = {"optimizer"}
        """Variables that hold an optimizer."""
        self.histories: set[str] = {"logs"}
        """Variables that hold a dictionary of losses and metrics."""
        self.metrics: set[str] = set()
        """Variables that are passed to `compile` as metrics."""
        self.has_old_keys = False
        """Whether the program contains an old key such as "acc"."""
        self.bound: set[str] = set()
        """All names that the program binds."""
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
        """Whether a name can be bound to an import of `dotted` without a conflict."""
        return name not in self.bound and canonical(self.imported.get(name, dotted)) == dotted


_MONITORS = {"EarlyStopping": 0, "ReduceLROnPlateau": 0, "ModelCheckpoint": 1}
"""Callbacks, and the position of their `monitor` argument."""

_METRICS_OF_COMPILE = 2
_COMPUTED = (
    "A key of a history is computed here: "
    + ", ".join(f'"{old}" is "{new}"' for old, new in KEYS.items())
    + " in Keras 3."
)


class Keys(MigrationStep):
    """Rewrites keys where they are read, monitored, formatted into file names, or compiled."""

    def __init__(self) -> None:
        super().__init__()
        self._facts = KnownVariables()

    def visit_Module(self, node: cst.Module) -> None:
        self._facts.metadata = self.metadata
        node.visit(self._facts)

    def leave_Subscript(self, original_node: cst.Subscript, updated_node: cst.Subscript) -> Any:
        if len(updated_node.slice) != 1 or not self._is_history(original_node.value):
            return updated_node
        index = updated_node.slice[0].slice
        if not isinstance(index, cst.Index):
            return updated_node
        if literal(index.value) is ... and self._facts.has_old_keys:
            self.remark(_COMPUTED)
        new = index.with_changes(value=_new_key(index.value))
        return updated_node.with_changes(slice=[updated_node.slice[0].with_changes(slice=new)])

    def leave_Comparison(self, original_node: cst.Comparison, updated_node: cst.Comparison) -> Any:
        target = original_node.comparisons[0]
        is_in = isinstance(target.operator, (cst.In, cst.NotIn))
        if is_in and self._is_history(target.comparator):
            return updated_node.with_changes(left=_new_key(updated_node.left))
        return updated_node

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> Any:
        keyword = original_node.keyword.value if original_node.keyword is not None else None
        if keyword == "monitor":
            return updated_node.with_changes(value=_new_key(updated_node.value))
        if keyword in ("metrics", "weighted_metrics"):
            return updated_node.with_changes(value=_new_keys(updated_node.value))
        return updated_node

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> Any:
        names = {source_of(target.target) for target in updated_node.targets}
        if not names & self._facts.metrics:
            return updated_node
        return updated_node.with_changes(value=_new_keys(updated_node.value))

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> Any:
        function = original_node.func
        is_method = isinstance(function, cst.Attribute)
        name = source_of(function.attr if isinstance(function, cst.Attribute) else function)
        if name == "get" and isinstance(function, cst.Attribute):
            is_history = self._is_history(function.value)
            return _with_new(updated_node, 0, _new_key) if is_history else updated_node
        if name == "compile" and is_method:
            return _with_new(updated_node, _METRICS_OF_COMPILE, _new_keys)
        if name == "ModelCheckpoint":
            updated_node = _with_new_file_names(updated_node)
        if name in _MONITORS:
            return _with_new(updated_node, _MONITORS[name], _new_key)
        return updated_node

    def _is_history(self, node: cst.BaseExpression) -> bool:
        if isinstance(node, cst.Name):
            return node.value in self._facts.histories
        return isinstance(node, cst.Attribute) and node.attr.value == "history"


def _with_new(node: cst.Call, place: int, change: Any) -> cst.Call:
    """A call with one positional argument changed."""
    args = list(node.args)
    first = args[: place + 1]
    if len(first) <= place or any(arg.keyword is not None or arg.star for arg in first):
        return node
    args[place] = args[place].with_changes(value=change(args[place].value))
    return node.with_changes(args=args)


def _with_new_file_names(node: cst.Call) -> cst.Call:
    """File names of checkpoints such as `{epoch}-{val_acc:.2f}`."""
    args = []
    for arg in node.args:
        if isinstance(arg.value, cst.SimpleString):
            text = arg.value.raw_value
            for old, new in KEYS.items():
                text = re.sub(rf"\{{{old}(?=[:}}])", "{" + new, text)
            arg = arg.with_changes(value=text_like(arg.value, text))
        args.append(arg)
    return node.with_changes(args=args)


def _new_key(node: Any) -> Any:
    if isinstance(node, cst.SimpleString) and literal(node) in KEYS:
        return text_like(node, KEYS[literal(node)])
    return node


def _new_keys(node: Any) -> Any:
    """Apply to all items of a list or values of a dictionary."""
    if isinstance(node, (cst.List, cst.Tuple, cst.Dict)):
        elements = [
            element.with_changes(value=_new_keys(element.value)) for element in node.elements
        ]
        return node.with_changes(elements=elements)
    return _new_key(node)
