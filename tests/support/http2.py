"""Frames of HTTP/2, to send to a gRPC server what no client sends."""

import struct

DATA, HEADERS, SETTINGS, PING, CONTINUATION = 0, 1, 4, 6, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header(name: str, value: str) -> bytes:
    """A header as a literal, without the compression table."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def opening(address: str, method: str, *metadata: tuple[str, str], flags: int = END_HEADERS) -> bytes:
    """The first bytes of a connection, with a call on its first stream; without `flags`, its headers have not ended."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": address,
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(header(name, value) for name, value in (*headers.items(), *metadata))
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, flags, 1, block)


MORE_HEADERS = frame(CONTINUATION, 0, 1, header("x", "y") * 2000)  # in a block that has not ended; costs its receiver most per byte
