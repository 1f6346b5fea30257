"""`moectl parity`: compares an engine's parameters with those that moectl's layouts give."""

from typing import Annotated, Any

import typer

from ..errors import ExitCode, UsageError
from ..problem.layouts import ACTS
from .options import Offline, framed, option, pick
from .output import Output, count

EXAMPLES = (
    "moectl parity ./marlin ./layer-3.safetensors",
    "moectl parity ./gpt-oss-20b ./layer-3.safetensors --to marlin --layer 3",
    "moectl parity ./gpt-oss-20b ./marlin-tp4 --to marlin",
)
MORE = ["moectl.dump_parameters(module, PATH) writes what an engine holds: docs/refit.md."]


@framed("parity")
def parity(
    a: Annotated[str, typer.Argument(metavar="A", help="Converted directory, CKPT, or dump.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The same; what is compared with A.")],
    *,
    to: Annotated[str | None, option("--to", help="Layout in which a CKPT is compared.")] = None,
    arch: Annotated[str | None, option("--arch", help="Same as for convert.")] = None,
    act: Annotated[str | None, option("--act", help=f"As of convert: {', '.join(ACTS)}.")] = None,
    tp_size: Annotated[int | None, option("--tp-size", own=True, help="Same as for convert.", min=1)] = None,
    ep_size: Annotated[int | None, option("--ep-size", own=True, help="Same as for convert.", min=1)] = None,
    rank: Annotated[int | None, option("--rank", own=True, help="This rank alone.", min=0)] = None,
    layer: Annotated[int | None, option("--layer", help="This layer alone.", min=0)] = None,
    offline: Offline = False,
    out: Output,
) -> ExitCode:
    """Compare parameters byte by byte: an engine's with a layout's.

    Names are matched by layer and role (w13_weight_packed is w13). Exit status 1 if any expert's
    parameter differs or has no counterpart. Of several ranks, which a directory says or --tp-size and
    --ep-size, all are compared, one after the other.
    """
    from ..parity.compare_parameters import compared
    from ..parity.parameter_sets import ParameterSource, ranks_compared
    from .convert.planner import target_named

    layout = None if to is None else target_named(to)
    form = None if act is None else pick(act, ACTS, "activation format")
    sides = [ParameterSource(ref, layout, arch, form, offline) for ref in (a, b)]
    numbers = [set(side.layers) for side in sides if side.layers is not None]
    if layer is not None and any(layer not in known for known in numbers):
        raise UsageError(f"there is no layer {layer} to compare", hint="leave --layer out for all layers")
    wanted = sorted(set.union(*numbers)) if numbers else [None]
    wanted = wanted if layer is None or not numbers else [layer]
    shards = ranks_compared(sides, tp_size, ep_size, rank)
    by_rank = []
    for shard in shards:
        parameters = []
        for side in sides:
            together: dict[str, Any] = {}
            for number in wanted if side.layers is not None else [None]:
                if side.layers is None or number in side.layers:
                    together.update(side.parameters(number, shard))
            parameters.append(together if layer is None else _of_layer(together, layer))
        by_rank += [(shard.rank, pair) for pair in compared(*parameters)]
    pairs = [pair for _, pair in by_rank]
    wrong = [p for p in pairs if p.status == "differs" or (p.status != "equal" and p.expert)]
    compared_any = any(p.status in ("equal", "differs") for p in pairs)
    ok = compared_any and not wrong

    def draw(console: Any) -> None:
        for number, pair in by_rank:
            name = pair.a or pair.b
            also = f" = {pair.b}" if pair.a and pair.b and pair.a != pair.b else ""
            what = f": {'; '.join(pair.differences)}" if pair.differences else ""
            of = f"rank {number}: " if len(shards) > 1 else ""
            console.print(f"{pair.status:8} {of}{name}{also}{what}")
        equal = sum(p.status == "equal" for p in pairs)
        text = f"{count(equal, 'parameter')} equal" if compared_any else "nothing to compare: no names match"
        console.print(f"{text}, {len(wrong)} not" if wrong else text)

    rows = [
        {
            "rank": number,
            "a": p.a,
            "b": p.b,
            "status": p.status,
            "expert": p.expert,
            "differences": list(p.differences),
            "first": None if p.first is None else list(p.first),
            "count": p.count,
            "sha256": list(p.sha256),
        }
        for number, p in by_rank
    ]
    document = {"a": a, "b": b, "ok": ok, "parameters": rows}
    out.result(document, draw, "equal" if ok else [p.a or p.b for p in wrong])
    return ExitCode.DONE if ok else ExitCode.FOUND


def _of_layer(parameters: dict[str, Any], layer: int) -> dict[str, Any]:
    from ..parity.compare_parameters import role_of

    kept = {}
    for name, record in parameters.items():
        role = role_of(name)
        if role is None or role[0] in (None, layer):
            kept[name] = record
    return kept
