"""Keeps documents of packed rows apart in every block of a transformers model.

Attention is ours and receives the documents in place of a mask. Gated delta networks run on our
operators, which support documents. Other modules that mix positions, such as convolutions and
recurrent states, run on each document separately.
"""

import inspect
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ms_parallel.errors import ModelError
from ms_parallel.models.huggingface import attention
from ms_parallel.models.huggingface.around import Around
from ms_parallel.models.huggingface.delta import delta_forward, is_delta
from ms_parallel.models.huggingface.experts import CountedRouter
from ms_parallel.operators.protocol import Ops

MASK, HIDDEN = "attention_mask", "hidden_states"
MASKS = (MASK, "causal_mask")
"""Parameters of blocks through which a mask reaches attention; hybrid layers have both."""


class Now:
    """Documents of the current forward, which are passed to its blocks."""

    def __init__(self) -> None:
        self.running = False
        self.documents: Tensor | None = None
        """(B, cached and new positions) int32."""


class Apart(Around):
    """Runs a module that mixes positions without attention on each document separately.

    Args:
        inner: module that mixes positions.
        ops: operators of gated delta networks, which support documents.
    """

    ops: Ops

    documents: Tensor | None = None
    """(B, S) int32, documents of the current forward of the block."""

    def __init__(self, inner: nn.Module, ops: Ops) -> None:
        super().__init__(inner)
        self.__dict__["ops"] = ops

    def __deepcopy__(self, memo: dict[int, Any]) -> "Apart":
        """Copy the wrapper, but share the operators, which may be a Python module."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)], memo[id(self.ops)] = copied, self.ops
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied

    def forward(self, *args: Any, **named: Any) -> Any:
        """Run the inner module, whose first argument is (B, S, H), on each document separately."""
        hidden, documents = args[0] if args else named[HIDDEN], self.documents
        named = {key: None if key == MASK else value for key, value in named.items()}
        if is_delta(self.inner):  # for all rows, packed or not, so that they round alike
            return delta_forward(self.inner, hidden, documents, self.ops)
        if documents is None or bool((documents == documents[:, :1]).all()):
            return self.inner(*args, **named)
        lengths = [_lengths(numbers) for numbers in documents]
        all_lengths = [length for of_row in lengths for length in of_row]
        outputs: list[Any] = [None] * len(all_lengths)
        for length in set(all_lengths):
            places = [index for index, size in enumerate(all_lengths) if size == length]
            try:
                result = self.inner(
                    *(_pieces(value, lengths, places) for value in args),
                    **{key: _pieces(value, lengths, places) for key, value in named.items()},
                )
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, IndexError) as error:
                raise ModelError(
                    f"{type(self.inner).__name__} cannot run the documents of a packed row one by"
                    " one; leave documents out of the batch"
                ) from error
            for index, row in zip(places, torch.split(_first(result), 1), strict=True):
                outputs[index] = row
        merged = torch.cat(outputs, 1).view(*hidden.shape[:2], -1)
        return merged if isinstance(result, Tensor) else (merged, *[None] * (len(result) - 1))


def _pieces(value: Any, lengths: list[list[int]], places: list[int]) -> Any:
    """Select the parts of an argument that belong to these documents, one per row.

    Args:
        value: (B or 1, S, ...); anything else is passed on unchanged.
        lengths: document lengths of each row.
        places: indices of documents of equal length, counted over all rows.
    """
    is_sequence = isinstance(value, Tensor) and value.ndim > 1
    if (
        not is_sequence
        or value.shape[0] not in (1, len(lengths))
        or value.shape[1] != sum(lengths[0])
    ):
        return value
    rows = value.expand(len(lengths), *value.shape[1:])
    pieces = [
        piece
        for row, row_lengths in zip(rows, lengths, strict=True)
        for piece in row.split(row_lengths)
    ]
    return torch.stack([pieces[index] for index in places])


def _lengths(numbers: Tensor) -> list[int]:
    lengths: list[int] = torch.unique_consecutive(numbers, return_counts=True)[1].tolist()
    return lengths


def _first(found: Any) -> Tensor:
    first: Tensor = found if isinstance(found, Tensor) else found[0]
    return first


class _Given:
    """Documents passed to one block in place of a mask; a copy of the block gets a separate one.

    Recomputation runs outside a forward, so it uses the documents passed to the block before.
    """

    def __init__(self, block: nn.Module, now: Now, mixers: list[Apart]) -> None:
        self.routers = [module for module in block.modules() if isinstance(module, CountedRouter)]
        names = list(inspect.signature(block.forward).parameters)
        self.places = {mask: names.index(mask) for mask in MASKS if mask in names}
        self.now, self.mixers, self.before = now, mixers, 0

    def give(self, block: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Pass the documents to a block before it runs."""
        now, places = self.now, self.places
        documents = now.documents
        if not now.running:  # recomputation: reuse the documents of the first forward
            index = places.get(MASK, len(args))
            documents = args[index] if index < len(args) else named.get(MASK)
        if MASK not in places and documents is not None:
            raise ModelError(
                f"{type(block).__name__} takes no attention_mask, so that attention would cross"
                " documents in packed rows; leave documents out of the batch"
            )
        self.before = attention.calls()
        for mixer in self.mixers:
            mixer.documents = documents
        for router in self.routers:
            router.documents = documents
            router.rows = len(args[0] if args else named[HIDDEN])
        new_args = list(args)
        for mask, index in places.items():
            if index < len(args):
                new_args[index] = documents
            else:
                named = {**named, mask: documents}
        return tuple(new_args), named

    def check(self, block: nn.Module, *_: Any) -> None:
        """Check that a block used our attention, or has a known mixer of another type."""
        if not self.mixers and attention.calls() == self.before:
            raise _own_attention(block)


def keep_apart(block: nn.Module, now: Now, ops: Ops) -> bool:
    """Make a block keep documents apart, also under recomputation, in place.

    Returns:
        Whether some module has a state other than keys and values.

    Raises:
        ModelError: the block mixes positions by an attention that ours cannot replace.
    """
    mixers = []
    for name, part in list(block.named_children()):
        if any(isinstance(module, nn.Conv1d) for module in part.modules()):
            mixers.append(Apart(part, ops))
            block._modules[name] = mixers[-1]
    if not mixers and not any(map(attention.is_asked_by, block.modules())):
        raise _own_attention(block)
    given = _Given(block, now, mixers)
    block.register_forward_pre_hook(given.give, with_kwargs=True)
    block.register_forward_hook(given.check)
    return bool(mixers)


def _own_attention(block: nn.Module) -> ModelError:
    return ModelError(
        f"{type(block).__name__} does not call transformers' attention interface, so packed"
        " documents cannot be kept apart; train this model with transformers"
    )
