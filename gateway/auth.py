"""API keys to tenants. A tenant's name is the server's own; clients never send it."""

import hashlib
from collections.abc import Mapping

from common.errors import Unauthorized

DEFAULT_TENANT = "default"


class Authenticator:
    """Keys are looked up by digest, so that the time of a look-up tells nothing about them."""

    def __init__(self, tenants_by_api_key: Mapping[str, str] | None) -> None:
        """None: no authentication, and everyone is DEFAULT_TENANT."""
        self._tenants = (
            None if tenants_by_api_key is None else {_digest(key): tenant for key, tenant in tenants_by_api_key.items()}
        )

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an Authorization header. Raises Unauthorized; the message never repeats the key."""
        if self._tenants is None:
            return DEFAULT_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("no API key was sent; send the header `Authorization: Bearer <key>`")
        tenant = self._tenants.get(_digest(key.strip()))
        if tenant is None:
            raise Unauthorized("the API key is not known here")
        return tenant


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
