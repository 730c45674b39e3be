"""Every private name of TensorFlow that this backend uses, in one place.

None of these modules imports Keras: processes join a run while Keras itself is being imported.
"""

from tensorflow.python import pywrap_tfe
from tensorflow.python.checkpoint import checkpoint, checkpoint_management
from tensorflow.python.distribute.distribute_lib import get_update_replica_id
from tensorflow.python.distribute.values import MirroredVariable
from tensorflow.python.eager.context import context
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs
from tensorflow.python.framework.op_callbacks import add_op_callback, remove_op_callback
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable as ResourceVariable

__all__ = [
    "MirroredVariable",
    "ResourceVariable",
    "add_op_callback",
    "checkpoint",
    "checkpoint_management",
    "get_read_write_resource_inputs",
    "get_update_replica_id",
    "has_started",
    "pywrap_tfe",
    "remove_op_callback",
]


def has_started() -> bool:
    """Whether TensorFlow has started its devices, after which their configuration is fixed."""
    return bool(context()._initialized)
