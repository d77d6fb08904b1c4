"""What all workers of one deployment share, and the check that a worker belongs to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from common.errors import FingerprintMismatch
from common.kv.layout import KVLayout
from common.pb.worker_pb2 import ROLE_DECODE, ROLE_PREFILL, WorkerInfo
from common.rpc.convert import layout_from_pb
from common.tokenizer_files import tokenizer_digest
from gateway.placement import Role

ROLE_FROM_PB = {ROLE_PREFILL: Role.PREFILL, ROLE_DECODE: Role.DECODE}


@dataclass(frozen=True, slots=True)
class Deployment:
    """Defined by the first decode worker that answers, for the life of the gateway."""

    model_name: str
    fingerprint: bytes
    layout: KVLayout
    numerics: str
    is_exact: bool
    inexact_reason: str
    max_model_len: int
    vocab_size: int
    tokenizer_digest: bytes
    tokenizer_files: Mapping[str, bytes] = field(repr=False)

    def check(self, peer: str, role: Role, info: WorkerInfo) -> None:
        """Raises FingerprintMismatch, naming both values, when the worker serves something else. A prefill worker may
        keep a wider KV format, and be equal in all else: it quantizes on send."""
        identity = info.identity
        layout, fingerprint = layout_from_pb(identity.layout), identity.fingerprint
        sends_as = identity.narrower_fingerprints.get(self.layout.format)
        if role is Role.PREFILL and sends_as is not None and layout.can_be_sent_as(self.layout):
            fingerprint = sends_as
        else:
            self._check_equal(peer, "KV layout", layout.describe(), self.layout.describe())
        self._check_equal(
            peer,
            "model fingerprint",
            f"{fingerprint.hex()} ({identity.model_name}, numerics {identity.numerics})",
            f"{self.fingerprint.hex()} ({self.model_name}, numerics {self.numerics})",
        )
        self._check_equal(peer, "tokenizer digest", info.tokenizer_digest.hex(), self.tokenizer_digest.hex())

    def joined_by(self, peer: str, info: WorkerInfo) -> "Deployment":
        """What the deployment is once a worker that passed `check` is part of it: K and V that attention read
        unquantized are not those that a decode worker computes from the same tokens."""
        layout = layout_from_pb(info.identity.layout)
        if layout == self.layout or not self.is_exact:
            return self
        reason = (
            f"{peer} keeps its KV cache as {layout.format} and decode as {self.layout.format}: an answer depends on "
            "which of them computed the prompt"
        )
        return replace(self, is_exact=False, inexact_reason=reason)

    def _check_equal(self, peer: str, what: str, theirs: str, ours: str) -> None:
        if theirs != ours:
            raise FingerprintMismatch(
                f"{peer} has {what} {theirs}, this deployment has {ours}; start the worker with the same model and "
                "KV format, or the gateway anew"
            )


def check_role(peer: str, expected: Role, info: WorkerInfo) -> None:
    """Raises FingerprintMismatch when the process at a prefill address is a decode worker, or the reverse."""
    role = ROLE_FROM_PB.get(info.role)
    if role is not expected:
        raise FingerprintMismatch(
            f"{peer} says that its role is {role or 'unspecified'}, its address is configured as {expected}"
        )


def make_deployment(
    peer: str, info: WorkerInfo, tokenizer_files: Mapping[str, bytes], model_name: str | None
) -> Deployment:
    """Raises FingerprintMismatch when the tokenizer is not the one that the worker named."""
    digest = tokenizer_digest(tokenizer_files)
    if digest != info.tokenizer_digest:
        raise FingerprintMismatch(
            f"{peer} sent a tokenizer with digest {digest.hex()}, it named {info.tokenizer_digest.hex()}"
        )
    identity = info.identity
    return Deployment(
        model_name=model_name or identity.model_name,
        fingerprint=identity.fingerprint,
        layout=layout_from_pb(identity.layout),
        numerics=identity.numerics,
        is_exact=identity.exact,
        inexact_reason=identity.inexact_reason,
        max_model_len=identity.max_model_len,
        vocab_size=identity.vocab_size,
        tokenizer_digest=digest,
        tokenizer_files=dict(tokenizer_files),
    )
