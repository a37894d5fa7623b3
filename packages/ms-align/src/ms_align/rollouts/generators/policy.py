"""The policy's own engine draws the responses: in this process, or under its layout."""

from ms_align.engines.generator import generator_of
from ms_align.engines.protocol import Engine
from ms_align.generation import Generator
from ms_align.generation.stops import Decode

__all__ = ["build"]


def build(policy: Engine, *, slots: int, decode: Decode | None) -> Generator:
    """Draw with the weights as they are at each rollout.

    Args:
        policy: what is trained.
        slots: responses that are written at once, in one process.
        decode: text of tokens; needed for stop strings alone.
    """
    return generator_of(policy, slots=slots, decode=decode)
