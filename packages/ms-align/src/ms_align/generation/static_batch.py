"""Decoding with static shapes, for accelerators.

Every decoding step reads and writes the same tensors and never synchronizes: the KV cache is
preallocated, each row writes at its own position, and sampling and stop-token detection run on the
device. On CUDA, a step is captured as one graph. Every `CHECK_EVERY` steps, the host reads which
rows have finished.
Shapes: R rows, C capacity of the cache in positions, Hq query heads, Hk KV heads, D head dim,
V vocabulary.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ms_align.generation.cuda_graph import capture, warm_up
from ms_align.generation.drawing import SampledTokens, sample_tokens
from ms_align.generation.response_buffer import ResponseBuffer
from ms_align.generation.stops import Decode, contains_stop_string, max_stop_tokens

CHECK_EVERY = 8
"""Steps between checks for finished rows; each check synchronizes."""
BLOCK = 256
"""The capacity of the cache is a multiple of this."""
INITIAL_POSITIONS = 768
"""Initial cache capacity in positions, beyond the longest prompt."""
MIN_COMPACTED_STEPS = 64
"""Minimum remaining steps to compact a batch: a smaller batch needs a new graph."""
MAX_HEAD_DIM = 256
"""Maximum head dim of `ms_kernels.decode_attention` on a GPU."""


class StaticReader(Protocol):
    """Prefill and decoding with a `DecodeCache`."""

    def prefill(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Run prompts through the model; see `ms_align.generation.reader.Reader`."""

    def decode(self, tokens: Tensor, cache: "DecodeCache") -> Tensor:
        """Decode one token per row, (R,) at the cache's positions; return logits (R, V)."""


class DecodeCache:
    """KV cache with a fixed number of rows; position p of a row is in column p.

    Args:
        rows: R.
        capacity: C.
        device: device of the cache.
        use_kernels: use `ms_kernels.decode_attention`, which reads only the positions in use.
            False: use torch's fused attention, which reads all C positions under a mask.
    """

    def __init__(
        self, rows: int, capacity: int, device: torch.device, *, use_kernels: bool = False
    ) -> None:
        self.capacity = capacity
        self.use_kernels = use_kernels
        self.layers: list[Tensor] = []
        """Per layer (2, R, C, Hk, D): keys, then values."""
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        """(R,) positions of the newest tokens."""
        self._rows = torch.arange(rows, device=device)
        # decode_attention reads pages: each row is one page of C positions.
        self._page_table = self._rows.to(torch.int32)[:, None]
        self._lengths = self._page_table[:, 0]
        self._biases: dict[int | None, Tensor] = {}

    def set_positions(self, positions: Tensor) -> None:
        """Set the positions (R,) of the newest tokens, before a step."""
        self.positions = positions
        self._lengths = (positions + 1).to(torch.int32)
        self._biases.clear()

    def add(self, slots: Tensor, layers: Sequence[Tensor], copies: Tensor) -> None:
        """Copy prefilled prompts into rows.

        Args:
            slots: (m,) int64, rows to fill.
            layers: keys and values per layer, (n, P, 2, Hk, D). Columns after a prompt's length are
                overwritten before they are visible.
            copies: (m,) int64, index of each row's prompt.
        """
        for index, layer in enumerate(layers):
            if index == len(self.layers):
                shape = (2, len(self._rows), self.capacity, *layer.shape[3:])
                self.layers.append(layer.new_zeros(shape))
            prompts = layer[copies].transpose(1, 2).transpose(0, 1)  # (2, m, P, Hk, D)
            self.layers[index][:, slots, : layer.shape[1]] = prompts

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the keys and values (R, Hk, D) of the newest tokens."""
        keys, values = self.layers[layer]
        index = (self._rows, self.positions)
        keys.index_put_(index, k)
        values.index_put_(index, v)

    def attend(
        self,
        layer: int,
        q: Tensor,
        *,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return the attention output (R, Hq, D) over all positions up to the newest.

        Args:
            layer: layer index.
            q: queries (R, Hq, D).
            window: number of most recent positions to attend to. None: all.
            scale: factor on the scores. None: 1/√D.
            sinks: (Hq,) sink logit per head; it is part of the softmax but has no value.
            softcap: soft cap on the scores. None: no cap.
        """
        keys, values = self.layers[layer]  # (R, C, Hk, D) each
        plain = sinks is None and softcap is None
        if self.use_kernels and plain and keys.shape[-1] <= MAX_HEAD_DIM:
            from ms_kernels import decode_attention

            return decode_attention(
                q, keys, values, self._page_table, self._lengths, window=window, scale=scale
            )
        bias = self._bias(window, q.dtype)[:, None, None]  # (R, 1, 1, C)
        # The queries of a group attend to the same keys, so they are rows of one matrix.
        grouped = q.reshape(len(q), keys.shape[2], -1, q.shape[-1])  # (R, Hk, Hq/Hk, D)
        k, v = keys.transpose(1, 2), values.transpose(1, 2)  # (R, Hk, C, D)
        if plain:
            attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=bias, scale=scale)
            return attended.reshape(q.shape)
        compute_dtype = torch.promote_types(q.dtype, torch.float32)
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        scores = (grouped * factor).to(compute_dtype) @ k.to(compute_dtype).transpose(
            2, 3
        )  # (R, Hk, Hq/Hk, C)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + bias
        if sinks is not None:
            sink = sinks.to(compute_dtype).view(1, k.shape[1], -1, 1).expand(*scores.shape[:3], 1)
            probabilities = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        else:
            probabilities = scores.softmax(-1)
        out: Tensor = probabilities @ v.to(compute_dtype)
        return out.to(q.dtype).reshape(q.shape)

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive attention mask, (R, C): 0 or -inf."""
        if window not in self._biases:
            columns = torch.arange(self.capacity, device=self.positions.device)
            newest = self.positions[:, None]
            hidden = columns > newest
            if window is not None:
                hidden |= columns <= newest - window
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._biases[window] = zeros.masked_fill_(hidden, -torch.inf)
        return self._biases[window]

    def select(self, rows: Tensor) -> None:
        """Keep only the rows with these indices, (n,) int64."""
        self.layers = [layer[:, rows] for layer in self.layers]
        self._rows = self._rows[: len(rows)].clone()
        self._page_table = self._rows.to(torch.int32)[:, None]

    def grow(self, capacity: int) -> None:
        """Copy keys and values to larger tensors."""
        for index, layer in enumerate(self.layers):
            grown = layer.new_zeros(*layer.shape[:2], capacity, *layer.shape[3:])
            grown[:, :, : self.capacity] = layer
            self.layers[index] = grown
        self.capacity = capacity


def kernels_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if `ms_kernels.decode_attention` has a fused implementation for this device."""
    return (
        device.type == "cuda"
        and dtype in (torch.float32, torch.bfloat16, torch.float16)
        and all(importlib.util.find_spec(name) is not None for name in ("ms_kernels", "triton"))
    )


class StaticBatch:
    """Rows decoded together; a finished row stays in the batch until a new response replaces it.

    Args:
        reader: runs the model.
        buffer: all responses; the batch decodes R at a time.
        rows: R.
        longest_prompt: length of the longest prompt, in tokens.
        use_graph: capture the step in a CUDA graph.
        use_kernels: see `DecodeCache`.
    """

    STATE = ("tokens", "positions", "active", "counts", "out_tokens", "logprobs",
             "sampling_logprobs", "uniforms")  # fmt: skip
    """Tensors with one entry per row."""

    def __init__(
        self,
        reader: StaticReader,
        buffer: ResponseBuffer,
        rows: int,
        longest_prompt: int,
        *,
        use_graph: bool,
        use_kernels: bool,
    ) -> None:
        device, self.longest = buffer.tokens.device, buffer.tokens.shape[1]
        self.reader, self.buffer, self.use_graph = reader, buffer, use_graph
        self.limit = _round_up(longest_prompt + self.longest)
        """Cache capacity that is enough for every response."""
        capacity = min(self.limit, _round_up(longest_prompt + INITIAL_POSITIONS))
        self.cache = DecodeCache(rows, capacity, device, use_kernels=use_kernels)
        # The tensors that a step reads and writes.
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        """(R,) newest tokens."""
        self.positions = torch.zeros_like(self.tokens)
        """(R,) positions of the newest tokens."""
        self.active = torch.zeros_like(self.tokens, dtype=torch.bool)
        """(R,) False for finished rows."""
        self.counts = torch.zeros_like(self.tokens)
        """(R,) number of sampled tokens."""
        # One more column than a response has: finished rows write there.
        shape = (rows, self.longest + 1)
        self.out_tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(shape, device=device)
        self.sampling_logprobs = torch.zeros(shape, device=device)
        self.uniforms = torch.zeros(shape, dtype=buffer.uniforms.dtype, device=device)
        # Host copies, so that scheduling never synchronizes.
        self.responses: list[int | None] = [None] * rows
        """Response in each row; None for a free row."""
        self._ends = [0] * rows
        """Position of each row's newest token, unless it stopped since the last check."""
        self._lengths = [0] * rows
        """Number of sampled tokens per row, unless it stopped since the last check."""
        self._checked = [0] * rows
        """Number of tokens per row already searched for stop strings."""
        self._replay: Callable[[], None] | None = None
        self._warm = False

    @property
    def busy(self) -> list[int]:
        """Rows with a response that was unfinished at the last check."""
        return [row for row, response in enumerate(self.responses) if response is not None]

    @property
    def free(self) -> int:
        """Number of free rows."""
        return self.responses.count(None)

    def prefill(self, new: Sequence[int], prompts: Sequence[Sequence[int]], count: int) -> None:
        """Prefill the distinct prompts of new responses, and sample their first tokens.

        Args:
            new: indices of the responses, at most `free`.
            prompts: all prompts.
            count: responses per prompt.
        """
        device, buffer = self.tokens.device, self.buffer
        free = [row for row, response in enumerate(self.responses) if response is None]
        distinct = sorted({response // count for response in new})
        lengths = torch.tensor([len(prompts[index]) for index in distinct])
        padded = torch.zeros(len(distinct), int(lengths.max()), dtype=torch.int64)
        for row, index in enumerate(distinct):
            padded[row, : len(prompts[index])] = torch.as_tensor(prompts[index])
        order = {index: row for row, index in enumerate(distinct)}
        copies = torch.tensor([order[response // count] for response in new], device=device)
        device_lengths = lengths.to(device)
        logits, layers = self.reader.prefill(padded.to(device), device_lengths)
        rows = torch.tensor(free[: len(new)], device=device)
        self.cache.add(rows, layers, copies)
        uniforms = buffer.uniforms[torch.tensor(new, device=device)]  # (m, T)
        sampled = sample_tokens(logits[copies], buffer.sampling, uniforms[:, 0])
        # In place, as a graph reads these tensors.
        self.uniforms[rows, : self.longest] = uniforms
        self.tokens[rows], self.positions[rows] = sampled.tokens, device_lengths[copies]
        for output, first in self._outputs(sampled):
            output[rows] = 0
            output[rows, 0] = first
        self.counts[rows] = 1
        self.active[rows] = ~self._is_stop(sampled.tokens) & (self.longest > 1)
        for row, response in zip(free, new, strict=False):
            self.responses[row] = response
            self._ends[row] = len(prompts[response // count])
            self._lengths[row], self._checked[row] = 1, 0

    def _outputs(self, sampled: SampledTokens) -> tuple[tuple[Tensor, Tensor], ...]:
        """Pair each output tensor with its newly sampled values."""
        return (
            (self.out_tokens, sampled.tokens),
            (self.logprobs, sampled.logprobs),
            (self.sampling_logprobs, sampled.sampling_logprobs),
        )

    def _is_stop(self, tokens: Tensor) -> Tensor:
        # Not torch.isin, which synchronizes if there are many stop tokens.
        return (tokens[:, None] == self.buffer.stops).any(1)

    def steps_left(self) -> int:
        """Return the number of steps until the last row reaches its maximum length."""
        lengths = [self._lengths[row] for row in self.busy]
        return self.longest - min(lengths) if lengths else 0

    def run(self, steps: int) -> None:
        """Decode `steps` tokens per row without synchronizing."""
        if not steps:
            return
        needed = max(self._ends[row] for row in self.busy) + steps
        if needed > self.cache.capacity:
            self.cache.grow(min(self.limit, max(_round_up(needed), 2 * self.cache.capacity)))
            self._forget_graph()
        for _ in range(steps):
            self._run_step()
        for row in self.busy:
            self._ends[row] += steps
            self._lengths[row] += steps

    def release_finished(self, decode: Decode | None) -> None:
        """Move finished responses to the buffer and free their rows; synchronizes.

        Args:
            decode: converts tokens to text, to find stop strings.
        """
        cut = {}
        if self.buffer.sampling.stop_strings and decode is not None:
            cut = self._cut_at_stop_strings(decode)
        active = self.active.tolist()
        finished = [row for row in self.busy if not active[row]]
        if not finished:
            return
        buffer, device = self.buffer, self.tokens.device
        rows = torch.tensor(finished, device=device)
        responses = torch.tensor([self.responses[row] for row in finished], device=device)
        buffer.tokens[responses] = self.out_tokens[rows, : self.longest]
        buffer.logprobs[responses] = self.logprobs[rows, : self.longest]
        buffer.sampling_logprobs[responses] = self.sampling_logprobs[rows, : self.longest]
        lengths = self.counts[rows]
        last = self.out_tokens[rows, lengths - 1]
        by_string = torch.tensor([row in cut for row in finished], device=device)
        buffer.lengths[responses] = lengths
        buffer.stopped[responses] = self._is_stop(last) | by_string
        for row in finished:
            self.responses[row] = None

    def _cut_at_stop_strings(self, decode: Decode) -> dict[int, int]:
        """End rows at their first stop string and discard later tokens.

        Returns:
            New length of each truncated row.
        """
        strings, cut = self.buffer.sampling.stop_strings, {}
        lookback = max_stop_tokens(strings)
        counts, tokens = self.counts.tolist(), self.out_tokens.cpu()
        for row in self.busy:
            # Each token is checked once.
            for end in range(self._checked[row] + 1, counts[row] + 1):
                tail = tokens[row, max(0, end - lookback) : end].tolist()
                if contains_stop_string(tail, strings, decode):
                    cut[row] = end
                    for column in (self.out_tokens, self.logprobs, self.sampling_logprobs):
                        column[row, end:] = 0
                    self.counts[row], self.active[row] = end, False
                    break
            self._checked[row] = counts[row]
        return cut

    def compact(self) -> None:
        """Shrink to the unfinished rows, if they are at most half of all."""
        rows, busy = len(self.responses), self.busy
        if not busy or 2 * len(busy) > rows or self.steps_left() < MIN_COMPACTED_STEPS:
            return
        index = torch.tensor(busy, device=self.tokens.device)
        self.cache.select(index)
        for name in self.STATE:
            setattr(self, name, getattr(self, name)[index])
        for name in ("responses", "_ends", "_lengths", "_checked"):
            setattr(self, name, [getattr(self, name)[row] for row in busy])
        self._forget_graph()

    def _forget_graph(self) -> None:
        self._replay, self._warm = None, False

    def _run_step(self) -> None:
        if not self.use_graph:
            self._step()
        elif not self._warm:
            warm_up(self._step)
            self._warm = True
        else:
            if self._replay is None:
                self._replay = capture(self._step)
            self._replay()

    def _step(self) -> None:
        """Decode one token per row; reads and writes only tensors of this batch."""
        # A finished row overwrites its first column, so it stays within the cache and its
        # attention costs nothing.
        self.cache.set_positions(self.positions * self.active)
        logits = self.reader.decode(self.tokens, self.cache)
        uniforms = self.uniforms.gather(1, self.counts[:, None])[:, 0]
        sampled = sample_tokens(logits, self.buffer.sampling, uniforms)
        column = torch.where(self.active, self.counts, self.longest)[:, None]
        for output, new in self._outputs(sampled):
            output.scatter_(1, column, new[:, None])
        self.counts += self.active
        self.active &= self.counts < self.longest
        if len(self.buffer.stops):
            # A stop token is part of the response.
            self.active.masked_fill_(self._is_stop(sampled.tokens), False)
        self.tokens.copy_(sampled.tokens)
        self.positions += 1


def _round_up(positions: int) -> int:
    """Round up to a multiple of `BLOCK`."""
    return -(-positions // BLOCK) * BLOCK


def generate(
    batch: StaticBatch, prompts: Sequence[Sequence[int]], count: int, decode: Decode | None
) -> None:
    """Generate all responses of a batch's buffer.

    Args:
        batch: an empty batch.
        prompts: all prompts.
        count: responses per prompt.
        decode: converts tokens to text; needed for stop strings.
    """
    # Reversed, so that pop() takes the responses in order.
    queue = list(range(len(prompts) * count))[::-1]
    rows = len(batch.responses)
    while queue or batch.busy:
        # A prefill costs several steps, so it waits for an eighth of the rows.
        if queue and batch.free >= max(1, rows // 8):
            new = [queue.pop() for _ in range(min(batch.free, len(queue)))]
            batch.prefill(new, prompts, count)
        batch.run(min(CHECK_EVERY, batch.steps_left()))
        batch.release_finished(decode)
        if not queue:
            batch.compact()
