"""Limits on connections, calls and messages, and the options that set them in the gRPC library.

The library delivers a message only when it is complete. While a handler does not read, the library buffers at most `WINDOW_BYTES` of the
message; while a handler reads, up to the largest message. So handlers check the key first, and only a few read at the same time, each
counted as the largest message (`serving/streams.py`). The progress of a message is not visible, so the time limit is for all of it.
"""

from urllib.parse import unquote

WINDOW_BYTES = 64 * 1024  # bytes of an unread message that HTTP/2's flow control admits
MAX_CONNECTIONS = 1024
MAX_CALLS = 1024  # at the same time
MAX_STREAMS = 16  # of ModelStreamInfer; each may be receiving a message at any time
MAX_WATCHES = 256  # streams of the health service's Watch
MAX_KEYLESS = 4  # limit of health messages read at the same time, and of reflection streams: neither needs a key
MAX_CONNECTION_AGE = 3600  # seconds until a client has to reconnect; after as many again its old connection is closed


def address_of(peer: str) -> str:
    """The address without its port: `ipv4:127.0.0.1:5000` -> `127.0.0.1`, `ipv6:%5B::1%5D:5000` -> `::1`, `unix:` -> ``."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def channel_options(largest: int, seconds: float) -> list[tuple[str, int]]:
    """Options of `grpc.aio.server`: message sizes, connections, and timeouts for dead peers."""
    milliseconds = max(1, round(seconds * 1000))
    return [
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_send_message_length", -1),  # the size of a reply is checked before it is computed
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.max_concurrent_streams", MAX_CALLS),
        ("grpc.http2.bdp_probe", 0),  # the probe would enlarge the window of unread messages
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.http2.write_buffer_size", 0),  # a write completes only when the connection has taken it
        ("grpc.server_handshake_timeout_ms", milliseconds),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", milliseconds),
        ("grpc.max_connection_age_ms", MAX_CONNECTION_AGE * 1000),
        ("grpc.max_connection_age_grace_ms", MAX_CONNECTION_AGE * 1000),
    ]
