"""CUDA graphs: all kernels of a function in one launch."""

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)


def warm_up(function: Callable[[], None]) -> None:
    """Run a function on a side stream: allocate workspaces and compile kernels before a capture."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)


def capture(function: Callable[[], None]) -> Callable[[], None]:
    """Capture a function after a warm-up; the result replays its kernels.

    The function must read and write the same tensors in every call and must not synchronize. If the
    capture fails, the reason is logged and the function itself is returned. Capturing executes no
    kernels.
    """
    stream = None
    try:
        stream = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a trainer's, may allocate memory during the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            function()
    except (
        Exception
    ) as error:  # of any library that the function calls; the caller runs it again uncaptured
        # A failed capture leaves its own stream current.
        if stream is not None:
            torch.cuda.set_stream(stream)
        logger.warning(
            "decoding runs without a CUDA graph, which is slower: %s",
            str(error).partition("\n")[0] or type(error).__name__,
        )
        return function
    return graph.replay
