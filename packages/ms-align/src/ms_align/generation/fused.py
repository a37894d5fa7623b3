"""Fuses the weights of Llama-like decoders: a decoding step takes a third of the kernel calls.

Changes from the model, each exact up to rounding:
1. q, k and v are one matmul, and so are gate and up; weights are stored in the matmul's layout.
2. The rows of q and k are reordered so that rotary pairs are adjacent, and rotation is one complex
   product. Both have the same order, so attention scores are unchanged.
The fused weights are compared with the model on two prompts before they are used.
Shapes: B rows, S positions, H hidden, V vocabulary, Hq query heads, Hk KV heads, D head dim.
"""

import logging
from typing import Any, cast

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn

from ms_align.generation.columns import Columns
from ms_align.generation.reader import TOLERANCE_HALF, ModelReader
from ms_align.generation.static_batch import DecodeCache
from ms_align.models.language_model import HuggingFaceModel, LanguageModel, StagedLanguageModel

logger = logging.getLogger(__name__)
TOLERANCE = 1e-4
"""Maximum difference of logits from the model's, relative to the largest logit."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
CPU_DTYPES = (torch.float32, torch.float64)
"""Supported dtypes on a CPU, where half precision is faster unfused."""
ARCHITECTURES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}
"""Model types of ms-parallel's decoders whose blocks can be fused."""
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""Rope scalings whose angles depend on the sequence length."""


@frozen(eq=False)
class _Layer:
    """Weights of one block; matmul weights have shape (in, out)."""

    attn_norm: Tensor
    """Weight of the norm before attention, (H,)."""
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norms: tuple[Tensor, Tensor] | None
    """Weights of the norms of q and k, (D,) each, if the model has them."""
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    """Weight of the norm before the MLP, (H,)."""
    gate_up: Tensor
    down: Tensor


def fused_reader(model: LanguageModel, *, verified: bool = False) -> "FusedReader | None":
    """Fuse a model's weights; None if the model is not supported or the results differ.

    Args:
        model: model with its current weights.
        verified: skip the comparison, as the same model was verified with earlier weights.
    """
    if not _is_supported(model):
        return None
    reader = FusedReader(model)
    if not verified and not _matches(reader, model):
        logger.warning(
            "%s: logits with fused weights differ from the model's; generating without fusion",
            type(model.module),
        )
        return None
    return reader


def _is_supported(model: LanguageModel) -> bool:
    """Return True if all parts of the model are the standard ones of its architecture."""
    module: Any = model.module
    if len({weight.dtype for weight in module.parameters()}) > 1:
        return False
    on_cpu = next(module.parameters()).device.type == "cpu"
    if on_cpu and _compute_dtype(module) not in CPU_DTYPES:
        return False
    if isinstance(model, HuggingFaceModel):
        if type(module).__name__ not in ARCHITECTURES or module.config.hidden_act not in (
            "silu",
            "swish",
        ):
            return False
        windows = getattr(module.config, "sliding_window", None)
        # Sliding windows are not implemented here.
        if windows and getattr(module.config, "use_sliding_window", True):
            return False
    elif not (isinstance(model, StagedLanguageModel) and _is_supported_decoder(module)):
        return False
    return all(_is_standard_block(layer) for layer in _layers(module))


def _is_supported_decoder(module: Any) -> bool:
    """Return True for an ms-parallel decoder whose blocks can be fused."""
    if type(module).__name__ != "Decoder" or module.config.model_type not in MODEL_TYPES:
        return False
    return getattr(module.config.rope_scaling, "kind", None) not in LENGTH_DEPENDENT_ROPE


def _layers(module: Any) -> list[Any]:
    layers = module.model.layers
    return list(layers.values() if isinstance(layers, nn.ModuleDict) else layers)


def _is_standard_block(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [getattr(attention, name, None) for name in PROJECTIONS]
    mlp_projections = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    plain = all(type(linear) is nn.Linear for linear in (*projections, *mlp_projections))
    unbiased = plain and all(linear.bias is None for linear in mlp_projections)
    return unbiased and getattr(attention, "window", None) is None


class FusedReader:
    """Runs a decoder whose weights are fused when the reader is built.

    Under mixed precision, weights are cast once instead of at every token. On an accelerator,
    weights that need neither fusion nor a cast are shared with the model.
    """

    def __init__(self, model: LanguageModel) -> None:
        module: Any = model.module
        self._model = model
        attention = _layers(module)[0].self_attn
        self.head_dim = int(attention.head_dim)
        self.q_heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.epsilon = _epsilon(module)
        self.dtype = _compute_dtype(module)
        self.half = self.dtype.itemsize <= 2
        self._pairs = _pair_order(self.head_dim).to(attention.q_proj.weight.device)
        self._layers = [self._rewrite(layer) for layer in _layers(module)]
        self._embedding: Tensor = module.model.embed_tokens.weight.to(self.dtype)
        self._norm: Tensor = module.model.norm.weight.to(self.dtype)
        self._head = _transposed(_head(model).to(self.dtype))
        self._rotation_table: Tensor | None = None

    def _rewrite(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp

        def cast(parameters: list[Any]) -> list[Tensor]:
            return [parameter.to(self.dtype) for parameter in parameters]

        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        weights = cast([projection.weight for projection in projections])
        biased = projections[0].bias is not None
        biases = cast([projection.bias for projection in projections]) if biased else []
        # q and k only: v is not rotated.
        for index in (0, 1):
            weights[index] = self._pair_rows(weights[index])
            if biased:
                biases[index] = self._pair_rows(biases[index])
        qk_norms = None
        if hasattr(attention, "q_norm"):
            q_norm, k_norm = cast([attention.q_norm.weight, attention.k_norm.weight])
            qk_norms = (q_norm[self._pairs], k_norm[self._pairs])
        norms = cast([layer.input_layernorm.weight, layer.post_attention_layernorm.weight])
        out, gate, up, down = cast(
            [part.weight for part in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
        )
        out_bias = attention.o_proj.bias
        return _Layer(
            attn_norm=norms[0],
            qkv=_transposed(torch.cat(weights)),
            qkv_bias=torch.cat(biases) if biased else None,
            qk_norms=qk_norms,
            out=_transposed(out),
            out_bias=None if out_bias is None else out_bias.to(self.dtype),
            mlp_norm=norms[1],
            gate_up=_transposed(torch.cat((gate, up))),
            down=_transposed(down),
        )

    def _pair_rows(self, rows: Tensor) -> Tensor:
        """Reorder the rows of a projection so that each head's rotary pairs are adjacent."""
        heads = rows.view(-1, self.head_dim, *rows.shape[1:])
        return heads[:, self._pairs].reshape(rows.shape)

    def prefill(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Compute logits (B, V) after each prompt, and each layer's keys and values."""
        rows, length = tokens.shape
        rotation = self._rotation(torch.arange(length, device=tokens.device), length)
        rotation = rotation[None, :, None]
        hidden = F.embedding(tokens, self._embedding)
        cache = []
        for layer in self._layers:
            q, kv = self._project(self._attn_norm(hidden, layer), layer, rotation)
            cache.append(kv)
            k, v = kv.unbind(-3)  # (B, S, Hk, D) each
            attended = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=True,
                enable_gqa=self.q_heads != self.kv_heads,
            )
            hidden = self._finish_block(
                hidden, attended.transpose(1, 2).reshape(rows, length, -1), layer
            )
        last = hidden[torch.arange(rows, device=tokens.device), lengths - 1]  # (B, H)
        return self._logits(last), cache

    def step(self, tokens: Tensor, positions: Tensor, columns: Columns) -> Tensor:
        """Compute logits (B, V) after one more token per row."""
        columns.ensure(1)
        # Positions are below the number of columns in use.
        rotation = self._rotation(positions, columns.end + 1 - columns.first)[:, None]
        hidden = F.embedding(tokens, self._embedding)
        mask = columns.mask()
        bias = None
        if mask is not None:
            # SDPA would convert a bool mask in every layer.
            bias = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill_(~mask, -torch.inf)
            bias = bias[:, None, None]  # (B, 1, 1, W + 1)
        for index, layer in enumerate(self._layers):
            q, kv = self._project(self._attn_norm(hidden, layer), layer, rotation)
            keys, values = cache = columns.view(index, 1)  # (B, Hk, W + 1, D) each
            cache[:, :, :, -1] = kv.transpose(0, 1)
            attended = F.scaled_dot_product_attention(
                q[:, :, None],
                keys,
                values,
                attn_mask=bias,
                enable_gqa=self.q_heads != self.kv_heads,
            )
            hidden = self._finish_block(hidden, attended.view(len(tokens), -1), layer)
        columns.advance()
        return self._logits(hidden)

    def decode(self, tokens: Tensor, cache: DecodeCache) -> Tensor:
        """Compute logits (R, V) after one more token per row."""
        rows, with_kernels = len(tokens), cache.use_kernels
        rotation = self._rotation(cache.positions, cache.capacity)[:, None]  # (R, 1, D/2)
        cos, sin = rotation.real.contiguous(), rotation.imag.contiguous()
        hidden = F.embedding(tokens, self._embedding)
        normed = self._attn_norm(hidden, self._layers[0])
        # Adding the residual and the norm of the next block are one operation.
        norms = [*(layer.attn_norm for layer in self._layers[1:]), self._norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, norms, strict=True)):
            if with_kernels:
                from ms_kernels import rotary

                heads = self._heads(normed, layer)
                q, k, v = torch.split(heads, [self.q_heads, self.kv_heads, self.kv_heads], -2)
                q, k = rotary(q[:, None], k[:, None], cos, sin, interleaved=True)
                q, k = q[:, 0], k[:, 0]
            else:
                q, kv = self._project(normed, layer, rotation)
                k, v = kv.unbind(1)
            cache.write(index, k, v)
            out = cache.attend(index, q).reshape(rows, -1) @ layer.out
            if layer.out_bias is not None:
                out += layer.out_bias
            normed, hidden = self._add_norm(out, hidden, layer.mlp_norm, with_kernels)
            gate, up = (normed @ layer.gate_up).chunk(2, -1)  # (R, I) each
            if with_kernels:
                from ms_kernels import swiglu

                inner = swiglu(gate, up)
            else:
                inner = F.silu(gate).mul_(up)
            normed, hidden = self._add_norm(inner @ layer.down, hidden, next_norm, with_kernels)
        return normed @ self._head

    def _add_norm(
        self, new: Tensor, residual: Tensor, weight: Tensor, with_kernels: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the normalized sum (R, H) and the sum."""
        if with_kernels:
            from ms_kernels import add_rms_norm

            return add_rms_norm(new, residual, weight, self.epsilon)
        total = residual + new
        return F.rms_norm(total, weight.shape, weight, self.epsilon), total

    def _attn_norm(self, hidden: Tensor, layer: _Layer) -> Tensor:
        return F.rms_norm(hidden, layer.attn_norm.shape, layer.attn_norm, self.epsilon)

    def _heads(self, normed: Tensor, layer: _Layer) -> Tensor:
        """Compute queries, keys and values before rotation, (..., Hq + 2 Hk, D)."""
        qkv = normed @ layer.qkv  # (..., (Hq + 2 Hk) D)
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        heads = qkv.view(*normed.shape[:-1], self.q_heads + 2 * self.kv_heads, self.head_dim)
        if layer.qk_norms is not None:
            q, k, _ = torch.split(heads, [self.q_heads, self.kv_heads, self.kv_heads], -2)
            q.copy_(F.rms_norm(q, (self.head_dim,), layer.qk_norms[0], self.epsilon))
            k.copy_(F.rms_norm(k, (self.head_dim,), layer.qk_norms[1], self.epsilon))
        return heads

    def _project(self, normed: Tensor, layer: _Layer, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """Compute rotated queries (..., Hq, D), and rotated keys with values (..., 2, Hk, D)."""
        heads = self._heads(normed, layer)
        qk = heads[..., : self.q_heads + self.kv_heads, :]  # (..., Hq + Hk, D), a view
        # In place: qk is a view of the projection's output. Half precision is rotated in float32.
        wide = qk.float() if self.half else qk
        pairs = torch.view_as_complex(wide.view(*qk.shape[:-1], -1, 2))  # (..., D/2)
        pairs.mul_(rotation)
        if self.half:
            qk.copy_(wide)
        kv = heads[..., self.q_heads :, :]  # (..., 2 Hk, D)
        kv = kv.view(*kv.shape[:-2], 2, self.kv_heads, self.head_dim)
        return heads[..., : self.q_heads, :], kv

    def _finish_block(self, hidden: Tensor, attended: Tensor, layer: _Layer) -> Tensor:
        """Apply the output projection, the MLP and both residuals."""
        width = hidden.shape[-1]
        flat = torch.addmm(
            hidden.reshape(-1, width), attended.reshape(-1, layer.out.shape[0]), layer.out
        )
        if layer.out_bias is not None:
            flat += layer.out_bias
        gate_up = F.rms_norm(flat, (width,), layer.mlp_norm, self.epsilon) @ layer.gate_up
        gate, up = gate_up.chunk(2, -1)  # (rows, I) each
        return torch.addmm(flat, F.silu(gate).mul_(up), layer.down).view(hidden.shape)

    def _logits(self, hidden: Tensor) -> Tensor:
        return torch.mm(F.rms_norm(hidden, self._norm.shape, self._norm, self.epsilon), self._head)

    def _rotation(self, positions: Tensor, count: int) -> Tensor:
        """Look up the rotations (..., D/2) complex of positions (...) below `count`."""
        # The table doubles, so that it is rarely rebuilt; indexing is cheap.
        if self._rotation_table is None or self._rotation_table.shape[0] < count:
            self._rotation_table = _rotations(self._model, max(256, 2 * count), positions.device)
        return self._rotation_table[positions]


def _compute_dtype(module: Any) -> torch.dtype:
    """Return the dtype of matrix products, which mixed precision sets apart from the weights."""
    dtype: torch.dtype | None = getattr(module, "compute_dtype", None)
    return next(module.parameters()).dtype if dtype is None else dtype


def _transposed(weight: Tensor) -> Tensor:
    """Transpose a weight (out, in), in the memory layout that the device multiplies fastest."""
    return weight.t().contiguous() if weight.device.type == "cpu" else weight.t()


def _pair_order(head_dim: int) -> Tensor:
    """Return the order of a head's dims that makes the rotary pair i, i + D/2 adjacent."""
    return torch.arange(head_dim).view(2, -1).t().reshape(-1)


def _epsilon(module: Any) -> float:
    norm = module.model.norm
    epsilon = getattr(norm, "variance_epsilon", None)  # may be 0.0
    return float(norm.eps if epsilon is None else epsilon)


def _head(model: LanguageModel) -> Tensor:
    if isinstance(model, HuggingFaceModel):
        return cast(Tensor, cast(Any, model.module).get_output_embeddings().weight)
    return cast(Tensor, model.module.head_weight)


def _rotations(model: LanguageModel, count: int, device: torch.device) -> Tensor:
    """Compute exp(i·angle) for positions 0 to count - 1 with the model's own rotary embedding.

    Returns (count, D/2) complex64.
    """
    positions = torch.arange(count, device=device)[None]
    if isinstance(model, HuggingFaceModel):
        probe = torch.zeros(1, 1, 1, device=device)
        cos, sin = cast(Any, model.module).model.rotary_emb(probe, positions)
        cos, sin = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]
    else:
        context = cast(Any, model.module).context(positions, None, None)
        ((cos, sin),) = context.tables
    return torch.complex(cos[0].float(), sin[0].float())


def _matches(reader: FusedReader, model: LanguageModel) -> bool:
    """Return True if both compute the same logits after prefill and after one more token."""
    device = next(model.module.parameters()).device
    vocabulary = model.vocabulary_size or 2
    tokens = (torch.arange(10, device=device).view(2, 5) * 7 + 1) % vocabulary
    lengths = torch.tensor([5, 3], device=device)
    # Two prompts of different lengths, so that masks and rotations are compared as well.
    newest, logits = tokens[:, 1], []
    for candidate in (reader, ModelReader(model)):
        columns = Columns(8)
        first, layers = candidate.prefill(tokens, lengths)
        columns.add(layers, lengths.cpu(), torch.arange(2))
        logits.append(torch.cat((first, candidate.step(newest, lengths, columns))).float())
    error = (logits[0] - logits[1]).abs().max()
    tolerance = TOLERANCE_HALF if reader.half else TOLERANCE
    return bool(error <= tolerance * logits[1].abs().max())
