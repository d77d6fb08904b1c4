"""What a GGUF file says of itself: metadata and the table of tensors, checked against the file's size.

Reads no tensor data but small ones on request. Format: the GGUF specification, versions 2 and 3, little-endian.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from common.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

GgufScalar = int | float | str


@dataclass(frozen=True, slots=True)
class GgufTensor:
    shape: tuple[int, ...]  # as torch orders dimensions
    type_id: int
    offset: int  # bytes from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    path: Path
    metadata: dict[str, GgufScalar]  # arrays are left out
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def number(self, key: str, default: float = 0) -> float:
        """A number of this architecture's metadata: `number("rope.freq_base", 10000.0)`."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, str):
            raise ModelLoadError(f"{self.path}: {self.architecture}.{key} is {value!r}; a number was expected")
        return value


def read_gguf_header(path: Path) -> GgufHeader:
    """ModelLoadError names the file and what is wrong: bad magic, another version, cut short, unknown tensor types."""
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise ModelLoadError(f"{path} is empty; a GGUF file was expected")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _parse(path, content)
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error


def read_fp32_tensor(header: GgufHeader, name: str) -> tuple[float, ...]:
    """The values of a small fp32 tensor that the header names."""
    tensor = header.tensors[name]
    if tensor.type_id != 0:
        raise ModelLoadError(f"{header.path}: tensor {name} has GGML type {tensor.type_id}; fp32 was expected")
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.num_bytes)
    return struct.unpack(f"<{len(data) // 4}f", data)


class _Cursor:
    """Reads forward through the file; never past its end."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self.position = 0

    def skip(self, num_bytes: int) -> None:
        self.position += num_bytes
        if self.position > len(self._content):
            raise ModelLoadError(f"{self._path} is cut short: it ends at byte {len(self._content)}, in its header")

    def take(self, num_bytes: int) -> bytes:
        start = self.position
        self.skip(num_bytes)
        return self._content[start : self.position]

    def numbers(self, codes: str) -> tuple[int, ...]:
        form = f"<{codes}"
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def string(self) -> str:
        (length,) = self.numbers("Q")
        return self.take(length).decode(errors="replace")

    def value(self) -> GgufScalar | None:
        """A metadata value with its type before it; None for an array, whose elements are passed over."""
        (type_id,) = self.numbers("I")
        if type_id == _ARRAY:
            self._skip_array()
            return None
        if type_id == _STRING:
            return self.string()
        return self.numbers(self._code(type_id))[0]

    def _skip_array(self) -> None:
        type_id, count = self.numbers("IQ")
        if type_id == _STRING:
            for _ in range(count):
                self.skip(self.numbers("Q")[0])
        else:
            self.skip(count * struct.calcsize(self._code(type_id)))

    def _code(self, type_id: int) -> str:
        code = _SCALARS.get(type_id)
        if code is None:
            raise ModelLoadError(f"{self._path} is damaged: metadata of type {type_id} before byte {self.position}")
        return code


def _parse(path: Path, content: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(path, content)
    magic = content[: len(_MAGIC)]
    if magic != _MAGIC:
        raise ModelLoadError(f"{path} is not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}")
    cursor.skip(len(_MAGIC))
    version, num_tensors, num_values = cursor.numbers("IQQ")
    if version not in _VERSIONS:
        raise ModelLoadError(f"{path} is GGUF version {version}; versions 2 and 3 (little-endian) are supported")
    metadata: dict[str, GgufScalar] = {}
    for _ in range(num_values):
        key, value = cursor.string(), cursor.value()
        if value is not None:
            metadata[key] = value
    if not isinstance(metadata.get("general.architecture"), str):
        raise ModelLoadError(f"{path} does not name its architecture (general.architecture)")
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelLoadError(f"{path} is damaged: general.alignment is {alignment!r}")
    tensors = _parse_tensors(cursor, path, num_tensors, alignment)
    for name, tensor in tensors.items():
        if tensor.offset + tensor.num_bytes > len(content):
            raise ModelLoadError(
                f"{path} is cut short: it has {len(content)} bytes, and tensor {name} goes beyond them"
            )
    return GgufHeader(path, metadata, tensors)


def _parse_tensors(cursor: _Cursor, path: Path, num_tensors: int, alignment: int) -> dict[str, GgufTensor]:
    entries = [(cursor.string(), *_parse_tensor(cursor, path)) for _ in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    return {
        name: GgufTensor(shape, type_id, data_start + offset, _num_bytes(path, name, shape, type_id))
        for name, shape, type_id, offset in entries
    }


def _parse_tensor(cursor: _Cursor, path: Path) -> tuple[tuple[int, ...], int, int]:
    (num_dimensions,) = cursor.numbers("I")
    if num_dimensions > _MAX_DIMENSIONS:
        raise ModelLoadError(
            f"{path} is damaged: a tensor of {num_dimensions} dimensions before byte {cursor.position}"
        )
    shape = tuple(reversed(cursor.numbers(f"{num_dimensions}Q")))
    type_id, offset = cursor.numbers("IQ")
    return shape, type_id, offset


def _num_bytes(path: Path, name: str, shape: tuple[int, ...], type_id: int) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # only a conversion needs it

    try:
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    except (ValueError, KeyError):
        raise ModelLoadError(f"{path}: tensor {name} has the unknown GGML type {type_id}") from None
    return prod(shape) // block_elements * block_bytes
