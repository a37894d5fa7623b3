"""Training rows from prompts and responses: one padded batch, aligned with targets.

Position s of a row reads token s and predicts token s + 1, so every column of a response token is
stored one position before the token. Shapes: N responses, S positions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ms_align import processes
from ms_align.engines.protocol import Engine
from ms_align.generation.responses import Responses
from ms_align.generation.routing import FREE
from ms_align.losses.protocol import IGNORED, Batch, Output
from ms_align.rewards.scoring import BatchRewards, Failure, Reward, Sample, score
from ms_align.rollouts.prompts import Prompt
from ms_align.tokenizer import Tokenizer


def sequences(
    prompts: Sequence[Sequence[int]],
    responses: Responses,
    *,
    min_tokens: int | None = None,
    parts: int = 1,
) -> dict[str, Tensor]:
    """Build one row per response: prompt, then response tokens, padded on the right.

    Args:
        prompts: prompt tokens of each response, N lists.
        responses: N responses.
        min_tokens: pad rows of prompt and response to at least this length. Default: the longest
            row.
        parts: round S up to a multiple of `parts`; see `Engine.row_parts`.

    Returns:
        `tokens` and `targets` (N, S) int64, with targets -100 except at response tokens;
        `versions` (N, S) int64 if the generator returned weight versions;
        `routed_experts` (N, S, L, k) int16, -1 after the end of a row, if it returned experts; and
        `old_logprobs` (N, S) float32 if the generator returned the policy's log-probabilities, or
        `sampling_logprobs` if it only returned log-probabilities of its own model.
    """
    lengths = [
        len(prompt) + int(length)
        for prompt, length in zip(prompts, responses.lengths.tolist(), strict=True)
    ]
    # One position fewer than tokens: the last token is only a target. Rounded up to `parts`.
    width = -(-(max(min_tokens or 0, *lengths) - 1) // parts) * parts
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    targets = torch.full((len(prompts), width), IGNORED)
    batch = {"tokens": tokens, "targets": targets}
    # A server's log-probabilities may differ from the policy's by rounding: use another name.
    if responses.versions is not None:
        batch["versions"] = torch.zeros(len(prompts), width, dtype=torch.int64)
    if responses.routed_experts is not None:
        shape = len(prompts), width, *responses.routed_experts.shape[2:]
        batch["routed_experts"] = torch.full(shape, FREE, dtype=torch.int16)
    source = responses.logprobs if responses.logprobs is not None else responses.sampling_logprobs
    if source is not None:
        name = "sampling_logprobs" if responses.logprobs is None else "old_logprobs"
        batch[name] = torch.zeros(len(prompts), width)
    for row, prompt in enumerate(prompts):
        # targets[s] = sequence[s + 1]: the first response token is predicted at prompt_length - 1
        count, prompt_length = int(responses.lengths[row]), len(prompt)
        sequence = torch.cat((torch.as_tensor(prompt), responses.tokens[row, :count]))
        tokens[row, : len(sequence) - 1] = sequence[:-1]
        targets[row, prompt_length - 1 : prompt_length - 1 + count] = sequence[prompt_length:]
        if responses.versions is not None:
            versions = responses.versions[row, :count]
            batch["versions"][row, prompt_length - 1 : prompt_length - 1 + count] = versions
        if responses.routed_experts is not None:
            positions = len(sequence) - 1
            batch["routed_experts"][row, :positions] = responses.routed_experts[row, :positions]
        if responses.tool_mask is not None:
            # The policy did not sample these tokens, so they must not contribute to the loss.
            is_tool = ~responses.tool_mask[row, :count]
            targets[row, prompt_length - 1 : prompt_length - 1 + count][is_tool] = IGNORED
        if source is not None:
            batch[name][row, prompt_length - 1 : prompt_length - 1 + count] = source[row, :count]
    return batch


def samples_of(
    prompts: Sequence[Prompt], responses: Responses, tokenizer: Tokenizer | None
) -> list[Sample]:
    """Build the samples for the reward functions, one per response."""
    samples = []
    for row, prompt in enumerate(prompts):
        tokens = responses.row(row)
        episode = responses.episodes[row] if responses.episodes is not None else None
        if episode is None:
            response = tokenizer.decode(tokens) if tokenizer else ""
        else:  # its last turn has the answer
            is_reply = episode.turns > 0
            response = str(episode.messages[-1].get("content", "")) if is_reply else ""
        samples.append(
            Sample(
                prompt=prompt.text,
                response=response,
                prompt_tokens=prompt.tokens if episode is None else tuple(episode.prompt),
                response_tokens=tuple(tokens),
                answer=prompt.answer,
                stopped=bool(responses.stopped[row]),
                extra=prompt.extra,
                messages=() if episode is None else episode.messages,
                environment_reward=None if episode is None else episode.reward,
            )
        )
    return samples


def logprobs_of(engine: Engine, batch: Mapping[str, Tensor], temperature: float) -> Tensor:
    """Compute the targets' log-probabilities under an engine's model, (N, S) float32."""

    def target_logprobs(output: Output, microbatch: Batch) -> Tensor:
        return -output.token_losses(microbatch["targets"], temperature=temperature)

    return _by_length(engine, batch, target_logprobs)


def values_of(engine: Engine, batch: Mapping[str, Tensor], head: str = "value") -> Tensor:
    """Compute the value before each target, (N, S) float32, 0 elsewhere."""

    def masked_values(output: Output, microbatch: Batch) -> Tensor:
        return output.head(head).squeeze(-1) * (microbatch["targets"] != IGNORED)

    return _by_length(engine, batch, masked_values)


def _by_length(
    engine: Engine, batch: Mapping[str, Tensor], function: Callable[[Output, Batch], Tensor]
) -> Tensor:
    """Evaluate with the rows sorted by length, so that microbatches need less padding."""
    names = ("tokens", "targets", "routed_experts")
    columns = {name: batch[name] for name in names if name in batch}
    # Distance of the last target from the right edge, so shortest padding (longest rows) first.
    order = (columns["targets"] != IGNORED).flip(1).int().argmax(1).argsort(stable=True)
    in_order = engine.evaluate(
        {name: rows[order] for name, rows in columns.items()}, function
    ).cpu()
    result = torch.empty_like(in_order)  # back in the original order
    result[order] = in_order
    return result


def gather_rows(engine: Engine, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather rows of all data ranks on every process; all ranks pass the same shapes."""
    if engine.data_ranks == 1:
        return dict(rows)
    return {
        # Gloo has no int16, so bytes are exchanged.
        name: engine.gather(value.view(torch.uint8)).view(torch.int16)
        if value.dtype == torch.int16
        else engine.gather(value)
        for name, value in rows.items()
    }


def gather_responses(engine: Engine, responses: Responses) -> Responses:
    """Gather the responses of all data ranks on every process, without log-probabilities."""
    local = {name: getattr(responses, name) for name in ("tokens", "lengths", "stopped")}
    gathered: dict[str, Any] = gather_rows(engine, local)
    return Responses(**gathered, logprobs=None, sampling_logprobs=None)


def score_on_rank_zero(
    rewards: Mapping[str, tuple[Reward, float]],
    samples: Sequence[Sample],
    *,
    on_failure: Failure,
    penalty: float,
) -> BatchRewards:
    """Score on the first process and broadcast the scores.

    All processes get the same scores even if a reward is random, and paid services are called once.
    """
    if processes.count() == 1:
        return score(rewards, samples, on_failure=on_failure, penalty=penalty)
    scores: BatchRewards | None = None
    failure: Exception | None = None
    table = torch.zeros(1 + len(rewards), len(samples))
    if processes.rank() == 0:
        try:
            scores = score(rewards, samples, on_failure=on_failure, penalty=penalty)
            table = torch.stack([scores.total, *scores.parts.values()])
        except Exception as error:  # raised below, after the other processes know
            failure = error
    if processes.any_of(failure is not None):
        raise failure or RuntimeError("a reward failed on the first process; see its error message")
    table = processes.broadcast(table)
    return BatchRewards(
        total=table[0],
        parts=dict(zip(rewards, table[1:], strict=True)),
        failures=scores.failures if scores else (),
    )
