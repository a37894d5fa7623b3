"""The schedule as a value: actions, placement, costs, and messages between ranks."""
