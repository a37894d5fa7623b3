"""The records that are sorted in files, and those that processes read of them."""

import numpy as np

RECORD = np.dtype([("key", "<u8"), ("check", "<u4"), ("document", "<u4")])
"""One key of one document; two documents with the same key and check are alike."""
WINDOW = np.dtype([("key", "<u8"), ("document", "<u4"), ("word", "<u4")])
"""One row of words of one document, and where it begins."""
FACTS = np.dtype([("size", "<u4"), ("rank", "<u4")])
"""Bytes of a document, and the first pattern that it fits."""
SPAN = np.dtype([("key", "<u8"), ("first", "<u4"), ("end", "<u4")])
"""Words of a document that stood before: the first, and the one behind the last. The key is its
document, from the first bit on."""
