"""From prompts and responses to what an update reads: one padded batch, aligned with targets.

Position s of a row reads token s and is asked for token s + 1, so everything that is known of a
response token stands one place before it. Shapes: N responses, S positions.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ms_align import processes
from ms_align.engines.protocol import Engine
from ms_align.generation.responses import Responses
from ms_align.losses.protocol import IGNORED, Batch, Output
from ms_align.rewards.scoring import Failure, Reward, Sample, Scores, score
from ms_align.rollouts.prompts import Prompt
from ms_align.tokenizer import Tokenizer


def sequences(
    prompts: Sequence[Sequence[int]],
    responses: Responses,
    *,
    longest: int | None = None,
    parts: int = 1,
) -> dict[str, Tensor]:
    """Build one row a response: its prompt, then its tokens, padded on the right.

    Args:
        prompts: the tokens before each response, N of them.
        responses: N of them.
        longest: width to pad to, prompt and response; by default that of the longest row.
        parts: S is a multiple of it; see `Engine.row_parts`.

    Returns:
        `tokens`, `targets` (N, S) int64, targets -100 but at response tokens; and
        `old_logprobs` (N, S) float32 if the generator kept them.
    """
    lengths = [
        len(prompt) + int(length)
        for prompt, length in zip(prompts, responses.lengths.tolist(), strict=True)
    ]
    width = -(-(max(longest or 0, *lengths) - 1) // parts) * parts
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    targets = torch.full((len(prompts), width), IGNORED)
    kept = torch.zeros(len(prompts), width)
    for row, prompt in enumerate(prompts):
        count, before = int(responses.lengths[row]), len(prompt)
        whole = torch.cat((torch.as_tensor(prompt), responses.tokens[row, :count]))
        tokens[row, : len(whole) - 1] = whole[:-1]
        targets[row, before - 1 : before - 1 + count] = whole[before:]
        if responses.logprobs is not None:
            kept[row, before - 1 : before - 1 + count] = responses.logprobs[row, :count]
    batch = {"tokens": tokens, "targets": targets}
    return batch if responses.logprobs is None else {**batch, "old_logprobs": kept}


def samples_of(
    prompts: Sequence[Prompt], responses: Responses, tokenizer: Tokenizer | None
) -> list[Sample]:
    """Build the samples that a reward is asked about, one for each response."""
    samples = []
    for row, prompt in enumerate(prompts):
        tokens = responses.row(row)
        samples.append(
            Sample(
                prompt=prompt.text,
                response=tokenizer.decode(tokens) if tokenizer else "",
                prompt_tokens=prompt.tokens,
                response_tokens=tuple(tokens),
                answer=prompt.answer,
                stopped=bool(responses.stopped[row]),
                extra=prompt.extra,
            )
        )
    return samples


def logprobs_of(engine: Engine, batch: Mapping[str, Tensor], temperature: float) -> Tensor:
    """Compute the targets' log-probabilities by an engine's model, (N, S) float32, 0 elsewhere."""

    def ask(output: Output, microbatch: Batch) -> Tensor:
        return -output.token_losses(microbatch["targets"], temperature=temperature)

    return _by_length(engine, batch, ask)


def values_of(engine: Engine, batch: Mapping[str, Tensor], head: str = "value") -> Tensor:
    """Compute an engine's value before each target, (N, S) float32, 0 elsewhere."""

    def ask(output: Output, microbatch: Batch) -> Tensor:
        return output.head(head).squeeze(-1) * (microbatch["targets"] != IGNORED)

    return _by_length(engine, batch, ask)


def _by_length(
    engine: Engine, batch: Mapping[str, Tensor], ask: Callable[[Output, Batch], Tensor]
) -> Tensor:
    """Ask with rows of like length side by side, so that less padding is computed."""
    asked = {name: batch[name] for name in ("tokens", "targets")}
    order = (asked["targets"] != IGNORED).flip(1).int().argmax(1).argsort(stable=True)
    found = engine.evaluate({name: rows[order] for name, rows in asked.items()}, ask).cpu()
    back = torch.empty_like(found)
    back[order] = found
    return back


def gather_rows(engine: Engine, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather the rows of all data ranks on every process; each gives as many, equally wide."""
    if engine.data_ranks == 1:
        return dict(rows)
    return {name: engine.gather(value) for name, value in rows.items()}


def gather_responses(engine: Engine, responses: Responses) -> Responses:
    """Give the responses of all data ranks on every process, without log-probabilities."""
    mine = {name: getattr(responses, name) for name in ("tokens", "lengths", "stopped")}
    return Responses(**gather_rows(engine, mine), logprobs=None, sampling_logprobs=None)


def score_together(
    rewards: Mapping[str, tuple[Reward, float]],
    samples: Sequence[Sample],
    *,
    on_failure: Failure,
    penalty: float,
) -> Scores:
    """Score alike on every process: the first one asks, and sends the scores to the others.

    So a reward may be random, or a service that is billed.
    """
    if processes.count() == 1:
        return score(rewards, samples, on_failure=on_failure, penalty=penalty)
    scores: Scores | None = None
    failure: Exception | None = None
    numbers = torch.zeros(1 + len(rewards), len(samples))
    if processes.rank() == 0:
        try:
            scores = score(rewards, samples, on_failure=on_failure, penalty=penalty)
            numbers = torch.stack([scores.total, *scores.parts.values()])
        except Exception as error:  # raised after the others were let go
            failure = error
    if processes.any_of(failure is not None):
        raise failure or RuntimeError("a reward failed on the first process; see its message")
    # The group may take no tensor of the CPU.
    numbers = numbers.to(processes.exchange_device())
    dist.broadcast(numbers, src=0)
    numbers = numbers.cpu()
    return Scores(
        total=numbers[0],
        parts=dict(zip(rewards, numbers[1:], strict=True)),
        failures=scores.failures if scores else (),
    )
