"""Episodes: the policy generates, calls tools or acts in an environment, and generates again.

All active episodes advance together: generate one response each, run all tool calls and environment
steps, and repeat. The first process runs tools and environments for all data ranks and broadcasts
the results, so all processes agree even if a tool is not deterministic.
"""

import json
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from ms_align import processes
from ms_align.engines.protocol import Engine
from ms_align.environments.calls import Reply
from ms_align.environments.conversation import ChatFormat, Message, Turn
from ms_align.environments.pool import ChildProcess, Request, ToolPool
from ms_align.errors import DataError, RewardError
from ms_align.generation.responses import Episode, Responses, RolloutEngine
from ms_align.generation.sampling import Sampling
from ms_align.rollouts.prompts import Prompt
from ms_align.rollouts.rows import gather_rows
from ms_align.seeds import position_seed

COLUMNS = ("tokens", "lengths", "stopped", "logprobs", "sampling_logprobs", "versions")


@define(eq=False, kw_only=True)
class _Running:
    """A running episode."""

    prompt: Prompt
    seed: int
    turn: Turn
    messages: list[Message]
    """All messages, with parsed tool calls."""
    prompt_tokens: list[int]
    tokens: list[int] = field(factory=list)
    """Tokens after the prompt: responses, and the text between them."""
    mask: list[bool] = field(factory=list)
    """True at sampled tokens."""
    columns: dict[str, list[float]] = field(factory=dict)
    """Log-probabilities and weight versions by name; 0 at tokens that were not sampled."""
    child: ChildProcess | None = None
    turns: int = 0
    tool_rounds: int = 0
    calls: int = 0
    call_failures: int = 0
    rewritten: int = 0
    reward: float = 0.0
    failure: str = ""
    stopped: bool = False
    finished: bool = False

    def append(self, tokens: Sequence[int], columns: dict[str, list[float]] | None = None) -> None:
        """Append sampled tokens with their columns, or other tokens without columns."""
        self.tokens += tokens
        self.mask += [columns is not None] * len(tokens)
        for name, values in self.columns.items():
            values += columns[name] if columns else [0.0] * len(tokens)

    def end(self, *, stopped: bool = False, failure: str = "") -> None:
        """End the episode."""
        self.finished, self.stopped, self.failure = True, stopped, failure

    def call_ids(self, reply: Reply) -> list[str]:
        """Return a nine-character id for each call; Mistral's template requires this length."""
        return [f"call{self.calls + index:05d}" for index in range(len(reply.calls))]


@define(eq=False, kw_only=True)
class _Batch:
    """All episodes of a rollout, on the first process."""

    queue: deque[tuple[int, Prompt]]
    """Index and prompt of the episodes not yet started."""
    seed: int
    episodes: list[_Running] = field(factory=list)
    """Started episodes, in the order of the prompts."""
    active: list[_Running] = field(factory=list)


class EpisodeRunner:
    """Generates episodes with tools, an environment or both.

    Args:
        policy: engine of the policy, for its data ranks and context.
        chat: chat template with tools.
        pool: processes of tools and environments; used by the first process only.
        has_tools: responses may call tools.
        has_environment: other responses are actions in an environment.
        max_tool_calling_iterations: turns with tool calls per episode; None for no limit.
        max_episode_tokens: tokens of an episode after its prompt, including tool results.
        max_active: maximum number of episodes that run at the same time.
    """

    def __init__(
        self,
        policy: Engine,
        chat: ChatFormat,
        pool: ToolPool | None,
        *,
        has_tools: bool,
        has_environment: bool,
        max_tool_calling_iterations: int | None,
        max_episode_tokens: int,
        max_active: int,
    ) -> None:
        self.policy = policy
        self.chat = chat
        self.pool = pool
        self.has_tools = has_tools
        self.has_environment = has_environment
        self.max_tool_calling_iterations = max_tool_calling_iterations
        self.max_episode_tokens = max_episode_tokens
        self.max_active = max_active

    def __call__(
        self,
        engine: RolloutEngine,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        count: int,
        seed: int,
    ) -> Responses:
        """Generate `count` episodes per prompt, for the prompts of all data ranks. Collective.

        Returns:
            Responses of all data ranks, the same on every process. A failed episode has a
            `failure`.

        Raises:
            DataError: a prompt does not fit the context.
        """
        repeated = [prompt for prompt in prompts for _ in range(count)]
        batch = _Batch(queue=deque(enumerate(repeated)), seed=seed)
        iteration = 0
        # Only the first process has the episodes. It broadcasts the contexts to generate from.
        while contexts := _on_first_process(partial(self._contexts, batch)):
            # columns: (E, T) each, one row per active episode
            columns = self._generate(engine, contexts, sampling, position_seed(seed, iteration))
            _on_first_process(partial(self._advance, batch, columns, sampling))
            iteration += 1
        return self._responses(batch.episodes)

    def close(self) -> None:
        """Kill the processes of tools and environments."""
        if self.pool is not None:
            self.pool.close()

    def _generate(
        self, engine: RolloutEngine, contexts: list[list[int]], sampling: Sampling, seed: int
    ) -> dict[str, Tensor]:
        """Generate a response to each context, and gather the responses of all data ranks."""
        rank, ranks = self.policy.data_rank, self.policy.data_ranks
        # Generation is collective, so each rank gets the same number of rows; the padding rows are
        # at the end and never read.
        padded = processes.pad_to_ranks(contexts, ranks)
        local = padded[processes.rows_of_rank(len(padded), rank, ranks)]
        responses = engine.generate(local, sampling, count=1, seed=seed)
        columns = {name: getattr(responses, name) for name in COLUMNS}
        tensors = {name: column for name, column in columns.items() if column is not None}
        return gather_rows(self.policy, tensors)

    def _contexts(self, batch: "_Batch") -> list[list[int]]:
        """Start episodes while there is room; return the context of each active one."""
        while True:
            count = min(len(batch.queue), self.max_active - len(batch.active))
            new = []
            for index, prompt in (batch.queue.popleft() for _ in range(count)):
                # Negative, as positions from 0 seed the generations.
                new.append(self._start(prompt, position_seed(batch.seed, -1 - index)))
            self._reset(new)
            batch.episodes += new
            batch.active += [episode for episode in new if not episode.finished]
            if batch.active or not batch.queue:  # otherwise all new environments failed: retry
                return [[*e.prompt_tokens, *e.tokens] for e in batch.active]

    def _start(self, prompt: Prompt, seed: int) -> _Running:
        assert prompt.messages is not None  # `read_prompts` was called with `chat`
        messages = list(prompt.messages)
        turn = Turn(messages=tuple(messages), text="")
        return _Running(
            prompt=prompt,
            seed=seed,
            turn=turn,
            messages=messages,
            prompt_tokens=list(prompt.tokens),
        )

    def _reset(self, episodes: list[_Running]) -> None:
        """Reset the environments of new episodes, and render their first prompts."""
        # None: the environment has nothing to add to the prompt.
        observations: list[str | None] = [None] * len(episodes)
        if self.has_environment:
            assert self.pool is not None
            requests = []
            for episode in episodes:
                prompt = episode.prompt
                row = {**prompt.extra, "prompt": prompt.text, "answer": prompt.answer}
                # One process per episode, which holds the environment's state.
                episode.child = self.pool.start()
                fields = {"do": "reset", "row": row, "seed": episode.seed}
                requests.append(Request(fields=fields, child=episode.child))
            for index, reply in enumerate(self.pool.run(requests)):
                if "error" in reply:
                    self._fail(episodes[index], "reset", reply["error"])
                observations[index] = reply.get("text")
        for episode, observation in zip(episodes, observations, strict=True):
            if episode.finished:
                continue
            if observation is not None:
                episode.messages.append(self._message("user", observation))
            episode.turn, episode.prompt_tokens = self.chat.start(episode.messages)

    def _fail(self, episode: _Running, action: str, problem: str) -> None:
        episode.end(failure=f"{action} of the environment: {problem}")
        self._end_child(episode)

    def _end_child(self, episode: _Running) -> None:
        if episode.child is not None and self.pool is not None:
            self.pool.end(episode.child)
            episode.child = None

    def _message(self, role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": self.chat.without_special_tokens(text)}

    def _advance(self, batch: "_Batch", columns: dict[str, Tensor], sampling: Sampling) -> None:
        """Append the responses, run tools and environments, and append their results.

        `columns` are (E, T) tensors with a row per active episode.
        """
        floats = [name for name in ("logprobs", "sampling_logprobs", "versions") if name in columns]
        requests: list[Request] = []
        waiting: list[tuple[_Running, Reply, list[int], range]] = []
        for row, episode in enumerate(batch.active):
            length, stopped = int(columns["lengths"][row]), bool(columns["stopped"][row])
            response = columns["tokens"][row, :length].tolist()
            episode.columns = episode.columns or {name: [] for name in floats}
            episode.append(
                response, {name: columns[name][row, :length].tolist() for name in floats}
            )
            episode.turns += 1
            # A response may also stop with a stop string, whose tokens belong to the text.
            reply = self.chat.parse(response, stopped=response[-1] in sampling.stop_token_ids)
            episode.messages.append(reply.message(episode.call_ids(reply)))
            if not stopped:  # cut at max_new_tokens
                episode.end()
                continue
            new = self._requests(episode, reply)
            if new is None:
                continue
            requests += new
            # An episode's results have the same indices as its requests.
            waiting.append((episode, reply, response, range(len(requests))[-len(new) :]))
        # All calls of all episodes run in parallel.
        results = self.pool.run(requests) if self.pool is not None else []
        for episode, reply, response, indices in waiting:
            self._apply(episode, reply, response, [results[index] for index in indices], sampling)
        for episode in batch.active:
            if episode.finished:
                self._end_child(episode)
        batch.active = [episode for episode in batch.active if not episode.finished]

    def _requests(self, episode: _Running, reply: Reply) -> list[Request] | None:
        """Return the tool calls or the action of a response; None if it ends the episode."""
        limit = self.max_tool_calling_iterations
        if self.has_tools and reply.calls:
            if limit is not None and episode.tool_rounds >= limit:
                episode.end()
                return None
            episode.tool_rounds += 1
            # A seed per call, so a resumed run repeats the results of random tools.
            return [
                Request(
                    fields={
                        "do": "call",
                        "name": call.name,
                        "arguments": call.arguments,
                        "seed": position_seed(episode.seed, episode.calls + index),
                    },
                    problem=call.problem,
                )
                for index, call in enumerate(reply.calls)
            ]
        if self.has_environment:
            # Negative, as positions from 0 seed the tool calls. Turns start at 1.
            seed = position_seed(episode.seed, -episode.turns)
            fields = {"do": "step", "response": reply.content, "seed": seed}
            return [Request(fields=fields, child=episode.child)]
        episode.end(stopped=True)
        return None

    def _apply(
        self,
        episode: _Running,
        reply: Reply,
        response: list[int],
        results: list[dict[str, Any]],
        sampling: Sampling,
    ) -> None:
        """Append the results of a response, unless they end the episode."""
        call_ids = episode.call_ids(reply)
        if self.has_tools and reply.calls:
            new = []
            for call, call_id, result in zip(reply.calls, call_ids, results, strict=True):
                failed = "error" in result
                text = f"error: {result['error']}" if failed else result["text"]
                episode.call_failures += failed
                message = self._message("tool", text)
                new.append({**message, "name": call.name, "tool_call_id": call_id})
            episode.calls += len(new)
        else:
            (result,) = results
            if "error" in result:
                self._fail(episode, "step", result["error"])
                return
            episode.reward += result["reward"]
            if result["done"] or result["text"] is None:
                episode.end(stopped=True)
                return
            new = [self._message("user", result["text"])]
        stopped = response[-1] in sampling.stop_token_ids
        try:
            continuation = self.chat.append(
                episode.turn, response, reply, new, stopped=stopped, call_ids=call_ids
            )
        except DataError as error:  # the template rejected a message
            episode.end(failure=str(error))
            return
        # The next response may use all of max_new_tokens, so end now if that would not fit.
        length = len(episode.tokens) + len(continuation.tokens) + sampling.max_new_tokens
        context = self.policy.context
        too_long = context is not None and len(episode.prompt_tokens) + length > context
        if too_long or length > self.max_episode_tokens:
            episode.end()
            return
        # The text between responses is context, not a target: no columns, mask False.
        episode.rewritten += not continuation.exact
        episode.append(continuation.tokens)
        episode.messages += new
        episode.turn = continuation.turn

    def _responses(self, episodes: list[_Running]) -> Responses:
        """Build the responses of all episodes, identical on every process."""
        return responses_of(
            [
                {
                    "tokens": episode.tokens,
                    "mask": episode.mask,
                    "columns": episode.columns,
                    "stopped": episode.stopped,
                    "episode": {
                        "prompt": episode.prompt_tokens,
                        "messages": episode.messages,
                        "turns": episode.turns,
                        "calls": episode.calls,
                        "call_failures": episode.call_failures,
                        "rewritten": episode.rewritten,
                        "reward": episode.reward if self.has_environment else None,
                        "failure": episode.failure,
                    },
                }
                for episode in episodes
            ]
        )


def responses_of(rows: list[dict[str, Any]]) -> Responses:
    """Build responses from the first process's rows. Collective.

    Args:
        rows: `tokens`, `mask`, `columns` and `stopped` of each episode, and the fields of its
            `Episode` as `episode`.
    """
    rows = _broadcast_json(rows)
    longest = max(1, *(len(row["tokens"]) for row in rows))

    def column(values: list[list[Any]], dtype: torch.dtype) -> Tensor:
        result = torch.zeros(len(rows), longest, dtype=dtype)  # (N, T), padded with 0
        for target, row in zip(result, values, strict=True):
            target[: len(row)] = torch.tensor(row, dtype=dtype)
        return result

    names = {name for row in rows for name in row["columns"]}
    floats = {
        name: column([row["columns"].get(name, []) for row in rows], torch.float32)
        for name in ("logprobs", "sampling_logprobs")
        if name in names
    }
    versions = [row["columns"].get("versions", []) for row in rows]
    return Responses(
        tokens=column([row["tokens"] for row in rows], torch.int64),
        lengths=torch.tensor([len(row["tokens"]) for row in rows]),
        logprobs=floats.get("logprobs"),
        sampling_logprobs=floats.get("sampling_logprobs"),
        stopped=torch.tensor([row["stopped"] for row in rows]),
        versions=column(versions, torch.int64) if "versions" in names else None,
        tool_mask=column([row["mask"] for row in rows], torch.bool),
        episodes=tuple(Episode(**row["episode"]) for row in rows),
    )


def _on_first_process(action: Any) -> Any:
    """Run an action on the first process and broadcast its JSON result; raise errors on all."""
    failure: Exception | None = None
    result = None
    if processes.rank() == 0:
        try:
            result = action()
        except Exception as error:  # raised below, once the other processes know of it
            failure = error
    # Without this exchange, the other processes would wait in the broadcast forever.
    if processes.any_of(failure is not None):
        raise failure or RewardError("an episode failed on the first process; see its message")
    return _broadcast_json(result)


def _broadcast_json(value: Any) -> Any:
    """Return the first process's value on every process. Collective."""
    if processes.count() == 1:
        return value
    # Receivers need the size first, to allocate the buffer.
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = int(processes.broadcast(torch.tensor(len(content))))
    if processes.rank() != 0:
        content = torch.zeros(size, dtype=torch.uint8)
    return json.loads(bytes(processes.broadcast(content).tolist()))
