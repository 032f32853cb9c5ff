"""Weights in the form that the kernels want: made from a checkpoint's tensors, or as they were kept from an earlier
start."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sparkgap.catalog.packed_files import PackedFile, write_packed
from sparkgap.ops.kernels import Kernels
from sparkgap.ops.operands import LinearWeight


class PreparedWeights:
    """A network's weights by name.

    Attributes:
        products: weights of matrix products.
        tensors: everything else.
        is_complete: nothing had to be made so far.
    """

    def __init__(
        self, products: Mapping[str, LinearWeight] | None = None, tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        self.products = dict(products or {})
        self.tensors = dict(tensors or {})
        self.is_complete = True

    def product(self, name: str, make: Callable[[], LinearWeight]) -> LinearWeight:
        """The product of a name, made if it is not there."""
        if name not in self.products:
            self.is_complete = False
            self.products[name] = make()
        return self.products[name]

    def tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """The tensor of a name, made if it is not there."""
        if name not in self.tensors:
            self.is_complete = False
            self.tensors[name] = make()
        return self.tensors[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(weight.nbytes for weight in self.products.values()) + sum(t.nbytes for t in self.tensors.values())

    def save(self, path: Path, key: Mapping[str, Any], kernels: Kernels) -> bool:
        """Keep them in a file for the next start; False when these kernels have nothing to keep.

        Raises:
            OSError: the file cannot be written.
        """
        facts: dict[str, Any] = {}
        content = {f"tensor:{name}": tensor for name, tensor in self.tensors.items()}
        for name, weight in self.products.items():
            form = kernels.packed_form(weight)
            if form is None:
                return False
            facts[name] = form.facts
            content |= {f"product:{name}:{part}": tensor for part, tensor in form.tensors.items()}
        write_packed(path, key, facts, content)
        return True

    @classmethod
    def load(cls, path: Path, key: Mapping[str, Any], kernels: Kernels) -> "PreparedWeights":
        """What `save` kept.

        Raises:
            ValueError: the file was made from something else, or is damaged.
            OSError: it cannot be read.
        """
        file = PackedFile(path, key)
        products: dict[str, LinearWeight] = {}
        targets: dict[str, Tensor] = {}
        for name, facts in file.facts.items():
            products[name], parts = kernels.blank_packed(facts)
            targets |= {f"product:{name}:{part}": tensor for part, tensor in parts.items()}
        file.read(targets)
        tensors = file.mapped([name for name in file.names() if name.startswith("tensor:")])
        return cls(products, {name.removeprefix("tensor:"): tensor for name, tensor in tensors.items()})
