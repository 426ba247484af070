"""Files as streams of bytes and of UTF-8 text in chunks; file formats by suffix.

A file may be compressed as .gz. InputError names file and place, and how to convert it."""

import gzip
import zlib
from codecs import getincrementaldecoder
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from packtrain.common.errors import InputError

CHUNK_NBYTES = 1 << 20
BYTE_ORDER_MARK = "\ufeff"
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")

JSONL_SUFFIXES, JSON_SUFFIX = (".jsonl", ".ndjson"), ".json"
SHEET_SUFFIXES = (".xlsx", ".xlsm", ".xlsb", ".xls", ".ods")
TABLES = (".csv", ".tsv", *SHEET_SUFFIXES)
COLUMNS = (".parquet", ".arrow", ".feather")
RECORDS = (*JSONL_SUFFIXES, JSON_SUFFIX, *TABLES, *COLUMNS)
# not spreadsheets: in a folder, a CSV saved beside one would count each row twice
FILE_SUFFIXES = (".txt", *(kind for kind in RECORDS if kind not in SHEET_SUFFIXES))
DATA_SUFFIXES = (*FILE_SUFFIXES, *(f"{kind}.gz" for kind in FILE_SUFFIXES if kind not in COLUMNS))
TEXT_SUFFIXES = (".txt", ".txt.gz")
UNSUPPORTED_SUFFIXES = {  # formats that cannot be read, and advice
    ".zst": "unpack it with: zstd -d {}", ".bz2": "unpack it with: bunzip2 {}", ".xz": "unpack it with: unxz {}",
    ".zip": "unpack it with: unzip {}",
    **dict.fromkeys((".docx", ".doc", ".odt", ".rtf", ".pdf"), "save its text as .txt, in UTF-8"),
}  # fmt: skip
SAVE_TABLE = "in Excel, save it as “CSV UTF-8 (comma delimited)”"


def suffix_of(path: Path) -> str:
    """Return the suffix of a file without .gz: `.jsonl`."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def is_packed(path: Path) -> bool:
    """Whether a file's size does not tell how much text it has: .gz, spreadsheets and columnar files."""
    return path.suffix.lower() == ".gz" or suffix_of(path) in (*SHEET_SUFFIXES, *COLUMNS)


def data_files(data: Path | None) -> list[Path]:
    """Return [the file], or the files of a folder with a suffix of data; [] for None."""
    if data is None or not data.is_dir():
        return [data] if data else []
    return [path for path in data.iterdir() if path.name.lower().endswith(DATA_SUFFIXES)]


@contextmanager
def open_decompressed(path: Path) -> Iterator[BinaryIO]:
    """Open a file, decompressed. Raises InputError if it is not a valid .gz."""
    if (suffix := path.suffix.lower()) in UNSUPPORTED_SUFFIXES:
        fact = f"{path}: {suffix} files cannot be read; {UNSUPPORTED_SUFFIXES[suffix].format(path)}"
        raise InputError(fact)
    if suffix != ".gz":
        with open(path, "rb") as file:
            yield file
        return
    try:
        with gzip.open(path) as file:
            yield cast(BinaryIO, file)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise InputError(f"{path} is damaged, or no gzip file; compress it again") from None


def text_chunks(path: Path) -> Iterator[str]:
    """Yield a file's text in chunks, with its line ends, without a byte order mark. Raises InputError."""
    decoder = getincrementaldecoder("utf-8")()
    offset, has_started, is_last = 0, False, False
    with open_decompressed(path) as file:
        while not is_last:
            chunk = file.read(CHUNK_NBYTES)
            is_last = not chunk
            if not offset and chunk.startswith(UTF_16_MARKS):
                fact = f"{path} is UTF-16, Excel's “Unicode Text”; {as_utf_8(path, 'UTF-16')}"
                raise InputError(fact)
            if 0 in chunk:
                fact = f"{path}: a NUL at byte {offset + chunk.index(0)}; this is not a text file"
                raise InputError(fact)
            pending_nbytes = len(decoder.getstate()[0])  # bytes of an incomplete character
            try:
                text = decoder.decode(chunk, final=is_last)
            except UnicodeDecodeError as error:
                place = offset - pending_nbytes + error.start
                raise InputError(f"{path}: byte {place} is not UTF-8; {as_utf_8(path)}") from None
            yield text if has_started else text.removeprefix(BYTE_ORDER_MARK)
            has_started = has_started or bool(text)
            offset += len(chunk)


def as_utf_8(path: Path, encoding: str = "WINDOWS-1252") -> str:
    """Return advice on converting a text to UTF-8 from `encoding`; Excel and older editors write Windows-1252."""
    if path.suffix == ".gz":
        return "save it as UTF-8"
    target = path.with_stem(f"{path.stem}-utf8")
    table = f"{SAVE_TABLE}; elsewhere " if suffix_of(path) in TABLES or encoding == "UTF-16" else ""
    return f"{table}save it as UTF-8, for example: iconv -f {encoding} -t UTF-8 {path} > {target}"
