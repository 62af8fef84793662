"""Exports the cache of a session as safetensors, and imports it again."""

import math
from functools import partial
from typing import NamedTuple

import numpy as np

from attend.attention.cache import KeyValueCache, cached_tensors
from attend.errors import InvalidRequest, MalformedBody, SessionConflict, TooLarge, UnsupportedMediaType
from attend.serving.casting import cast, numpy_of
from attend.serving.layers.registry import LoadedLayer
from attend.serving.requests import Request
from attend.serving.service import Service
from attend.serving.sessions.locks import lock_session
from attend.serving.sessions.registry import SessionRegistry
from attend.serving.sessions.session import Session
from attend.wire.codec import Buffer
from attend.wire.compression import unpack_start
from attend.wire.negotiation import FILE_CODEC, SAFETENSORS
from attend.wire.problems import describe_value
from attend.wire.safetensors import read_header, read_tensors, write_tensors


class CacheFile(NamedTuple):
    """What the header of an exported file announces: its first row, the length of its cache, and its bytes."""

    first: int
    length: int
    size: int


async def export_cache(service: Service, sessions: SessionRegistry, session_id: str, owner: str, request: Request) -> list[Buffer]:
    """The session's rows as safetensors: tensors as in `cached_tensors`, from row `first` on; `fingerprint`, `length` and `first` as
    metadata. Raises what `lock_session` raises, or Overloaded before anything is copied."""
    async with lock_session(sessions, session_id, owner, request) as session:
        if request.lease is not None:
            request.lease.add(session.cache.size)
        return await service.engine.run(request, session.cache.size, _file_of, session)


async def import_cache(service: Service, sessions: SessionRegistry, session_id: str, owner: str, request: Request) -> Session:
    """Replace the session's rows by those of an exported file. If that fails, the session keeps its rows.

    The file is decompressed only once its header fits the session, and its bytes and rows have room.

    Raises UnsupportedMediaType, MalformedBody, InvalidRequest, SessionConflict, TooLarge, Overloaded or OutOfMemory.
    """
    async with lock_session(sessions, session_id, owner, request) as session:
        received = request.size
        file = await service.engine.run(request, received, _announced_by, request, session.layer)
        if session.capacity is not None and file.length > session.capacity:
            raise TooLarge.where("", f"at most {session.capacity} rows (capacity)", str(file.length))
        if file.size > service.wire_limits.max_layer_bytes:
            raise TooLarge.where("", f"a file of at most {service.wire_limits.max_layer_bytes} bytes (max_layer_bytes)", str(file.size))
        if request.lease is not None:
            request.lease.add(max(0, file.size - received))
        cache = KeyValueCache(session.layer.spec, sessions.pool, owner)
        try:
            cache.begin(file.first, file.length)
            cache.largest_row = math.inf  # unknown, so its steps share no batch
            await sessions.reserve(cache, file.length)
            await service.engine.run(request, file.size, _write_rows, request, session.layer, file, cache)
            session.cache, cache = cache, session.cache
        finally:
            cache.close()
    return session


def _file_of(session: Session) -> list[Buffer]:
    cache, first = session.cache, session.cache.first
    arrays = {name: numpy_of((x[0] if cache.cached[name].shared else x).cpu()) for name, x in cache.joined(first).items()}
    metadata = {"fingerprint": session.layer.fingerprint, "length": str(cache.length), "first": str(first)}
    return write_tensors(arrays, metadata)


def _announced_by(request: Request, layer: LoadedLayer) -> CacheFile:
    """What the header of an exported file announces, checked against the layer. The rest of the body stays compressed."""
    if request.codec is not FILE_CODEC:
        expected = f"a body of type {SAFETENSORS}, as GET of the cache returns it"
        raise UnsupportedMediaType.where("", expected, "another Content-Type, or none")
    request.body = body = request.take_body()  # joined
    entries, metadata, size = read_header(partial(unpack_start, body, request.coding))
    if (fingerprint := metadata.get("fingerprint")) != layer.fingerprint:
        expected = f'the cache of a layer with the fingerprint of "{layer.name}", {layer.fingerprint}'
        raise SessionConflict.where("/__metadata__/fingerprint", expected, describe_value(fingerprint))
    length, first = _number(metadata, "length"), _number(metadata, "first")
    if first > length:
        raise MalformedBody.where("/__metadata__/first", f"at most {length}, the length", str(first))
    expected_tensors, shapes = cached_tensors(layer.spec), {entry.name: entry.shape for entry in entries}
    for name in shapes.keys() - expected_tensors.keys():
        raise InvalidRequest.where(f"/{name}", f"no tensors but {', '.join(expected_tensors)}", name)
    for name, (heads, width, _, shared, _) in expected_tensors.items():
        if name not in shapes:
            raise InvalidRequest.where(f"/{name}", "a tensor", "nothing")
        shape = (length - first, width) if shared else (heads, length - first, width)
        if shapes[name] != shape:
            raise InvalidRequest.where(f"/{name}", f"shape {list(shape)}", f"shape {list(shapes[name])}")
    return CacheFile(first, length, size)


def _write_rows(request: Request, layer: LoadedLayer, file: CacheFile, cache: KeyValueCache) -> None:
    """Write the rows of a file with this header to a cache that has their pages. Raises MalformedBody, InvalidRequest or TooLarge."""
    arrays, _ = read_tensors(unpack_start(request.take_body(), request.coding, file.size + 1))  # a byte too many is refused
    rows = {}
    for name, (heads, width, dtype, *_) in cached_tensors(layer.spec).items():
        array = np.ascontiguousarray(arrays[name]).reshape(heads, file.length - file.first, width)
        rows[name] = cast(name, array, dtype).to(layer.attention.device)
    cache.write(file.first, rows)


def _number(metadata: dict[str, str], name: str) -> int:
    """A count of rows in the metadata."""
    text = metadata.get(name, "0" if name == "first" else "")
    if not (text.isascii() and text.isdecimal()) or len(text) > 10:
        raise MalformedBody.where(f"/__metadata__/{name}", "a number of rows", describe_value(text))
    return int(text)
