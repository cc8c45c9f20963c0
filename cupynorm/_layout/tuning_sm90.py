"""The thresholds between layouts, as rows of data: measured on an H200 (sm_90).

Each table belongs to a module of this package. A row is a choice, its gain over another choice, and
the section of benchmarks/notes.md with all figures. `python -m benchmarks.tune KEY` measures a row
again, at the shapes of benchmarks/tuning_cases.py. GPUs of other architectures have the same
choices, if their registers and shared memory allow it.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")

SHORT = {
    1: (16, 256, 3, 4),
    2: (64, 256, 2, 2),
    3: (96, 128, 3, 2),
    4: (128, 128, 2, 2),
    5: (160, 128, 2, 2),
}


class Row(Generic[T]):
    """A choice and what it rests on. As an attribute of its table it reads as the choice."""

    def __init__(self, choice: T, gain: str, note: str) -> None:
        self.choice, self.gain, self.note = choice, gain, note

    def __set_name__(self, table: type, name: str) -> None:
        ROWS[f"{table.__name__}.{name}"] = self

    def __get__(self, instance: object, table: type) -> T:
        return self.choice


ROWS: dict[str, Row[Any]] = {}  # by their keys, such as "Forward.max_packs"


class AnyPass:
    """What both passes share."""

    # For 3 packs a thread or more.
    min_packs_filled = Row(12, "1048576x80: 98.9 -> 96.4 us", "packs-of-a-thread")
    max_packs_streamed_by_one_block = Row(
        8192, "32x1048584: 153.6 -> 88.8 us", "rows-that-are-read-twice"
    )


class Forward:
    """Rows in registers, in shared memory or read twice."""

    max_packs = Row(2048, "512x16384: 17.7 -> 15.8 us", "in-registers-or-in-shared-memory")
    max_packs_by_fewest_threads = Row(
        3072, "5461x24576: 153 -> 132 us", "in-registers-or-in-shared-memory"
    )
    # With operands of float64.
    max_packs_wide = Row(512, "8192x8192: 93.9 -> 81.5 us", "in-registers-or-in-shared-memory")
    # For an odd number of elements.
    max_packs_odd = Row(2048, "4096x20001: 167 -> 142 us", "in-registers-or-in-shared-memory")
    # A divisor of those packs, if weight and bias exceed the row.
    share_beside_heavy_affine = Row(
        2, "32768x16384: 0.87 -> 0.91 of the copy's speed", "in-registers-or-in-shared-memory"
    )
    # Four times as many blocks, with half the threads.
    rms_norm_streams_by_more_blocks = Row(
        True, "32x262144 of float32, pipelined since: 34.6 -> 28.4 us", "rows-that-are-read-twice"
    )


class ForwardInRegisters:
    """Rows in registers. `threads` are those that a multiprocessor holds at once."""

    fewest_threads_beyond_packs = Row(128, "12192x11008: 169 -> 131 us", "the-fewest-threads")
    # With 4 packs a thread, and a float32 weight and bias.
    max_packs_of_a_power_of_two = Row(512, "16384x8192: 144 -> 132 us", "the-fewest-threads")
    # Packs of a row of odd length.
    six_packs_odd_max = Row(
        1536, "6500x10241: 114 -> 97 us; 4800x14001: 107 and 107", "the-fewest-threads"
    )
    # Packs of a row that 96 threads would hold by 8.
    six_packs_between = Row((640, 768), "11000x6001: 101 -> 93 us", "the-fewest-threads")
    # Packs of LayerNorm's rows of float32 and float64.
    eight_packs_beyond = Row(1024, "512x8192: 14.8 -> 13.6 us", "packs-of-a-thread")
    # Packs of a thread. The first of those that leave the fewest empty is taken.
    widths = Row((4, 3, 5, 6, 7), "37449x3584: 135 -> 129 us", "packs-of-a-thread")
    short_widths = Row((2, 3, 5), "1398101x96: 143 -> 129 us", "packs-of-a-thread")
    short_max_packs = Row(16, "LayerNorm's 262144x512: 144 -> 129 us", "packs-of-a-thread")
    # For more than 1024 packs.
    long_widths = Row((8, 7, 6, 5), "8192x16384: 132.6 -> 131.0 us", "packs-of-a-thread")
    long_widths_of_layer_norm = Row((4, 5, 6, 7), "8x16384: 6.9 -> 6.7 us", "packs-of-a-thread")
    # For a row of 8 packs a thread, by packs of 8 bytes.
    halves_max_threads = Row(320, "14000x23196: 414 -> 366 us", "packs-of-8-bytes")
    halves_odd_max_packs = Row(
        64, "262144x129: 88 -> 71 us; 16384x4097: 83 -> 80", "packs-of-8-bytes"
    )
    held_max_registers = Row(32, "32768x4096: 4072 -> 4143 GB/s", "weight-and-bias-in-registers")
    # For LayerNorm, up to 16 packs.
    held_max_registers_of_short_rows = Row(
        24, "1048576x64: 72.2 -> 68.9 us; 32768x256: 13.9 -> 14.7", "weight-and-bias-in-registers"
    )
    held_max_threads = Row(128, "N = 8192: 3 %", "weight-and-bias-in-registers")
    # With 16-bit weight and bias.
    held_max_threads_if_slim = Row(
        256,
        "32768x8192: 4088 -> 4089 GB/s; 1x8192, then by the same kernel: 6.4 -> 5.9 us",
        "weight-and-bias-in-registers",
    )
    held_max_threads_by_8_bytes = Row(
        64, "262144x300: 96 -> 81 us; 32768x2052: 71.6 -> 68.1", "weight-and-bias-in-registers"
    )
    threads = Row(768, "32768x4096, from 640: 132.6 -> 131.2 us", "threads-at-once")
    # With operands of float64.
    threads_wide = Row(
        256, "16384x4096, from 512: 91.1 -> 91.1 us; 640 would spill", "threads-at-once"
    )
    # Weight and bias, or more than 4 packs a thread.
    threads_holding = Row(
        640, "419430x320, from 512: 129.6 -> 129.6 us; 768 would spill", "threads-at-once"
    )
    threads_holding_slim_full_rows = Row(1024, "512x8192: 9.73 -> 8.74 us", "threads-at-once")
    threads_holding_slim = Row(896, "24892x2696: 69.8 -> 66.6 us", "threads-at-once")
    # With more than 128 threads a row.
    threads_holding_slim_by_many = Row(1024, "11915x5632: 69.5 -> 66.6 us", "threads-at-once")
    # For a float32 weight.
    threads_holding_by_96 = Row(768, "24892x2696: 75.1 -> 70.8 us", "threads-at-once")
    # For LayerNorm's rows with more than 128 threads.
    threads_of_float16 = Row(1024, "16384x10240: 170 -> 160 us", "threads-at-once")
    threads_by_fewest = Row(800, "18724x7168: 137 -> 132 us", "threads-at-once")
    threads_by_fewest_of_224_to_288 = Row(960, "3640x18432: 72.9 -> 68.7 us", "threads-at-once")
    # For packs of 8 bytes, more than 12 a thread.
    threads_of_halves = Row(640, "16384x8196: 163 -> 145 us", "threads-at-once")
    threads_of_ten_halves = Row(512, "32768x2052: 75 -> 73 us", "threads-at-once")
    # For rows moved by less than packs, up to 4 of them a thread.
    threads_in_parts = Row(768, "16384x4097, with copies by cells: 109 -> 84 us", "threads-at-once")
    threads_in_parts_of_more = Row(
        512, "10000x10001, from 256: 112.4 -> 112.5 us; 640 would spill", "threads-at-once"
    )
    # For up to 6 packs a thread.
    threads_in_parts_by_fewest = Row(768, "5600x12001: 108 -> 91 us", "threads-at-once")
    threads_in_parts_by_fewest_of_more = Row(640, "6500x10241: 129 -> 102 us", "threads-at-once")
    # Their blocks lie between a block and what it fetches.
    blocks_ahead_multiprocessors = Row(
        128, "8192x1024: 15.4 -> 14.2 us; 4096x3584, from 256: 20.7 -> 19.7", "rows-fetched-ahead"
    )
    half_as_far_beyond_threads = Row(384, "1000x16384: 23.5 -> 22.9 us", "rows-fetched-ahead")


class FewRowsForward:
    """Few rows in registers, with the bits of many."""

    held_max_registers = Row(64, "1x4096: 6.72 -> 5.57 us", "few-rows-hold-weight-and-bias")
    threads = Row(512, "64x4096: 5.07 -> 5.05 us", "few-rows-hold-weight-and-bias")
    # If x, weight and bias take more than 80 registers.
    threads_if_crowded = Row(384, "8x5120: 5.09 -> 5.03 us", "few-rows-hold-weight-and-bias")
    # With 64 registers each.
    threads_at_once = Row(1024, "512x16384: 14.6 -> 13.1 us", "few-rows-by-64-registers")
    # For LayerNorm's rows of 4 packs, by half as many threads of twice the packs.
    folded_threads = Row((384, 448, 512), "528x14336: 13.9 -> 12.9 us", "few-rows-by-64-registers")
    # For LayerNorm's rows of 4 packs a thread, by twice the threads.
    max_short_elements = Row(
        1 << 23,
        "32768x256: 15.0 -> 13.9 us; 65536x256: 22.7 -> 21.8",
        "few-rows-of-less-than-a-warp",
    )
    split_min_threads = Row(256, "8x4096: 4.94 -> 4.91 us", "few-rows-in-clusters")
    # For clusters of 2 too, and for RMSNorm.
    split_min_packs = Row(
        2048, "a kernel less; RMSNorm's 8x8192: 4.72 -> 4.81 us", "few-rows-in-clusters"
    )
    split_blocks_of_layer_norm = Row(
        (4, 2), "8x16384: 6.2 -> 5.3 us; 64x16384, from (4,): 6.9 -> 6.6", "few-rows-in-clusters"
    )


class ForwardPipelined:
    """Rows in shared memory."""

    # Of a block.
    max_threads = Row(
        512, "N of 11008 to 131072: within 3 % of the fastest", "one-cluster-of-blocks"
    )
    # Packs of a block of fewer threads by 4.
    three_packs_max = Row(1152, "9216, of bfloat16 then: 167 -> 154 us", "one-cluster-of-blocks")
    stages = Row(3, "2048x131072: 324 -> 270 us", "one-cluster-of-blocks")
    # For a cluster, with 16-bit weight and bias.
    held_by_8_bytes_max_blocks = Row(2, "8192x16388: 143 -> 141 us", "one-cluster-of-blocks")
    two_clusters_max_threads = Row(256, "1024x163840: 229 -> 172 us", "two-clusters-at-once")
    # Of a thread of RMSNorm.
    two_clusters_max_packs = Row(6, "8192x65536: 514 -> 503 us", "two-clusters-at-once")
    two_clusters_max_packs_of_layer_norm = Row(
        7, "680x98305: 157 -> 136 us", "two-clusters-at-once"
    )
    # Of a cluster of RMSNorm.
    two_clusters_beyond_blocks = Row(2, "8192x24576: 198 -> 193 us", "two-clusters-at-once")
    # Of one cluster of LayerNorm at a time.
    counted_max_blocks = Row(
        2, "16384x32768: 532 -> 505 us; 8192x65536: 534 -> 519", "rows-taken-by-a-count"
    )
    # Of a thread of 16 blocks of LayerNorm.
    counted_float32_beyond_packs = Row(
        4, "8192x131072: 2095 -> 2047 us; 512x229376: 234 -> 226", "rows-taken-by-a-count"
    )


class BackwardPipelined:
    """Rows in shared memory."""

    # For each number of packs that a thread has of a row in a warp: the most packs of such a row,
    # the threads of a block, the blocks of a multiprocessor, and the stages.
    short_layouts = Row(SHORT, "419430x320: 210 -> 202 us", "teams-that-fill-their-packs")
    short_layouts_of_layer_norm = Row(
        SHORT | {2: (64, 128, 4, 2)}, "131072x256: 57.2 -> 56.2 us", "teams-that-fill-their-packs"
    )
    # LayerNorm's rows have more packs than the first, up to the second.
    seven_packs_of_a_warp = Row((192, 224), "41943x1600: 121 -> 107 us", "six-and-seven-packs")
    # For each number of packs that a thread has of a longer row: the threads of a multiprocessor.
    # Their registers hold the weight, up to 5 packs of it, and its gradients.
    long_threads = Row(
        {2: 512, 3: 384, 4: 256, 5: 256, 6: 256, 7: 256},
        "7281x18432: 280 -> 205 us",
        "teams-that-fill-their-packs",
    )
    five_packs_beyond = Row(512, "52428x2560: 200.3 -> 197.2 us", "teams-that-fill-their-packs")
    # Of a block whose threads have 2 or 3.
    few_packs_max_threads = Row(448, "12483x5376: 123 -> 113 us", "teams-that-fill-their-packs")
    # Of two blocks that count as filling a multiprocessor.
    two_packs_min_threads = Row(352, "16384x12288: 297 -> 285 us", "teams-that-fill-their-packs")
    six_packs_held_threads = Row(128, "16384x5376: 134 -> 131 us", "six-and-seven-packs")
    many_packs_max_threads = Row(128, "4854x13824: 150 -> 111 us", "six-and-seven-packs")
    many_packs_min_blocks = Row(
        8, "682x98304: 122 -> 105 us; 3048x22016: 106 -> 103", "six-and-seven-packs"
    )
    # For a warp or less.
    held_row_min_packs = Row(3, "1048576x64: 105 -> 103 us", "rows-that-stay-in-registers")
    # In clusters.
    held_row_min_threads = Row(384, "8192x32768: 398 -> 383 us", "rows-that-stay-in-registers")
    held_row_max_blocks = Row(4, "8192x40960: 490 -> 472 us", "rows-that-stay-in-registers")
    # Of a thread, if shared memory has its sums of both gradients.
    both_sums_max_packs = Row(4, "4096x40960: 323 -> 253 us", "sums-of-rows")
    # For RMSNorm: at least the first, and less than the second.
    bulk_threads_of_one_team = Row((320, 480), "16384x6144: 157 -> 147 us", "bulk-copies")
    bulk_stages = Row(4, "32768x4096: 199.6 -> 194.7 us", "bulk-copies")
    bulk_stages_in_clusters = Row(6, "8192x32768: 417 -> 397 us", "bulk-copies")
    # For pairs of blocks, RMSNorm, and larger blocks.
    bulk_stages_in_pairs = Row(5, "8192x16384: 389 -> 382 us", "bulk-copies")


class BackwardInRegisters:
    """Few rows in registers, with the bits of many."""

    max_rows_with_partials = Row(
        64, "256x4096, without columns: 14.4 -> 12.3 us", "few-rows-backward"
    )
    few_rows = Row(64, "128x1024: 5.43 -> 5.21 us; 128x8192: 7.22 -> 7.45", "blocks-of-columns")
    # Rows of one block each with blocks of columns, by the least columns with room for them.
    max_rows_beside_columns = Row(
        ((4097, 768), (2048, 1536), (0, 768)),
        "768x1024: 7.9 -> 7.5 us; 1024x1024: 8.5 -> 8.3",
        "blocks-of-columns",
    )
    max_rows_beside_columns_of_layer_norm = Row(
        ((4096, 768), (0, 256)), "384x2048: 9.2 -> 8.8 us", "blocks-of-columns"
    )
    # Of x and dy, which are read twice.
    max_bytes_beside_columns = Row(
        3 * 2**23, "614x5120: 14.0 -> 13.0 us; 768x8192: 18.5 -> 17.8", "blocks-of-columns"
    )
    max_bytes_beside_columns_of_layer_norm = Row(
        5 * 2**21, "512x5120: 15.1 -> 13.5 us; 512x6144: 15.3 -> 14.7", "blocks-of-columns"
    )
    # For rows moved by less than packs.
    max_rows_in_parts_beside_columns = Row(
        256, "128x4097: 16.0 -> 8.8 us; 512x4097: 19.7 -> 15.9", "blocks-of-columns"
    )
    # Of clusters.
    max_blocks_beside_columns = Row(
        512, "256x16384: 18.2 -> 14.2 us; 512x16384: 23.6 -> 21.0", "blocks-of-columns"
    )
    max_blocks_of_longest_rows = Row(256, "32x131072: 18.2 -> 16.3 us", "blocks-of-columns")
    # Of a multiprocessor, with LayerNorm's kernel of columns.
    threads_of_rows = Row(1024, "256x8192: 12.6 -> 11.1 us", "blocks-of-columns")
    # Blocks of columns: their threads, the least number of adjacent lanes with a pack each, and the
    # most blocks.
    columns_of_few_rows = Row(
        (256, 16, 128), "64x1024: 5.6 -> 4.9 us; 64x8192: 6.4 -> 6.1", "blocks-of-columns"
    )
    columns_of_few_rows_of_layer_norm = Row(
        (256, 16, 256), "64x2048: 6.6 -> 6.3 us", "blocks-of-columns"
    )
    columns_of_more_rows = Row(
        (256, 4, 128),
        "512x2048: 10.2 by 16 lanes, 8.0 by 8, 7.4 by 4; 512x8192: 16.1 -> 13.6",
        "blocks-of-columns",
    )
    columns_of_more_rows_of_layer_norm = Row(
        (512, 8, 128), "256x2048: 8.7 -> 7.7 us", "blocks-of-columns"
    )
    # Of a block whose teams have a row each, by the packs of a thread.
    max_threads_of_teams = Row(
        {1: 1024, 2: 1024, 3: 512, 4: 512, 5: 256, 6: 256, 7: 256},
        "1000x2000 with a bitmask: 13.2 -> 12.6 us",
        "several-rows-a-block",
    )
    min_threads_of_teams = Row(256, "512x1024: 7.7 us, 7.6 with 128", "several-rows-a-block")


class BackwardColumnParallel:
    """Rows longer than a cluster holds."""

    # Of a strip, a pack each.
    min_threads = Row(192, "256x133120 by a cluster: 83 -> 62 us", "column-parallel-rows")
    group_rows = Row((6, 4, 3, 2, 1), "256x262144: 143 -> 121 us", "column-parallel-rows")


class Reduction:
    """Sums of partial weight gradients."""

    # Of a block's threads, halved with each doubling of 8192 columns.
    max_groups = Row(
        64, "4096x768, as laid out before: 13.6 -> 12.2 us", "partial-sums-of-gradients"
    )
