"""Tools and environments: episodes of several turns as rollouts."""
