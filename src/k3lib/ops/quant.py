"""Number formats of quantized weights: MXFP4, NVFP4, block-scaled FP8 and MXFP8.

Shapes: `...` any leading dims (experts, rows), O rows (outputs), I columns (inputs), one scale per
group of G columns (32 for MXFP4 and MXFP8, 16 for NVFP4) or per tile of 128 by 128 (FP8). Packed
FP4 holds column 2j in the low nibble of byte j and column 2j + 1 in the high one. A nibble is
E2M1: sign * 8 + index into 0, 0.5, 1, 1.5, 2, 3, 4, 6. A scale byte s of the MX formats is E8M0:
2^(s - 127), 255 is NaN.

Decoders check shapes and dtypes, never values: they run inside other ops and wait for no device.
Weights are checked once, when they are loaded, with `check_mxfp4`. Encoders are tools: they look
at values and may wait.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from k3lib.errors import CheckpointError, ConfigError

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E2M1_MAX = 6.0
_E4M3_MAX = 448.0
_E4M3_SMALLEST = 2.0**-9
_E8M0_BIAS = 127
_E8M0_NAN = 255
_MX_GROUP = 32
_NV_GROUP = 16
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def mxfp4_encode(w: Tensor) -> tuple[Tensor, Tensor]:
    """Encode weights as MXFP4.

    The rule of compressed-tensors (spec/model.md 2.2): exponent = floor(log2(amax)) - 2, one more
    if the mantissa of amax is at least 1.75; an all-zero group has scale byte 0; nearest magnitude,
    ties to the even code. A negative value that rounds to zero keeps its sign, -0.0 does not.

    Args:
        w: `[..., I]` floating, I a multiple of 32, magnitudes below 1.75 * 2^127.

    Returns:
        packed `[..., I / 2]` uint8 and scale `[..., I / 32]` uint8.

    Raises:
        ConfigError: for another shape or dtype, or for values outside the range.
    """
    groups = _groups("mxfp4_encode: w", w, _MX_GROUP)
    amax = groups.abs().amax(-1)
    limit = 1.75 * 2.0**127  # from here on amax itself would decode to 2^128
    if not bool((amax < limit).all()):
        found = w.abs().max().item()
        raise ConfigError(f"mxfp4_encode: w must be finite with magnitudes below {limit}, got {found}")
    mantissa, exponent = torch.frexp(amax)  # mantissa in [0.5, 1)
    exponent = (exponent - 3 + (mantissa >= 0.875).int()).clamp_(min=-_E8M0_BIAS)
    exponent = exponent.masked_fill_(amax == 0, -_E8M0_BIAS)
    codes = _e2m1_codes(groups * _power_of_two(-exponent)[..., None])
    return _pack(codes).flatten(-2), (exponent + _E8M0_BIAS).to(torch.uint8)


def mxfp4_decode(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode MXFP4: E2M1 * 2^(scale - 127), exactly (spec/model.md 2.2).

    Silent by design about scale byte 255 (the group is NaN) and about values beyond the range of
    `dtype` (they are infinite): `check_mxfp4` reports both when weights are loaded.

    Args:
        packed: `[..., I / 2]` uint8.
        scale: `[..., I / 32]` uint8.
        dtype: bfloat16, float32 or float64; float16 is rounded once.

    Returns:
        `[..., I]` in `dtype`.

    Raises:
        ConfigError: for shapes or dtypes that do not fit each other.
    """
    _require_fp4("mxfp4_decode", packed, scale, _MX_GROUP, torch.uint8)
    _require_float("mxfp4_decode", dtype)
    # float16 has no room for the scales of values that it can hold
    inner = torch.float32 if dtype == torch.float16 else dtype
    values = _unpack(packed, _MX_GROUP, inner).mul_(_e8m0(scale).to(inner)[..., None])
    return values.flatten(-2).to(dtype)


def check_mxfp4(name: str, packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Refuse stored MXFP4 that decodes to NaN, or to infinities in `dtype`.

    Cheap unless a scale byte is large enough to overflow (253 or more for bfloat16 and float32).

    Args:
        name: of the tensor, for the message.
        packed: `[..., I / 2]` uint8.
        scale: `[..., I / 32]` uint8.
        dtype: the dtype that the weights will be decoded to.

    Raises:
        CheckpointError: naming the tensor, with the number of bad entries and the first index.
    """
    problem = _fp4_problem(packed, scale, _MX_GROUP, torch.uint8)
    if problem is not None:
        raise CheckpointError(f"{name}: {problem}")
    if mxfp4_is_safe(scale, dtype):
        return
    first_risky = _first_risky_scale(dtype)
    problems = []
    is_nan = scale == _E8M0_NAN
    if bool(is_nan.any()):
        where = is_nan.nonzero()
        problems.append(
            f"needs scale bytes below 255 (255 is NaN), got {len(where)} of 255, first at {where[0].tolist()}"
        )
    risky = ((scale >= first_risky) & ~is_nan).nonzero()
    chosen = tuple(risky.unbind(-1))
    bytes_ = _split(packed, _MX_GROUP // 2)[chosen]
    overflow = mxfp4_decode(bytes_, scale[chosen][..., None], dtype).isinf().nonzero()
    if len(overflow):
        row, column = overflow[0].tolist()
        *lead, group = risky[row].tolist()
        problems.append(
            f"needs values within {dtype}, got {len(overflow)} that overflow, "
            f"first at {[*lead, group * _MX_GROUP + column]} "
            f"with scale byte {int(scale[chosen][row])}"
        )
    if problems:
        raise CheckpointError(f"{name}: " + "; ".join(problems))


def mxfp4_is_safe(scale: Tensor, dtype: torch.dtype) -> bool:
    """Whether no code beside these scale bytes can decode to NaN, or to an infinity in `dtype`.

    Args:
        scale: uint8.
        dtype: the dtype that the weights will be decoded to.
    """
    _require_float("mxfp4_is_safe", dtype)
    return scale.numel() == 0 or int(scale.max()) < _first_risky_scale(dtype)


def _first_risky_scale(dtype: torch.dtype) -> int:
    """The smallest scale byte with which a code may overflow `dtype`, or 255."""
    safe = math.floor(math.log2(torch.finfo(dtype).max / _E2M1_MAX)) + _E8M0_BIAS
    return min(safe + 1, _E8M0_NAN)


def nvfp4_encode(w: Tensor, *, amax: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Encode weights as NVFP4 with the ordinary two-level scales.

    With A the amax of the tensor, scale_2 = A / (448 * 6), and scale = amax of the group /
    (6 * scale_2) rounded to E4M3, at least 2^-9 (spec/model.md 2.3). Equal to compressed-tensors
    byte for byte, whose `weight_global_scale` is 1 / scale_2.

    Args:
        w: `[..., I]` floating, I a multiple of 16, finite in float32.
        amax: `[]`, the A to use, at least the largest magnitude of `w`; matrices that are encoded
            with one A share their scale_2 (w1 and w3 of an expert must).

    Returns:
        packed `[..., I / 2]` uint8, scale `[..., I / 16]` float8_e4m3fn and scale_2 `[]` float32.

    Raises:
        ConfigError: for another shape or dtype, for values that are not finite, or an `amax` that
            is too small.
    """
    groups = _groups("nvfp4_encode: w", w, _NV_GROUP)
    group_amax = groups.abs().amax(-1).float()
    found = group_amax.max() if group_amax.numel() else group_amax.new_zeros(())
    if not bool(found.isfinite()):
        raise ConfigError(f"nvfp4_encode: w must be finite in float32, got {found.item()}")
    top = found if amax is None else amax.reshape(()).to(found)
    if not bool((top >= found) & top.isfinite()):
        raise ConfigError(
            f"nvfp4_encode: amax={top.item()} must be finite and at least the largest magnitude of w, {found.item()}"
        )
    inverse = (_E4M3_MAX * _E2M1_MAX / top).clamp_(max=torch.finfo(torch.float32).max)
    inverse = torch.where(top == 0, 1.0, inverse)
    # smallest E4M3 rather than 0: such a group is all zero, or tiny next to the rest of the tensor
    scale = (group_amax / _E2M1_MAX * inverse).clamp_(_E4M3_SMALLEST, _E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn)
    step = (scale.float() / inverse).to(groups.dtype)
    codes = _e2m1_codes(groups / step[..., None])
    return _pack(codes).flatten(-2), scale, 1.0 / inverse


def nvfp4_decode(packed: Tensor, scale: Tensor, scale_2: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode NVFP4: E2M1 * scale * scale_2, in float32, then one rounding to `dtype`.

    The first product is exact. float64 is computed in float64 (spec/model.md 2.3).

    Args:
        packed: `[..., O, I / 2]` uint8.
        scale: `[..., O, I / 16]` float8_e4m3fn.
        scale_2: float32, one element, or one for each index of the first leading dims (`[E]`).
        dtype: of the result.

    Returns:
        `[..., O, I]` in `dtype`.

    Raises:
        ConfigError: for shapes or dtypes that do not fit each other.
    """
    _require_fp4("nvfp4_decode", packed, scale, _NV_GROUP, torch.float8_e4m3fn)
    _require_float("nvfp4_decode", dtype)
    lead = tuple(packed.shape[:-2])
    if scale_2.numel() == 1:
        scale_2 = scale_2.reshape(())
    if scale_2.dtype != torch.float32 or tuple(scale_2.shape) != lead[: scale_2.ndim]:
        raise ConfigError(
            f"nvfp4_decode: scale_2 must be float32, one element or the first of the leading "
            f"dims {list(lead)}, got {scale_2.dtype} {list(scale_2.shape)}"
        )
    inner = torch.float64 if dtype == torch.float64 else torch.float32
    values = _unpack(packed, _NV_GROUP, inner).mul_(scale.to(inner)[..., None])
    trailing = (1,) * (values.ndim - scale_2.ndim)
    return values.mul_(scale_2.to(inner).reshape(*scale_2.shape, *trailing)).flatten(-2).to(dtype)


def mxfp4_to_nvfp4(*pairs: tuple[Tensor, Tensor]) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Recode MXFP4 as NVFP4 in closed form, without going through the values.

    With k = scale byte - 127 and k_max its maximum over the groups of all pairs that are not zero:
    scale_2 = 2^(k_max - 8) and scale = 2^(k - k_max + 8), twice for each group of 32; nibbles stay.
    Exact for k_max - k <= 17. E4M3 ends at 2^-9: groups further down are rounded to multiples of
    2^-9 * scale_2, with an error of at most a quarter of that (spec/model.md 2.3).

    Args:
        pairs: packed `[..., I / 2]` uint8 and scale `[..., I / 32]` uint8 of the matrices that
            share one scale_2, such as w1 and w3 of an expert.

    Returns:
        for each pair packed `[..., I / 2]` uint8 and scale `[..., I / 16]` float8_e4m3fn, and the
        common scale_2 `[]` float32.

    Raises:
        ConfigError: for no pairs, for shapes or dtypes that do not fit, or for scale byte 255.
    """
    if not pairs:
        raise ConfigError("mxfp4_to_nvfp4: needs at least one pair, got 0")
    tops = []
    for packed, scale in pairs:
        _require_fp4("mxfp4_to_nvfp4", packed, scale, _MX_GROUP, torch.uint8)
        if num_nan := int((scale == _E8M0_NAN).sum()):
            raise ConfigError(f"mxfp4_to_nvfp4: needs scale bytes below 255, got {num_nan} of 255")
        tops.append(scale[_is_live(packed)].flatten())
    live = torch.cat(tops)
    k_max = int(live.max()) - _E8M0_BIAS if live.numel() else 0
    recoded = [_recode(packed, scale, k_max) for packed, scale in pairs]
    return recoded, torch.tensor(math.ldexp(1.0, k_max - 8), device=live.device)


def fp8_block_encode(w: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """Encode a matrix as E4M3 with one scale, amax / 448, per tile of `block` by `block`.

    Args:
        w: `[O, I]` floating, finite in float32. The last tiles may be partial.
        block: edge of a tile.

    Returns:
        codes `[O, I]` float8_e4m3fn and scale `[ceil(O / block), ceil(I / block)]` float32.

    Raises:
        ConfigError: for another shape or dtype, or for values that are not finite.
    """
    if w.ndim != 2:
        raise ConfigError(f"fp8_block_encode: w must have 2 dims, got {w.ndim}")
    _require_float("fp8_block_encode", w.dtype)
    values = _compute(w)
    rows, columns = w.shape
    padded = F.pad(values.abs(), (0, -columns % block, 0, -rows % block))
    tiles = padded.view(-(-rows // block), block, -(-columns // block), block)
    amax = tiles.amax((1, 3)).float()
    if not bool(amax.isfinite().all()):
        raise ConfigError(f"fp8_block_encode: w must be finite in float32, got {amax.max().item()}")
    scale = (amax / _E4M3_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
    scale = scale.masked_fill_(amax == 0, 1.0)
    scaled = values / _expand_tiles(scale, rows, columns, block)
    return scaled.clamp_(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), scale


def fp8_block_decode(w: Tensor, scale: Tensor, dtype: torch.dtype, *, block: int = 128) -> Tensor:
    """Decode block-scaled FP8: w * scale[o // block, i // block] (spec/model.md 2.3).

    Computed in float32 (float64 for float64), then one rounding to `dtype`.

    Args:
        w: `[O, I]` float8_e4m3fn.
        scale: `[ceil(O / block), ceil(I / block)]` float32, or with dims of size 1 in places 1
            and 3 as ModelOpt stores it.
        dtype: of the result.
        block: edge of a tile.

    Returns:
        `[O, I]` in `dtype`.

    Raises:
        ConfigError: for shapes or dtypes that do not fit each other.
    """
    if w.ndim != 2 or w.dtype != torch.float8_e4m3fn:
        raise ConfigError(f"fp8_block_decode: w must be float8_e4m3fn with 2 dims, got {w.dtype} {list(w.shape)}")
    _require_float("fp8_block_decode", dtype)
    rows, columns = w.shape
    tiles = (-(-rows // block), -(-columns // block))
    shapes = (tiles, (tiles[0], 1, tiles[1], 1))
    if scale.dtype != torch.float32 or tuple(scale.shape) not in shapes:
        raise ConfigError(
            f"fp8_block_decode: scale must be float32 {list(tiles)} or {list(shapes[1])} for w "
            f"{list(w.shape)}, got {scale.dtype} {list(scale.shape)}"
        )
    inner = torch.float64 if dtype == torch.float64 else torch.float32
    factors = _expand_tiles(scale.reshape(tiles).to(inner), rows, columns, block)
    return w.to(inner).mul_(factors).to(dtype)


def mxfp8_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode activations as MXFP8: E4M3 with an E8M0 scale per 32 columns.

    The rule of the OCP MX specification 1.0, section 6.3: exponent = floor(log2(amax)) - 8, values
    saturate at 448. An all-zero group has scale byte 0; a group with a value that is not finite
    has 255 and decodes to NaN. Reads no values on the host.

    Args:
        x: `[..., I]` floating, I a multiple of 32.

    Returns:
        codes `[..., I]` float8_e4m3fn and scale `[..., I / 32]` uint8.

    Raises:
        ConfigError: for another shape or dtype.
    """
    groups = _groups("mxfp8_encode: x", x, _MX_GROUP)
    amax = groups.abs().amax(-1)
    exponent = (torch.frexp(amax)[1] - 9).clamp_(-_E8M0_BIAS, _E8M0_BIAS - 1)
    exponent = exponent.masked_fill_(amax == 0, -_E8M0_BIAS)
    is_bad = ~amax.isfinite()
    exponent = exponent.masked_fill_(is_bad, 0)
    scaled = (groups * _power_of_two(-exponent)[..., None]).clamp_(-_E4M3_MAX, _E4M3_MAX)
    scale = (exponent + _E8M0_BIAS).masked_fill_(is_bad, _E8M0_NAN).to(torch.uint8)
    return scaled.to(torch.float8_e4m3fn).flatten(-2), scale


def mxfp8_decode(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode MXFP8: E4M3 * 2^(scale - 127).

    Args:
        codes: `[..., I]` float8_e4m3fn.
        scale: `[..., I / 32]` uint8.
        dtype: of the result.

    Returns:
        `[..., I]` in `dtype`.

    Raises:
        ConfigError: for shapes or dtypes that do not fit each other.
    """
    problem = _grouped_problem("codes", codes, torch.float8_e4m3fn, scale, torch.uint8, _MX_GROUP)
    if problem is not None:
        raise ConfigError(f"mxfp8_decode: {problem}")
    _require_float("mxfp8_decode", dtype)
    inner = torch.float64 if dtype == torch.float64 else torch.float32
    groups = _split(codes.to(inner), _MX_GROUP)
    return groups.mul_(_e8m0(scale).to(inner)[..., None]).flatten(-2).to(dtype)


def _require_float(op: str, dtype: torch.dtype) -> None:
    if dtype not in _FLOATS:
        raise ConfigError(f"{op}: needs bfloat16, float16, float32 or float64, got {str(dtype)[6:]}")


def _require_fp4(op: str, packed: Tensor, scale: Tensor, group: int, scale_dtype: torch.dtype) -> None:
    problem = _fp4_problem(packed, scale, group, scale_dtype)
    if problem is not None:
        raise ConfigError(f"{op}: {problem}")


def _fp4_problem(packed: Tensor, scale: Tensor, group: int, scale_dtype: torch.dtype) -> str | None:
    return _grouped_problem("packed", packed, torch.uint8, scale, scale_dtype, group // 2)


def _grouped_problem(
    name: str,
    codes: Tensor,
    dtype: torch.dtype,
    scale: Tensor,
    scale_dtype: torch.dtype,
    group: int,
) -> str | None:
    """Say what keeps `codes` from having one scale per `group` entries of its last dim, if any."""
    if codes.dtype != dtype:
        return f"{name} must be {dtype}, got {codes.dtype}"
    if scale.dtype != scale_dtype:
        return f"scale must be {scale_dtype}, got {scale.dtype}"
    if codes.ndim == 0 or codes.shape[-1] % group:
        return f"{name} must have a last dim that is a multiple of {group}, got {list(codes.shape)}"
    expected = [*codes.shape[:-1], codes.shape[-1] // group]
    if list(scale.shape) != expected:
        return f"scale must be {expected} for {name} {list(codes.shape)}, got {list(scale.shape)}"
    return None


def _compute(w: Tensor) -> Tensor:
    return w if w.dtype == torch.float64 else w.float()


def _groups(name: str, w: Tensor, group: int) -> Tensor:
    """Split the last dim: `[..., I / group, group]` in the dtype to compute in."""
    _require_float(name, w.dtype)
    if w.ndim == 0 or w.shape[-1] % group:
        raise ConfigError(f"{name} must have a last dim that is a multiple of {group}, got {list(w.shape)}")
    return _split(_compute(w), group)


def _split(x: Tensor, group: int) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in float32 for -126 <= exponent <= 127, without a rounded `pow`."""
    return ((exponent.int() + 127) << 23).view(torch.float32)


def _e8m0(scale: Tensor) -> Tensor:
    """Return 2^(scale - 127) in float32; byte 0 is the subnormal 2^-127, 255 is NaN."""
    bits = (scale.int() << 23).clamp_(min=1 << 22)
    return bits.view(torch.float32).masked_fill_(scale == _E8M0_NAN, math.nan)


def _e2m1_codes(values: Tensor) -> Tensor:
    """Round to the nearest E2M1, ties to the even code, saturating: uint8 codes of that shape."""
    edges = torch.tensor(_MIDPOINTS, dtype=values.dtype, device=values.device)
    # bucketize puts a midpoint below; above an odd code it belongs to the even one above
    edges[1::2] = torch.nextafter(edges[1::2], edges.new_zeros(()))
    codes = torch.bucketize(values.abs(), edges, out_int32=True).to(torch.uint8)
    return codes | ((values < 0).to(torch.uint8) << 3)


def _pack(codes: Tensor) -> Tensor:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


@functools.cache
def _pair_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the two values of every packed byte, `[256, 2]`; kept to avoid a copy per call."""
    pairs = [(_VALUES[byte & 15], _VALUES[byte >> 4]) for byte in range(256)]
    return torch.tensor(pairs, dtype=dtype, device=device)


def _unpack(packed: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Return the unscaled values, `[..., I / group, group]`, in new memory."""
    table = _pair_table(dtype, packed.device)
    pairs = table.index_select(0, packed.int().reshape(-1))
    return pairs.view(*packed.shape[:-1], packed.shape[-1] * 2 // group, group)


def _is_live(packed: Tensor) -> Tensor:
    """Say for each group of 32 whether it has a value other than zero."""
    magnitudes = _split(packed, _MX_GROUP // 2) & 0x77
    return magnitudes.ne(0).any(-1)


def _recode(packed: Tensor, scale: Tensor, k_max: int) -> tuple[Tensor, Tensor]:
    """Turn one MXFP4 pair into the NVFP4 pair for `scale_2 = 2^(k_max - 8)`."""
    exponent = scale.int() - (_E8M0_BIAS + k_max - 8)
    is_far = (exponent < -9) & _is_live(packed)
    new = _split(packed, _MX_GROUP // 2).clone()
    # the scale stops at 2^-9 and the values shrink instead; 6 * 2^-126 rounds to zero like all below
    shift = _power_of_two((exponent[is_far] + 9).clamp_(min=-126))
    values = _unpack(new[is_far], _MX_GROUP, torch.float32).squeeze(-2)
    new[is_far] = _pack(_e2m1_codes(values * shift[:, None]))
    # the upper limit is for groups of zeros, whose scale does not matter
    scales = _power_of_two(exponent.clamp(-9, 8)).to(torch.float8_e4m3fn)
    return new.flatten(-2), scales.repeat_interleave(2, dim=-1)


def _expand_tiles(scale: Tensor, rows: int, columns: int, block: int) -> Tensor:
    """Repeat one value per tile to one per element, `[rows, columns]`."""
    wide = scale.repeat_interleave(block, dim=1)[:, :columns]
    return wide.repeat_interleave(block, dim=0)[:rows]
