"""The dataset on disk: its format, reading, writing, checking."""
