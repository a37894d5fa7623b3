"""Traces as columns: Kineto's and Ascend's JSON, plain or gzip, and a recorder's ring."""
