"""What happened to one HTTP request: filled in along the way, read once at its end. Holds no text and no tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.ids import RequestId
from common.sampling import FinishReason
from common.telemetry.names import TTFT_PARTS
from gateway.generation import Generation, RequestTimes, Route


@dataclass(slots=True)
class Choice:
    """One choice of a request: what is asked, where it went, and what came of it so far."""

    index: int
    prompt_index: int
    generation: Generation
    route: Route = field(default_factory=Route)
    num_output_tokens: int = 0  # delivered: up to and including the one that completed a stop string
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    last_token: float = 0.0  # when the newest token arrived at the gateway, on the clock of RequestTimes

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first, as they arrived here; None below two tokens."""
        first_token = self.generation.times.first_token
        if self.num_output_tokens < 2 or not first_token:
            return None
        return (self.last_token - first_token) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a whole response took. A prompt's tokens count once, however many choices it has."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    kv_bytes: int | None = None  # moved to decode, for all choices; None: no hand-off was told
    exposed_transfer_s: float | None = None  # of the choice that waited longest

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> "Usage":
        """Cached tokens of a prompt are the fewest that any of its choices found: no choice earns from its sibling."""
        prompts: dict[int, int] = {}
        cached: dict[int, int] = {}
        for choice in choices:
            index = choice.prompt_index
            prompts[index] = len(choice.generation.token_ids)
            cached[index] = min(cached.get(index, choice.num_cached_tokens), choice.num_cached_tokens)
        output_tokens = sum(choice.num_output_tokens for choice in choices)
        transfers = [choice.generation.transfer for choice in choices]
        kv_bytes = [transfer.num_bytes for transfer in transfers if transfer.num_bytes is not None]
        exposed_s = [transfer.exposed_s for transfer in transfers if transfer.exposed_s is not None]
        return cls(
            sum(prompts.values()),
            sum(cached.values()),
            output_tokens,
            sum(kv_bytes) if kv_bytes else None,
            max(exposed_s, default=None),
        )

    def to_json(self, *, with_transfer: bool = False) -> dict[str, object]:
        """OpenAI's fields; `with_transfer` adds ours, which only clients that asked for them get."""
        return self._tokens_json() | ({"twostroke": self._transfer_json()} if with_transfer else {})

    def _transfer_json(self) -> dict[str, object]:
        exposed_s = self.exposed_transfer_s
        return {
            "kv_bytes": self.kv_bytes,
            "exposed_transfer_ms": None if exposed_s is None else exposed_s * 1000,
        }

    def _tokens_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request. Times are seconds on the clock of RequestTimes."""

    method: str
    path: str
    received: float
    route: str = ""  # the route's template; "other" where none matched
    status: int = 0  # as sent, or of what ended the answer later; 0: nothing was sent yet
    request_id: RequestId | None = None
    operation: str = ""  # "chat" or "text_completion", once the request was understood
    model: str = ""
    is_streamed: bool = False
    choices: list[Choice] = field(default_factory=list)
    error_code: str = ""
    finished: float = 0.0
    trace_id: str = ""  # filled in by the observer, in hex; empty when nothing is traced
    traceresponse: str = ""

    def first_visible_choice(self) -> Choice | None:
        """The choice whose text reached the client first."""
        visible = [choice for choice in self.choices if choice.generation.times.first_byte]
        return min(visible, key=lambda choice: choice.generation.times.first_byte, default=None)


def ttft_s(times: RequestTimes) -> float:
    """From the request's head to the byte that the client can see."""
    return times.first_byte - times.received


def ttft_parts(times: RequestTimes) -> Mapping[str, float]:
    """The TTFT taken apart, in seconds, by the names of TTFT_PARTS; together they are `ttft_s`, whatever the times.

    Admission is all that passed before the call was opened and is nothing else, retries included; network is what of
    the call's time the worker does not account for.
    """
    before_call = times.run_started - times.received
    in_call = times.first_token - times.run_started
    parts = {
        "tokenize": times.tokenize_s,
        "admission": before_call - times.tokenize_s - times.place_s - times.reserve_s,
        "place": times.place_s,
        "reserve": times.reserve_s,
        "queue": times.queue_s,
        "prefill": times.prefill_s,
        "transfer": times.transfer_s,
        "network": in_call - times.queue_s - times.prefill_s - times.transfer_s,
        "respond": times.first_byte - times.first_token,
    }
    return {name: parts[name.removeprefix("twostroke.ttft.").removesuffix("_s")] for name in TTFT_PARTS}
