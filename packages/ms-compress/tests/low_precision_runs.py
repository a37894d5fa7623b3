"""Exports of low-precision schemes on several processes; `run_processes` calls them by name."""

import hashlib
from pathlib import Path

import torch
from runs import CONFIG

from ms_compress import CompressError, export, qat
from ms_parallel import Engine, Layout
from ms_parallel.cluster.connection import connect


def export_schemes(layout: dict[str, int], schemes: list[str], folder: str) -> dict[str, str]:
    """Return the digest of each scheme's weights with learned scales, or the error."""
    groups = connect(Layout(**layout), device="cpu")
    digests = {}
    for scheme in schemes:
        try:
            engine = Engine(
                CONFIG,
                groups=groups,
                # Input scales need a calibration, which is not part of this test.
                prepare=lambda stage, name=scheme: qat(
                    stage, name, learned_scales=True, activations=False
                ),
            )
            with torch.no_grad():
                for name, parameter in engine.parameters.items():
                    if name.endswith("scale_factor"):
                        parameter.fill_(0.05)
            out = export(list(engine.stages.values()), Path(folder) / scheme)
            weights = (out / "model.safetensors").read_bytes()
            digests[scheme] = hashlib.sha256(weights).hexdigest()
        except CompressError as error:
            digests[scheme] = f"{type(error).__name__}: {error}"
    return digests
