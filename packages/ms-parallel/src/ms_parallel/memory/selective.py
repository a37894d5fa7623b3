"""Selective activation checkpointing: save results of expensive operators, recompute the rest.

Differences from torch's selective checkpointing (torch.utils.checkpoint), whose policies identify
an operator by its position among all operators:

1. Only expensive operators are numbered. All-gathers of FSDP in the backward pass and router
   decisions that are replayed may therefore differ from the forward pass.
2. The last saved result is dropped. Recomputation stops at the last tensor that a gradient needs,
   and the last result is mostly the output of a down projection, which no gradient needs. If one
   does, it is recomputed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch import Tensor

from ms_parallel.torch_private import TorchDispatchMode, tree_leaves, tree_map_only

_MATMULS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm")


def is_expensive(func: Any) -> bool:
    """Return whether an operator is a matrix product or fused attention."""
    # "mm.default" becomes "mm".
    name = func.__name__.partition(".")[0]
    # Attention kernels outside of aten, such as flash attention libraries.
    if func.namespace != "aten":
        return "attention" in name and "backward" not in name
    return name in _MATMULS or (
        name.startswith("_scaled_dot_product") and not name.endswith("backward")
    )


class SavedResults:
    """Results of the expensive operators of one forward pass, in execution order."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        """Output of each operator, with tensors replaced by `_VersionedTensor`."""

    def append(self, output: Any) -> None:
        """Save an operator's output."""
        self.results.append(tree_map_only(Tensor, _VersionedTensor, output))

    def replay(self, index: int) -> Any:
        """Return the output of operator `index`, detached."""
        return tree_map_only(_VersionedTensor, _VersionedTensor.checked, self.results[index])

    @property
    def tensors(self) -> list[Tensor]:
        """All saved tensors."""
        leaves = tree_leaves(self.results)
        return [leaf.tensor for leaf in leaves if isinstance(leaf, _VersionedTensor)]


class _VersionedTensor:
    """Saved tensor with its version counter, to detect in-place changes."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version

    def checked(self) -> Tensor:
        assert self.tensor._version == self.version, "a saved result was changed in place"
        return self.tensor.detach()


class _InterceptExpensive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `handler` with a thunk instead of running an expensive operator."""

    def __init__(self, handler: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.handler = handler

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a cheap operator; hand an expensive one to the handler."""

        def run() -> Any:
            return func(*args, **(kwargs or {}))

        return self.handler(run) if is_expensive(func) else run()


@contextmanager
def save_results(saved: SavedResults) -> Iterator[None]:
    """Save results of expensive operators in the context; on exit drop the last one."""

    def run_and_save(run: Callable[[], Any]) -> Any:
        output = run()
        saved.append(output)
        return output

    with _InterceptExpensive(run_and_save):
        yield
    del saved.results[-1:]


@contextmanager
def replay_results(saved: SavedResults) -> Iterator[None]:
    """Replace expensive operators in the context by their saved results, in the same order."""
    indices = count()

    def replay_or_run(run: Callable[[], Any]) -> Any:
        # Past the saved results: the dropped last one is recomputed.
        index = next(indices)
        return saved.replay(index) if index < len(saved.results) else run()

    with _InterceptExpensive(replay_or_run):
        yield
