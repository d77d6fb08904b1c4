"""A tokenizer's files as a stream of chunks, and back."""

from collections.abc import AsyncIterable, Iterator, Mapping

from common.errors import TwostrokeError
from common.pb.worker_pb2 import TokenizerChunk

CHUNK_BYTES = 2**20
MAX_TOKENIZER_BYTES = 256 * 2**20
"""Several times the largest tokenizer known; a peer that sends more is broken."""


def tokenizer_chunks(files: Mapping[str, bytes]) -> Iterator[TokenizerChunk]:
    """The files by name; consecutive chunks of one name make one file, and an empty file is one empty chunk."""
    for name in sorted(files):
        content = files[name]
        for start in range(0, max(len(content), 1), CHUNK_BYTES):
            yield TokenizerChunk(file_name=name, data=content[start : start + CHUNK_BYTES])


async def collect_tokenizer(stream: AsyncIterable[TokenizerChunk]) -> dict[str, bytes]:
    """File name -> content. Raises TwostrokeError for a name that is no plain file name or comes twice, and beyond
    MAX_TOKENIZER_BYTES. The caller compares `tokenizer_digest` of the result with the worker's own."""
    files: dict[str, bytearray] = {}
    current = ""
    num_bytes = 0
    async for chunk in stream:
        name = chunk.file_name
        if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise TwostrokeError(f"tokenizer file name is {name!r}; a plain file name was expected")
        if name != current and name in files:
            raise TwostrokeError(f"tokenizer file {name!r} came twice in one stream")
        num_bytes += len(chunk.data)
        if num_bytes > MAX_TOKENIZER_BYTES:
            raise TwostrokeError(f"tokenizer has more than {MAX_TOKENIZER_BYTES} bytes (at file {name!r})")
        files.setdefault(name, bytearray()).extend(chunk.data)
        current = name
    return {name: bytes(content) for name, content in files.items()}
