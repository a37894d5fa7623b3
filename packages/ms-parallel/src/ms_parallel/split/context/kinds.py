"""Modes of context parallelism, and the choice of the cheapest for `auto`."""

from typing import Any, Literal, get_args

from attrs import frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import LayoutError

ContextKind = Literal["auto", "all_gather", "ulysses", "ring", "ulysses_ring"]
"""How attention covers full rows whose positions are split over ranks:

- `all_gather`: every rank gathers the rows' keys and values (Llama 3, arXiv:2407.21783).
- `ulysses`: an all-to-all trades positions for heads, so that each rank has some heads of the full
  rows (arXiv:2309.14509). The context size must divide the heads of a tensor rank.
- `ring`: keys and values pass around a ring, so that no rank holds a full row's
  (arXiv:2310.01889).
- `ulysses_ring`: `ulysses` among neighbors, and `ring` between these groups (arXiv:2405.07719).
- `auto`: `ulysses` or `all_gather`, whichever sends less. If a layer's gathered keys and values
  take more than 1 GiB per microbatch, `ulysses` or `ring`, which do not gather.
"""
CONTEXT_MODES = get_args(ContextKind)
ContextBalance = Literal["balanced", "zig-zag"]
"""How blocks of a row are assigned to ranks:

- `balanced`: greedily, most expensive block first, each to the rank with the lowest cost so far.
- `zig-zag`: two blocks per rank: the first and the last, the second and the last but one, and so
  on. Balanced for rows of one document.
"""
CONTEXT_BALANCES = get_args(ContextBalance)
MAX_GATHERED_BYTES = 1 << 30


@frozen(kw_only=True)
class HeadSizes:
    """Attention dimensions on one tensor rank."""

    queries: int
    """Number of query heads."""
    keys: int
    """Number of key and value heads."""
    width: int
    """Head dimension of queries and keys."""
    value_width: int

    @classmethod
    def of(cls, config: Any, tensor: int) -> "HeadSizes":
        """Read the dimensions from a model configuration, for a tensor axis of size `tensor`."""
        shape = config.shape
        queries, keys = shape.attention_heads, shape.key_value_heads
        width = value = getattr(config, "head_dim", shape.hidden_size // queries)
        if hasattr(config, "kv_lora_rank"):  # MLA expands the latent to keys for every query head
            keys, value = queries, config.v_head_dim
            width = config.qk_nope_head_dim + config.qk_rope_head_dim
        return cls(queries=queries // tensor, keys=keys // tensor, width=width, value_width=value)

    @property
    def key_size(self) -> int:
        """Elements of the keys and values of one position."""
        return self.keys * (self.width + self.value_width)


def ulysses_size(mode: ContextKind, count: int, sizes: HeadSizes) -> int:
    """Return the number of neighboring ranks that trade positions for heads; 1 for none.

    Args:
        mode: a mode other than `auto`.
        count: size of the context axis.
        sizes: the model's attention dimensions.

    Raises:
        LayoutError: the number of heads is not divisible as the mode requires.
    """
    if mode == "ulysses":
        if sizes.queries % count:
            raise LayoutError(
                f"context={count} must divide the {sizes.queries} attention heads per tensor rank"
                " for ulysses; set context_attention to all_gather or ring"
            )
        return count
    if mode != "ulysses_ring":
        return 1
    # Group sizes that divide both the context axis and the heads.
    fits = [n for n in range(2, count) if count % n == 0 and sizes.queries % n == 0]
    if not fits:
        raise LayoutError(
            f"context_attention='ulysses_ring' needs context={count} to have a proper divisor above"
            f" 1 that divides the {sizes.queries} attention heads per tensor rank; set"
            " context_attention to ring"
        )
    return max(fits)


def resolve_context_mode(
    mode: ContextKind, count: int, sizes: HeadSizes, tokens: int, element_bytes: int
) -> ContextKind:
    """Return the mode to use for a microbatch, resolving `auto`.

    Elements sent per layer and token, forward and backward: `all_gather` sends (count - 1) times
    the keys and values; `ulysses` sends (count - 1)/count times queries, keys, values and outputs.

    Args:
        mode: the setting.
        count: size of the context axis.
        sizes: the model's attention dimensions.
        tokens: tokens of the microbatch's full rows.
        element_bytes: size of the compute dtype.
    """
    if mode != "auto":
        return mode
    if sizes.queries % count == 0:
        # Key heads are repeated until every rank gets the same number.
        repeats = next(n for n in range(1, sizes.queries + 1) if sizes.keys * n % count == 0)
        traded = sizes.queries * (sizes.width + sizes.value_width) + repeats * sizes.key_size
        if traded < count * sizes.key_size:
            return "ulysses"
    if tokens * sizes.key_size * element_bytes <= MAX_GATHERED_BYTES:
        return "all_gather"
    if sizes.queries % count == 0:
        return "ulysses"
    return "ring"


def check_context(mode: ContextKind, config: Any, layout: Layout) -> None:
    """Check that a model's heads can be split as the mode requires.

    Raises:
        LayoutError: they cannot.
    """
    if layout.context > 1:
        ulysses_size(mode, layout.context, HeadSizes.of(config, layout.tensor))
