"""Continuous batching: a finished row's place is taken by the next prompt at once.

A prompt is read once however many responses it gets. Random numbers depend on the seed,
the response's number and the token's place alone, never on who shares the batch, and they are those
of `ms_parallel.Engine.generate`. Shapes:
N responses, T their longest, B rows being written, V vocabulary.
"""

from collections.abc import Sequence

import torch
from attrs import define
from torch import Tensor, nn

from ms_align.errors import DataError, ModelError
from ms_align.generation.columns import Columns
from ms_align.generation.drawing import Drawn, draw
from ms_align.generation.fused import fused_reader
from ms_align.generation.reader import Reader, reader_of
from ms_align.generation.responses import Responses
from ms_align.generation.sampling import Sampling
from ms_align.generation.stops import Decode, completes, reach
from ms_align.models.language_model import LanguageModel, check_tokens, language_model
from ms_align.seeds import position_seed


class LocalGenerator:
    """Generates from a model in this process.

    Args:
        model: of the seam or of transformers.
        slots: rows that are written at once.
        decode: text of tokens; needed for stop strings alone.
        fused: read the weights of a Llama-like model into a form in which a step takes a third of
            the calls; they are read again at each call, as training has moved them. Another model,
            or one with adapters, runs as it is.

    Raises:
        ModelError: the model takes no cache.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        slots: int = 64,
        decode: Decode | None = None,
        fused: bool = True,
    ) -> None:
        self.model: LanguageModel = language_model(model)
        self.slots = slots
        self.decode = decode
        self.fused = fused
        self._proved = False
        reader_of(self.model)

    @torch.no_grad()
    def _reader(self) -> Reader:
        found = fused_reader(self.model, proved=self._proved) if self.fused else None
        self._proved = self.fused = found is not None
        return found or reader_of(self.model)

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        count: int = 1,
        seed: int = 0,
    ) -> Responses:
        """Write `count` responses to each prompt; those to one prompt are neighbours.

        Raises:
            DataError: a prompt is empty, or it leaves no room in the model's context.
            ModelError: there are stop strings and no `decode`.
        """
        check_prompts(prompts, sampling, self.model)
        if sampling.stop_strings and self.decode is None:
            raise ModelError("stop_strings need a tokenizer to read tokens with; give decode=")
        training = self.model.module.training
        self.model.module.eval()
        device = next(self.model.module.parameters()).device
        written = _Written.empty(len(prompts) * count, sampling, seed, device)
        waiting = list(range(len(prompts) * count))[::-1]
        longest = max(len(prompt) for prompt in prompts) + sampling.max_new_tokens
        live = _Live.empty(Columns(longest + 1, room=min(self.slots, len(waiting))), device)
        reader = self._reader()
        while waiting or len(live.rows):
            if waiting and len(live.rows) < self.slots:
                free = self.slots - len(live.rows)
                new = [waiting.pop() for _ in range(min(free, len(waiting)))]
                self._admit(reader, new, prompts, count, live, written)
            else:
                logits = reader.step(live.tokens, live.positions, live.columns)
                # A row that is over may wait for others to go, but not beyond the context.
                live.positions = live.positions + (~written.over[live.rows]).long()
                drawn = written.draw(logits, live.rows)
                written.put(live.rows, drawn)
                live.tokens = drawn.tokens
            self._dismiss(live, written, few=not waiting)
        self.model.module.train(training)
        return written.responses()

    def _admit(
        self,
        reader: Reader,
        new: list[int],
        prompts: Sequence[Sequence[int]],
        count: int,
        live: "_Live",
        written: "_Written",
    ) -> None:
        """Read the prompts of new rows, each once, and draw their first tokens."""
        distinct = sorted({row // count for row in new})
        copies = torch.tensor([distinct.index(row // count) for row in new])
        lengths = torch.tensor([len(prompts[index]) for index in distinct])
        device = written.tokens.device
        tokens = torch.zeros(len(distinct), int(lengths.max()), dtype=torch.int64)
        for row, index in enumerate(distinct):
            tokens[row, : len(prompts[index])] = torch.as_tensor(prompts[index])
        logits, layers = reader.read(tokens.to(device), lengths.to(device))
        rows = torch.tensor(new, device=device)
        live.columns.add(layers, lengths, copies)
        live.positions = torch.cat((live.positions, lengths[copies].to(device)))
        drawn = written.draw(logits[copies.to(device)], rows)
        written.put(rows, drawn)
        live.rows = torch.cat((live.rows, rows))
        live.tokens = torch.cat((live.tokens, drawn.tokens))

    def _dismiss(self, live: "_Live", written: "_Written", *, few: bool) -> None:
        """Let rows go that are done; with nobody waiting, only when an eighth of them is.

        A done row that stays is written on into nowhere, which costs less than to let each go.
        """
        done = written.done(live.rows, live.tokens, self.decode)
        gone = int(done.sum())
        if gone and (not few or gone == len(done) or gone >= max(1, len(done) // 8)):
            live.drop(done)


@define
class _Live:
    """The rows that are being written."""

    columns: Columns
    rows: Tensor
    """(B,) which response each is."""
    tokens: Tensor
    """(B,) the newest of each."""
    positions: Tensor
    """(B,) of the newest token."""

    @classmethod
    def empty(cls, columns: Columns, device: torch.device) -> "_Live":
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(columns=columns, rows=none, tokens=none, positions=none)

    def drop(self, gone: Tensor) -> None:
        index = self.columns.drop(gone)
        self.rows, self.tokens = self.rows[index], self.tokens[index]
        self.positions = self.positions[index]


@define
class _Written:
    """All responses, as far as they are written."""

    sampling: Sampling
    uniforms: Tensor
    """(N, T) float64 from [0, 1): what each token is drawn with."""
    tokens: Tensor
    logprobs: Tensor
    sampling_logprobs: Tensor
    lengths: Tensor
    stopped: Tensor
    over: Tensor
    """(N,) bool: stopped, or as long as it may be."""
    stops: Tensor

    @classmethod
    def empty(cls, count: int, sampling: Sampling, seed: int, device: torch.device) -> "_Written":
        shape = (count, sampling.max_new_tokens)
        generator = torch.Generator()
        uniforms = torch.empty(shape, dtype=torch.float64)
        for index in range(sampling.max_new_tokens):
            generator.manual_seed(position_seed(seed, index))
            uniforms[:, index] = torch.rand(count, generator=generator, dtype=torch.float64)
        floats = torch.zeros(2, *shape, device=device)
        return cls(
            sampling=sampling,
            uniforms=uniforms.to(device),
            tokens=torch.zeros(shape, dtype=torch.int64, device=device),
            logprobs=floats[0],
            sampling_logprobs=floats[1],
            lengths=torch.zeros(count, dtype=torch.int64, device=device),
            stopped=torch.zeros(count, dtype=torch.bool, device=device),
            over=torch.zeros(count, dtype=torch.bool, device=device),
            stops=torch.tensor(sampling.stop_tokens, dtype=torch.int64, device=device),
        )

    def draw(self, logits: Tensor, rows: Tensor) -> Drawn:
        """Draw a token for each of the rows."""
        at = self.lengths[rows].clamp(max=self.uniforms.shape[1] - 1)
        return draw(logits, self.sampling, self.uniforms[rows, at])

    def put(self, rows: Tensor, drawn: Drawn) -> None:
        """Write the drawn tokens of the rows that are not over."""
        going = ~self.over[rows]
        at = self.lengths[rows].clamp(max=self.tokens.shape[1] - 1)
        for kept, new in (
            (self.tokens, drawn.tokens),
            (self.logprobs, drawn.logprobs),
            (self.sampling_logprobs, drawn.sampling_logprobs),
        ):
            kept[rows, at] = torch.where(going, new, kept[rows, at])
        self.lengths[rows] += going

    def done(self, rows: Tensor, newest: Tensor, decode: Decode | None) -> Tensor:
        """Note which rows their newest token ends, and return which are over, (B,) bool."""
        going = ~self.over[rows]
        stopped = going & torch.isin(newest, self.stops)
        if self.sampling.stop_strings and decode is not None:
            stopped |= going & self._said(rows.tolist(), decode).to(going.device)
        self.stopped[rows] |= stopped
        self.over[rows] |= stopped | (self.lengths[rows] >= self.tokens.shape[1])
        return self.over[rows]

    def _said(self, rows: list[int], decode: Decode) -> Tensor:
        """Find whether a row's newest token completed a stop string, (B,) bool."""
        strings = self.sampling.stop_strings
        back, said = reach(strings), []
        for row in rows:
            length = int(self.lengths[row])
            tail = self.tokens[row, max(0, length - back) : length].tolist()
            said.append(completes(tail, strings, decode))
        return torch.tensor(said, dtype=torch.bool)

    def responses(self) -> Responses:
        longest = max(int(self.lengths.max()), 1)
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
    """Refuse prompts that cannot be continued.

    Raises:
        DataError: there is none, one is empty, too long, or holds what is no token.
    """
    if not prompts:
        raise DataError("there is no prompt; give at least one")
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise DataError(f"prompt {index} is empty; give each at least one token")
        if model.context and len(prompt) + sampling.max_new_tokens > model.context:
            raise DataError(
                f"prompt {index} has {len(prompt)} tokens and max_new_tokens is "
                f"{sampling.max_new_tokens}, beyond the model's context of {model.context}; "
                "shorten one of them"
            )
        check_tokens(torch.as_tensor(prompt), model.vocabulary_size, f"prompt {index}")
