"""The classes of experts in a transformers release, by model type, read from its source."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

INTERFACE = "use_experts_implementation"


def _model_types(folder: Path) -> set[str]:
    """Values of `model_type` in a model's config classes."""
    found = set()
    for path in folder.glob("configuration_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            value = getattr(node, "value", None)
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found |= {value.value for t in targets if isinstance(t, ast.Name) and t.id == "model_type"}
    return found


def _classes(folder: Path) -> list[tuple[str, dict[str, Any] | None]]:
    """Classes of routed experts, with what the interface is told of each; None for one without it."""
    found: list[tuple[str, dict[str, Any] | None]] = []
    for path in sorted(folder.glob("modeling_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef):
                continue
            told: dict[str, Any] | None = None
            for decorator in node.decorator_list:
                name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
                if name == INTERFACE:
                    stated = decorator.keywords if isinstance(decorator, ast.Call) else []
                    told = {
                        keyword.arg: keyword.value.value
                        for keyword in stated
                        if keyword.arg and isinstance(keyword.value, ast.Constant)
                    }
            if told is not None or (node.name.endswith("Experts") and "Shared" not in node.name):
                found.append((node.name, told))
    return sorted(found, key=lambda row: row[1] is None)


def experts_classes(package: Path) -> dict[str, Any]:
    """`experts`: by model type, the class of its experts, and what differs from usual ones; `others`: the
    model types without experts.

    `interface` false: the class has one forward for all implementations; `normed`: a norm follows each
    expert.
    """
    found: dict[str, dict[str, Any]] = {}
    others: set[str] = set()
    for folder in sorted((package / "models").iterdir()):
        classes = _classes(folder) if folder.is_dir() else []
        if not classes:
            others |= _model_types(folder) if folder.is_dir() else set()
            continue
        name, told = classes[0]
        row: dict[str, Any] = {"experts": name}
        if told is None:
            row["interface"] = False
        elif told.get("has_post_expert_norm"):
            row["normed"] = True
        found |= dict.fromkeys(sorted(_model_types(folder)), row)
    return {"experts": dict(sorted(found.items())), "others": sorted(others - set(found))}
