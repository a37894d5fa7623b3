"""The dataset on disk: format, writing, reading and verification."""
