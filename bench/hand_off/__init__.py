"""What moving blocks from prefill to decode costs: beside raw gRPC, and in what a client waits."""
