"""Analysis of all ranks' traces: time by phase, collectives, waiting and operators."""
