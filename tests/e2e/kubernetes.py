# SPDX-License-Identifier: Apache-2.0
"""An API server of Kubernetes, as far as lists and watches of pods go, written from the public API's behaviour: no apiserver can be
installed from a distribution.

GET /api/v1/pods and /api/v1/namespaces/NS/pods with labelSelector, limit, continue, watch, resourceVersion, timeoutSeconds and
allowWatchBookmarks, over TLS, for bearers of its token. Every change has a resourceVersion of its own; a watch tells those behind its
own, in order, as one JSON object a line: ADDED, MODIFIED, DELETED (also of pods that don't match any more), BOOKMARK and ERROR.
Versions up to the last compaction are forgotten: 410, as a status or as an ERROR event. Connections can be dropped, hang or be refused.
"""
import copy
import http.server
import json
import os
import re
import socket
import ssl
import threading
import time
import urllib.parse

from kvtest import make_certificate


def matches(selector, labels):
    """Whether labels fulfil a selector: a=b, a==b, a!=b, a, !a, a in (x,y), a notin (x,y)."""
    for term in re.findall(r"[^,(]+(?:\([^)]*\))?", selector):
        term = term.strip()
        found = re.fullmatch(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)", term)
        if found:
            good = (labels.get(found[1]) in [v.strip() for v in found[3].split(",")]) == (found[2] == "in")
        elif "!=" in term:
            name, value = term.split("!=")
            good = labels.get(name) != value
        elif "=" in term:
            name, value = re.split("==?", term)
            good = labels.get(name) == value
        else:
            good = (term.lstrip("!") in labels) != term.startswith("!")
        if not good:
            return False
    return True


def pod(name, ip="127.0.0.1", labels=None, annotations=None, ports=None, ready=True, phase="Running", namespace="default", uid=None):
    """A v1.Pod as the API shows it, with the fields around those that matter."""
    return {"metadata": {"name": name, "namespace": namespace, "uid": uid or f"uid-{name}-{time.monotonic_ns()}",
                         "creationTimestamp": "2026-01-01T00:00:00Z", "labels": {"app": "vllm"} if labels is None else labels,
                         "annotations": {"kubernetes.io/config.source": "api", **(annotations or {})},
                         "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {"f:conditions": {}}}}]},
            "spec": {"volumes": [{"name": "v", "emptyDir": {}}], "nodeName": "node-1",
                     "containers": [{"name": "engine", "image": "vllm", "resources": {},
                                     "ports": [{"name": n, "containerPort": p, "protocol": "TCP"} for n, p in (ports or {}).items()]}]},
            "status": {"phase": phase, "podIP": ip, "podIPs": [{"ip": ip}], "hostIP": "10.0.0.1", "qosClass": "Burstable",
                       "conditions": [{"type": "PodScheduled", "status": "True", "lastProbeTime": None},
                                      {"type": "Ready", "status": "True" if ready else "False", "lastProbeTime": None}],
                       "containerStatuses": [{"name": "engine", "ready": ready, "restartCount": 0, "state": {"running": {}}}]}}


class ApiServer:
    """A `with` starts and stops it. @folder gets the service account: token, ca.crt, namespace."""

    def __init__(self, folder, token="token-1", namespace="default", port=0):
        self.folder, self.port = folder, port
        self.cert, self.key = make_certificate(folder)
        self.lock = threading.Condition()
        self.pods, self.version, self.history, self.compacted = {}, 100, [], 0
        self.tokens, self.requests, self.gone_as_event = {token}, [], True
        self.down = self.hang = False
        self.open = set()
        for name, text in (("token", token), ("ca.crt", open(self.cert, encoding="ascii").read()), ("namespace", namespace)):
            self.write(name, text)

    def write(self, name, text):
        with open(os.path.join(self.folder, name + ".new"), "w", encoding="ascii") as file:
            file.write(text + "\n")
        os.rename(os.path.join(self.folder, name + ".new"), os.path.join(self.folder, name))

    # -- what happens in the cluster ---------------------------------------------------------------
    def _note(self, kind, before, after):
        self.version += 1
        subject = copy.deepcopy(after or before)
        subject["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, kind, before, subject))
        self.lock.notify_all()
        return subject

    def put(self, one):
        """Create or replace a pod."""
        with self.lock:
            key = one["metadata"]["namespace"], one["metadata"]["name"]
            before = self.pods.get(key)
            self.pods[key] = self._note("MODIFIED" if before else "ADDED", before, one)

    def delete(self, name, namespace="default"):
        with self.lock:
            before = self.pods.pop((namespace, name))
            self._note("DELETED", before, None)

    def bookmark(self):
        """Send every watch the version now, as the API server does about once a minute."""
        with self.lock:
            self.history.append((self.version, "BOOKMARK", None, {"kind": "Pod", "apiVersion": "v1", "metadata": {
                "resourceVersion": str(self.version), "creationTimestamp": None}, "spec": {"containers": None}, "status": {}}))
            self.lock.notify_all()

    def compact(self):
        """Forget the versions so far; watches from before are refused."""
        with self.lock:
            self.version += 1
            self.compacted, self.history = self.version, []

    def error(self, code=500, message="internal error"):
        """An ERROR event to all watches."""
        with self.lock:
            self.history.append((self.version, "ERROR", None, self.status(code, message)))
            self.lock.notify_all()

    def drop(self):
        """Reset all connections in the middle of what they are doing."""
        with self.lock:
            for connection in self.open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
            self.lock.notify_all()

    def set_down(self, down):
        """Refuse connections, or stop that."""
        self.down = down
        if down:
            self.drop()

    def watches(self):
        with self.lock:
            return sum(1 for path in self.requests if "watch=1" in path)

    # -- what clients see --------------------------------------------------------------------------
    @staticmethod
    def status(code, message):
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "code": code,
                "reason": {410: "Expired", 401: "Unauthorized", 403: "Forbidden"}.get(code, "InternalError")}

    def serve(self, handler):
        parts = urllib.parse.urlsplit(handler.path)
        query = {k: v[-1] for k, v in urllib.parse.parse_qs(parts.query, keep_blank_values=True).items()}
        with self.lock:
            self.requests.append(handler.path)
        if handler.headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens:
            return self.answer(handler, 401, self.status(401, "Unauthorized"))
        found = re.fullmatch(r"/api/v1(?:/namespaces/([a-z0-9-]+))?/pods", parts.path)
        if not found:
            return self.answer(handler, 404, self.status(404, "the server could not find the requested resource"))
        if found[1] == "forbidden":
            return self.answer(handler, 403, self.status(403, 'pods is forbidden: User "system:serviceaccount:default:x" cannot list'))
        wanted = lambda one: one and found[1] in (None, one["metadata"]["namespace"]) and matches(
            query.get("labelSelector", ""), one["metadata"]["labels"])
        return self.watch(handler, query, wanted) if query.get("watch") in ("1", "true") else self.list(handler, query, wanted)

    @staticmethod
    def answer(handler, code, document):
        body = json.dumps(document).encode()
        handler.send_response(code)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def list(self, handler, query, wanted):
        with self.lock:
            version, start = self.version, ("", "")
            if query.get("continue"):
                version, *start = json.loads(query["continue"])
                if version < self.compacted:
                    return self.answer(handler, 410, self.status(410, "The provided continue parameter is too old"))
            rows = sorted((key, one) for key, one in self.pods.items() if wanted(one) and key > tuple(start))
        limit = int(query.get("limit") or 0) or len(rows)
        metadata = {"resourceVersion": str(version)}
        if len(rows) > limit:
            metadata |= {"continue": json.dumps([version, *rows[limit - 1][0]]), "remainingItemCount": len(rows) - limit}
        return self.answer(handler, 200, {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": [one for _, one in rows[:limit]]})

    @staticmethod
    def event_of(entry, wanted, bookmarks):
        """The event of an entry for a watch, or None: what doesn't match any more is deleted, what begins to is added."""
        _, kind, before, after = entry
        if kind == "ERROR" or kind == "BOOKMARK":
            return {"type": kind, "object": after} if kind == "ERROR" or bookmarks else None
        was, is_now = wanted(before), kind != "DELETED" and wanted(after)
        if not was and not is_now:
            return None
        return {"type": "MODIFIED" if was and is_now else "ADDED" if is_now else "DELETED", "object": after}

    def watch(self, handler, query, wanted):
        at, end = int(query.get("resourceVersion") or 0), time.monotonic() + int(query.get("timeoutSeconds") or 1800)
        gone = self.status(410, f"too old resource version: {at} ({self.compacted})")
        if at < self.compacted and not self.gone_as_event:
            return self.answer(handler, 410, gone)
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        send = lambda data: handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        line = lambda event: json.dumps(event).encode() + b"\n"
        if at < self.compacted:
            send(line({"type": "ERROR", "object": gone}))
            return send(b"")
        with self.lock:
            # Entries up to the watch's version aren't told again; a bookmark or an error is for those who are there.
            seen = next((i for i, entry in enumerate(self.history) if entry[0] > at), len(self.history))
            base = self.compacted
        while time.monotonic() < end:
            with self.lock:
                if self.compacted != base:
                    return send(b"")  # the cache was made anew: watches end
                news, seen = self.history[seen:], len(self.history)
                if not news:
                    self.lock.wait(min(0.5, max(0, end - time.monotonic())))
            for entry in news:
                event = self.event_of(entry, wanted, query.get("allowWatchBookmarks") in ("1", "true"))
                if event:
                    data = line(event)  # in two pieces: a line is no chunk
                    send(data[:len(data) // 2])
                    send(data[len(data) // 2:])
                if entry[1] == "ERROR":
                    return send(b"")
            if handler.server.stopping or self.down:
                handler.close_connection = True  # in the middle of the body
                return None
        return send(b"")

    # -- life --------------------------------------------------------------------------------------
    def __enter__(self):
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                with api.lock:
                    api.open.add(self.connection)

            def finish(self):
                with api.lock:
                    api.open.discard(self.connection)
                try:
                    super().finish()
                except OSError:
                    pass

            def do_GET(self):  # noqa: N802
                while api.hang and not self.server.stopping:
                    time.sleep(0.05)
                try:
                    api.serve(self)
                except OSError:
                    self.close_connection = True

            def log_message(self, *_):
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads, stopping = True, False

            def finish_request(self, request, client_address):
                if api.down:
                    return
                try:
                    request = context.wrap_socket(request, server_side=True)
                except (OSError, ssl.SSLError):
                    return
                super().finish_request(request, client_address)

            def handle_error(self, *_):
                pass

        self.server = Server(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_address[1]
        self.url = f"https://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.stopping = True
        self.set_down(True)
        self.server.shutdown()
        self.server.server_close()
