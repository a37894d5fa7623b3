"""Continues prompts token by token, with a key-value cache, under any layout."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from attrs import field, frozen
from torch import Tensor, nn

from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.loss import Output
from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.models.batch import Batch, check_tokens
from ms_parallel.models.cache import KeyValueCache
from ms_parallel.settings import number, shown, whole
from ms_parallel.split.part import drop_gathered


class Forwards(Protocol):
    """What generation asks of an engine."""

    @property
    def groups(self) -> Groups:
        """The layout's processes."""

    @property
    def sequence_parts(self) -> int:
        """Into how many parts a sequence is split between blocks."""

    @property
    def stages(self) -> Mapping[int, nn.Module]:
        """This process's, by number."""

    @property
    def vocabulary(self) -> int | None:
        """Tokens that the model knows; None where it does not say."""

    def forward(
        self,
        microbatches: Sequence[Batch],
        function: Callable[[Output, Batch], Tensor],
        *,
        caches: Mapping[int, KeyValueCache] | None = ...,
    ) -> list[Tensor]:
        """List `function(output, microbatch)` of each; nothing away from the last stage."""

    def share(self, result: Tensor | None) -> Tensor:
        """Share what the last stage has made with every process of its data rank."""


@frozen(kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = field(default=1.0, validator=number())
    """Divides the logits; 0 always takes the likeliest."""
    top_k: int | None = field(default=None, validator=whole(optional=True))
    """Only so many likeliest tokens are ever chosen; None for all."""
    top_p: float = field(default=1.0, validator=number(least=1e-30, most=1.0))
    """Only the likeliest tokens that together reach this probability are ever chosen."""
    min_p: float = field(default=0.0, validator=number(most=1.0))
    """Only tokens of at least this share of the likeliest one's probability are ever chosen."""
    seed: int = 0
    """Seed of the random numbers; the same seed gives the same tokens under every layout."""


@torch.no_grad()
def generate(
    engine: Forwards,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stops: Collection[int] = (),
    compare: Callable[[Sequence[Batch]], None] | None = None,
) -> list[list[int]]:
    """Generate the tokens after each prompt, without it, up to the first of `stops`, included.

    All processes of one data rank pass the same prompts; every data rank as many, of any length.
    Random numbers depend on the seed, on the prompt's place among those of all data ranks and on
    the token's place alone, so another layout draws the same. `compare` checks that the prompts are
    the same.

    Raises:
        ModelError: a prompt is not a row of integers.
        ConfigError: a prompt is empty or holds what is no token of the model, there is none,
            processes of one data rank pass different prompts, or `max_new_tokens` is not a whole
            number.
    """
    if type(max_new_tokens) is not int or max_new_tokens < 0:
        raise ConfigError(
            f"max_new_tokens must be a whole number of at least 0, got {shown(max_new_tokens)}"
        )
    window = _Window(_rows_of(prompts), engine.sequence_parts)
    caches = {stage: KeyValueCache() for stage in engine.stages}
    written: list[Tensor] = []
    done = torch.zeros(len(prompts), dtype=torch.bool)
    parts = (engine.groups.place.rank, engine.groups.place.count)
    batch, held = window.first(), window.width
    if engine.vocabulary is not None:
        check_tokens(batch, engine.vocabulary)
    if compare is not None:
        compare([batch])
    for index in range(max_new_tokens):
        logits = _forward(engine, batch, caches, at=window.width - 1 if index == 0 else 0)
        for cache in caches.values():
            cache.rewind(held)
        chosen = None if logits is None else pick(logits, sampling, index, *parts)
        tokens = engine.share(chosen).cpu()
        written.append(tokens)
        if stops:
            done |= torch.isin(tokens, torch.tensor(sorted(stops)))
            if _all_done(engine, done):
                break
        batch = window.next(tokens, index)
        held += 1
    for stage in engine.stages.values():
        drop_gathered(stage)
    rows = torch.stack(written, dim=1).tolist() if written else [[] for _ in prompts]
    return [_until(row, stops) for row in rows]


def stops_of(config: Any, stop_token: int | Collection[int] | str | None) -> Collection[int]:
    """List the tokens that end a row; those that a configuration names for `"eos"`."""
    chosen: Any = config.eos_token_id if stop_token == "eos" else stop_token
    return () if chosen is None else (chosen,) if isinstance(chosen, int) else tuple(chosen)


def _rows_of(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """List the tokens of each prompt, given as lists, arrays or tensors."""
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
        got = f"{type(prompt).__name__} {shown(prompt)}"
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


class _Window:
    """The batches that a stage sees: the prompts, then one token at a time.

    Prompts are padded on the left, pads being a document of their own. Where the sequence is
    split over `parts` ranks each batch is as long as that needs; what follows the one new token
    is forgotten by the cache.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], parts: int) -> None:
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise ConfigError("a prompt is empty; give each at least one token")
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
        positions = torch.arange(self.width) - pads[:, None]
        batch = {"tokens": tokens, "positions": positions.clamp(min=0)}
        if self.padded:
            batch["documents"] = (positions >= 0).int()
        return batch

    def next(self, tokens: Tensor, index: int) -> Batch:
        """Build the batch whose first column is the token `index` after the prompts."""
        rows = torch.zeros(len(tokens), self.parts, dtype=torch.int64)
        rows[:, 0] = tokens
        positions = (self.lengths + index)[:, None] + torch.arange(self.parts)
        batch = {"tokens": rows, "positions": positions}
        if self.padded:
            batch["documents"] = torch.ones(rows.shape, dtype=torch.int32)
        return batch


def _forward(
    engine: Forwards, batch: Batch, caches: dict[int, KeyValueCache], at: int
) -> Tensor | None:
    """Compute the logits (B, V) of one position on the last stage; return None on others."""

    def logits_at(output: Output, _: Batch) -> Tensor:
        return output.logits(slice(at, at + 1))[:, 0]

    results = engine.forward([batch], logits_at, caches=caches)
    return results[0] if results else None


def pick(logits: Tensor, sampling: Sampling, index: int, part: int = 0, parts: int = 1) -> Tensor:
    """Choose a token a row, (B,) int64 on CPU, from logits (B, V).

    Inverts the cumulative distribution at one uniform number a row, in float64, so that small
    differences of logits between layouts change a choice only if they straddle that number.
    """
    scores = logits.cpu().double()
    if sampling.temperature == 0.0:
        return scores.argmax(dim=1)
    scores = _cut(scores / sampling.temperature, sampling)
    generator = torch.Generator().manual_seed(_seed_at(sampling.seed, index))
    rows = scores.shape[0]
    uniform = torch.rand(parts * rows, generator=generator, dtype=torch.float64)
    cumulative = scores.softmax(dim=1).cumsum(dim=1)
    at = uniform[part * rows : (part + 1) * rows, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, at, right=True)[:, 0].clamp(max=scores.shape[1] - 1)


def _seed_at(seed: int, index: int) -> int:
    """Hash the seed of a position's random number, as torch's generator takes 32 bits of it."""
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def _cut(scores: Tensor, sampling: Sampling) -> Tensor:
    """Return scores (B, V), -inf for tokens never chosen: by top-k, then top-p, then min-p."""
    if sampling.top_k is not None and sampling.top_k < scores.shape[1]:
        lowest = scores.topk(sampling.top_k, dim=1).values[:, -1:]
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, index = scores.sort(dim=1, descending=True, stable=True)
        probabilities = ordered.softmax(dim=1)
        before = probabilities.cumsum(dim=1) - probabilities
        beyond = torch.zeros_like(scores, dtype=torch.bool)
        scores = scores.masked_fill(beyond.scatter_(1, index, before >= sampling.top_p), -torch.inf)
    if sampling.min_p > 0.0:
        probabilities = scores.softmax(dim=1)
        lowest = sampling.min_p * probabilities.amax(dim=1, keepdim=True)
        scores = scores.masked_fill(probabilities < lowest, -torch.inf)
    return scores


def _all_done(engine: Forwards, done: Tensor) -> bool:
    """Return whether every row of every data rank has stopped, as all must take the same steps."""
    flag = done.all().int().reshape(1).to(engine.groups.device)
    return bool(engine.groups.all_reduce(flag, "rows", dist.ReduceOp.MIN))


def _until(tokens: list[int], stops: Collection[int]) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[: end + 1]
