"""Samples at each evaluation: what the model says to a few prompts that it never learned from."""

from collections.abc import Callable, Collection, Sequence

from attrs import evolve, field, frozen

from ms_align.engines.generator import generator_of
from ms_align.engines.protocol import Engine
from ms_align.errors import ModelError
from ms_align.generation.sampling import Sampling
from ms_align.run.loop import RunLog

LONGEST_SHOWN = 160


@frozen(kw_only=True)
class SamplePrompts:
    """Prompts to continue, and how."""

    prompts: Sequence[Sequence[int]]
    """Tokens of each, at least one; the same on every process."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Text of tokens; None shows the tokens themselves."""
    sampling: Sampling = field(factory=lambda: Sampling(max_new_tokens=48, temperature=0.0))

    def log(self, engine: Engine, log: RunLog, *, ends: Collection[int] = ()) -> None:
        """Log a response to each prompt, or why the model cannot generate.

        Args:
            engine: runs the model.
            log: where to.
            ends: tokens that end a response, beside those of `sampling`.
        """
        if not self.prompts:
            return
        try:
            generator = generator_of(engine)
        except ModelError as error:  # any module may be trained, and not every one takes a cache
            log.note(f"no samples: {error}")
            return
        stops = tuple(sorted({*self.sampling.stop_tokens, *ends}))
        sampling = evolve(self.sampling, stop_tokens=stops)
        responses = generator(self.prompts, sampling, count=1, seed=0)
        for at, prompt in enumerate(self.prompts):
            log_sample(log, self._text(prompt), self._text(responses.row(at)))

    def _text(self, tokens: Sequence[int]) -> str:
        return self.decode(tokens) if self.decode else " ".join(map(str, tokens))


def log_sample(
    log: RunLog, prompt: str, response: str, reward: float | None = None, *, show: bool = True
) -> None:
    """Log an event `sample` of a prompt and its response; and a line, if it is to be shown."""
    fields = {"prompt": prompt, "response": response}
    log.event("sample", fields if reward is None else {**fields, "reward": reward})
    if show:
        label = "sample" if reward is None else f"sample ({reward:g})"
        asked, answer = _printable(prompt), _printable(response)
        log.note(f"{label}: {asked[-LONGEST_SHOWN:]} → {answer[:LONGEST_SHOWN]}")


def _printable(text: str) -> str:
    """Put a text on one line, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
