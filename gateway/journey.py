"""One generation's state over its attempts: what the client has, whom it avoids, how often it may still fail."""

from dataclasses import dataclass, field

from common.errors import NoRoom, TwostrokeError
from common.ids import BlockHash, TransferId, mint_transfer_id
from common.kv.block_hash import block_hashes, root_hash
from common.pb import decode_pb2, prefill_pb2
from common.rpc.convert import layout_to_pb, sampling_to_pb
from gateway.avoided import Avoided
from gateway.deployment import Deployment
from gateway.generation import Generation, OnFailure, Route
from gateway.placement import Fallback


@dataclass(slots=True)
class Journey:
    generation: Generation
    route: Route
    deployment: Deployment
    tenant_salt: bytes
    wants_prefill: bool
    retries_left: int
    on_failure: OnFailure
    transfer_id: TransferId = field(default_factory=mint_transfer_id)
    attempt: int = 0  # `generation` on the wire: rises with every attempt
    delivered: list[int] = field(default_factory=list)  # token ids that the client has
    num_cached_tokens: int | None = None  # as told with the first token
    avoided: Avoided = field(default_factory=Avoided)
    prefill_retried: bool = False
    wait_until_s: float = 0.0  # by the dispatcher's clock: a failure is worth waiting for a worker until then
    no_room: NoRoom | None = None  # the last refusal
    last_error: TwostrokeError | None = None
    is_move: bool = False  # the next attempt goes where most of the blocks are
    hashes: list[BlockHash] = field(default_factory=list)  # of the full blocks, as of the current attempt

    def begin_attempt(self) -> None:
        self.attempt += 1
        root = root_hash(self.deployment.fingerprint, self.tenant_salt)
        tokens = (*self.generation.token_ids, *self.delivered)
        self.hashes = block_hashes(root, tokens, self.deployment.layout.block_size)

    @property
    def num_tokens(self) -> int:
        return len(self.generation.token_ids) + len(self.delivered)

    def num_missing_bytes(self, ticket: decode_pb2.Ticket) -> int:
        """KV that decode does not hold: what prefill pushes."""
        layout = self.deployment.layout
        return (-(-self.num_tokens // layout.block_size) - ticket.num_held_blocks) * layout.block_bytes

    def note_fallback(self, fallback: Fallback) -> None:
        """The route names every fallback once, in order."""
        so_far = self.route.fallback.split(",") if self.route.fallback else []
        if fallback not in so_far:
            self.route.fallback = ",".join([*so_far, fallback])

    def reserve_request(self) -> decode_pb2.ReserveRequest:
        return decode_pb2.ReserveRequest(
            request_id=self.generation.request_id,
            transfer_id=self.transfer_id,
            generation=self.attempt,
            fingerprint=self.deployment.fingerprint,
            layout=layout_to_pb(self.deployment.layout),
            num_prompt_tokens=self.num_tokens,
            block_hashes=self.hashes,
        )

    def prefill_request(self, decode_address: str, ticket: decode_pb2.Ticket) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(
            request_id=self.generation.request_id,
            transfer_id=self.transfer_id,
            generation=self.attempt,
            fingerprint=self.deployment.fingerprint,
            token_ids=self.generation.token_ids,
            sampling=sampling_to_pb(self.generation.sampling),
            tenant_salt=self.tenant_salt,
            decode_address=decode_address,
            ticket=ticket.ticket,
            num_held_blocks=ticket.num_held_blocks,
            output_token_ids=self.delivered,
        )

    def generate_request(self, ticket: decode_pb2.Ticket | None) -> decode_pb2.GenerateRequest:
        """The output goes on after `delivered`; with a ticket prefill brings the first token of it."""
        return decode_pb2.GenerateRequest(
            request_id=self.generation.request_id,
            ticket=ticket.ticket if ticket else b"",
            token_ids=self.generation.token_ids,
            output_token_ids=self.delivered,
            sampling=sampling_to_pb(self.generation.sampling),
            tenant_salt=self.tenant_salt,
            fingerprint=self.deployment.fingerprint,
            transfer_id=self.transfer_id,
            generation=self.attempt,
        )
