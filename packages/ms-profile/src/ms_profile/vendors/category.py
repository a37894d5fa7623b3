"""Categories of spans in a trace, the same for all vendors."""

from enum import IntEnum


class Category(IntEnum):
    """Category of a span in a trace."""

    OTHER = 0
    OPERATOR = 1
    """Torch operator on the host."""
    ANNOTATION = 2
    """Scope named by the program or torch: `ProfilerStep#3`, `Optimizer.step#AdamW.step`."""
    RUNTIME = 3
    """Driver call: launch, copy, wait."""
    KERNEL = 4
    """Computation on a device."""
    COPY = 5
    """Copy or fill on a device."""
    COLLECTIVE = 6
    """Communication itself: a device kernel, or a gloo thread."""
    PYTHON = 7
    """Python function, if stacks were recorded."""
    DEVICE_ANNOTATION = 8
    """Host scope as seen on the device."""
    OVERHEAD = 9
    """Work of the profiler itself."""
    DEVICE_WAIT = 10
    """Device stream waiting for an event or a peer."""
