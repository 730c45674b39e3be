"""Proof on demand that all replicas hold the same model."""

import zlib
from typing import TYPE_CHECKING

from unisono.errors import DisagreementError, ModelError
from unisono.launch.client import current_world
from unisono.parallel import check_model, replicated_model

if TYPE_CHECKING:
    import keras


def check_replicas(model: "keras.Model") -> str:
    """Compare every replica's copy of a model's weights and optimizer state, bit by bit.

    Returns their common checksum; DisagreementError names the variable in which replicas differ.
    In a run of several processes all of them must call it.

    >>> import keras
    >>> from unisono import parallel
    >>> model = parallel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), replicas=2)
    >>> len(check_replicas(model))
    8
    """
    check_model(model, "check_replicas")
    replicated = replicated_model(model)
    world = current_world()
    if replicated is not None:
        names, replicas = replicated.variable_names(), replicated.checksums()
    elif world is not None:
        # A model of a custom training loop: every process has a copy.
        from unisono.replication.checksums import names_of, own_checksums

        names, replicas = names_of(model), [own_checksums(model)]
    else:
        raise ModelError(
            "Asked to compare the replicas of a model that has none. Call unisono.parallel(model) "
            "first."
        )
    if world is not None:
        replicas = [one for own in world.all_gather("check_replicas", replicas) for one in own]
    for replica, found in enumerate(replicas[1:], start=1):
        pairs = zip(replicas[0], found, strict=False)
        differing = [i for i, (first, other) in enumerate(pairs) if first != other]
        if differing or len(found) != len(replicas[0]):
            where = names[differing[0]] if differing else "their number"
            raise DisagreementError(
                f"Replica {replica} differs from replica 0 in {len(differing)} of {len(names)} "
                f"variables, first in {where}. A value was changed on one replica only, outside "
                "of a training step; change it everywhere, or on the chief, before the next step."
            )
    return f"{zlib.crc32(repr(replicas[0]).encode()):08x}"
