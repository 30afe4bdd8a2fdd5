# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven by its DevTools protocol over a websocket: open a page, act, read what is shown."""
import base64
import json
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
import urllib.request

from kvtest import check, free_port, patience, skip, wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome")
KEYS = {"Tab": 9, "Enter": 13, " ": 32, "Escape": 27}


def find_chromium():
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    return found or skip("chromium isn't installed: tools/setup.sh test installs it")


class Websocket:
    """A client's side of RFC 6455, as far as DevTools needs it: text messages, whole or in fragments."""

    def __init__(self, url):
        host, path = url.removeprefix("ws://").split("/", 1)
        name, port = host.rsplit(":", 1)
        self.sock = socket.create_connection((name, int(port)), timeout=patience(60))
        key = base64.b64encode(os.urandom(16)).decode()
        self.sock.sendall(f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                          f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self.read(1)
        check(b" 101 " in head.split(b"\r\n")[0], f"no websocket: {head!r}")

    def read(self, n):
        data = b""
        while len(data) < n:
            piece = self.sock.recv(n - len(data))
            check(piece, "chromium hung up")
            data += piece
        return data

    def send(self, text):
        data, mask = text.encode(), os.urandom(4)
        size = struct.pack(">B", 0x80 | len(data)) if len(data) < 126 else struct.pack(">BH", 0xfe, len(data)) \
            if len(data) < 65536 else struct.pack(">BQ", 0xff, len(data))
        self.sock.sendall(b"\x81" + size + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(data)))

    def receive(self):
        text = b""
        while True:
            first, size = self.read(2)
            n = size & 0x7f
            if n > 125:
                n = struct.unpack(">H" if n == 126 else ">Q", self.read(2 if n == 126 else 8))[0]
            piece = self.read(n)
            if first & 0xf == 9:  # a ping; DevTools asks for no answer
                continue
            check(first & 0xf in (0, 1), f"a frame of kind {first & 0xf}")
            text += piece
            if first & 0x80:
                return text.decode()


class Browser:
    """One Chromium with one tab at a time. @lines: what its console said, and requests that left this machine's loopback."""

    def __init__(self, width=1280, height=900):
        program = find_chromium()
        self.folder = tempfile.TemporaryDirectory(prefix="kv-browser-", ignore_cleanup_errors=True)
        port = free_port()
        self.process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
             "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions", "--no-proxy-server",
             f"--remote-debugging-port={port}", f"--user-data-dir={self.folder.name}", f"--window-size={width},{height}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        self.base = f"http://127.0.0.1:{port}"
        self.number, self.lines, self.requests, self.ws = 0, [], [], None
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        self.resize(width, height)

    def _start(self):
        wait_until(self._tabs, 60, "chromium's first tab", interval=0.1)
        self.ws = Websocket(self._tabs()[0]["webSocketDebuggerUrl"])
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.command(f"{domain}.enable")

    def _tabs(self):
        try:
            with urllib.request.urlopen(self.base + "/json/list", timeout=5) as answer:
                return [tab for tab in json.load(answer) if tab["type"] == "page"]
        except OSError:
            return []

    def command(self, method, **params):
        self.number += 1
        self.ws.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = json.loads(self.ws.receive())
            if message.get("id") == self.number:
                check("error" not in message, f"{method}: {message.get('error')}")
                return message["result"]
            self._note(message)

    def _note(self, message):
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.lines.append("exception: " + json.dumps(params["exceptionDetails"])[:600])
        elif message.get("method") == "Log.entryAdded":
            self.lines.append(f"{params['entry']['source']}: {params['entry']['text']} {params['entry'].get('url', '')}")
        elif message.get("method") == "Runtime.consoleAPICalled":
            self.lines.append("console: " + json.dumps(params["args"])[:600])
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    # -- acting ------------------------------------------------------------------------------------
    def open(self, url):
        self.command("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def resize(self, width, height, scale=1):
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False)

    def scheme(self, name):
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def run(self, script):
        """The value of a JavaScript expression; promises are awaited."""
        result = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        check("exceptionDetails" not in result, f"{script[:200]}: {result.get('exceptionDetails')}")
        return result["result"].get("value")

    def wait(self, script, timeout=60):
        """Until the JavaScript expression is true; the error tells what the page shows."""
        try:
            wait_until(lambda: self.run(f"!!({script})"), timeout, script, interval=0.05)
        except AssertionError as problem:
            raise AssertionError(f"{problem}\n-- console: {self.lines}\n-- page: {self.text('body')[:3000]}") from None

    def text(self, selector):
        """What is shown of the first element that fits, as a reader sees it; None: there is none."""
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? null")

    def click(self, selector):
        """Click in the middle of an element with the mouse, so that something that covers it matters."""
        where = self.run(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
                         "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()")
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, x=where[0], y=where[1], button="left", clickCount=1)

    def type(self, selector, text):
        """Put the focus there, replace what is in it, as by hand."""
        self.run(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.focus(); e.select?.(); }})()")
        self.command("Input.insertText", text=text)

    def key(self, name):
        text = {"Enter": "\r", " ": " "}.get(name)
        for kind in ("keyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key=name, code={" ": "Space"}.get(name, name), windowsVirtualKeyCode=KEYS[name],
                         **({"text": text} if text and kind == "keyDown" else {}))

    def choose(self, selector, value):
        self.run(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(value)};"
                 "e.dispatchEvent(new Event('change', {bubbles: true})); })()")

    def table(self, selector):
        """The rows of a table's body, as lists of the cells' text."""
        return self.run(f"[...document.querySelectorAll({json.dumps(selector + ' > tr')})].map((r) => [...r.cells].map((c) => c.innerText))")

    def accessible(self):
        """The accessibility tree's nodes that aren't ignored: (role, name, properties)."""
        nodes = self.command("Accessibility.getFullAXTree")["nodes"]
        return [(node.get("role", {}).get("value"), node.get("name", {}).get("value", ""),
                 {p["name"]: p["value"].get("value") for p in node.get("properties", [])}) for node in nodes if not node["ignored"]]

    def picture(self, path, selector=None, height=None):
        """Save a PNG of the window, or of an element."""
        clip = {}
        if selector:
            box = self.run(f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                           "return [r.x + scrollX, r.y + scrollY, r.width, r.height]; })()")
            clip = {"clip": {"x": box[0], "y": box[1], "width": box[2], "height": height or box[3], "scale": 1}, "captureBeyondViewport": True}
        data = self.command("Page.captureScreenshot", format="png", **clip)["data"]
        pathlib.Path(path).write_bytes(base64.b64decode(data))

    # -- end ---------------------------------------------------------------------------------------
    def close(self):
        if self.ws:
            self.ws.sock.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)  # its own group: see start_new_session
        try:
            self.process.wait(patience(10))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        time.sleep(0.1)
        self.folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
