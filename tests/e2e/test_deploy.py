#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""deploy/: every metric that the alerts and the dashboard name exists; promtool and systemd accept the files."""
import json
import os
import re
import shutil
import subprocess
import tempfile

from advisortest import Advisor, Volumes
from kvtest import *

DEPLOY = SOURCE / "deploy"
RULES = DEPLOY / "prometheus" / "kv-indexer.rules.yml"
DASHBOARD = DEPLOY / "grafana" / "kv-indexer.json"
ADVISOR_RULES = DEPLOY / "prometheus" / "kv-advisor.rules.yml"
ADVISOR_DASHBOARD = DEPLOY / "grafana" / "kv-advisor.json"
UNITS = {name: DEPLOY / "systemd" / f"{name}.service" for name in ("kv-indexer", "kv-selector", "kv-advisor")}
NAME = re.compile(r"\b(?:kv_indexer|kv_advisor|dynamo_kvindexer|process)_[a-z0-9_]+")


def exported():
    """Names and label values of a kv-indexer that has followed an engine and answered a hit and a miss."""
    with Indexer() as indexer, Publisher() as engine:
        indexer.register(1, engine, block_size=4)
        engine.store([101, 102], tokens=range(8), block_size=4)
        indexer.wait_score(range(8), 1, 8)
        indexer.query(range(100, 108))
        equal(indexer.post("/query", {"model_name": MODEL}).status, 422, "a query without tokens") # makes an error count
        text = indexer.get("/metrics").body.decode()
    # A histogram's samples have suffixes; a counter that has not counted yet has its HELP line.
    names = set(NAME.findall(text))
    return names, text


def test_every_metric_exists():
    names, text = exported()
    for path in (RULES, DASHBOARD):
        for name in sorted(set(NAME.findall(path.read_text()))):
            check(name in names, f"{path.name}: there is no metric {name}")
    for value in ('result="hit"', 'result="miss"', 'endpoint="/query"', 'status="failed"'):
        check(value in text, f"no sample has {value}")


def test_every_metric_of_the_advisor_exists():
    with Volumes() as volumes, Advisor(volumes) as advisor:
        text = advisor.get("/metrics").body.decode()
    names = set(re.findall(r"^(\w+)[ {]", text, re.MULTILINE))
    for path in (ADVISOR_RULES, ADVISOR_DASHBOARD):
        named = set(NAME.findall(path.read_text()))
        equal(sorted(named - names), [], f"{path.name}: metrics that don't exist")
    check('member="fast"' in text, "no sample has a member")
    page = (SOURCE / "docs" / "kv-advisor.md").read_text()
    for alert in re.findall(r"alert: (\w+)", ADVISOR_RULES.read_text()):
        check(f"| {alert} |" in page, f"the page doesn't say what to do about {alert}")


def test_dashboards_are_whole():
    for path in (DASHBOARD, ADVISOR_DASHBOARD):
        board = json.loads(path.read_text())
        ids = [panel["id"] for panel in board["panels"]]
        equal(len(ids), len(set(ids)), "panels with an id of their own")
        for panel in board["panels"]:
            check(panel["title"] and panel["targets"], f"{path.name}: panel {panel['id']} shows nothing")


def promtool(folder):
    """The installed promtool, or in CI Debian's, unpacked into @folder: installing its package would start a server."""
    found = shutil.which("promtool")
    if found:
        return found
    if not os.environ.get("CI"):
        skip("promtool (Debian: prometheus) is not installed; with CI=true the test downloads it")
    if not shutil.which("apt-get"):
        skip("promtool is not installed, and there is no apt-get to download it with")
    done = subprocess.run(["apt-get", "download", "-qq", "prometheus"], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        skip(f"promtool can't be downloaded: {' '.join(done.stderr.split())[-300:]}")
    subprocess.run("dpkg -x prometheus_*.deb .", shell=True, cwd=folder, capture_output=True, check=True)
    return f"{folder}/usr/bin/promtool"


def test_promtool_accepts_the_rules():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777) # apt downloads as a user of its own
        check_rules(promtool(folder))


def check_rules(tool):
    done = subprocess.run([tool, "check", "rules", str(RULES), str(ADVISOR_RULES)], capture_output=True, text=True, check=False)
    check(done.returncode == 0, done.stdout + done.stderr)


QUIET = f"""
rule_files: [{RULES}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'kv_indexer_queries_total{{instance="well",result="miss"}}', values: '0+100x60'}}
      - {{series: 'kv_indexer_queries_total{{instance="well",result="hit"}}', values: '0+5x60'}}
      - {{series: 'kv_indexer_queries_total{{instance="ill",result="miss"}}', values: '0+100x60'}}
      - {{series: 'kv_indexer_queries_total{{instance="ill",result="hit"}}', values: '7+0x60'}}
    promql_expr_test:
      - expr: count by (instance) (ALERTS{{alertname="KvIndexerNothingMatches"}})
        eval_time: 60m
        exp_samples: [{{labels: '{{instance="ill"}}', value: 1}}]
"""


def test_nothing_matches_is_said_only_where_nothing_does():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        tool = promtool(folder)
        with open(f"{folder}/test.yml", "w", encoding="utf-8") as out:
            out.write(QUIET)
        done = subprocess.run([tool, "test", "rules", f"{folder}/test.yml"], capture_output=True, text=True, check=False)
        check(done.returncode == 0, done.stdout + done.stderr)


def judge_unit(tool, name):
    with tempfile.TemporaryDirectory() as folder:
        unit = f"{folder}/{name}.service"
        with open(unit, "w", encoding="utf-8") as out:
            out.write(UNITS[name].read_text().replace(f"/usr/bin/{name}", str(BUILD / "bin" / name)))
        done = subprocess.run([tool, "security", "--offline=true", "--threshold=20", unit], capture_output=True, text=True, check=False)
    if "Unknown option" in done.stderr or "unrecognized option" in done.stderr:
        skip("this systemd-analyze can't judge a file")
    check(done.returncode == 0, f"{name}: exposure over 2.0:\n{done.stdout[-2000:]}{done.stderr}")


def test_systemd_accepts_the_units():
    tool = shutil.which("systemd-analyze")
    if not tool:
        skip("systemd-analyze is not installed")
    for name in UNITS:
        judge_unit(tool, name)


def test_container_file_names_what_exists():
    """The programs it starts are installed by the package, and its build command is a target of ours."""
    text = (DEPLOY / "container" / "Containerfile").read_text()
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.M).group(1))[0]
    equal(entry, "/usr/bin/kv-indexer")
    check("usr/bin" in (DEPLOY / "debian" / "kvasir.install").read_text().split(), "the package installs no programs")
    targets = re.search(r"^\.PHONY:(.*)$", (SOURCE / "Makefile").read_text(), re.M).group(1).split()
    for target in re.findall(r"^RUN \./dev (\S+)$", text, re.M):
        check(target in targets, f"there is no ./dev {target}")


if __name__ == "__main__":
    run(globals())
