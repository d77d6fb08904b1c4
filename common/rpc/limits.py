"""Transport settings that both ends of a connection must agree on."""

MAX_MESSAGE_BYTES = 64 * 2**20
MAX_METADATA_BYTES = 64 * 2**10

# A peer that does not answer a ping is lost after at most the sum of both. gRPC answers pings in threads of its own,
# so a worker whose Python threads are busy still answers.
KEEPALIVE_INTERVAL_MS = 2_000
KEEPALIVE_TIMEOUT_MS = 4_000

# A restarted worker is reached again within this time; gRPC's own default is two minutes.
MIN_RECONNECT_MS = 100
MAX_RECONNECT_MS = 2_000
# One try may take this long: less would be too short for a busy host or a far one. A refused connection fails at once.
CONNECT_TIMEOUT_MS = 2_000

PROGRESS_INTERVAL_S = 1.0
"""How often a worker tells, on the stream of a call that has nothing else to say, that it goes on."""

ChannelOption = tuple[str, int]

_BOTH_ENDS: tuple[ChannelOption, ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # the one that counts for a peer that sends nothing at all
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CLIENT_OPTIONS: tuple[ChannelOption, ...] = (
    *_BOTH_ENDS,
    ("grpc.initial_reconnect_backoff_ms", MIN_RECONNECT_MS),
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),  # its name notwithstanding, it bounds one try from below
    ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_MS),
    # Workers are reached directly; a proxy meant for the outside world must not see KV blocks.
    ("grpc.enable_http_proxy", 0),
    # A repeated call is the caller's decision: a reservation or a hand-off must not happen twice unseen.
    ("grpc.enable_retries", 0),
)

SERVER_OPTIONS: tuple[ChannelOption, ...] = (
    *_BOTH_ENDS,
    # A port belongs to one process: two servers on one port would share its calls between them.
    ("grpc.so_reuseport", 0),
    # gRPC closes connections that ping more often than this; half the interval leaves room for jitter.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_INTERVAL_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
)
