"""Detects torch.func transforms and forward-mode differentiation.

`torch.func.grad`, `vmap`, `jvp` and similar transforms wrap tensors below Python's type, so neither
`type(tensor)` nor a dispatch mode shows them. torch has no public API for this check; only this
file uses its private names.
"""

import torch
from torch.autograd import forward_ad


def transforms_active() -> bool:
    """Return whether a torch.func transform or a forward-mode level is active in this thread."""
    if torch.compiler.is_compiling():
        return False
    if forward_ad._current_level >= 0:
        return True
    # torch's stub says that it returns an interpreter; outside of a transform it is None.
    interpreter: object = torch._C._functorch.peek_interpreter_stack()
    return interpreter is not None
