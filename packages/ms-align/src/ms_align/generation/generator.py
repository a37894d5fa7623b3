"""Continuous batching: a finished row is replaced by the next prompt immediately.

Each prompt is prefilled once, regardless of the number of its responses. Random numbers depend only
on the seed, the index of the response and the position of the token, not on the other rows in the
batch, and are the same as in `ms_parallel.Engine.generate`. Shapes:
N responses, T longest response, B active rows, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from attrs import define
from torch import Tensor, nn

from ms_align.arguments import check_integer, check_type, shown
from ms_align.errors import ConfigError, DataError, ModelError
from ms_align.generation.columns import Columns
from ms_align.generation.drawing import SampledTokens, sample_tokens
from ms_align.generation.fused import fused_reader
from ms_align.generation.reader import Reader, reader_of
from ms_align.generation.responses import Responses
from ms_align.generation.sampling import Sampling
from ms_align.generation.stops import Decode, contains_stop_string, max_stop_tokens
from ms_align.models.language_model import LanguageModel, check_tokens, language_model
from ms_align.seeds import position_seed

CHECK_EVERY = 8
"""Tokens between checks for finished rows on an accelerator; each check synchronizes."""


class LocalGenerator:
    """Generates responses with a model in this process.

    Args:
        model: model of ms-parallel or transformers.
        max_num_seqs: rows generated at the same time.
        decode: converts tokens to text; needed for stop strings only.
        fused: for Llama-like models, use fused weights, with which a step needs a third of the
            kernel calls. They are copied at every call, as training changes the weights. Other
            models, and models with adapters, run unchanged.

    Raises:
        ModelError: the model does not support a KV cache.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_num_seqs: int = 64,
        decode: Decode | None = None,
        fused: bool = True,
    ) -> None:
        self.model: LanguageModel = language_model(model)
        check_integer("max_num_seqs", max_num_seqs, minimum=1, error=ConfigError)
        if decode is not None and not callable(decode):
            raise ConfigError(f"decode must be a function of token ids, got {shown(decode)}")
        self.max_num_seqs = max_num_seqs
        self.decode = decode
        self.fused = fused
        self._verified = False
        reader_of(self.model)

    @torch.no_grad()
    def _reader(self) -> Reader:
        reader = fused_reader(self.model, verified=self._verified) if self.fused else None
        self._verified = self.fused = reader is not None
        return reader or reader_of(self.model)

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        count: int = 1,
        seed: int = 0,
    ) -> Responses:
        """Generate `count` responses per prompt; responses to a prompt are adjacent.

        Raises:
            DataError: a prompt is empty, or too long for the model's context.
            ModelError: there are stop strings, but no `decode`.
        """
        check_prompts(prompts, sampling, self.model)
        if sampling.stop_strings and self.decode is None:
            raise ModelError("stop_strings need a tokenizer to decode tokens; pass decode=")
        training = self.model.module.training
        self.model.module.eval()
        device = next(self.model.module.parameters()).device
        buffer = _ResponseBuffer.empty(len(prompts) * count, sampling, seed, device)
        # Reversed, so that pop() takes the responses in order.
        queue = list(range(len(prompts) * count))[::-1]
        longest = max(len(prompt) for prompt in prompts) + sampling.max_new_tokens
        # Tokens after the end of a row are discarded, so checking less often changes no response.
        # Stop strings are matched on the host, so they need a check at every token.
        interval = 1 if device.type == "cpu" or sampling.stop_strings else CHECK_EVERY
        steps = 0  # since the last prefill
        active = _ActiveRows.empty(
            Columns(longest + interval, max_rows=min(self.max_num_seqs, len(queue))), device
        )
        reader = self._reader()
        while queue or len(active.rows):
            if queue and len(active.rows) < self.max_num_seqs:
                free = self.max_num_seqs - len(active.rows)
                new = [queue.pop() for _ in range(min(free, len(queue)))]
                self._prefill(reader, new, prompts, count, active, buffer)
                steps = 0
            else:
                logits = reader.step(active.tokens, active.positions, active.columns)
                # A finished row may stay in the batch, but must not run beyond the context.
                active.positions = active.positions + (~buffer.finished[active.rows]).long()
                sampled = buffer.sample(logits, active.rows)
                buffer.append(active.rows, sampled)
                active.tokens = sampled.tokens
                steps += 1
            finished = buffer.update_finished(active.rows, active.tokens, self.decode)
            # Counted from the end, so that rows that never stop are checked at their last token.
            if steps == 0 or (sampling.max_new_tokens - 1 - steps) % interval == 0:
                _drop_finished(active, finished, lazily=not queue)
        self.model.module.train(training)
        return buffer.responses()

    def _prefill(
        self,
        reader: Reader,
        new: list[int],
        prompts: Sequence[Sequence[int]],
        count: int,
        active: "_ActiveRows",
        buffer: "_ResponseBuffer",
    ) -> None:
        """Prefill the distinct prompts of new rows, and sample the first tokens."""
        distinct = sorted({row // count for row in new})
        copies = torch.tensor([distinct.index(row // count) for row in new])  # prompt of each row
        lengths = torch.tensor([len(prompts[index]) for index in distinct])
        device = buffer.tokens.device
        tokens = torch.zeros(len(distinct), int(lengths.max()), dtype=torch.int64)
        for row, index in enumerate(distinct):
            tokens[row, : len(prompts[index])] = torch.as_tensor(prompts[index])
        logits, layers = reader.prefill(tokens.to(device), lengths.to(device))
        rows = torch.tensor(new, device=device)
        active.columns.add(layers, lengths, copies)
        active.positions = torch.cat((active.positions, lengths[copies].to(device)))
        sampled = buffer.sample(logits[copies.to(device)], rows)
        buffer.append(rows, sampled)
        active.rows = torch.cat((active.rows, rows))
        active.tokens = torch.cat((active.tokens, sampled.tokens))


@define
class _ActiveRows:
    """Rows in the current batch."""

    columns: Columns
    rows: Tensor
    """(B,) index of the response in each row."""
    tokens: Tensor
    """(B,) newest tokens."""
    positions: Tensor
    """(B,) positions of the newest tokens."""

    @classmethod
    def empty(cls, columns: Columns, device: torch.device) -> "_ActiveRows":
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(columns=columns, rows=none, tokens=none, positions=none)

    def drop(self, finished: Tensor) -> None:
        index = self.columns.drop(finished)
        self.rows, self.tokens = self.rows[index], self.tokens[index]
        self.positions = self.positions[index]


def _drop_finished(active: _ActiveRows, finished: Tensor, *, lazily: bool) -> None:
    """Drop finished rows; `lazily` only once an eighth of the rows are finished.

    Generating tokens that are discarded costs less than compacting the cache for each row.
    """
    finished = finished.cpu()
    count = int(finished.sum())
    if count and (not lazily or count == len(finished) or count >= max(1, len(finished) // 8)):
        active.drop(finished)


@define
class _ResponseBuffer:
    """Tokens and log-probabilities of all responses, finished or not."""

    sampling: Sampling
    uniforms: Tensor
    """(N, T) float64 from [0, 1): the random number that samples each token."""
    tokens: Tensor
    logprobs: Tensor
    sampling_logprobs: Tensor
    lengths: Tensor
    stopped: Tensor
    finished: Tensor
    """(N,) bool: stopped, or at the maximum length."""
    stops: Tensor

    @classmethod
    def empty(
        cls, count: int, sampling: Sampling, seed: int, device: torch.device
    ) -> "_ResponseBuffer":
        shape = (count, sampling.max_new_tokens)  # (N, T)
        generator = torch.Generator()
        uniforms = torch.empty(shape, dtype=torch.float64)
        # One seed per position, as in ms_parallel.Engine.generate.
        for index in range(sampling.max_new_tokens):
            generator.manual_seed(position_seed(seed, index))
            uniforms[:, index] = torch.rand(count, generator=generator, dtype=torch.float64)
        floats = torch.zeros(2, *shape, device=device)  # log-probabilities: policy's and sampling
        return cls(
            sampling=sampling,
            uniforms=uniforms.to(device),
            tokens=torch.zeros(shape, dtype=torch.int64, device=device),
            logprobs=floats[0],
            sampling_logprobs=floats[1],
            lengths=torch.zeros(count, dtype=torch.int64, device=device),
            stopped=torch.zeros(count, dtype=torch.bool, device=device),
            finished=torch.zeros(count, dtype=torch.bool, device=device),
            stops=torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device),
        )

    def sample(self, logits: Tensor, rows: Tensor) -> SampledTokens:
        """Sample the next token of each row."""
        # By response and position, so the tokens do not depend on the rows of the current batch.
        index = self.lengths[rows].clamp(max=self.uniforms.shape[1] - 1)  # (B,)
        return sample_tokens(logits, self.sampling, self.uniforms[rows, index])

    def append(self, rows: Tensor, sampled: SampledTokens) -> None:
        """Append the sampled tokens to unfinished rows."""
        unfinished = ~self.finished[rows]
        # Finished rows may be at full length; their write below keeps the old value.
        index = self.lengths[rows].clamp(max=self.tokens.shape[1] - 1)
        for column, new in (
            (self.tokens, sampled.tokens),
            (self.logprobs, sampled.logprobs),
            (self.sampling_logprobs, sampled.sampling_logprobs),
        ):
            column[rows, index] = torch.where(unfinished, new, column[rows, index])
        self.lengths[rows] += unfinished

    def update_finished(self, rows: Tensor, newest: Tensor, decode: Decode | None) -> Tensor:
        """Mark the rows that their newest token finishes; return all finished ones, (B,) bool."""
        unfinished = ~self.finished[rows]
        # A stop token counts as part of the response, so it is checked after the append.
        stopped = unfinished & torch.isin(newest, self.stops)
        if self.sampling.stop_strings and decode is not None:
            stopped |= unfinished & self._has_stop_string(rows.tolist(), decode).to(
                unfinished.device
            )
        self.stopped[rows] |= stopped
        self.finished[rows] |= stopped | (self.lengths[rows] >= self.tokens.shape[1])
        return self.finished[rows]

    def _has_stop_string(self, rows: list[int], decode: Decode) -> Tensor:
        """Return which rows' newest token completed a stop string, (B,) bool."""
        strings = self.sampling.stop_strings
        # Only the last tokens can contain a string that the newest token completes.
        lookback, results = max_stop_tokens(strings), []
        for row in rows:
            length = int(self.lengths[row])
            tail = self.tokens[row, max(0, length - lookback) : length].tolist()
            results.append(contains_stop_string(tail, strings, decode))
        return torch.tensor(results, dtype=torch.bool)

    def responses(self) -> Responses:
        longest = max(int(self.lengths.max()), 1)  # trim to the longest response
        return Responses(
            tokens=self.tokens[:, :longest].cpu(),
            lengths=self.lengths.cpu(),
            logprobs=self.logprobs[:, :longest].cpu(),
            sampling_logprobs=self.sampling_logprobs[:, :longest].cpu(),
            stopped=self.stopped.cpu(),
        )


def check_prompts(
    prompts: Sequence[Sequence[int]], sampling: Sampling, model: LanguageModel
) -> None:
    """Check that prompts can be continued.

    Raises:
        DataError: `prompts` is empty, or a prompt is empty, too long or has invalid token ids.
    """
    check_type("prompts", prompts, Sequence, "a list of prompts", error=DataError)
    if not prompts:
        raise DataError("prompts are empty; pass at least one prompt")
    rows: Sequence[Any] = prompts
    for index, prompt in enumerate(rows):
        if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
            raise DataError(f"prompt {index} must be a list of token ids, got {shown(prompt)}")
        if not len(prompt):
            raise DataError(f"prompt {index} is empty; every prompt needs at least one token")
        if model.context and len(prompt) + sampling.max_new_tokens > model.context:
            raise DataError(
                f"prompt {index} has {len(prompt)} tokens, which with max_new_tokens = "
                f"{sampling.max_new_tokens} exceeds the model's context of {model.context}; "
                "shorten it or lower max_new_tokens"
            )
        check_tokens(torch.as_tensor(prompt), model.vocabulary_size, f"prompt {index}")
