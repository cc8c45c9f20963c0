"""What the benchmark makes of its files: tables, plots and comparisons."""

from __future__ import annotations

import copy
import re
import shutil
from dataclasses import asdict

import numpy as np
import pytest
from benchmark_doubles import README, SYNTHETIC

from benchmarks import compare, join, plots, problems, report, results, run, summary
from benchmarks.backends import ALL
from benchmarks.measure import reason
from cupynorm._bench import Problem

SYNTHETIC_RELU = SYNTHETIC.with_name("synthetic_relu.json")
RECORDED = README.with_name("results") / "h200_standard.json"
DOCS = README.parent.parent / "docs"
TABLES = DOCS / "tables.md"


@pytest.fixture
def synthetic() -> dict:
    return results.load(SYNTHETIC)


@pytest.fixture
def without_figures(monkeypatch) -> None:
    """For a report that is read for its words: drawing takes 2 s."""
    monkeypatch.setattr(plots, "draw", lambda report, folder: [])


def test_a_file_survives_saving(tmp_path, synthetic) -> None:
    results.save(synthetic, tmp_path / "new" / "file.json")
    assert results.load(tmp_path / "new" / "file.json") == synthetic
    assert (tmp_path / "new" / "file.json").read_text(encoding="utf-8") == SYNTHETIC.read_text(
        encoding="utf-8"
    )


def test_a_file_of_another_format_is_refused(tmp_path, synthetic) -> None:
    results.save(synthetic | {"format": 0}, tmp_path / "file.json")
    with pytest.raises(ValueError, match="of format 2, got one of 0"):
        results.load(tmp_path / "file.json")


def test_the_lower_of_call_and_kernels_counts(synthetic) -> None:
    record = synthetic["measurements"][0]
    assert results.seconds(record) == record["times"]["kernels"]["median"]
    assert results.gigabytes_per_second(record) == pytest.approx(
        results.problem_of(record).bytes / record["times"]["kernels"]["median"] / 1e9
    )


@pytest.mark.usefixtures("without_figures")
def test_jax_without_a_profiler_counts_by_its_queue_of_calls(synthetic, tmp_path) -> None:
    own = [record for record in synthetic["measurements"] if record["backend"] == "JAX"]
    for record in own:
        record["times"] = {"queue": dict.fromkeys(("median", "low", "high"), 1e-9) | {"runs": 3}}
        assert results.seconds(record) == 1e-9
        assert results.seconds(record, called=True) is None
    assert {ratio.peer for ratio in summary.ratios(synthetic["measurements"])} == {"JAX"}
    path = tmp_path / "results.json"
    results.save(synthetic, path)
    report.main([str(path)])
    assert compare.main([str(SYNTHETIC), str(path), "--backends", "JAX", "--fail-below", "1"]) == 0
    assert compare.main([str(path), str(SYNTHETIC), "--backends", "JAX", "--fail-below", "1"]) == 1


def test_summary_is_of_the_best_peer_on_each_shape(synthetic) -> None:
    found = summary.ratios(synthetic["measurements"])
    times = {
        (results.problem_of(r), r["backend"]): results.seconds(r) for r in synthetic["measurements"]
    }
    assert len(found) == 12
    for ratio in found:
        ours = times[ratio.problem, "cupynorm"]
        assert ratio.peer == "torch.compile"
        assert ratio.to_peer == times[ratio.problem, "torch.compile"] / ours
        assert ratio.to_limit == times[ratio.problem, "limit, CuPy"] / ours
    summaries = summary.summarize(synthetic["measurements"])
    assert [s.operation for s in summaries] == list(problems.OPERATIONS)
    product = np.prod([r.to_peer for r in found[:1] + found[4:5] + found[8:9]])
    assert summaries[0].to_peer == pytest.approx(product ** (1 / 3))
    assert summaries[0].worst == min(
        (r for r in found if r.problem.operation == summaries[0].operation),
        key=lambda r: r.to_peer,
    )
    assert "ahead on 3 of 3" in summary.sentence(summaries[0])


def test_summary_counts_neither_the_wrong_nor_the_missing(synthetic) -> None:
    for record in synthetic["measurements"]:
        if record["backend"] == "torch.compile":
            record["status"] = "wrong"
    assert {r.peer for r in summary.ratios(synthetic["measurements"])} == {"quack"}
    alone = [r for r in synthetic["measurements"] if r["backend"] == "cupynorm"]
    assert {r[1:] for r in summary.ratios(alone)} == {(None, None, None, None, ())}
    line = summary.sentence(summary.summarize(alone)[0])
    assert line == "rms_norm forward: timed 3 of 3 shapes"
    assert summary.summarize([]) == []


def test_kernels_are_compared_with_kernels_and_calls_with_calls() -> None:
    def record(backend, call, kernels):
        problem = Problem("rms_norm", "forward", 8, 4096, "bfloat16", "bfloat16")
        times = {name: {"median": time} for name, time in (("call", call), ("kernels", kernels))}
        times = {name: timing for name, timing in times.items() if timing["median"]}
        return asdict(problem) | {"backend": backend, "status": "ok", "times": times}

    ours, quack, liger = (
        record("cupynorm", 8.0, 5.0), record("quack", 6.0, 7.0), record("liger", 90.0, 4.0)
    )  # fmt: skip
    limit = record("limit, CuPy", 2.0, 3.0)
    found = summary.ratios([ours, quack, liger, limit])[0]
    assert (found.peer, found.to_peer, found.as_called) == ("liger", 4 / 5, 6 / 8)
    assert found.to_limit == 2 / 5  # a limit has both times
    line = summary.sentence(summary.summarize([ours, quack, liger, limit])[0])
    assert "0.800 of the best peer (geometric means), ahead on 0 of 1, worst 0.800 of liger" in line
    assert "as called 0.750, ahead on 0 of 1" in line
    # torch eager was not captured, so its call counts. JAX has kernels only, and no call to compare
    # with.
    found = summary.ratios([ours, record("torch eager", 4.5, None), record("JAX", None, 4.75)])[0]
    assert (found.peer, found.to_peer, found.as_called) == ("torch eager", 4.5 / 5, 4.5 / 8)


def test_a_faster_face_of_cupynorm_changes_no_ratio(synthetic) -> None:
    measured = synthetic["measurements"]
    before = summary.summarize(measured)
    for face in ("cupynorm (torch)", "cupynorm (JAX)"):
        for record in [r for r in measured if r["backend"] == "cupynorm"]:
            faster = copy.deepcopy(record) | {"backend": face}
            faster["times"]["kernels"]["median"] /= 2
            measured.append(faster)
    assert summary.summarize(measured) == before


def test_summary_names_what_cupynorm_was_not_timed_on(synthetic) -> None:
    ours = [r for r in synthetic["measurements"] if r["backend"] == "cupynorm"]
    wrong, failed = (
        r
        for r in ours
        if r["norm"] == "rms_norm" and r["direction"] == "forward" and r is not ours[0]
    )
    wrong["status"] = "wrong"
    failed["status"] = "failed"
    found = summary.summarize(synthetic["measurements"])[0]
    assert (found.shapes, found.compared) == (3, 1)
    assert found.missing == [results.problem_of(wrong), results.problem_of(failed)]
    names = "; ".join(map(summary.label, found.missing))
    assert f"rms_norm forward: timed 1 of 3 shapes, without {names}, " in summary.sentence(found)
    ours[0]["status"] = "failed"
    assert "timed 0 of 3 shapes" in summary.sentence(
        summary.summarize(synthetic["measurements"])[0]
    )


def test_summary_names_peers_without_a_time_and_marks_the_shapes_not_measured(synthetic) -> None:
    measured = synthetic["measurements"]
    first, second, _ = (
        p for p, _ in results.by_problem(measured) if p.operation == "rms_norm forward"
    )

    def of(problem, backend):
        return next(
            r for r in measured if results.problem_of(r) == problem and r["backend"] == backend
        )

    before = summary.summarize(measured)[0]
    assert before.incomplete == 0
    # A peer that failed was tried. A peer without a record might have been the best.
    of(first, "quack")["status"] = "failed"
    measured.remove(of(second, "torch.compile"))
    found = {r.problem: r for r in summary.ratios(measured)}
    assert found[first].unmeasured == ()
    assert found[second].unmeasured == ("torch.compile",)
    after = summary.summarize(measured)[0]
    assert after.incomplete == 1
    assert after.partial == before.partial | {"quack": 2, "torch.compile": 2}
    assert "peers timed on fewer: quack 2, " in summary.sentence(after)
    # A peer without any record for an operation is missing there too.
    others = [
        r
        for r in measured
        if r["backend"] != "torch.compile" or results.problem_of(r).operation != first.operation
    ]
    after = summary.summarize(others)[0]
    assert (after.incomplete, after.partial["torch.compile"]) == (3, 0)


def test_a_figure_has_three_digits() -> None:
    figures = {0.5: "0.50", 9.994: "9.99", 9.996: "10.0", 99.94: "99.9", 99.96: "100", 1234: "1234"}
    assert {value: summary.digits(value) for value in figures} == figures


def test_plots_are_written_as_svg_and_the_same_each_time(tmp_path) -> None:
    recorded = results.load(RECORDED)
    recorded["measurements"] = [r for r in recorded["measurements"] if r["norm"] == "rms_norm"]
    paths = plots.draw(recorded, tmp_path / "a")
    assert [path.name for path in paths] == [
        "rms_norm_forward_decoding.svg",
        "rms_norm_backward_decoding.svg",
    ]
    plots.draw(recorded, tmp_path / "b")
    for path in paths:
        assert path.read_bytes().startswith(b"<?xml")
        assert (tmp_path / "b" / path.name).read_bytes() == path.read_bytes()


def test_the_overview_has_the_speed_over_the_limits_of_both_passes(tmp_path) -> None:
    recorded = results.load(RECORDED)
    figure = plots.overview(recorded)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [
        f"{norm} {one}"
        for norm in ("RMSNorm", "LayerNorm")
        for one in ("forward: 1 is the speed of a copy", "backward: 1 is the speed of an add")
    ]
    found = {r.problem: r.to_limit for r in summary.ratios(recorded["measurements"])}
    for axes, operation in zip(figure.axes, problems.OPERATIONS, strict=True):
        (line,) = (line for line in axes.lines if line.get_label() == "cupynorm")
        norm, direction = operation.split()
        expected = [
            found[Problem(norm, direction, *shape, *problems.PAIRS[0])]
            for shape in problems.TRAINING
        ]
        assert list(line.get_ydata()) == pytest.approx(expected)
        assert list(line.get_xdata()) == [cols for _, cols in problems.TRAINING]
    path = tmp_path / "speed.svg"
    plots.main([str(RECORDED), str(path)])
    drawn, kept = (file.read_text(encoding="utf-8") for file in (path, DOCS / "speed.svg"))
    words = [re.findall(r">([^<>]+)</text>", text) for text in (drawn, kept)]
    assert words[0] == words[1]
    assert len(kept) < 150_000


def decoding_record(first: dict, rows: int, cols: int, seconds: float) -> dict:
    timing = {"median": seconds, "low": seconds, "high": seconds, "runs": 3}
    return first | {"rows": rows, "cols": cols, "times": {"call": timing}}


def test_decoding_is_drawn_over_the_limit_a_panel_a_width(synthetic) -> None:
    first = next(r for r in synthetic["measurements"] if r["backend"] == "cupynorm")
    shapes = ((8, 4096), (1, 4096), (64, 1024), (64, 4096), (512, 1024), (3, 4096))
    own = [decoding_record(first, *shape, 5.0) for shape in shapes]
    limits = [
        decoding_record(first | {"backend": name}, *shape, seconds)
        for shape in shapes
        for name, seconds in (("limit, CuPy", 6.0), ("limit, torch", 4.0))
    ]
    missing = [r | {"backend": "quack"} for r in own if r["rows"] != 8]
    slow = [decoding_record(first | {"backend": "torch eager"}, 8, 4096, 12.0)]
    figure = plots.decoding("rms_norm forward", own + limits + missing + slow)
    found = {
        axes.get_title(): [
            (line.get_color(), [(round(x), y) for x, y in line.get_xydata()])
            for line in axes.lines
            if line.get_marker() != "None"
        ]
        for axes in figure.axes
    }
    ours, quack, eager = plots.COLOURS[0], plots.COLOURS[4], plots.COLOURS[9]
    # A point is at its place among the row counts 1, 8, 64 and 512. The faster copy counts.
    assert found == {
        "N = 1024": [(colour, [(2, 1.25), (3, 1.25)]) for colour in (ours, quack)],
        "N = 4096": [
            (ours, [(0, 1.25), (1, 1.25), (2, 1.25)]),
            *((quack, [(place, 1.25)]) for place in (0, 2)),
            (eager, [(1, 3)]),
        ],
    }
    for axes in figure.axes:
        starts = [line.get_xdata()[0] for line in axes.lines if line.get_marker() != "None"]
        assert len(set(starts)) == len(starts)  # side by side
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "8", "64", "512"]
        assert axes.get_ylim() == (0.95, 2)
        assert axes.get_yscale() == "linear"
    assert figure.get_suptitle().endswith("; beyond 2 times the copy not shown")
    assert figure.get_supylabel() == "time over the copy's"
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["copy", "cupynorm", "quack", "torch eager"]
    # A backend that lacks a width has the same place in the legend as in the tables.
    face = [r | {"backend": "cupynorm (torch)"} for r in own if r["cols"] == 4096]
    (legend,) = plots.decoding("rms_norm forward", own + limits + missing + face).legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["copy", "cupynorm", "cupynorm (torch)", "quack"]
    # cupynorm is always shown in full.
    late = decoding_record(first, 512, 1024, 9.0)
    behind = plots.decoding("rms_norm forward", [*own, *limits, *slow, late])
    assert behind.axes[0].get_ylim() == (0.95, 2.3)
    assert behind.get_suptitle().endswith("; beyond 2.3 times the copy not shown")
    near = plots.decoding("rms_norm forward", own + limits)
    assert near.axes[0].get_ylim() == (0.95, 1.3)
    assert "beyond" not in near.get_suptitle()
    assert plots.decoding("one M of a width", [own[0], own[2]]) is None
    assert plots.decoding("no decoding", [own[-1]]) is None


def test_decoding_without_a_time_of_the_limit_has_no_line_there(synthetic) -> None:
    first = next(r for r in synthetic["measurements"] if r["backend"] == "cupynorm")
    own = [decoding_record(first, rows, 4096, 5e-6) for rows in (1, 8, 64)]
    limits = [r | {"backend": "limit, CuPy"} for r in own]
    limits[1] |= {"status": "failed"}
    (axes,) = plots.decoding("rms_norm forward", own + limits).axes
    lines = [tuple(line.get_ydata()) for line in axes.lines if line.get_marker() != "None"]
    assert lines == [(1,), (1,)]


def host_record(backend: str, operation: str, low: float, median: float, high: float) -> dict:
    seconds = {"median": 1e-6 * median, "low": 1e-6 * low, "high": 1e-6 * high, "runs": 3}
    return {"backend": backend, "operation": operation, "seconds": seconds}


@pytest.mark.usefixtures("without_figures")
def test_host_times_have_their_spread_where_there_is_one(tmp_path) -> None:
    host = [
        host_record("limit, CuPy", "rms_norm forward", 4.0, 4.0, 4.1),
        host_record("limit, CuPy", "layer_norm forward", 4.1, 4.1, 4.1),
        host_record("limit, CuPy", "rms_norm backward", 10.0, 10.16, 10.2),
        host_record("limit, torch", "layer_norm backward", 7.0, 7.0, 7.0),
        host_record("cupynorm", "rms_norm forward", 8.0, 8.5, 9.96),
        host_record("cupynorm", "layer_norm forward", 20.0, 20.0, 20.0),
        {"backend": "cupynorm", "operation": "rms_norm backward", "reason": "none"},
    ]

    def written(records: list[dict]) -> str:
        path = tmp_path / "results.json"
        results.save(results.load(SYNTHETIC) | {"host": records, "first_calls": []}, path)
        report.main([str(path)])
        return path.with_suffix(".md").read_text(encoding="utf-8")

    text = written(host)
    assert "| limit, CuPy | 4.0 | 10.2 | 4.1 |  |" in text
    assert "| cupynorm | 8.5 (8.0 to 10.0) | failed | 20.0 |  |" in text
    assert "The host drifts" not in text
    host.append(host_record("limit, CuPy", "layer_norm backward", 7.0, 7.0, 7.0))
    assert "its medians differ by up to 45%" in written(host)


def test_small_problems_are_shown_in_microseconds_and_the_limit_says_what_counted(tmp_path) -> None:
    def record(backend, rows, cols, call, kernels):
        problem = Problem("rms_norm", "forward", rows, cols, "bfloat16", "bfloat16")
        times = {
            name: {"median": value, "low": value, "high": value, "runs": 3}
            for name, value in (("call", call), ("kernels", kernels))
        }
        return asdict(problem) | {"backend": backend, "status": "ok", "times": times}

    measured = [
        record("limit, CuPy", 8, 4096, 4e-6, 3.5e-6),
        record("limit, torch", 8, 4096, 5e-6, 6e-6),
        record("cupynorm", 8, 4096, 5e-6, 4.375e-6),
        record("liger", 8, 4096, 44.04e-6, 5.25e-6),
        record("limit, CuPy", 512, 16384, 24e-6, 26e-6),
        record("cupynorm", 512, 16384, 32e-6, 30e-6),
        record("JAX", 512, 16384, 50e-6, 24e-6),
        record("cupynorm", 7, 100, 15e-6, 16e-6),
    ]
    file = results.load(SYNTHETIC) | {"measurements": measured, "host": [], "first_calls": []}
    results.save(file, tmp_path / "mine.json")
    report.main([str(tmp_path / "mine.json")])
    lines = (tmp_path / "mine.md").read_text(encoding="utf-8").splitlines()
    moved = results.problem_of(measured[4]).bytes
    fast, slow = (f"{1e-9 * moved / seconds:.0f}" for seconds in (24e-6, 30e-6))
    for line in (
        "| 8x4096 | bfloat16, bfloat16 | 3.50 g | 5.00 c | 4.38 | 5.25 | 0.80 | 1.20* |",
        f"| 512x16384 | bfloat16, bfloat16 | {fast} c | {slow} | {fast} | 0.80 | 0.80*† |",
        "| 8x4096 | bfloat16, bfloat16 | 5.00 / 4.38 | 44.0 / 5.25 |  |",
        "| 512x16384 | bfloat16, bfloat16 | 32.0 / 30.0 |  | 50.0 / 24.0 |",
    ):
        assert line in lines
    assert not any(line.startswith("| 7x100 ") and "/" in line for line in lines)


def test_a_report_is_written_beside_the_file_or_into_the_one_named(tmp_path, capsys) -> None:
    source, named = tmp_path / "mine.json", tmp_path / "named.md"
    shutil.copy(SYNTHETIC, source)
    report.main([str(source)])
    assert f"written into {tmp_path / 'mine.md'}" in capsys.readouterr().out
    text = (tmp_path / "mine.md").read_text(encoding="utf-8")
    assert text.startswith(f"# Benchmark\n\n{report.BEGIN}\n\nFrom [mine.json](mine.json), ")
    assert text.endswith(f"\n\n{report.END}\n")
    for link in re.findall(r"\((mine/\w+\.\w+)\)", text):
        assert (tmp_path / link).is_file()
    named.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n", encoding="utf-8")
    report.main([str(source), "--readme", str(named)])
    section = text.removeprefix("# Benchmark\n\n")
    assert named.read_text(encoding="utf-8") == f"before\n{section}after\n"


@pytest.mark.parametrize("module", [report, compare])
def test_a_file_that_is_not_there_is_named(module, tmp_path, capsys) -> None:
    missing = str(tmp_path / "missing.json")
    with pytest.raises(SystemExit):
        module.main([missing] if module is report else [str(SYNTHETIC), missing])
    assert f"there is no file {missing}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("read", "expected", "right"),
    [
        (lambda path: report.main([path]), "benchmarks.run", "run"),
        (lambda path: report.main(["--relu", path]), "benchmarks.relu", "relu"),
        (
            lambda path: report.main(["--scaling", path]),
            "benchmarks.sharding_torch or benchmarks.sharding_jax",
            "sharding",
        ),
        (lambda path: compare.main([str(SYNTHETIC), path]), "benchmarks.run", "run"),
        (lambda path: compare.main([path, str(SYNTHETIC)]), "benchmarks.run", "run"),
    ],
)
def test_a_file_of_another_kind_is_named_and_what_was_expected(
    read, expected, right, tmp_path, capsys
) -> None:
    recorded = {
        "run": SYNTHETIC,
        "relu": SYNTHETIC_RELU,
        "regimes": RECORDED.with_name("regimes_h200.json"),
        "sharding": RECORDED.with_name("sharding_torch_h200.json"),
    }
    texts = {name: path.read_bytes() for name, path in recorded.items() if name != right}
    texts |= {"text": b"no JSON", "bytes": b"\xff\xfe", "list": b"[1]", "format": b'{"format": 1}'}
    for name, text in texts.items():
        path = tmp_path / f"{name}.json"
        path.write_bytes(text)
        with pytest.raises(SystemExit) as stopped:
            read(str(path))
        assert stopped.value.code == 2
        message = capsys.readouterr().err.splitlines()[-1]
        assert f"error: {path} must be a file of {expected}, " in message
        assert ", got " in message
    assert {path.stem for path in tmp_path.iterdir()} == texts.keys()  # nothing is written


def test_only_a_file_of_a_run_is_resumed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run, "gpu_problem", lambda: None)
    path = tmp_path / "results.json"
    shutil.copy(SYNTHETIC_RELU, path)
    with pytest.raises(SystemExit, match=f"{path} must be a file of benchmarks.run, got one of"):
        run.main([str(path), "--resume"])


@pytest.mark.usefixtures("without_figures")
def test_runs_on_two_gpus_are_joined_if_they_are_alike(synthetic, tmp_path, capsys) -> None:
    paths = [tmp_path / f"{norm}.json" for norm in ("rms_norm", "layer_norm")]
    measured, host = synthetic["measurements"], synthetic["host"]
    for path, uuid in zip(paths, ("01234567", "89abcdef"), strict=True):
        own = [record for record in measured if record["norm"] == path.stem]
        part = synthetic | {"measurements": own, "started": uuid, "complete": True}
        part["machine"] = synthetic["machine"] | {"uuid": uuid}
        if path is paths[1]:
            part |= {"host": [], "first_calls": []}
        results.save(part, path)
    joined = tmp_path / "joined.json"
    arguments = [str(joined), *map(str, paths)]
    join.main(arguments)
    whole = results.load(joined, "benchmarks.run")
    assert sorted(map(str, whole["measurements"])) == sorted(map(str, measured))
    assert (whole["host"], whole["complete"]) == (host, True)
    assert whole["machine"]["uuid"] == "01234567 and 89abcdef"
    begun = [session["started"] for session in (whole, *whole["sessions"])]
    assert begun == ["01234567", "89abcdef"]
    report.main([str(joined)])
    text = joined.with_suffix(".md").read_text(encoding="utf-8")
    assert ", started 01234567, on 2 GPUs of this kind, each problem on one of them." in text

    def refused(*others: str) -> str:
        before = joined.read_text(encoding="utf-8")
        with pytest.raises(SystemExit) as stopped:
            join.main([str(tmp_path / "none.json"), str(paths[0]), *others])
        assert stopped.value.code == 2
        assert not (tmp_path / "none.json").exists()
        assert joined.read_text(encoding="utf-8") == before
        return capsys.readouterr().err

    first, other = map(results.load, paths)
    path = tmp_path / "other.json"
    for changed, name in (
        ({"commit": "1" * 40}, f"commit '{'0' * 40}' and '{'1' * 40}'"),
        ({"machine": other["machine"] | {"driver": "1.0"}}, "driver '0.0' and '1.0'"),
        ({"method": 7}, f"method of timing {first.get('method')} and 7"),
        ({"backends": {"quack": "2"}}, f"quack {first['backends']['quack']!r} and '2'"),
    ):
        results.save(other | changed, path)
        assert refused(str(path)).endswith(f"{paths[0]} and {path} differ: {name}\n")
    for changed, name in (
        ({"machine": first["machine"]}, "GPU 01234567"),
        ({"measurements": first["measurements"][:1]}, "problem Problem(norm='rms_norm', "),
        ({"host": host[-1:]}, f"host time ('{host[-1]['operation']}', "),
        ({"first_calls": first["first_calls"][:1]}, "first call ('cupynorm', "),
    ):
        results.save(other | {"first_calls": []} | changed, path)
        assert f"more than one of {paths[0]}, {path} has the {name}" in refused(str(path))
    assert f"{paths[0]} must be named once, got 2 times" in refused(str(paths[0]))
    assert "there is no file nowhere.json" in refused("nowhere.json")
    namesake = tmp_path / "another" / paths[0].name
    namesake.parent.mkdir()
    results.save(other, namesake)
    join.main([str(tmp_path / "of_namesakes.json"), str(paths[0]), str(namesake)])
    assert (tmp_path / "of_namesakes.json").read_text(encoding="utf-8") == joined.read_text(
        encoding="utf-8"
    )
    with pytest.raises(SystemExit):
        join.main(arguments)
    assert f"{joined} exists: name another file" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "page"), [("--readme", TABLES), ("--headline", README)])
def test_the_pages_show_the_recorded_results(option, page, tmp_path) -> None:
    source, written = (tmp_path / path.relative_to(DOCS.parent) for path in (RECORDED, page))
    for path, kept in ((source, RECORDED), (written, page)):
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(kept, path)
    report.main([str(source), option, str(written)])
    assert written.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
    if option == "--readme":
        drawn, kept = (path.with_suffix("").iterdir() for path in (source, RECORDED))
        assert {path.name for path in drawn} == {path.name for path in kept}


def test_the_headline_has_a_table_a_pass_and_says_below_them_what_is_missing(
    synthetic, tmp_path, capsys
) -> None:
    first, second, third = (
        p for p, _ in results.by_problem(synthetic["measurements"])
        if p.operation == "rms_norm forward"
    )  # fmt: skip
    for record in synthetic["measurements"]:
        if record["backend"] == "quack" and results.problem_of(record) == second:
            record["status"] = "failed"
    measured = [
        r
        for r in synthetic["measurements"]
        if r["backend"] != "liger" or results.problem_of(r) != third
    ]
    source, page = tmp_path / "run.json", tmp_path / "page.md"
    results.save(synthetic | {"measurements": measured, "complete": False}, source)
    page.write_text(f"{report.BEGIN_HEADLINE}\n{report.END_HEADLINE}\n", encoding="utf-8")
    report.main([str(source), "--headline", str(page)])
    text = page.read_text(encoding="utf-8")
    assert not source.with_suffix("").exists()  # no figures
    _, _, forward = text.partition("\n**Forward**\n")
    forward, _, backward = forward.partition("\n**Backward**\n")
    groups = ("other shapes", "decoding")
    expected = [(norm, group) for group in groups for norm in ("RMSNorm", "LayerNorm")]
    for table in (forward, backward):
        assert re.findall(r"^\| (\w+Norm), (.*?) \|", table, re.MULTILINE) == expected
    # By the shapes that both have. quack failed at one of the first two, which are not decoding.
    cell = dict(results.by_problem(measured))[first]
    ratio = results.seconds(cell["quack"]) / results.seconds(cell["cupynorm"])
    head, _, row, *_ = forward.strip().split("\n")
    assert row.split(" | ")[head.split(" | ").index("to quack")] == f"{ratio:.2f} (1)"
    assert text.endswith(
        "Measured on fewer than the 12 problems: liger on 11.\n\n" + report.END_HEADLINE + "\n"
    )
    with pytest.raises(SystemExit):
        report.main([str(source), "--headline", str(page), "--readme", str(page)])
    assert "--headline is of a file of benchmarks.run" in capsys.readouterr().err


def test_a_run_that_was_stopped_says_so_in_one_line_below_its_tables(synthetic, tmp_path) -> None:
    source, page = tmp_path / "run.json", tmp_path / "page.md"
    results.save(synthetic | {"complete": False}, source)
    page.write_text(f"{report.BEGIN_HEADLINE}\n{report.END_HEADLINE}\n", encoding="utf-8")
    report.main([str(source), "--headline", str(page)])
    text = page.read_text(encoding="utf-8")
    assert text.endswith(f" |\n\n{report.STOPPED}\n\n{report.END_HEADLINE}\n")


def test_rows_are_in_the_order_of_the_set_whatever_was_measured_first(synthetic, tmp_path) -> None:
    def rows(records: list) -> list[str]:
        results.save(synthetic | {"measurements": records}, tmp_path / "run.json")
        report.main([str(tmp_path / "run.json")])
        text = (tmp_path / "run.md").read_text(encoding="utf-8")
        return re.findall(r"^\| (\d+x\d+) \|", text, re.MULTILINE)

    def records(rows: int, cols: int) -> list[dict]:
        first = synthetic["measurements"][0] | {"rows": rows, "cols": cols}
        return [first | {"backend": name} for name in ("cupynorm", "quack")]

    # No set has 7x256.
    shapes = [(7, 256), (32768, 2048), (32768, 512), (32768, 1024)]
    found = rows([record for shape in shapes for record in records(*shape)])
    assert found == ["32768x512", "32768x1024", "32768x2048", "7x256"]


def test_readme_section_is_made_from_the_file(tmp_path, monkeypatch) -> None:
    source, readme = tmp_path / "results" / "run.json", tmp_path / "tables.md"
    source.parent.mkdir()
    shutil.copy(SYNTHETIC, source)
    shutil.copy(TABLES, readme)
    drawn = [tmp_path / "results" / "run" / "rms_norm_forward_decoding.svg"]
    monkeypatch.setattr(plots, "draw", lambda results, folder: drawn)
    arguments = [str(source), "--readme", str(readme)]
    report.main(arguments)
    text = readme.read_text(encoding="utf-8")
    assert text.split(report.BEGIN)[0] == TABLES.read_text(encoding="utf-8").split(report.BEGIN)[0]
    assert "Synthetic GPU (no measurement)" in text
    assert "[run.json](results/run.json)" in text
    assert "(results/run/rms_norm_forward_decoding.svg)" in text
    assert "- liger, failed: rms_norm forward 1024x256 bfloat16,float32 and 3 more: " in text
    assert "- torch.nn.functional, wrong: " in text
    assert "- liger: dx written over dy" in text
    assert "| JAX | 500 + 2000 | failed |" in text
    assert "| quack | 4.0 | 4.0 | 4.0 | 4.0 |" in text
    report.main(arguments)
    assert readme.read_text(encoding="utf-8") == text


def test_relu_in_the_readme_is_made_from_the_file(tmp_path) -> None:
    source, readme = tmp_path / "relu.json", tmp_path / "README.md"
    shutil.copy(SYNTHETIC_RELU, source)
    shutil.copy(README, readme)
    arguments = ["--relu", str(source), "--readme", str(readme)]
    report.main(arguments)
    text, before = (path.read_text(encoding="utf-8") for path in (readme, README))
    assert text.split(report.BEGIN_RELU)[0] == before.split(report.BEGIN_RELU)[0]
    assert text.split(report.END_RELU)[1] == before.split(report.END_RELU)[1]
    for line in (
        "| cuDNN | 0.0.0, frontend 0.0.0 |",
        "| float32, float32 | 4096x768 | forward | 10.0 | 12.0 | 1.20 | 60.0 | 0.20 |",
        "| float32, float32 | 4096x768 | backward | 20.0 | 30.0 | 1.50 | wrong |  |",
        "| bfloat16, float32 | 32768x1024 | forward | 40.0 | 50.0 | 1.25 | failed |  |",
        "| float32, float32 | 4096x768 | y | 4.00e-08 | 0.250 | 4.50e-08 | 0.375 |",
        "| float32, float32 | 4096x768 | bitmask | 0 wrong |  | 0 wrong |  |",
        "| float32, float32 | 4096x768 | dx | 3.00e-08 | 0.250 | not finite |  |",
        "| bfloat16, float32 | 32768x1024 | y | 1.25e-03 | 0.938 |  |  |",
        "| bfloat16, float32 | 32768x1024 | bitmask | 0 wrong |  |  |  |",
        "- cuDNN, failed: layer_norm forward 32768x1024 bfloat16,float32: `RuntimeError: no plan`",
        "- cuDNN: RuntimeError: no graph",
    ):
        assert line in text.splitlines()
    assert text.count("| bitmask |") == 2
    report.main(arguments)
    assert readme.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("option", "source", "marker"),
    [
        ([], SYNTHETIC, report.BEGIN),
        (["--relu"], SYNTHETIC_RELU, report.BEGIN_RELU),
        (["--scaling"], RECORDED.with_name("sharding_jax_h200.json"), report.BEGIN_SCALING),
    ],
)
def test_a_readme_without_markers_is_left_alone(
    option, source, marker, tmp_path, monkeypatch, capsys
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("nothing")
    monkeypatch.setattr(plots, "draw", lambda *_: pytest.fail("the figures were drawn in vain"))
    for path, message in (
        (readme, f"error: {readme} must have the lines {marker!r} and "),
        (tmp_path / "none" / "README.md", f"error: there is no folder {tmp_path / 'none'}"),
    ):
        with pytest.raises(SystemExit) as stopped:
            report.main([*option, str(source), "--readme", str(path)])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
    assert readme.read_text(encoding="utf-8") == "nothing"
    assert list(tmp_path.iterdir()) == [readme]


@pytest.mark.usefixtures("without_figures")
def test_a_report_names_what_lacks_a_host_time_or_a_first_call(tmp_path) -> None:
    file = results.load(SYNTHETIC)
    facts = {
        backend.name: "missing: none" if backend.name == "liger" else "0.0.0"
        for backend in ALL
        if backend.name not in ("torch eager", "JAX")
    }
    host = [host_record("cupynorm", "rms_norm forward", 8.0, 8.0, 8.0)]
    called = {"cache": "cold", "import_seconds": 1.0, "first_seconds": 1.0}
    first = [called | {"backend": backend.name} for backend in ALL if backend.name != "quack"]
    path = tmp_path / "results.json"
    results.save(file | {"backends": facts, "host": host, "first_calls": first}, path)
    report.main([str(path)])
    host_table, first_table = (
        path.with_suffix(".md").read_text(encoding="utf-8").split("### First call")
    )
    without = "cupynorm (torch), cupynorm (JAX), quack, cuDNN, torch.compile, torch.nn.functional"
    assert f"\n\nNot measured: {without}.\n" in host_table
    assert "\n\nNot measured: quack.\n" in first_table


@pytest.mark.usefixtures("without_figures")
def test_a_reason_is_shown_without_its_traceback(tmp_path) -> None:
    file = results.load(SYNTHETIC)
    for record in file["measurements"]:
        if record["backend"] == "liger":
            record |= {"status": "failed", "reason": "E: `none` here Traceback (most) File /x"}
    path = tmp_path / "results.json"
    results.save(file, path)
    report.main([str(path)])
    assert " and 11 more: `E: none here …`\n" in path.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("mark", ["…", ""])  # as recorded now, and in older files
@pytest.mark.parametrize(("words", "left_out"), [(30, False), (40, True)])
def test_a_reason_that_was_cut_says_so(words, left_out, mark, tmp_path) -> None:
    recorded = reason(ValueError("reasons " * words))
    assert recorded.endswith(" reas…" if left_out else " reasons")
    recorded = recorded.removesuffix("…") + mark * left_out
    file = results.load(SYNTHETIC)
    for record in file["measurements"]:
        if record["backend"] == "liger":
            record |= {"status": "failed", "reason": recorded, "not_captured": recorded}
    path = tmp_path / "results.json"
    results.save(file, path)
    report.main([str(path)])
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    shown = re.findall(r"liger\b.*: `?(ValueError: .*?)`?$", text, re.MULTILINE)
    assert len(shown) == 2
    for said in shown:
        assert re.fullmatch(r"ValueError:( reasons)+" + " …" * left_out, said)


def changed(synthetic: dict, factor: float) -> dict:
    """Return the results, with cupynorm's kernels slower by a factor on one shape."""
    new = copy.deepcopy(synthetic)
    record = next(r for r in new["measurements"] if r["backend"] == "cupynorm")
    record["times"]["kernels"] = {
        key: value if key == "runs" else factor * value
        for key, value in record["times"]["kernels"].items()
    }
    return new


@pytest.mark.parametrize(("factor", "moved"), [(1.03, 0), (1.06, 1), (0.9, 1)])
def test_comparison_tells_what_moved_by_more_than_the_spread(synthetic, factor, moved) -> None:
    changes = list(compare.compare(synthetic, changed(synthetic, factor), ("cupynorm",)))
    assert len(changes) == 12
    assert sum(change.moved for change in changes) == moved
    assert changes[0].speedup == pytest.approx(1 / factor)
    assert all(change.speedup == 1 for change in changes[1:])


def slowed(record: dict, factor: float) -> None:
    for found in record["times"].values():
        found |= {key: factor * found[key] for key in ("median", "low", "high")}


def test_comparison_of_a_recorded_file_with_itself_changed_by_known_factors(
    tmp_path, capsys
) -> None:
    old = results.load(RECORDED)
    assert not any(change.moved for change in compare.compare(old, old))
    assert compare.drift(old, old)[1:] == (1, 1)
    # On one small problem, only the limits are left.
    limited = next(results.problem_of(r) for r in old["measurements"] if r["rows"] == 64)
    old["measurements"] = [
        record
        for record in old["measurements"]
        if results.problem_of(record) != limited or record["backend"].startswith("limit")
    ]
    results.save(old, tmp_path / "old.json")
    new = copy.deepcopy(old)
    cells = dict(results.by_problem(new["measurements"]))
    large = [cell for p, cell in cells.items() if p.rows == 32768 and not summary.small(cell)]
    tiny = [cell for cell in cells.values() if summary.small(cell)]
    slowed(large[0]["limit, CuPy"], 1.25)
    slowed(large[0]["cupynorm"], 1.2)  # not moved: its limit moved by more
    slowed(tiny[0]["limit, torch"], 1 / 1.2)
    slowed(tiny[0]["limit, CuPy"], 1.02)
    slowed(tiny[0]["cupynorm"], 1.15)  # not moved: one of its limits moved by more
    slowed(large[1]["cupynorm"], 1.1)  # moved: more than its own limit and its spread
    slowed(large[2]["cupynorm"], 1 / 1.2)  # moved
    slowed(tiny[1]["cupynorm"], 1.15)  # moved: by less than the limit of another small one
    limits = [r for r in new["measurements"] if r["backend"] == "limit, CuPy"]
    alone = next(r for r in limits if results.problem_of(r) == limited)
    slowed(alone, 1.19)  # though only limits were measured on it
    found = compare.drift(old, new)
    assert found[1:] == (1, 1)
    asked = [*(results.problem_of(cell["cupynorm"]) for cell in (large[0], tiny[0])), limited]
    assert [found.own[problem] for problem in asked] == pytest.approx([1.25, 1.2, 1.19])
    changes = list(compare.compare(old, new, ("cupynorm",)))
    moved = [results.problem_of(cell["cupynorm"]) for cell in (large[1], large[2], tiny[1])]
    assert {c.problem for c in changes if c.moved} == set(moved)
    results.save(new, tmp_path / "new.json")
    arguments = [str(tmp_path / "old.json"), str(tmp_path / "new.json")]
    assert compare.main(arguments) == 0
    printed = capsys.readouterr().out
    assert f"not in both files (0 of {len(changes)})" in printed
    assert f"3 of {len(changes)} moved" in printed
    assert compare.main([*arguments, "--fail-below", "0.9"]) == 1  # the small one
    assert compare.main([*arguments, "--fail-below", "0.86"]) == 0


def test_a_problem_without_its_limit_is_held_against_the_limits_of_its_size(
    tmp_path, capsys
) -> None:
    old = results.load(RECORDED)
    new = copy.deepcopy(old)
    cells = [cell for _, cell in results.by_problem(new["measurements"])]
    sizes = [[cell for cell in cells if summary.small(cell) == small] for small in (True, False)]
    for size, most in zip(sizes, (1.5, 1.2), strict=True):
        for cell, factor in zip(size[2:], np.linspace(1, most, len(size) - 2), strict=True):
            slowed(cell["limit, CuPy"], factor)
        for cell in size[:2]:
            new["measurements"].remove(cell["limit, CuPy"])
            new["measurements"].remove(cell["limit, torch"])
        bound = 1 + 0.9 * (most - 1)
        slowed(size[0]["cupynorm"], bound - 0.02)
        slowed(size[1]["cupynorm"], bound + 0.02)
    _, small, large = compare.drift(old, new)
    # Roughly, since the length of a limit's times may change which of them counts.
    assert (small, large) == pytest.approx((1.45, 1.18), abs=0.01)
    changes = list(compare.compare(old, new, ("cupynorm",)))
    beyond = {results.problem_of(size[1]["cupynorm"]) for size in sizes}
    assert {c.problem for c in changes if c.moved} == beyond
    for name, file in (("old", old), ("new", new)):
        results.save(file, tmp_path / f"{name}.json")
    assert compare.main([str(tmp_path / "old.json"), str(tmp_path / "new.json"), "--all"]) == 0
    printed = capsys.readouterr().out
    assert f"(4 of {len(changes)}), the 0.9 quantile" in printed
    assert f"{small:.3f} under 10 us, {large:.3f} from there on." in printed
    rules = re.findall(r" (\d\.\d{3}) ([lq])(?:  not moved)?$", printed, re.MULTILINE)
    assert len(rules) == len(changes)
    held = sorted(bound for bound, rule in rules if rule == "q")
    assert held == [f"{large:.3f}"] * 2 + [f"{small:.3f}"] * 2


def test_comparison_tells_what_else_differs(tmp_path, synthetic, capsys) -> None:
    new = copy.deepcopy(synthetic)
    new["machine"]["driver"] = "999.9"
    new["commit"] = "0123456789abcdef and changes"
    new["backends"]["cupynorm"] = "9.9"
    ours = [r for r in new["measurements"] if r["backend"] == "cupynorm"]
    for record in ours[-2:]:
        new["measurements"].remove(record)
    for record in ours[:-2]:
        record["status"] = "failed"
    results.save(new, tmp_path / "new.json")
    arguments = [str(SYNTHETIC), str(tmp_path / "new.json")]
    assert compare.main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    name = summary.label(results.problem_of(ours[-2]))
    for line in (
        "new: 0123456789ab and changes on Synthetic GPU (no measurement), driver 999.9",
        f"driver differs: {synthetic['machine']['driver']}, 999.9",
        f"cupynorm differs: {synthetic['backends']['cupynorm']}, 9.9",
        f"only in old: cupynorm: {ours[-2]['norm']} {ours[-2]['direction']} {name} and 1 more",
        "10 of 10 moved; none has a time in both files.",
    ):
        assert line in printed
    assert not any("method" in line for line in printed)
    with pytest.raises(SystemExit) as stopped:
        compare.main([*arguments, "--backends", "cupynorm (JAX)"])
    assert stopped.value.code == 2
    expected = f"{' and '.join(arguments)} must have problems of cupynorm (JAX) in common"
    assert expected in capsys.readouterr().err


def test_comparison_has_columns_for_any_name(tmp_path, capsys) -> None:
    old = results.load(RECORDED)
    records = [r for r in old["measurements"] if r["backend"] == "cupynorm"][:2]
    records += [r | {"backend": "cupynorm (as on sm_80)"} for r in records]
    results.save(old | {"measurements": records}, tmp_path / "a.json")
    names = ["--all", "--backends", "cupynorm", "cupynorm (as on sm_80)"]
    assert compare.main([str(tmp_path / "a.json")] * 2 + names) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith(("GB/s", "cupynorm")) and "moved" not in line]
    rows += [line.removesuffix("  not moved") for line in lines if line.endswith("  not moved")]
    assert len(rows) == 5
    assert len({len(row) for row in rows}) == 1


def test_comparison_prints_and_fails_on_a_slowdown(tmp_path, synthetic, capsys) -> None:
    new = changed(synthetic, 1.1)
    results.save(new, tmp_path / "new.json")
    arguments = [str(SYNTHETIC), str(tmp_path / "new.json")]
    assert compare.main(arguments) == 0
    assert compare.main([*arguments, "--fail-below", "0.97"]) == 1
    assert compare.main([*arguments[::-1], "--fail-below", "0.97"]) == 0
    printed = capsys.readouterr().out
    assert "cupynorm: rms_norm forward 1024x256 bfloat16,float32" in printed
    assert "1 of 12 moved" in printed


def test_comparison_tells_that_a_result_became_wrong(synthetic, tmp_path, capsys) -> None:
    new = copy.deepcopy(synthetic)
    record = next(r for r in new["measurements"] if r["backend"] == "cupynorm")
    record |= {"status": "wrong"}
    change = next(compare.compare(synthetic, new, ("cupynorm",)))
    assert (change.old, change.new, change.moved) == ("ok", "wrong", True)
    results.save(new, tmp_path / "new.json")
    arguments = [str(SYNTHETIC), str(tmp_path / "new.json")]
    assert compare.main([*arguments, "--fail-below", "0.9"]) == 1
    assert compare.main([*arguments[::-1], "--fail-below", "0.9"]) == 0  # it became right
    assert capsys.readouterr().out.count("1 of 12 moved") == 2
