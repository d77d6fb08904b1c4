"""Every name that is observed: spans, attributes, metrics. Nothing else spells one.

`gen_ai.*` follow the OpenTelemetry semantic conventions for generative AI; ours start with `twostroke.`.
"""

# Spans, in the order of a request's life.
SPAN_REQUEST = "gateway.request"
SPAN_TOKENIZE = "gateway.tokenize"
SPAN_PLACE = "gateway.place"
SPAN_RESERVE = "decode.reserve"
SPAN_PREFILL_QUEUE = "prefill.queue"
SPAN_PREFILL_CHUNK = "prefill.chunk"
SPAN_KV_PUSH = "kv.push"
SPAN_KV_COMMIT = "kv.commit"
SPAN_DECODE_QUEUE = "decode.queue"
SPAN_DECODE_STREAM = "decode.stream"
SPAN_SPEC_VERIFY = "spec.verify"

# Attributes.
ATTR_OPERATION = "gen_ai.operation.name"
ATTR_REQUEST_MODEL = "gen_ai.request.model"
ATTR_RESPONSE_ID = "gen_ai.response.id"
ATTR_INPUT_TOKENS = "gen_ai.usage.input_tokens"
ATTR_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ATTR_FINISH_REASONS = "gen_ai.response.finish_reasons"
ATTR_HTTP_STATUS = "http.response.status_code"
ATTR_ERROR_TYPE = "error.type"
ATTR_CACHED_TOKENS = "twostroke.cached_tokens"
ATTR_NUM_TOKENS = "twostroke.num_tokens"
ATTR_NUM_BLOCKS = "twostroke.num_blocks"
ATTR_NUM_HELD_BLOCKS = "twostroke.num_held_blocks"
ATTR_NUM_BYTES = "twostroke.num_bytes"
ATTR_PREFILL_WORKER = "twostroke.prefill_worker"
ATTR_DECODE_WORKER = "twostroke.decode_worker"
ATTR_PLACEMENT_REASON = "twostroke.placement_reason"
ATTR_FALLBACK = "twostroke.fallback"
ATTR_ON_FAILURE = "twostroke.on_failure"
ATTR_DRAFT_TOKENS = "twostroke.draft_tokens"
ATTR_ACCEPTED_TOKENS = "twostroke.accepted_tokens"
ATTR_TARGET_PASSES = "twostroke.target_passes"

# TTFT taken apart, in seconds, on the request span. The parts add up to ATTR_TTFT.
ATTR_TTFT = "twostroke.ttft_s"
ATTR_TPOT = "twostroke.tpot_s"
ATTR_EXPOSED_TRANSFER = "twostroke.exposed_transfer_s"  # of the second token: no part of the TTFT
TTFT_PARTS = (
    "twostroke.ttft.tokenize_s",
    "twostroke.ttft.admission_s",  # parsing, validation and waiting for admission at the gateway
    "twostroke.ttft.place_s",
    "twostroke.ttft.reserve_s",
    "twostroke.ttft.queue_s",  # waiting at the worker for the first scheduled chunk
    "twostroke.ttft.prefill_s",
    "twostroke.ttft.transfer_s",  # exposed: time the client waited for KV to move before the first token
    "twostroke.ttft.network_s",  # between gateway and worker, both ways
    "twostroke.ttft.respond_s",  # from the token's arrival at the gateway to the byte the client can see
)

# Metrics, as Prometheus shows them.
METRIC_TTFT = "gen_ai_server_time_to_first_token_seconds"
METRIC_TPOT = "gen_ai_server_time_per_output_token_seconds"
METRIC_EXPOSED_TRANSFER = "twostroke_exposed_transfer_seconds"
METRIC_DURATION = "gen_ai_server_request_duration_seconds"
METRIC_REQUESTS = "twostroke_requests_total"  # labels: route, status
METRIC_ACTIVE_REQUESTS = "twostroke_active_requests"
METRIC_WAITING = "twostroke_waiting_generations"
METRIC_PROMPT_TOKENS = "twostroke_prompt_tokens_total"
METRIC_CACHED_TOKENS = "twostroke_cached_tokens_total"
METRIC_OUTPUT_TOKENS = "twostroke_output_tokens_total"
METRIC_PLACEMENTS = "twostroke_placements_total"  # labels: reason
METRIC_FALLBACKS = "twostroke_fallbacks_total"  # labels: reason
METRIC_REPLACED_TOKENS = "twostroke_replaced_tokens_total"  # labels: how (reused, computed)
METRIC_GIVEN_UP = "twostroke_given_up_total"  # labels: reason, on_failure
METRIC_RELEASED_BLOCKS = "twostroke_released_blocks_total"  # labels: role
METRIC_INDEX_AVAILABLE = "twostroke_prefix_index_available"
METRIC_GATEWAY_MEMORY = "twostroke_gateway_peak_memory_bytes"
METRIC_WORKER = "twostroke_worker"  # prefix of a gauge or counter per field of WorkerStatus; labels: worker, role

LATENCY_BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 82,
)  # fmt: skip
