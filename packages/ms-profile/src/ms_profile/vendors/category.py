"""The categories of a trace's spans, the same for every vendor."""

from enum import IntEnum


class Category(IntEnum):
    """What a span of a trace is."""

    OTHER = 0
    OPERATOR = 1
    """An operator of torch on the host."""
    ANNOTATION = 2
    """A scope named by the program or by torch: `ProfilerStep#3`, `Optimizer.step#AdamW.step`."""
    RUNTIME = 3
    """A call into the driver: launches, copies, waits."""
    KERNEL = 4
    """Computation on a device."""
    COPY = 5
    """A copy or fill on a device."""
    COLLECTIVE = 6
    """Communication where it runs: a device's kernel, or gloo's own thread."""
    PYTHON = 7
    """A Python function, where stacks were recorded."""
    DEVICE_ANNOTATION = 8
    """A host scope as the device saw it."""
    OVERHEAD = 9
    """The profiler's own work."""
    DEVICE_WAIT = 10
    """A device's stream waiting for an event or a peer."""
