"""An action of a rank, and its text in the CSV format of torch.distributed.pipelining."""

import re
from enum import StrEnum
from typing import NamedTuple

from ms_parallel.errors import ScheduleError


class Kind(StrEnum):
    """Kind of an action; the value is its text in a CSV cell."""

    FORWARD = "F"
    BACKWARD = "B"
    """Input and weight gradients together."""
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    WAIT_SEND_FORWARD = "WAIT_SEND_F"
    """Wait until the message's buffer may be overwritten; explicit in torch's tables since 2.15."""
    WAIT_SEND_BACKWARD = "WAIT_SEND_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"
    OVERLAP = "OVERLAP_F_B"
    """A forward paired with a backward, in `Action.parts`. Our runtime runs them one after the
    other, and `simulate` times them that way."""


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})
WAITS = {
    Kind.WAIT_SEND_FORWARD: Kind.SEND_FORWARD,
    Kind.WAIT_SEND_BACKWARD: Kind.SEND_BACKWARD,
    Kind.WAIT_REDUCE_GRAD: Kind.REDUCE_GRAD,
}
"""Action that each wait waits for."""
MESSAGES = SENDS | RECEIVES | {Kind.WAIT_SEND_FORWARD, Kind.WAIT_SEND_BACKWARD}
_STAGE_ACTIONS = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD, Kind.WAIT_REDUCE_GRAD})
_BACKWARDS = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})


class Action(NamedTuple):
    """A step of a rank's program.

    A SEND has the stage that produced the message, and a RECV the stage that consumes it:
    `2SEND_F1` matches `3RECV_F1`, and `3SEND_B1` matches `2RECV_B1`.
    """

    kind: Kind
    stage: int
    microbatch: int = -1
    """-1 for an action on a stage (such as UNSHARD or REDUCE_GRAD) and for a pair."""
    parts: tuple["Action", ...] = ()
    """The two actions of a pair, in the order in which they run."""

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind.value}"
        return f"{self.stage}{self.kind.value}{self.microbatch if self.microbatch >= 0 else ''}"

    @property
    def flat(self) -> tuple["Action", ...]:
        """The two actions of a pair, or this action."""
        return self.parts or (self,)

    @property
    def computations(self) -> tuple["Action", ...]:
        """The computations in this action: itself, its parts, or none."""
        return self.parts or ((self,) if self.kind in COMPUTE else ())

    @classmethod
    def overlap(cls, forward: "Action", backward: "Action") -> "Action":
        """Pair a forward with a backward, like torch's OVERLAP_F_B."""
        return cls(Kind.OVERLAP, -1, -1, (forward, backward))


# Stage, kind, and the microbatch unless the action is on a stage: 2F0, 3SEND_F1, 1UNSHARD.
_SIMPLE = re.compile(
    r"(0|[1-9][0-9]{0,8})"
    r"((?:WAIT_)?(?:SEND_F|SEND_B|REDUCE_GRAD)|RECV_F|RECV_B|UNSHARD|RESHARD|F|B|I|W)"
    r"(0|[1-9][0-9]{0,8})?"
)
# (0F1;7B0)OVERLAP_F_B
_PAIR = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")
_FORM = "write actions like 2F0, 3SEND_F1, 1UNSHARD or (0F1;7B0)OVERLAP_F_B"


def parse_action(text: str) -> Action:
    """Parse a CSV cell.

    Raises:
        ScheduleError: the cell is not exactly one action.
    """
    if pair := _PAIR.fullmatch(text):
        forward, backward = (parse_action(part.strip()) for part in pair.groups())
        if forward.kind is not Kind.FORWARD or backward.kind not in _BACKWARDS:
            raise ScheduleError(
                f"overlap {text!r} does not pair a forward with a backward; "
                "write the F first, then the B or I"
            )
        return Action.overlap(forward, backward)
    simple = _SIMPLE.fullmatch(text)
    if simple is None:
        raise ScheduleError(f"{text[:80]!r} is not an action; {_FORM}")
    kind = Kind(simple[2])
    # Stage actions have no microbatch; all others need one.
    if (kind in _STAGE_ACTIONS) == (simple[3] is not None):
        word = "takes no" if kind in _STAGE_ACTIONS else "needs a"
        raise ScheduleError(f"{text!r}: {kind.value} {word} microbatch; {_FORM}")
    return Action(kind, int(simple[1]), int(simple[3]) if simple[3] else -1)
