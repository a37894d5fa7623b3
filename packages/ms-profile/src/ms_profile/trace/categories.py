"""What each span is, from its label, its name, and the process that it lies in."""

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ms_profile.trace.columns import Thread, matching
from ms_profile.vendors import VENDORS, any_vendors
from ms_profile.vendors.category import Category

BY_LABEL: Final = {label: own for vendor in VENDORS for label, own in vendor.labels.items()}
BY_PROCESS: Final = [
    (re.compile(pattern), own) for vendor in VENDORS for pattern, own in vendor.processes.items()
]
HOST_COLLECTIVE: Final = any_vendors("host_backend", end=":")
DEVICE_COLLECTIVE: Final = any_vendors("collective_kernel")
WAIT: Final = any_vendors("wait_kernel")
COPY: Final = any_vendors("copy_kernel")


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
    host, device = matching(names, HOST_COLLECTIVE), matching(names, DEVICE_COLLECTIVE)
    found[(found == Category.ANNOTATION) & host[name]] = Category.COLLECTIVE
    found[(found == Category.KERNEL) & device[name]] = Category.COLLECTIVE
    by_thread = np.array([*map(_by_process, threads), Category.OTHER], np.uint8)
    unlabelled = (found == Category.OTHER) & (by_thread[thread] != Category.OTHER)
    found[unlabelled] = by_thread[thread][unlabelled]
    kernels = unlabelled & (found == Category.KERNEL)
    found[kernels & matching(names, WAIT)[name]] = Category.DEVICE_WAIT
    found[kernels & matching(names, COPY)[name]] = Category.COPY
    return found


def _by_process(thread: Thread) -> Category:
    """Find what spans without a label are, by the process that they lie in."""
    place = f"{thread.process_name}/{thread.name}"
    return next((own for pattern, own in BY_PROCESS if pattern.match(place)), Category.OTHER)
