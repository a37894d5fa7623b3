"""What each span is, from its label, its name, and the process that it lies in."""

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ms_profile.trace.columns import Category, Thread

__all__ = ["HOST_COLLECTIVE", "categorise"]

BY_LABEL: Final[dict[str, Category]] = {
    "cpu_op": Category.OPERATOR,
    "user_annotation": Category.ANNOTATION,
    "cuda_runtime": Category.RUNTIME,
    "cuda_driver": Category.RUNTIME,
    "mtia_runtime": Category.RUNTIME,
    "xpu_runtime": Category.RUNTIME,
    "privateuse1_runtime": Category.RUNTIME,
    "privateuse1_driver": Category.RUNTIME,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.COPY,
    "gpu_memset": Category.COPY,
    "gpu_user_annotation": Category.DEVICE_ANNOTATION,
    "python_function": Category.PYTHON,
    "overhead": Category.OVERHEAD,
    "cuda_sync": Category.DEVICE_WAIT,
}
HOST_COLLECTIVE: Final = re.compile(r"(gloo|mpi|ucc|fake):")
DEVICE_COLLECTIVE: Final = re.compile(r"ncclDevKernel|ncclKernel|nccl[A-Z]|hcom_|HcclLaunch|oneccl")
ASCEND_WAIT: Final = re.compile(r"EVENT_WAIT|EVENT_RECORD|Notify[_ ]Wait|Notify[_ ]Record|NOTIFY")
ASCEND_COPY: Final = re.compile(r"MEMCPY|Memcpy|SDMA", re.ASCII)


def categorise(
    label: NDArray[Any],
    name: NDArray[Any],
    thread: NDArray[Any],
    labels: Sequence[str],
    names: Sequence[str],
    threads: Sequence[Thread],
) -> NDArray[np.uint8]:
    """Give each span its `Category`, (N,) uint8; `label`, `name`, `thread` (N,) are numbers."""
    by_label = np.array([BY_LABEL.get(text, Category.OTHER) for text in (*labels, "")], np.uint8)
    found: NDArray[np.uint8] = by_label[label]
    host = _flags(names, HOST_COLLECTIVE)
    device = _flags(names, DEVICE_COLLECTIVE)
    found[(found == Category.ANNOTATION) & host[name]] = Category.COLLECTIVE
    found[(found == Category.KERNEL) & device[name]] = Category.COLLECTIVE
    by_thread = np.array(
        [_ascend(thread) for thread in (*threads, Thread(process=0, thread=0))], np.uint8
    )
    ascend = (found == Category.OTHER) & (by_thread[thread] != Category.OTHER)
    found[ascend] = by_thread[thread][ascend]
    kernels = ascend & (found == Category.KERNEL)
    found[kernels & _flags(names, ASCEND_WAIT)[name]] = Category.DEVICE_WAIT
    found[kernels & _flags(names, ASCEND_COPY)[name]] = Category.COPY
    return found


def _flags(names: Sequence[str], pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    return np.array([pattern.match(text) is not None for text in names] or [False], bool)


def _ascend(thread: Thread) -> Category:
    """What the unlabelled spans of a process of the Ascend profiler are.

    Communication is listed twice there: each group's collectives, which count here, and their
    parts on planes, which don't.
    """
    process = thread.process_name
    if process == "Ascend Hardware":
        return Category.KERNEL
    if process == "CANN":
        return Category.RUNTIME
    if process.startswith(("Communication", "HCCL")) and "Communication" in thread.name:
        return Category.COLLECTIVE
    return Category.OTHER
