"""Names used by torch: Kineto's labels, operators, and backends that run on the host."""

from typing import Final

from ms_profile.vendors.category import Category
from ms_profile.vendors.vendor import Vendor

VENDOR: Final = Vendor(
    labels={
        "cpu_op": Category.OPERATOR,
        "user_annotation": Category.ANNOTATION,
        "kernel": Category.KERNEL,
        "gpu_memcpy": Category.COPY,
        "gpu_memset": Category.COPY,
        "gpu_user_annotation": Category.DEVICE_ANNOTATION,
        "python_function": Category.PYTHON,
        "overhead": Category.OVERHEAD,
        "privateuse1_runtime": Category.RUNTIME,
        "privateuse1_driver": Category.RUNTIME,
    },
    host_backend="gloo|mpi|ucc|fake",
    communication_operator=r"c10d::|_?c10d_functional|record_param_comms",
    synchronizing_call=r"aten::(item|_local_scalar_dense)$",
)
