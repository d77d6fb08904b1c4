"""The gateway: HTTP and SSE, tokens and text, admission, placement, the life of a request. Touches no tensor."""
