"""gRPC at its edges: channels, servers, trace context, and errors as statuses. No service's logic."""
