"""Text generation: continuations of prompts as tokens, with log-probabilities."""
