"""What a draft's `config.json` says: geometry, taps, heads and rotary positions of the known families."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from k3lib.config import MLAConfig
from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MAX_BLOCK", "DraftConfig", "Family", "MarkovKind", "RopeConfig"]

MAX_BLOCK = 15  # draft tokens of a step: with the anchor, the widest step that decode kernels take

Family = Literal["inferact", "radixark", "dflash"]
MarkovKind = Literal["vanilla", "gated", "rnn"]

FAMILIES: dict[str, Family] = {
    "K3DSparkModel": "inferact",
    "DSparkDraftModel": "radixark",
    "DFlashDraftModel": "dflash",
}
_MODEL_TYPES = {"inferact": "k3_dspark", "radixark": "qwen3", "dflash": "qwen3"}
_KNOWN = "K3DSparkModel (Inferact), DSparkDraftModel (RadixArk), DFlashDraftModel"
_HEADS: tuple[MarkovKind, ...] = ("vanilla", "gated", "rnn")
_HOMES = ("dspark_config", "dflash_config")
_PREFIXED = {"mask_token_id": "dspark_noise_token_id"}  # other keys are prefixed with "dspark_"
# what other drafts have and these do not: key and the values that change nothing
_FIXED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "mla_use_nope": (False,),
    "mla_use_output_gate": (False,),
    "attention_mode": ("gqa",),
    "projector_type": ("dspark", "dflash"),
    "dspark_backbone_conv_enabled": (False,),
    "hybrid_context_fusion": (False,),
    "shift_label": (False,),
    "causal_head": (False,),
    "use_swa": (False,),
    "quantization_config": (),
}
_ROPE_KEYS = frozenset(
    {
        "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "attention_factor",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions, stretched by YaRN if `factor` is above 1.

    Attributes:
        theta: base of the frequencies.
        factor: how many times longer than `original_length` contexts may be; 1 = plain rotary positions.
        original_length: length that the frequencies were made for.
        beta_fast, beta_slow: turns within `original_length` above which a frequency stays, below which it is divided.
        mscale, mscale_all_dim: exponents of DeepSeek's form; 0 = not given.
        attention_factor: multiplier of cos and sin; None = from the factor.
    """

    theta: float
    factor: float = 1.0
    original_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if not self.theta > 1:
            raise ConfigError(f"draft config: rope_theta must be > 1, got {self.theta}")
        if not self.factor >= 1:
            raise ConfigError(f"draft config: the factor of YaRN must be >= 1, got {self.factor}")
        if self.factor > 1 and self.original_length < 1:
            raise ConfigError(
                f"draft config: YaRN by {self.factor} needs original_max_position_embeddings >= 1, got "
                f"{self.original_length}"
            )

    @property
    def multiplier(self) -> float:
        """Multiplier of cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def softmax_factor(self) -> float:
        """Multiplier of the softmax scale of latent attention."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2

    def frequencies(self, dim: int) -> list[float]:
        """Angle per position of each of the `dim / 2` pairs."""
        plain = [self.theta ** (-2 * i / dim) for i in range(dim // 2)]
        if self.factor == 1:
            return plain

        def pair_of(turns: float) -> float:
            return dim * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low = max(math.floor(pair_of(self.beta_fast)), 0)
        high = min(math.ceil(pair_of(self.beta_slow)), dim - 1)
        width = max(high - low, 0.001)
        divided = [min(max((i - low) / width, 0.0), 1.0) for i in range(dim // 2)]
        return [f * (1 - part) + f / self.factor * part for f, part in zip(plain, divided, strict=True)]


def _mscale(factor: float, exponent: float) -> float:
    return 0.1 * exponent * math.log(factor) + 1 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """A block draft: geometry, taps, heads. Model specification, section 7; serving specification, section 4.

    The public drafts of K3, both with 5 layers, MLP 14336, Markov rank 256 and a confidence head:

        Inferact/Kimi-K3-DSpark  64 latent heads, taps "prefix" after layers 2, 23, 47, 71, 89, mask 163837
        RadixArk/Kimi-K3-DSpark  64 heads over 16 KV heads of 64, "mixture" after 7, 23, 51, 67, 83, mask 163824

    Attributes:
        family: "inferact" (latent attention), "radixark" (grouped heads), or "dflash": grouped heads without Markov
            and confidence head.
        hidden_size: of the draft; embedding and head are the target's, so it is the target's, too.
        num_heads, num_kv_heads, head_dim: of attention; `head_dim` is that of queries and keys.
        mla: geometry of latent attention; None = grouped heads.
        block_size: tokens of a draft.
        mask_token_id: what stands for the tokens to be found.
        feature_layers: 0-based target layers whose output is tapped.
        feature_kind: "prefix" or "mixture"; a property of the family.
        target_hidden_size: width of one tap.
        target_layers: layers of the target that it was made for; None = not said.
        markov_rank: 0 = no Markov head.
        markov_head: form of that head.
        has_confidence_head: whether it estimates which tokens will be accepted.
        confidence_with_markov: whether that head looks at the previous token.
        sample_from_anchor: the row of the anchor predicts the first token; else its row is dropped, and the block has
            a row more.
        causal: for each layer whether a row of the block sees only rows in front of it; all see the whole context.
        rope: rotary positions.
    """

    family: Family
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mla: MLAConfig | None
    vocab_size: int
    norm_eps: float
    block_size: int
    mask_token_id: int
    feature_layers: tuple[int, ...]
    feature_kind: Literal["prefix", "mixture"]
    target_hidden_size: int
    target_layers: int | None
    markov_rank: int
    markov_head: MarkovKind
    has_confidence_head: bool
    confidence_with_markov: bool
    sample_from_anchor: bool
    causal: tuple[bool, ...]
    rope: RopeConfig

    @property
    def feature_width(self) -> int:
        """Values of the taps of one token."""
        return len(self.feature_layers) * self.target_hidden_size

    @property
    def rope_dim(self) -> int:
        """Values of a head that are rotated."""
        return self.head_dim if self.mla is None else self.mla.qk_rope_head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DraftConfig:
        """Read the `config.json` of a draft.

        Keys of the method stand at top level, under `dspark_config` or under `dflash_config`; with the prefix
        `dspark_` (the mask: `dspark_noise_token_id`) they win.

        Raises:
            ConfigError: another family, a key that is missing, contradicts another or has a bad value, or something
                that these drafts do not have. Names the key, and what was found and expected.
        """
        return _read(_Keys(config))


class _Keys:
    """Keys of a draft's configuration, wherever they stand."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.places: list[tuple[str, Mapping[str, Any]]] = [("", config)]
        for home in _HOMES:
            inner = config.get(home)
            if inner is None:
                continue
            if not hasattr(inner, "items"):
                raise ConfigError(f"draft config: {home} must be an object, got {inner!r}")
            self.places.append((f"{home}.", inner))

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - JSON
        """The value of a key: prefixed, else plain; None counts as absent."""
        for name in (_PREFIXED.get(key, f"dspark_{key}"), key):
            found = [(f"{home}{name}", part[name]) for home, part in self.places if part.get(name) is not None]
            for where, value in found[1:]:
                if value != found[0][1]:
                    raise ConfigError(f"draft config: {found[0][0]}={found[0][1]!r} contradicts {where}={value!r}")
            if found:
                return found[0][1]
        return default

    def need(self, key: str) -> Any:  # noqa: ANN401 - JSON
        value = self.get(key)
        if value is None:
            raise ConfigError(f"draft config: the key {key!r} is missing")
        return value

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.need(key) if default is None else self.get(key, default)
        if type(value) is not int or value < least:
            raise ConfigError(f"draft config: {key} must be an integer >= {least}, got {value!r}")
        return value

    def number(self, key: str) -> float:
        value = self.need(key)
        if type(value) not in (int, float) or not value > 0:
            raise ConfigError(f"draft config: {key} must be a number > 0, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"draft config: {key} must be true or false, got {value!r}")
        return value


def _family(c: _Keys) -> Family:
    found = c.get("architectures") or []
    name = found[0] if isinstance(found, (list, tuple)) and len(found) == 1 else found
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ConfigError(f"draft config: architectures={name!r} is no known draft; known are {_KNOWN}")
    kind = c.get("model_type", _MODEL_TYPES[family])
    if kind != _MODEL_TYPES[family]:
        raise ConfigError(
            f"draft config: model_type={kind!r} with architectures={name!r}; expected {_MODEL_TYPES[family]!r}"
        )
    for key, allowed in _FIXED.items():
        value = c.get(key)
        if value is not None and value not in allowed:
            expected = " or ".join(map(repr, allowed)) or "nothing"
            raise ConfigError(f"draft config: {key}={value!r} is not implemented for {name}; expected {expected}")
    return family


def _read(c: _Keys) -> DraftConfig:
    family = _family(c)
    hidden, heads, vocab = c.count("hidden_size"), c.count("num_attention_heads"), c.count("vocab_size")
    eps, layers = c.number("rms_norm_eps"), c.count("num_hidden_layers")
    if c.count("draft_vocab_size", vocab) != vocab:
        raise ConfigError(f"draft config: draft_vocab_size={c.get('draft_vocab_size')} differs from vocab_size={vocab}")
    mask = c.count("mask_token_id", least=0)
    if mask >= vocab:
        raise ConfigError(f"draft config: mask_token_id={mask} is outside the vocabulary 0..{vocab - 1}")
    kv_heads = c.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"draft config: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}")
    mla = _read_mla(c, hidden, heads, eps) if family == "inferact" else None
    head_dim = c.count("head_dim") if mla is None else mla.qk_head_dim
    rotated = head_dim if mla is None else mla.qk_rope_head_dim
    if rotated % 2:
        raise ConfigError(f"draft config: rotary positions need an even width, got {rotated}")
    taps, target_layers = _read_taps(c)
    rank, head = _read_markov(c, family)
    confidence = c.flag("enable_confidence_head", default=False)
    if confidence and family == "dflash":
        raise ConfigError("draft config: enable_confidence_head=True; a DFlash draft has no confidence head")
    return DraftConfig(
        family=family,
        hidden_size=hidden,
        intermediate_size=c.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mla=mla,
        vocab_size=vocab,
        norm_eps=eps,
        block_size=_read_block(c, family),
        mask_token_id=mask,
        feature_layers=taps,
        feature_kind="prefix" if family == "inferact" else "mixture",
        target_hidden_size=c.count("target_hidden_size", hidden),
        target_layers=target_layers,
        markov_rank=rank,
        markov_head=head,
        has_confidence_head=confidence,
        confidence_with_markov=confidence and c.flag("confidence_head_with_markov", default=True),
        sample_from_anchor=c.flag("sample_from_anchor", default=family != "dflash"),
        causal=_read_causal(c, layers),
        rope=_read_rope(c),
    )


def _read_mla(c: _Keys, hidden: int, heads: int, eps: float) -> MLAConfig:
    return MLAConfig(
        hidden_size=hidden,
        num_heads=heads,
        q_lora_rank=c.count("q_lora_rank"),
        kv_lora_rank=c.count("kv_lora_rank"),
        qk_nope_head_dim=c.count("qk_nope_head_dim"),
        qk_rope_head_dim=c.count("qk_rope_head_dim"),
        v_head_dim=c.count("v_head_dim"),
        output_gate=False,
        latent_norm_eps=eps,
    )


def _read_taps(c: _Keys) -> tuple[tuple[int, ...], int | None]:
    """Tapped layers, and the layers of the target if the file says."""
    ids = c.need("target_layer_ids")
    if not isinstance(ids, (list, tuple)) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise ConfigError(f"draft config: target_layer_ids must be a list of layers >= 0, not empty, got {ids!r}")
    if len(set(ids)) != len(ids):
        raise ConfigError(f"draft config: target_layer_ids={list(ids)} has a layer twice")
    total = c.get("target_num_hidden_layers")
    if total is None and c.get("num_target_layers") != len(ids):  # some files count the taps by this key
        total = c.get("num_target_layers")
    if total is not None and (type(total) is not int or max(ids) >= total):
        raise ConfigError(f"draft config: target_layer_ids={list(ids)} must lie in the target's {total!r} layers")
    return tuple(ids), total


def _read_markov(c: _Keys, family: Family) -> tuple[int, MarkovKind]:
    rank, kind = c.count("markov_rank", 0, least=0), c.get("markov_head_type", "vanilla")
    if family == "dflash":
        if rank:
            raise ConfigError(f"draft config: markov_rank={rank} with DFlashDraftModel, which has no Markov head")
        return 0, "vanilla"
    if not rank:
        raise ConfigError("draft config: markov_rank must be >= 1, got 0 or nothing; only DFlash drafts have no head")
    if kind not in _HEADS:
        raise ConfigError(f"draft config: markov_head_type={kind!r}; expected one of {', '.join(_HEADS)}")
    return rank, kind


def _read_block(c: _Keys, family: Family) -> int:
    # a DFlash file counts the anchor
    size = c.count("block_size", least=2) - 1 if family == "dflash" else c.count("block_size", 7)
    if size > MAX_BLOCK:
        raise ConfigError(f"draft config: block_size asks for {size} draft tokens a step, at most {MAX_BLOCK} fit")
    return size


def _read_causal(c: _Keys, layers: int) -> tuple[bool, ...]:
    types = c.get("layer_types", ["full_attention"] * layers)
    known = {"full_attention": False, "sliding_attention": True}
    if not isinstance(types, (list, tuple)) or len(types) != layers or not all(t in known for t in types):
        raise ConfigError(
            f"draft config: layer_types must name {layers} layers, each {' or '.join(known)}, got {types!r}"
        )
    forced = c.get("is_causal")
    if forced is None:
        return tuple(known[t] for t in types)
    return (c.flag("is_causal", default=False),) * layers


def _read_rope(c: _Keys) -> RopeConfig:
    given = c.get("rope_parameters")
    if given is None:
        given = c.get("rope_scaling", {})
    if not hasattr(given, "items"):
        raise ConfigError(f"draft config: rope_parameters must be an object, got {given!r}")
    theta = given.get("rope_theta")
    theta = c.number("rope_theta") if theta is None else float(theta)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    unknown = sorted(key for key, value in given.items() if key not in _ROPE_KEYS and value is not None)
    if kind != "yarn" or unknown:
        raise ConfigError(f"draft config: rope_type={kind!r} with {unknown}; expected 'yarn' or 'default'")
    values = {key: given[key] for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim") if given.get(key)}
    factor, length = given.get("factor"), given.get("original_max_position_embeddings")
    numbers = [*values.values(), factor, length]
    if not all(type(x) in (int, float) for x in numbers):
        raise ConfigError(f"draft config: YaRN needs factor and original_max_position_embeddings, got {dict(given)}")
    factor_of = given.get("attention_factor")
    return RopeConfig(
        theta=theta, factor=float(factor), original_length=int(length), attention_factor=factor_of, **values
    )
