"""TensorBoard's event files: scalars by step, written by hand: packages for them bring protobuf and a thread.

A file is a sequence of TFRecords (length, its checksum, bytes, their checksum), each of them an Event message of
tensorboard/compat/proto/event.proto. Input: records as for metrics.jsonl; SCALARS are written."""

import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCALARS = ("loss", "val_loss", "val_accuracy", "lr", "grad_norm", "tokens_per_second")
NAME = "events.out.tfevents."
START = 1  # event.proto, SessionLog.SessionStatus


class EventFile:
    """The events of one run from here on: the first file of a new run, or the next one of a resumed run. A resumed file
    tells TensorBoard that the session starts after `after_step`; TensorBoard then drops later events."""

    def __init__(self, folder: Path, after_step: int | None) -> None:
        earlier_files = sorted(folder.glob(NAME + "[0-9]" * 10))
        if after_step is None:
            for path in earlier_files:
                path.unlink()
            earlier_files = []
        file_number = int(earlier_files[-1].name.removeprefix(NAME)) + 1 if earlier_files else 1
        self.file = open(folder / f"{NAME}{file_number:010}", "wb", buffering=0)  # noqa: SIM115 — RunMonitor closes it
        self._write(_message(3, b"brain.Event:2"))
        if after_step is not None:
            self._write(_varint_field(2, after_step + 1) + _message(7, _varint_field(1, START)))

    def add(self, record: Mapping[str, Any]) -> None:
        """Append the scalars of a step, unbuffered."""
        scalar_messages = [
            _message(1, _message(1, tag.encode()) + struct.pack("<Bf", 2 << 3 | 5, record[tag]))
            for tag in SCALARS
            if tag in record
        ]
        if scalar_messages:
            self._write(_varint_field(2, record["step"]) + _message(5, b"".join(scalar_messages)))

    def _write(self, event: bytes) -> None:
        event_bytes = struct.pack("<Bd", 1 << 3 | 1, time.time()) + event
        size = struct.pack("<Q", len(event_bytes))
        self.file.write(size + _masked_crc(size) + event_bytes + _masked_crc(event_bytes))


# ---- fields of protocol buffers: number, value -> bytes ----------------------------------------------------------


def _varint(value: int) -> bytes:
    low_bits, high_bits = value & 0x7F, value >> 7
    return bytes([low_bits | 0x80]) + _varint(high_bits) if high_bits else bytes([low_bits])


def _varint_field(field_number: int, value: int) -> bytes:
    return bytes([field_number << 3]) + _varint(value)


def _message(field_number: int, value: bytes) -> bytes:
    """Encode bytes as a length-delimited field of a protocol buffer."""
    return bytes([field_number << 3 | 2]) + _varint(len(value)) + value


# ---- the checksum of TFRecords: CRC-32C, rotated and shifted by a constant ---------------------------------------


REMAINDERS = [*range(256)]
for _ in range(8):
    REMAINDERS = [byte >> 1 ^ (0x82F63B78 if byte & 1 else 0) for byte in REMAINDERS]


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = REMAINDERS[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
