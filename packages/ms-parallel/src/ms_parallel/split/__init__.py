"""Splits models over processes; the only package that uses DTensor and FSDP."""
