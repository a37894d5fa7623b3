"""Turns a corpus into a folder of shards: the build, what it notes, and the folder it works in."""
