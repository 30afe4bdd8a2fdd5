#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""deploy/kubernetes: objects are valid, fit each other, and name what a real kv-indexer knows.

The schemas are those of the package kubernetes-validate. Where it isn't installed, CI=true puts it into a virtual
environment of the build folder. A ServiceMonitor is no object of the API itself: its shape is checked here.
"""
import copy
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from kvtest import *

try:
    import yaml
except ImportError:
    skip_all("python3-yaml is needed")

ROOT = SOURCE / "deploy" / "kubernetes"
PACKAGE = "kubernetes-validate==1.37.0"
VERSIONS = ("1.29.0", "1.33.1", "1.37.0")


# -- kustomize, as far as these files use it -------------------------------------------------------
KNOWN = {"apiVersion", "kind", "namespace", "labels", "resources", "configMapGenerator", "images", "patches"}


def apply(patch, each):
    """Operations of a JSON patch on an object. They replace what is there, and nothing else."""
    for step in yaml.safe_load(patch):
        equal(set(step), {"op", "path", "value"}, f"a step of a patch: {step}")
        equal(step["op"], "replace")
        *way, last = step["path"].strip("/").split("/")
        place = functools.reduce(lambda value, key: value[key], way, each)
        check(last in place, f"{step['path']}: nothing to replace")
        place[last] = step["value"]


def build(folder, used):
    """The objects of a kustomization. @used gets every file that it reads."""
    used.add(folder / "kustomization.yaml")
    spec = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    equal(set(spec) - KNOWN, set(), f"{folder.name}: fields that this test doesn't know")
    objects = []
    for name in spec["resources"]:
        path = (folder / name).resolve()
        check(path.exists(), f"{folder.name}: there is no {name}")
        if path.is_dir():
            objects += build(path, used)
        else:
            used.add(path)
            objects += [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each]
    for config in spec.get("configMapGenerator", []):
        for name in config["files"]:
            check((folder / name).is_file(), f"{folder.name}: there is no {name}")
            used.add(folder / name)
        before = [each for each in objects if (each["kind"], each["metadata"]["name"]) == ("ConfigMap", config["name"])]
        equal(len(before), int(config.get("behavior") == "replace"), f"{folder.name}: ConfigMaps {config['name']} of its resources")
        objects = [each for each in objects if each not in before]
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": config["name"]},
                        "data": {name: (folder / name).read_text(encoding="utf-8") for name in config["files"]}})
    for patch in spec.get("patches", []):
        (one,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (patch["target"]["kind"], patch["target"]["name"])]
        apply(patch["patch"], one)
    for each in objects:
        if spec.get("namespace") and each["kind"] != "Namespace":
            each["metadata"]["namespace"] = spec["namespace"]
        for label in spec.get("labels", []):
            each["metadata"].setdefault("labels", {}).update(label["pairs"])
    return objects


@functools.lru_cache
def everything():
    """The objects of the example. Callers change none of them."""
    return build(ROOT / "example", set())


@functools.lru_cache
def discovering():
    """The objects of the base that finds engines by itself. Callers change none of them."""
    return build(ROOT / "discovery", set())


def of_kind(kind, objects=None):
    return {each["metadata"]["name"]: each for each in objects or everything() if each["kind"] == kind}


def container(name):
    return of_kind("StatefulSet")[name]["spec"]["template"]["spec"]["containers"][0]


def pod_labels():
    return [each["spec"]["template"]["metadata"]["labels"] for each in of_kind("StatefulSet").values()]


def config():
    """The lines of kv-indexer.conf as pairs."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "indexer" / "kv-indexer.conf").read_text(encoding="utf-8").splitlines()]
    return [tuple(word.strip() for word in line.split("=", 1)) for line in lines if line]


# -- files and objects -----------------------------------------------------------------------------
def test_every_file_is_used():
    used = set()
    objects = build(ROOT / "example", used)
    build(ROOT / "discovery", used)
    equal({path for path in ROOT.rglob("*") if path.is_file() and path.parent != ROOT}, used, "files of the bases")
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    equal(len(names), len(set(names)), f"objects with a name of their own: {names}")
    for kind in ("StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy", "ServiceMonitor", "ConfigMap", "Namespace", "ServiceAccount"):
        check(of_kind(kind, objects), f"there is no {kind}")
    (namespace,) = of_kind("Namespace", objects)
    equal({each["metadata"].get("namespace") for each in objects if each["kind"] != "Namespace"}, {namespace}, "namespaces")


def test_kubectl_builds_the_same():
    kubectl = shutil.which("kubectl")
    if not kubectl:
        skip("kubectl (Debian: kubernetes-client) is not installed")
    plain = lambda each: (each["kind"], re.sub("-[a-z0-9]{10}$", "", each["metadata"]["name"]))
    for name, ours in (("example", everything()), ("discovery", discovering())):
        done = subprocess.run([kubectl, "kustomize", str(ROOT / name)], capture_output=True, text=True, check=False)
        check(done.returncode == 0, done.stderr)
        built = [each for each in yaml.safe_load_all(done.stdout) if each]
        equal(sorted(map(plain, built)), sorted((each["kind"], each["metadata"]["name"]) for each in ours), f"objects of kubectl kustomize {name}")


def validator():
    """A Python that has kubernetes-validate."""
    for python in (sys.executable, BUILD / "kubernetes-validate" / "bin" / "python"):
        if pathlib.Path(python).exists() and subprocess.run([python, "-c", "import kubernetes_validate"], capture_output=True, check=False).returncode == 0:
            return str(python)
    if not os.environ.get("CI"):
        skip(f"{PACKAGE} is not installed; with CI=true the test installs it into the build folder")
    place = BUILD / "kubernetes-validate"
    for command in ([sys.executable, "-m", "venv", place],
                    [place / "bin" / "python", "-m", "pip", "-q", "--disable-pip-version-check", "install", PACKAGE]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            shutil.rmtree(place, ignore_errors=True)
            skip(f"{PACKAGE} can't be installed: {' '.join(done.stderr.split())[-300:]}")
    return str(place / "bin" / "python")


CHECK = """
import json, sys, kubernetes_validate
objects, versions = json.load(sys.stdin)
for version in versions:
    for each in objects:
        try:
            kubernetes_validate.validate(each, version, strict=True)
        except Exception as problem:
            print(version, each.get("kind"), type(problem).__name__, str(problem)[:500].replace(chr(10), " "))
"""


def problems(objects):
    done = subprocess.run([validator(), "-c", CHECK], input=json.dumps([objects, VERSIONS]), capture_output=True, text=True, check=False)
    check(done.returncode == 0, done.stderr[-2000:])
    return done.stdout.splitlines()


def test_schemas():
    objects = [each for each in [*everything(), *discovering()] if each["kind"] != "ServiceMonitor"]
    equal(problems(objects), [], "what the API's schemas refuse")
    broken = copy.deepcopy([each for each in objects if each["kind"] == "StatefulSet"][0])
    broken["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    equal(len(problems([broken])), len(VERSIONS), "a misspelt field that is refused")


def test_service_monitor():
    (monitor,) = of_kind("ServiceMonitor").values()
    equal(monitor["apiVersion"], "monitoring.coreos.com/v1")
    spec = monitor["spec"]
    equal(set(spec) - {"jobLabel", "selector", "endpoints"}, set(), "fields of the specification")
    chosen = [each for each in of_kind("Service").values() if spec["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()]
    equal([each["metadata"]["name"] for each in chosen], ["kv-indexer"], "services that are scraped: each pod once")
    equal(chosen[0]["metadata"]["labels"][spec["jobLabel"]], "kv-indexer", "the job of the rules")
    check('job="kv-indexer"' in (SOURCE / "deploy" / "prometheus" / "kv-indexer.rules.yml").read_text(encoding="utf-8"), "the rules name another job")
    (endpoint,) = spec["endpoints"]
    equal(set(endpoint) - {"port", "path", "interval", "scrapeTimeout", "authorization"}, set(), "fields of the endpoint")
    check(endpoint["port"] in [port["name"] for port in chosen[0]["spec"]["ports"]], "the port is none of the service's")
    seconds = lambda text: int(re.fullmatch(r"(\d+)s", text).group(1))
    check(seconds(endpoint["scrapeTimeout"]) <= seconds(endpoint["interval"]), "the timeout is above the interval")
    equal(endpoint["authorization"]["type"], "Bearer")


# -- references between objects --------------------------------------------------------------------
def test_selectors_and_names():
    objects = everything()
    selectors = [each["spec"]["selector"] for each in of_kind("Service", objects).values()]
    selectors += [each["spec"]["selector"]["matchLabels"] for kind in ("StatefulSet", "PodDisruptionBudget") for each in of_kind(kind, objects).values()]
    for policy in of_kind("NetworkPolicy", objects).values():
        selectors.append(policy["spec"]["podSelector"]["matchLabels"])
        rules = [peer for way, end in (("ingress", "from"), ("egress", "to")) for rule in policy["spec"].get(way, []) for peer in rule[end]]
        selectors += [peer["podSelector"]["matchLabels"] for peer in rules if "podSelector" in peer
                      and "kvasir.io/kv-indexer-client" not in peer["podSelector"]["matchLabels"]]
    for selector in selectors:
        check(any(selector.items() <= labels.items() for labels in pod_labels()), f"no pod has the labels {selector}")
    for each in of_kind("StatefulSet", objects).values():
        service = of_kind("Service", objects)[each["spec"]["serviceName"]]
        equal(service["spec"]["clusterIP"], "None", "a headless service")
        check(service["spec"]["publishNotReadyAddresses"], "names of pods that aren't ready")
    equal(container("kv-indexer")["image"].split(":")[0], yaml.safe_load((ROOT / "example" / "kustomization.yaml").read_text())["images"][0]["name"])
    volumes = {each["name"]: each for each in of_kind("StatefulSet", objects)["kv-indexer"]["spec"]["template"]["spec"]["volumes"]}
    equal({mount["name"] for mount in container("kv-indexer")["volumeMounts"]}, set(volumes), "volumes")
    check(volumes["config"]["configMap"]["name"] in of_kind("ConfigMap", objects), "the ConfigMap")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    check(f"create secret generic {volumes['tokens']['secret']['secretName']}" in readme, "the README makes the secret")
    keys = set(re.findall(r"--from-literal=(\w+)=", readme))
    monitor = of_kind("ServiceMonitor", objects)["kv-indexer"]["spec"]["endpoints"][0]["authorization"]["credentials"]
    for key in [item["key"] for item in volumes["tokens"]["secret"]["items"]] + [monitor["key"]]:
        check(key in keys, f"the README's secret has no {key}")
    equal(monitor["name"], volumes["tokens"]["secret"]["secretName"])


def test_ports():
    for name in ("kv-indexer", "vllm"):
        ports = {port["name"]: port["containerPort"] for port in container(name)["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            check(container(name)[probe]["httpGet"]["port"] in ports, f"{name}: {probe}")
        for service in of_kind("Service").values():
            if service["spec"]["selector"]["app.kubernetes.io/name"] == name:
                for port in service["spec"]["ports"]:
                    equal(ports.get(port["targetPort"]), port["port"], f"{service['metadata']['name']}: {port}")
        for rule in of_kind("NetworkPolicy")[name]["spec"]["ingress"]:
            check(all(port["port"] in ports for port in rule["ports"]), f"{name}: {rule}")
    engine = {port["name"]: port["containerPort"] for port in container("vllm")["ports"]}
    events = json.loads(container("vllm")["args"][-1])
    equal((events["endpoint"], events["replay_endpoint"]), (f"tcp://*:{engine['events']}", f"tcp://*:{engine['replays']}"), "the engine's endpoints")
    check(events["enable_kv_cache_events"] and events["publisher"] == "zmq", events)
    outward = [port["port"] for rule in of_kind("NetworkPolicy")["kv-indexer"]["spec"]["egress"] for port in rule["ports"]]
    equal(sorted(set(outward)), sorted([engine["events"], engine["replays"], 53, 8090]), "ports that kv-indexer reaches")


def test_workers_are_pods():
    values = dict(config())
    engine = of_kind("StatefulSet")["vllm"]
    pods = [f"vllm-{i}" for i in range(engine["spec"]["replicas"])]
    host = engine["spec"]["serviceName"]
    equal([value for name, value in config() if name == "workers"],
          [f"{pod}=tcp://{pod}.{host}:5557+tcp://{pod}.{host}:5558" for pod in pods], "a line of workers for each pod")
    args = container("vllm")["args"]
    check(f"--block-size={values['block-size']}" in args and f"--model={values['model-name']}" in args, args)
    indexer = of_kind("StatefulSet")["kv-indexer"]
    (peers,) = [arg for arg in container("kv-indexer")["args"] if arg.startswith("--peers=")]
    equal(peers[8:].split(","), [f"http://kv-indexer-{i}.{indexer['spec']['serviceName']}:8090" for i in range(indexer["spec"]["replicas"])], "peers")


def test_discovery():
    """The role is the account's, the token is there, the selector and the ports are the engines', and no list is left."""
    objects = discovering()
    (binding,), (role,) = of_kind("RoleBinding", objects).values(), of_kind("Role", objects).values()
    equal((binding["roleRef"]["kind"], binding["roleRef"]["name"]), ("Role", role["metadata"]["name"]))
    equal([(each["kind"], each["name"]) for each in binding["subjects"]], [("ServiceAccount", "kv-indexer")])
    equal(role["rules"], [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}], "rights")
    pod = of_kind("StatefulSet", objects)["kv-indexer"]["spec"]["template"]["spec"]
    check(pod["automountServiceAccountToken"] and of_kind("ServiceAccount", objects)["kv-indexer"]["automountServiceAccountToken"], "the token")
    equal(pod["serviceAccountName"], "kv-indexer")
    text = of_kind("ConfigMap", objects)["kv-indexer"]["data"]["kv-indexer.conf"]
    (found,) = re.findall(r"^discover = kubernetes:/(\S+)=(\S+)\?port=(\S+)&replay-port=(\S+)$", text, re.M)
    check("workers" not in re.findall(r"^([\w-]+) =", text, re.M), text)
    equal(of_kind("StatefulSet")["vllm"]["spec"]["template"]["metadata"]["labels"].get(found[0]), found[1], "the engines' label")
    check({found[2], found[3]} <= {port["name"] for port in container("vllm")["ports"]}, f"ports of the engines: {found[2:]}")
    kept = [line for line in text.splitlines() if "=" in line and not line.startswith(("#", "discover"))]
    both = (ROOT / "indexer" / "kv-indexer.conf").read_text(encoding="utf-8").splitlines()
    check(set(kept) <= set(both), f"options that differ from the base's: {set(kept) - set(both)}")
    with tempfile.TemporaryDirectory() as place:
        path = pathlib.Path(place) / "kv-indexer.conf"
        path.write_text(text, encoding="utf-8")
        server = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(free_port())}
        with Indexer("--config", path, "--insecure", env=server) as indexer:
            wait_until(lambda: "kubernetes:" in indexer.get("/discovery").body.decode(), 30, "the source in /discovery")


# -- hardening -------------------------------------------------------------------------------------
def test_pods_keep_the_restricted_level():
    """The Pod Security level `restricted`, and for kv-indexer what its systemd unit has beside it."""
    for name, each in of_kind("StatefulSet").items():
        pod = each["spec"]["template"]["spec"]
        check(not {"hostNetwork", "hostPID", "hostIPC"} & set(pod), f"{name}: namespaces of the host")
        check(pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0, f"{name} runs as root")
        equal(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault", f"{name}: seccomp")
        check({key for volume in pod["volumes"] for key in volume} <= {"name", "configMap", "secret", "emptyDir"}, f"{name}: kinds of volumes")
        check(pod["terminationGracePeriodSeconds"] >= 30 and not pod["automountServiceAccountToken"] and not pod["enableServiceLinks"], name)
        for one in pod["containers"]:
            context = one["securityContext"]
            check(context["allowPrivilegeEscalation"] is False and context["capabilities"] == {"drop": ["ALL"]}, f"{name}: {context}")
            check(one["resources"]["requests"] and one["resources"]["limits"]["memory"], f"{name}: resources")
            check("preStop" in one["lifecycle"], f"{name}: leaves its service late")
    check(container("kv-indexer")["securityContext"]["readOnlyRootFilesystem"], "kv-indexer writes to its image")
    user = re.search(r"^USER (\d+)", (SOURCE / "deploy" / "container" / "Containerfile").read_text(), re.M).group(1)
    equal(of_kind("StatefulSet")["kv-indexer"]["spec"]["template"]["spec"]["securityContext"]["runAsUser"], int(user), "the image's user")
    equal(of_kind("Namespace")["kvasir"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"], "restricted")


# -- what a real kv-indexer says -------------------------------------------------------------------
def test_options_exist():
    done = subprocess.run([BUILD / "bin" / "kv-indexer", "--help-options"], capture_output=True, text=True, check=True)
    options = {line.rstrip("=") for line in done.stdout.split()}
    for arg in container("kv-indexer")["args"]:
        check(arg.split("=")[0] in options, f"kv-indexer has no {arg}")
    for name, _ in config():
        check("--" + name in options, f"kv-indexer.conf: no option {name}")
    for name in re.findall(r"^- \*\*.*?add `(?:host = ::|([a-z-]+))`", (ROOT / "README.md").read_text(encoding="utf-8"), re.M):
        check(not name or "--" + name in options, f"README.md: no option {name}")


def test_a_real_kv_indexer_takes_the_configuration():
    limit = container("kv-indexer")["resources"]["limits"]["memory"]
    check(int(limit[:-2]) << 30 > (1 << 30) + 20000000 * 24, f"{limit} holds a peer's state")
    with Indexer("--config", ROOT / "indexer" / "kv-indexer.conf", "--insecure", "--replay-timeout", "1s") as indexer:
        equal({worker["instance_id"] for worker in indexer.workers()}, {"vllm-0", "vllm-1"}, "workers")
        equal({(worker["model_name"], worker["block_size"]) for worker in indexer.workers()}, {("Qwen/Qwen3-8B", 16)})
        endpoints = {line.split()[1] for line in indexer.get("/").json()["endpoints"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            check(container("kv-indexer")[probe]["httpGet"]["path"] in endpoints, probe)
        check(of_kind("ServiceMonitor")["kv-indexer"]["spec"]["endpoints"][0]["path"] in endpoints, "the path of the metrics")


def test_replicas_that_name_themselves():
    """Both have the same list of peers, themselves in it, as in the StatefulSet: a worker of one is soon the other's."""
    ports = [free_port(), free_port()]
    peers = ",".join(f"http://127.0.0.1:{port}" for port in ports)
    with tempfile.NamedTemporaryFile("w") as tokens:
        tokens.write("replica\nrouter\nscrape\n")
        tokens.flush()
        args = ("--auth-token-file", tokens.name, "--peers", peers, "--peer-interval", "200ms")
        auth = {name: {"Authorization": f"Bearer {name}"} for name in ("replica", "router", "scrape")}
        with Indexer(*args, port=ports[0], headers=auth["router"]) as one, Indexer(*args, port=ports[1], headers=auth["router"]) as two, \
                Publisher() as engine:
            one.register("vllm-0", engine)
            engine.store([1], tokens=range(16))
            two.wait_score(range(16), "vllm-0", 16)
            equal(two.get("/metrics", headers=auth["scrape"]).status, 200)
            two.unregister("vllm-0")
            wait_until(lambda: not one.workers() and not two.workers(), what="the end of the registration")
            with Indexer(*args, port=free_port(), headers=auth["router"]) as third:
                equal(third.workers(), [])


if __name__ == "__main__":
    run(globals())
