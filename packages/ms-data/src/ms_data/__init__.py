"""From raw corpus to token batches: tokenize, shard, shuffle, stream and resume, exactly.

Names are imported when they are first used, so that a command's help need not wait for numpy;
`__init__.pyi` says where each comes from.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted([*_names, "__version__"])
