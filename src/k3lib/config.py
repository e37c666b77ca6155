"""The model configuration: frozen dataclasses, and the reader of Hugging Face `config.json`.

No torch here: dtypes are names. `KimiK3Config.from_hf` is the only code that knows Hugging Face key names.
Field meanings and defaults: model specification, section 1.
"""

from __future__ import annotations

import copy
import logging
import re
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from k3lib.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "AttnResConfig",
    "KDAConfig",
    "KimiK3Config",
    "LatentMoEConfig",
    "LayerKind",
    "MLAConfig",
    "QuantConfig",
    "SiTU",
    "TextConfig",
    "VisionConfig",
]

logger = logging.getLogger(__name__)

LayerKind = Literal["kda", "mla"]


def _positive(owner: str, **values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{owner}: {name} must be an integer >= 1, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiTU:
    """The activation `beta·tanh(g/beta)·sigmoid(g) · linear_beta·tanh(u/linear_beta)`.

    `linear_beta=None` leaves the up half uncapped.
    """

    beta: float
    linear_beta: float | None

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ConfigError(f"SiTU: beta must be > 0, got {self.beta}")
        if self.linear_beta is not None and not self.linear_beta > 0:
            raise ConfigError(f"SiTU: linear_beta must be > 0 or None, got {self.linear_beta}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KDAConfig:
    """Kimi Delta Attention. `gate_lower_bound=None` selects the unbounded softplus gate."""

    hidden_size: int
    num_heads: int
    key_dim: int
    value_dim: int
    gate_lower_bound: float | None
    full_rank_gate: bool = True
    gate_rank: int = 0
    conv_width: int = 4
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.gate_rank == 0:
            object.__setattr__(self, "gate_rank", self.key_dim)
        _positive(
            "KDAConfig",
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            gate_rank=self.gate_rank,
        )
        if self.conv_width < 2:
            raise ConfigError(f"KDAConfig: conv_width must be >= 2, got {self.conv_width}")
        if self.gate_lower_bound is not None and not self.gate_lower_bound < 0:
            raise ConfigError(f"KDAConfig: gate_lower_bound must be negative or None, got {self.gate_lower_bound}")

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution, in the order q | k | v."""
        return self.num_heads * (2 * self.key_dim + self.value_dim)

    @property
    def scale(self) -> float:
        """Factor applied to the normalised query."""
        return float(self.key_dim**-0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Gated multi-head latent attention without positions. `q_lora_rank=None`: one `q_proj`."""

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    output_gate: bool = True
    latent_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.qk_rope_head_dim == 0:
            raise ConfigError(
                "MLAConfig: qk_rope_head_dim must be >= 1, got 0 (with qk_nope_head_dim="
                f"{self.qk_nope_head_dim}, v_head_dim={self.v_head_dim}): K3 keeps an un-rotated shared key "
                "part; its sizes are 128/64/128, the widely copied 192/0/64 contradicts the tensor shapes"
            )
        _positive(
            "MLAConfig",
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
        )
        if self.q_lora_rank is not None:
            _positive("MLAConfig", q_lora_rank=self.q_lora_rank)

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head: the positionless part and the shared part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Values cached per token: the normed latent and the shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """Softmax scale; the shared key part counts."""
        return float(self.qk_head_dim**-0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentMoEConfig:
    """Mixture of experts in a latent space. `latent_size=None`: experts work at `hidden_size`."""

    hidden_size: int
    latent_size: int | None
    intermediate_size: int
    num_experts: int
    top_k: int
    num_shared_experts: int
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool
    routed_scale: float = 1.0
    latent_norm: bool
    norm_eps: float = 1e-5
    act: SiTU

    def __post_init__(self) -> None:
        _positive(
            "LatentMoEConfig",
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
        )
        if self.num_shared_experts < 0:
            raise ConfigError(f"LatentMoEConfig: num_shared_experts must be >= 0, got {self.num_shared_experts}")
        if self.top_k > self.num_experts:
            raise ConfigError(f"LatentMoEConfig: top_k={self.top_k} exceeds num_experts={self.num_experts}")
        if self.num_experts % self.num_groups:
            raise ConfigError(
                f"LatentMoEConfig: num_groups={self.num_groups} must divide num_experts={self.num_experts}"
            )
        if self.top_groups > self.num_groups:
            raise ConfigError(f"LatentMoEConfig: top_groups={self.top_groups} exceeds num_groups={self.num_groups}")
        reachable = self.num_experts // self.num_groups * self.top_groups
        if self.top_k > reachable:
            raise ConfigError(
                f"LatentMoEConfig: top_k={self.top_k} exceeds the {reachable} experts of top_groups="
                f"{self.top_groups} groups"
            )
        if self.num_groups > self.top_groups and self.num_experts // self.num_groups < 2:
            raise ConfigError(
                f"LatentMoEConfig: num_groups={self.num_groups} leaves fewer than two experts a group; a group "
                "is scored by its two best experts"
            )
        if self.latent_norm and self.latent_size is None:
            raise ConfigError("LatentMoEConfig: latent_norm=True needs latent_size")

    @property
    def expert_width(self) -> int:
        """Input and output width of a routed expert."""
        return self.hidden_size if self.latent_size is None else self.latent_size

    @property
    def shared_size(self) -> int:
        """Intermediate width of the shared experts, which are one MLP."""
        return self.intermediate_size * self.num_shared_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class AttnResConfig:
    """Block attention residuals."""

    layers_per_block: int = 12
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        _positive("AttnResConfig", layers_per_block=self.layers_per_block)

    def num_blocks_before(self, layer: int) -> int:
        """Bank rows that exist when layer `layer` (0-based) begins: `ceil(layer / layers_per_block)`."""
        return -(-layer // self.layers_per_block)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """The text model. `attn_res=None` is an ordinary residual stream; `moe=None` has only dense layers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[LayerKind, ...]
    dense_layers: frozenset[int]
    norm_eps: float
    max_position_embeddings: int
    act: SiTU
    kda: KDAConfig
    mla: MLAConfig
    moe: LatentMoEConfig | None
    attn_res: AttnResConfig | None

    def __post_init__(self) -> None:
        _positive(
            "TextConfig",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=len(self.layer_types),
            max_position_embeddings=self.max_position_embeddings,
        )
        parts = [("kda", self.kda.hidden_size), ("mla", self.mla.hidden_size)]
        if self.moe is not None:
            parts.append(("moe", self.moe.hidden_size))
        for part, width in parts:
            if width != self.hidden_size:
                raise ConfigError(f"TextConfig: {part}.hidden_size={width} differs from hidden_size={self.hidden_size}")
        if self.moe is None and len(self.dense_layers) < self.num_layers:
            raise ConfigError("TextConfig: layers without an MLP: moe is None and not every layer is dense")

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layer_types)

    def differences(self, other: TextConfig) -> list[str]:
        """What makes `other` another computation, one line for each field; how long a context may be does not."""
        return _differences(self, replace(other, max_position_embeddings=self.max_position_embeddings), "")

    def layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        """0-based numbers of the layers of one kind."""
        return tuple(i for i, k in enumerate(self.layer_types) if k == kind)


def _differences(one: Any, other: Any, path: str) -> list[str]:  # noqa: ANN401 - fields of configurations
    if is_dataclass(one) and is_dataclass(other):
        pairs = [(f.name, getattr(one, f.name), getattr(other, f.name)) for f in fields(one)]
        return [line for name, a, b in pairs for line in _differences(a, b, f"{path}.{name}" if path else name)]
    return [] if one == other else [f"{path}: {one!r} here, {other!r} there"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """MoonViT-V2 and its projector (model specification, section 4)."""

    patch_size: int
    pos_emb_height: int
    pos_emb_width: int
    pos_emb_time: int
    num_heads: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    qkv_hidden_size: int
    merge_kernel_size: tuple[int, int]
    text_hidden_size: int
    projector_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        counts = ("patch_size", "pos_emb_height", "pos_emb_width", "pos_emb_time", "num_heads", "num_layers")
        widths = ("hidden_size", "intermediate_size", "qkv_hidden_size", "text_hidden_size")
        _positive("VisionConfig", **{name: getattr(self, name) for name in counts + widths})
        if len(self.merge_kernel_size) != 2:
            raise ConfigError(f"VisionConfig: merge_kernel_size must be two integers, got {self.merge_kernel_size!r}")
        _positive("VisionConfig", **dict(zip(("merge_rows", "merge_columns"), self.merge_kernel_size, strict=True)))
        if self.qkv_hidden_size % self.num_heads:
            raise ConfigError(
                f"VisionConfig: num_heads={self.num_heads} must divide qkv_hidden_size={self.qkv_hidden_size}"
            )
        if self.head_dim % 4:
            raise ConfigError(
                f"VisionConfig: a head of qkv_hidden_size={self.qkv_hidden_size} / num_heads={self.num_heads} = "
                f"{self.head_dim} channels must be a multiple of 4: pairs of channels turn by column and by row"
            )
        if self.hidden_size % 2:
            raise ConfigError(
                f"VisionConfig: hidden_size={self.hidden_size} must be even: it holds sines and cosines of the frame"
            )

    @property
    def head_dim(self) -> int:
        """Width of one query, key or value head."""
        return self.qkv_hidden_size // self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """What the manifest says about stored weights. Which module is packed is decided by its tensors.

    Attributes:
        method: `quant_method` of the manifest.
        expert_format: "mxfp4", "nvfp4" or None if the manifest names neither.
        raw: the manifest as read, for writing it back.
    """

    method: str
    expert_format: Literal["mxfp4", "nvfp4"] | None
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiK3Config:
    """A whole Kimi-K3: text model, vision tower (None for text-only), stored formats, token ids.

    `dtype` is that of the activations: what `config.json` says, and in `model.config` what the model has.
    """

    text: TextConfig
    vision: VisionConfig | None = None
    quantization: QuantConfig | None = None
    bos_token_id: int = 163584
    eos_token_id: int = 163586
    pad_token_id: int = 163839
    media_placeholder_token_id: int = 163605
    dtype: str = "bfloat16"
    hf: Mapping[str, Any] = field(default_factory=dict, compare=False, hash=False, repr=False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> KimiK3Config:
        """Read a Hugging Face `config.json`, nested (`text_config`) or a flat text config.

        Args:
            config: the parsed JSON. Keys beginning with an underscore are ignored.

        Raises:
            ConfigError: a key is missing, contradicts another, or changes the maths in a way that is
                not implemented. The message names the key, the found and the expected value.
        """
        return _read_config(config)

    @classmethod
    def tiny(cls, **changes: Any) -> KimiK3Config:  # noqa: ANN401 - values of JSON keys
        """The nine-layer miniature with every mechanism of K3; `changes` override config keys.

        A change is named by its key in `config.json`, wherever that key lives:
        `tiny(q_lora_rank=None, gate_lower_bound=None, vocab_size=600)`.
        """
        return cls.from_hf(tiny_hf_config(**changes))

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` this configuration was read from."""
        if not self.hf:
            raise ConfigError("this KimiK3Config was not read from a config.json; there is none to write")
        return copy.deepcopy(dict(self.hf))


# ---- reading config.json ------------------------------------------------------------------------

# Keys without influence on the maths of inference.
_IGNORED = frozenset(
    {
        "architectures", "auto_map", "dtype", "head_dim", "ignore_index", "initializer_range", "kv_cache_dtype",
        "model_type", "num_nextn_predict_layers", "rope_theta", "rope_parameters", "rope_scaling", "torch_dtype",
        "transformers_version", "use_cache", "use_bfloat16", "image_placeholder", "encoder_no_repeat_ngram_size",
        "id2label", "label2id", "name_or_path", "problem_type", "return_dict", "output_attentions",
        "output_hidden_states", "is_encoder_decoder", "is_decoder", "task_specific_params", "chunk_size_feed_forward",
        "attn_implementation", "video_placeholder", "use_unified_vision_chunk",
    }
)  # fmt: skip

# An unknown key whose name contains one of these words is taken to change the maths.
_MATHS = re.compile(
    r"(^|_)(attn|attention|kda|mla|moe|expert|experts|router|routed|routing|gate|latent|norm|eps|bias|scale|scaling"
    r"|softcap|softcapping|window|rope|nope|activation|act|residual|res|block|linear|lora|qk|conv|layer|layers|logit"
    r"|logits|multiplier|groups?|topk|share|shared|tie|beta)($|_)"
)

_FIXED: dict[str, tuple[Any, ...]] = {  # keys with the values that are implemented; the first is K3's
    "hidden_act": ("situ",),
    "moe_router_activation_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "tie_word_embeddings": (False,),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0.0, 0, None),
}


# JSON types of the keys, where a wrong one would pass for another value or fail far away.
_KINDS: tuple[tuple[str, tuple[type, ...], frozenset[str]], ...] = (
    (
        "an integer",
        (int,),
        frozenset(
            {
                "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "first_k_dense_replace",
                "num_experts", "num_experts_per_token", "num_shared_experts", "num_expert_group", "topk_group",
                "short_conv_kernel_size", "num_heads", "head_dim", "attn_res_block_size", "qkv_hidden_size",
                "vt_num_attention_heads", "vt_num_hidden_layers", "vt_hidden_size", "target_num_hidden_layers",
                "num_target_layers", "bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id",
            }
        ),
    ),
    (
        "a number",
        (int, float),
        frozenset(
            {
                "activation_situ_beta", "activation_situ_linear_beta", "gate_lower_bound", "rms_norm_eps",
                "routed_scaling_factor", "latent_norm_eps", "projector_ln_eps",
            }
        ),
    ),
    (
        "true or false",
        (bool,),
        frozenset(
            {
                "mla_use_output_gate", "latent_moe_use_norm", "moe_renormalize", "use_grouped_topk",
                "use_full_rank_gate", "enable_confidence_head",
            }
        ),
    ),
    (
        "a list of integers",
        (list, tuple),
        frozenset({"kda_layers", "full_attn_layers", "merge_kernel_size", "target_layer_ids"}),
    ),
    ("an object", (dict,), frozenset({"linear_attn_config", "quantization_config", "vision_config", "dflash_config"})),
)  # fmt: skip


class _Reader:
    """A mapping that remembers which keys were read."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self.values = {k: v for k, v in values.items() if not k.startswith("_")}
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - JSON
        self.seen.add(key)
        value = self.values.get(key)
        if value is None:
            return default
        for expected, types, keys in _KINDS:
            if key in keys and not _is_kind(value, types):
                raise ConfigError(f"{self.where}: {key}={value!r}; expected {expected}")
        return value

    def need(self, key: str) -> Any:  # noqa: ANN401 - JSON
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self.where}: the key {key!r} is missing")
        return value

    def fixed(self, key: str, *, required: bool = False) -> None:
        allowed = _FIXED[key]
        if key not in self.values and not required:
            return
        value = self.get(key)
        if value not in allowed and not (value is None and not required):
            raise ConfigError(f"{self.where}: {key}={value!r} is not implemented; expected {allowed[0]!r}")

    def finish(self, *, closed: bool = False) -> None:
        """Refuse unread keys that may change the maths; log the others. `closed`: refuse all."""
        unread = [k for k in self.values if k not in self.seen and k not in _IGNORED]
        for key in unread:
            value = self.values[key]
            if value is None or value is False:
                continue
            if closed or _MATHS.search(key):
                raise ConfigError(
                    f"{self.where}: unknown key {key}={value!r} may change the maths; expected only known keys"
                )
        if unread:
            logger.debug("%s: keys ignored: %s", self.where, ", ".join(sorted(unread)))


def _is_kind(value: Any, types: tuple[type, ...]) -> bool:  # noqa: ANN401 - JSON
    if isinstance(value, bool):  # which is an int to Python
        return bool in types
    if list in types:
        return isinstance(value, (list, tuple)) and all(type(x) is int for x in value)
    return isinstance(value, types)


def _read_config(config: Mapping[str, Any]) -> KimiK3Config:
    if "dflash_config" in config or "target_layer_ids" in config:
        raise ConfigError(
            "this config.json describes a DSPARK draft, not a Kimi-K3; read it with DraftConfig.from_hf of "
            "k3lib.draft_config"
        )
    nested = isinstance(config.get("text_config"), dict)
    top = _Reader("config", config if nested else {})
    text = _Reader("text_config" if nested else "config", config["text_config"] if nested else config)

    quant_in_text = text.get("quantization_config")
    quant = top.get("quantization_config", quant_in_text)
    ids = {}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        inner = text.get(key)
        ids[key] = top.get(key, inner)
        if key == "pad_token_id" and ids[key] is None:
            ids[key] = 0  # the default of the published configuration class
        if ids[key] is None:
            raise ConfigError(f"config: the key {key!r} is missing")
    media = top.get("media_placeholder_token_id", text.get("media_placeholder_token_id"))
    top.seen.update({"text_config", "vision_config"})
    if "tie_word_embeddings" in top.values:
        top.fixed("tie_word_embeddings")
    vision = top.get("vision_config") if nested else None
    top.finish()

    dtype = str(config.get("dtype") or config.get("torch_dtype") or text.values.get("dtype") or "bfloat16")
    text_config = _read_text(text)
    return KimiK3Config(
        text=text_config,
        vision=None if vision is None else _read_vision(_Reader("vision_config", vision)),
        quantization=None if not quant else _read_quantization(quant),
        bos_token_id=ids["bos_token_id"],
        eos_token_id=ids["eos_token_id"],
        pad_token_id=ids["pad_token_id"],
        media_placeholder_token_id=-1 if media is None else media,
        dtype=dtype.removeprefix("torch."),
        hf=copy.deepcopy(dict(config)),
    )


def _read_text(c: _Reader) -> TextConfig:
    hidden = c.need("hidden_size")
    eps = c.get("rms_norm_eps", 1e-6)
    for key in _FIXED:
        c.fixed(key, required=key == "hidden_act")
    if c.get("mla_use_nope") is not True:
        raise ConfigError(
            f"{c.where}: mla_use_nope={c.values.get('mla_use_nope')!r} is not implemented; expected True "
            "(K3 applies no rotation anywhere)"
        )
    heads = c.need("num_attention_heads")
    kv_heads = c.get("num_key_value_heads", heads)
    if kv_heads != heads:
        raise ConfigError(
            f"{c.where}: num_key_value_heads={kv_heads} must equal num_attention_heads={heads}: MLA has one latent"
        )
    act = SiTU(beta=c.get("activation_situ_beta") or 1.0, linear_beta=c.get("activation_situ_linear_beta"))
    layer_types, kda = _read_linear_attention(c, hidden, eps)
    num_layers = len(layer_types)
    moe = _read_moe(c, hidden, eps, act)
    first_dense = c.get("first_k_dense_replace", 0)
    dense = frozenset(range(num_layers if moe is None else min(first_dense, num_layers)))
    block = c.get("attn_res_block_size")
    result = TextConfig(
        vocab_size=c.need("vocab_size"),
        hidden_size=hidden,
        intermediate_size=c.need("intermediate_size"),
        layer_types=layer_types,
        dense_layers=dense,
        norm_eps=eps,
        max_position_embeddings=c.need("max_position_embeddings"),
        act=act,
        kda=kda,
        mla=MLAConfig(
            hidden_size=hidden,
            num_heads=heads,
            q_lora_rank=c.get("q_lora_rank"),
            kv_lora_rank=c.need("kv_lora_rank"),
            qk_nope_head_dim=c.need("qk_nope_head_dim"),
            qk_rope_head_dim=c.need("qk_rope_head_dim"),
            v_head_dim=c.need("v_head_dim"),
            output_gate=c.get("mla_use_output_gate", False),
            latent_norm_eps=c.get("latent_norm_eps", 1e-6),
        ),
        moe=moe,
        attn_res=None if block is None else AttnResConfig(layers_per_block=block, norm_eps=eps),
    )
    c.finish()
    return result


def _read_linear_attention(c: _Reader, hidden: int, eps: float) -> tuple[tuple[LayerKind, ...], KDAConfig]:
    linear = _Reader(f"{c.where}.linear_attn_config", c.need("linear_attn_config"))
    num_layers = c.need("num_hidden_layers")
    kda_layers, mla_layers = linear.need("kda_layers"), linear.need("full_attn_layers")
    # layers beyond num_hidden_layers are skipped, so that truncated configs can be tested
    kda_set = {n for n in kda_layers if n <= num_layers}
    mla_set = {n for n in mla_layers if n <= num_layers}
    if both := sorted(kda_set & mla_set):
        raise ConfigError(f"{linear.where}: layers {both} are in kda_layers and in full_attn_layers")
    if neither := sorted(set(range(1, num_layers + 1)) - kda_set - mla_set):
        raise ConfigError(
            f"{linear.where}: layers {neither} (counted from 1) of num_hidden_layers={num_layers} are in neither "
            "kda_layers nor full_attn_layers"
        )
    if bad := sorted(n for n in kda_set | mla_set if n < 1):
        raise ConfigError(f"{linear.where}: layer numbers count from 1, found {bad}")
    head_dim = linear.need("head_dim")
    kda = KDAConfig(
        hidden_size=hidden,
        num_heads=linear.need("num_heads"),
        key_dim=head_dim,
        value_dim=head_dim,
        gate_lower_bound=linear.get("gate_lower_bound"),
        full_rank_gate=linear.get("use_full_rank_gate", False),
        conv_width=linear.get("short_conv_kernel_size", 4),
        norm_eps=eps,
    )
    linear.finish(closed=True)
    return tuple("kda" if i + 1 in kda_set else "mla" for i in range(num_layers)), kda


def _read_moe(c: _Reader, hidden: int, eps: float, act: SiTU) -> LatentMoEConfig | None:
    num_experts = c.get("num_experts")
    if not num_experts:
        return None
    grouped = c.get("use_grouped_topk", True)
    groups, top_groups = c.get("num_expert_group", 1), c.get("topk_group", 1)
    return LatentMoEConfig(
        hidden_size=hidden,
        latent_size=c.get("routed_expert_hidden_size"),
        intermediate_size=c.need("moe_intermediate_size"),
        num_experts=num_experts,
        top_k=c.need("num_experts_per_token"),
        num_shared_experts=c.get("num_shared_experts", 0),
        num_groups=groups if grouped else 1,
        top_groups=top_groups if grouped else 1,
        renormalize=c.need("moe_renormalize"),
        routed_scale=c.get("routed_scaling_factor", 1.0),
        latent_norm=c.get("latent_moe_use_norm", False),
        norm_eps=eps,
        act=act,
    )


_VISION_FIXED: dict[str, tuple[Any, ...]] = {
    "pos_emb_type": ("divided_fixed",),
    "merge_type": ("sd2_tpool",),
    "mm_projector_type": ("patchmergerv2",),
    "projector_hidden_act": ("gelu",),
    "norm_type": ("rmsnorm",),
    "mlp_type": ("mlp2",),
    "attn_bias": (False,),
    "linear_bias": (False,),
    "patch_embed_proj_bias": (False,),
    "activation_func": ("gelu_pytorch_tanh",),
    "pos_emb_interpolation_mode": ("bilinear",),
}


def _read_vision(c: _Reader) -> VisionConfig:
    for key, allowed in _VISION_FIXED.items():
        value = c.get(key, allowed[0])
        if value not in allowed:
            raise ConfigError(f"{c.where}: {key}={value!r} is not implemented; expected {allowed[0]!r}")
    hidden = c.need("vt_hidden_size")
    mm_hidden = c.get("mm_hidden_size", hidden)
    if mm_hidden != hidden:
        raise ConfigError(f"{c.where}: mm_hidden_size={mm_hidden} must equal vt_hidden_size={hidden}")
    return VisionConfig(
        patch_size=c.need("patch_size"),
        pos_emb_height=c.need("init_pos_emb_height"),
        pos_emb_width=c.need("init_pos_emb_width"),
        pos_emb_time=c.need("init_pos_emb_time"),
        num_heads=c.need("vt_num_attention_heads"),
        num_layers=c.need("vt_num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=c.need("vt_intermediate_size"),
        qkv_hidden_size=c.get("qkv_hidden_size", hidden),
        merge_kernel_size=tuple(c.get("merge_kernel_size", (2, 2))),
        text_hidden_size=c.need("text_hidden_size"),
        projector_norm_eps=c.get("projector_ln_eps", 1e-5),
    )


def _read_quantization(raw: Mapping[str, Any]) -> QuantConfig:
    method = raw.get("quant_method")
    if method == "compressed-tensors":
        for name, group in (raw.get("config_groups") or {}).items():
            weights = group.get("weights") or {}
            kind = group.get("format") or raw.get("format")
            if kind != "mxfp4-pack-quantized":
                raise ConfigError(
                    f"quantization_config.config_groups.{name}: format={kind!r}; expected 'mxfp4-pack-quantized'"
                )
            for key, want in (("group_size", 32), ("num_bits", 4), ("type", "float")):
                if weights.get(key, want) != want:
                    raise ConfigError(
                        f"quantization_config.config_groups.{name}.weights: {key}={weights[key]!r}; MXFP4 has {want!r}"
                    )
        return QuantConfig(method=method, expert_format="mxfp4", raw=raw)
    if method in {"modelopt", "modelopt_mixed"}:
        algo = raw.get("quant_algo")
        if algo not in {"NVFP4", "MIXED_PRECISION"}:
            raise ConfigError(f"quantization_config: quant_algo={algo!r}; expected 'NVFP4' or 'MIXED_PRECISION'")
        if raw.get("group_size", 16) != 16:
            raise ConfigError(f"quantization_config: group_size={raw['group_size']!r}; NVFP4 has 16")
        return QuantConfig(method=method, expert_format="nvfp4", raw=raw)
    raise ConfigError(
        f"quantization_config: quant_method={method!r}; expected 'compressed-tensors' (MXFP4), 'modelopt' or "
        "'modelopt_mixed' (NVFP4)"
    )


# ---- the miniature ------------------------------------------------------------------------------


def tiny_hf_config(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - values of JSON keys
    """The `config.json` of the miniature, with keys replaced wherever they live.

    Raises:
        ConfigError: a change names no key of the file.
    """
    linear = {
        "full_attn_layers": [4, 8, 9],
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    }
    text: dict[str, Any] = {
        "model_type": "kimi_linear", "vocab_size": 512, "hidden_size": 96, "intermediate_size": 160,
        "num_hidden_layers": 9, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_act": "situ",
        "rms_norm_eps": 1e-5, "use_cache": True, "bos_token_id": 504, "eos_token_id": 506, "pad_token_id": 511,
        "tie_word_embeddings": False, "moe_intermediate_size": 64, "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "num_experts": 16, "num_experts_per_token": 4,
        "num_shared_experts": 2, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1, "q_lora_rank": 48, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "mla_use_nope": True,
        "mla_use_output_gate": True, "num_nextn_predict_layers": 0, "attn_res_block_size": 4,
        "latent_moe_use_norm": True, "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
        "max_position_embeddings": 4096, "routed_expert_hidden_size": 64, "topk_method": "noaux_tc",
        "linear_attn_config": linear,
    }  # fmt: skip
    vision = {
        "patch_size": 14, "init_pos_emb_height": 8, "init_pos_emb_width": 8, "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed", "vt_num_attention_heads": 4, "vt_num_hidden_layers": 2,
        "vt_hidden_size": 32, "vt_intermediate_size": 64, "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmergerv2", "mm_hidden_size": 32, "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5, "qkv_hidden_size": 48, "norm_type": "rmsnorm", "attn_bias": False,
        "patch_embed_proj_bias": False, "mlp_type": "mlp2", "linear_bias": False,
        "activation_func": "gelu_pytorch_tanh", "pos_emb_interpolation_mode": "bilinear", "text_hidden_size": 96,
    }  # fmt: skip
    top: dict[str, Any] = {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text,
        "vision_config": vision, "media_placeholder_token_id": 505, "pad_token_id": 511, "bos_token_id": 504,
        "eos_token_id": 506, "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip
    for key, value in changes.items():
        homes = [part for part in (top, text, linear, vision) if key in part]
        if not homes:
            if key != "quantization_config":
                raise ConfigError(f"tiny: no key {key!r} in the miniature's config.json")
            homes = [text]
        for part in homes:
            part[key] = value
    if top["vision_config"] and "hidden_size" in changes:
        vision["text_hidden_size"] = changes["hidden_size"]
    return top
