"""Who may use the operator's routes: holders of the operator's key, which is no tenant's."""

import hashlib
import hmac

from common.errors import Forbidden, Unauthorized


class OperatorAccess:
    def __init__(self, key: bytes | None, *, is_local: bool) -> None:
        """Without a key: everyone where the gateway listens for this machine alone (`is_local`), else nobody."""
        self._digest = None if key is None else hashlib.sha256(key).digest()
        self._is_local = is_local

    def check(self, authorization: str | None) -> None:
        """`authorization` is the header. Raises Unauthorized or Forbidden; the message never repeats the key."""
        if self._digest is None:
            if not self._is_local:
                raise Forbidden(
                    "this gateway listens for other machines and has no operator's key, so nobody may do this; "
                    "set --operator-key-file"
                )
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("this needs the operator's key: send the header `Authorization: Bearer <key>`")
        if not hmac.compare_digest(hashlib.sha256(key.strip().encode()).digest(), self._digest):
            raise Unauthorized("this is not the operator's key")
