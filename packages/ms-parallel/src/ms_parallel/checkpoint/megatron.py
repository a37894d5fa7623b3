"""Names and layouts of Megatron-Core's `torch_dist` checkpoints, as rules for our parameters.

Megatron differs from Hugging Face in five ways:
1. Names, such as `decoder.layers.mlp.linear_fc2.weight` for `model.layers.*.mlp.down_proj.weight`.
2. The layers of a tensor are stacked in dim 0, unless the layers differ (`decoder.layers.0....`).
3. q, k and v are one matrix: the query heads, key head and value head of each key-value group.
   The gate and up projections are concatenated.
4. The vocabulary is padded, so that tensor ranks divide it.
5. Since 0.14, Megatron-LM saves separate layers and separate gate and up projections
   (`linear_fc1.weight_w` and `_v`).

The distributed optimizer has three formats. `fully_reshardable` has float32 weights and moments
under the names of the weights (`optimizer.state.exp_avg.decoder...`), as other optimizers have.
`dp_reshardable` (the default) has flat buffers whose order depends on Megatron's allocation, and
`fully_sharded_model_space` (until 0.13) flat pieces; neither is read.

Only the tensors listed in `.metadata` are read; pickles (`common.pt`) are never opened. Thus the
iteration comes from the name of the folder.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from ms_parallel.errors import CheckpointError
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.weight_names import WeightRule, WeightRules, WeightSlice

EMBEDDING = "embedding.word_embeddings.weight"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose layers have the tensors below."""
LAYERS = "decoder.layers."
STATES = "optimizer.state."
MASTERS = ("param", "fp32_param")
"""Names of the float32 weights of the distributed optimizer and of the bfloat16 optimizer."""
RowsOf = Callable[[int], Iterator[tuple[int, int, int]]]
"""Pieces (first row of the tensor, first row of the parameter, rows) of a parameter's rows."""


def iteration_of(folder_name: str) -> int | None:
    """Return the iteration in the name of a folder, such as `iter_0001000`; None without one."""
    match = re.fullmatch(r"iter_(\d{7,18})", folder_name)
    return int(match[1]) if match else None


def saved_states(names: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Return the optimizer states that are stored by parameter: moments and float32 weights.

    Args:
        names: names of the folder's tensors and objects.
        shapes: shapes of its tensors, by name.

    Returns:
        Names such as `"exp_avg"`, or none if the folder has weights alone.

    Raises:
        CheckpointError: the optimizer states are stored in another format.
    """
    of_optimizer = [name for name in names if "optimizer." in name]
    states = tuple(
        state
        for state in ("exp_avg", "exp_avg_sq", *MASTERS)
        if shapes.get(f"{STATES}{state}.{EMBEDDING}") == shapes[EMBEDDING]
    )
    if of_optimizer and not {"exp_avg", "exp_avg_sq"} <= {*states}:
        raise CheckpointError(
            "optimizer states of Megatron must be stored by parameter, got"
            f" {of_optimizer[0][:80]!r}; save with --dist-ckpt-optim-fully-reshardable, or load the"
            " weights alone with weights_only (--weights-only)"
        )
    return states


def megatron_rules(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> WeightRules:
    """Return the rules of a model's weights in a Megatron folder.

    Args:
        config: configuration of the model.
        shapes: shapes of the folder's tensors, by name.

    Raises:
        CheckpointError: Megatron's names for this family are not known.
    """
    if config.model_type not in FAMILIES:
        raise CheckpointError(
            f"Megatron's names are known for {', '.join(FAMILIES)}, got {config.model_type};"
            " convert the folder to a Hugging Face folder with Megatron's own tools"
        )
    layers = config.num_hidden_layers
    stacked = not any(name.startswith(f"{LAYERS}0.") for name in shapes)
    # Gate and up projections are separate tensors in folders with separate layers.
    gate, up, copies = "weight", "weight", 2
    if f"{LAYERS}0.mlp.linear_fc1.weight_w" in shapes:
        gate, up, copies = "weight_w", "weight_v", 1
    # Transformer Engine stores the norm in the projection that follows it.
    fused_norms = any("linear_qkv.layer_norm_weight" in name for name in shapes)
    heads, groups, head_dim = (
        config.num_attention_heads,
        config.key_value_heads,
        config.head_dim,
    )
    per_group = heads // groups
    group_rows, kv_rows = (per_group + 2) * head_dim, head_dim

    def query(rows: int) -> Iterator[tuple[int, int, int]]:
        size = per_group * head_dim
        for group in range(groups):
            yield group * group_rows, group * size, size

    def key(rows: int) -> Iterator[tuple[int, int, int]]:
        for group in range(groups):
            yield group * group_rows + per_group * head_dim, group * kv_rows, kv_rows

    def value(rows: int) -> Iterator[tuple[int, int, int]]:
        for group in range(groups):
            yield group * group_rows + (per_group + 1) * head_dim, group * kv_rows, kv_rows

    def first_rows(rows: int) -> Iterator[tuple[int, int, int]]:
        yield 0, 0, rows

    def last_rows(rows: int) -> Iterator[tuple[int, int, int]]:
        yield (copies - 1) * rows, 0, rows

    def in_layers(
        tensor: str, rows_of: RowsOf = first_rows, *, copies: int = 1, total: int | None = None
    ) -> WeightRule:
        stack = layers if stacked else None
        return _layer_rule(tensor, rows_of, copies=copies, total=total, layers=stack)

    qkv = groups * group_rows
    attention, mlp = "self_attention.", "mlp."
    rules = {
        "model.embed_tokens.weight": _first_rows(EMBEDDING, shapes),
        "model.norm.weight": _first_rows("decoder.final_layernorm.weight", shapes),
        "lm_head.weight": _first_rows("output_layer.weight", shapes),
    }
    blocks = {
        "self_attn.o_proj.weight": in_layers(f"{attention}linear_proj.weight"),
        "self_attn.q_norm.weight": in_layers(f"{attention}q_layernorm.weight"),
        "self_attn.k_norm.weight": in_layers(f"{attention}k_layernorm.weight"),
        "mlp.down_proj.weight": in_layers(f"{mlp}linear_fc2.weight"),
        "mlp.gate_proj.weight": in_layers(f"{mlp}linear_fc1.{gate}", copies=copies),
        "mlp.up_proj.weight": in_layers(f"{mlp}linear_fc1.{up}", last_rows, copies=copies),
        "input_layernorm.weight": in_layers(
            f"{attention}linear_qkv.layer_norm_weight" if fused_norms else "input_layernorm.weight"
        ),
        "post_attention_layernorm.weight": in_layers(
            f"{mlp}linear_fc1.layer_norm_weight" if fused_norms else "pre_mlp_layernorm.weight"
        ),
    }
    for letter, rows_of in {"q": query, "k": key, "v": value}.items():
        for suffix in ("weight", "bias"):
            blocks[f"self_attn.{letter}_proj.{suffix}"] = in_layers(
                f"{attention}linear_qkv.{suffix}", rows_of, total=qkv
            )
    return rules | {f"model.layers.*.{name}": rule for name, rule in blocks.items()}


def _layer_rule(
    tensor: str, rows_of: RowsOf, *, copies: int, total: int | None, layers: int | None
) -> WeightRule:
    """Return a rule for rows of a tensor of each layer.

    Args:
        tensor: name of the tensor within a layer.
        rows_of: pieces of the parameter's rows.
        copies: rows of the tensor as a multiple of the parameter's, if `total` is None.
        total: rows of the tensor.
        layers: number of stacked layers; None if each layer has its own tensors.
    """

    def rule(wildcards: tuple[str, ...], shape: tuple[int, ...]) -> Iterator[WeightSlice]:
        layer, (rows, *columns) = int(wildcards[0]), shape
        total_rows = rows * copies if total is None else total
        full = tuple(slice(0, size) for size in columns)
        for tensor_row, row, count in rows_of(rows):
            part = (slice(tensor_row, tensor_row + count), *full)
            box = (slice(row, row + count), *full)
            if layers is None:
                yield WeightSlice(
                    tensor=f"{LAYERS}{layer}.{tensor}",
                    shape=(total_rows, *columns),
                    part=part,
                    box=box,
                    dims=tuple(range(len(shape))),
                )
            else:
                yield WeightSlice(
                    tensor=f"{LAYERS}{tensor}",
                    shape=(layers, total_rows, *columns),
                    part=(slice(layer, layer + 1), *part),
                    box=box,
                    dims=tuple(range(1, len(shape) + 1)),
                )

    return rule


def _first_rows(tensor: str, shapes: Mapping[str, tuple[int, ...]]) -> WeightRule:
    """Return a rule for the first rows of a tensor, whose last rows may be padding."""

    def rule(wildcards: tuple[str, ...], shape: tuple[int, ...]) -> Iterator[WeightSlice]:
        saved = shapes.get(tensor, shape)
        padded = len(saved) == len(shape) and saved[0] >= shape[0] and saved[1:] == shape[1:]
        full = tuple(slice(0, size) for size in shape)
        yield WeightSlice(
            tensor=tensor,
            shape=saved if padded else shape,
            part=full,
            box=full,
            dims=tuple(range(len(shape))),
        )

    return rule
