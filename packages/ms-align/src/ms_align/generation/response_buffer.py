"""Tokens and log-probabilities of responses while they are generated, on the model's device.

Shapes: N responses, T longest response, B rows of the current batch, V vocabulary.
"""

import torch
from attrs import define
from torch import Tensor

from ms_align.generation.drawing import SampledTokens, sample_tokens
from ms_align.generation.responses import Responses
from ms_align.generation.sampling import Sampling
from ms_align.generation.stops import Decode, contains_stop_string, max_stop_tokens
from ms_align.seeds import position_seed


@define
class ResponseBuffer:
    """Tokens and log-probabilities of all responses, finished or not."""

    sampling: Sampling
    uniforms: Tensor
    """(N, T) float64 in [0, 1): random number for sampling each token."""
    tokens: Tensor
    """(N, T) int64."""
    logprobs: Tensor
    """(N, T) float32 log-probabilities of the policy."""
    sampling_logprobs: Tensor
    """(N, T) float32 log-probabilities of the distribution that was sampled."""
    lengths: Tensor
    """(N,) int64 number of sampled tokens."""
    stopped: Tensor
    """(N,) bool: ended by a stop token or stop string."""
    finished: Tensor
    """(N,) bool: stopped, or at the maximum length."""
    stops: Tensor
    """(number of stop tokens,) int64."""

    @classmethod
    def empty(
        cls, count: int, sampling: Sampling, seed: int, device: torch.device
    ) -> "ResponseBuffer":
        """Allocate N = `count` responses, with the random numbers of all their tokens."""
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
        """Mark rows that end with their newest token; return all finished rows, (B,) bool."""
        unfinished = ~self.finished[rows]
        # A stop token counts as part of the response, so it is checked after the append.
        # Not torch.isin, which synchronizes if there are many stop tokens.
        stopped = unfinished & (newest[:, None] == self.stops).any(1)
        if self.sampling.stop_strings and decode is not None:
            stopped |= unfinished & self._has_stop_string(rows.tolist(), decode).to(
                unfinished.device
            )
        self.stopped[rows] |= stopped
        self.finished[rows] |= stopped | (self.lengths[rows] >= self.tokens.shape[1])
        return self.finished[rows]

    def _has_stop_string(self, rows: list[int], decode: Decode) -> Tensor:
        """Return True for rows whose newest token completed a stop string, (B,) bool."""
        strings = self.sampling.stop_strings
        # Only the last tokens can contain a string that the newest token completes.
        lookback, results = max_stop_tokens(strings), []
        for row in rows:
            length = int(self.lengths[row])
            tail = self.tokens[row, max(0, length - lookback) : length].tolist()
            results.append(contains_stop_string(tail, strings, decode))
        return torch.tensor(results, dtype=torch.bool)

    def responses(self) -> Responses:
        """Copy the responses to the CPU."""
        longest = max(int(self.lengths.max()), 1)  # trim to the longest response
        return Responses(
            tokens=self.tokens[:, :longest].cpu(),
            lengths=self.lengths.cpu(),
            logprobs=self.logprobs[:, :longest].cpu(),
            sampling_logprobs=self.sampling_logprobs[:, :longest].cpu(),
            stopped=self.stopped.cpu(),
        )
