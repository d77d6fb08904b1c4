"""Settings that prefill and decode workers have in common; each service's `config` module adds its own."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from common.faults.settings import FaultSettings
from common.kv.layout import KVFormat


class EngineSettings(FaultSettings):
    program: ClassVar[str] = "twostroke-worker"

    host: str = Field("127.0.0.1", description="where the gRPC service listens")
    port: int = Field(0, ge=0, le=65535, description="port of the gRPC service; 0: any free one")
    tls_dir: Path | None = Field(
        None, description="folder with tls.crt, tls.key and ca.crt, for mutual TLS between services; none: plain text"
    )
    allow_unencrypted: bool = Field(False, description="listen for other machines without TLS")
    health_port: int | None = Field(
        None, ge=0, le=65535, description="port of gRPC health alone, as plain text, for probes; none: not opened"
    )
    worker_id: str | None = Field(
        None, description="name of this worker, stable over restarts; default: drawn at start"
    )
    model: str = Field(
        "default", description="a .gguf file, a Hugging Face folder, or `default` (SmolLM2-135M-Instruct)"
    )
    max_model_len: int | None = Field(
        None, ge=2, description="prompt and output tokens; default: what the model allows"
    )
    device: str = Field("auto", description="auto, cpu or cuda")
    backend: str = Field("auto", description="kernels: auto, cpu, triton or reference")
    threads: int = Field(0, ge=0, description="threads of one step; 0: as many as the machine has cores")
    numerics: str = Field(
        "auto", description="numeric path of the linear layers: reference, int8, or auto: int8 where it is exact"
    )
    kv_format: KVFormat = Field(KVFormat.INT8, description="format of the KV cache: int8 or fp32")
    kv_memory_mib: int = Field(512, ge=1, description="memory of the KV cache")
    block_size: int = Field(16, ge=1, description="token positions in a KV block")
    max_num_batched_tokens: int = Field(512, ge=1, description="token budget of a step")
    max_waiting: int = Field(256, ge=1, description="queued prompts; more are refused")
    redis_url: str | None = Field(None, description="the prefix index; none: nothing is published")
    drain_grace_s: float = Field(30.0, ge=0, description="work may finish for this long after SIGTERM")
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")

    @field_validator("log_level")
    @classmethod
    def _check_level(cls, level: str) -> str:
        if level.upper() not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
            raise ValueError("allowed: DEBUG, INFO, WARNING, ERROR")
        return level.upper()
