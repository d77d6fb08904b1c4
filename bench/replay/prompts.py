"""The prompts of a trace, as token ids or as text. The same seed and segments give the same prompt."""

from dataclasses import dataclass

from bench.replay import draws
from bench.replay.trace import Segment

# Frequent words, most of them one token in most vocabularies.
_FREQUENT = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man"
)
_WORDS = _FREQUENT.split()


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Token ids are drawn from first_token_id..last_token_id, which must exclude the vocabulary's special tokens."""

    seed: int
    first_token_id: int = 1000
    last_token_id: int = 20_000
    as_text: bool = False  # words, about one token each: for servers that take no token ids

    def prompt(self, segments: tuple[Segment, ...]) -> list[int] | str:
        ids = [token_id for segment in segments for token_id in self._token_ids(segment)]
        return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in ids) if self.as_text else ids

    def _token_ids(self, segment: Segment) -> list[int]:
        values = draws.words(self.seed, segment.name, segment.num_tokens)
        span = self.last_token_id - self.first_token_id + 1
        return [self.first_token_id + int(value) % span for value in values]
