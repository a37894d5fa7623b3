"""Context parallelism: rows split by position, with attention over full rows."""
