"""Types of the native module (native/module.cpp). Tensors are CPU tensors, borrowed for the time of a call."""

from torch import Tensor

def cpu_features() -> dict[str, bool]:
    """Instruction sets the kernels care about, by name: true when CPU and operating system offer them.

    Keys on x86-64: `avx2` (with FMA), `avx_vnni`, `avx512` (F, BW, DQ and VL), `avx512_vnni`, `avx512_bf16`;
    none on other architectures.
    """

def usable_cores(cgroup_root: str = "/sys/fs/cgroup", cgroup_membership: str = "/proc/self/cgroup") -> int:
    """Cores this process may use: its affinity mask, cut by its cgroups' CPU quota; at least 1.

    Args:
        cgroup_root: where the cgroup file system is mounted (versions 1 and 2).
        cgroup_membership: the file that names the process's cgroups, in the form of `/proc/[pid]/cgroup`.
    """

def supported_variants() -> list[str]: ...
def shutdown_pool() -> None: ...
def stop_streams() -> None: ...
def now_ns() -> int:
    """Nanoseconds of the clock that traces are of."""

def start_trace(capacity: int) -> None:
    """Keep when each thread ran each kernel call, the last `capacity` of each thread, until `stop_trace`.

    Raises:
        RuntimeError: a trace is on.
    """

def stop_trace() -> tuple[list[tuple[str, str, int, int, int, int, int, int]], int]:
    """End the trace.

    Returns:
        Of each thread's part of each call: its kind, its graph's name (empty for an operation that ran at once), run
        (counts from 1 what the pool was given), the graph's place in a program, the call's place in the graph, thread,
        begin and end in nanoseconds; sorted by begin. And how many were given up for later ones.

    Raises:
        RuntimeError: no trace is on.
    """

class PackedWeight:
    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def input_scale(self) -> float: ...
    def scales(self) -> list[float]: ...
    def parts(self) -> dict[str, Tensor]: ...

class Arena:
    def __init__(self) -> None: ...
    @property
    def bytes(self) -> int: ...
    def alias(self, tensor: Tensor) -> Tensor: ...

class Graph:
    def __init__(self, threads: int, arena: Arena, name: str = "") -> None: ...
    @property
    def bytes(self) -> int: ...
    def replay(self) -> None: ...
    def kinds(self) -> list[str]: ...
    def profile(self, repeats: int) -> list[int]: ...
    def __len__(self) -> int: ...

class Program:
    def __init__(
        self,
        parts: list[Graph],
        long_parts: list[int] = ...,
        selectors: list[Tensor | None] = ...,
        choices: list[int] = ...,
    ) -> None: ...
    def replay(self) -> None: ...
    def __len__(self) -> int: ...

class Launch:
    @property
    def done(self) -> bool: ...
    @property
    def error(self) -> str: ...
    def wait(self, timeout_s: float) -> bool: ...
    @property
    def run(self) -> int: ...

class Stream:
    def __init__(self) -> None: ...
    def launch(self, program: Program) -> Launch: ...
    def reset(self, timeout_s: float) -> bool: ...
    def stop(self) -> None: ...

class Executor:
    def __init__(self, threads: int, variant: str = "") -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def variant(self) -> str: ...
    @property
    def capturing(self) -> bool: ...
    @property
    def captures(self) -> int: ...
    def begin_capture(self, graph: Graph) -> None: ...
    def end_capture(self) -> None: ...
    def pack_linear(self, weight: Tensor, bias: Tensor | None, form: str) -> PackedWeight: ...
    def blank_weight(
        self, out_features: int, in_features: int, form: str, bias: bool, input_scale: float
    ) -> PackedWeight: ...
    def linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        out: Tensor,
        slots: Tensor | None = None,
        multipliers: Tensor | None = None,
    ) -> None: ...
    def quantize_rows(self, x: Tensor, quantized: Tensor, scales: Tensor, fixed_scale: float = 0.0) -> None: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, sum: Tensor
    ) -> None: ...
    def rotary(
        self, x: Tensor, norm: Tensor | None, eps: float, positions: Tensor, cos: Tensor, sin: Tensor, out: Tensor
    ) -> None: ...
    def norm_linear(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm: Tensor,
        eps: float,
        weight: PackedWeight,
        out: Tensor,
        sum: Tensor | None,
    ) -> None: ...
    def silu_linear(self, gate_up: Tensor, weight: PackedWeight, out: Tensor) -> None: ...
    def rotary_write(
        self,
        qkv: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        eps: float,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache_keys: Tensor,
        cache_values: Tensor,
        slots: Tensor,
        queries: Tensor,
    ) -> None: ...
    def kv_write(
        self, keys: Tensor, values: Tensor, cache_keys: Tensor, cache_values: Tensor, slots: Tensor
    ) -> None: ...
    def paged_attention(
        self,
        queries: Tensor,
        cache_keys: Tensor,
        cache_values: Tensor,
        positions: Tensor,
        row_starts: Tensor,
        block_tables: Tensor,
        max_rows: int,
        max_length: int,
        scale: float,
        window: int,
        out: Tensor,
        following: list[PackedWeight] = ...,
    ) -> None: ...
    def block_attention(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        cache_keys: Tensor,
        cache_values: Tensor,
        context_lengths: Tensor,
        block_tables: Tensor,
        scale: float,
        window: int,
        causal: bool,
        out: Tensor,
    ) -> None: ...
    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None: ...
    def embed(self, token_ids: Tensor, table: Tensor, out: Tensor) -> None: ...
    def argmax(self, x: Tensor, out: Tensor) -> None: ...
    def convert(self, x: Tensor, out: Tensor) -> None: ...
    def draft_blocks(
        self,
        anchors: Tensor,
        context_lengths: Tensor,
        block_rows: int,
        mask_token_id: int,
        token_ids: Tensor,
        positions: Tensor,
    ) -> None: ...
    def zero(self, out: Tensor) -> None: ...
    def gated_head(self, projected: Tensor, embedded: Tensor, latent: Tensor) -> None: ...
    def recurrent_head(self, projected: Tensor, state: Tensor, latent: Tensor, next_state: Tensor) -> None: ...
    def confidence(
        self, hidden: Tensor, embedded: Tensor | None, weight: Tensor, bias: Tensor, out: Tensor
    ) -> None: ...
    def add_logits(self, base: Tensor, bias: Tensor, out: Tensor) -> None: ...
    def draft_pick(
        self, base: Tensor, bias: Tensor | None, target_ids: Tensor | None, token_ids: Tensor, scores: Tensor
    ) -> None: ...
    def markov_chain(
        self,
        base: Tensor,
        hidden: Tensor,
        anchors: Tensor,
        lead_rows: int,
        table: Tensor,
        weight: PackedWeight,
        target_ids: Tensor | None,
        confidence_weights: Tensor | None,
        confidence_biases: Tensor | None,
        token_ids: Tensor,
        scores: Tensor,
        confidences: Tensor | None,
    ) -> None: ...
    def draw_tokens(
        self,
        logits: Tensor,
        temperatures: Tensor,
        log_min_p: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        scores: Tensor,
    ) -> None: ...
    def begin_round(
        self,
        sources: Tensor,
        staged_anchors: Tensor,
        staged_positions: Tensor,
        state_anchors: Tensor,
        state_positions: Tensor,
        anchors: Tensor,
        positions: Tensor,
    ) -> None: ...
    def verify_rows(
        self,
        anchors: Tensor,
        positions: Tensor,
        draft_ids: Tensor | None,
        block_tables: Tensor,
        num_blocks: Tensor,
        block_size: int,
        max_length: int,
        token_ids: Tensor,
        row_positions: Tensor,
        slots: Tensor,
    ) -> None: ...
    def step_rows(
        self,
        context_lengths: Tensor,
        block_tables: Tensor,
        block_size: int,
        max_length: int,
        sources: Tensor,
        positions: Tensor,
        slots: Tensor,
    ) -> None: ...
    def settle_round(
        self,
        picks: Tensor,
        scores: Tensor,
        draft_ids: Tensor | None,
        draft_scores: Tensor | None,
        runs: Tensor | None,
        positions: Tensor,
        row_positions: Tensor,
        slots: Tensor,
        context_length: int,
        context_positions: Tensor | None,
        context_slots: Tensor | None,
        next_anchors: Tensor,
        next_positions: Tensor,
        results: Tensor,
    ) -> None: ...
    def look_up(
        self,
        texts: Tensor,
        text_rows: Tensor,
        positions: Tensor,
        shortest: int,
        longest: int,
        drafts: Tensor,
        runs: Tensor,
        wants_draft: Tensor,
    ) -> None: ...
    def fill_drafts(self, proposed: Tensor, runs: Tensor, drafts: Tensor) -> None: ...
    def choose_length(
        self,
        confidences: Tensor,
        runs: Tensor | None,
        num_blocks: Tensor,
        positions: Tensor,
        lengths: Tensor,
        costs: Tensor,
        growth: Tensor,
        draft_cost: Tensor,
        wants_draft: Tensor | None,
        chosen: Tensor,
    ) -> None: ...
    def remember(self, texts: Tensor, text_rows: Tensor, positions: Tensor, results: Tensor) -> None: ...
    def hand_off(
        self, next_anchors: Tensor, next_positions: Tensor, state_anchors: Tensor, state_positions: Tensor
    ) -> None: ...
    def empty(self, shape: list[int], dtype: str) -> Tensor: ...
