"""Bytes of the weights that are no routed experts, computed from config.json where no header lists them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

from ...errors import CheckpointError
from ...problem.model_shape import BlockedMatrix
from ...problem.other_weights import OtherWeights, sum_weights
from ...problem.schemes import BF16, WeightFormat
from .declared_layers import DeclaredLayers, declared_layers
from .fields import ConfigFields
from .layer_precision import MODULE_PREFIXES
from .model_shape import HEADS, KV_HEADS
from .module_patterns import REGEX, PatternLists, Patterns, few_expressions
from .quantization import MIXED_PRECISION, compressed_group, listed_modules, quantization_method
from .quantization_formats import mapping, modelopt_scheme, names, quark_scheme

_LARGEST = 1 << 24
"""Upper bound of a size in a config, far above any model."""

_DEFAULT_KINDS = ("full_attention", "sliding_attention", "attention", "chunked_attention", "*")
"""Kinds of layers with softmax attention."""


class _Unknown(Exception):
    """The config does not say what a weight's size or format depends on."""


class _Matrix(NamedTuple):
    """A matrix ``[rows, columns]`` by its module's name; `quantizable` if the config decides its format."""

    module: str
    rows: int
    columns: int
    quantizable: bool = True


class _Sizes:
    """Sizes in an object of a config; `_Unknown` for one that is absent or is no size."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def __call__(self, *keys: str, default: int | None = None, low: int = 1) -> int:
        """The first of `keys` that is present, at least `low`; a dot separates nested keys."""
        for key in keys:
            value: Any = self.values
            for part in key.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                if type(value) is not int or not low <= value <= _LARGEST:
                    raise _Unknown(key)
                return value
        if default is None:
            raise _Unknown(keys[0])
        return default


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


def estimated_weights(
    config: Mapping[str, Any],
    quantization: Mapping[str, Any] | None = None,
    file: str = "",
    stored: Collection[str] = ("bf16",),
) -> OtherWeights | None:
    """The weights outside the routed experts of a model with this `config`; None if they cannot be told.

    Norms and biases, below 0.1 %, are left out, and so are layers for multi-token prediction, which engines
    load only when they are asked to predict. `quantization` and `file` are as in `declared_layers`; `stored`
    are the number formats of the experts' tensors: when those are quantized, and the config has no word of
    it, nothing is known of the rest either.

    Example:
        >>> config = {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 8,
        ...           "num_experts_per_tok": 2, "hidden_size": 4096, "intermediate_size": 14336,
        ...           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}
        >>> estimated_weights(config).total
        692191232
    """
    try:
        declared = declared_layers(config, quantization, file)
        if not declared.quantization and set(stored) - {"bf16"}:
            return None
        return _Model(config, declared).weights()
    except (_Unknown, CheckpointError):
        return None


def blocked_matrices(
    config: Mapping[str, Any], quantization: Mapping[str, Any] | None = None, file: str = ""
) -> tuple[BlockedMatrix, ...]:
    """FP8 matrices with blocks outside the experts that are sharded alone; empty where they cannot be told.

    One of each name and size, in the order of the layers. Projections that engines merge with others, such as
    gate and up, are left out, as are replicated ones. Arguments are as in `estimated_weights`.
    """
    try:
        found = dict[tuple[str, int], BlockedMatrix]()
        for name, matrix, weight in _Model(config, declared_layers(config, quantization, file)).formatted():
            leaf = matrix.module.rpartition(".")[2]
            if weight.name != "fp8" or min(weight.block) <= 1 or leaf not in (*_BY_COLUMNS, *_BY_ROWS):
                continue
            rows = leaf in _BY_ROWS
            size = matrix.rows if rows else matrix.columns
            item = BlockedMatrix(name, size, weight.block[0 if rows else 1], rows)
            found.setdefault((matrix.module, size), item)
        return tuple(found.values())
    except (_Unknown, CheckpointError):
        return ()


_BY_COLUMNS = ("o_proj", "out_proj", "down_proj")
"""Matrices whose input features are sharded."""
_BY_ROWS = ("q_b_proj", "kv_b_proj")
"""Matrices whose output features are sharded, each for itself."""


class _Model:
    """The matrices outside the experts of one model, and their formats."""

    def __init__(self, config: Mapping[str, Any], declared: DeclaredLayers) -> None:
        self.fields = ConfigFields(config)
        self.sizes = _Sizes(self.fields.values)
        self.declared, self.problem = declared, declared.group.problem
        self.known = _architecture(self.fields)
        self.hidden = self.problem.model_hidden
        self.vision = self.fields.outer.get("vision_config")
        if self.known.vision and self.vision is None:
            # A copy of the text model's part; vision towers of several GB are in the file.
            raise _Unknown("vision_config")

    def weights(self) -> OtherWeights:
        heads = self.sizes(*KV_HEADS, default=self.sizes(*HEADS))
        found = (
            (f"{name}.weight", weight.nbytes(matrix.rows, matrix.columns))
            for name, matrix, weight in self.formatted()
        )
        return sum_weights(found, self.declared.layers, heads, "config")

    def formatted(self) -> Iterator[tuple[str, _Matrix, WeightFormat]]:
        """Every matrix with its name, from the layer's number on, and its format."""
        formats = _Formats(self.declared)
        for prefix, matrix in self._matrices():
            weight = formats.of(prefix, matrix.module) if matrix.quantizable else BF16
            yield f"{prefix}{matrix.module}", matrix, weight

    def _matrices(self) -> Iterator[tuple[str, _Matrix]]:
        """Every matrix, after the prefix of its layer (``layers.N.``), which is empty outside the layers."""
        vocabulary = self.sizes("vocab_size")
        yield "", _Matrix("embed_tokens", vocabulary, self.hidden, False)
        tied = self.fields.get("tie_word_embeddings")
        tied = self.fields.outer.get("tie_word_embeddings") if tied is None else tied
        if not (self.known.tied if tied is None else tied):
            yield "", _Matrix("lm_head", vocabulary, self.hidden)
        experts = frozenset(self.declared.group.layers)
        for layer in range(self.declared.layers):
            for matrix in (*self._mixer(layer), *self._mlp(layer, layer in experts)):
                yield f"layers.{layer}.", matrix
        if self.vision is not None:
            if not isinstance(self.vision, Mapping):
                raise _Unknown("vision_config")
            yield "", _Matrix("visual", 1, _vision_weights(_Sizes(self.vision), self.hidden), False)

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
            raise _Unknown("layer_types")
        return "full_attention"

    def _mixer(self, layer: int) -> Iterable[_Matrix]:
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
            raise _Unknown(kind)
        return (*self._attention(kind), *self._sparse_index(layer))

    def _attention(self, kind: str) -> Iterator[_Matrix]:
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
            yield _Matrix(f"{at}.Wqkv", (heads + 2 * groups) * size, hidden)
            yield _Matrix(f"{at}.out_proj", hidden, heads * size)
            return
        yield _Matrix(f"{at}.q_proj", heads * size * (2 if gated else 1), hidden)
        yield _Matrix(f"{at}.k_proj", groups * size, hidden)
        if not shares_values:
            yield _Matrix(f"{at}.v_proj", groups * size, hidden)
        yield _Matrix(f"{at}.o_proj", hidden, heads * size)

    def _latent_attention(self) -> Iterator[_Matrix]:
        sizes, hidden, at = self.sizes, self.hidden, self.known.attention
        heads, latent, rope = sizes(*HEADS), sizes("kv_lora_rank"), sizes("qk_rope_head_dim")
        size, value = sizes("qk_nope_head_dim") + rope, sizes("v_head_dim")
        if self.fields.has("q_lora_rank"):
            query = sizes("q_lora_rank")
            yield _Matrix(f"{at}.q_a_proj", query, hidden)
            yield _Matrix(f"{at}.q_b_proj", heads * size, query)
        else:
            yield _Matrix(f"{at}.q_proj", heads * size, hidden)
        yield _Matrix(f"{at}.kv_a_proj_with_mqa", latent + rope, hidden)
        yield _Matrix(f"{at}.kv_b_proj", heads * (size - rope + value), latent)
        yield _Matrix(f"{at}.o_proj", hidden, heads * value)

    def _indexer(self) -> Iterator[_Matrix]:
        """DeepSeek's selection of tokens for sparse attention."""
        if not self.fields.has("index_n_heads"):
            return
        sizes, at = self.sizes, f"{self.known.attention}.indexer"
        heads, size = sizes("index_n_heads"), sizes("index_head_dim")
        yield _Matrix(f"{at}.wq_b", heads * size, sizes("q_lora_rank"))
        yield _Matrix(f"{at}.wk", size, self.hidden)
        yield _Matrix(f"{at}.weights_proj", heads, self.hidden, False)

    def _sparse_index(self, layer: int) -> Iterator[_Matrix]:
        """MiniMax' selection of blocks for sparse attention."""
        if not self.fields.has("sparse_attention_config"):
            return
        where = "sparse_attention_config."
        layers = self.fields.get(f"{where}sparse_attention_freq")
        if not isinstance(layers, list) or len(layers) < self.declared.layers:
            raise _Unknown("sparse_attention_freq")
        if layers[layer]:
            size = self.sizes(f"{where}sparse_index_dim")
            rows = self.sizes(f"{where}sparse_num_index_heads") * size
            yield _Matrix(f"{self.known.attention}.index_q_proj", rows, self.hidden, False)
            yield _Matrix(f"{self.known.attention}.index_k_proj", size, self.hidden, False)

    def _linear_attention(self) -> Iterator[_Matrix]:
        """The gated delta rule of Qwen3-Next and Qwen3.5, which stores the parts of one projection apart."""
        sizes, hidden = self.sizes, self.hidden
        keys = sizes("linear_num_key_heads") * sizes("linear_key_head_dim")
        heads = sizes("linear_num_value_heads")
        values = heads * sizes("linear_value_head_dim")
        if self.fields.model_type.startswith("qwen3_next"):
            yield _Matrix("linear_attn.in_proj_qkvz", 2 * (keys + values), hidden)
        else:
            yield _Matrix("linear_attn.in_proj_qkv", 2 * keys + values, hidden)
            yield _Matrix("linear_attn.in_proj_z", values, hidden)
        yield _Matrix("linear_attn.in_proj_ba", 2 * heads, hidden, False)
        yield _Matrix("linear_attn.conv1d", 2 * keys + values, sizes("linear_conv_kernel_dim"), False)
        yield _Matrix("linear_attn.out_proj", hidden, values)

    def _first_mamba(self) -> Iterator[_Matrix]:
        sizes, hidden = self.sizes, self.hidden
        inner, state, rank = sizes("mamba_expand") * hidden, sizes("mamba_d_state"), sizes("mamba_dt_rank")
        yield _Matrix("mamba.in_proj", 2 * inner, hidden)
        yield _Matrix("mamba.conv1d", inner, sizes("mamba_d_conv"), False)
        yield _Matrix("mamba.x_proj", rank + 2 * state, inner)
        yield _Matrix("mamba.dt_proj", inner, rank)
        yield _Matrix("mamba.A_log", inner, 2 * state, False)
        yield _Matrix("mamba.out_proj", hidden, inner)

    def _second_mamba(self) -> Iterator[_Matrix]:
        sizes, hidden = self.sizes, self.hidden
        at = self.known.attention if self.known.block == "mixer" else "mamba"
        heads = sizes("mamba_num_heads", "mamba_n_heads")
        inner = heads * sizes("mamba_head_dim", "mamba_d_head")
        states = 2 * sizes("n_groups", "mamba_n_groups") * sizes("ssm_state_size", "mamba_d_state")
        yield _Matrix(f"{at}.in_proj", 2 * inner + states + heads, hidden)
        yield _Matrix(f"{at}.conv1d", inner + states, sizes("conv_kernel", "mamba_d_conv"), False)
        yield _Matrix(f"{at}.out_proj", hidden, inner)

    def _mlp(self, layer: int, experts: bool) -> Iterator[_Matrix]:
        """A layer's dense MLP, or what its experts come with: router, shared experts, latent projections."""
        at, hidden, problem = self.known.block, self.hidden, self.problem
        if experts:
            yield _Matrix(f"{at}.gate", problem.experts, hidden, False)
            if problem.dims.hidden != hidden:
                yield _Matrix(f"{at}.fc1_latent_proj", problem.dims.hidden, hidden)
                yield _Matrix(f"{at}.fc2_latent_proj", hidden, problem.dims.hidden)
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

    def _dense(self, at: str, width: int) -> Iterator[_Matrix]:
        for name in ("gate_proj", "up_proj") if self.problem.activation.gated else ("up_proj",):
            yield _Matrix(f"{at}.{name}", width, self.hidden)
        yield _Matrix(f"{at}.down_proj", self.hidden, width)


_SHARED_WIDTHS = (
    "moe_shared_expert_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
)


def _architecture(fields: ConfigFields) -> _Architecture:
    """The architecture by the whole model's type, else by the text model's; `_Unknown` for any other."""
    types = (fields.outer.get("model_type"), fields.values.get("model_type"))
    for name in types:
        spelled = "".join(filter(str.isalnum, name.lower())) if isinstance(name, str) else ""
        known = _ARCHITECTURES.get(spelled.removesuffix("text"))
        if known is not None:
            return known
    raise _Unknown(str(types))


def _vision_weights(sizes: _Sizes, text_hidden: int) -> int:
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


class _Formats:
    """The format of any module outside the experts, as the quantization config declares it.

    Raises `_Unknown` for a config that does not tell: one of a trimmed copy, which lists no exception, or of
    a method whose rules are not followed here.
    """

    def __init__(self, declared: DeclaredLayers) -> None:
        self.main, self.config = declared.precision.main, declared.quantization or {}
        self.excluded, self.method = declared.precision.excluded, quantization_method(self.config)
        inner = self.config.get("quantization")
        self.inner = inner if isinstance(inner, Mapping) else self.config
        self.rules = tuple(few_expressions(self._rules(), lambda rule: rule[0]))
        self.rule_lists = PatternLists([patterns for patterns, _ in self.rules])
        self.listed = listed_modules(self.inner) if self.method.startswith("modelopt") else {}
        mixed = str(self.inner.get("quant_algo")).upper() == MIXED_PRECISION
        lists = self.method in ("compressed-tensors", "quark") or self.method.startswith("modelopt")
        if self.method not in _METHODS or (lists and not (self.excluded or self.listed)):
            raise _Unknown(self.method)
        if mixed and not self.listed:
            raise _Unknown("quantized_layers")
        texts = [*self.excluded.texts, *self.listed, *(text for rule, _ in self.rules for text in rule.texts)]
        layers = [prefix for prefix in MODULE_PREFIXES if any(prefix in text for text in texts)]
        self.prefixes = [prefix.removesuffix("layers").removesuffix("blocks") for prefix in layers]

    def of(self, prefix: str, module: str) -> WeightFormat:
        """The format of `module` in the layer with the `prefix`."""
        names = [f"{before}{prefix}{module}" for before in (*self.prefixes, "model.", "")]
        if self.listed:
            entry = next((self.listed[name] for name in names if name in self.listed), None)
            return BF16 if entry is None else _listed(str(entry.get("quant_algo")))
        if not prefix or self.method in ("", "mxfp4", "gpt_oss_mxfp4"):
            return BF16
        if any(map(self.excluded.matches, names)):
            return BF16
        rule = self.rule_lists.first(names)
        if rule is not None:
            return self.rules[rule][1]()
        if self.method == "compressed-tensors":
            return BF16
        return self.main.scheme.weight

    def _rules(self) -> Iterator[tuple[Patterns, Callable[[], WeightFormat]]]:
        """Patterns of modules with a format of their own; the first that matches applies."""
        if self.method == "compressed-tensors":
            for name, group in mapping(self.config, "config_groups").items():
                if not isinstance(group, Mapping):
                    continue
                targets = [f"{REGEX}.*" if it == "Linear" else it for it in names(group, "targets")]
                read = cache(partial(_of_group, self.config, name, group))
                yield Patterns(targets, f"config_groups.{name}.targets", exact=True), read
        for name, rule in mapping(self.inner, "layer_quant_config").items():
            if isinstance(rule, Mapping):
                key = f"layer_quant_config.{name}"
                yield Patterns((name,), key), cache(partial(_of_quark, rule, key))
        for name in mapping(self.config, "dynamic"):
            if not name.startswith("-:"):
                raise _Unknown("dynamic")
            yield Patterns((name.removeprefix("-:"),), "dynamic", regex=True), lambda: BF16


_METHODS = (
    "",
    "awq",
    "awq_marlin",
    "compressed-tensors",
    "fp8",
    "gptq",
    "gptq_marlin",
    "modelopt",
    "modelopt_fp4",
    "modelopt_mixed",
    "mxfp4",
    "gpt_oss_mxfp4",
    "mxfp8",
    "quark",
)
"""Methods whose rules for modules outside the experts are followed."""


def _of_group(config: Mapping[str, Any], name: str, group: Mapping[str, Any]) -> WeightFormat:
    return compressed_group(config, name, group)[1].weight


def _of_quark(rule: Mapping[str, Any], key: str) -> WeightFormat:
    return quark_scheme(rule, key).weight


@cache
def _listed(algorithm: str) -> WeightFormat:
    return modelopt_scheme(algorithm, "quantized_layers").weight
