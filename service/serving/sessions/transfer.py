"""Exports the cache of a session as safetensors, and imports it again."""

import math
from functools import partial

import numpy as np
import torch

from service.attention.cache import WITHOUT_HEADS, KeyValueCache, cached_tensors
from service.errors import InvalidRequest, MalformedBody, SessionConflict, TooLarge, UnsupportedMediaType
from service.serving.casting import cast, numpy_of
from service.serving.layers.registry import LoadedLayer
from service.serving.requests import RawRequest
from service.serving.service import Service
from service.serving.sessions.registry import Session, SessionRegistry
from service.serving.sessions.turns import turn
from service.wire.codec import Buffer
from service.wire.compression import unpack
from service.wire.negotiation import CODECS, SAFETENSORS
from service.wire.problems import describe_value
from service.wire.safetensors import read_tensors, write_tensors


async def export_cache(service: Service, sessions: SessionRegistry, session_id: str, owner: str, raw: RawRequest) -> list[Buffer]:
    """The session's rows as safetensors: tensors as in `cached_tensors`, from row `first` on; `fingerprint`, `length` and `first` as
    metadata. Raises what `turn` raises."""
    async with turn(sessions, session_id, owner, raw) as session:
        return await service.engine.run(raw, session.cache.size, _file_of, session)


async def import_cache(service: Service, sessions: SessionRegistry, session_id: str, owner: str, raw: RawRequest) -> Session:
    """Replace the session's rows by those of an exported file. If that fails, the session keeps its rows.

    Raises UnsupportedMediaType, MalformedBody, InvalidRequest, SessionConflict, TooLarge or OutOfMemory.
    """
    async with turn(sessions, session_id, owner, raw) as session:
        first, length, rows = await service.engine.run(raw, raw.size, _rows_of, raw, session.layer, service.wire_limits.layer_bytes)
        if session.capacity is not None and length > session.capacity:
            raise TooLarge.where("", f"at most {session.capacity} rows (capacity)", str(length))
        cache = KeyValueCache(session.layer.spec, sessions.pool, owner)
        try:
            cache.begin(first, length)
            cache.largest_row = math.inf  # unknown, so its steps share no batch
            sessions.reserve(cache, length)
            await service.engine.codecs.run(partial(cache.write, first, rows), cache.size, owner)
            session.cache, cache = cache, session.cache
        finally:
            cache.close()
    return session


def _file_of(session: Session) -> list[Buffer]:
    cache, first = session.cache, session.cache.first
    arrays = {name: numpy_of((x[0] if name in WITHOUT_HEADS else x).cpu()) for name, x in cache.joined(first).items()}
    metadata = {"fingerprint": session.layer.fingerprint, "length": str(cache.length), "first": str(first)}
    return write_tensors(arrays, metadata)


def _rows_of(raw: RawRequest, layer: LoadedLayer, limit: int) -> tuple[int, int, dict[str, torch.Tensor]]:
    """The first row of a file, the length of its cache, and its tensors [heads, rows, width]."""
    if raw.codec is not CODECS[SAFETENSORS]:
        expected = f"a body of type {SAFETENSORS}, as GET of the cache returns it"
        raise UnsupportedMediaType.where("", expected, "another Content-Type, or none")
    arrays, metadata = read_tensors(unpack(raw.take_body(), raw.coding, limit))
    if (fingerprint := metadata.get("fingerprint")) != layer.fingerprint:
        expected = f'the cache of a layer with the fingerprint of "{layer.name}", {layer.fingerprint}'
        raise SessionConflict.where("/__metadata__/fingerprint", expected, describe_value(fingerprint))
    length, first = _number(metadata, "length"), _number(metadata, "first")
    if first > length:
        raise MalformedBody.where("/__metadata__/first", f"at most {length}, the length", str(first))
    expected_tensors, tensors = cached_tensors(layer.spec), {}
    for name in arrays.keys() - expected_tensors.keys():
        raise InvalidRequest.where(f"/{name}", f"no tensors but {', '.join(expected_tensors)}", name)
    for name, (heads, width, dtype) in expected_tensors.items():
        if name not in arrays:
            raise InvalidRequest.where(f"/{name}", "a tensor", "nothing")
        shape = (length - first, width) if name in WITHOUT_HEADS else (heads, length - first, width)
        if arrays[name].shape != shape:
            raise InvalidRequest.where(f"/{name}", f"shape {list(shape)}", f"shape {list(arrays[name].shape)}")
        array = np.ascontiguousarray(arrays[name]).reshape(heads, length - first, width)
        tensors[name] = cast(name, array, dtype).to(layer.attention.device)
    return first, length, tensors


def _number(metadata: dict[str, str], name: str) -> int:
    """A count of rows in the metadata."""
    text = metadata.get(name, "0" if name == "first" else "")
    if not (text.isascii() and text.isdecimal()) or len(text) > 10:
        raise MalformedBody.where(f"/__metadata__/{name}", "a number of rows", describe_value(text))
    return int(text)
