"""Where the rows of cupynorm/_layout/tuning_sm90.py show, and the alternatives to each.

A case is a pass with its dtypes of x and weight, the shapes, and the choices to time against the
row's own. tests/test_benchmark_tune.py checks that one of the shapes tells them apart.
"""

from __future__ import annotations

from cupynorm._layout.tuning_sm90 import SHORT

CASES: dict[str, tuple[str, tuple[object, ...]]] = {
    "AnyPass.min_packs_filled": ("rms_norm forward bf16,f32 1048576x80", (6,)),
    "AnyPass.max_packs_streamed_by_one_block": (
        "layer_norm forward bf16,f32 32x1048584",
        (1 << 30,),
    ),
    "Forward.max_packs": ("layer_norm forward bf16,bf16 512x16384", (1024,)),
    "Forward.max_packs_by_fewest_threads": ("layer_norm forward bf16,bf16 5461x24576", (2048,)),
    "Forward.max_packs_wide": ("rms_norm forward bf16,f64 8192x8192", (1024,)),
    "Forward.max_packs_odd": ("layer_norm forward bf16,bf16 4096x20001", (3072,)),
    "Forward.share_beside_heavy_affine": ("layer_norm forward bf16,f32 32768x16384", (1,)),
    "Forward.rms_norm_streams_by_more_blocks": ("rms_norm forward bf16,f32 32x1048576", (False,)),
    "ForwardInRegisters.fewest_threads_beyond_packs": (
        "layer_norm forward bf16,bf16 12192x11008",
        (1 << 30,),
    ),
    "ForwardInRegisters.max_packs_of_a_power_of_two": (
        "layer_norm forward bf16,f32 16384x8192",
        (1024,),
    ),
    "ForwardInRegisters.six_packs_odd_max": (
        "layer_norm forward bf16,bf16 6500x10241 4800x14001",
        (0, 2048),
    ),
    "ForwardInRegisters.six_packs_between": (
        "layer_norm forward bf16,f32 11000x6001 11000x6002",
        ((0, 0),),
    ),
    "ForwardInRegisters.eight_packs_beyond": (
        "layer_norm forward f32,f32 512x8192 528x7168 16384x8192",
        (2048,),
    ),
    "ForwardInRegisters.widths": ("rms_norm forward bf16,f32 37449x3584", ((4,), (2,))),
    "ForwardInRegisters.short_widths": ("rms_norm forward bf16,f32 1398101x96", ((2,),)),
    "ForwardInRegisters.short_max_packs": ("layer_norm forward bf16,f32 262144x512", (64,)),
    "ForwardInRegisters.long_widths": ("rms_norm forward bf16,f32 8192x16384", ((4, 5, 6, 7),)),
    "ForwardInRegisters.long_widths_of_layer_norm": (
        "layer_norm forward bf16,bf16 8x16384 64x16384",
        ((8, 7, 6, 5),),
    ),
    "ForwardInRegisters.halves_max_threads": ("layer_norm forward bf16,bf16 14000x23196", (1024,)),
    "ForwardInRegisters.halves_odd_max_packs": (
        "rms_norm forward bf16,f32 262144x129 16384x4097",
        (0, 1024),
    ),
    "ForwardInRegisters.held_max_registers": ("rms_norm forward bf16,f32 32768x4096", (16,)),
    "ForwardInRegisters.held_max_registers_of_short_rows": (
        "layer_norm forward bf16,f32 1048576x64 1048576x128",
        (32,),
    ),
    "ForwardInRegisters.held_max_threads": ("rms_norm forward bf16,f32 32768x8192", (256,)),
    "ForwardInRegisters.held_max_threads_if_slim": (
        "rms_norm forward bf16,bf16 32768x8192",
        (128,),
    ),
    "ForwardInRegisters.held_max_threads_by_8_bytes": (
        "rms_norm forward bf16,bf16 262144x300 32768x2052",
        (0, 96),
    ),
    "ForwardInRegisters.threads": ("layer_norm forward bf16,f32 32768x4096", (640, 1024)),
    "ForwardInRegisters.threads_wide": ("rms_norm forward bf16,f64 16384x4096", (512,)),
    "ForwardInRegisters.threads_holding": ("rms_norm forward bf16,f32 419430x320", (512, 768)),
    "ForwardInRegisters.threads_holding_slim_full_rows": (
        "rms_norm forward bf16,bf16 512x8192",
        (640, 768),
    ),
    "ForwardInRegisters.threads_holding_slim": (
        "rms_norm forward bf16,bf16 24892x2696",
        (640, 1024),
    ),
    "ForwardInRegisters.threads_holding_slim_by_many": (
        "rms_norm forward bf16,bf16 11915x5632",
        (768,),
    ),
    "ForwardInRegisters.threads_holding_by_96": (
        "rms_norm forward bf16,f32 24892x2696",
        (640, 896),
    ),
    "ForwardInRegisters.threads_of_float16": (
        "layer_norm forward f16,f16 32768x8192 16384x10240",
        (768,),
    ),
    "ForwardInRegisters.threads_by_fewest": ("layer_norm forward bf16,f32 18724x7168", (640,)),
    "ForwardInRegisters.threads_by_fewest_of_224_to_288": (
        "layer_norm forward bf16,bf16 3640x18432",
        (800,),
    ),
    "ForwardInRegisters.threads_of_halves": ("layer_norm forward bf16,f32 16384x8196", (800,)),
    "ForwardInRegisters.threads_of_ten_halves": ("layer_norm forward bf16,f32 32768x2052", (640,)),
    "ForwardInRegisters.threads_in_parts": ("rms_norm forward bf16,f32 16384x4097", (384,)),
    "ForwardInRegisters.threads_in_parts_of_more": (
        "rms_norm forward bf16,f32 10000x10001",
        (256, 640),
    ),
    "ForwardInRegisters.threads_in_parts_by_fewest": (
        "layer_norm forward bf16,bf16 5600x12001",
        (640, 672),
    ),
    "ForwardInRegisters.threads_in_parts_by_fewest_of_more": (
        "layer_norm forward bf16,f32 6500x10241",
        (512,),
    ),
    "ForwardInRegisters.blocks_ahead_multiprocessors": (
        "layer_norm forward bf16,f32 8192x1024 4096x3584",
        (0, 256),
    ),
    "ForwardInRegisters.half_as_far_beyond_threads": (
        "layer_norm forward bf16,bf16 1000x16384",
        (1024,),
    ),
    "FewRowsForward.held_max_registers": ("layer_norm forward bf16,bf16 1x4096 512x4096", (0,)),
    "FewRowsForward.threads": ("layer_norm forward bf16,bf16 64x4096", (384, 640)),
    "FewRowsForward.threads_if_crowded": ("layer_norm forward bf16,bf16 8x5120", (512,)),
    "FewRowsForward.threads_at_once": ("rms_norm forward bf16,bf16 512x16384", (768,)),
    "FewRowsForward.folded_threads": (
        "layer_norm forward f16,f16 528x14336 400x10240",
        ((), (320, 384, 448, 512)),
    ),
    "FewRowsForward.max_short_elements": (
        "layer_norm forward bf16,f32 32768x256 65536x256",
        (0, 1 << 24),
    ),
    "FewRowsForward.split_min_threads": ("layer_norm forward bf16,bf16 8x4096", (128,)),
    "FewRowsForward.split_min_packs": ("rms_norm forward bf16,bf16 8x8192", (1024,)),
    "FewRowsForward.split_blocks_of_layer_norm": (
        "layer_norm forward bf16,bf16 8x16384 64x16384",
        ((4,), ()),
    ),
    "ForwardPipelined.max_threads": ("rms_norm forward bf16,f32 8192x32768", (256, 384)),
    "ForwardPipelined.three_packs_max": ("layer_norm forward f16,f32 14563x9216", (512,)),
    "ForwardPipelined.stages": ("layer_norm forward bf16,f32 2048x131072", (2,)),
    "ForwardPipelined.held_by_8_bytes_max_blocks": ("rms_norm forward bf16,bf16 8192x16388", (1,)),
    "ForwardPipelined.two_clusters_max_threads": (
        "layer_norm forward bf16,f32 1024x163840",
        (128,),
    ),
    "ForwardPipelined.two_clusters_max_packs": ("rms_norm forward bf16,f32 8192x65536", (8,)),
    "ForwardPipelined.two_clusters_max_packs_of_layer_norm": (
        "layer_norm forward bf16,bf16 680x98305",
        (5,),
    ),
    "ForwardPipelined.two_clusters_beyond_blocks": ("rms_norm forward bf16,f32 8192x24576", (1,)),
    "ForwardPipelined.counted_max_blocks": (
        "layer_norm forward bf16,f32 16384x32768 8192x65536",
        (1, 4),
    ),
    "ForwardPipelined.counted_float32_beyond_packs": (
        "layer_norm forward f32,f32 8192x131072 512x229376",
        (3, 8),
    ),
    "BackwardPipelined.short_layouts": (
        "rms_norm backward bf16,f32 419430x320",
        ({width: SHORT[width] for width in (1, 2)},),
    ),
    "BackwardPipelined.short_layouts_of_layer_norm": (
        "layer_norm backward bf16,f32 131072x256 65536x512",
        (SHORT,),
    ),
    "BackwardPipelined.seven_packs_of_a_warp": (
        "layer_norm backward bf16,f32 41943x1600",
        ((0, 0),),
    ),
    "BackwardPipelined.long_threads": ("layer_norm backward bf16,f32 7281x18432", ({2: 512},)),
    "BackwardPipelined.five_packs_beyond": ("layer_norm backward bf16,f32 52428x2560", (0,)),
    "BackwardPipelined.few_packs_max_threads": ("layer_norm backward bf16,f32 12483x5376", (384,)),
    "BackwardPipelined.two_packs_min_threads": ("rms_norm backward bf16,f32 16384x12288", (1024,)),
    "BackwardPipelined.six_packs_held_threads": ("rms_norm backward bf16,bf16 16384x5376", (0,)),
    "BackwardPipelined.many_packs_max_threads": ("layer_norm backward bf16,f32 4854x13824", (256,)),
    "BackwardPipelined.many_packs_min_blocks": (
        "rms_norm backward bf16,f32 682x98304 3048x22016",
        (2, 32),
    ),
    "BackwardPipelined.held_row_min_packs": ("rms_norm backward bf16,f32 1048576x64", (1,)),
    "BackwardPipelined.held_row_min_threads": ("rms_norm backward bf16,f32 8192x32768", (256,)),
    "BackwardPipelined.held_row_max_blocks": ("rms_norm backward bf16,f32 8192x40960", (2, 1)),
    "BackwardPipelined.both_sums_max_packs": ("layer_norm backward bf16,f32 4096x40960", (7,)),
    "BackwardPipelined.bulk_threads_of_one_team": (
        "rms_norm backward bf16,f32 16384x6144 16384x7680",
        ((0, 0), (320, 513)),
    ),
    "BackwardPipelined.bulk_stages": ("layer_norm backward bf16,f32 32768x4096", (3,)),
    "BackwardPipelined.bulk_stages_in_clusters": ("layer_norm backward bf16,f32 8192x32768", (5,)),
    "BackwardPipelined.bulk_stages_in_pairs": ("rms_norm backward f32,f32 8192x16384", (6,)),
    "BackwardInRegisters.max_rows_with_partials": (
        "layer_norm backward bf16,bf16 128x1024",
        (128,),
    ),
    "BackwardInRegisters.few_rows": (
        "rms_norm backward bf16,bf16 128x1024 128x2048 128x4096 128x8192",
        (128,),
    ),
    "BackwardInRegisters.max_rows_beside_columns": (
        "rms_norm backward bf16,bf16 768x1024 1024x1024 1536x2048",
        (((0, 512),), ((0, 1536),)),
    ),
    "BackwardInRegisters.max_rows_beside_columns_of_layer_norm": (
        "layer_norm backward bf16,bf16 384x2048",
        (((4096, 768), (0, 512)),),
    ),
    "BackwardInRegisters.max_bytes_beside_columns": (
        "rms_norm backward bf16,bf16 614x5120 768x8192",
        (2**23,),
    ),
    "BackwardInRegisters.max_bytes_beside_columns_of_layer_norm": (
        "layer_norm backward bf16,bf16 512x5120 512x6144",
        (2**22, 2**24),
    ),
    "BackwardInRegisters.max_rows_in_parts_beside_columns": (
        "rms_norm backward bf16,bf16 128x4097 512x4097",
        (64, 512),
    ),
    "BackwardInRegisters.max_blocks_beside_columns": (
        "rms_norm backward bf16,bf16 256x16384 512x16384",
        (256, 1024),
    ),
    "BackwardInRegisters.max_blocks_of_longest_rows": (
        "rms_norm backward bf16,bf16 32x131072",
        (512,),
    ),
    "BackwardInRegisters.threads_of_rows": ("layer_norm backward bf16,bf16 256x8192", (512,)),
    "BackwardInRegisters.columns_of_few_rows": (
        "rms_norm backward bf16,bf16 8x1024 64x1024 8x4096 64x4096 8x8192 64x8192",
        ((512, 16, 128), (256, 8, 128), (256, 4, 128)),
    ),
    "BackwardInRegisters.columns_of_few_rows_of_layer_norm": (
        "layer_norm backward bf16,bf16 64x2048 8x4096 64x4096 8x8192 64x8192",
        ((512, 8, 256), (512, 8, 128)),
    ),
    "BackwardInRegisters.columns_of_more_rows": (
        "rms_norm backward bf16,bf16 512x1024 512x2048 512x4096 512x8192 1024x4096",
        ((256, 8, 128), (256, 16, 128), (256, 4, 256)),
    ),
    "BackwardInRegisters.columns_of_more_rows_of_layer_norm": (
        "layer_norm backward bf16,bf16 256x2048",
        ((256, 16, 128),),
    ),
    "BackwardInRegisters.max_threads_of_teams": (
        "layer_norm backward bf16,f32 1000x2000",
        ({1: 512, 2: 512, 3: 512, 4: 512, 5: 256, 6: 256, 7: 256},),
    ),
    "BackwardInRegisters.min_threads_of_teams": (
        "layer_norm backward bf16,bf16 256x256 512x1024 1000x1024 512x768",
        (64, 128, 512),
    ),
    "BackwardColumnParallel.min_threads": ("rms_norm backward f32,f32 32x237568", (512,)),
    "BackwardColumnParallel.group_rows": (
        "layer_norm backward bf16,f32 256x262144",
        ((5, 4, 3, 2, 1),),
    ),
    "Reduction.max_groups": ("rms_norm backward bf16,bf16 4096x768", (16, 32)),
}
