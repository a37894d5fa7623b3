"""Weights of models: drawn, read from folders and written to them, each process its part."""

from ms_parallel.weights.initial import initialise
from ms_parallel.weights.load import has_weights, load_model, load_weights
from ms_parallel.weights.save import save_model

__all__ = ["has_weights", "initialise", "load_model", "load_weights", "save_model"]
