"""States of the window of sequences, so that a text can be taken back further than its ring of cells goes."""

from dataclasses import dataclass, field

from packtrain.inference.kv_cache.saved_state import Stored

ANEW = "sequence {}: no checkpoint is left of its window; its text is read anew"


@dataclass(slots=True)
class Checkpoints:
    """At most `most`, of all sequences, `spacing` tokens apart; the oldest go first."""

    most: int
    spacing: int
    kept: list[tuple[int, int, Stored]] = field(default_factory=list)

    def due(self, seq: int, position: int) -> bool:
        """Whether `spacing` tokens have been read since the last one of a sequence."""
        last = max((at for owner, at, _ in self.kept if owner == seq), default=0)
        return position >= last + self.spacing

    def add(self, seq: int, position: int, stored: Stored) -> None:
        self.kept = [*self.kept, (seq, position, stored)][-self.most :]

    def last(self, seq: int, position: int) -> tuple[int, Stored] | None:
        """The last one of a sequence up to a position."""
        candidates = [
            (at, stored) for owner, at, stored in self.kept if owner == seq and at <= position
        ]
        return max(candidates, key=lambda candidate: candidate[0], default=None)

    def drop(self, seq: int, since: int) -> None:
        """Forget those after a position of a sequence, which changes from there on."""
        self.kept = [entry for entry in self.kept if entry[0] != seq or entry[1] <= since]
