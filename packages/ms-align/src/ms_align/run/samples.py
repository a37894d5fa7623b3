"""Samples at each evaluation: what the model says to a few prompts that it never learned from."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from attrs import field, frozen
from torch import nn

from ms_align.engines.protocol import Engine
from ms_align.errors import ModelError
from ms_align.generation import Generator, LocalGenerator
from ms_align.generation.engine_generator import EngineGenerator
from ms_align.generation.sampling import Sampling
from ms_align.run.loop import Tell

__all__ = ["Showing"]

LONGEST_SHOWN = 160


@frozen(kw_only=True)
class Showing:
    """Prompts to continue, and how."""

    prompts: Sequence[Sequence[int]]
    """Tokens of each, at least one; the same on every process."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Text of tokens; None tells the tokens themselves."""
    sampling: Sampling = field(factory=lambda: Sampling(max_new_tokens=48, temperature=0.0))

    def tell(self, engine: Engine, tell: Tell) -> None:
        """An event `sample` for each prompt; and a line. Says nothing where nothing generates."""
        generator = _generator(engine)
        if generator is None or not self.prompts:
            return
        responses = generator(self.prompts, self.sampling, count=1, seed=0)
        for at, prompt in enumerate(self.prompts):
            said = responses.row(at)
            texts = [self._text(prompt), self._text(said)]
            tell.event("sample", {"prompt": texts[0], "response": texts[1]})
            asked, answer = (_printable(one) for one in texts)
            tell.note(f"sample: {asked[-LONGEST_SHOWN:]} → {answer[:LONGEST_SHOWN]}")

    def _text(self, tokens: Sequence[int]) -> str:
        return self.decode(tokens) if self.decode else " ".join(map(str, tokens))


def _generator(engine: Engine) -> Generator | None:
    module = getattr(engine, "module", None)
    if isinstance(module, nn.Module):
        try:
            return LocalGenerator(module)
        except ModelError:  # any module may be trained, and not every one takes a cache
            return None
    return EngineGenerator(cast(Any, engine)) if hasattr(engine, "generate") else None


def _printable(text: str) -> str:
    """On one line, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
