"""Continuous batching: a finished row is replaced by the next prompt immediately.

Each prompt is prefilled once, regardless of the number of its responses. Random numbers depend only
on the seed, the index of the response and the position of the token, not on the other rows in the
batch, and are the same as in `ms_parallel.Engine.generate`. Shapes:
N responses, T longest response, B active rows, V vocabulary.
"""

import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from attrs import define, evolve
from torch import Tensor, nn

from ms_align.arguments import check_flags, check_integer, check_type, shown
from ms_align.errors import ConfigError, DataError, ModelError
from ms_align.generation.columns import Columns
from ms_align.generation.fused import FusedReader, fused_reader
from ms_align.generation.reader import ModelReader, Reader, decodes_statically, reader_of
from ms_align.generation.response_buffer import ResponseBuffer
from ms_align.generation.responses import Responses
from ms_align.generation.routing import ExpertRecorder
from ms_align.generation.sampling import Sampling
from ms_align.generation.static_batch import (
    CHECK_EVERY,
    StaticBatch,
    StaticReader,
    generate,
    kernels_available,
)
from ms_align.generation.stops import Decode
from ms_align.models.language_model import LanguageModel, check_tokens, language_model

logger = logging.getLogger(__name__)


class LocalGenerator:
    """Generates responses with a model in this process.

    Args:
        model: model of ms-parallel or transformers.
        max_num_seqs: rows generated at the same time.
        decode: converts tokens to text; needed for stop strings only.
        fused: use fused weights for Llama-like models, which reduces the kernel launches of a step
            to a third. Weights are fused again at every call, as training changes them. Other
            models, and models with adapters, run unchanged.
        static_shapes: decode with static shapes and without synchronization, if the model supports
            it (ms-parallel's decoders and fused models). None: True on an accelerator.
        cuda_graph: capture decoding steps with static shapes in a CUDA graph. None: True on CUDA.
        kernels: use `ms_kernels.decode_attention` in steps with static shapes. None: True if
            ms-kernels and Triton are installed and the device is a GPU.
        records_experts: return the experts selected for each token of an MoE model; disables
            static shapes.

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
        static_shapes: bool | None = None,
        cuda_graph: bool | None = None,
        kernels: bool | None = None,
        records_experts: bool = False,
    ) -> None:
        self.model: LanguageModel = language_model(model)
        check_integer("max_num_seqs", max_num_seqs, minimum=1, error=ConfigError)
        if decode is not None and not callable(decode):
            raise ConfigError(f"decode must be a function of token ids, got {shown(decode)}")
        options = {"static_shapes": static_shapes, "cuda_graph": cuda_graph, "kernels": kernels}
        flags = {name: value for name, value in options.items() if value is not None}
        check_flags(error=ConfigError, fused=fused, records_experts=records_experts, **flags)
        self.max_num_seqs = max_num_seqs
        self.decode = decode
        self.fused = fused
        weight = next(self.model.module.parameters())
        on_cpu, on_cuda = weight.device.type == "cpu", weight.device.type == "cuda"
        self.records_experts = records_experts
        self.static_shapes = not on_cpu if static_shapes is None else static_shapes
        self.cuda_graph = on_cuda if cuda_graph is None else cuda_graph and on_cuda
        self.kernels = (
            kernels_available(weight.device, weight.dtype) if kernels is None else kernels
        )
        self._verified = self._static_verified = False
        reader_of(self.model)

    @torch.no_grad()
    def _reader(self) -> Reader:
        reader = fused_reader(self.model, verified=self._verified) if self.fused else None
        self._verified = self.fused = reader is not None
        return reader or reader_of(self.model)

    def _decodes_statically(self, reader: Reader) -> bool:
        """Return True if the step of this reader runs with static shapes."""
        if (
            self.records_experts
            or not self.static_shapes
            or not isinstance(reader, FusedReader | ModelReader)
        ):
            return False
        if not self._static_verified and self.kernels:
            self.kernels = decodes_statically(reader, self.model, use_kernels=True)
            self._static_verified = self.kernels
        if not self._static_verified:
            self._static_verified = decodes_statically(reader, self.model, use_kernels=False)
        self.static_shapes = self._static_verified
        return self._static_verified

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
        buffer = ResponseBuffer.empty(len(prompts) * count, sampling, seed, device)
        reader = self._reader()
        longest_prompt = max(len(prompt) for prompt in prompts)
        recorder: ExpertRecorder | None = None
        if self.records_experts:
            recorder = ExpertRecorder(
                self.model.module,
                rows=len(prompts) * count,
                positions=longest_prompt + sampling.max_new_tokens,
            )
        if self._decodes_statically(reader):
            batch = StaticBatch(
                cast(StaticReader, reader),
                buffer,
                min(self.max_num_seqs, len(prompts) * count),
                longest_prompt,
                use_graph=self.cuda_graph,
                use_kernels=self.kernels,
            )
            generate(batch, prompts, count, self.decode)
        else:
            self._generate_in_columns(reader, prompts, count, buffer, recorder)
        self.model.module.train(training)
        responses = buffer.responses()
        if recorder is None:
            return responses
        recorder.close()
        lengths = torch.tensor([len(prompt) for prompt in prompts for _ in range(count)])
        experts = recorder.result(lengths + responses.lengths)
        return evolve(responses, routed_experts=experts)

    def _generate_in_columns(
        self,
        reader: Reader,
        prompts: Sequence[Sequence[int]],
        count: int,
        buffer: ResponseBuffer,
        recorder: ExpertRecorder | None,
    ) -> None:
        """Generate all responses with the KV cache of `Columns`."""
        device, sampling = buffer.tokens.device, buffer.sampling
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
        while queue or len(active.rows):
            if queue and len(active.rows) < self.max_num_seqs:
                free = self.max_num_seqs - len(active.rows)
                new = [queue.pop() for _ in range(min(free, len(queue)))]
                self._prefill(reader, new, prompts, count, active, buffer, recorder)
                steps = 0
            else:
                logits = reader.step(active.tokens, active.positions, active.columns)
                if recorder is not None:
                    recorder.add_step(active.rows, active.positions)
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

    def _prefill(
        self,
        reader: Reader,
        new: list[int],
        prompts: Sequence[Sequence[int]],
        count: int,
        active: "_ActiveRows",
        buffer: "ResponseBuffer",
        recorder: ExpertRecorder | None,
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
        if recorder is not None:
            recorder.add_prompts(rows, copies)
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
