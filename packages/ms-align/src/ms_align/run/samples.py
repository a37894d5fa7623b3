"""Sample responses to held-out prompts, logged at each evaluation."""

from collections.abc import Callable, Collection, Sequence

from attrs import evolve, field, frozen

from ms_align.engines.generator import generator_of
from ms_align.engines.protocol import Engine
from ms_align.errors import ModelError
from ms_align.generation.sampling import Sampling
from ms_align.run.loop import RunLog

MAX_SHOWN = 160


@frozen(kw_only=True)
class SamplePrompts:
    """Prompts and sampling settings for sample responses."""

    prompts: Sequence[Sequence[int]]
    """Token ids per prompt, at least one each; the same on every process."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Converts tokens to text. None: token ids are shown."""
    sampling: Sampling = field(factory=lambda: Sampling(max_new_tokens=48, temperature=0.0))

    def log(self, engine: Engine, log: RunLog, *, ends: Collection[int] = ()) -> None:
        """Log a response to each prompt, or the reason why the model cannot generate.

        Args:
            engine: engine that generates.
            log: destination.
            ends: tokens that end a response, in addition to `sampling.stop_token_ids`.
        """
        if not self.prompts:
            return
        try:
            generator = generator_of(engine)
        except ModelError as error:  # some trainable modules do not support a KV cache
            log.note(f"no samples: {error}")
            return
        # `ends` may grow during training, as end tokens are found in the data.
        stops = tuple(sorted({*self.sampling.stop_token_ids, *ends}))
        sampling = evolve(self.sampling, stop_token_ids=stops)
        responses = generator(self.prompts, sampling, count=1, seed=0)
        for index, prompt in enumerate(self.prompts):
            log_sample(log, self._text(prompt), self._text(responses.row(index)))

    def _text(self, tokens: Sequence[int]) -> str:
        return self.decode(tokens) if self.decode else " ".join(map(str, tokens))


def log_sample(
    log: RunLog, prompt: str, response: str, reward: float | None = None, *, show: bool = True
) -> None:
    """Emit a `sample` event and, if `show`, print the sample on one line."""
    fields = {"prompt": prompt, "response": response}
    log.event("sample", fields if reward is None else {**fields, "reward": reward})
    if show:
        label = "sample" if reward is None else f"sample ({reward:g})"
        prompt_text, response_text = _printable(prompt), _printable(response)
        log.note(f"{label}: {prompt_text[-MAX_SHOWN:]} → {response_text[:MAX_SHOWN]}")


def _printable(text: str) -> str:
    """Replace control characters and line breaks by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
