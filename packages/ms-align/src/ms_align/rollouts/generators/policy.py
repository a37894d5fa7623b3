"""The policy's own engine draws the responses: in this process, or under its layout."""

from ms_align.engines.generator import generator_of

build = generator_of
