"""The collectives of a world of one: everybody's values are this process' own."""

from collections.abc import Sequence
from typing import Any


class Alone:
    """See engines.base.Collectives."""

    rank = 0
    size = 1

    def all_reduce(self, tensors: Sequence[Any], op: str) -> list[Any]:
        return list(tensors)

    def all_gather(self, tensor: Any) -> list[Any]:
        return [tensor]

    def broadcast(self, tensors: Sequence[Any], root: int) -> list[Any]:
        return list(tensors)

    def reduce_scatter(self, tensor: Any, op: str) -> Any:
        return tensor

    def all_to_all(self, tensor: Any, splits: Sequence[int]) -> tuple[Any, list[int]]:
        return tensor, list(splits)

    def barrier(self) -> None:
        return
