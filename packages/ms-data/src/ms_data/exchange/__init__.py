"""Converts from and to datasets of other libraries: Megatron, MosaicML and Parquet."""
