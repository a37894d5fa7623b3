"""Keeps what costly operators of a block have made, so that its recomputation runs only the rest.

It differs from torch's selective checkpointing (torch.utils.checkpoint, whose policies name an
operator by its place among all): only kept operators are counted, so that what FSDP gathers in the
backward, and what a router need not decide again, may differ from the forward. And the last result
kept is let go, as the recomputation ends at the last tensor that a gradient needs: it is mostly the
product of a down projection, which none needs, and where one does, it is computed again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch import Tensor

from ms_parallel.torch_private import TorchDispatchMode, tree_leaves, tree_map_only

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm")


def is_kept(func: Any) -> bool:
    """Return whether an operator's results are kept: matrix products and fused attention are."""
    name = func.__name__.partition(".")[0]
    if func.namespace != "aten":
        return "attention" in name and "backward" not in name
    return name in _PRODUCTS or (
        name.startswith("_scaled_dot_product") and not name.endswith("backward")
    )


class KeptResults:
    """What the costly operators of one forward have made, in their order."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        """What each operator returned, a tensor as a pair with its version."""

    def keep(self, made: Any) -> None:
        """Keep what an operator has returned."""
        self.results.append(tree_map_only(Tensor, _Versioned, made))

    def again(self, index: int) -> Any:
        """Return what the operator of this number returned, without its graph."""
        return tree_map_only(_Versioned, _Versioned.tensor, self.results[index])

    @property
    def tensors(self) -> list[Tensor]:
        """All that is kept."""
        return [part.kept for part in tree_leaves(self.results) if isinstance(part, _Versioned)]


class _Versioned:
    """A tensor that nobody may change in place until it is used again."""

    def __init__(self, tensor: Tensor) -> None:
        self.kept = tensor.detach()
        self.version = tensor._version

    def tensor(self) -> Tensor:
        assert self.kept._version == self.version, "a kept result was changed in place"
        return self.kept.detach()


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands costly operators to `do`, to be called as it sees fit."""

    def __init__(self, do: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.do = do

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, or take what it gave before."""

        def run() -> Any:
            return func(*args, **(kwargs or {}))

        return self.do(run) if is_kept(func) else run()


@contextmanager
def keeping_results(kept: KeptResults) -> Iterator[None]:
    """Keep the results of costly operators while the block runs; at its end, all but the last."""

    def keep(run: Callable[[], Any]) -> Any:
        made = run()
        kept.keep(made)
        return made

    with _Watching(keep):
        yield
    del kept.results[-1:]


@contextmanager
def using_results(kept: KeptResults) -> Iterator[None]:
    """Let costly operators give what they gave before, in the same order, while the block runs."""
    numbers = count()

    def use(run: Callable[[], Any]) -> Any:
        number = next(numbers)
        return kept.again(number) if number < len(kept.results) else run()

    with _Watching(use):
        yield
