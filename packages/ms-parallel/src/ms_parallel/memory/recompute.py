"""Activation checkpointing of a model's blocks."""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from ms_parallel.errors import ConfigError
from ms_parallel.memory.block_costs import BlockCosts, measure_block, storages
from ms_parallel.memory.modes import Recompute, budget_bytes, check_recompute
from ms_parallel.memory.selective import SavedResults, replay_results, save_results
from ms_parallel.models.experts.replay import record_and_replay
from ms_parallel.models.plan import ModelPlan
from ms_parallel.torch_private import checkpoint

ATTENTION = ("self_attn", "self_attention", "attention", "attn", "linear_attn", "mixer")
"""Attribute names that blocks use for attention or another token mixer."""
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Contexts of the forward pass and of the recomputation."""

_marked: "WeakKeyDictionary[nn.Module, RecomputedBlock]" = WeakKeyDictionary()


class RecomputedBlock:
    """Activation checkpointing of one block; its mode can change between steps.

    Decisions of the forward pass, such as a token's experts, are reused in the recomputation.

    Args:
        block: block to wrap in place; names and weights are unchanged.
        mode: initial mode: `"none"`, `"selective"`, `"attention"` or `"full"`.

    Raises:
        ConfigError: the mode is `"attention"` and the block has no attention.
    """

    def __init__(self, block: nn.Module, mode: str) -> None:
        self.block = block
        self.attention = next(
            (child for name, child in block.named_children() if name in ATTENTION), None
        )
        for module in (block, self.attention):
            if module is not None:
                checkpoint(module, preserve_rng_state=False, context_fn=self._contexts)
        # Runs after the checkpointing hook and before FSDP's hook that frees gathered weights.
        block.register_forward_hook(self._measure, with_kwargs=True)
        self.costs: BlockCosts | None = None
        """Costs of the block; None until a forward pass has measured them under a budget."""
        self.shared_bytes = 0
        """Bytes of inputs that all blocks of the stage share, such as rotary tables."""
        self.cast_bytes = 0
        """Bytes of shared inputs that FSDP casts for each block in mixed precision."""
        self.measures = False
        self._saved: ref[SavedResults] | None = None
        self._decisions: deque[Tensor] = deque()
        self.set_mode(mode)

    def set_mode(self, mode: str) -> None:
        """Switch the mode, from the next forward pass on."""
        if mode == "attention" and self.attention is None:
            names = ", ".join(name for name, _ in self.block.named_children())
            raise ConfigError(
                f"recompute='attention' needs an attention submodule in"
                f" {type(self.block).__name__}, got {names}; name it self_attn, or set recompute"
                " to selective or full"
            )
        self.mode = mode
        # The hooks stay registered, and these flags switch them.
        checkpoint.state(self.block).enable_hook = mode in ("selective", "full")
        if self.attention is not None:
            checkpoint.state(self.attention).enable_hook = mode == "attention"

    @property
    def saved_results(self) -> list[Tensor]:
        """Tensors that the last forward pass saved in addition to autograd's saved tensors."""
        saved = self._saved() if self._saved else None
        return saved.tensors if saved else []

    def _contexts(self) -> Contexts:
        self._decisions = deque()
        # Router decisions of the forward pass are replayed in the recomputation.
        forward, recomputation = record_and_replay(self._decisions)
        if self.mode != "selective":
            return forward, recomputation
        results = SavedResults()
        # A weak reference: the results must not outlive the contexts that checkpointing holds.
        self._saved = ref(results)
        return (
            _both(forward, save_results(results)),
            _both(recomputation, replay_results(results)),
        )

    def _measure(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not (self.measures and self.costs is None and torch.is_grad_enabled()):
            return
        mode = self.mode
        # Measure without checkpointing, so that all saved tensors are visible.
        self.set_mode("none")
        try:
            self.shared_bytes = sum(storages([kwargs]).values())
            self.cast_bytes = sum(storages([kwargs], floating=True).values())
            with record_and_replay(self._decisions)[1]:
                self.costs = measure_block(block, self.attention, args, kwargs)
        finally:
            self.set_mode(mode)


@contextmanager
def _both(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def recompute_blocks(model: nn.Module, plan: ModelPlan, recompute: Recompute) -> None:
    """Wrap each block of `model` in place; names and weights are unchanged.

    With a memory budget all blocks start with `full`; `recomputed_blocks` returns them.

    Raises:
        ConfigError: `recompute` is neither a mode nor a budget, or blocks have no attention.
    """
    check_recompute(recompute)
    if recompute == "none":
        return
    mode = "full" if budget_bytes(recompute) is not None else str(recompute)
    for name, module in model.named_modules():
        if plan.is_block(name) and any(True for _ in module.parameters()):
            _marked[module] = RecomputedBlock(module, mode)


def recomputed_blocks(model: nn.Module) -> list[RecomputedBlock]:
    """Return the wrapped blocks of `model`, in order."""
    return [_marked[module] for module in model.modules() if module in _marked]
