"""Encoding and decoding of IDs by the million, in numpy arrays.

Needs numpy: ``pip install numpy``. Nothing else in shardids imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from shardids.errors import BadArgument, ShardidsError
from shardids.ids.layout import Layout
from shardids.ids.text import checked_integer

try:
    import numpy as np
    import numpy.typing as npt
except ImportError as error:
    raise ImportError("shardids.ids.arrays needs numpy: pip install numpy") from error

_PIECE: Final = 8192
"""How many IDs are decoded at a time: some 300 kB in all."""

_Integers: TypeAlias = npt.NDArray[np.integer]
_Bits: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodedArrays:
    """The parts of an array's IDs, in arrays of the same shape.

    ``time`` is UTC as ``datetime64[ms]``; ``ms`` counts from the layout's epoch, as int64.
    ``shard`` and ``sequence`` are int32, which holds every width that a layout allows.
    """

    time: npt.NDArray[np.datetime64]
    ms: npt.NDArray[np.int64]
    shard: npt.NDArray[np.int32]
    sequence: npt.NDArray[np.int32]


def decode_array(layout: Layout, ids: npt.ArrayLike, *, old_ids_below: int | None = None) -> DecodedArrays:
    """Return the parts of many IDs, each in its signed or its unsigned reading.

    Takes an array of any integer type, or what numpy makes one of. ``old_ids_below`` is for clusters with
    adopted tables (``cluster.old_ids.rules.below``): IDs below it have no parts, so select the others first.

    Raises:
        BadArgument: not integers, or an ID that :meth:`Layout.decode` refuses, or an old one; the message
            names the first such and its index.
    """
    given = _integers("IDs", ids)
    bits = _bits(given)
    _check(given, bits, 1 << layout.id_bits, layout.decode)
    if old_ids_below is not None:
        _refuse_old(given, bits, checked_integer("old_ids_below", old_ids_below, 1, (1 << 63) - 1))
    flat = bits.reshape(-1)
    ms, time = np.empty(flat.size, np.int64), np.empty(flat.size, np.int64)
    shard, sequence = np.empty(flat.size, np.int32), np.empty(flat.size, np.int32)
    # Piece by piece, so that what one step leaves is still in the processor's cache for the next.
    for start in range(0, flat.size, _PIECE):
        piece = slice(start, start + _PIECE)
        rest = flat[piece] >> layout.sequence_bits
        np.bitwise_and(flat[piece], layout.sequence_limit - 1, out=sequence[piece], casting="unsafe")
        np.bitwise_and(rest, layout.shard_limit - 1, out=shard[piece], casting="unsafe")
        np.right_shift(rest, layout.shard_bits, out=ms[piece].view(np.uint64))
        np.add(ms[piece], layout.epoch_ms, out=time[piece])
    return DecodedArrays(
        time=time.view("datetime64[ms]").reshape(bits.shape),
        ms=ms.reshape(bits.shape),
        shard=shard.reshape(bits.shape),
        sequence=sequence.reshape(bits.shape),
    )


def encode_array(
    layout: Layout, *, ms: npt.ArrayLike, shard: npt.ArrayLike, sequence: npt.ArrayLike = 0
) -> npt.NDArray[np.int64]:
    """Return the IDs of many times, shards and sequence numbers, in their signed reading.

    ``ms`` counts from the layout's epoch. Each argument is an array of any integer type or a
    single number; they are broadcast against each other.

    Raises:
        BadArgument: not integers, a time before the epoch, a shard or a sequence number out of
            range (the message names the first such and its index), or shapes that don't fit.
        TimeExhausted: a time past the last that the layout can hold.
    """
    given_ms = _integers("ms", ms)
    given_shard = _integers("shard", shard)
    given_sequence = _integers("sequence", sequence)
    ms_bits, shard_bits, sequence_bits = map(_bits, (given_ms, given_shard, given_sequence))
    _check(given_ms, ms_bits, 1 << layout.time_bits, lambda n: layout.encode(ms=n, shard=0))
    _check(given_shard, shard_bits, layout.shard_limit, lambda n: layout.encode(ms=0, shard=n))
    _check(
        given_sequence,
        sequence_bits,
        layout.sequence_limit,
        lambda n: layout.encode(ms=0, shard=0, sequence=n),
    )
    try:
        ids = np.empty(np.broadcast_shapes(ms_bits.shape, shard_bits.shape, sequence_bits.shape), np.uint64)
    except ValueError as error:
        raise BadArgument(f"ms, shard and sequence differ in shape: {error}") from None
    np.left_shift(ms_bits, layout.shard_bits + layout.sequence_bits, out=ids)
    ids |= shard_bits << layout.sequence_bits
    ids |= sequence_bits
    return ids.view(np.int64)


def _integers(what: str, values: npt.ArrayLike) -> _Integers:
    array = np.asarray(values)
    if not array.size and not isinstance(values, np.ndarray):
        return array.astype(np.int64)  # numpy makes floats of an empty list
    if array.dtype.kind not in "iu":
        raise BadArgument(f"{what} must be integers of at most 64 bits, not {array.dtype}")
    return array


def _bits(array: _Integers) -> _Bits:
    # Two's complement: a negative number becomes one of 2^63 or more, so that a single comparison
    # finds all that is out of range.
    wide = np.int64 if array.dtype.kind == "i" else np.uint64
    return array.astype(wide, copy=False).view(np.uint64)


def _refuse_old(given: _Integers, bits: _Bits, below: int) -> None:
    is_old = bits < below
    if is_old.any():
        first = np.unravel_index(int(np.argmax(is_old)), bits.shape)
        place = ", ".join(str(int(axis)) for axis in first)
        raise BadArgument(
            f"at index [{place}]: ID {int(given[first])} was issued before the cluster and has no parts",
            hint="Decode the others: ids[ids >= old_ids_below]",
        )


def _check(given: _Integers, bits: _Bits, limit: int, refuse: Callable[[int], object]) -> None:
    """Let ``refuse`` raise its error for the first of ``given`` whose ``bits`` reach ``limit``."""
    if not bits.size or int(bits.max()) < limit:
        return
    first = np.unravel_index(int(np.argmax(bits >= limit)), bits.shape)
    index = tuple(int(axis) for axis in first)
    try:
        refuse(int(given[index]))
    except ShardidsError as error:
        place = ", ".join(map(str, index))
        raise type(error)(f"at index [{place}]: {error.message}") from None
