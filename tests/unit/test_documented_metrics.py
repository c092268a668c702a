"""The metrics that are documented, drawn and alerted on are those that there are."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.documented import ROOT, page
from tests.support.metrics import ALL_METRICS, CLUSTER_METRICS, SERVER_METRICS, named_in

OPERATIONS = ROOT / "docs" / "operations"
DASHBOARD = OPERATIONS / "grafana-dashboard.json"
ALERTS = OPERATIONS / "alerts.yml"
CASES = ROOT / "tests" / "fixtures" / "alerts" / "cases.yml"


def test_the_list_of_metrics_is_that_of_the_code() -> None:
    listed = [
        name
        for table in page("docs/metrics.md").tables()
        for row in table
        if "metric" in row
        for name in re.findall(r"`([^`]+)`", row["metric"])
    ]
    assert sorted(listed) == sorted(ALL_METRICS)


def test_some_of_each_kind_are_found_in_the_code() -> None:
    """Else the comparison above would be one of nothing with nothing."""
    assert {
        "tallybook_rows_total",
        "tallybook_call_seconds",
        "tallybook_disk_free_bytes",
        "tallybook_lake_lag_seconds",
    } <= SERVER_METRICS
    assert "tallybook_cluster_uncommitted_age_seconds" in CLUSTER_METRICS


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    board = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) > 20
    for expression in expressions:
        named = named_in(expression)
        assert named, expression
        assert named <= ALL_METRICS
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_alerts_ask_for_metrics_that_there_are_and_are_explained() -> None:
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    explained = {
        name
        for row in page("docs/operating.md").table("alert")
        for name in re.findall(r"`([^`]+)`", row["alert"])
    }
    assert explained == {rule["alert"] for rule in group["rules"]}
    for rule in group["rules"]:
        named = named_in(rule["expr"])
        assert named, rule
        assert named <= ALL_METRICS
        assert rule["annotations"]["summary"]
    asked = named_in(ALERTS.read_text())
    assert {
        "tallybook_disk_free_bytes",
        "tallybook_cluster_buckets_without_leader",
        "tallybook_cluster_lock_expires_seconds",
        "tallybook_cluster_uncommitted_age_seconds",
        "tallybook_cluster_snapshot_age_seconds",
        "tallybook_cluster_lake_lag_seconds",
    } <= asked


@pytest.mark.parametrize(
    "arguments", [("check", "rules", ALERTS), ("test", "rules", CASES)], ids=["reads", "tries"]
)
def test_prometheus_itself_takes_the_rules(arguments: tuple[str | Path, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool here (Debian's package prometheus has it)")
    done = subprocess.run(
        [promtool, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    [cases] = yaml.safe_load(CASES.read_text())["tests"]
    fire = {case["alertname"] for case in cases["alert_rule_test"] if "exp_alerts" in case}
    assert fire == {rule["alert"] for rule in group["rules"]}
