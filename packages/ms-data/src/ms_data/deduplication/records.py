"""Record types for external sorting and memory-mapped files."""

import numpy as np

RECORD = np.dtype([("key", "<u8"), ("check", "<u4"), ("document", "<u4")])
"""A key of a document; documents with equal key and check are duplicates."""
WINDOW = np.dtype([("key", "<u8"), ("document", "<u4"), ("word", "<u4")])
"""A window of words: hash, document, and first word."""
FACTS = np.dtype([("size", "<u4"), ("rank", "<u4")])
"""Size of a document in bytes, and the index of the first pattern that its file matches."""
SPAN = np.dtype([("key", "<u8"), ("first", "<u4"), ("end", "<u4")])
"""Repeated words of a document: the first, and one past the last. The key is the document, in the
high bits."""
