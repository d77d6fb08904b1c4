"""The JSON of answers: what both endpoints share, and the envelope around every body and chunk."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from common.ids import RequestId
from gateway.choice_text import Piece
from gateway.wire_json import Json


@dataclass(frozen=True, slots=True)
class Envelope:
    """Constant over one answer. `seed` is an extension: the request's seed, drawn or given."""

    request_id: RequestId
    created: int  # Unix seconds
    model: str
    seed: int

    def wrap(self, kind: str, choices: Sequence[Json]) -> Json:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "seed": self.seed,
            "choices": choices,
        }


class ResponseFormat(Protocol):
    """One endpoint's way to write choices."""

    body_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def whole(self, index: int, piece: Piece) -> Json:
        """A finished choice, in an answer that is not streamed."""

    def opening(self, index: int, /) -> Json | None:
        """What comes before a choice's first part in a stream."""

    def part(self, index: int, piece: Piece) -> Json:
        """A part of a choice in a stream."""


def body_json(envelope: Envelope, answer: ResponseFormat, pieces: Sequence[Piece], usage: Json) -> Json:
    choices = [answer.whole(index, piece) for index, piece in enumerate(pieces)]
    return envelope.wrap(answer.body_kind, choices) | {"usage": usage}
