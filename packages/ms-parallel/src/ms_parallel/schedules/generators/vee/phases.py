"""Converts a rank's phases on a V, written as words, to actions.

`F0` is the forward of the next microbatch on the rank's first stage (down), `F1` on its second
(up), and the same for `B`, `I` and `W`. `W` without a digit is the oldest pending weight backward.
`F0&B1` is a pair.
"""

from collections.abc import Iterable

from ms_parallel.schedules.table.action import Action, Kind

_KINDS = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "I": Kind.BACKWARD_INPUT,
    "W": Kind.BACKWARD_WEIGHT,
}


def actions_of(program: Iterable[str], stages: tuple[int, int], microbatches: int) -> list[Action]:
    """Convert a program to actions, without those on microbatches past the last.

    Args:
        program: words as described above; weight backwards it omits are added at the end.
        stages: the rank's stages on the way down and up.
        microbatches: microbatches per step.
    """
    done: dict[tuple[bool, int], int] = {}
    weights: list[Action] = []
    row: list[Action] = []

    def next_action(word: str) -> Action | None:
        if word[0] == "W":
            # The oldest pending weight backward, of one stage if the word names it.
            candidates = [w for w in weights if word == "W" or w.stage == stages[int(word[1])]]
            if candidates:
                weights.remove(candidates[0])
            return candidates[0] if candidates else None
        forward, stage = word[0] == "F", stages[int(word[1])]
        number = done.get((forward, stage), 0)
        done[forward, stage] = number + 1
        if word[0] == "I" and number < microbatches:
            # Its weight backward waits for a W word, or for the end of the row.
            weights.append(Action(Kind.BACKWARD_WEIGHT, stage, number))
        return Action(_KINDS[word[0]], stage, number) if number < microbatches else None

    for word in program:
        parts = [action for part in word.split("&") if (action := next_action(part)) is not None]
        row += [Action.overlap(*parts)] if len(parts) == 2 else parts
    return row + weights
