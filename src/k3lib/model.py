"""The text model: decoder layers over an attention-residual stream, and the language-model head.

Shapes: T packed tokens, B requests, D hidden size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from k3lib import checkpoint, export, ops
from k3lib.config import KimiK3Config, TextConfig
from k3lib.errors import ConfigError, RequestError
from k3lib.layers import (
    AttnRes,
    AttnResStream,
    GatedMLA,
    K3Module,
    KimiDeltaAttention,
    LatentMoE,
    Linear,
    ResidualStream,
    RMSNorm,
    ScoreWeights,
    SiTUMLP,
    VocabEmbedding,
)
from k3lib.layers.linear import Fused, fuse
from k3lib.ops.registry import check_backends
from k3lib.parallel import LOCAL, Mesh, StagePayload, TokenShards
from k3lib.parallel.mesh import device_of
from k3lib.parallel.pp import features_before

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from os import PathLike

    from torch import Tensor

    from k3lib.batch import Batch, CacheViews, FeatureTap
    from k3lib.parallel.group import Chain, Group

__all__ = ["KimiK3DecoderLayer", "KimiK3ForCausalLM", "KimiK3Model", "LayerStack"]


def _residual_weights(module: nn.Module, name: str, text: TextConfig, place: dict[str, Any]) -> None:
    """Give `module` the score norm and projection of one attention-residual read."""
    assert text.attn_res is not None, "only attention residuals have scores"
    setattr(module, f"{name}_norm", RMSNorm(text.hidden_size, text.attn_res.norm_eps, **place))
    setattr(module, f"{name}_proj", Linear(text.hidden_size, 1, **place))


class KimiK3DecoderLayer(K3Module):
    """One decoder layer: attention (KDA or MLA), then a dense MLP or the mixture of experts."""

    def __init__(
        self,
        text: TextConfig,
        index: int,
        *,
        mesh: Mesh | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        mesh = mesh or Mesh.single()
        # with experts that exchange by all-to-all, the stream between attention layers holds this rank's tokens only
        self.rows = token_shards(mesh)
        tp: Group = self.rows if self.rows.size > 1 else mesh.tp
        self.index = index
        self.kind = text.layer_types[index]
        self.moe_layer = sum(1 for i in range(index) if i not in text.dense_layers)
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.input_layernorm = RMSNorm(text.hidden_size, text.norm_eps, **place)
        self.post_attention_layernorm = RMSNorm(text.hidden_size, text.norm_eps, **place)
        self.starts_block = text.attn_res is not None and index % text.attn_res.layers_per_block == 0
        if text.attn_res is not None:
            _residual_weights(self, "self_attention_res", text, place)
            _residual_weights(self, "mlp_res", text, place)
            self.attn_read = _reader(self, "self_attention_res", self.input_layernorm)
            self.mlp_read = _reader(self, "mlp_res", self.post_attention_layernorm)
        else:
            self.attn_read = AttnRes(None, None, self.input_layernorm)
            self.mlp_read = AttnRes(None, None, self.post_attention_layernorm)
        if self.kind == "kda":
            self.self_attn: nn.Module = KimiDeltaAttention(text.kda, tp=tp, cp=mesh.cp, **place)
        else:
            self.self_attn = GatedMLA(
                text.mla,
                tp=tp,
                dcp=mesh.dcp,
                cp=mesh.cp,
                dcp_comm_backend=mesh.config.dcp_comm_backend or "a2a",
                dcp_replicate_q_proj=mesh.config.dcp_replicate_q_proj,
                **place,
            )
        self.is_dense = index in text.dense_layers
        if self.is_dense:
            self.mlp = SiTUMLP(text.hidden_size, text.intermediate_size, text.act, tp=tp, **place)
        else:
            assert text.moe is not None, "checked by TextConfig"
            self.block_sparse_moe = LatentMoE(
                text.moe,
                tp=mesh.tp,
                spread=mesh.spread(self.moe_layer, text.moe.num_experts),
                shared=mesh.shared_group,
                shard_latent=mesh.config.shard_latent_projections,
                overlap_shared=mesh.config.overlap_shared_experts,
                **place,
            )

    def forward(
        self, stream: AttnResStream, batch: Batch, cache: CacheViews | None, counts: Sequence[int] = ()
    ) -> None:
        """Advance `stream` by this layer; `counts` are the tokens of every replica that shares its experts."""
        view = cache.view(self.index) if cache is not None else None
        hidden = stream.read(self.attn_read, closes_block=self.starts_block)
        stream.add(self.self_attn(self.rows.gather(hidden, batch.num_tokens), batch, view))
        hidden = stream.read(self.mlp_read)
        if self.is_dense:
            stream.add(self.mlp(self.rows.gather(hidden, batch.num_tokens)))
        else:
            stream.add(self.block_sparse_moe(hidden, routes=batch.routes, moe_layer=self.moe_layer, counts=counts))


def token_shards(mesh: Mesh) -> TokenShards:
    """How tokens are sharded between the attention layers of a model on `mesh`; one shard is all of them."""
    return TokenShards(mesh.tp if mesh.config.moe_exchange == "all_to_all" else LOCAL)


def _reader(module: nn.Module, name: str, out_norm: RMSNorm) -> AttnRes:
    return AttnRes(module._modules.get(f"{name}_norm"), module._modules.get(f"{name}_proj"), out_norm)  # type: ignore[arg-type]


class LayerStack(nn.Module):
    """Decoder layers by their number in the whole model, which may not start at 0."""

    def __init__(self, layers: Mapping[int, KimiK3DecoderLayer]) -> None:
        super().__init__()
        for index, layer in layers.items():
            self.add_module(str(index), layer)

    def __getitem__(self, index: int) -> KimiK3DecoderLayer:
        layer: KimiK3DecoderLayer = self.get_submodule(str(index))  # type: ignore[assignment]
        return layer

    def __iter__(self) -> Iterator[KimiK3DecoderLayer]:
        return iter(self.children())  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._modules)


def _check_layers(layers: range | None, num_layers: int, mesh: Mesh) -> range:
    if layers is None:
        return mesh.stage(num_layers)
    if mesh.pp.size > 1:
        raise ConfigError(
            f"layers={layers!r} with pp_size={mesh.pp.size}: the stages divide all layers among themselves"
        )
    if not isinstance(layers, range) or layers.step != 1 or not 0 <= layers.start < layers.stop <= num_layers:
        raise ConfigError(f"layers={layers!r} must be a non-empty range within 0..{num_layers} with step 1")
    return layers


class KimiK3Model(K3Module):
    """Embedding, decoder layers, output mix and final norm; or a slice of the layers."""

    def __init__(
        self,
        text: TextConfig,
        *,
        mesh: Mesh | None = None,
        layers: range | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        mesh = mesh or Mesh.single()
        mesh.config.check(text)
        self.text = text
        self.mesh = mesh
        self.rows = token_shards(mesh)
        self.layer_range = _check_layers(layers, text.num_layers, mesh)
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.has_embedding = self.layer_range.start == 0
        is_stage = mesh.pp.size > 1  # a model of the first layers alone has an output, a first stage has none
        self.has_output = (self.has_embedding and not is_stage) or self.layer_range.stop == text.num_layers
        if self.has_embedding:
            tp: Group = self.rows if self.rows.size > 1 else mesh.tp
            self.embed_tokens = VocabEmbedding(text.vocab_size, text.hidden_size, tp=tp, **place)
        self.layers = LayerStack({i: KimiK3DecoderLayer(text, i, mesh=mesh, **place) for i in self.layer_range})
        if self.has_output:
            if text.attn_res is not None:
                _residual_weights(self, "output_attn_res", text, place)
            self.norm = RMSNorm(text.hidden_size, text.norm_eps, **place)
        readers = [read for layer in self.layers for read in (layer.attn_read, layer.mlp_read)]
        if self.has_output:
            readers.append(self.output_read)
        self._scores = ScoreWeights([] if text.attn_res is None else readers)

    def fused_parts(self) -> Sequence[Fused]:
        """The weights that shape the scores of all reads."""
        return () if self.text.attn_res is None else self._scores.parts

    @property
    def output_read(self) -> AttnRes:
        """The weights of the read in front of the head."""
        return _reader(self, "output_attn_res", self.norm)

    def start(self, embeddings: Tensor, *, bank: Tensor | None = None) -> AttnResStream:
        """Begin a stream of hidden states.

        Args:
            embeddings: `[T, D]`: token embeddings; for a slice the running sum in front of its first layer.
            bank: `[T, ceil(first layer / layers per block), D]`: the finished blocks in front of the first layer.

        Raises:
            ConfigError: the bank does not have the rows that the first layer of this slice expects.
        """
        if self.text.attn_res is None:
            return ResidualStream(embeddings, rows=0)
        expected = self.text.attn_res.num_blocks_before(self.layer_range.start)
        found = 0 if bank is None else bank.shape[1]
        if found != expected:
            raise ConfigError(
                f"a slice that begins at layer {self.layer_range.start} needs {expected} finished blocks beside the "
                f"running sum, got {found}"
            )
        rows = self.text.attn_res.num_blocks_before(self.layer_range.stop)
        scores = self._scores.folded()
        return AttnResStream(embeddings, rows=rows, bank=bank, num_blocks=expected, scores=scores)

    def run(
        self, stream: AttnResStream, batch: Batch, cache: CacheViews | None = None, *, taps: FeatureTap | None = None
    ) -> AttnResStream:
        """Advance a stream through the layers held here and return it."""
        self._check_routes(batch)
        counts = self._replica_tokens(batch)
        wanted = () if taps is None else taps.layers
        first, last = self.layer_range.start, self.layer_range.stop - 1
        if self.mesh.pp.size > 1 and first - 1 in wanted:
            stream.tap(taps, first - 1, self.layers[first].attn_read)  # its reader is here
        for layer in self.layers:
            layer(stream, batch, cache, counts)
            next_stage = self.mesh.pp.size > 1 and layer.index == last and not self.has_output
            if layer.index in wanted and not next_stage:
                stream.tap(taps, layer.index, self._reader_after(layer.index, taps))
        return stream

    def _replica_tokens(self, batch: Batch) -> tuple[int, ...]:
        """Tokens of every replica in this step, if they share their experts by gathering."""
        dp = self.mesh.dp
        if dp.size == 1 or self.mesh.config.moe_exchange == "all_to_all":
            return ()
        if not batch.replica_tokens:
            mine = torch.tensor([batch.num_tokens], device=device_of(dp))
            batch.replica_tokens = tuple(dp.all_gather(mine).tolist())
        return batch.replica_tokens

    def forward(
        self,
        batch: Batch,
        cache: CacheViews | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        taps: FeatureTap | None = None,
    ) -> Tensor:
        """Run all layers held here; return the normed output `[T, D]`.

        Args:
            batch: T packed tokens of B requests.
            cache: memory of each layer; None means whole sequences, stateless.
            inputs_embeds: `[T, D]` in place of the embedding of `batch.input_ids`.
            taps: hidden states to keep for a draft.

        Raises:
            ConfigError: no ids, ids outside the vocabulary, another device or dtype than the weights, or a slice
                without embedding or output; nothing has been written.
            RequestError: a sequence longer than the model's positions.
        """
        if not (self.has_embedding and self.has_output):
            raise ConfigError(
                f"this slice holds layers {self.layer_range.start}..{self.layer_range.stop - 1} only: feed it with "
                "start() and run()"
            )
        if batch.max_seq > self.text.max_position_embeddings:
            raise RequestError(
                f"a sequence of {batch.max_seq} tokens exceeds max_position_embeddings="
                f"{self.text.max_position_embeddings}"
            )
        self._check_routes(batch)  # before the embedding, which ranks compute together
        stream = self.start(self._embed(batch, inputs_embeds))
        return self._finish(self.run(stream, batch, cache, taps=taps), batch, taps)

    def _finish(self, stream: AttnResStream, batch: Batch, taps: FeatureTap | None) -> Tensor:
        if taps is not None and taps.out is not None:
            taps.out = self.rows.gather(taps.out, batch.num_tokens)
        return self.rows.gather(stream.read(self.output_read), batch.num_tokens)

    def run_stage(
        self,
        batch: Batch,
        cache: CacheViews | None = None,
        payload: StagePayload | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        taps: FeatureTap | None = None,
    ) -> StagePayload | Tensor:
        """Run one pipeline stage.

        Args:
            batch: T packed tokens of B requests, the same on every stage.
            cache: memory of the layers held here.
            payload: what the stage before returned; None on the first one.
            inputs_embeds: in place of an embedding; only the first stage looks at it.
            taps: hidden states to keep; on the last stage they are complete.

        Returns:
            What the next stage takes; on the last stage the normed output `[T, D]`.

        Raises:
            ConfigError: a payload on the first stage, none on another one, or one that does not fit.
        """
        if (payload is None) != self.has_embedding:
            raise ConfigError(
                f"the stage of layers {self.layer_range.start}..{self.layer_range.stop - 1} "
                + ("begins with the embedding and takes no payload" if self.has_embedding else "needs a payload")
            )
        self._check_routes(batch)
        if payload is None:
            stream = self.start(self._embed(batch, inputs_embeds))
        else:
            bank = None if self.text.attn_res is None else payload.bank
            stream = self.start(payload.prefix, bank=bank)
            self._take_features(payload, taps)
        self.run(stream, batch, cache, taps=taps)
        if self.has_output:
            return self._finish(stream, batch, taps)
        return StagePayload(stream.hidden(), stream.history(), self._features(taps, self.layer_range.stop))

    def payload_like(self, batch: Batch, taps: FeatureTap | None = None) -> Tensor:
        """Memory for the packed payload that this stage takes for `batch`."""
        blocks = self._blocks(self.layer_range.start)
        extra = 0 if taps is None else len(features_before(taps.layers, self.layer_range.start))
        width = (1 + blocks + extra) * self.text.hidden_size
        norm = self.layers[self.layer_range.start].input_layernorm.weight
        return norm.new_empty(self.rows.rows(batch.num_tokens), width)

    def unpack_payload(self, packed: Tensor) -> StagePayload:
        """Take apart what `payload_like` was filled with."""
        hidden, blocks = self.text.hidden_size, self._blocks(self.layer_range.start)
        return StagePayload.unpack(
            packed, hidden=hidden, blocks=blocks, features=packed.shape[1] - (1 + blocks) * hidden
        )

    def _blocks(self, layer: int) -> int:
        return 0 if self.text.attn_res is None else self.text.attn_res.num_blocks_before(layer)

    def _features(self, taps: FeatureTap | None, before: int) -> Tensor | None:
        """The features known in front of a layer, side by side."""
        known = () if taps is None else features_before(taps.layers, before)
        if taps is None or taps.out is None or not known:
            return None
        width = self.text.hidden_size
        return torch.cat([taps.out[:, i * width : (i + 1) * width] for i in known], dim=1)

    def _take_features(self, payload: StagePayload, taps: FeatureTap | None) -> None:
        if taps is None or payload.features is None:
            return
        width, known = self.text.hidden_size, features_before(taps.layers, self.layer_range.start)
        taps.out = payload.prefix.new_zeros(payload.prefix.shape[0], len(taps.layers) * width)
        for column, i in enumerate(known):
            taps.out[:, i * width : (i + 1) * width] = payload.features[:, column * width : (column + 1) * width]

    def _check_routes(self, batch: Batch) -> None:
        if batch.routes is None:
            return
        if self.rows.size > 1:
            raise ConfigError(
                f"routes: tokens are sharded over {self.rows.size} ranks (moe_exchange='all_to_all'); record or replay "
                "with moe_exchange='all_reduce'"
            )
        moe = self.text.moe
        if moe is None:
            raise ConfigError("the batch has routes, but this model has no experts")
        layers = self.text.num_layers - len(self.text.dense_layers)
        batch.routes.check((batch.num_tokens, layers, moe.top_k), moe.num_experts, self.device)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.layers[self.layer_range.start].input_layernorm.weight.device

    def _embed(self, batch: Batch, inputs_embeds: Tensor | None) -> Tensor:
        weight = self.embed_tokens.weight
        given = inputs_embeds if inputs_embeds is not None else batch.input_ids
        if given is None:
            raise ConfigError("the batch has no input_ids and no inputs_embeds were given")
        if given.device != weight.device:
            raise ConfigError(f"the input is on {given.device}, the model on {weight.device}")
        if given.shape[0] != batch.num_tokens:
            raise ConfigError(f"the input has {given.shape[0]} tokens, the batch describes {batch.num_tokens}")
        if inputs_embeds is None:
            if given.is_floating_point() or given.dtype == torch.bool:
                raise ConfigError(f"input_ids must be integers, got {given.dtype}")
            embedded: Tensor = self.embed_tokens(given)
            return embedded
        if given.dtype != weight.dtype or given.shape[1:] != weight.shape[1:]:
            raise ConfigError(
                f"inputs_embeds are {given.dtype} of width {given.shape[-1]}, the model has {weight.dtype} of width "
                f"{weight.shape[1]}"
            )
        return self.rows.shard(given)

    def _reader_after(self, layer: int, taps: FeatureTap | None) -> AttnRes:
        """Whoever reads the stream after `layer`: the next layer's attention, after the last the output."""
        if layer + 1 in self.layer_range:
            return self.layers[layer + 1].attn_read
        if layer + 1 < self.text.num_layers and taps is not None and taps.kind == "mixture":
            raise ConfigError(
                f"the mixture after layer {layer} needs weights of layer {layer + 1}, which this model does not hold"
            )
        if not self.has_output:
            return self.layers[layer].mlp_read  # a prefix tap does not read
        return self.output_read


class KimiK3ForCausalLM(K3Module):
    """The text model with its head: `model(Batch.pack([ids]))` gives float32 logits of every token."""

    def __init__(
        self,
        config: KimiK3Config,
        *,
        mesh: Mesh | None = None,
        layers: range | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        backends: str | Mapping[str, str] | None = None,
    ) -> None:
        """Build the model with uninitialised weights.

        Args:
            config: the model.
            mesh: groups of ranks; default one rank.
            layers: run only these layers.
            dtype: of the weights; those kept wide stay fp32.
            device: of the weights; "meta" allocates nothing.
            backends: a family of kernels to prefer, or a mapping from ops to implementations to force.

        Raises:
            BackendUnavailable: a forced implementation does not exist or cannot run here.
        """
        super().__init__()
        check_place(dtype, device)
        self.config = config
        self.mesh = mesh or Mesh.single()
        self.family = backends if isinstance(backends, str) else None
        self.backends: dict[str, str] = {} if backends is None or isinstance(backends, str) else dict(backends)
        check_forced(config, self.family, self.backends, dtype=dtype, device=device, tp_size=self.mesh.tp.size)
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        text = config.text
        self.model = KimiK3Model(text, mesh=self.mesh, layers=layers, **place)
        if self.model.has_output:
            self.lm_head = Linear(text.hidden_size, text.vocab_size, cut="out", even=False, tp=self.mesh.tp, **place)
        self._note_dtype()

    def _apply(self, fn: Any, recurse: bool = True) -> KimiK3ForCausalLM:  # noqa: ANN401 - torch's signature
        super()._apply(fn, recurse)
        self._note_dtype()
        return self

    def _note_dtype(self) -> None:
        """Keep `config.dtype` true, so that a cache made from the configuration fits the model."""
        name = str(self.dtype).removeprefix("torch.")
        if self.config.dtype != name:
            self.config = dataclasses.replace(self.config, dtype=name)

    def forward(
        self,
        batch: Batch,
        cache: CacheViews | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        taps: FeatureTap | None = None,
        logits: Literal["all", "last"] = "all",
    ) -> Tensor:
        """Compute logits.

        Args:
            batch: T packed tokens of B requests.
            cache: memory of each layer; None means whole sequences, stateless.
            inputs_embeds: `[T, D]` in place of the embedding of `batch.input_ids`.
            taps: hidden states to keep for a draft.
            logits: "all" new tokens, or the "last" one of each request (zeros for a request without new tokens).

        Returns:
            float32 `[T, vocab]` or `[B, vocab]`.

        Raises:
            ConfigError, RequestError: see `KimiK3Model.forward`.
        """
        if self.mesh.pp.size > 1:
            return self.pipeline([batch], cache, inputs_embeds=[inputs_embeds], taps=[taps], logits=logits)[0]
        hidden = self.hidden(batch, cache, inputs_embeds=inputs_embeds, taps=taps)
        return self.scores(_last_tokens(hidden, batch) if logits == "last" else hidden)

    def pipeline(
        self,
        batches: Sequence[Batch],
        cache: CacheViews | None = None,
        *,
        inputs_embeds: Sequence[Tensor | None] = (),
        taps: Sequence[FeatureTap | None] = (),
        logits: Literal["all", "last"] = "all",
    ) -> list[Tensor]:
        """Run several steps through the pipeline stages, so that each stage works while the others do.

        Every stage calls this with the same batches. They must not depend on one another's results: micro-batches of
        a prefill, also the chunks of one prompt in order, whose state each stage keeps.

        Args:
            batches: the steps.
            cache: memory of the layers held here.
            inputs_embeds: for each step in place of the embedding, or None.
            taps: for each step the hidden states to keep, or None; complete on the last stage.
            logits: as in `forward`.

        Returns:
            The logits of each step, on every rank.
        """
        pp, stage = cast("Chain", self.mesh.pp), self.model
        last, none = pp.size - 1, [None] * len(batches)
        given: Sequence[Tensor | None] = inputs_embeds or none
        tapped: Sequence[FeatureTap | None] = taps or none
        done, sent = [], []
        for batch, embeds, tap in zip(batches, given, tapped, strict=True):
            payload = None
            if pp.rank > 0:
                payload = stage.unpack_payload(pp.receive(stage.payload_like(batch, tap), pp.rank - 1))
            with self.use_backends():
                out = stage.run_stage(batch, cache, payload, inputs_embeds=embeds, taps=tap)
            if isinstance(out, StagePayload):
                packed = out.pack()
                sent.append((packed, pp.send(packed, pp.rank + 1)))
                rows = batch.num_tokens if logits == "all" else len(batch.new_tokens)
                done.append(self._logits_like(rows))
            else:
                done.append(self.scores(_last_tokens(out, batch) if logits == "last" else out))
        for _, work in sent:
            if work is not None:
                work.wait()
        if pp.size > 1:
            done = [pp.broadcast(scores.contiguous(), last) for scores in done]
        return done

    def _logits_like(self, rows: int) -> Tensor:
        dtype = torch.promote_types(self.dtype, torch.float32)
        return torch.empty(rows, self.config.text.vocab_size, dtype=dtype, device=self.device)

    def hidden(
        self,
        batch: Batch,
        cache: CacheViews | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        taps: FeatureTap | None = None,
    ) -> Tensor:
        """Compute what the head reads: `[T, D]`, normed. Arguments and errors as in `forward`."""
        with self.use_backends():
            hidden: Tensor = self.model(batch, cache, inputs_embeds=inputs_embeds, taps=taps)
        return hidden

    def scores(self, hidden: Tensor) -> Tensor:
        """Apply the head to some rows of `hidden`: float32 logits `[n, vocab]`."""
        with self.use_backends():
            scores: Tensor = self.lm_head(hidden)
        tp, vocab = self.mesh.tp, self.config.text.vocab_size
        if tp.size > 1:
            part = -(-vocab // tp.size)  # the last ranks may hold fewer rows
            scores = tp.all_gather(nn.functional.pad(scores, (0, part - scores.shape[-1])), dim=-1)[:, :vocab]
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def use_backends(self) -> contextlib.AbstractContextManager[None]:
        """The kernel preferences of this model as a context."""
        if self.family is None and not self.backends:
            return contextlib.nullcontext()
        return ops.use_backend(self.family, **self.backends)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations."""
        return self.model.layers[self.model.layer_range.start].input_layernorm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @classmethod
    def from_pretrained(  # noqa: PLR0913 - the one place where all that can be chosen meets
        cls,
        path: str | PathLike[str],
        *,
        mesh: Mesh | None = None,
        layers: range | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        backends: str | Mapping[str, str] | None = None,
        revision: str | None = None,
        resident_experts: int | None = None,
        progress: bool = True,
    ) -> KimiK3ForCausalLM:
        """Load the text model of a checkpoint; vision tensors are skipped without being read.

        Weights come without gradients; `requires_grad_()` turns them on.

        Args:
            path: a folder, or a name on the Hugging Face hub.
            mesh: groups of ranks; only this rank's part is read.
            layers: `range(0, n)` runs the first n layers only; a range that begins later is a slice (see
                `KimiK3Model.start`). Tensors of other layers are never read.
            dtype: None keeps the stored dtypes; float32 upcasts everything, decoded experts included.
            device: where the weights go; default CPU.
            backends: see the constructor.
            revision: of a hub name.
            resident_experts: hold at most this many routed experts of each layer, as they are stored, and read the
                others from their files when they are chosen (the least recently used leaves); None holds all. The
                logits are the same. The files must stay as they are; see `expert_stats` and `load_weights`.
            progress: show a progress bar on a terminal.

        Raises:
            CheckpointError: missing, unexpected, mis-shaped or damaged tensors or files.
            ConfigError: a configuration that is not implemented or does not divide over the ranks, a dtype that weights
                cannot have, a device that is not here, or fewer than one resident expert.
            BackendUnavailable: a forced implementation cannot run here. All before anything is allocated.
        """
        check_place(dtype, device)
        if resident_experts is not None and (type(resident_experts) is not int or resident_experts < 1):
            raise ConfigError(
                f"resident_experts={resident_experts!r} must be an integer >= 1, or None to hold all experts"
            )
        folder = checkpoint.Folder(path, revision=revision)
        config = KimiK3Config.from_hf(folder.config())
        stored = folder.tensors()
        if mesh is not None:
            mesh.check_same("the checkpoint", checkpoint.fingerprint(config.hf, stored))
        main = dtype or checkpoint.main_dtype(stored, config)
        # said outright: an ambient device can be shadowed by whoever calls this
        model = cls(config, mesh=mesh, layers=layers, dtype=main, device="meta", backends=None)
        model._note_dtype()
        model.family = backends if isinstance(backends, str) else None
        model.backends = {} if backends is None or isinstance(backends, str) else dict(backends)
        check_forced(
            config,
            model.family,
            model.backends,
            dtype=main,
            device=device,
            tp_size=model.mesh.tp.size,
            offloaded=resident_experts is not None,
        )
        with torch.inference_mode(mode=False):  # weights that can be trained and replaced, wherever they were loaded
            checkpoint.load(
                model,
                stored,
                text=config.text,
                dtype=main,
                device=device or "cpu",
                resident_experts=resident_experts,
                progress=progress,
            )
            model.requires_grad_(requires_grad=False)
            fuse(model)
        return model.eval()

    def load_weights(
        self,
        source: str | PathLike[str] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        partial: bool = False,
        revision: str | None = None,
        progress: bool = True,
    ) -> None:
        """Replace the weights in the memory where they are, so that captured graphs and views of them stay valid.

        Everything is checked before anything is written. Values take the dtype of this model; a rank takes its part.
        Packed experts take packed tensors of their format, or plain ones, which are encoded. Experts that are read
        from files (`resident_experts`) are read from the new folder from now on. States and caches that were computed
        with the old weights are the caller's business.

        Args:
            source: a folder or a name on the hub whose configuration computes the same, or tensors by their stored
                names. An iterable of pairs is read to its end first.
            partial: what the source lacks stays as it is; else it is refused. A packed matrix needs all its tensors.
            revision: of a hub name.
            progress: show a progress bar on a terminal.

        Raises:
            CheckpointError: missing, unexpected, mis-shaped or damaged tensors or files; or a failure while writing,
                after which the weights are partly new (its `weights_changed` says so).
            ConfigError: another configuration, something that is no tensor, or a model without memory. Nothing has
                been written.
        """
        if self.device.type == "meta":
            raise ConfigError("load_weights: this model is on the meta device; use from_pretrained()")
        given = None
        if isinstance(source, str | os.PathLike):
            folder = checkpoint.Folder(source, revision=revision)
            found = KimiK3Config.from_hf(folder.config()).text
            if differences := self.config.text.differences(found):
                listed = "\n".join(f"  {line}" for line in differences)
                raise ConfigError(f"{source}: its configuration computes something else than this model:\n{listed}")
            stored = folder.tensors()
        else:
            given = checkpoint.GivenTensors.of(source)
            stored = given.infos()
        checkpoint.update(
            self, stored, given, text=self.config.text, dtype=self.dtype, partial=partial, progress=progress
        )

    def expert_stats(self) -> dict[int, dict[str, int]]:
        """Counters of experts that are read from files, by layer; empty if all are in memory.

        Each layer has `hits` and `misses` (experts that a step needed and found, or had to read), `bytes_read`,
        `resident` (experts held now) and `limit` (the `resident_experts` of `from_pretrained`). They start at 0 when a
        folder is loaded.
        """
        stores = {
            layer.index: layer.block_sparse_moe.experts.packed for layer in self.model.layers if not layer.is_dense
        }
        return {i: store.stats() for i, store in stores.items() if isinstance(store, checkpoint.DiskExperts)}

    def save_pretrained(
        self,
        path: str | PathLike[str],
        *,
        experts: ops.moe.ExpertFormat | None = None,
        max_file_bytes: int = 5 << 30,
        extra: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write the released layout: `config.json` and one or several safetensors files.

        Args:
            path: folder, made if needed.
            experts: "bf16" (unpacked, in the model's dtype), "mxfp4" or "nvfp4"; None keeps what the model holds.
                Experts that are read from files pass through one by one, in their stored dtype.
            max_file_bytes: begin another file when one is full.
            extra: further tensors by their stored name, for example of the vision tower. Without any, the written
                configuration is text-only.

        Raises:
            ConfigError: the model is a slice or one rank's part, has no `config.json` to write, or reads experts from
                this very folder.
        """
        export.save(self, self.config, path, experts=experts, max_file_bytes=max_file_bytes, extra=extra or {})


def _last_tokens(hidden: Tensor, batch: Batch) -> Tensor:
    if hidden.shape[0] == len(batch.new_tokens) and all(batch.new_tokens):
        return hidden  # one of each
    last = batch.cu_seqlens[1:].long() - 1
    if all(batch.new_tokens):
        return hidden[last]
    present = torch.tensor([n > 0 for n in batch.new_tokens], device=hidden.device)
    picked = hidden[last.clamp(min=0)] if hidden.shape[0] else hidden.new_zeros(len(last), hidden.shape[1])
    return torch.where(present[:, None], picked, 0)


def check_place(dtype: torch.dtype | None, device: torch.device | str | None) -> None:
    """Refuse a dtype that weights cannot have, and a device that is not here.

    Raises:
        ConfigError: names what was asked and what is possible.
    """
    known = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    if dtype is not None and dtype not in known:
        raise ConfigError(f"dtype={dtype} is not one of {', '.join(map(str, known))}")
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # which of the two depends on the device and the build of torch
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device={str(device)!r} cannot be used here: {reason}") from error


def check_forced(
    config: KimiK3Config,
    family: str | None,
    backends: Mapping[str, str],
    *,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    tp_size: int,
    offloaded: bool = False,
) -> None:
    """Refuse forced kernels that cannot serve this model here, before anything is built.

    Raises:
        ConfigError, BackendUnavailable: an op or implementation that does not exist, or is not able.
    """
    check_backends(family, backends)
    if not backends:
        return
    dtype = dtype or torch.get_default_dtype()
    specs: dict[str, Any] = {}
    for name in ("kda_chunk", "kda_recurrent", "kda_mixer"):
        mode: Literal["prefill", "decode"] = "prefill" if name == "kda_chunk" else "decode"
        specs[name] = ops.KDASpec.from_config(config, tp_size=tp_size, mode=mode, dtype=dtype)
    if config.text.moe is not None:
        specs["experts"] = ops.ExpertsSpec.from_config(config, tp_size=tp_size, offloaded=offloaded, dtype=dtype)
    kind = None if device is None else torch.device(device).type
    with ops.use_backend(**backends):
        for name in backends:
            op = ops.ops()[name]
            op.resolve(specs.get(name), target=op.local_target("cpu" if kind in {None, "cpu", "meta"} else kind))
