"""The load of experts over an update: counted, balanced, and logged."""
