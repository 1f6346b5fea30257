"""Text and JSON of `moectl run`, both from the same plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...errors import ExitCode, MoectlError
from ...problem.schemes import scheme_words
from ..output import count, duration, gib, table
from ..text_blocks import print_segments
from ..text_layout import Segment, wrap

if TYPE_CHECKING:
    from ...run import BackendOutcome, LayerRun
    from ...run.result_difference import ResultDifference
    from ...run.stress import CaseResult

Data = dict[str, Any]

COLUMNS = (
    "backend",
    "check",
    "cosine",
    "rel L2",
    "max",
    "worst tokens",
    "prepare",
    "weights",
    "peak",
    "median",
)
OPTIONAL = ("worst tokens", "peak", "prepare", "max", "cosine")
"""Columns that a narrow terminal leaves out, the first of them first."""

PAIRS = ("A", "B", "cosine", "rel L2", "max", "worst tokens")


def layer_data(done: LayerRun, unused: Mapping[str, str] | None = None) -> Data:
    """One layer's run as plain data, without tensors; `unused`: backends that do not support it."""
    if done.layer is None or done.workload is None or done.compared is None:
        return {"layer": done.number, "ok": False, "error": _error_data(done.error), "backends": []}
    problem, compared = done.layer.problem, done.compared
    return {
        "layer": done.number,
        "ok": done.ok,
        "error": None,
        "problem": asdict(problem),
        "scheme": str(problem.scheme),
        "partial": done.layer.partial,
        "computed": _computed(problem.shared_experts),
        "dtype": problem.dtype,
        "model_dtype": done.model_dtype or problem.dtype,
        "tokens": done.workload.tokens,
        "routed_by": done.workload.routed_by,
        "tried": [{"backend": tried.backend, "error": _error_data(tried.error)} for tried in compared.tried],
        "backends": [_outcome_data(outcome) for outcome in compared.outcomes],
        "pairs": [
            {"backends": [pair.one, pair.other], **_difference(pair.difference)} for pair in compared.pairs
        ],
        "left_out": dict(unused or {}),
    }


def _computed(shared: int) -> str:
    return "the routed experts" + (f", without {count(shared, 'shared expert')}" if shared else "")


def _error_data(error: MoectlError | None) -> Data | None:
    if error is None:
        return None
    return {
        "what": error.what,
        "reason": error.reason,
        "hint": error.hint,
        "exit_code": int(error.exit_code),
    }


def _outcome_data(outcome: BackendOutcome) -> Data:
    data: Data = {"backend": outcome.backend, "ok": outcome.ok, "error": _error_data(outcome.error)}
    if outcome.refused:
        data["refused"] = True
    result = outcome.result
    if result is not None:
        data |= {
            "layout": result.layout,
            "relaid": result.relaid,
            "check": asdict(result.check),
            **_difference(result.difference),
            "prepare_seconds": result.prepare_seconds,
            "first_seconds": result.first_seconds,
            "median_us": result.median_us,
            "fastest_us": result.fastest_us,
            "weight_bytes": result.weight_bytes,
            "peak_bytes": result.peak_bytes,
            "beyond_static_scales": result.beyond or None,
        }
    return data | ({"stress": [_case_data(case) for case in outcome.stress]} if outcome.stress else {})


def _difference(difference: ResultDifference) -> Data:
    worst = [asdict(token) for token in difference.worst]
    return {
        "cosine": difference.cosine,
        "rel_l2": difference.l2,
        "max_abs": difference.max,
        "worst_tokens": worst,
    }


def _case_data(case: CaseResult) -> Data:
    checked = case.check and {"max": case.check.max, "rms": case.check.rms, "token": case.check.worst_token}
    return {
        "case": case.case,
        "about": case.about,
        "tokens": case.tokens,
        "ok": case.ok,
        "note": case.note,
        "check": checked,
    }


def document(head: Data, layers: Sequence[Data], *, several: bool, compares: bool) -> Data:
    """The whole result: one layer's fields, merged with those of a single backend, or lists of either."""
    if not several:
        (only,) = layers
        if compares:
            return {**head, **only}
        rest = {name: value for name, value in only.items() if name not in ("backends", "pairs", "left_out")}
        return {**head, **rest, **only["backends"][0]}
    return {
        **head,
        "ok": all(layer["ok"] for layer in layers),
        "worst": worst(layers),
        "layers": list(layers),
    }


def worst(layers: Sequence[Data]) -> Data | None:
    """Layer, backend and RMS error of the result furthest from the reference; None without results."""
    errors = [
        {"layer": layer["layer"], "backend": backend["backend"], "rms": backend["check"]["rms"]}
        for layer in layers
        for backend in layer["backends"]
        if "check" in backend
    ]
    # A result that is not finite is worse than any number.
    return max(errors, key=lambda error: (error["rms"] != error["rms"], error["rms"]), default=None)


def exit_code(layers: Sequence[Data]) -> ExitCode:
    """The exit code of a layer that could not run at all; else DONE if every check passed, or FOUND."""
    for layer in layers:
        if layer["error"] is not None:
            return ExitCode(layer["error"]["exit_code"])
    return ExitCode.DONE if all(layer["ok"] for layer in layers) else ExitCode.FOUND


def brief(layers: Sequence[Data], *, several: bool, compares: bool) -> list[str]:
    """A line per layer and backend."""
    lines = []
    for layer in layers:
        start = f"{layer['layer']}\t" if several else ""
        if layer["error"] is not None:
            lines.append(f"{start}error\t{layer['error']['what']}")
        for backend in layer["backends"]:
            rms = f"{backend['check']['rms']:.3g}" if "check" in backend else "-"
            word = "ok" if backend["ok"] else "refused" if backend.get("refused") else "failed"
            verdict = f"{word} {rms}"
            lines.append(f"{start}{backend['backend']}\t{verdict}" if several or compares else verdict)
    return lines


def draw(head: Data, layers: Sequence[Data], console: Any, *, several: bool, compares: bool) -> None:
    """Print the result on a rich console."""
    if several:
        _draw_layers(head, layers, console)
    elif compares:
        _draw_compared(head, layers[0], console)
    else:
        _draw_one(head, layers[0], console)


def _print_rows(console: Any, rows: Mapping[str, str], tone: str = "") -> None:
    """Prints labels and values, wrapped on a terminal; `tone` is that of all."""
    width = max(9, *map(len, rows))
    for label, value in rows.items():
        for line in wrap(value, console.width, f"{label:<{width}} ") if value else ():
            print_segments([(line, tone)], console)


def _print_check(console: Any, words: str, passed: bool) -> None:
    _print_rows(console, {"check": words}, "good" if passed else "wrong")


def _facts(head: Data, layer: Data) -> dict[str, str]:
    """Labelled lines on what was run."""
    other = f"{layer['dtype']} activations, the model's are {layer['model_dtype']}"
    return {
        "layer": f"{layer['layer']} of {head['checkpoint']}, {scheme_words(layer['scheme'])}: "
        f"{layer['computed']}",
        "dtype": other if layer["dtype"] != layer["model_dtype"] else "",
        "tokens": f"{layer['tokens']}, routed by {layer['routed_by']}, top-{layer['problem']['top_k']}",
        "partial": layer["partial"],
        **{f"{backend['backend']} was tried": backend["error"]["what"] for backend in layer["tried"]},
    }


def _draw_one(head: Data, layer: Data, console: Any) -> None:
    (backend,) = layer["backends"]
    checked, has_tokens = backend["check"], layer["tokens"] > 0
    limit = checked["tolerance"]
    repacked = f" (repacked: {backend['relaid']})" if backend["relaid"] else ""
    rows = {
        **_facts(head, layer),
        "backend": f"{backend['backend']}, weights in layout {backend['layout']}{repacked}",
        "error": f"max {checked['max']:.3g} (at most {limit['max']:g}), "
        f"RMS {checked['rms']:.3g} ({limit['rms']:g}), cosine {_cosine(backend['cosine'])}",
        "worst": "token " + ", ".join(_token(token) for token in backend["worst_tokens"])
        if has_tokens
        else "",
        "prepare": duration(backend["prepare_seconds"]),
        "first": first_words(backend["first_seconds"], head["platform"]),
        "warm": warm_words(backend) if has_tokens else "",
        "memory": f"{gib(backend['weight_bytes'])} of weights, peak {gib(backend['peak_bytes'])}",
    }
    _print_rows(console, rows)
    _draw_stress(layer, console)
    _draw_trouble(layer, console)
    _print_check(console, "passed" if layer["ok"] else "FAILED", layer["ok"])


def first_words(seconds: float, platform: str) -> str:
    """The time of the first call; on a CPU, nothing is loaded or compiled for it."""
    return duration(seconds) + ("" if platform == "cpu" else " (loading or compiling its kernels included)")


def warm_words(backend: Data) -> str:
    """The median and the shortest warm time, with a remark if the machine was too busy to tell."""
    median, fastest = backend["median_us"] * 1e-6, backend["fastest_us"] * 1e-6
    noisy = "; noisy: slower than the first call" if median > backend["first_seconds"] else ""
    return f"{duration(median)} (median; fastest {duration(fastest)}{noisy})"


def _draw_compared(head: Data, layer: Data, console: Any) -> None:
    _print_rows(console, _facts(head, layer))
    results = table(*COLUMNS, right=COLUMNS[2:5], optional=OPTIONAL)
    for backend in layer["backends"]:
        results.add_row(*_cells(backend))
    console.print(results)
    if layer["pairs"]:
        pairs = table(*PAIRS, right=PAIRS[2:5], optional=OPTIONAL[:1])
        for pair in layer["pairs"]:
            pairs.add_row(*pair["backends"], *_numbers(pair))
        console.print(pairs)
    for why in dict.fromkeys(layer["left_out"].values()):
        names = ", ".join(name for name, reason in layer["left_out"].items() if reason == why)
        _print_rows(console, {"skipped": f"{names}: {why}"}, "dim")
    _draw_stress(layer, console)
    _draw_trouble(layer, console)
    _print_check(console, "passed" if layer["ok"] else "FAILED", layer["ok"])


def _draw_layers(head: Data, layers: Sequence[Data], console: Any) -> None:
    ran = [layer for layer in layers if layer["backends"]]
    computed = "; ".join(dict.fromkeys(layer["computed"] for layer in ran))
    changed = sorted(
        {(layer["dtype"], layer["model_dtype"]) for layer in ran if layer["dtype"] != layer["model_dtype"]}
    )
    facts = {
        "layers": f"{len(layers)} of {head['checkpoint']}{f': {computed}' if computed else ''}",
        "dtype": "; ".join(f"{used} activations, the model's are {model}" for used, model in changed),
        "partial": next((layer["partial"] for layer in ran), ""),
    }
    _print_rows(console, facts)
    stressed = any("stress" in backend for layer in layers for backend in layer["backends"])
    results = table(
        "layer",
        *COLUMNS,
        *(("stress",) if stressed else ()),
        right=("layer", *COLUMNS[2:5]),
        optional=OPTIONAL,
    )
    for layer in layers:
        for backend in layer["backends"]:
            results.add_row(str(layer["layer"]), *_cells(backend), *((_passed(backend),) if stressed else ()))
        if layer["error"] is not None:
            results.add_row(str(layer["layer"]), "-", ("ERROR", "wrong"), *[""] * (len(COLUMNS) - 2))
    console.print(results)
    for layer in layers:
        _draw_trouble(layer, console, f"layer {layer['layer']}: ")
    furthest, wrong = worst(layers), sum(not layer["ok"] for layer in layers)
    worst_line = furthest and f"layer {furthest['layer']} on {furthest['backend']}, RMS {furthest['rms']:.3g}"
    failed = f"{wrong} of {count(len(layers), 'layer')} FAILED"
    _print_rows(console, {"worst": worst_line or ""})
    _print_check(console, failed if wrong else "passed", not wrong)


def _cells(backend: Data) -> list[str | Segment]:
    """One backend's cells, in the order of `COLUMNS`."""
    if "check" not in backend:
        word = ("refused", "dim") if backend.get("refused") else ("ERROR", "wrong")
        return [backend["backend"], word, *["-"] * (len(COLUMNS) - 2)]
    verdict = (
        f"ok {backend['check']['rms']:.1e}"
        if backend["check"]["ok"]
        else f"FAILED {backend['check']['rms']:.1e}"
    )
    times = (duration(backend["prepare_seconds"]), gib(backend["weight_bytes"]), gib(backend["peak_bytes"]))
    median = duration(backend["median_us"] * 1e-6) if backend["median_us"] else "-"
    check = ("ERROR" if backend["error"] else verdict, "good" if backend["ok"] else "wrong")
    return [backend["backend"], check, *_numbers(backend), *times, median]


def _passed(backend: Data) -> str:
    """How many of the stress cases that apply were passed: ``19/19``."""
    verdicts = [case["ok"] for case in backend.get("stress", ()) if case["ok"] is not None]
    return f"{sum(verdicts)}/{len(verdicts)}"


def _numbers(difference: Data) -> list[str]:
    tokens = ", ".join(_token(token) for token in difference["worst_tokens"])
    numbers = (f"{difference['rel_l2']:.2e}", f"{difference['max_abs']:.2e}")
    return [_cosine(difference["cosine"]), *numbers, tokens]


def _cosine(value: float) -> str:
    return f"{value:.6f}"


def _token(token: Data) -> str:
    return f"{token['token']} ({token['l2']:.1e})"


def _draw_stress(layer: Data, console: Any) -> None:
    """A table with a row per case and a column per backend."""
    stressed = [backend for backend in layer["backends"] if backend.get("stress")]
    if not stressed:
        return
    about = {case["case"]: case["about"] for backend in stressed for case in backend["stress"]}
    cases = table("stress", "what", *(backend["backend"] for backend in stressed))
    for name, what in about.items():
        verdicts = [
            next((_verdict(c) for c in backend["stress"] if c["case"] == name), ("", ""))
            for backend in stressed
        ]
        cases.add_row(name, what, *verdicts)
    console.print(cases)
    notes = [
        f"{case['case']}, {backend['backend']}: {case['note']}"
        for backend in stressed
        for case in backend["stress"]
        if case["note"] and case["ok"] is not False
    ]
    for note in notes:
        _print_rows(console, {"note": note}, "dim")


def _verdict(case: Data) -> Segment:
    if case["ok"] is None:
        return "n/a", "dim"
    if not case["ok"]:
        return "FAILED", "wrong"
    return f"ok {case['check']['rms']:.1e}" if case["check"] else "ok", ""


def _beyond(backend: Data) -> str:
    """What static scales cannot hold, and what to run instead."""
    return (
        f"{backend['backend']}: the checkpoint's static activation scales do not fit these inputs: "
        f"{backend['beyond_static_scales']}. Give activations of the model itself with --input FILE, or run "
        "a backend with 16-bit activations, such as --backend torch."
    )


def _draw_trouble(layer: Data, console: Any, start: str = "") -> None:
    """Errors, inputs that static scales cannot hold, and failed stress cases, each with its reason."""
    troubles = [layer["error"]["what"]] if layer["error"] is not None else []
    for backend in layer["backends"]:
        troubles += [backend["error"]["what"]] if backend["error"] is not None else []
        troubles += [_beyond(backend)] if backend.get("beyond_static_scales") else []
        troubles += [
            f"{backend['backend']} failed {case['case']!r}: {case['note']}"
            for case in backend.get("stress", ())
            if case["ok"] is False
        ]
    for trouble in troubles:
        for line in wrap(f"{start}{trouble}", console.width, rest="  "):
            print_segments([(line, "wrong")], console)
