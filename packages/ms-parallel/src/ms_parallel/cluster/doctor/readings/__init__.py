"""Reads a recording: what its files and the outputs of its commands say."""
