"""Keys of histories and logs in a program: `acc` is `accuracy` today, wherever it is one."""

import re
from typing import Any

import libcst as cst

from unisono.compat.knowledge import KEYS
from unisono.compat.migrate.expressions import literal, source_of, text_like
from unisono.compat.migrate.facts import Facts
from unisono.compat.migrate.statements import Step

_MONITORS = {"EarlyStopping": 0, "ReduceLROnPlateau": 0, "ModelCheckpoint": 1}
"""Callbacks, and which of their arguments without a name is the key that they watch."""

_METRICS_OF_COMPILE = 2
_COMPUTED = (
    "A key of a history is computed here: "
    + ", ".join(f'"{old}" is "{new}"' for old, new in KEYS.items())
    + " in Keras 3."
)


class Keys(Step):
    """Rewrites keys where they are read, watched, put into names of files, and asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._facts = Facts()

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
    """A call with one of its arguments changed, if that is given without a name."""
    args = list(node.args)
    first = args[: place + 1]
    if len(first) <= place or any(arg.keyword is not None or arg.star for arg in first):
        return node
    args[place] = args[place].with_changes(value=change(args[place].value))
    return node.with_changes(args=args)


def _with_new_file_names(node: cst.Call) -> cst.Call:
    """Names of checkpoints such as `{epoch}-{val_acc:.2f}`."""
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
    """The same for all of a list, or of a dictionary's values."""
    if isinstance(node, (cst.List, cst.Tuple, cst.Dict)):
        elements = [
            element.with_changes(value=_new_keys(element.value)) for element in node.elements
        ]
        return node.with_changes(elements=elements)
    return _new_key(node)
