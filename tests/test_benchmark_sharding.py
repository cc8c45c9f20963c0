"""The benchmark of several devices, and its tables."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
from benchmark_doubles import README, ROOT

from benchmarks import report, results, scaling


def test_sharding_lists_what_is_exchanged_and_how_it_scales(tmp_path) -> None:
    pytest.importorskip("jax", minversion="0.10.2")
    options = ("--shape", "16x64", "--layers", "3", "--devices", "1", "4")
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.sharding_jax", tmp_path / "results.json", *options],
        cwd=ROOT,
        env=os.environ | devices,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = results.read(tmp_path / "results.json", "a report")
    assert report["available"] == 4
    found = {(r["scaling"], r["devices"]): r for r in report["measurements"]}
    assert {key: r["rows"] for key, r in found.items()} == {
        ("weak", 1): 16,
        ("weak", 4): 64,
        ("strong", 1): 16,
        ("strong", 4): 16,
    }
    for (kind, count), record in found.items():
        assert record["forward"]["collectives"] == []
        assert record["layers"] == 3
        exchanged = " ".join(record["step"]["collectives"])  # XLA may join some
        assert exchanged.count("f32[64]") == (3 if count > 1 else 0)
        assert set(re.findall(r"all-\w+", exchanged)) <= {"all-reduce"}
        one, work = found[kind, 1], count if kind == "weak" else 1
        for name in ("forward", "step"):
            expected = work * one[name]["seconds"] / record[name]["seconds"]
            assert record[name]["speedup"] == pytest.approx(expected, rel=1e-5)  # of six digits


def scaling_record(devices: int, seconds: float, graph: dict) -> dict:
    call = {"seconds": seconds, "collectives": []}
    return {
        "scaling": "weak",
        "devices": devices,
        "rows": 8 * devices,
        "cols": 64,
        "layers": 2,
        "forward": dict(call),
        "step": call | {"collectives": ["2 all_reduce"]} | graph,
    }


def test_scaling_in_the_readme_is_made_from_the_files(tmp_path) -> None:
    one = scaling_record(1, 0.001, {"graph_seconds": 0.001})
    two = scaling_record(2, 0.004, {"graph_seconds": 0.0016})
    refused = scaling_record(4, 0.004, {"graph_seconds": None, "not_captured": "RuntimeError: no"})
    plain = scaling_record(2, 0.002, {})
    for record in (one, two, refused, plain):
        record["forward"] |= {k: None for k in record["step"] if k == "graph_seconds"}
        scaling.add_speedups(record, one)
    assert two["step"]["speedup"] == pytest.approx(0.5)
    assert two["step"]["graph_speedup"] == pytest.approx(1.25)
    assert refused["step"]["graph_speedup"] is refused["forward"]["graph_speedup"] is None
    assert "graph_speedup" not in plain["step"]
    facts = {"device": "GPU", "commit": "0123456", "norm": "rms_norm", "layers": 2}
    facts |= {"dtypes": ["bfloat16", "float32"]}
    sources = [tmp_path / "t.json", tmp_path / "j.json"]
    measured = {"torch": [one, two, refused], "jax": [plain]}
    for source, (name, records) in zip(sources, measured.items(), strict=True):
        results.save(facts | {name: "1.2", "measurements": records}, source)
    readme = tmp_path / "README.md"
    shutil.copy(README, readme)
    arguments = ["--readme", str(readme), "--scaling", *map(str, sources)]
    report.main(arguments)
    text = readme.read_text(encoding="utf-8")
    before = README.read_text(encoding="utf-8")
    assert text.split(report.BEGIN_SCALING)[0] == before.split(report.BEGIN_SCALING)[0]
    assert text.split(report.END_SCALING)[1] == before.split(report.END_SCALING)[1]
    for line in (
        "From [t.json](t.json), torch 1.2, GPU, commit 0123456: 2 rms_norm, x bfloat16, weights "
        "float32.",
        "| weak | 2 | 16x64 | as called | 4.000 | 0.50x | 4.000 | 0.50x | 2 all_reduce in step |",
        "| weak | 2 | 16x64 | CUDA graph |  |  | 1.600 | 1.25x | 2 all_reduce in step |",
        "Not captured into a CUDA graph, step: `RuntimeError: no`",
        "| weak | 2 | 16x64 | as called | 2.000 | 1.00x | 2.000 | 1.00x | 2 all_reduce in step |",
    ):
        assert line in text.splitlines()
    report.main(arguments)
    assert readme.read_text(encoding="utf-8") == text
