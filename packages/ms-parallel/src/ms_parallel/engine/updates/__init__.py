"""Loss scaling, timing and auditing of an engine's updates."""
