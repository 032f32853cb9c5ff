"""A drafter's configuration, and whether it fits a target."""

from dataclasses import dataclass

from sparkgap.catalog.drafter_settings import DrafterSettings
from sparkgap.errors import CheckpointError, ConfigError, UnsupportedModelError
from sparkgap.models.config import ModelConfig

_ARCHITECTURE = "Qwen3ForCausalLM"
"""Draft layers are Qwen3's: an RMSNorm on each query and key head."""

_SETTLED_ELSEWHERE = frozenset(
    {"architectures", "model_type", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers"}
)


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter's networks and the target they were trained for.

    Attributes:
        name: what messages call the drafter.
        settings: what its checkpoint says.
        backbone: the draft layers; its `vocab_size` is the target's, its `max_position_embeddings` the most
            positions the drafter can see.
    """

    name: str
    settings: DrafterSettings
    backbone: ModelConfig

    @classmethod
    def from_settings(cls, settings: DrafterSettings, name: str) -> "DrafterConfig":
        """The configuration of a checkpoint's settings.

        Raises:
            CheckpointError, UnsupportedModelError: as `ModelConfig.from_hf`; a head that the method does not have;
                a mask token outside the vocabulary; a block with nothing to predict.
        """
        transformer = {key: value for key, value in settings.transformer.items() if key not in _SETTLED_ELSEWHERE}
        try:
            backbone = ModelConfig.from_hf({**transformer, "architectures": [_ARCHITECTURE], "model_type": "qwen3"})
        except (CheckpointError, UnsupportedModelError) as error:  # which do not know whose configuration it is
            raise type(error)(f"drafter {name}: {error}") from error
        if settings.method != "dspark" and (settings.markov_rank or settings.confidence_head):
            raise CheckpointError(f"drafter {name}: a {settings.method} drafter has no Markov or confidence head")
        if settings.mask_token_id >= backbone.vocab_size:
            raise CheckpointError(
                f"drafter {name}: mask_token_id {settings.mask_token_id} is outside its vocabulary of "
                f"{backbone.vocab_size} tokens"
            )
        config = cls(name, settings, backbone)
        if settings.method == "mtp" and backbone.hidden_size % 2:
            raise CheckpointError(f"drafter {name}: hidden_size {backbone.hidden_size} of an mtp drafter must be even")
        if config.max_speculative_tokens < 1:
            raise CheckpointError(f"drafter {name}: a block of {settings.block_size} row predicts no token")
        return config

    @property
    def lead_rows(self) -> int:
        """Rows at a block's start that predict nothing: the anchor's, unless it predicts."""
        return 0 if self.settings.sample_from_anchor else 1

    @property
    def max_speculative_tokens(self) -> int:
        """Most tokens one draft has: the block that it was trained for, or what MTP is limited to."""
        return self.settings.max_speculative_tokens

    @property
    def longest_draft(self) -> int:
        """Most rows of one draft."""
        return self.max_speculative_tokens + self.lead_rows

    @property
    def cache_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Layers, KV heads and head size of the drafter's caches, in their order."""
        backbone = self.backbone
        layers = (backbone.num_layers, backbone.num_kv_heads, backbone.head_dim)
        if self.settings.method != "mtp":
            return (layers,)
        return (layers, (1, 1, backbone.hidden_size // 2))

    def block_rows(self, num_speculative_tokens: int) -> int:
        """Rows of a draft of `num_speculative_tokens` tokens: of a block, or of the passes of MTP.

        Fewer tokens than trained make a shorter block (as in vLLM's DSpark and DFlash speculators), not a full
        one whose last rows are thrown away: the rows of a shorter block see fewer mask rows than in training.

        Raises:
            ConfigError: not from 1 to `max_speculative_tokens`.
        """
        if not 1 <= num_speculative_tokens <= self.max_speculative_tokens:
            limit = (
                f"the most passes of an mtp drafter such as {self.name}"
                if self.settings.method == "mtp"
                else f"the block that drafter {self.name} was trained for"
            )
            raise ConfigError(
                f"num_speculative_tokens must be from 1 to {self.max_speculative_tokens}, {limit}, got "
                f"{num_speculative_tokens}"
            )
        return num_speculative_tokens + self.lead_rows

    def check_fits(self, target: ModelConfig) -> None:
        """Check that the drafter was made for a target like this one.

        Raises:
            CheckpointError: sizes differ, or a captured layer is not one of the target's layers, or its last. An MTP
                drafter may read the last one's stream, which is taken before the final norm.
            UnsupportedModelError: it captures the embedding's output.
        """
        name, settings, layers = self.name, self.settings, target.num_layers
        if settings.num_target_layers not in (None, layers):
            raise CheckpointError(
                f"drafter {name}: it was trained for a target of {settings.num_target_layers} layers, and the target "
                f"has {layers}"
            )
        if settings.target_hidden_size != target.hidden_size:
            raise CheckpointError(
                f"drafter {name}: it reads hidden states of size {settings.target_hidden_size}, and the target's have "
                f"{target.hidden_size}"
            )
        if self.backbone.vocab_size != target.vocab_size:
            raise CheckpointError(
                f"drafter {name}: it was trained for a vocabulary of {self.backbone.vocab_size} tokens, and the "
                f"target has {target.vocab_size}"
            )
        for layer in settings.target_layer_ids:
            if layer < 0:
                raise UnsupportedModelError(f"drafter {name}: it reads the target's embedding output, not a layer's")
            if layer == layers - 1 and settings.method != "mtp":
                raise CheckpointError(
                    f"drafter {name}: it reads the stream after layer {layer}, the target's last, "
                    "which other engines give after the final norm; a drafter must read earlier layers"
                )
            if layer >= layers:
                raise CheckpointError(
                    f"drafter {name}: it reads the stream after layer {layer}, and the target has {layers} layers"
                )
