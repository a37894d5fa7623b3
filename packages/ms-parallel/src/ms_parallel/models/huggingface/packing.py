"""Isolation of packed documents in the blocks of a transformers model.

Attention is replaced by ours, which takes document numbers instead of a mask. Gated delta networks
run on our operators, which support documents too. Any other module that mixes positions, such as a
convolution or a recurrence, runs on each document separately.
"""

import inspect
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ms_parallel.errors import ModelError
from ms_parallel.models.huggingface import attention
from ms_parallel.models.huggingface.experts import CountedRouter
from ms_parallel.models.huggingface.gated_delta import delta_forward, is_delta
from ms_parallel.models.huggingface.module_wrapper import ModuleWrapper
from ms_parallel.operators.protocol import Ops

MASK, HIDDEN = "attention_mask", "hidden_states"
MASKS = (MASK, "causal_mask")
"""Block arguments that carry a mask to attention; hybrid layers have both."""


class ForwardState:
    """Document numbers of the current forward pass, shared with all blocks."""

    def __init__(self) -> None:
        self.running = False
        self.documents: Tensor | None = None
        """(B, cached and new positions) int32."""


class PerDocumentMixer(ModuleWrapper):
    """Runs a non-attention module that mixes positions on each document separately.

    Args:
        inner: module that mixes positions.
        ops: operators for gated delta networks, which take documents directly.
    """

    ops: Ops

    documents: Tensor | None = None
    """(B, S) int32 document numbers of the current microbatch."""

    def __init__(self, inner: nn.Module, ops: Ops) -> None:
        super().__init__(inner)
        self.__dict__["ops"] = ops

    def __deepcopy__(self, memo: dict[int, Any]) -> "PerDocumentMixer":
        """Copy the wrapper, but share the operators, which may be a Python module."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)], memo[id(self.ops)] = copied, self.ops
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied

    def forward(self, *args: Any, **named: Any) -> Any:
        """Run the inner module, whose first argument is (B, S, H), on each document separately."""
        hidden, documents = args[0] if args else named[HIDDEN], self.documents
        named = {key: None if key == MASK else value for key, value in named.items()}
        if is_delta(self.inner):  # even without packing, for identical rounding
            return delta_forward(self.inner, hidden, documents, self.ops)
        # One document per row: a plain call is faster.
        if documents is None or bool((documents == documents[:, :1]).all()):
            return self.inner(*args, **named)
        lengths = [_lengths(numbers) for numbers in documents]
        # Documents are numbered over all rows, in row order.
        all_lengths = [length for row_lengths in lengths for length in row_lengths]
        outputs: list[Any] = [None] * len(all_lengths)
        # Documents of equal length form one batch: one call per distinct length.
        for length in set(all_lengths):
            indices = [index for index, size in enumerate(all_lengths) if size == length]
            try:
                result = self.inner(
                    *(_document_rows(value, lengths, indices) for value in args),
                    **{
                        key: _document_rows(value, lengths, indices) for key, value in named.items()
                    },
                )
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, IndexError) as error:
                raise ModelError(
                    f"{type(self.inner).__name__} cannot process packed documents separately;"
                    " remove documents from the batch"
                ) from error
            for index, row in zip(indices, torch.split(_first(result), 1), strict=True):
                outputs[index] = row
        merged = torch.cat(outputs, 1).view(*hidden.shape[:2], -1)  # (B, S, H)
        return merged if isinstance(result, Tensor) else (merged, *[None] * (len(result) - 1))


def _document_rows(value: Any, lengths: list[list[int]], indices: list[int]) -> Any:
    """Select documents from a packed argument, one per row of the result.

    Args:
        value: (B or 1, S, ...); anything else is returned unchanged.
        lengths: document lengths of each row.
        indices: documents of equal length L to select, counted over all rows.

    Returns:
        (number of documents, L, ...).
    """
    is_sequence = isinstance(value, Tensor) and value.ndim > 1
    if (
        not is_sequence
        or value.shape[0] not in (1, len(lengths))
        or value.shape[1] != sum(lengths[0])
    ):
        return value
    # Arguments shared by all rows, such as rotary tables, have dim 0 of size 1.
    rows = value.expand(len(lengths), *value.shape[1:])
    pieces = [
        piece
        for row, row_lengths in zip(rows, lengths, strict=True)
        for piece in row.split(row_lengths)
    ]
    return torch.stack([pieces[index] for index in indices])


def _lengths(numbers: Tensor) -> list[int]:
    lengths: list[int] = torch.unique_consecutive(numbers, return_counts=True)[1].tolist()
    return lengths


def _first(output: Any) -> Tensor:
    first: Tensor = output if isinstance(output, Tensor) else output[0]
    return first


class _DocumentInjector:
    """Hooks that pass document numbers to one block in place of its mask.

    Activation checkpointing reruns a block outside the model's forward, so it uses the documents
    that the block got the first time.
    """

    def __init__(
        self, block: nn.Module, state: ForwardState, mixers: list[PerDocumentMixer]
    ) -> None:
        self.routers = [module for module in block.modules() if isinstance(module, CountedRouter)]
        names = list(inspect.signature(block.forward).parameters)
        self.mask_positions = {mask: names.index(mask) for mask in MASKS if mask in names}
        self.state, self.mixers, self.calls_before = state, mixers, 0

    def inject(self, block: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Forward pre-hook: replace the block's mask arguments by the documents."""
        state, positions = self.state, self.mask_positions
        documents = state.documents
        if not state.running:  # recomputation: reuse the documents of the first forward
            index = positions.get(MASK, len(args))
            documents = args[index] if index < len(args) else named.get(MASK)
        if MASK not in positions and documents is not None:
            raise ModelError(
                f"{type(block).__name__} has no attention_mask argument, so attention would cross"
                " documents in packed rows; remove documents from the batch"
            )
        self.calls_before = attention.call_count()
        for mixer in self.mixers:
            mixer.documents = documents
        for router in self.routers:
            router.documents = documents
            router.rows = len(args[0] if args else named[HIDDEN])
        new_args = list(args)
        for mask, index in positions.items():
            if index < len(args):
                new_args[index] = documents
            else:
                named = {**named, mask: documents}
        return tuple(new_args), named

    def check(self, block: nn.Module, *_: Any) -> None:
        """Forward hook: check that the block called our attention or has a wrapped mixer."""
        if not self.mixers and attention.call_count() == self.calls_before:
            raise _unsupported_attention(block)


def isolate_documents(block: nn.Module, state: ForwardState, ops: Ops) -> bool:
    """Make a block respect document boundaries, also under recomputation, in place.

    Returns:
        Whether the block has a recurrent or convolutional state in addition to keys and values.

    Raises:
        ModelError: the block has an attention that ours cannot replace.
    """
    mixers = []
    for name, part in list(block.named_children()):
        # A convolution marks a module that mixes positions: Mamba, gated delta nets and the like
        # all have one.
        if any(isinstance(module, nn.Conv1d) for module in part.modules()):
            mixers.append(PerDocumentMixer(part, ops))
            block._modules[name] = mixers[-1]
    if not mixers and not any(map(attention.uses_attention_interface, block.modules())):
        raise _unsupported_attention(block)
    injector = _DocumentInjector(block, state, mixers)
    block.register_forward_pre_hook(injector.inject, with_kwargs=True)
    block.register_forward_hook(injector.check)
    return bool(mixers)


def _unsupported_attention(block: nn.Module) -> ModelError:
    return ModelError(
        f"{type(block).__name__} does not use transformers' attention interface, so attention would"
        " cross packed documents; train this model with transformers"
    )
