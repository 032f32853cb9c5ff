"""What every kind of drafter says of itself, from its configuration."""

from sparkgap.models.drafter_config import DrafterConfig


class DescribedDrafter:
    """A drafter with a configuration.

    Attributes:
        config: what the networks look like.
    """

    config: DrafterConfig

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.config.name

    @property
    def vocab_size(self) -> int:
        """Tokens of the target."""
        return self.config.backbone.vocab_size

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Captured target layers, in the order in which they are read."""
        return self.config.settings.target_layer_ids

    @property
    def cache_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Layers, KV heads and head size of its caches, in their order."""
        return self.config.cache_shapes
