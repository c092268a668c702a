"""Which metrics there are, by the code that has them; and what a page, or a query, names."""

import ast
import re
from pathlib import Path

from server.page.cluster_metrics import cluster_metrics
from server.tablet.metrics import PREFIX

ROOT = Path(__file__).parents[2]
_SUFFIX = {"count": "_total", "timed": "_seconds", "observe": "_seconds", "gauge": ""}
_OF_HISTOGRAMS = re.compile(r"_seconds_(?:bucket|sum|count)$")


def _in_code() -> set[str]:
    """Return the metrics that servers and jobs of tiering count, by the calls that do so."""
    found = set()
    for package in ("server/tablet", "sink"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call) or not node.args:
                    continue
                called = ast.unparse(node.func)
                kind = called.rpartition(".")[2]
                name = node.args[0]
                if kind in _SUFFIX and isinstance(name, ast.Constant) and _is_metrics(called):
                    found.add(f"{PREFIX}{ast.literal_eval(name)}{_SUFFIX[kind]}")
    return found


def _is_metrics(called: str) -> bool:
    return called == "gauge" or ".metrics." in f".{called}" or "._metrics." in f".{called}"


def _of_cluster() -> set[str]:
    """Return the metrics of a cluster that has one of everything."""
    lock = {
        "owner": "o", "batch": 1, "uncommitted_changes": 0, "uncommitted_s": 0.0, "expires_in_s": 1
    }  # fmt: skip
    table = {
        "name": "t",
        "buckets": [{"server": None}],
        "rows": 0,
        "bytes": 0,
        "leases": [],
        "locks": [lock],
        "snapshots": {"buckets": 0, "oldest_s": 1.0},
        "copies": [{"location": "l", "lag_s": 0.0, "lag_batches": 0}],
    }
    seen = {"servers": [{"address": "a", "problems": {}}], "tables": [table], "error": None}
    return {name.partition("{")[0] for name in cluster_metrics(seen).values()}


SERVER_METRICS = frozenset(_in_code())
CLUSTER_METRICS = frozenset(_of_cluster())
ALL_METRICS = SERVER_METRICS | CLUSTER_METRICS


def named_in(text: str) -> set[str]:
    """Return the metrics that a text names; series of a histogram as the histogram."""
    return {
        name if name in ALL_METRICS else _OF_HISTOGRAMS.sub("_seconds", name)
        for name in re.findall(rf"\b{PREFIX}\w+", text)
    }
