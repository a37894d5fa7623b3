"""Classify each span by its label, its name and its process."""

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ms_profile.trace.columns import Thread, matching
from ms_profile.vendors import VENDORS, any_vendors
from ms_profile.vendors.category import Category

BY_LABEL: Final = {
    label: category for vendor in VENDORS for label, category in vendor.labels.items()
}
BY_PROCESS: Final = [
    (re.compile(pattern), category)
    for vendor in VENDORS
    for pattern, category in vendor.processes.items()
]
SCOPE: Final = re.compile(r"ProfilerStep#|Optimizer\.\w+#|enumerate\(DataLoader\)#")
HOST_COLLECTIVE: Final = any_vendors("host_backend", end=":")
DEVICE_COLLECTIVE: Final = any_vendors("collective_kernel")
WAIT: Final = any_vendors("wait_kernel")
COPY: Final = any_vendors("copy_kernel")


def categorize(
    label: NDArray[Any],
    name: NDArray[Any],
    thread: NDArray[Any],
    labels: Sequence[str],
    names: Sequence[str],
    threads: Sequence[Thread],
) -> NDArray[np.uint8]:
    """Return the `Category` of each span, (N,) uint8; `label`, `name`, `thread` are (N,) ids."""
    # The entry for "" keeps the table indexable without labels.
    by_label = np.array([BY_LABEL.get(text, Category.OTHER) for text in (*labels, "")], np.uint8)
    category: NDArray[np.uint8] = by_label[label]
    # The Ascend profiler labels the program's own scopes as operators.
    category[(category == Category.OPERATOR) & matching(names, SCOPE)[name]] = Category.ANNOTATION
    # Masks over the table of names; indexing by `name` expands them to spans.
    host, device = matching(names, HOST_COLLECTIVE), matching(names, DEVICE_COLLECTIVE)
    category[(category == Category.ANNOTATION) & host[name]] = Category.COLLECTIVE
    category[(category == Category.KERNEL) & device[name]] = Category.COLLECTIVE
    # Traces without labels, such as the Ascend profiler's, name the process and thread instead.
    by_thread = np.array([*map(_by_process, threads), Category.OTHER], np.uint8)
    unlabeled = (category == Category.OTHER) & (by_thread[thread] != Category.OTHER)
    category[unlabeled] = by_thread[thread][unlabeled]
    # The process only says that a span ran on the device; its name says if it waits or copies.
    kernels = unlabeled & (category == Category.KERNEL)
    category[kernels & matching(names, WAIT)[name]] = Category.DEVICE_WAIT
    category[kernels & matching(names, COPY)[name]] = Category.COPY
    return category


def _by_process(thread: Thread) -> Category:
    """Return the category of unlabeled spans, by the name of their process and thread."""
    path = f"{thread.process_name}/{thread.name}"
    return next(
        (category for pattern, category in BY_PROCESS if pattern.match(path)), Category.OTHER
    )
