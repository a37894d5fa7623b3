"""Recomputes blocks in the backward, which keep only a part of what torch saves, to save memory."""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from ms_parallel.errors import ConfigError
from ms_parallel.models.experts.kept import keeping
from ms_parallel.models.plan import ModelPlan
from ms_parallel.split.memory.block_costs import BlockCosts, measure_block, storages
from ms_parallel.split.memory.recompute_choice import Recompute, budget_bytes, check_recompute
from ms_parallel.split.memory.selective import KeptResults, keeping_results, using_results
from ms_parallel.torch_private import checkpoint

ATTENTION = ("self_attn", "self_attention", "attention", "attn", "linear_attn", "mixer")
"""What blocks call their attention, or what stands in its place."""
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


_marked: "WeakKeyDictionary[nn.Module, RecomputedBlock]" = WeakKeyDictionary()


class RecomputedBlock:
    """A block whose kind of recomputation may change from one update to the next.

    What a block decides, such as the experts of a token, is not decided again.

    Args:
        block: is marked, in place; names and weights stay as they are.
        kind: how it begins.

    Raises:
        ConfigError: its attention is to be recomputed, and none is found in it.
    """

    def __init__(self, block: nn.Module, kind: str) -> None:
        self.block = block
        self.attention = next(
            (child for name, child in block.named_children() if name in ATTENTION), None
        )
        for module in (block, self.attention):
            if module is not None:
                checkpoint(module, preserve_rng_state=False, context_fn=self._contexts)
        # Behind that of the recomputation, before the one that frees gathered weights.
        block.register_forward_hook(self._measure, with_kwargs=True)
        self.costs: BlockCosts | None = None
        """What the block costs; measured in the next forward while it is None, under a budget."""
        self.shared_bytes = 0
        """What all blocks of its stage share besides, such as angles and documents."""
        self.cast_bytes = 0
        """What FSDP casts of them anew for each block in mixed precision."""
        self.measures = False
        self._kept: ref[KeptResults] | None = None
        self._decisions: deque[Tensor] = deque()
        self.become(kind)

    def become(self, kind: str) -> None:
        """Recompute in this way from the next forward on."""
        if kind == "attention" and self.attention is None:
            names = ", ".join(name for name, _ in self.block.named_children())
            raise ConfigError(
                f"recompute='attention' finds no attention in {type(self.block).__name__}, whose"
                f" parts are {names}; call it self_attn, or set recompute to selective or full"
            )
        self.kind = kind
        checkpoint.state(self.block).enable_hook = kind in ("selective", "full")
        if self.attention is not None:
            checkpoint.state(self.attention).enable_hook = kind == "attention"

    @property
    def kept_results(self) -> list[Tensor]:
        """What the last forward keeps beside what torch saves, as hooks of saved tensors see it."""
        kept = self._kept() if self._kept else None
        return kept.tensors if kept else []

    def _contexts(self) -> Contexts:
        self._decisions = deque()
        first, again = keeping(self._decisions)
        if self.kind != "selective":
            return first, again
        kept = KeptResults()
        self._kept = ref(kept)
        return _both(first, keeping_results(kept)), _both(again, using_results(kept))

    def _measure(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
    ) -> None:
        if not (self.measures and self.costs is None and torch.is_grad_enabled()):
            return
        before = self.kind
        self.become("none")
        try:
            self.shared_bytes = sum(storages([kwargs]).values())
            self.cast_bytes = sum(storages([kwargs], floating=True).values())
            with keeping(self._decisions)[1]:
                self.costs = measure_block(block, self.attention, args, kwargs)
        finally:
            self.become(before)


@contextmanager
def _both(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def recompute_blocks(model: nn.Module, plan: ModelPlan, recompute: Recompute) -> None:
    """Mark each block of `model`, in place; names and weights stay as they are.

    Under a budget all blocks begin with `full`, and `recomputed_blocks` finds them.

    Raises:
        ConfigError: `recompute` is neither a kind nor a budget, or blocks have no attention.
    """
    check_recompute(recompute)
    if recompute == "none":
        return
    kind = "full" if budget_bytes(recompute) is not None else str(recompute)
    for name, module in model.named_modules():
        if plan.is_block(name) and any(True for _ in module.parameters()):
            _marked[module] = RecomputedBlock(module, kind)


def recomputed_blocks(model: nn.Module) -> list[RecomputedBlock]:
    """List the blocks of `model` that are marked, in their order."""
    return [_marked[module] for module in model.modules() if module in _marked]
