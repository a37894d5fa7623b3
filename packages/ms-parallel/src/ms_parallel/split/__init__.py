"""Splits models over processes: the only room that knows DTensor and FSDP."""
