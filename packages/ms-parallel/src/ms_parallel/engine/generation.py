"""Token-by-token generation with a key-value cache, under any layout."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from attrs import field, frozen
from torch import Tensor, nn

from ms_parallel.arguments import check_items
from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.loss import Output
from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.models.batch import Batch, check_tokens
from ms_parallel.models.cache import KeyValueCache
from ms_parallel.settings import integer, number, short_repr
from ms_parallel.split.part import drop_gathered


class GenerationEngine(Protocol):
    """The part of the engine's interface that generation uses."""

    @property
    def groups(self) -> Groups:
        """Process groups of the layout."""

    @property
    def sequence_parts(self) -> int:
        """Number of slices of a sequence between blocks (sequence parallelism)."""

    @property
    def stages(self) -> Mapping[int, nn.Module]:
        """This process's stages by number."""

    @property
    def vocabulary(self) -> int | None:
        """Vocabulary size; None if unknown."""

    def forward(
        self,
        microbatches: Sequence[Batch],
        function: Callable[[Output, Batch], Tensor],
        *,
        caches: Mapping[int, KeyValueCache] | None = ...,
    ) -> list[Tensor]:
        """Return `function(output, microbatch)` of each; empty except on the last stage."""

    def broadcast_from_last_stage(self, result: Tensor | None) -> Tensor:
        """Send the last stage's result to every process of its data rank."""


@frozen(kw_only=True)
class Sampling:
    """Sampling settings for the next token."""

    temperature: float = field(default=1.0, validator=number())
    """Divisor of the logits; 0 is greedy decoding."""
    top_k: int | None = field(default=None, validator=integer(optional=True))
    """Sample from the k most likely tokens; None disables top-k."""
    top_p: float = field(default=1.0, validator=number(minimum=1e-30, maximum=1.0))
    """Nucleus sampling: sample from the smallest set of tokens with this total probability."""
    min_p: float = field(default=0.0, validator=number(maximum=1.0))
    """Drop tokens less likely than this fraction of the most likely token's probability."""
    seed: int = 0
    """Random seed; the same seed gives the same tokens under every layout."""


@torch.no_grad()
def generate(
    engine: GenerationEngine,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stops: Collection[int] = (),
    compare: Callable[[Sequence[Batch]], None] | None = None,
) -> list[list[int]]:
    """Generate the tokens after each prompt, up to and including the first of `stops`.

    All processes of one data rank pass the same prompts. Every data rank passes the same number of
    prompts, of any length. Random numbers depend only on the seed, the prompt's index among all
    prompts of all data ranks and the token's index, so results do not depend on the layout.
    `compare` checks that the prompts agree.

    Returns:
        The new tokens of each prompt, without the prompt.

    Raises:
        ModelError: a prompt is not a list of integers.
        ConfigError: the list of prompts is empty, a prompt is empty or has a token outside the
            vocabulary, processes of one data rank pass different prompts, or `max_new_tokens` is
            not a non-negative integer.
    """
    if type(max_new_tokens) is not int or max_new_tokens < 0:
        raise ConfigError(
            f"max_new_tokens must be a whole number of at least 0, got {short_repr(max_new_tokens)}"
        )
    window = _PromptBatches(_rows_of(prompts), engine.sequence_parts)
    caches = {stage: KeyValueCache() for stage in engine.stages}
    generated: list[Tensor] = []
    finished = torch.zeros(len(prompts), dtype=torch.bool)
    rank_and_count = (engine.groups.place.rank, engine.groups.place.count)
    batch, cached_length = window.first(), window.width
    if engine.vocabulary is not None:
        check_tokens(batch, engine.vocabulary)
    if compare is not None:
        compare([batch])
    for index in range(max_new_tokens):
        # Left padding puts the last prompt token of every row in the last column.
        logits = _forward(engine, batch, caches, at=window.width - 1 if index == 0 else 0)
        for cache in caches.values():  # drop padding after the new token
            cache.rewind(cached_length)
        sampled = (
            None if logits is None else sample_tokens(logits, sampling, index, *rank_and_count)
        )
        # All processes continue with the tokens that the last stage sampled.
        tokens = engine.broadcast_from_last_stage(sampled).cpu()
        generated.append(tokens)
        if stops:
            # Finished rows continue until all rows are done; `_truncate` drops their extra tokens.
            finished |= torch.isin(tokens, torch.tensor(sorted(stops)))
            if _all_done(engine, finished):
                break
        batch = window.next(tokens, index)
        cached_length += 1
    for stage in engine.stages.values():
        drop_gathered(stage)
    rows = torch.stack(generated, dim=1).tolist() if generated else [[] for _ in prompts]
    return [_truncate(row, stops) for row in rows]


def stop_tokens(config: Any, stop_token: int | Collection[int] | str | None) -> Collection[int]:
    """Return the stop tokens; `"eos"` means the `eos_token_id` of the model configuration."""
    stops: Any = config.eos_token_id if stop_token == "eos" else stop_token
    if stops is None or isinstance(stops, int):
        return () if stops is None else (stops,)
    check_items("stop_token", stops, int, "token ids", error=ConfigError)
    return tuple(stops)


def _rows_of(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Convert prompts given as lists, arrays or tensors to lists of token ids."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise ModelError(
            "prompts must be a list of prompts, each a list of token ids, got"
            f" {type(prompts).__name__}; encode texts with the model's tokenizer"
        )
    return [_row_of(prompt, index) for index, prompt in enumerate(prompts)]


def _row_of(prompt: Any, index: int) -> list[int]:
    try:
        tokens = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError):
        got = f"{type(prompt).__name__} {short_repr(prompt)}"
    else:
        integers = not (tokens.is_floating_point() or tokens.is_complex())
        if tokens.ndim == 1 and (not len(tokens) or (integers and tokens.dtype != torch.bool)):
            row: list[int] = tokens.tolist()
            return row
        got = f"a tensor {tuple(tokens.shape)} {str(tokens.dtype).removeprefix('torch.')}"
    raise ModelError(
        f"prompt {index} must be a list of token ids, (S,) integers, got {got}; encode texts with"
        " the model's tokenizer"
    )


class _PromptBatches:
    """Input batches of generation: the prompts, then one token at a time.

    Prompts are left-padded, and the padding is a separate document. If the sequence is split over
    `parts` ranks, each batch is padded to a multiple of `parts`, and the cache is rewound to drop
    the positions after the new token.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], parts: int) -> None:
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise ConfigError("prompts must have at least one token each, got an empty prompt")
        self.parts = parts
        self.lengths = torch.tensor([len(prompt) for prompt in prompts])
        self.width = -(-int(self.lengths.max()) // parts) * parts
        self.prompts = prompts
        self.padded = bool((self.lengths < self.width).any())

    def first(self) -> Batch:
        pads = self.width - self.lengths
        tokens = torch.zeros(len(self.prompts), self.width, dtype=torch.int64)
        for row, prompt in zip(tokens, self.prompts, strict=True):
            row[self.width - len(prompt) :] = torch.as_tensor(prompt)
        positions = torch.arange(self.width) - pads[:, None]  # (B, width), negative for padding
        batch = {"tokens": tokens, "positions": positions.clamp(min=0)}
        if self.padded:
            # Document 0 is the padding, 1 the sequence.
            batch["documents"] = (positions >= 0).int()
        return batch

    def next(self, tokens: Tensor, index: int) -> Batch:
        """Build the batch whose first column is token number `index` after the prompts."""
        rows = torch.zeros(len(tokens), self.parts, dtype=torch.int64)
        rows[:, 0] = tokens
        positions = (self.lengths + index)[:, None] + torch.arange(self.parts)
        batch = {"tokens": rows, "positions": positions}
        if self.padded:
            batch["documents"] = torch.ones(rows.shape, dtype=torch.int32)
        return batch


def _forward(
    engine: GenerationEngine, batch: Batch, caches: dict[int, KeyValueCache], at: int
) -> Tensor | None:
    """Compute the logits (B, V) of one position; None except on the last stage."""

    def logits_at(output: Output, _: Batch) -> Tensor:
        return output.logits(slice(at, at + 1))[:, 0]

    results = engine.forward([batch], logits_at, caches=caches)
    return results[0] if results else None


def sample_tokens(
    logits: Tensor, sampling: Sampling, index: int, part: int = 0, parts: int = 1
) -> Tensor:
    """Sample one token per row, (B,) int64 on the CPU, from logits (B, V) on their device.

    Inverse transform sampling in float64: one uniform number per row is looked up in the cumulative
    distribution. Rounding differences between layouts change a token only if its boundary crosses
    that number.
    """
    scores = logits.double()
    if sampling.temperature == 0.0:
        return scores.argmax(dim=1).cpu()
    scores = _filter_logits(scores / sampling.temperature, sampling)
    generator = torch.Generator().manual_seed(_seed_at(sampling.seed, index))
    rows = scores.shape[0]
    # Every rank draws for all rows of all data ranks, so the numbers do not depend on the layout.
    uniform = torch.rand(parts * rows, generator=generator, dtype=torch.float64)
    cumulative = scores.softmax(dim=1).cumsum(dim=1)  # (B, V)
    # Scaled by the total, which is not exactly 1 after rounding. With right=True, tokens of
    # probability 0 are never chosen.
    uniforms = uniform[part * rows : (part + 1) * rows, None].to(scores.device)
    tokens = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)[:, 0]
    return tokens.clamp(max=scores.shape[1] - 1).cpu()


def _seed_at(seed: int, index: int) -> int:
    """Hash the seed and a position to 32 bits, the number of bits that torch's generator uses."""
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def _filter_logits(scores: Tensor, sampling: Sampling) -> Tensor:
    """Apply top-k, top-p and min-p, in this order, to scores (B, V); excluded tokens get -inf."""
    if sampling.top_k is not None and sampling.top_k < scores.shape[1]:
        # Ties with the k-th token stay.
        lowest = scores.topk(sampling.top_k, dim=1).values[:, -1:]
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, index = scores.sort(dim=1, descending=True, stable=True)
        probabilities = ordered.softmax(dim=1)
        # A token stays if the tokens before it have not reached top_p yet.
        preceding = probabilities.cumsum(dim=1) - probabilities
        excluded = torch.zeros_like(scores, dtype=torch.bool)
        scores = scores.masked_fill(
            excluded.scatter_(1, index, preceding >= sampling.top_p), -torch.inf
        )
    if sampling.min_p > 0.0:
        probabilities = scores.softmax(dim=1)
        lowest = sampling.min_p * probabilities.amax(dim=1, keepdim=True)
        scores = scores.masked_fill(probabilities < lowest, -torch.inf)
    return scores


def _all_done(engine: GenerationEngine, done: Tensor) -> bool:
    """Whether all rows of all data ranks have stopped; collective, so all ranks stop together."""
    flag = done.all().int().reshape(1).to(engine.groups.device)
    return bool(engine.groups.all_reduce(flag, "rows", dist.ReduceOp.MIN))


def _truncate(tokens: list[int], stops: Collection[int]) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[: end + 1]
