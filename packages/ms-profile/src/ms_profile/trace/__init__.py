"""Traces as columns, read from Kineto's or Ascend's JSON (plain or gzip) or a recorder's ring."""
