"""Saved states of sequences' windows, so that a text can go back further than its ring of cells."""

from dataclasses import dataclass, field

from packtrain.inference.kv_cache.saved_state import SavedSequences

REREAD_MESSAGE = "sequence {}: no checkpoint is left of its window; its text is read anew"


@dataclass(slots=True)
class StateCheckpoints:
    """At most `max_checkpoints` states of each sequence, `token_spacing` tokens apart; the oldest go first."""

    max_checkpoints: int
    token_spacing: int
    saved_states: list[tuple[int, int, SavedSequences]] = field(default_factory=list)

    def is_due(self, seq: int, position: int) -> bool:
        """Return whether `token_spacing` tokens have been read since the last checkpoint of a sequence."""
        last = max((at for owner_seq, at, _ in self.saved_states if owner_seq == seq), default=0)
        return position >= last + self.token_spacing

    def add_state(self, seq: int, position: int, stored: SavedSequences) -> None:
        self.saved_states.append((seq, position, stored))
        states_of_seq = [state for state in self.saved_states if state[0] == seq]
        if len(states_of_seq) > self.max_checkpoints:
            self.saved_states = [s for s in self.saved_states if s is not states_of_seq[0]]

    def latest_state(self, seq: int, position: int) -> tuple[int, SavedSequences] | None:
        """Return the last checkpoint of a sequence up to a position, with its position; None if none is left."""
        candidates = [
            (at, saved_sequences)
            for owner_seq, at, saved_sequences in self.saved_states
            if owner_seq == seq and at <= position
        ]
        return max(candidates, key=lambda candidate: candidate[0], default=None)

    def drop_after(self, seq: int, since: int) -> None:
        """Drop checkpoints of a sequence after position `since`, from which on the sequence changes."""
        self.saved_states = [s for s in self.saved_states if s[0] != seq or s[1] <= since]
