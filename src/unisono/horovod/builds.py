"""Horovod's questions about how it was built, answered for the engines that do the work here."""

import keras


def mpi_built() -> bool:
    """Whether MPI carries tensors; it never does here.

    >>> mpi_built()
    False
    """
    return False


def mpi_enabled() -> bool:
    """Whether MPI carries tensors; it never does here, also not under mpirun.

    >>> mpi_enabled()
    False
    """
    return False


def mpi_threads_supported() -> bool:
    """Raises ValueError, as Horovod does without MPI.

    >>> mpi_threads_supported()
    Traceback (most recent call last):
    ...
    ValueError: MPI is not enabled: the backend's own collectives carry tensors...
    """
    raise ValueError(
        "MPI is not enabled: the backend's own collectives carry tensors (gloo, gRPC or NCCL). "
        "Ask hvd.mpi_enabled() first."
    )


def gloo_built() -> bool:
    """Whether gloo carries tensors between CPUs: on JAX and torch; TensorFlow uses gRPC.

    >>> gloo_built() == (keras.backend.backend() != "tensorflow")
    True
    """
    return bool(keras.backend.backend() != "tensorflow")


def gloo_enabled() -> bool:
    """Whether gloo carries tensors between CPUs.

    >>> gloo_enabled() == gloo_built()
    True
    """
    return gloo_built()


def nccl_built() -> int:
    """Whether NCCL carries tensors between GPUs: its version as one number, or 0.

    The number is known on torch alone; it is 1 where JAX or TensorFlow was built for CUDA.

    >>> nccl_built() >= 0
    True
    """
    if not cuda_built():
        return 0
    if keras.backend.backend() == "torch":
        import torch

        if not torch.distributed.is_nccl_available():
            return 0
        major, minor, patch = torch.cuda.nccl.version()
        return int(major * 10000 + minor * 100 + patch)
    return 1


def ddl_built() -> bool:
    """Whether IBM's DDL carries tensors; it never does here.

    >>> ddl_built()
    False
    """
    return False


def ccl_built() -> bool:
    """Whether Intel's oneCCL carries tensors; it never does here.

    >>> ccl_built()
    False
    """
    return False


def cuda_built() -> bool:
    """Whether the backend was built for CUDA.

    >>> cuda_built() in (True, False)
    True
    """
    if keras.backend.backend() == "torch":
        import torch

        return torch.version.cuda is not None
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return bool(tf.test.is_built_with_cuda())
    return _has_jax_plugin("cuda")


def rocm_built() -> bool:
    """Whether the backend was built for ROCm.

    >>> rocm_built() in (True, False)
    True
    """
    if keras.backend.backend() == "torch":
        import torch

        return torch.version.hip is not None
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return bool(tf.test.is_built_with_rocm())
    return _has_jax_plugin("rocm")


def _has_jax_plugin(kind: str) -> bool:
    from importlib.metadata import distributions

    names = (str(each.metadata["Name"] or "").lower().replace("_", "-") for each in distributions())
    return any(name.startswith(f"jax-{kind}") and name.endswith("pjrt") for name in names)
