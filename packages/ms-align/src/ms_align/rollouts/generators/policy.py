"""Rollouts by the policy's own engine, in this process or under its layout."""

from ms_align.engines.generator import generator_of

build = generator_of
