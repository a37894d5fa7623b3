"""Keeps the documents of packed rows apart in every block of a model of transformers.

Attention is ours, and is given the documents in place of a mask. Gated delta networks are run by
operators that know documents. What else mixes positions, a convolution or a recurrent state, is run
on each document alone.
"""

import inspect
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ms_parallel.errors import ModelError
from ms_parallel.models.foreign import attention
from ms_parallel.models.foreign.around import Around
from ms_parallel.models.foreign.delta import delta_forward, is_delta
from ms_parallel.models.foreign.experts import CountedRouter
from ms_parallel.operators.protocol import Ops

MASK, HIDDEN = "attention_mask", "hidden_states"
MASKS = (MASK, "causal_mask")
"""Parameters of blocks through which a mask reaches attention; hybrid layers have both."""


class Now:
    """The documents of the forward that runs, which its blocks are given."""

    def __init__(self) -> None:
        self.running = False
        self.documents: Tensor | None = None
        """(B, positions held and new) int32."""


class Apart(Around):
    """Runs what mixes positions otherwise than by attention on each document alone.

    Args:
        inner: what mixes them.
        ops: operators of gated delta networks, which know documents.
    """

    ops: Ops

    documents: Tensor | None = None
    """(B, S) int32 of the forward of the block that runs."""

    def __init__(self, inner: nn.Module, ops: Ops) -> None:
        super().__init__(inner)
        self.__dict__["ops"] = ops

    def __deepcopy__(self, memo: dict[int, Any]) -> "Apart":
        """Copy it, but share the operators, which may be a whole module of Python."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)], memo[id(self.ops)] = copied, self.ops
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied

    def forward(self, *args: Any, **named: Any) -> Any:
        """Run the inner module, whose first argument is (B, S, H), on each document apart."""
        hidden, documents = args[0] if args else named[HIDDEN], self.documents
        named = {key: None if key == MASK else value for key, value in named.items()}
        if is_delta(self.inner):  # one rule for packed rows and for others: they round alike
            return delta_forward(self.inner, hidden, documents, self.ops)
        if documents is None or bool((documents == documents[:, :1]).all()):
            return self.inner(*args, **named)
        lengths = [_lengths(numbers) for numbers in documents]
        each_length = [length for of_row in lengths for length in of_row]
        made: list[Any] = [None] * len(each_length)
        for length in set(each_length):
            places = [at for at, each in enumerate(each_length) if each == length]
            try:
                found = self.inner(
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
            for at, each in zip(places, torch.split(_first(found), 1), strict=True):
                made[at] = each
        whole = torch.cat(made, 1).view(*hidden.shape[:2], -1)
        return whole if isinstance(found, Tensor) else (whole, *[None] * (len(found) - 1))


def _pieces(value: Any, lengths: list[list[int]], places: list[int]) -> Any:
    """Cut out what an argument holds of the documents at these places, each in a row of its own.

    Args:
        value: (B or 1, S, ...); anything else is given to all as it is.
        lengths: of the documents of each row.
        places: of documents of one length, counted through all rows.
    """
    known = isinstance(value, Tensor) and value.ndim > 1
    if not known or value.shape[0] not in (1, len(lengths)) or value.shape[1] != sum(lengths[0]):
        return value
    rows = value.expand(len(lengths), *value.shape[1:])
    pieces = [piece for row, each in zip(rows, lengths, strict=True) for piece in row.split(each)]
    return torch.stack([pieces[at] for at in places])


def _lengths(numbers: Tensor) -> list[int]:
    lengths: list[int] = torch.unique_consecutive(numbers, return_counts=True)[1].tolist()
    return lengths


def _first(found: Any) -> Tensor:
    first: Tensor = found if isinstance(found, Tensor) else found[0]
    return first


class _Given:
    """What one block is given in place of a mask; a copy of the block has one of its own.

    What a block is given is kept for recomputation, which runs when no forward does.
    """

    def __init__(self, block: nn.Module, now: Now, mixers: list[Apart]) -> None:
        self.routers = [each for each in block.modules() if isinstance(each, CountedRouter)]
        names = list(inspect.signature(block.forward).parameters)
        self.places = {mask: names.index(mask) for mask in MASKS if mask in names}
        self.now, self.mixers, self.before = now, mixers, 0

    def give(self, block: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Hand a block the documents, before it runs."""
        now, places = self.now, self.places
        documents = now.documents
        if not now.running:  # recomputed: as the first forward was given
            at = places.get(MASK, len(args))
            documents = args[at] if at < len(args) else named.get(MASK)
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
        given = list(args)
        for mask, at in places.items():
            if at < len(args):
                given[at] = documents
            else:
                named = {**named, mask: documents}
        return tuple(given), named

    def check(self, block: nn.Module, *_: Any) -> None:
        """Check that a block that ran asked for our attention, or is known to mix otherwise."""
        if not self.mixers and attention.calls() == self.before:
            raise _own_attention(block)


def keep_apart(block: nn.Module, now: Now, ops: Ops) -> bool:
    """Give a block its rows' documents, also when it is computed again, in place.

    Returns:
        Whether something in it has a state beside keys and values.

    Raises:
        ModelError: it mixes positions by an attention that ours cannot stand for.
    """
    mixers = []
    for name, part in list(block.named_children()):
        if any(isinstance(each, nn.Conv1d) for each in part.modules()):
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
