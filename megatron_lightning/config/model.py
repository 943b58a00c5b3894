"""What a GPT is: sizes, norms, activation, positions. Global sizes only; nothing here knows how it
will be split.

`GPTConfig.check` lists every violated rule at once. `num_parameters` and `flops_per_token` count
what a network built from the config holds and does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from megatron_lightning.config.field_types import type_problems, with_inner
from megatron_lightning.config.latent_attention import LatentAttentionConfig, latent_problems
from megatron_lightning.config.model_rules import (
    MODEL_RULES,
    Activation,
    Norm,
    PositionEmbeddingKind,
)
from megatron_lightning.config.moe import (
    MoEConfig,
    moe_biases,
    moe_matmul_weights,
    moe_problems,
    moe_weights,
)
from megatron_lightning.config.multi_token_prediction import (
    MultiTokenPredictionConfig,
    prediction_problems,
)
from megatron_lightning.config.names import NamesFields, remedy
from megatron_lightning.config.rotary import RotaryConfig
from megatron_lightning.config.variants import (
    AttentionConfig,
    ClampConfig,
    StreamConfig,
    variant_problems,
)


@dataclass(frozen=True, kw_only=True)
class GPTConfig(NamesFields):
    """A decoder-only transformer.

    The defaults are those of the Llama family; presets state differences from them. A size given as
    0 is derived when the config is made (see its field), so that readers always find a number.
    """

    vocab_size: int
    """True number of token ids; padding for tensor parallelism is storage and never seen by the
    model.
    """
    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width H of the hidden state."""
    num_attention_heads: int
    """Query heads N."""
    num_query_groups: int = 0
    """Key/value heads G, each shared by N/G query heads; 0: N (multi-head), 1: multi-query."""
    head_dim: int = 0
    """Size D of a query, key or value head; 0: H / N."""
    ffn_hidden_size: int = 0
    """Width F of the MLP; 0: 4H, or for a gated unit 8H/3 (about as many weights) rounded down to a
    multiple of 64, as Megatron-LM does, and never less than 64.
    """
    max_position_embeddings: int = 2048
    """Capacity of the position scheme, in tokens; for learned positions the rows of the table."""
    norm: Norm = "rmsnorm"
    """Kind of every norm: rmsnorm (weight only) or layernorm (weight and bias)."""
    norm_epsilon: float = 1e-5
    """Added to the mean square (or variance) under the root."""
    activation: Activation = "silu"
    """Non-linearity of the MLP; gelu is the exact one, gelu_tanh its tanh form."""
    gated_linear_unit: bool = True
    """The MLP's first layer has a gate half (activated) and an up half, multiplied; silu + gated is
    SwiGLU.
    """
    add_bias_linear: bool = False
    """Biases on all linear layers of attention and MLP; the output layer never has one."""
    add_qkv_bias: bool = False
    """Biases on the query, key and value projection even without add_bias_linear."""
    qk_layernorm: bool = False
    """Norm over each query and key head, before rotation, with one weight of size D shared by the
    heads.
    """
    position_embedding: PositionEmbeddingKind = "rope"
    """rope (rotation of queries and keys), learned (a table added to the word embedding) or
    none.
    """
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    """Rotary frequencies; ignored unless position_embedding is rope."""
    window_size: int = 0
    """Tokens that a query of a sliding layer sees, itself included; 0: all before it."""
    window_pattern: str = "S"
    """One letter a layer, repeated over the layers: S sliding (window_size), F full. Ignored when
    window_size is 0.
    """
    tie_word_embeddings: bool = False
    """The output layer's weight is the word embedding."""
    attention_dropout: float = 0.0
    """Probability of dropping an attention weight."""
    hidden_dropout: float = 0.0
    """Probability of dropping an element of the embedding and of each residual branch."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights; divided by sqrt(2 * num_layers) for the two that end a
    residual branch.
    """
    make_vocab_size_divisible_by: int = 128
    """Under tensor parallelism each rank's rows of the vocabulary are padded to a multiple of
    this.
    """
    label_smoothing: float = 0.0
    """Share of the target probability that is spread evenly over the true vocabulary."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Scale and cap of scores, sinks, rotation of sliding layers."""
    stream: StreamConfig = field(default_factory=StreamConfig)
    """Scale of the embedding, kind and number of norms, cap of logits."""
    clamp: ClampConfig | None = None
    """GPT-OSS's clamped gated unit in place of the plain one."""
    moe: MoEConfig | None = None
    """Experts in place of the MLP of some or all layers; None: a dense model."""
    latent_attention: LatentAttentionConfig | None = None
    """Keys and values from one small vector a token, as in DeepSeek-V2 and V3; None: grouped
    queries. head_dim is then that of queries and keys.
    """
    multi_token_prediction: MultiTokenPredictionConfig | None = None
    """Layers that predict further tokens during training, as in DeepSeek-V3."""

    def __post_init__(self) -> None:
        if type_problems(self):
            return  # `check` says so
        for name, value in self._derived().items():
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)

    def _derived(self) -> dict[str, int]:
        """Values that the three optional sizes take when given as 0."""
        gated = max(8 * self.hidden_size // 192, 1) * 64
        heads_fit = (
            self.num_attention_heads > 0 and self.hidden_size % self.num_attention_heads == 0
        )
        head_dim = self.hidden_size // self.num_attention_heads if heads_fit else 0
        latent = self.latent_attention
        return {
            "num_query_groups": self.num_attention_heads,
            "head_dim": head_dim if latent is None else latent.query_dim,
            "ffn_hidden_size": gated if self.gated_linear_unit else 4 * self.hidden_size,
        }

    def with_changes(self, **changes: Any) -> GPTConfig:
        """Return a copy with fields replaced. Derived sizes follow, unless they differ from their
        derived value. A name with a dot is a field of a config inside: `moe.router_topk`.
        """
        changes = with_inner(self, changes)
        names = {f.name for f in fields(self)}
        if unknown := sorted(set(changes) - names):
            told = [f"{name} is no field: {remedy(GPTConfig, name, '')}" for name in unknown]
            raise ValueError("; ".join(told))
        derived: dict[str, Any] = {
            name: 0 for name, value in self._derived().items() if getattr(self, name) == value
        }
        return replace(self, **(derived | changes))

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict of all fields; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GPTConfig:
        """Make a config from `to_dict`'s form."""
        made: dict[str, Any] = {"rotary": RotaryConfig(**values["rotary"])}
        if "attention" in values:
            made["attention"] = AttentionConfig.from_dict(values["attention"])
        if "stream" in values:
            made["stream"] = StreamConfig(**values["stream"])
        if values.get("clamp") is not None:
            made["clamp"] = ClampConfig(**values["clamp"])
        if values.get("moe") is not None:
            made["moe"] = MoEConfig(**values["moe"])
        if values.get("latent_attention") is not None:
            made["latent_attention"] = LatentAttentionConfig(**values["latent_attention"])
        if values.get("multi_token_prediction") is not None:
            prediction = MultiTokenPredictionConfig(**values["multi_token_prediction"])
            made["multi_token_prediction"] = prediction
        return cls(**{**values, **made})

    @property
    def queries_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_query_groups

    @property
    def qkv_size(self) -> int:
        """Rows of the packed query/key/value projection: G groups of (N/G + 2) heads of D."""
        return (self.num_attention_heads + 2 * self.num_query_groups) * self.head_dim

    @property
    def attention_size(self) -> int:
        """Width of the attention output, N value heads; not always the hidden size."""
        return self.num_attention_heads * self.value_dim

    @property
    def value_dim(self) -> int:
        """Size of a value head: D, but for latent attention."""
        latent = self.latent_attention
        return self.head_dim if latent is None else latent.v_head_dim

    @property
    def rotary_dim(self) -> int:
        """Part of each head that is rotated: its first elements, in latent attention its last."""
        if self.latent_attention is not None:
            return self.latent_attention.qk_pos_emb_head_dim
        return int(self.head_dim * self.rotary.percent)

    def padded_vocab_size(self, tensor_parallel_size: int = 1) -> int:
        """Rows of the vocabulary as stored over `tensor_parallel_size` ranks, padding included."""
        block = self.make_vocab_size_divisible_by * tensor_parallel_size
        return -(-self.vocab_size // block) * block

    def window_of(self, layer: int) -> int:
        """Window of layer number `layer` (from 0), in tokens; 0: no limit."""
        sliding = self.window_pattern[layer % len(self.window_pattern)] == "S"
        return self.window_size if sliding else 0

    def is_moe_layer(self, layer: int) -> bool:
        """True when layer number `layer` (from 0) has experts in place of the MLP."""
        return self.moe is not None and self.moe.is_moe_layer(layer)

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return sum(map(self.is_moe_layer, range(self.num_layers)))

    def check(self) -> list[str]:
        """Every violated rule as a sentence with field, value and remedy; empty when all is
        well.
        """
        if wrong := type_problems(self):
            return wrong
        from_own_rules = [message for rule in MODEL_RULES for message in rule(self)]
        from_own_rules += variant_problems(self) + moe_problems(self)
        from_own_rules += latent_problems(self) + prediction_problems(self)
        return from_own_rules + (self.rotary.check() if self.position_embedding == "rope" else [])

    def num_parameters(self) -> int:
        """Parameters of the network, a tied head counted once, vocabulary without padding."""
        norm_size = self.hidden_size * (2 if self.norm == "layernorm" else 1)
        head_norms = 2 * self.head_dim * (norm_size // self.hidden_size) * self.qk_layernorm
        if (latent := self.latent_attention) is not None:
            ranks = latent.q_lora_rank + latent.kv_lora_rank
            head_norms = ranks * (norm_size // self.hidden_size)
        up_size = self.ffn_hidden_size * (2 if self.gated_linear_unit else 1)
        qkv_bias = self.qkv_size if self.add_bias_linear or self.add_qkv_bias else 0
        biases = qkv_bias + (self.hidden_size if self.add_bias_linear else 0)
        mlp_biases = self.hidden_size + up_size if self.add_bias_linear else 0
        norms = (4 if self.stream.branch_norm else 2) * norm_size + head_norms
        sinks = self.num_attention_heads if self.attention.sinks else 0
        dense, sparse = self._layer_counts()
        layers = (dense + sparse) * (self._attention_weights() + biases + norms + sinks)
        layers += dense * (self._mlp_weights() + mlp_biases)
        if self.moe is not None:
            layers += sparse * (moe_weights(self) + moe_biases(self))
        layers += self.prediction_depths * (2 * self.hidden_size**2 + 3 * norm_size)
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        learned = self.position_embedding == "learned"
        positions = self.max_position_embeddings * self.hidden_size * learned
        return layers + tables + positions + norm_size

    def flops_per_token(self, seq_length: int, *, causal: bool = False) -> int:
        """Floating-point operations per token of one training step (forward and backward) at
        `seq_length` tokens.

        Convention: a multiply-add is 2, backward is twice forward, recomputation is not counted;
        matrix products only (linear layers, output layer over the true vocabulary, attention scores
        and values), no norms, activations, embedding look-up or optimizer; of experts, those that a
        token is sent to. By default scores are
        counted for the whole sequence (or the window), as in appendix B of PaLM (arXiv 2204.02311),
        which most published utilisation figures use; `causal=True` counts the half that a causal
        kernel computes.
        """
        dense, sparse = self._layer_counts()
        matmul = (dense + sparse) * self._attention_weights() + dense * self._mlp_weights()
        if self.moe is not None:
            matmul += sparse * moe_matmul_weights(self)
        matmul += (1 + self.prediction_depths) * self.vocab_size * self.hidden_size
        matmul += self.prediction_depths * 2 * self.hidden_size**2
        last = self.num_layers - 1
        keys = sum(
            self._keys_per_query(layer, seq_length, causal=causal)
            for layer in (*range(self.num_layers), *self.prediction_depths * [last])
        )
        heads_size = self.num_attention_heads * (self.head_dim + self.value_dim)
        return round(6 * matmul + 6 * heads_size * keys)

    @property
    def prediction_depths(self) -> int:
        """Layers of multi-token prediction; each is like the last layer of the network."""
        prediction = self.multi_token_prediction
        return 0 if prediction is None else prediction.num_layers

    def _layer_counts(self) -> tuple[int, int]:
        """(layers with an MLP, layers with experts), those of multi-token prediction included."""
        sparse = self.num_moe_layers + self.prediction_depths * self.is_moe_layer(
            self.num_layers - 1
        )
        return self.num_layers + self.prediction_depths - sparse, sparse

    def _attention_weights(self) -> int:
        if self.latent_attention is not None:
            heads = self.num_attention_heads
            return self.latent_attention.matmul_weights(self.hidden_size, heads)
        return self.hidden_size * (self.qkv_size + self.attention_size)

    def _mlp_weights(self) -> int:
        return (3 if self.gated_linear_unit else 2) * self.hidden_size * self.ffn_hidden_size

    def _keys_per_query(self, layer: int, seq_length: int, *, causal: bool) -> float:
        """Mean number of keys per query; a causal band of width w in a square of side s has area w
        (s - w / 2).
        """
        width = min(self.window_of(layer) or seq_length, seq_length)
        return width * (1 - width / (2 * seq_length)) if causal else float(width)
