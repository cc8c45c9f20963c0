"""The host run itself: each fault is reported where it happens, and each primitive is exact."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from host.build import HERE, Build, KernelError, compiler_problem, runtime
from host.gpu import Gpu
from strategies import DTYPES

from cupynorm._compile import Instantiation
from cupynorm._operation import CPP_TYPES
from cupynorm.reference import round_once

pytestmark = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))

# A kernel of faults.cu, and the report about it.
FAULTS = {
    "reads_before_the_array": "thread 0: out of bounds: reads 4 bytes, 4 bytes before an array",
    "writes_past_the_array": "thread 63: out of bounds: writes 4 bytes, 0 bytes past the end of",
    "overruns_shared_memory": "thread 32: out of bounds: writes 4 bytes, 0 bytes past the end of s",
    "reads_shared_memory_that_nothing_wrote": "thread 63: uninitialized: reads 4 bytes at byte 252",
    "reads_device_memory_that_nothing_wrote": "thread 0: uninitialized: reads 4 bytes at byte 0 of",
    "reads_what_another_thread_writes": "thread 1: race: reads 4 bytes at byte 0 of shared memory",
    "writes_what_another_thread_reads": "thread 1: race: writes 4 bytes at byte 4 of shared memory",
    "writes_what_another_block_wrote": "block 1, thread 0: race: writes 4 bytes at byte 0 of an",
    "synchronizes_only_half_of_the_readers": "thread 63: race: reads 4 bytes at byte 124 of shared",
    "leaves_threads_at_a_barrier": "threads 0 to 39 wait at barrier 0 of 64 threads at",
    "meets_at_two_barriers": "threads 0 to 31 wait at barrier 1 of 64 threads at",
    "counts_a_barrier_in_two_ways": "thread 32: barrier 1 is of 64 threads, and of 32 at",
    "reads_after_it_arrives": "thread 0: uninitialized: reads 4 bytes at byte 128 of shared",
    "writes_after_it_arrives": "thread 63: race: reads 4 bytes at byte 124 of shared memory",
    "arrives_twice": "thread 0: arrives at barrier 1 twice, at",
    "waits_where_nobody_arrives": "threads 32 to 63 wait at barrier 1 of 64 threads at",
    "has_no_such_barrier": "thread 0: no barrier 16 of 64 threads",
    "shuffles_without_a_lane": "threads 0 to 6 wait in a shuffle of distance 1 at",
    "shuffles_at_two_distances": "the lanes of a warp disagree: threads 0 to 30 wait in a shuffle",
    "shuffles_beyond_the_warp": "thread 0: shuffles over 32 lanes",
    "shuffles_and_votes": "the lanes of a warp disagree: threads 0 to 30 wait in a shuffle",
    "reads_across_an_alignment": "thread 0: misaligned: reads 16 bytes at byte 4 of an array",
    "leaves_a_local_array": "thread 4: index 4 is outside a local array",
    "overflows_an_index": "thread 0: mul_overflow",
    "divides_by_zero": "thread 0: divrem_overflow",
    "crashes": "thread 5: signal 4",
    "never_ends": "does not end",
    "reads_what_another_lane_wrote_before_a_shuffle": "race: reads 4 bytes at byte",
    "writes_what_another_lane_reads_after_a_shuffle": "thread 1: race: writes 4 bytes at byte 4 of",
    "reads_its_copy_before_the_wait": "thread 0: race: reads 4 bytes at byte 0 of shared memory",
    "writes_to_its_copy_before_the_wait": "thread 0: race: writes 4 bytes at byte 0 of shared",
    "waits_for_all_but_the_last_copy": "which block 0, thread 0 copies to at",
    "waits_for_a_group_that_is_open": "which block 0, thread 0 copies to at",
    "reads_another_threads_copy": "thread 1: race: reads 4 bytes at byte 0 of shared memory",
    "passes_a_barrier_before_the_wait": "which block 0, thread 1 copies to at",
    "writes_what_it_copies": "thread 0: race: writes 4 bytes at byte 0 of an array",
    "writes_what_another_thread_copies": "which block 0, thread 1 copies from at",
    "copies_what_another_thread_writes": "thread 1: race: reads 4 bytes at byte 0 of an array",
    "copies_onto_what_another_thread_reads": "thread 1: race: writes 4 bytes at byte 0 of shared",
    "copies_onto_a_copy": "thread 0: race: writes 4 bytes at byte 0 of shared memory",
    "copies_what_nothing_wrote": "thread 0: uninitialized: reads 16 bytes at byte 0 of an array",
    "copies_from_past_the_array": "thread 63: out of bounds: copies from 8 bytes, 0 bytes past",
    "copies_to_past_shared_memory": "thread 16: out of bounds: copies to 16 bytes, 0 bytes past",
    "copies_across_an_alignment": "thread 0: misaligned: copies to 16 bytes at byte 8 of shared",
    "copies_from_across_an_alignment": "thread 0: misaligned: copies from 8 bytes at byte 4 of an",
    "ends_before_its_copy": "thread 0: ends and did not wait for the copy at",
    "reads_a_bulk_copy_before_the_wait": "which block 0, thread 0 copies to at",
    "writes_what_a_bulk_copy_reads": "which block 0, thread 0 copies from at",
    "copies_in_bulk_onto_what_another_thread_reads": "thread 0: race: writes 64 bytes at byte 16",
    "copies_in_bulk_what_no_mailbox_expects": "a copy that the mailbox does not expect",
    "copies_in_bulk_across_an_alignment": "misaligned: copies to 16 bytes at byte 20 of shared",
    "copies_in_bulk_to_past_shared_memory": "out of bounds: copies to 32 bytes at byte 240 of",
    "ends_before_its_bulk_copy": "the block ends, and nobody waited for the copy at",
}

# Faults of clusters of two blocks.
CLUSTER_FAULTS = {
    "races_in_a_cluster": "race: writes 4 bytes at byte 252 of an array",
    "leaves_a_block_at_the_clusters_barrier": "threads 0 to 63 wait at the cluster's barrier at",
    "leaves_threads_at_the_clusters_barrier": "block 1: no thread can go on: threads 0 to 39 wait",
    "counts_where_nothing_was_written": "uninitialized: counts in 4 bytes at byte 0 of an array",
    "counts_past_the_array": "out of bounds: counts in 4 bytes, 0 bytes past the end of an array",
    "waits_for_one_arrival_too_many": "no thread can go on: threads 0 to 63 wait for arrivals at",
    "waits_for_one_arrival_too_few": "race: reads 4 bytes at byte 28 of an array",
    "sends_to_no_mailbox": "no mailbox is open there",
    "sends_before_the_mailbox_may_be_open": "the mailbox was opened with no barrier between",
    "expects_in_a_mailbox_that_may_not_be_open": "thread 1: the mailbox was opened with no barrier",
    "expects_twice": "the mailbox already expects bytes",
    "expects_too_much": "block 1: no thread can go on: threads 0 to 63 wait for a mailbox",
    "expects_too_little": "uninitialized: reads 4 bytes at byte 20 of shared memory of",
    "reads_its_own_letter_before_the_wait": "which block 0, thread 0 sends to at",
    "reads_what_a_thread_beside_it_waited_for": "thread 1: race: reads 4 bytes at byte 16 of sha",
    "waits_for_the_time_before": "race: reads 4 bytes at byte 16 of shared memory of block 0 of th",
    "waits_for_the_time_after": "block 0: no thread can go on: threads 0 to 63 wait for a mailbox",
    "sends_over_what_may_not_have_been_read": "block 0, thread 0: race: writes 4 bytes at byte",
    "writes_to_a_mailbox": "thread 0: mailbox: writes 4 bytes at byte 4 of shared memory of block",
    "sends_to_a_block_that_has_ended": "block 1, thread 0: sends to block 0, which has ended",
    "ends_before_its_letters_come": "the block ends, to which block 0, thread 0 sends at",
    "sends_to_no_block_of_the_cluster": "block 1, thread 0: sends to block 2 of a cluster of 2",
    "sends_to_past_shared_memory": "thread 63: out of bounds: sends to 4 bytes, 12 bytes past",
    "sends_across_an_alignment": "misaligned: sends to 8 bytes at byte 20 of shared memory of",
}


class Probe(Instantiation):
    """A kernel of these tests. Its name contains its template arguments."""

    def __str__(self) -> str:
        return self.name

    def expression(self, suffix: str = "") -> str:
        return self.name

    def structs(self, suffix: str = "") -> str:
        return ""


def named(letters: str) -> tuple[tuple[str, str], ...]:
    """Return the members of a struct, with the letters as names."""
    return tuple((f"member_{i}", letter) for i, letter in enumerate(letters))


def with_file(name: str) -> Build:
    return Build(added={name: (HERE / name).read_text(encoding="utf-8")}, arithmetic_of=1)


@pytest.mark.parametrize("fault", FAULTS | CLUSTER_FAULTS)
def test_a_fault_is_reported_where_it_happens(fault: str) -> None:
    gpu = Gpu(with_file("faults.cu"))
    clusters = 2 if fault in CLUSTER_FAULTS else 1
    kernel = Probe("faults.cu", f"{fault}<float>", (), (), named("P"), 64, 256, clusters)
    with gpu.fresh_memory():
        values = gpu.cupy.empty(64, np.float32)
        with pytest.raises(KernelError) as caught:
            gpu.run(kernel, 2, values)
    message = str(caught.value)
    print(message)
    assert message.startswith(f"{fault}<float>, block ")
    assert (FAULTS | CLUSTER_FAULTS)[fault] in message
    assert f"faults.cu:{line_of(fault)}" in message


def line_of(kernel: str) -> int:
    """Return the line of a kernel's fault."""
    text = (HERE / "faults.cu").read_text(encoding="utf-8")
    start = text.index(f"void {kernel}(")
    return text.count("\n", 0, text.index("// fault", start)) + 1


def test_a_span_replaces_those_that_it_overlaps() -> None:
    """The allocator gives an address again, to an array of another size."""
    memory, spans = np.empty(256, np.uint8), runtime()
    address = memory.ctypes.data
    try:
        for nbytes in (64, 8, 128):
            spans.register(np.array([address]), nbytes, 4, True, "an array")
            assert spans.first_unwritten(address, nbytes) == -1
        spans.register(np.array([address + 120]), 64, 4, True, "an array behind")
        assert spans.first_unwritten(address, 8) == 0
        assert spans.first_unwritten(address + 120, 64) == -1
    finally:
        spans.forget_all()


def test_a_wrong_argument_is_reported() -> None:
    gpu = Gpu(with_file("probes.cu"))
    values = gpu.cupy.zeros(4, np.float32)
    with gpu.fresh_memory():
        for parameters in ("PP", "PPPf", "PPPP"):
            arguments = [4 if letter == "f" else values for letter in parameters]
            kernel = probing("reciprocal_square_roots<float>", parameters)
            with pytest.raises(KernelError, match=r"its arguments have \d+ bytes, its struct 24"):
                gpu.run(kernel, 1, *arguments)


def probing(expression: str, parameters: str = "PPq", shared_bytes: int = 0) -> Instantiation:
    """Return a kernel of probes.cu that one warp runs."""
    return Probe("probes.cu", expression, (), (), named(parameters), 32, shared_bytes)


def probe(expression: str, values: np.ndarray, dtype: Any) -> np.ndarray:
    gpu = Gpu(with_file("probes.cu"))
    with gpu.fresh_memory():
        results = gpu.cupy.empty(len(values), dtype)
        kernel = probing(expression)
        gpu.run(kernel, 1, gpu.cupy.array(values), results, len(values))
        return gpu.to_numpy(results)


def assert_same_numbers(actual: np.ndarray, expected: np.ndarray) -> None:
    numbers = ~np.isnan(expected)
    assert np.isnan(actual[~numbers]).all()
    bits = f"u{actual.itemsize}"
    np.testing.assert_array_equal(actual[numbers].view(bits), expected[numbers].view(bits))


@pytest.mark.parametrize("to", ["float32", "float64"])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_16_bit_number_is_widened_exactly(name: str, to: str) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[name])
    if name == "bfloat16":  # subnormal float32 numbers count as zero when used, as on a GPU
        values = values[~(np.abs(values.astype(np.float32)) < np.finfo(np.float32).smallest_normal)]
    with np.errstate(invalid="ignore"):
        expected = values.astype(to)
    assert_same_numbers(probe(f"convert_all<{name}, {CPP_TYPES[to]}>", values, to), expected)


def numbers_around(name: str, source: str) -> np.ndarray:
    """Return a 16-bit dtype's numbers, those halfway between and next to it, and some others."""
    with np.errstate(invalid="ignore"):
        every = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[name]).astype(np.float64)
    finite = np.sort(every[np.isfinite(every)])
    halfway = (finite[1:] + finite[:-1]) / 2
    close = [np.nextafter(halfway, side) for side in (-np.inf, np.inf)]
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal(5000) * 10.0 ** rng.integers(-30, 30, 5000)
    limits = np.array([np.inf, -np.inf, np.nan, 65519.9, 65520, 3.3961775e38, 3e-8, 1e300, 1e-300])
    with np.errstate(over="ignore", under="ignore"):
        values = np.concatenate([finite, halfway, *close, drawn, limits]).astype(source)
    if source == "float32":
        values = values[~(np.abs(values) < np.finfo(np.float32).smallest_normal) | (values == 0)]
    return values


@pytest.mark.parametrize("source", ["float32", "float64"])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_number_is_rounded_once_to_16_bits(name: str, source: str) -> None:
    values = numbers_around(name, source)
    expected = round_once(values.astype(np.float64), DTYPES[name])
    actual = probe(f"convert_all<{CPP_TYPES[source]}, {name}>", values, DTYPES[name])
    assert_same_numbers(actual, expected)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_two_numbers_are_rounded_at_once(name: str) -> None:
    values = numbers_around(name, "float32")
    values = np.random.default_rng(0).permutation(values)[: len(values) // 2 * 2]
    gpu = Gpu(with_file("probes.cu"))
    with gpu.fresh_memory():
        results = gpu.cupy.empty(len(values) // 2, np.uint32)
        kernel = probing(f"convert_pairs<{name}>")
        gpu.run(kernel, 1, gpu.cupy.array(values), results, len(results))
        actual = gpu.to_numpy(results).view(DTYPES[name])
    assert_same_numbers(actual, round_once(values.astype(np.float64), DTYPES[name]))


def test_the_reciprocal_square_root_is_correctly_rounded() -> None:
    mantissas = np.random.default_rng(0).integers(1 << 23, 1 << 24, 20_000)
    values = np.ldexp(mantissas.astype(np.float32), np.arange(20_000) % 60 - 50)
    expected = (1 / np.sqrt(values.astype(np.longdouble))).astype(np.float32)
    actual = probe("reciprocal_square_roots<float>", values, np.float32)
    assert_same_numbers(actual, expected)


def test_subnormal_float32_counts_as_zero() -> None:
    values = np.array([1e-40, 1e-30], np.float32)
    assert probe("convert_all<float, double>", values, np.float64)[0] == 0


@pytest.mark.parametrize("nbytes", [4, 8, 16])
def test_asynchronous_copies_arrive(nbytes: int) -> None:
    rows, width = 7, 32 * nbytes // 4
    values = np.arange(1, rows * width + 1, dtype=np.float32).reshape(rows, width)
    gpu = Gpu(with_file("probes.cu"))
    kernel = probing(f"copy_rows<float, {nbytes}>", shared_bytes=3 * width * 4)
    with gpu.fresh_memory():
        results = gpu.cupy.empty((rows + 1, width), np.float32)
        gpu.run(kernel, 1, gpu.cupy.array(values), results, rows)
        copied = gpu.to_numpy(results)
    np.testing.assert_array_equal(copied, np.vstack([values, np.zeros_like(values[:1])]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("cluster_blocks", [1, 2, 5, 16])
def test_blocks_of_a_cluster_reach_each_other(dtype: str, cluster_blocks: int) -> None:
    clusters, times = 3, 4
    values = np.arange(clusters * cluster_blocks, dtype=dtype)
    gpu = Gpu(with_file("probes.cu"))
    kernel = dataclasses.replace(
        probing(f"sum_over_clusters<{CPP_TYPES[dtype]}, {cluster_blocks}>"),
        block_threads=64,
        shared_bytes=16 + 4 * cluster_blocks * values.itemsize,
        cluster_blocks=cluster_blocks,
    )
    with gpu.fresh_memory():
        results = gpu.cupy.empty((len(values), 64), dtype)
        arguments = (gpu.cupy.array(values), results, times)
        gpu.run(kernel, len(values), *arguments)
        sums = gpu.to_numpy(results)
    of_clusters = values.reshape(clusters, cluster_blocks).sum(1) * 2 * sum(range(times))
    expected = np.repeat(of_clusters, cluster_blocks)[:, None] * np.ones(64)
    np.testing.assert_array_equal(sums, expected)


def test_a_grid_is_whole_clusters() -> None:
    gpu = Gpu(with_file("probes.cu"))
    kernel = dataclasses.replace(
        probing("sum_over_clusters<float, 2>", shared_bytes=48), block_threads=64
    )
    with gpu.fresh_memory():
        values = gpu.cupy.zeros(192, np.float32)
        for clusters in (2, 17, 0):
            with pytest.raises(KernelError, match=f"a grid of 3 blocks in clusters of {clusters}"):
                gpu.run(dataclasses.replace(kernel, cluster_blocks=clusters), 3, values, values, 1)
        at_once = dataclasses.replace(kernel, at_once=True, block_threads=1024)
        with pytest.raises(KernelError, match="a grid of 129"):
            gpu.run(at_once, 129, values, values, 1)


def test_lanes_that_met_may_write_what_others_have_read() -> None:
    gpu = Gpu(with_file("probes.cu"))
    with gpu.fresh_memory():
        values = gpu.cupy.array(np.arange(32, dtype=np.float32))
        gpu.run(probing("rotate_in_place<float>", "P"), 1, values)
        rotated = gpu.to_numpy(values)
    np.testing.assert_array_equal(rotated, np.roll(np.arange(32), -1))
