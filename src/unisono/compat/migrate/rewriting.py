"""Replaces old names, methods and arguments in a program's expressions."""

from typing import Any

import libcst as cst
from libcst.metadata import ParentNodeProvider, QualifiedNameProvider

from unisono.compat.knowledge import IMAGES, METHODS, MODULES, Change
from unisono.compat.lookup import canonical, change_of, gone_with, today
from unisono.compat.migrate.calls import (
    CALLS,
    OPTIMIZERS,
    Caller,
    translate_method,
    translate_optimizer,
)
from unisono.compat.migrate.imports import is_in_keras
from unisono.compat.migrate.keys import KnownVariables
from unisono.compat.migrate.steps import MigrationStep, expression, removed, source_of

_METHODS = {method.old: method for method in METHODS}
_RENAMED_METHODS = {method.old: method for method in METHODS if not method.parameters}
_NOTHING = "unisono.configure()"
_OF_MODELS = ("reset_states",)


class Rewriting(MigrationStep):
    """Rewrites expressions; a later step rewrites the imports."""

    METADATA_DEPENDENCIES = (QualifiedNameProvider, ParentNodeProvider)

    def __init__(self, needed: set[str]) -> None:
        super().__init__()
        self._needed = needed
        self._facts = KnownVariables()

    def visit_Module(self, node: cst.Module) -> None:
        self._facts.metadata = self.metadata
        node.visit(self._facts)

    def need(self, statement: str) -> None:
        """Request an import statement."""
        self._needed.add(statement)

    # -- names -------------------------------------------------------------------------------------

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> Any:
        if self._is_handled_above(original_node):
            return updated_node
        dotted = self.dotted(original_node)
        if dotted is None:
            return updated_node
        if dotted == original_node.value and dotted in MODULES:
            return expression(MODULES[dotted])  # `import horovod.keras` binds `horovod`.
        change = change_of(dotted)
        if change is None or dotted == original_node.value:
            return updated_node
        if change.new is not None and change.new.rpartition(".")[0] == change.module:
            new = change.new.rpartition(".")[2]
            if not self._may_be_renamed(original_node.value, dotted, change.new):
                return updated_node  # Its import says `as`.
            return updated_node.with_changes(value=new)
        if change.new is not None:
            return updated_node  # It is imported from where it is today.
        return self._replaced(change, dotted, updated_node)

    def _may_be_renamed(self, name: str, dotted: str, new: str) -> bool:
        has_own_name = name != dotted.rpartition(".")[2] or name in self._facts.bound
        return not has_own_name and self._facts.is_free(new.rpartition(".")[2], new)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> Any:
        name = original_node.attr.value
        if name == "lr" and self._is_optimizer(original_node.value):
            return updated_node.with_changes(attr=cst.Name("learning_rate"))
        if name in _RENAMED_METHODS and name not in _OF_MODELS:
            return updated_node.with_changes(attr=cst.Name(_RENAMED_METHODS[name].new))
        dotted = self.dotted(original_node)
        if dotted is None or self._is_handled_above(original_node):
            return updated_node
        if canonical(dotted) in MODULES:
            return self._moved(canonical(dotted), updated_node)
        change = change_of(dotted)
        if change is not None:
            return self._replaced(change, dotted, updated_node)
        self._check(dotted)
        return updated_node

    def _replaced(self, change: Change, dotted: str, node: Any) -> Any:
        if change.why is not None:
            self.remark(f"{change.old} is gone: {change.why}. Instead: {change.write}.")
            return node
        if change.value is not None:
            return expression(change.value)
        if change.old.startswith("tensorflow.config."):
            return node  # TensorFlow still has it.
        if change.new is None:
            self.remark(f"{change.old} is old: write {change.write}.")
            return node
        if change.new.startswith("unisono."):
            is_there = change.new.startswith(IMAGES) and not dotted.startswith("keras.")
            if is_there:
                return node
            self.need(f"import {change.new.rpartition('.')[0]}")
            return expression(change.new)
        if not isinstance(node, cst.Attribute):
            return node
        rest = change.new.removeprefix(change.module + ".").split(".")
        value = node.value
        for part in rest[:-1]:
            value = cst.Attribute(value, cst.Name(part))
        return node.with_changes(value=value, attr=cst.Name(rest[-1]))

    def _moved(self, old: str, node: cst.Attribute) -> Any:
        """A removed module: `keras.layers.core` is `keras.layers`."""
        parent = old.rpartition(".")[0]
        if MODULES[old] == MODULES.get(parent, parent):
            return node.value
        return node

    def _check(self, dotted: str) -> None:
        gone = gone_with(dotted)
        name = canonical(dotted)
        if gone is not None:
            self.remark(f"{gone.old} is gone: {gone.why}. Instead: {gone.write}.")
        elif name.startswith("keras.backend.") and not is_in_keras(dotted):
            other = f"keras.ops.{name.rpartition('.')[2]}"
            hint = f"write {other}" if is_in_keras(other) else "look in keras.ops"
            self.remark(f"{name} is not in Keras 3; {hint}.")

    def _is_optimizer(self, node: cst.BaseExpression) -> bool:
        if isinstance(node, cst.Name):
            return node.value in self._facts.optimizers
        return isinstance(node, cst.Attribute) and node.attr.value == "optimizer"

    def _is_handled_above(self, node: cst.CSTNode) -> bool:
        """Whether an outer expression is translated as a whole."""
        parent = self.get_metadata(ParentNodeProvider, node, None)
        if isinstance(parent, cst.Attribute) and parent.value is node:
            outer = self.dotted(parent)
            if outer is None or change_of(outer) is None:
                return False
            return change_of(outer).value is not None or self._is_handled_above(parent)  # type: ignore[union-attr]
        if isinstance(parent, cst.Call) and parent.func is node:
            dotted = self.dotted(node)
            change = change_of(dotted) if dotted is not None else None
            return change is not None and change.old in CALLS
        return False

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        is_empty = source_of(updated_node.with_changes(leading_lines=[])).strip() == _NOTHING
        was_empty = source_of(original_node.with_changes(leading_lines=[])).strip() == _NOTHING
        return removed(updated_node) if is_empty and not was_empty else updated_node

    # -- calls -------------------------------------------------------------------------------------

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> Any:
        if has_old_file_name(original_node):
            self.remark(FILE_NAMES)
        called = source_of(original_node.func)
        if called in PYTHON_2 and not self._is_bound(original_node.func):
            self.remark(f"{called} is Python 2: write {PYTHON_2[called]}.")
        dotted = self.dotted(original_node.func)
        if dotted is not None:
            change = change_of(dotted)
            caller = Caller(self.need, self.remark, dotted, original_node)
            if change is not None and change.old in CALLS:
                return CALLS[change.old](updated_node, caller)
            if today(canonical(dotted)).startswith(OPTIMIZERS):
                return translate_optimizer(updated_node, caller)
        return self._method(original_node, updated_node)

    def _is_bound(self, node: cst.CSTNode) -> bool:
        return bool(self.get_metadata(QualifiedNameProvider, node, set()))

    def _method(self, original: cst.Call, updated: cst.Call) -> Any:
        if not isinstance(original.func, cst.Attribute):
            return updated
        name = original.func.attr.value
        owner = source_of(original.func.value)
        if name in _OF_MODELS:
            return self._reset(owner, updated)
        return translate_method(name, updated, self.remark)

    def _reset(self, owner: str, updated: cst.Call) -> cst.Call:
        if owner.lower().endswith("model"):
            self.remark(
                "Models have no reset_states() in Keras 3: call reset_state() of each stateful "
                "layer."
            )
            return updated
        function = updated.func.with_changes(attr=cst.Name("reset_state"))
        return updated.with_changes(func=function)


FILE_NAMES = (
    "Keras 3 names files of weights *.weights.h5, and checkpoints of models *.keras or *.h5: "
    "rename this one, and where it is loaded."
)


def has_old_file_name(call: cst.Call) -> bool:
    """Whether a call names a weight file or a checkpoint as only Keras 2 allows."""
    function = call.func
    name = source_of(function.attr if isinstance(function, cst.Attribute) else function)
    if name not in ("save_weights", "ModelCheckpoint") or not call.args:
        return False
    by_name = {source_of(arg.keyword): arg.value for arg in call.args if arg.keyword is not None}
    first = by_name.get("filepath") or call.args[0].value
    if not isinstance(first, cst.SimpleString):
        return False
    only = by_name.get("save_weights_only")
    is_weights = name == "save_weights" or (only is not None and source_of(only) == "True")
    endings = (".weights.h5",) if is_weights else (".keras", ".h5")
    return not str(first.raw_value).endswith(endings)


PYTHON_2 = {
    "xrange": "range",
    "raw_input": "input",
    "unicode": "str",
    "basestring": "str",
    "long": "int",
    "unichr": "chr",
    "execfile": "exec(open(name).read())",
    "reduce": "functools.reduce",
    "reload": "importlib.reload",
}
