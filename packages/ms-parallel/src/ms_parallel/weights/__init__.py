"""Model weights: initialization, and reading and writing of Hugging Face folders in parallel."""

from ms_parallel.weights.initial import initialize
from ms_parallel.weights.load import has_weights, load_model, load_weights
from ms_parallel.weights.save import save_model

__all__ = ["has_weights", "initialize", "load_model", "load_weights", "save_model"]
