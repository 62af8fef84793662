"""Options of the gRPC channel: bounds on connections, calls and messages, as `serving/admission.py` and the gRPC library enforce them.

gRPC's library hands a message to the server only once all of it is there. Of a call whose message nobody reads it keeps
a window of `WINDOW` bytes; of one that is being read, anything up to the largest message. So keys come first, and the calls whose messages
are read at the same time are few, each counted as the largest message. How far a message has come nobody can see: it has to be there within
the time that a client may take.
"""

from urllib.parse import unquote

WINDOW = 64 * 1024  # bytes of an unread message that HTTP/2's flow control lets come
CONNECTIONS = 1024
CALLS = 1024  # at once
STREAMS = 16  # of ModelStreamInfer; each may have a message on its way at any time
WATCHES = 256  # of the health service
KEYLESS = 4  # messages to health that are read at once, and reflection streams: they want no key
RENEWAL = 3600  # seconds after which a connection is replaced by a new one, and again until it is closed


def address_of(peer: str) -> str:
    """The address of a call's caller, without its port: of `ipv4:127.0.0.1:5000`, of `ipv6:%5B::1%5D:5000`, or nothing for `unix:`."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def channel_options(largest: int, seconds: float) -> list[tuple[str, int]]:
    """The library's own options: bounds on unread messages, and on peers that are gone."""
    milliseconds = max(1, round(seconds * 1000))
    return [
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_send_message_length", -1),  # a reply is refused before it is computed
        ("grpc.max_allowed_incoming_connections", CONNECTIONS),
        ("grpc.max_concurrent_streams", CALLS),
        ("grpc.http2.bdp_probe", 0),  # it would widen the window of what nobody reads
        ("grpc.http2.lookahead_bytes", WINDOW),
        ("grpc.http2.write_buffer_size", 0),  # a reply is written when the connection has it
        ("grpc.server_handshake_timeout_ms", milliseconds),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", milliseconds),
        ("grpc.max_connection_age_ms", RENEWAL * 1000),
        ("grpc.max_connection_age_grace_ms", RENEWAL * 1000),
    ]
