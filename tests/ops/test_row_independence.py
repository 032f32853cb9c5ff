"""A row's result on a CPU is the same, to the bit, alone, among others and in a longer batch."""

import pytest
import torch

from sparkgap.ops import AttentionRows, KVCache, LinearWeight, TorchKernels

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkl.is_available(),
    reason="shapes are chosen for the libraries of torch's x86-64 builds with AVX-512",
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("features", "outputs"), [(576, 960), (1536, 576), (32, 264), (64, 48)])
def test_linear(dtype: torch.dtype, features: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(features)
    weight = LinearWeight((torch.randn(outputs, features, generator=generator) * features**-0.5).to(dtype))
    kernels = TorchKernels()
    for _ in range(4):
        x = torch.randn(128, features, generator=generator).to(dtype)
        together = kernels.linear(x, weight)
        for rows in (1, 2, 3, 5, 7, 8, 9, 16, 31, 64):
            assert torch.equal(kernels.linear(x[:rows], weight), together[:rows])
            assert torch.equal(kernels.linear(x[-rows:], weight), together[-rows:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 40, 200])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(3, 3, 64), (1, 4, 16), (2, 7, 64), (2, 1, 8)])
def test_attention(dtype: torch.dtype, window: int | None, kv_heads: int, group: int, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(group)
    shape = (80, 16, kv_heads, head_dim)
    cache = KVCache(*(torch.randn(shape, generator=generator).to(dtype) for _ in range(2)))
    table = torch.randperm(80, generator=generator).to(torch.int32)[None]

    def attend(queries: torch.Tensor, starts: list[int]) -> torch.Tensor:
        rows = len(queries) // len(starts)
        positions = torch.cat([torch.arange(start, start + rows) for start in starts])
        batch = AttentionRows(
            positions,
            torch.arange(len(starts) + 1, dtype=torch.int32) * rows,
            table.expand(len(starts), -1),
            rows,
            int(positions.max()) + 1,
        )
        return TorchKernels().paged_attention(queries, cache, batch, head_dim**-0.5, window)

    for start in (0, 3, 15, 16, 100, 127, 128, 300, 520):
        for width in (2, 4, 8, 31):
            queries = torch.randn(width, kv_heads * group, head_dim, generator=generator).to(dtype)
            verified = attend(queries, [start])
            batched = attend(torch.cat((queries, queries, queries)), [start, start + 333, 1])
            assert torch.equal(batched[:width], verified)
            for row in (0, width // 2, width - 1):
                assert torch.equal(attend(queries[row : row + 1], [start + row])[0], verified[row])
