"""Low-rank adapters, in memory and in peft's file format."""
