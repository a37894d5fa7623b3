"""Process layouts, pipeline schedules, sharded models and the trainer that runs them."""

__version__ = "0.1.0"

__all__ = ["__version__"]
