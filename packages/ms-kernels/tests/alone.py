"""Proof that ms-kernels works with nothing but what it declares: run in a bare environment."""

import torch

import ms_kernels

x = torch.randn(4, 8, requires_grad=True)
weight = torch.ones(8)
ms_kernels.rms_norm(x, weight).sum().backward()
assert x.grad is not None

hidden, table = torch.randn(6, 8), torch.randn(11, 8)
targets = torch.tensor([0, 10, -100, 3, 4, 5])
fused = ms_kernels.linear_cross_entropy(hidden, table, targets)
plain = ms_kernels.cross_entropy(hidden @ table.T, targets)
torch.testing.assert_close(fused, plain)
with ms_kernels.use_backend("reference"):
    assert ms_kernels.explain("rms_norm", x, weight).backend == "reference"
