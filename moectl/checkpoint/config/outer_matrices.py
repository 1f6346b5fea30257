"""The matrices of a model outside its routed experts: attention, dense layers, embeddings, encoders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .declared_layers import DeclaredLayers
from .fields import ConfigFields
from .model_shape import HEADS, KV_HEADS
from .stated_sizes import StatedSizes, Untold

_DEFAULT_KINDS = ("full_attention", "sliding_attention", "attention", "chunked_attention", "*")
"""Kinds of layers with softmax attention."""


class OuterMatrix(NamedTuple):
    """A matrix ``[rows, columns]`` by its module's name; `quantizable` if the config decides its format."""

    module: str
    rows: int
    columns: int
    quantizable: bool = True


@dataclass(frozen=True)
class _Architecture:
    """What the configs of one architecture leave unsaid about its layers outside the experts.

    Attributes:
        block: the module of a layer with its MLP or experts.
        shared: the module of the shared experts in `block`.
        attention: the module with softmax attention.
        gated_attention: the query projection also has a gate of its size.
        tied: the output head is the embedding, unless `tie_word_embeddings` says otherwise.
        parallel_mlp: MoE layers have a dense MLP, too.
        kinds: True when not every layer has softmax attention.
        vision: the architecture's models have an image encoder, so that a config without one is not whole.
    """

    block: str = "mlp"
    shared: str = "shared_experts"
    attention: str = "self_attn"
    gated_attention: bool = False
    tied: bool = False
    parallel_mlp: bool = False
    kinds: bool = False
    vision: bool = False


_PLAIN = _Architecture()
_QWEN = _Architecture(shared="shared_expert")
_HYBRID_QWEN = _Architecture(shared="shared_expert", gated_attention=True, kinds=True)

_ARCHITECTURES: Mapping[str, _Architecture] = {
    "gptoss": _PLAIN,
    "deepseekv2": _PLAIN,
    "deepseekv3": _PLAIN,
    "deepseekv32": _PLAIN,
    "kimik2": _PLAIN,
    "kimik25": _Architecture(vision=True),
    "glm4moe": _PLAIN,
    "glmmoedsa": _PLAIN,
    "mixtral": _Architecture("block_sparse_moe"),
    "minimaxm2": _Architecture("block_sparse_moe"),
    "minimaxm3": _Architecture("block_sparse_moe"),
    "minimaxm3vl": _Architecture("block_sparse_moe", vision=True),
    "phimoe": _Architecture("block_sparse_moe"),
    "olmoe": _PLAIN,
    "ernie45moe": _PLAIN,
    "dbrx": _Architecture("ffn", attention="norm_attn_norm.attn"),
    "granitemoe": _Architecture("block_sparse_moe"),
    "granitemoeshared": _Architecture("block_sparse_moe"),
    "granitemoehybrid": _Architecture("block_sparse_moe", kinds=True),
    "jamba": _Architecture("feed_forward", kinds=True),
    "nemotronh": _Architecture("mixer", attention="mixer", kinds=True),
    "qwen2moe": _QWEN,
    "qwen3moe": _QWEN,
    "qwen3vlmoe": _Architecture(vision=True),
    "qwen3next": _HYBRID_QWEN,
    "qwen35moe": _Architecture(shared="shared_expert", gated_attention=True, kinds=True, vision=True),
    "llama4": _Architecture("feed_forward", "shared_expert", vision=True),
    "gemma4": _Architecture(tied=True, parallel_mlp=True, vision=True),
}
"""Architectures whose layers are known, by `model_type` in lower case, letters and digits only."""


class OuterMatrices:
    """The matrices outside the routed experts of one model, by the sizes in its config.

    Raises `Untold` for an architecture that is not known, and for a config that does not tell a size.
    """

    def __init__(self, config: Mapping[str, Any], declared: DeclaredLayers) -> None:
        self.fields = ConfigFields(config)
        self.sizes = StatedSizes(self.fields.values)
        self.declared, self.problem = declared, declared.group.problem
        self.known = _architecture(self.fields)
        self.hidden = self.problem.model_hidden
        self.vision = self.fields.outer.get("vision_config")
        if self.known.vision and self.vision is None:
            # A copy of the text model's part; vision towers of several GB are in the file.
            raise Untold("vision_config")

    @property
    def kv_heads(self) -> int:
        """Key and value heads of attention."""
        return self.sizes(*KV_HEADS, default=self.sizes(*HEADS))

    def __iter__(self) -> Iterator[tuple[str, OuterMatrix]]:
        """Every matrix, after the prefix of its layer (``layers.N.``), which is empty outside the layers."""
        vocabulary = self.sizes("vocab_size")
        yield "", OuterMatrix("embed_tokens", vocabulary, self.hidden, False)
        tied = self.fields.get("tie_word_embeddings")
        tied = self.fields.outer.get("tie_word_embeddings") if tied is None else tied
        if not (self.known.tied if tied is None else tied):
            yield "", OuterMatrix("lm_head", vocabulary, self.hidden)
        experts = frozenset(self.declared.group.layers)
        for layer in range(self.declared.layers):
            for matrix in (*self._mixer(layer), *self._mlp(layer, layer in experts)):
                yield f"layers.{layer}.", matrix
        if self.vision is not None:
            if not isinstance(self.vision, Mapping):
                raise Untold("vision_config")
            yield "", OuterMatrix("visual", 1, _vision_weights(StatedSizes(self.vision), self.hidden), False)

    def _kind(self, layer: int) -> str:
        """The kind of a layer, by the config's list or period."""
        kinds = self.fields.get("hybrid_override_pattern") or self.fields.get("layer_types")
        kinds = self.fields.get("layers_block_type") if kinds is None else kinds
        if isinstance(kinds, (str, list)) and len(kinds) >= self.declared.layers:
            return str(kinds[layer])
        if self.fields.has("attn_layer_period"):
            at = self.sizes("attn_layer_offset", default=0, low=0)
            return "attention" if layer % self.sizes("attn_layer_period") == at else "mamba"
        if self.fields.has("full_attention_interval"):
            last = (layer + 1) % self.sizes("full_attention_interval") == 0
            return "full_attention" if last else "linear_attention"
        if self.known.kinds:
            raise Untold("layer_types")
        return "full_attention"

    def _mixer(self, layer: int) -> Iterable[OuterMatrix]:
        """What mixes tokens in a layer: attention of any kind, or a state-space model."""
        kind = self._kind(layer)
        if self.fields.has("kv_lora_rank"):
            return (*self._latent_attention(), *self._indexer())
        if kind == "linear_attention":
            return self._linear_attention()
        if kind in ("mamba", "M"):
            return self._first_mamba() if self.fields.has("mamba_dt_rank") else self._second_mamba()
        if kind in ("E", "-"):
            return ()
        if kind not in _DEFAULT_KINDS:
            raise Untold(kind)
        return (*self._attention(kind), *self._sparse_index(layer))

    def _attention(self, kind: str) -> Iterator[OuterMatrix]:
        sizes, hidden, at = self.sizes, self.hidden, self.known.attention
        heads = sizes(*HEADS)
        groups, size = sizes(*KV_HEADS, default=heads), sizes("head_dim", default=hidden // heads)
        shares_values = False
        if kind == "full_attention" and self.fields.has("global_head_dim"):
            size = sizes("global_head_dim")
            shares_values = self.fields.get("attention_k_eq_v") is True
            groups = sizes("num_global_key_value_heads", default=groups) if shares_values else groups
        stated = self.fields.get("attn_output_gate")
        gated = self.known.gated_attention if stated is None else stated is True
        if at.endswith(".attn"):
            yield OuterMatrix(f"{at}.Wqkv", (heads + 2 * groups) * size, hidden)
            yield OuterMatrix(f"{at}.out_proj", hidden, heads * size)
            return
        yield OuterMatrix(f"{at}.q_proj", heads * size * (2 if gated else 1), hidden)
        yield OuterMatrix(f"{at}.k_proj", groups * size, hidden)
        if not shares_values:
            yield OuterMatrix(f"{at}.v_proj", groups * size, hidden)
        yield OuterMatrix(f"{at}.o_proj", hidden, heads * size)

    def _latent_attention(self) -> Iterator[OuterMatrix]:
        sizes, hidden, at = self.sizes, self.hidden, self.known.attention
        heads, latent, rope = sizes(*HEADS), sizes("kv_lora_rank"), sizes("qk_rope_head_dim")
        size, value = sizes("qk_nope_head_dim") + rope, sizes("v_head_dim")
        if self.fields.has("q_lora_rank"):
            query = sizes("q_lora_rank")
            yield OuterMatrix(f"{at}.q_a_proj", query, hidden)
            yield OuterMatrix(f"{at}.q_b_proj", heads * size, query)
        else:
            yield OuterMatrix(f"{at}.q_proj", heads * size, hidden)
        yield OuterMatrix(f"{at}.kv_a_proj_with_mqa", latent + rope, hidden)
        yield OuterMatrix(f"{at}.kv_b_proj", heads * (size - rope + value), latent)
        yield OuterMatrix(f"{at}.o_proj", hidden, heads * value)

    def _indexer(self) -> Iterator[OuterMatrix]:
        """DeepSeek's selection of tokens for sparse attention."""
        if not self.fields.has("index_n_heads"):
            return
        sizes, at = self.sizes, f"{self.known.attention}.indexer"
        heads, size = sizes("index_n_heads"), sizes("index_head_dim")
        yield OuterMatrix(f"{at}.wq_b", heads * size, sizes("q_lora_rank"))
        yield OuterMatrix(f"{at}.wk", size, self.hidden)
        yield OuterMatrix(f"{at}.weights_proj", heads, self.hidden, False)

    def _sparse_index(self, layer: int) -> Iterator[OuterMatrix]:
        """MiniMax' selection of blocks for sparse attention."""
        if not self.fields.has("sparse_attention_config"):
            return
        where = "sparse_attention_config."
        layers = self.fields.get(f"{where}sparse_attention_freq")
        if not isinstance(layers, list) or len(layers) < self.declared.layers:
            raise Untold("sparse_attention_freq")
        if layers[layer]:
            size = self.sizes(f"{where}sparse_index_dim")
            rows = self.sizes(f"{where}sparse_num_index_heads") * size
            yield OuterMatrix(f"{self.known.attention}.index_q_proj", rows, self.hidden, False)
            yield OuterMatrix(f"{self.known.attention}.index_k_proj", size, self.hidden, False)

    def _linear_attention(self) -> Iterator[OuterMatrix]:
        """The gated delta rule of Qwen3-Next and Qwen3.5, which stores the parts of one projection apart."""
        sizes, hidden = self.sizes, self.hidden
        keys = sizes("linear_num_key_heads") * sizes("linear_key_head_dim")
        heads = sizes("linear_num_value_heads")
        values = heads * sizes("linear_value_head_dim")
        if self.fields.model_type.startswith("qwen3_next"):
            yield OuterMatrix("linear_attn.in_proj_qkvz", 2 * (keys + values), hidden)
        else:
            yield OuterMatrix("linear_attn.in_proj_qkv", 2 * keys + values, hidden)
            yield OuterMatrix("linear_attn.in_proj_z", values, hidden)
        yield OuterMatrix("linear_attn.in_proj_ba", 2 * heads, hidden, False)
        yield OuterMatrix("linear_attn.conv1d", 2 * keys + values, sizes("linear_conv_kernel_dim"), False)
        yield OuterMatrix("linear_attn.out_proj", hidden, values)

    def _first_mamba(self) -> Iterator[OuterMatrix]:
        sizes, hidden = self.sizes, self.hidden
        inner, state, rank = sizes("mamba_expand") * hidden, sizes("mamba_d_state"), sizes("mamba_dt_rank")
        yield OuterMatrix("mamba.in_proj", 2 * inner, hidden)
        yield OuterMatrix("mamba.conv1d", inner, sizes("mamba_d_conv"), False)
        yield OuterMatrix("mamba.x_proj", rank + 2 * state, inner)
        yield OuterMatrix("mamba.dt_proj", inner, rank)
        yield OuterMatrix("mamba.A_log", inner, 2 * state, False)
        yield OuterMatrix("mamba.out_proj", hidden, inner)

    def _second_mamba(self) -> Iterator[OuterMatrix]:
        sizes, hidden = self.sizes, self.hidden
        at = self.known.attention if self.known.block == "mixer" else "mamba"
        heads = sizes("mamba_num_heads", "mamba_n_heads")
        inner = heads * sizes("mamba_head_dim", "mamba_d_head")
        states = 2 * sizes("n_groups", "mamba_n_groups") * sizes("ssm_state_size", "mamba_d_state")
        yield OuterMatrix(f"{at}.in_proj", 2 * inner + states + heads, hidden)
        yield OuterMatrix(f"{at}.conv1d", inner + states, sizes("conv_kernel", "mamba_d_conv"), False)
        yield OuterMatrix(f"{at}.out_proj", hidden, inner)

    def _mlp(self, layer: int, experts: bool) -> Iterator[OuterMatrix]:
        """A layer's dense MLP, or what its experts come with: router, shared experts, latent projections."""
        at, hidden, problem = self.known.block, self.hidden, self.problem
        if experts:
            yield OuterMatrix(f"{at}.gate", problem.experts, hidden, False)
            if problem.dims.hidden != hidden:
                yield OuterMatrix(f"{at}.fc1_latent_proj", problem.dims.hidden, hidden)
                yield OuterMatrix(f"{at}.fc2_latent_proj", hidden, problem.dims.hidden)
            width = problem.shared_experts * self.sizes(
                *_SHARED_WIDTHS, default=problem.dims.intermediate, low=0
            )
            if width:
                yield from self._dense(f"{at}.{self.known.shared}", width)
            if not self.known.parallel_mlp:
                return
        elif self.known.block == "mixer" and self._kind(layer) != "-":
            return
        width = self.sizes("dense_intermediate_size", "intermediate_size_mlp", "intermediate_size")
        yield from self._dense("mlp" if at == "block_sparse_moe" else at, width)

    def _dense(self, at: str, width: int) -> Iterator[OuterMatrix]:
        for name in ("gate_proj", "up_proj") if self.problem.activation.gated else ("up_proj",):
            yield OuterMatrix(f"{at}.{name}", width, self.hidden)
        yield OuterMatrix(f"{at}.down_proj", self.hidden, width)


_SHARED_WIDTHS = (
    "moe_shared_expert_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
)


def _architecture(fields: ConfigFields) -> _Architecture:
    """The architecture by the whole model's type, else by the text model's; `Untold` for any other."""
    types = (fields.outer.get("model_type"), fields.values.get("model_type"))
    for name in types:
        spelled = "".join(filter(str.isalnum, name.lower())) if isinstance(name, str) else ""
        known = _ARCHITECTURES.get(spelled.removesuffix("text"))
        if known is not None:
            return known
    raise Untold(str(types))


def _vision_weights(sizes: StatedSizes, text_hidden: int) -> int:
    """Numbers in an image encoder with its projector to the text model.

    Encoders are rows of equal transformer layers; what surrounds these differs, and is small but for the
    projector.
    """
    hidden = sizes("hidden_size", "vt_hidden_size")
    layers = sizes("depth", "num_hidden_layers", "vt_num_hidden_layers")
    inter = sizes("intermediate_size", "vt_intermediate_size")
    gated = 3 if sizes.values.get("hidden_activation") is not None else 2
    blocks = layers * (4 * hidden * hidden + gated * hidden * inter)
    patch = 3 * sizes("temporal_patch_size", default=1) * sizes("patch_size") ** 2 * hidden
    if "position_embedding_size" in sizes.values:  # Gemma: a table for each axis, one projection
        return blocks + patch + hidden * (2 * sizes("position_embedding_size") + text_hidden)
    if "projector_input_dim" in sizes.values:  # Llama-4
        inner, out = sizes("projector_input_dim"), sizes("projector_output_dim")
        return blocks + patch + inter * inner + inner * out + out * text_hidden
    if "img_token_compression_config" in sizes.values:  # MiniMax-M3
        merged = 4 * text_hidden
        return blocks + 2 * patch + text_hidden * (hidden + 2 * text_hidden + merged)
    merge = sizes("spatial_merge_size", default=2) ** 2 * hidden
    positions = sizes("num_position_embeddings", "init_pos_emb_height", default=0, low=0)
    if "init_pos_emb_height" in sizes.values:  # Kimi: a square of them
        positions *= positions
    mergers = sizes.values.get("deepstack_visual_indexes")
    count = 1 + (len(mergers) if isinstance(mergers, list) else 0)
    return blocks + patch + positions * hidden + count * merge * (merge + text_hidden)
