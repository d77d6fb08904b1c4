"""JSON as it leaves the gateway: compact, and ASCII.

Escapes keep two things harmless that UTF-8 would not: half surrogates quoted from a client's body, and U+2028 and its
like, at which some clients break lines of an event stream.
"""

import json
from typing import Any

Json = dict[str, Any]

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def to_json(value: Json) -> bytes:
    return _ENCODER.encode(value).encode("ascii")
