"""Checks that data ranks read different rows, and that all ranks of a data rank read the same rows.

Neither mistake shows in the loss: data ranks that repeat each other train on fewer rows than
configured, and pipeline, tensor or context ranks with different rows train on a mixture.

The checks cost no extra messages. Checksums of the data ranks are sent along with the count of
targets, and terms that cancel within each data rank along with the gradient norm. Only the first
update, and any update whose checksums look suspicious, gathers the checksums of all processes.

Data ranks may draw the same rows of a small dataset by chance. Repeated rows therefore cause one
warning. They are an error only if at least `CERTAIN_ROWS` different rows repeat in the first
update, or if rows repeat in `MAX_REPEATS` of the last `RECENT` updates.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor

from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.layout import AXES, row_axes
from ms_parallel.errors import ConfigError
from ms_parallel.models.batch import IGNORED, MEDIA_NAMES, Batch

logger = logging.getLogger(__name__)

SHARED = ("tokens", "targets", "documents")
"""Batch members that must be equal within a data rank; floats may differ in their last bits."""
TERMS = 3
"""Number of values that a step adds to its all-reduce."""
CERTAIN_ROWS = 4
"""Number of different repeated rows in the first update that rules out chance."""
MAX_REPEATS, RECENT = 8, 16
"""Number of updates with repeated rows that is an error, within this many recent updates."""
SAMPLED_MEDIA_ROWS = 64
"""Image patches or spectrogram rows in a checksum; hashing all costs milliseconds per step."""


@frozen(kw_only=True)
class Fingerprint:
    """Checksums of one process's local rows, below 2^48 each; 0 if they are not on the CPU."""

    shared: int = 0
    """Checksum of the members in `SHARED`, compared within a data rank."""
    everything: int = 0
    """Checksum of all members, compared between data ranks; 0 without targets."""
    distinct: int = 0
    """Number of different rows with targets, up to `CERTAIN_ROWS`; 0 for copies of one row."""

    @property
    def numbers(self) -> tuple[int, int]:
        """Numbers that data ranks exchange."""
        return self.everything, self.distinct


def fingerprint(microbatches: Sequence[Batch], weight: float) -> Fingerprint:
    """Compute the checksums of a process's rows; rows on an accelerator are not checked.

    Args:
        microbatches: local rows.
        weight: total loss weight; rows without weight may repeat.
    """
    if not all(_is_on_host(rows["tokens"]) for rows in microbatches):
        return Fingerprint()
    digest = blake2b(digest_size=6)
    for rows in microbatches:
        for name in SHARED:
            _add(digest, name, rows)
    # 0 means unchecked, so a digest of 0 becomes 1.
    shared = int.from_bytes(digest.digest(), "little") or 1
    if not weight:
        return Fingerprint(shared=shared)
    # Continues the same digest, so `everything` covers the shared members too.
    for rows in microbatches:
        for name in sorted(set(rows).difference(SHARED)):
            _add(digest, name, rows)
    return Fingerprint(
        shared=shared,
        everything=int.from_bytes(digest.digest(), "little") or 1,
        distinct=_distinct(microbatches),
    )


class RowCheck:
    """Comparison of the rows that processes pass to one engine.

    Args:
        groups: process groups of the layout.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.local = Fingerprint()
        self.axes = [
            axis for axis in AXES if axis not in row_axes() and getattr(groups.layout, axis) > 1
        ]
        """Axes whose ranks read the same rows."""
        self.is_fake = dist.get_backend() == "fake"
        """Whether collectives send nothing, as in a planner's trial of a layout."""
        self.passed_first = self.is_fake or groups.layout.world_size == 1
        self.warned = False
        self.repeats: deque[bool] = deque(maxlen=RECENT)
        """Whether data ranks had the same two or more rows, for the recent updates."""
        self.suspicion = False

    def check_counts(self, local: Fingerprint, by_data_rank: Sequence[tuple[int, int]]) -> None:
        """Compare the rows before a step's forward; in the first step, across all processes.

        Args:
            local: checksums of this process's rows.
            by_data_rank: `Fingerprint.numbers` of each data rank.

        Raises:
            ConfigError: on every process, if the rows of the first update are wrong.
        """
        self.local = local
        if not self.passed_first:  # a wrong data pipeline shows in the first step
            self._compare_all()
            self.passed_first = True
            self.suspicion = False
            return
        repeated, distinct = _repeated(dict(enumerate(by_data_rank)))
        # A single repeated row does not count: in a small dataset it is often chance.
        self.repeats.append(distinct > 1)
        is_new = bool(repeated) and not self.warned
        self.suspicion = not self.is_fake and (is_new or sum(self.repeats) >= MAX_REPEATS)

    def terms(self) -> Tensor:
        """Return numbers (TERMS,) whose sum over all processes is 0 unless rows look wrong.

        Within a data rank of n processes, the first adds (n-1) times its checksum and the others
        subtract theirs. Integers with sums below 2^24 are exact in float32 in any order.
        """
        terms = torch.zeros(TERMS)
        terms[0] = float(self.suspicion)
        layout, place = self.groups.layout, self.groups.place
        others = layout.world_size // place.count - 1
        if others and not self.is_fake:
            # Hashing in the data rank prevents rows of two swapped data ranks from canceling.
            digest = blake2b(f"{place.rank}/{self.local.shared}".encode(), digest_size=8).digest()
            # Positive terms then sum to less than 2^23 over all processes, and so do negative
            # ones.
            limit = max(2**23 // layout.world_size, 2)
            first = all(getattr(place, axis) == 0 for axis in self.axes)
            # Two independent slots: wrong rows cancel in both with negligible probability.
            for slot, part in enumerate((digest[:4], digest[4:]), start=1):
                number = int.from_bytes(part, "little") % limit
                terms[slot] = float(number * others if first else -number)
        return terms

    def check_totals(self, total: Sequence[float]) -> None:
        """Compare the rows of all processes if the sum of their `terms` is not 0.

        Raises:
            ConfigError: on every process, if the rows are wrong.
        """
        if not self.is_fake and any(total):
            self._compare_all()

    def compare_within(self, microbatches: Sequence[Batch]) -> None:
        """Compare the rows of all processes of this data rank; all of them must call it.

        Raises:
            ConfigError: the rows differ; raised on every process.
        """
        if not self.axes or self.is_fake:
            return
        # Weight 0 skips the checksum of all members.
        shared = fingerprint(microbatches, 0.0).shared
        facts = self._facts(evolve(self.local, shared=shared))
        # Grows to all processes of the data rank, one axis at a time.
        for axis in self.axes:
            facts = _gather(facts, self.groups, axis)
        _check_agreement(_decode(facts))

    def _compare_all(self) -> None:
        members = _decode(_gather(self._facts(self.local), self.groups, None))
        _check_agreement(members)
        by_data_rank: dict[int, tuple[int, int]] = {}
        for member in members:
            by_data_rank.setdefault(member.data_rank, member.rows.numbers)
        repeated, distinct = _repeated(by_data_rank)
        if not repeated:
            return
        ranks = ", ".join(map(str, repeated[:8])) + (", ..." if len(repeated) > 8 else "")
        text = (
            f"data ranks must read different rows, but data ranks {ranks} have the same rows; use"
            " TokenStream(..., place=groups.place) with the engine's groups"
        )
        is_first = not self.passed_first
        if (is_first and distinct >= CERTAIN_ROWS) or sum(self.repeats) >= MAX_REPEATS:
            raise ConfigError(text)
        if not self.warned and dist.get_rank() == 0:
            logger.warning("%s (rows of a small dataset may repeat by chance)", text)
        self.warned = True

    def _facts(self, local: Fingerprint) -> Tensor:
        """Encode a fingerprint as (1, 9) float32 integers, exact on every backend."""
        facts = [dist.get_rank(), self.groups.place.rank, local.distinct]
        facts += [*_words(local.shared), *_words(local.everything)]
        return torch.tensor([facts], dtype=torch.float32)


@frozen(kw_only=True)
class _Member:
    """Checksums of one process's rows."""

    rank: int
    data_rank: int
    rows: Fingerprint


def _decode(facts: Tensor) -> list[_Member]:
    return [
        _Member(
            rank=rank,
            data_rank=data_rank,
            rows=Fingerprint(
                shared=_number(words[:3]), everything=_number(words[3:]), distinct=distinct
            ),
        )
        # Columns as in `_facts`; 3 words for each of the two checksums.
        for rank, data_rank, distinct, *words in facts.long().tolist()
    ]


def _words(number: int) -> list[int]:
    """Split a number below 2^48 into three 16-bit words."""
    return [(number >> shift) & 0xFFFF for shift in (0, 16, 32)]


def _number(words: Sequence[int]) -> int:
    return sum(word << shift for word, shift in zip(words, (0, 16, 32), strict=True))


def _gather(facts: Tensor, groups: Groups, axis: str | None) -> Tensor:
    """Gather facts (n, 9) of the processes along an axis; None for all processes."""
    group = None if axis is None else groups.group(axis)
    local = facts.to(groups.message_device)
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local, group=group)
    return torch.cat(parts).cpu()


def _check_agreement(members: Sequence[_Member]) -> None:
    """Check that the processes of each data rank have the same rows.

    Raises:
        ConfigError: they differ.
    """
    firsts: dict[int, _Member] = {}
    for member in members:
        if not member.rows.shared:  # on an accelerator
            continue
        first = firsts.setdefault(member.data_rank, member)
        if first.rows.shared != member.rows.shared:
            raise ConfigError(
                f"all processes of a data rank must read the same rows, but ranks {first.rank} and"
                f" {member.rank} of data rank {member.data_rank} have different rows; use"
                " TokenStream(..., place=groups.place) with the engine's groups"
            )


def _repeated(by_data_rank: Mapping[int, tuple[int, int]]) -> tuple[list[int], int]:
    """Return the largest group of data ranks with equal rows, and the number of different rows.

    Groups with more different rows take precedence.
    """
    owners: dict[tuple[int, int], list[int]] = {}
    for data_rank, numbers in by_data_rank.items():
        if numbers[1]:
            owners.setdefault(numbers, []).append(data_rank)
    groups = [(ranks, distinct) for (_, distinct), ranks in owners.items() if len(ranks) > 1]
    return max(groups, key=lambda group: (group[1], len(group[0])), default=([], 0))


def _is_on_host(value: Tensor) -> bool:
    return type(value) is Tensor and value.device.type == "cpu"


def _add(digest: "blake2b", name: str, rows: Batch) -> None:
    """Add a member of a batch to a checksum."""
    value = rows.get(name)
    if value is None or not _is_on_host(value):
        return
    if name in MEDIA_NAMES and value.is_floating_point():
        value = value.flatten(0, -2)
        value = value[:: max(1, len(value) // SAMPLED_MEDIA_ROWS)]
    if not value.is_floating_point() and not value.is_complex():
        value = value.to(torch.int64)  # int32 tokens are the same rows
    digest.update(f"{name}{tuple(value.shape)}".encode())
    contents = value.detach().contiguous().flatten().view(torch.uint8)
    digest.update(contents.numpy().tobytes())


def _distinct(microbatches: Sequence[Batch]) -> int:
    """Count the different rows with targets, up to `CERTAIN_ROWS`; 0 for copies of one row.

    Rows without targets are padding. With a small dataset every rank may have copies of one row, so
    copies are no evidence that a rank reads another rank's rows.
    """
    different: list[Tensor] = []
    count = 0
    for rows in microbatches:
        tokens = rows["tokens"]
        counted = torch.ones_like(tokens, dtype=torch.bool)
        for name, ignored in (("targets", IGNORED), ("weights", 0)):
            value = rows.get(name)
            if value is not None and _is_on_host(value) and value.shape == tokens.shape:
                counted &= value != ignored
        for row in tokens[counted.flatten(1).any(1)]:
            count += 1
            if not any(torch.equal(row, other) for other in different):
                different.append(row)
            if len(different) == CERTAIN_ROWS:
                return CERTAIN_ROWS
    return len(different) if len(different) > 1 else int(count == 1)
