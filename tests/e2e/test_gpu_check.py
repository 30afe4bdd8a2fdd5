# SPDX-License-Identifier: Apache-2.0
"""tools/gpu-check.sh and the programs it runs, where there is no GPU: an emulated runtime, driver and libkvx_cuda take
their places. A machine with a GPU is lent for minutes; that is no time to find a typing error."""
import json
import os
import pathlib
import subprocess
import tempfile

from kvtest import *

CHECK = SOURCE / "tools" / "gpu-check.sh"
STEPS = ["configure", "build", "device_matrix", "graphs", "streams", "storages", "transfer_events", "transfer_capture",
         "transfer_matrix", "tiers"]


def check_gpu(folder, **settings):
    environment = dict(os.environ, KVX_GPU_BUILD=str(BUILD / "gpu-dry"), KVX_GPU_ONLY=" ".join(STEPS), KV_TEST_SCALE="2",
                       KVBM_GPU_MIB="8")
    environment.update(settings)
    environment.pop("KV_BUILD_DIR", None)
    return subprocess.run([CHECK, folder], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=540)


def test_dry_run():
    if SANITIZED:
        skip("it makes a build of its own, without sanitizers: release has run it")
    with tempfile.TemporaryDirectory() as folder:
        done = check_gpu(folder, KVX_GPU_DRY="1")
        check(done.returncode == 0, done.stdout)
        results = list(pathlib.Path(folder).iterdir())
        check(len(results) == 1 and results[0].name.startswith("kvx-gpu-dry-"), results)
        report = json.loads(results[0].read_text())
        ended = {step["step"]: step["verdict"] for step in report["steps"]}
        check([ended.get(step) for step in STEPS] == ["ok"] * len(STEPS), ended)
        figures = {(f["figure"], f.get("direction"), f.get("by")) for f in report["tiers"]}
        for figure in ("block", "layers", "outers", "heads"):
            check({(figure, "in", "auto"), (figure, "out", "auto")} <= figures, figures)
        check({("both", "out and in", "auto"), ("layers", "out", "engines"), ("layers", "out", "single")} <= figures,
              figures)
        check(all(f.get("correct", True) for f in report["tiers"]), report["tiers"])
        check(report["tiers"][0]["batches"] == "13.0", report["tiers"][0])


def test_failures_are_kept():
    """A step that fails is named, its output is in the log beside the result, and the exit code says so."""
    if SANITIZED:
        skip("it makes a build of its own, without sanitizers: release has run it")
    with tempfile.TemporaryDirectory() as folder:
        done = check_gpu(folder, KVX_GPU_DRY="1", KVX_GPU_ONLY="tiers streams", KVBM_GPU_MIB="99999999")
        check(done.returncode == 1, done.stdout)
        results = {path.suffix: path for path in pathlib.Path(folder).iterdir()}
        ended = {step["step"]: step["verdict"] for step in json.loads(results[".json"].read_text())["steps"]}
        check(ended["tiers"] == "failed (exit 2)" and ended["streams"] == "ok", ended)
        check("more than a TiB" in results[".log"].read_text(), "not in the log")


if __name__ == "__main__":
    run(globals())
