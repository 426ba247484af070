"""Conversations that the next request of /v1/responses may continue by `previous_response_id`."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

from packtrain.serving.response_shapes import HttpRefusal

JsonObject = dict[str, Any]
MAX_STORED_NBYTES = 4 << 20  # of all conversations together


class StoredResponses:
    """Conversations by the id of their last response, as JSON; the oldest ones go where there is no more room."""

    def __init__(self, max_nbytes: int = MAX_STORED_NBYTES) -> None:
        self._max_nbytes, self._nbytes, self._lock = max_nbytes, 0, Lock()
        self._conversations = OrderedDict[str, bytes]()

    def store(self, response_id: str, messages: Sequence[JsonObject]) -> None:
        encoded = json.dumps(messages).encode()
        with self._lock:
            self._conversations[response_id] = encoded
            self._nbytes += len(encoded)
            while self._nbytes > self._max_nbytes:
                self._nbytes -= len(self._conversations.popitem(last=False)[1])

    def messages(self, response_id: str) -> list[JsonObject]:
        """Return a conversation. Raises HttpRefusal if it is not stored, or no longer."""
        with self._lock:
            encoded = self._conversations.get(response_id)
        if encoded is None:
            raise HttpRefusal(404, f"previous_response_id: there is no response {response_id!r}")
        stored_messages: list[JsonObject] = json.loads(encoded)
        return stored_messages
