"""The schedule as a value: actions, placement, costs, and the messages between ranks."""
