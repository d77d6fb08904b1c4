"""A tokenizer's files cross the wire whole, and their digest is theirs alone."""

from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import combinations

import pytest

from common.errors import TwostrokeError
from common.pb.worker_pb2 import TokenizerChunk
from common.rpc import tokenizer_chunks as module
from common.rpc.tokenizer_chunks import CHUNK_BYTES, collect_tokenizer, tokenizer_chunks
from common.tokenizer_files import DIGEST_BYTES, tokenizer_digest


async def stream(chunks: Sequence[TokenizerChunk]) -> AsyncIterator[TokenizerChunk]:
    for chunk in chunks:
        yield chunk


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer.json": b""},
        {"tokenizer.json": b"{}", "tokenizer_config.json": b"", "a.model": bytes(range(256))},
        {"one": bytes(CHUNK_BYTES), "two": bytes(CHUNK_BYTES - 1), "three": bytes(2 * CHUNK_BYTES + 1)},
    ],
)
async def test_files_arrive_as_they_were(files: Mapping[str, bytes]) -> None:
    chunks = list(tokenizer_chunks(files))
    assert all(len(chunk.data) <= CHUNK_BYTES for chunk in chunks)
    assert await collect_tokenizer(stream(chunks)) == files


@pytest.mark.parametrize("name", ["", ".", "..", "../evil", "/etc/passwd", "a\\b", "a\0b"])
async def test_a_name_that_is_no_plain_file_name_is_refused(name: str) -> None:
    with pytest.raises(TwostrokeError, match="plain file name"):
        await collect_tokenizer(stream([TokenizerChunk(file_name=name, data=b"x")]))


async def test_a_file_that_comes_twice_is_refused() -> None:
    chunks = [TokenizerChunk(file_name=name, data=b"x") for name in ("a", "b", "a")]
    with pytest.raises(TwostrokeError, match="'a' came twice"):
        await collect_tokenizer(stream(chunks))


async def test_an_endless_stream_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOKENIZER_BYTES", 100)

    async def endless() -> AsyncIterator[TokenizerChunk]:
        while True:
            yield TokenizerChunk(file_name="a", data=bytes(30))

    with pytest.raises(TwostrokeError, match="more than 100 bytes"):
        await collect_tokenizer(endless())


def test_the_digest_tells_files_apart() -> None:
    variants: list[Mapping[str, bytes]] = [
        {},
        {"": b""},
        {"a": b""},
        {"a": b"b"},
        {"ab": b""},
        {"a": b"", "b": b""},
        {"a": b"b", "c": b"d"},
        {"a": b"bcd"},
        {"a": b"d", "c": b"b"},
    ]
    digests = [tokenizer_digest(files) for files in variants]
    assert all(len(digest) == DIGEST_BYTES for digest in digests)
    assert all(one != other for one, other in combinations(digests, 2))


def test_the_digest_does_not_depend_on_the_order() -> None:
    assert tokenizer_digest({"a": b"1", "b": b"2"}) == tokenizer_digest({"b": b"2", "a": b"1"})
