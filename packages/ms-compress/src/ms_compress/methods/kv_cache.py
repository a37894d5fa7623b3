"""Scales of an FP8 key-value cache, which vLLM reads from compressed-tensors folders.

A layer's key scale is the largest magnitude of its keys on calibration tokens, after the rotary
embedding, divided by 448, the largest E4M3 value; the value scale is computed in the same way from
its values. Larger keys and values saturate.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ms_compress.arguments import check_type
from ms_compress.errors import CalibrationError, LayerError
from ms_compress.methods.calibration import check_calibration
from ms_compress.methods.data_ranks import ONE_PROCESS, DataRanks, check_ranks
from ms_compress.models.logits import evaluating
from ms_compress.models.selection import blocks_of
from ms_compress.quantization.layers import K_SCALE, V_SCALE
from ms_compress.quantization.rounding import calibrated_scale
from ms_compress.quantization.scheme import KV_CACHE

PROJECTIONS = ("k_proj", "qkv_proj")
"""Projections of attention layers that cache keys and values; MLA has neither."""

Observe = Callable[[int, Tensor, Tensor], None]


def check_kv_cache(model: nn.Module) -> None:
    """Check that the attention of every decoder layer caches keys and values.

    Raises:
        LayerError: a layer does not, such as MLA or linear attention; the first is named.
    """
    for name, block in blocks_of(model):
        attention = getattr(block, "self_attn", None)
        if not any(hasattr(attention, projection) for projection in PROJECTIONS):
            raise LayerError(
                f"{name}: kv_cache needs an attention with keys and values (k_proj), but this layer"
                " has none; leave kv_cache out"
            )


@torch.no_grad()
def calibrate_kv_cache(
    model: nn.Module, batches: Sequence[Tensor], *, ranks: DataRanks = ONE_PROCESS
) -> None:
    """Calibrate an FP8 key-value cache and add its scales to a model, in place.

    The scales are buffers `k_scale` and `v_scale`, (1,) float32, of each layer's attention;
    `export` writes them, and `kv_cache_scheme`, for `ct.*` schemes.

    Args:
        model: a complete decoder from ms-parallel or transformers, quantized or not.
        batches: tokens, (B, S) int64 each.
        ranks: processes that calibrate on the other batches.

    Raises:
        LayerError: a decoder layer has no keys and values.
        CalibrationError: no tokens are given, or a key or value is NaN or infinite.
        DataError: a token is outside the model's vocabulary.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module", error=LayerError)
    check_ranks(ranks)
    check_calibration(model, batches, ())
    check_kv_cache(model)
    blocks = blocks_of(model)
    device = next(model.parameters()).device
    peaks = torch.zeros(len(blocks), 2, device=device)  # largest key and value of each layer

    def observe(layer: int, keys: Tensor, values: Tensor) -> None:
        largest = torch.stack([keys.abs().amax(), values.abs().amax()]).float()
        peaks[layer] = torch.maximum(peaks[layer], largest)  # propagates NaN

    with evaluating(model):
        for batch in batches:
            _run(model, batch.to(device), observe)
    peaks = ranks.max(peaks)
    for (name, block), layer_peaks in zip(blocks, peaks, strict=True):
        if not bool(layer_peaks.any()):  # a layer of multi-token prediction, which is not run
            continue
        if not bool(layer_peaks.isfinite().all()):
            raise CalibrationError(
                f"{name}: keys or values are NaN or infinite on the calibration tokens; check the"
                " tokens, and the weights up to this layer"
            )
        for buffer, peak in zip((K_SCALE, V_SCALE), layer_peaks, strict=True):
            block.get_submodule("self_attn").register_buffer(
                buffer, calibrated_scale(peak, KV_CACHE)
            )


def _run(model: Any, tokens: Tensor, observe: Observe) -> None:
    """Run tokens (B, S) and call `observe` with each layer's keys and values for the cache."""
    if hasattr(model.config, "to_dict"):
        from transformers import DynamicCache

        class ObservedCache(DynamicCache):
            def update(
                self,
                key_states: Tensor,
                value_states: Tensor,
                layer_idx: int,
                *args: Any,
                **kwargs: Any,
            ) -> tuple[Tensor, Tensor]:
                observe(layer_idx, key_states, value_states)
                return key_states, value_states

        # Older versions of transformers call it past_key_values.
        parameters = signature(model.forward).parameters
        name = "cache" if "cache" in parameters else "past_key_values"
        model(tokens, **{name: ObservedCache()}, use_cache=True)
    else:
        from ms_parallel.models.cache import KeyValueCache

        class ObservedKeys(KeyValueCache):
            def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                observe(layer, k, v)
                return k, v

        model(tokens, cache=ObservedKeys(), logits=False)
