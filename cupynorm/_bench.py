"""A pass over random arrays, the limit that the memory sets, and a clock.

``python -m cupynorm bench`` and the repository's benchmarks/ use these.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

import cupynorm
from cupynorm._operation import EPS, Norm

__all__ = [
    "ALL_ONES",
    "DTYPES",
    "EPS",
    "Clock",
    "Direction",
    "Problem",
    "Timing",
    "inputs",
    "limit",
    "ours",
    "poison",
]

Direction = Literal["forward", "backward"]

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
ALL_ONES = 0xFF  # bytes that are NaN in every dtype; no norm returns them


@dataclass(frozen=True)
class Problem:
    """One pass of one norm over x of rows x cols; dtypes by name."""

    norm: Norm
    direction: Direction
    rows: int
    cols: int
    dtype: str
    weight_dtype: str

    @property
    def operation(self) -> str:
        """Name the pass."""
        return f"{self.norm} {self.direction}"

    @property
    def has_bias(self) -> bool:
        """RMSNorm has none, like the models that use it."""
        return self.norm == "layer_norm"

    @property
    def outputs(self) -> tuple[str, ...]:
        """Name the results of the pass."""
        if self.direction == "forward":
            return ("y",)
        return ("dx", "dweight", "dbias") if self.has_bias else ("dx", "dweight")

    @property
    def bytes(self) -> int:
        """Count the bytes that must move: each array once, without the statistics of the rows.

        Forward reads x, weight and bias and writes y; backward reads x, dy and weight and writes
        dx, dweight and dbias.
        """
        backward = self.direction == "backward"
        vectors = 1 + self.has_bias + backward
        matrix = self.rows * self.cols * int(DTYPES[self.dtype].itemsize)
        vector = self.cols * int(DTYPES[self.weight_dtype].itemsize)
        return (2 + backward) * matrix + vectors * vector


@dataclass(frozen=True)
class Timing:
    """The median time of a run in seconds, and the lowest and highest median of a round."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, rounds: Sequence[Sequence[float]]) -> Timing:
        """Summarize the times of each round."""
        medians = [statistics.median(times) for times in rounds]
        return cls(
            statistics.median(medians), min(medians), max(medians), sum(len(r) for r in rounds)
        )


# Both kernels walk the memory alike, so that an SM most likely demotes the lines that it read. Each
# half of the GPU may have its own copy of a line in the L2.
FLUSH = r"""
extern "C" __global__ void flush_read(uint4* memory, long long bytes) {
  unsigned long long last;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  unsigned bits = 0;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < bytes / sizeof(uint4); i += stride) {
    uint4 value;
    asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(memory + i), "l"(last));
    bits |= value.x | value.y | value.z | value.w;
  }
  if (bits == 1) *memory = uint4{};  // whatever is there: loads without a use would be left out
}

extern "C" __global__ void flush_demote(uint4* memory, long long bytes) {
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < bytes / sizeof(uint4); i += stride) {
    if (i % (128 / sizeof(uint4)) == 0) {
      asm volatile("applypriority.global.L2::evict_normal [%0], 128;" ::"l"(memory + i) : "memory");
    }
  }
}
"""


class Clock:
    """Times work on the current GPU by its events, with a cold L2 cache."""

    ROUNDS = 3
    ROUND_SECONDS = 0.02
    WARMUP_RUNS = 3
    MOST_QUEUED_RUNS = 4
    FLUSHES = ("Memset", "flush_read", "flush_demote")  # the profiler's names begin with these

    def __init__(self) -> None:
        import cupy

        device = cupy.cuda.Device()
        self.cache_bytes = int(device.attributes["L2CacheSize"])
        self._flush_bytes = 4 * self.cache_bytes
        self._flushed = cupy.cuda.alloc(self._flush_bytes)
        self._blocks = int(device.attributes["MultiProcessorCount"])
        self._demoting: list[Any] = []
        if int(device.compute_capability) >= 80:
            module = cupy.RawModule(code=FLUSH, options=("-std=c++17",))
            self._demoting = [module.get_function(name) for name in self.FLUSHES[1:]]

    def flush(self) -> None:
        """Drive everything out of the L2 cache, and leave it full of ordinary lines just written.

        Writing alone does not displace lines that were loaded with `evict_last`. Triton's kernels
        and some of ours load so. torch.compile's RMSNorm of 512 x 4096 in bfloat16 then finds its
        own lines and takes 6.8 us, 7.5 without them (H200). So from compute capability 8.0 on
        unrelated memory is first read that way. Then its lines are made ordinary again, since that
        kernel would take 8.0 us among the others.

        It also keeps the GPU busy for 50 us or more, while the host prepares the timed work. Only
        host time beyond that counts.
        """
        for kernel in self._demoting:
            kernel((self._blocks,), (1024,), (self._flushed, 2 * self.cache_bytes))
        self._flushed.memset_async(0, self._flush_bytes)

    def sample(
        self,
        calls: Sequence[Callable[[], object]],
        runs: int,
        resets: Sequence[Callable[[], object] | None] = (),
    ) -> list[float]:
        """Return the time of each run. Runs take turns through `calls`, each on its own data.

        `resets`, none or one a call, are made before the call and not timed.

        Only a few runs are queued at a time. A CUDA graph begins later the more launches of it wait
        in the queue. RMSNorm of 1 x 1024 takes 3.9 us with up to 4 runs, 4.5 with 8, 5.0 with 64
        (bfloat16, H200).
        """
        import cupy

        spans = []
        for run in range(runs):
            turn = run % len(calls)
            reset = resets[turn] if resets else None
            if reset is not None:
                reset()
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            self.flush()
            start.record()
            calls[turn]()
            end.record()
            spans.append((start, end))
            if (run + 1) % self.MOST_QUEUED_RUNS == 0 or run + 1 == runs:
                cupy.cuda.get_current_stream().synchronize()
        return [1e-3 * float(cupy.cuda.get_elapsed_time(*span)) for span in spans]

    def measure(
        self,
        calls: Sequence[Callable[[], object]],
        resets: Sequence[Callable[[], object] | None] = (),
    ) -> Timing:
        """Warm up, then time rounds of runs."""
        warm = statistics.median(self.sample(calls, max(self.WARMUP_RUNS, len(calls)), resets))
        runs = max(10, min(100, int(self.ROUND_SECONDS / max(warm, 1e-9))))
        return Timing.of([self.sample(calls, runs, resets) for _ in range(self.ROUNDS)])


def narrowed(array: Any, dtype: str) -> Any:
    """Round a float32 or float64 array to a dtype, bfloat16 by bits: CuPy may lack the cast."""
    if dtype != "bfloat16":
        return array.astype(DTYPES[dtype])
    bits = array.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16).view(DTYPES[dtype])


def inputs(problem: Problem, seed: int, xp: Any) -> dict[str, Any]:
    """Draw x, dy, weight and bias by the generator of NumPy or CuPy, xp.

    Every dtype holds the values of weight and bias exactly. So a library that needs them in another
    dtype than the problem's still computes the same function.
    """
    rng = xp.random.default_rng(seed)
    draw = np.float64 if problem.dtype == "float64" else np.float32

    def matrix() -> Any:
        return narrowed(
            rng.standard_normal((problem.rows, problem.cols), dtype=draw), problem.dtype
        )

    def vector(values: Any) -> Any:
        steps = xp.rint(values * 64).astype(np.float32) / np.float32(64)
        return narrowed(steps, problem.weight_dtype)

    arrays = {
        "x": matrix(),
        "weight": vector(rng.random(problem.cols, dtype=np.float32) + np.float32(0.5)),
    }
    if problem.has_bias:
        arrays["bias"] = vector(rng.random(problem.cols, dtype=np.float32) - np.float32(0.5))
    if problem.direction == "backward":
        arrays["dy"] = matrix()
    return arrays


def poison(arrays: dict[str, Any]) -> None:
    """Have CuPy's pool return NaN for outputs like these arrays that are allocated next."""
    import cupy

    blocks = [cupy.empty_like(array) for array in arrays.values()]
    for block in blocks:
        block.view("u1").fill(ALL_ONES)


def limit(problem: Problem, arrays: dict[str, Any]) -> Callable[[], object]:
    """Return the work that moves the matrices at the memory's speed: a copy, or a sum of two.

    The sum is of the widest numbers that the matrices consist of, whatever is in them: CuPy moves
    one number in each access.
    """
    import cupy

    x = arrays["x"]
    target = cupy.empty_like(x)
    if problem.direction == "forward":
        return lambda: target.data.copy_from_device_async(x.data, x.nbytes)
    widths = (np.complex128, np.complex64, np.float32, np.uint16)
    wide = next(width for width in widths if x.nbytes % np.dtype(width).itemsize == 0)
    first, second, total = (a.reshape(-1).view(wide) for a in (x, arrays["dy"], target))
    return lambda: cupy.add(first, second, out=total)


def ours(problem: Problem, arrays: dict[str, Any]) -> Callable[[], tuple[Any, ...]]:
    """Return cupynorm's call, as a user makes it."""
    eps = EPS[problem.norm]
    x, weight, bias = arrays["x"], arrays["weight"], arrays.get("bias")
    if problem.direction == "forward":
        function = getattr(cupynorm, problem.norm)
        return lambda: (function(x, weight, bias, eps=eps),)
    _, mean, rstd, *_ = getattr(cupynorm, f"{problem.norm}_forward")(x, weight, bias, eps=eps)
    if problem.norm == "rms_norm":
        return lambda: cupynorm.rms_norm_backward(arrays["dy"], x, weight, rstd)[:2]
    return lambda: cupynorm.layer_norm_backward(arrays["dy"], x, weight, mean, rstd)[:3]
