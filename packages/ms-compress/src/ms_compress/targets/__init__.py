"""One file a target: how a quantised model lies on disk."""
