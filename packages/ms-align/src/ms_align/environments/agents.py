"""Episodes of an unmodified agent, which uses the policy through the gateway.

Agents run in other processes. Responses are generated once every running agent waits for one, so
the composition of batches, and hence the sampled tokens, does not depend on timing.
"""

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from ms_align.engines.protocol import Engine
from ms_align.environments.conversation import ChatFormat
from ms_align.environments.episodes import responses_of
from ms_align.environments.gateway import Branch, Gateway, PendingRequest, Session
from ms_align.environments.pool import Request, ToolPool
from ms_align.errors import DataError
from ms_align.generation.responses import Responses, RolloutEngine
from ms_align.generation.sampling import Sampling
from ms_align.rollouts.prompts import Prompt
from ms_align.seeds import position_seed

COLUMNS = ("logprobs", "sampling_logprobs", "versions")


class AgentRunner:
    """Generates episodes by running one agent per episode.

    Args:
        policy: engine of the policy, in one process.
        chat: chat template.
        pool: processes of agents, `limits.workers` at a time; `limits.timeout_s` limits an agent's
            time between two requests.
        max_episode_tokens: tokens of a branch after its first prompt.
    """

    def __init__(
        self, policy: Engine, chat: ChatFormat, pool: ToolPool, *, max_episode_tokens: int
    ) -> None:
        self.policy = policy
        self.chat = chat
        self.pool = pool
        self.max_episode_tokens = max_episode_tokens
        self.gateway = Gateway()

    def __call__(
        self,
        engine: RolloutEngine,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        count: int,
        seed: int,
    ) -> Responses:
        """Run `count` agents per prompt; return each agent's branch with most sampled tokens."""
        repeated = [prompt for prompt in prompts for _ in range(count)]
        rows: list[dict[str, Any]] = []
        # Waves, not a queue: a batch then depends only on the prompts, never on which agent is done
        # first.
        size = self.pool.limits.workers
        for start in range(0, len(repeated), size):
            wave = repeated[start : start + size]
            rows += self._run(engine, wave, sampling, position_seed(seed, start))
        return responses_of(rows)

    def close(self) -> None:
        """Stop the gateway and kill the agents' processes."""
        self.gateway.close()
        self.pool.close()

    def _run(
        self, engine: RolloutEngine, prompts: Sequence[Prompt], sampling: Sampling, seed: int
    ) -> list[dict[str, Any]]:
        """Run one agent per prompt, all at the same time; return a row for each."""
        sessions = [self.gateway.open_session() for _ in prompts]
        requests = [
            Request(
                fields={
                    "do": "agent",
                    "row": {**prompt.extra, "prompt": prompt.text, "answer": prompt.answer},
                    "base_url": self.gateway.base_url,
                    "api_key": session.key,
                    "seed": position_seed(seed, -1 - index),
                }
            )
            for index, (prompt, session) in enumerate(zip(prompts, sessions, strict=True))
        ]
        ended: set[int] = set()
        replies: list[dict[str, Any]] = []

        def note(index: int) -> None:
            with self.gateway.changed:
                ended.add(index)
                self.gateway.changed.notify_all()

        def run_agents() -> None:
            try:
                replies.extend(self.pool.run(requests, note, partial(_is_waiting, sessions)))
            finally:  # even after an error, the loop below must not wait for these agents
                for index in range(len(requests)):
                    note(index)

        # The pool waits for the agents in a thread, while this thread answers their requests.
        agents = threading.Thread(target=run_agents, daemon=True)
        agents.start()
        iteration = 0
        while pending := self._pending(sessions, ended):
            self._answer(engine, pending, sampling, position_seed(seed, iteration))
            iteration += 1
        agents.join()
        for session in sessions:
            self.gateway.close_session(session)
        failed: dict[str, Any] = {"error": "its process could not be started"}
        replies += [failed] * (len(sessions) - len(replies))
        return [_row(session, reply) for session, reply in zip(sessions, replies, strict=True)]

    def _pending(self, sessions: list[Session], ended: set[int]) -> list[Session]:
        """Wait until every agent has a request or has ended; return the sessions with requests."""

        def is_quiet() -> bool:
            return all(s.pending is not None or i in ended for i, s in enumerate(sessions))

        with self.gateway.changed:
            self.gateway.changed.wait_for(is_quiet)
            return [s for i, s in enumerate(sessions) if s.pending is not None and i not in ended]

    def _answer(
        self, engine: RolloutEngine, sessions: list[Session], sampling: Sampling, seed: int
    ) -> None:
        """Generate one batch of responses, one per session, and answer the requests."""
        active: list[tuple[Session, PendingRequest]] = []
        for session in sessions:
            request = session.pending
            assert request is not None
            try:
                session.begin(self.chat, request)
            except DataError as error:
                session.pending = None
                request.refuse(400, str(error))
                continue
            if not self._has_room(session, sampling):
                session.pending = None
                # Agents recognize the code, and may end the episode without an error.
                request.refuse(
                    400,
                    "the conversation plus max_new_tokens must fit the model's context and "
                    f"max_episode_tokens = {self.max_episode_tokens}; end it",
                    "context_length_exceeded",
                )
                continue
            active.append((session, request))
        if not active:
            return
        # In the order of the prompts, whichever request came first.
        contexts = [session.context for session, _ in active]
        responses = engine.generate(contexts, sampling, count=1, seed=seed)
        columns = {name: getattr(responses, name) for name in COLUMNS}
        for row, (session, request) in enumerate(active):
            # The batch was generated with the run's max_new_tokens; cut to the request's limit.
            length = int(responses.lengths[row])
            size = min(length, request.max_tokens or length)
            session.finish(
                self.chat,
                responses.tokens[row, :size].tolist(),
                {n: c[row, :size].tolist() for n, c in columns.items() if c is not None},
                stopped=size == length and bool(responses.stopped[row]),
            )

    def _has_room(self, session: Session, sampling: Sampling) -> bool:
        """Return True if another response fits the session's branch."""
        branch = session.branches[-1]
        longest = len(branch.tokens) + sampling.max_new_tokens
        context = self.policy.context
        is_too_long = context is not None and len(branch.prompt) + longest > context
        return not is_too_long and longest <= self.max_episode_tokens


def _is_waiting(sessions: Sequence[Session], index: int) -> bool:
    """Return True if an agent waits for a response."""
    return sessions[index].pending is not None


def _row(session: Session, reply: dict[str, Any]) -> dict[str, Any]:
    """Return the row of an episode, for `responses_of`."""
    failure = f"agent: {reply['error']}" if "error" in reply else ""
    if not session.branches:
        failure = failure or "agent: sent no request"
        branch = Branch(prompt=[0])  # a row needs at least one token; failed rows are masked out
    else:
        branch = max(session.branches, key=lambda item: sum(item.mask))
    return {
        "tokens": branch.tokens,
        "mask": branch.mask,
        "columns": branch.columns,
        "stopped": branch.stopped,
        "episode": {
            "prompt": branch.prompt,
            "messages": session.messages,
            "turns": session.turns,
            "rewritten": session.rewritten,
            "forks": session.forks,
            "reward": reply.get("reward"),
            "failure": failure,
        },
    }
