"""The model that the gateway serves: its name, its limits and its tokenizer, as learned from the workers."""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from common.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What `/v1/models` tells about a model."""

    name: str
    max_model_len: int  # prompt and output tokens together
    vocab_size: int
    created: int  # Unix seconds; when this gateway learned of the model
    numerics: str  # numeric path of the workers
    inexact_reason: str  # why that path cannot keep "one request, one answer"; empty: it can


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model, complete: a request keeps the one that it started with."""

    card: ModelCard
    tokenizer: Tokenizer
    huge_texts: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))  # who may tokenize one


class ModelProvider(Protocol):
    """Where the HTTP surface asks for the model."""

    def current(self) -> ServedModel | None:
        """None until a worker has sent the tokenizer; requests get 503 until then."""


class ModelHolder:
    """The provider of a running gateway: discovery sets the model when it knows it."""

    def __init__(self, model: ServedModel | None = None) -> None:
        self._model = model

    def current(self) -> ServedModel | None:
        return self._model

    def set(self, model: ServedModel) -> None:
        self._model = model
