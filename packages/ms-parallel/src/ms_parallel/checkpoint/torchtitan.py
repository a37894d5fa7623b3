"""Names and layouts of torchtitan's tensors, as rules over this package's parameters.

torchtitan differs from Hugging Face in three ways:
1. Names, such as `layers.0.feed_forward.w1.weight` for `model.layers.0.mlp.gate_proj.weight`.
2. Llama's rotary embedding rotates neighboring features (2i, 2i+1) of a head; ours rotates i and
   i + D/2. So the rows of the query and key projections are interleaved.
3. With `fuse_qkv` (the default), the optimizer state has one matrix for q, k and v: for each
   key-value head its query heads, its key head and its value head. Weights are saved separately.
"""

from collections.abc import Callable, Collection, Iterator

from ms_parallel.errors import CheckpointError
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.weight_names import WeightRule, WeightRules, WeightSlice, renamed

EMBEDDING = "tok_embeddings.weight"
FAMILIES = ("llama", "qwen3")
"""Families whose torchtitan names are known; Llama's rotary embedding is interleaved."""
_ATTENTION = "layers.{0}.attention."
_BLOCK = "model.layers.*."


def torchtitan_rules(
    config: ModelConfig, *, fused: bool, names: Collection[str] = ()
) -> WeightRules:
    """Return the rules of a model's tensors in torchtitan.

    Args:
        config: configuration of the model.
        fused: q, k and v are one matrix, as in the optimizer's state with `fuse_qkv`.
        names: tensors of the folder, which show the names of its version of torchtitan.

    Raises:
        CheckpointError: torchtitan's names for this family are not known.
    """
    if config.model_type not in FAMILIES or getattr(config, "attention_bias", False):
        raise CheckpointError(
            f"torchtitan's names are known for {' and '.join(FAMILIES)} without attention bias, got"
            f" {config.model_type}; write names='huggingface'"
        )
    linear = "" if any(".attention.wq." in name for name in names) else "qkv_linear."
    head = "output.weight" if "output.weight" in names else "lm_head.weight"
    rules = {
        "model.embed_tokens.weight": renamed(EMBEDDING),
        "model.norm.weight": renamed("norm.weight"),
        "lm_head.weight": renamed(head),
    }
    blocks = {
        "self_attn.o_proj": "attention.wo",
        "self_attn.q_norm": "attention.q_norm",
        "self_attn.k_norm": "attention.k_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for ours, theirs in blocks.items():
        rules[f"{_BLOCK}{ours}.weight"] = renamed(f"layers.{{0}}.{theirs}.weight")
    heads, groups = config.num_attention_heads, config.key_value_heads
    per_group = heads // groups + 2  # query heads of a group, its key and its value
    # Fused order per group: queries, key, value. Positions count heads from the tensor's start.
    first_heads: dict[str, Callable[[int], int]] = {
        "q": lambda head: head // (heads // groups) * per_group + head % (heads // groups),
        "k": lambda head: head * per_group + per_group - 2,
        "v": lambda head: head * per_group + per_group - 1,
    }
    for letter, position in first_heads.items():
        # Values are not rotated, and Qwen 3 rotates halves in torchtitan too.
        interleaved = letter != "v" and config.model_type == "llama"
        rules[f"{_BLOCK}self_attn.{letter}_proj.weight"] = _heads(
            f"{_ATTENTION}{linear}w{'qkv' if fused else letter}.weight",
            config.head_dim,
            position if fused else int,
            total=groups * per_group if fused else None,
            interleaved=interleaved,
        )
    return rules


def _heads(
    tensor: str,
    head_dim: int,
    position: Callable[[int], int],
    *,
    total: int | None,
    interleaved: bool,
) -> WeightRule:
    """Return a rule for a projection whose heads are stored in another order in a tensor.

    Args:
        tensor: name of the tensor, with `{0}` for the layer.
        head_dim: rows of a head.
        position: position in the tensor of each head of the parameter.
        total: heads of the tensor; None: the parameter's number.
        interleaved: the halves of a head are its even and odd rows in the tensor.
    """

    def rule(wildcards: tuple[str, ...], shape: tuple[int, ...]) -> Iterator[WeightSlice]:
        rows, columns = shape
        count, full = rows // head_dim, slice(0, columns)
        halves = 2 if interleaved else 1
        size = head_dim // halves
        # One slice per head, or two per interleaved head: half 0 has the even rows, half 1 the odd.
        for head in range(count):
            first = position(head) * head_dim
            for half in range(halves):
                begin = head * head_dim + half * size
                yield WeightSlice(
                    tensor=tensor.format(*wildcards),
                    shape=((total or count) * head_dim, columns),
                    part=(slice(first + half, first + head_dim, halves), full),
                    box=(slice(begin, begin + size), full),
                    dims=(0, 1),
                )

    return rule
