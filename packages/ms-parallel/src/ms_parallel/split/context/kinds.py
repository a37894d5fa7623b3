"""The kinds of context parallelism, by name, and the rule that chooses one by what it costs."""

from typing import Any, Literal, get_args

from attrs import frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import LayoutError

ContextKind = Literal["auto", "all_gather", "ulysses", "ring", "ulysses_ring"]
"""How attention sees whole rows whose positions are shared out:

- `all_gather`: every process gathers the keys and values of the rows (Llama 3, arXiv:2407.21783).
- `ulysses`: processes trade positions for heads, so that each has some heads of the whole rows
  (arXiv:2309.14509). The heads of a tensor rank must divide.
- `ring`: keys and values go round, so that no process holds those of a whole row
  (arXiv:2310.01889).
- `ulysses_ring`: neighbours trade for heads, and keys and values go round their groups
  (arXiv:2405.07719).
- `auto`: of the first two the one that sends less; where a microbatch's gathered keys and values of
  a layer would take more than a GiB, one that never gathers them.
"""
KINDS = get_args(ContextKind)
Balance = Literal["balanced", "zig-zag"]
"""How blocks are assigned to processes:

- `balanced`: the dearest block first, each to the process whose blocks have cost least so far.
- `zig-zag`: two blocks a process, the first and the last, the second and the last but one, and so
  on; even for rows of one document.
"""
BALANCES = get_args(Balance)
MOST_GATHERED_BYTES = 1 << 30


@frozen(kw_only=True)
class HeadSizes:
    """Sizes of attention on one tensor rank."""

    queries: int
    """Heads of queries."""
    keys: int
    """Heads of keys and values."""
    width: int
    """Width of a head's queries and keys."""
    value_width: int

    @classmethod
    def of(cls, config: Any, tensor: int) -> "HeadSizes":
        """Read the sizes of a model's heads, as many as a tensor rank has."""
        shape = config.shape
        queries, keys = shape.attention_heads, shape.key_value_heads
        width = value = getattr(config, "head_dim", shape.hidden_size // queries)
        if hasattr(config, "kv_lora_rank"):  # whose keys are made for every head
            keys, value = queries, config.v_head_dim
            width = config.qk_nope_head_dim + config.qk_rope_head_dim
        return cls(queries=queries // tensor, keys=keys // tensor, width=width, value_width=value)

    @property
    def key_size(self) -> int:
        """Numbers of a position's keys and values."""
        return self.keys * (self.width + self.value_width)


def traders(kind: ContextKind, count: int, sizes: HeadSizes) -> int:
    """Return how many neighbours trade positions for heads; 1 where none do.

    Args:
        kind: not `auto`.
        count: processes of the context axis.
        sizes: of the model's attention.

    Raises:
        LayoutError: the heads do not divide as the kind needs it.
    """
    if kind == "ulysses":
        if sizes.queries % count:
            raise LayoutError(
                f"context={count} does not divide the {sizes.queries} attention heads of a tensor"
                " rank, which ulysses trades; set context_attention to all_gather or ring"
            )
        return count
    if kind != "ulysses_ring":
        return 1
    fits = [n for n in range(2, count) if count % n == 0 and sizes.queries % n == 0]
    if not fits:
        raise LayoutError(
            f"context_attention='ulysses_ring' needs context={count} to be a product of two factors"
            f" above 1, one of which divides the {sizes.queries} attention heads per tensor rank;"
            " set context_attention to ring"
        )
    return max(fits)


def choose(
    kind: ContextKind, count: int, sizes: HeadSizes, tokens: int, element_bytes: int
) -> ContextKind:
    """Choose the kind that is used for a microbatch.

    Sent a layer and token, in numbers: `all_gather` (count - 1) times its keys and values, both
    ways; `ulysses` (count - 1)/count times its queries, keys, values and results, both ways.

    Args:
        kind: as asked for.
        count: processes of the context axis.
        sizes: of the model's attention.
        tokens: of the microbatch's whole rows.
        element_bytes: of one number.
    """
    if kind != "auto":
        return kind
    if sizes.queries % count == 0:
        repeats = next(n for n in range(1, sizes.queries + 1) if sizes.keys * n % count == 0)
        traded = sizes.queries * (sizes.width + sizes.value_width) + repeats * sizes.key_size
        if traded < count * sizes.key_size:
            return "ulysses"
    if tokens * sizes.key_size * element_bytes <= MOST_GATHERED_BYTES:
        return "all_gather"
    if sizes.queries % count == 0:
        return "ulysses"
    return "ring"


def check_context(kind: ContextKind, config: Any, layout: Layout) -> None:
    """Check that a model's heads divide as a kind needs it.

    Raises:
        LayoutError: they do not.
    """
    if layout.context > 1:
        traders(kind, layout.context, HeadSizes.of(config, layout.tensor))
