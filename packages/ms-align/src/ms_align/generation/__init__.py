"""Continues prompts: tokens in, tokens out, with the log-probability of each."""

from ms_align.generation.generator import LocalGenerator
from ms_align.generation.responses import Generator, Responses

__all__ = ["Generator", "LocalGenerator", "Responses"]
