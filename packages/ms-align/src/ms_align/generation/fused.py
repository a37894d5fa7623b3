"""A Llama-like decoder's weights in a form in which one more token takes a third of the calls.

What is done, each exact but for rounding:
1. q, k and v are one product, and so are gate and up; weights lie as the product reads them.
2. Rows of q and k are reordered so that a rotary pair lies side by side; a rotation is then one
   complex product. The order is the same for both, so their scores are.
The rewritten weights are proved on two prompts against the model before they are used.
Shapes: B rows, S positions, H hidden, V vocabulary, Hq and Hk heads, D width of a head.
"""

import logging
from typing import Any, cast

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn

from ms_align.generation.columns import Columns
from ms_align.generation.reader import ModelReader
from ms_align.models.language_model import HuggingFaceModel, LanguageModel, SeamModel

logger = logging.getLogger(__name__)
AGREE = 1e-4
"""Logits of the fused form may lie this far from the model's, relative to the largest."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
COMPLEX = ({torch.float32}, {torch.float64})
"""Dtypes of all weights in which a rotary pair is a complex number."""
KINDS = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
"""What a decoder of ms-parallel's says that it is, where its blocks are the ones fused here."""
BY_LENGTH = {"dynamic", "longrope"}
"""Rope scalings whose angles depend on more than a position."""


@frozen(eq=False)
class _Layer:
    """Weights of one block; each product's second operand, (in, out)."""

    before: Tensor
    """Weight of the norm before attention, (H,)."""
    qkv: Tensor
    qkv_bias: Tensor | None
    norms: tuple[Tensor, Tensor] | None
    """Weights of the norms of q and k, (D,) each, where the model has them."""
    out: Tensor
    out_bias: Tensor | None
    after: Tensor
    """Weight of the norm behind attention, (H,)."""
    gate_up: Tensor
    down: Tensor


def fused_reader(model: LanguageModel, *, proved: bool = False) -> "FusedReader | None":
    """Build a model's fused form; None where it has none, or does not give what the model gives.

    Args:
        model: as its weights are now.
        proved: it was found to give what the model gives before, with other weights.
    """
    if not _fits(model):
        return None
    reader = FusedReader(model)
    if not proved and not _agrees(reader, model):
        logger.warning("%s is not what its name says; it runs as it is", type(model.module))
        return None
    return reader


def _fits(model: LanguageModel) -> bool:
    """Return whether every part is a plain one of the family."""
    module: Any = model.module
    if {weight.dtype for weight in module.parameters()} not in COMPLEX:
        return False
    if isinstance(model, HuggingFaceModel):
        if type(module).__name__ not in KINDS or module.config.hidden_act not in ("silu", "swish"):
            return False
        windows = getattr(module.config, "sliding_window", None)
        if windows and getattr(module.config, "use_sliding_window", True):
            return False
    elif not (isinstance(model, SeamModel) and _is_known(module)):
        return False
    return all(_is_plain(layer) for layer in _layers(module))


def _is_known(module: Any) -> bool:
    """Return whether it is a ms-parallel decoder of the families whose blocks are fused here."""
    if type(module).__name__ != "Decoder" or module.config.model_type not in FAMILIES:
        return False
    return getattr(module.config.rope_scaling, "kind", None) not in BY_LENGTH


def _layers(module: Any) -> list[Any]:
    layers = module.model.layers
    return list(layers.values() if isinstance(layers, nn.ModuleDict) else layers)


def _is_plain(layer: Any) -> bool:
    attention, feed = layer.self_attn, layer.mlp
    projections = [getattr(attention, name, None) for name in PROJECTIONS]
    inner = [feed.gate_proj, feed.up_proj, feed.down_proj]
    plain = all(type(each) is nn.Linear for each in (*projections, *inner))
    unbiased = plain and all(each.bias is None for each in inner)
    return unbiased and getattr(attention, "window", None) is None


class FusedReader:
    """The fused form; reads the weights as they are when it is built."""

    def __init__(self, model: LanguageModel) -> None:
        module: Any = model.module
        self._model = model
        first = _layers(module)[0].self_attn
        self.width = int(first.head_dim)
        self.queries = first.q_proj.out_features // self.width
        self.keys = first.k_proj.out_features // self.width
        self.epsilon = _epsilon(module)
        self._pairs = _pair_order(self.width).to(first.q_proj.weight.device)
        self._layers = [self._rewrite(layer) for layer in _layers(module)]
        self._embedding: Tensor = module.model.embed_tokens.weight
        self._norm: Tensor = module.model.norm.weight
        self._head = _head(model).t().contiguous()
        self._angles: Tensor | None = None

    def _rewrite(self, layer: Any) -> _Layer:
        attention, feed = layer.self_attn, layer.mlp
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        weights = [part.weight for part in parts]
        biases = [part.bias for part in parts]
        for index in (0, 1):
            weights[index] = self._paired(weights[index])
            if biases[index] is not None:
                biases[index] = self._paired(biases[index])
        norms = None
        if hasattr(attention, "q_norm"):
            norms = (
                attention.q_norm.weight[self._pairs],
                attention.k_norm.weight[self._pairs],
            )
        return _Layer(
            before=layer.input_layernorm.weight,
            qkv=torch.cat(weights).t().contiguous(),
            qkv_bias=None if biases[0] is None else torch.cat(biases),
            norms=norms,
            out=attention.o_proj.weight.t().contiguous(),
            out_bias=attention.o_proj.bias,
            after=layer.post_attention_layernorm.weight,
            gate_up=torch.cat((feed.gate_proj.weight, feed.up_proj.weight)).t().contiguous(),
            down=feed.down_proj.weight.t().contiguous(),
        )

    def _paired(self, rows: Tensor) -> Tensor:
        """Order the rows of a projection so that each head's pairs lie side by side."""
        heads = rows.view(-1, self.width, *rows.shape[1:])
        return heads[:, self._pairs].reshape(rows.shape)

    def read(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Compute logits (B, V) after each prompt, and return what each layer holds of it."""
        rows, length = tokens.shape
        turns = self._turns(torch.arange(length, device=tokens.device))[None, :, None]
        hidden = F.embedding(tokens, self._embedding)
        kept = []
        for layer in self._layers:
            q, kv = self._project(hidden, layer, turns)
            kept.append(kv)
            k, v = kv.unbind(-3)
            mixed = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=True,
                enable_gqa=self.queries != self.keys,
            )
            hidden = self._finish(hidden, mixed.transpose(1, 2).reshape(rows, length, -1), layer)
        last = hidden[torch.arange(rows, device=tokens.device), lengths - 1]
        return self._logits(last), kept

    def step(self, tokens: Tensor, positions: Tensor, columns: Columns) -> Tensor:
        """Compute logits (B, V) after one more token a row."""
        columns.ensure(1)
        turns = self._turns(positions)[:, None]
        hidden = F.embedding(tokens, self._embedding)
        mask = columns.mask()
        seen = None
        if mask is not None:
            seen = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill_(~mask, -torch.inf)
            seen = seen[:, None, None]
        for index, layer in enumerate(self._layers):
            q, kv = self._project(hidden, layer, turns)
            keys, values = held = columns.view(index, 1)
            held[:, :, :, -1] = kv.transpose(0, 1)
            mixed = F.scaled_dot_product_attention(
                q[:, :, None],
                keys,
                values,
                attn_mask=seen,
                enable_gqa=self.queries != self.keys,
            )
            hidden = self._finish(hidden, mixed.view(len(tokens), -1), layer)
        columns.advance()
        return self._logits(hidden)

    def _project(self, hidden: Tensor, layer: _Layer, turns: Tensor) -> tuple[Tensor, Tensor]:
        """Compute queries (..., Hq, D), rotated, and keys, rotated, with values (..., 2, Hk, D)."""
        normal = F.rms_norm(hidden, layer.before.shape, layer.before, self.epsilon)
        qkv = normal @ layer.qkv
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        heads = qkv.view(*hidden.shape[:-1], self.queries + 2 * self.keys, self.width)
        turned = heads[..., : self.queries + self.keys, :]
        if layer.norms is not None:
            q, k = torch.split(turned, [self.queries, self.keys], dim=-2)
            q.copy_(F.rms_norm(q, (self.width,), layer.norms[0], self.epsilon))
            k.copy_(F.rms_norm(k, (self.width,), layer.norms[1], self.epsilon))
        pairs = torch.view_as_complex(turned.view(*turned.shape[:-1], -1, 2))
        pairs.mul_(turns)
        kv = heads[..., self.queries :, :]
        kv = kv.view(*kv.shape[:-2], 2, self.keys, self.width)
        return heads[..., : self.queries, :], kv

    def _finish(self, hidden: Tensor, mixed: Tensor, layer: _Layer) -> Tensor:
        """Apply the output projection, the residual and the MLP after attention."""
        width = hidden.shape[-1]
        flat = torch.addmm(
            hidden.reshape(-1, width), mixed.reshape(-1, layer.out.shape[0]), layer.out
        )
        if layer.out_bias is not None:
            flat += layer.out_bias
        both = F.rms_norm(flat, (width,), layer.after, self.epsilon) @ layer.gate_up
        gate, up = both.chunk(2, -1)
        return torch.addmm(flat, F.silu(gate).mul_(up), layer.down).view(hidden.shape)

    def _logits(self, hidden: Tensor) -> Tensor:
        return torch.mm(F.rms_norm(hidden, self._norm.shape, self._norm, self.epsilon), self._head)

    def _turns(self, positions: Tensor) -> Tensor:
        """Look up the rotations (..., D/2) complex of positions (...)."""
        # Sizes double, so that few tables are ever made; looking is cheap on the CPU alone.
        highest = int(positions.max()) + 1
        if self._angles is None or self._angles.shape[0] < highest:
            self._angles = _rotations(self._model, max(256, 2 * highest), positions.device)
        return self._angles[positions]


def _pair_order(width: int) -> Tensor:
    """Return the order of a head's dims that makes dims i and i + D/2 neighbours."""
    return torch.arange(width).view(2, -1).t().reshape(-1)


def _epsilon(module: Any) -> float:
    norm = module.model.norm
    given = getattr(norm, "variance_epsilon", None)  # 0.0 is a number
    return float(norm.eps if given is None else given)


def _head(model: LanguageModel) -> Tensor:
    if isinstance(model, HuggingFaceModel):
        return cast(Tensor, cast(Any, model.module).get_output_embeddings().weight)
    return cast(Tensor, model.module.head_weight)


def _rotations(model: LanguageModel, count: int, device: torch.device) -> Tensor:
    """Compute exp(i·angle) of positions 0 to count - 1, (count, D/2) complex64, by the model."""
    positions = torch.arange(count, device=device)[None]
    if isinstance(model, HuggingFaceModel):
        probe = torch.zeros(1, 1, 1, device=device)
        cos, sin = cast(Any, model.module).model.rotary_emb(probe, positions)
        cos, sin = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]
    else:
        context = cast(Any, model.module).context(positions, None, None)
        ((cos, sin),) = context.tables
    return torch.complex(cos[0].float(), sin[0].float())


def _agrees(reader: FusedReader, model: LanguageModel) -> bool:
    """Return whether both forms give the same logits after reading and after one more token."""
    device = next(model.module.parameters()).device
    vocabulary = model.vocabulary_size or 2
    tokens = (torch.arange(10, device=device).view(2, 5) * 7 + 1) % vocabulary
    lengths = torch.tensor([5, 3], device=device)
    newest, logits = tokens[:, 1], []
    for each in (reader, ModelReader(model)):
        columns = Columns(8)
        first, layers = each.read(tokens, lengths)
        columns.add(layers, lengths.cpu(), torch.arange(2))
        logits.append(torch.cat((first, each.step(newest, lengths, columns))).float())
    error = (logits[0] - logits[1]).abs().max()
    return bool(error <= AGREE * logits[1].abs().max())
