"""What a gateway says of the model that it serves."""

from dataclasses import dataclass

import httpx

from cli.errors import CommandError

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    numerics: str
    is_exact: bool
    inexact_reason: str

    @property
    def exactness(self) -> str:
        if self.is_exact:
            return "exact: one request, one answer"
        return f"exact: false ({self.inexact_reason}); --numerics int8 is exact on CPUs"


async def fetch_model(url: str) -> ServedModel:
    """Raises CommandError when no gateway answers at `url`."""
    try:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            response = await client.get(f"{url}/v1/models")
            response.raise_for_status()
            card = response.json()["data"][0]
    except httpx.HTTPError as error:
        raise CommandError(f"{url}/v1/models: {error or type(error).__name__}") from None
    return ServedModel(card["id"], card["numerics"], card["exact"], card["inexact_reason"])
