import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from common.errors import ModelLoadError
from common.model.gguf_header import read_fp32_tensor, read_gguf_header
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("header")
    model = make_tiny_model(folder / "hf", "llama", num_hidden_layers=1)
    divisors = {"rope_freqs.weight": np.array([1, 1, 1, 1, 2, 4, 8, 8], dtype=np.float32)}
    return write_tiny_gguf(folder / "good.gguf", model, quantization="Q8_0", extra_tensors=divisors)


@pytest.fixture
def damaged(good: Path, tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        file = tmp_path / "damaged.gguf"
        file.write_bytes(content)
        return file

    return write


def test_it_reads_what_the_gguf_package_reads(good: Path) -> None:
    header, reader = read_gguf_header(good), GGUFReader(good)
    assert header.architecture == "llama"
    assert header.number("block_count") == 1
    assert header.number("absent", 7) == 7
    expected = {
        tensor.name: (tuple(reversed(tensor.shape.tolist())), tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        for tensor in reader.tensors
    }
    found = {name: (t.shape, t.type_id, t.offset, t.num_bytes) for name, t in header.tensors.items()}
    assert found == expected


def test_a_small_tensor_s_values(good: Path) -> None:
    header = read_gguf_header(good)
    assert read_fp32_tensor(header, "rope_freqs.weight") == (1, 1, 1, 1, 2, 4, 8, 8)
    with pytest.raises(ModelLoadError, match=r"token_embd\.weight has GGML type 8"):
        read_fp32_tensor(header, "token_embd.weight")


def test_cut_short_anywhere_it_is_refused(good: Path, damaged: Callable[[bytes], Path]) -> None:
    content = good.read_bytes()
    header_end = min(tensor.offset for tensor in read_gguf_header(good).tensors.values())
    cuts = [
        *range(4, 200),
        *range(200, header_end, 97),
        header_end,
        (header_end + len(content)) // 2,
        len(content) - 33,
    ]
    for cut in cuts:
        with pytest.raises(ModelLoadError, match=rf"damaged\.gguf is cut short.* {cut}"):
            read_gguf_header(damaged(content[:cut]))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"GG", "it starts with b'GG'"),
        (b"PK\x03\x04" + bytes(100), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "is GGUF version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is GGUF version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "does not name its architecture"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "is cut short"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99), "metadata of type 99"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "is cut short"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**60), "is cut short"),
    ],
)
def test_what_is_wrong_is_named(damaged: Callable[[bytes], Path], content: bytes, reason: str) -> None:
    with pytest.raises(ModelLoadError) as raised:
        read_gguf_header(damaged(content))
    assert reason in str(raised.value)
    assert "damaged.gguf" in str(raised.value)


ARCHITECTURE = struct.pack("<Q20sIQ5s", 20, b"general.architecture", 8, 5, b"llama")


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (struct.pack("<Q1sIQIQ", 1, b"w", 1, 8, 250, 0), "unknown GGML type 250"),
        (struct.pack("<Q1sI", 1, b"w", 77) + bytes(700), "a tensor of 77 dimensions"),
        (struct.pack("<Q1sIQIQ", 1, b"w", 1, 8, 0, 2**62), "tensor w goes beyond"),
    ],
)
def test_a_damaged_tensor_table_is_named(damaged: Callable[[bytes], Path], tensor: bytes, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        read_gguf_header(damaged(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + ARCHITECTURE + tensor))


def test_a_text_where_a_number_belongs_is_named(damaged: Callable[[bytes], Path]) -> None:
    key = b"llama.block_count"
    text = struct.pack(f"<Q{len(key)}sIQ3s", len(key), key, 8, 3, b"two")
    header = read_gguf_header(damaged(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + ARCHITECTURE + text))
    with pytest.raises(ModelLoadError, match=r"llama\.block_count is 'two'"):
        header.number("block_count")


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"cannot read .*absent\.gguf: No such file"):
        read_gguf_header(tmp_path / "absent.gguf")
