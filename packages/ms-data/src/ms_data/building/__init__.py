"""The build: turns a corpus into a folder of shards."""
