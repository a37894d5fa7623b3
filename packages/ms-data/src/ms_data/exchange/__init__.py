"""Datasets of other libraries read and written: Megatron's, MosaicML's and Parquet."""
