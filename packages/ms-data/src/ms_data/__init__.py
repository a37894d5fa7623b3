"""From raw corpus to token batches: tokenize, shard, shuffle, stream and resume, exactly."""

__version__ = "0.1.0"

__all__ = ["__version__"]
