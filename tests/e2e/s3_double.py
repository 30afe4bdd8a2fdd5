# SPDX-License-Identifier: Apache-2.0
"""A strict little S3 server for tests, and the plugin's driver (tests/plugins/store_driver.c).

Every request's SigV4 signature and payload hash are computed again and compared; requests that a picky server would
refuse are refused. Faults are scripted, one per matching request:

    with S3() as s3, Store(s3.uri()) as store:
        s3.fault("PUT /b/p/c/", "503")           # the next one whose "METHOD path" starts so
        equal(store.ask("put", "0a0b", 100, 1), "0")
"""
import collections
import datetime
import email.utils
import hashlib
import hmac
import http.server
import os
import re
import socket
import ssl
import struct
import subprocess
import threading
import time
import urllib.parse
import xml.sax.saxutils

from kvtest import BUILD, check

FAILED_200 = {
    "error": b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>InternalError</Code></Error>',
    "odd-declaration": b"<?xml?><Error><Code>InternalError</Code></Error>",
    "doctype": b"<!DOCTYPE Error><Error><Code>InternalError</Code></Error>",
    "byte": b"\xff<Error><Code>InternalError</Code></Error>",
    "html": b"<html><body>Back soon</body></html>",
    "cut": b"<CompleteMultipartUploadResult><ETag>",
    "empty": b"",
}

KEY, SECRET, BUCKET = "AKIDTEST", "c2VjcmV0+/x", "b"
Item = collections.namedtuple("Item", "body meta etag modified")


class Refused(Exception):
    def __init__(self, status, code):
        self.status, self.code = status, code


def quote(text):
    return urllib.parse.quote(text, safe="-._~")


def canonical_query(query):
    pairs = [part.partition("=") for part in query.split("&") if part]
    decoded = sorted((quote(urllib.parse.unquote(name)), quote(urllib.parse.unquote(value))) for name, _, value in pairs)
    return "&".join(f"{name}={value}" for name, value in decoded)


def mac(key, text):
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def setup(self):
        super().setup()
        with self.s3.lock:
            self.s3.connections.add(self.connection)

    def finish(self):
        with self.s3.lock:
            self.s3.connections.discard(self.connection)
        super().finish()

    # -- What is checked on every request ------------------------------------------------------------
    def verify(self, path, query, body):
        found = re.fullmatch(r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/s3/aws4_request, ?"
                             r"SignedHeaders=([a-z0-9;-]+), ?Signature=([0-9a-f]{64})", self.headers.get("authorization", ""))
        if not found:
            raise Refused(403, "AccessDenied")
        key, day, region, signed, signature = found.groups()
        stamp, names = self.headers.get("x-amz-date", ""), signed.split(";")
        if key != KEY or region != self.s3.region:
            raise Refused(403, "InvalidAccessKeyId")
        needed = {"host"} | {name.lower() for name in self.headers if name.lower().startswith("x-amz-")}
        if names != sorted(set(names)) or not needed <= set(names) or not stamp.startswith(day):
            raise Refused(403, "AccessDenied")
        if len(set(map(str.lower, self.headers.keys()))) != len(self.headers.keys()):
            raise Refused(400, "InvalidRequest")
        if self.s3.token and self.headers.get("x-amz-security-token") != self.s3.token:
            raise Refused(403, "InvalidToken")
        payload = self.headers.get("x-amz-content-sha256")
        lines = "".join(f"{name}:{' '.join(self.headers[name].split())}\n" for name in names)
        request = "\n".join([self.command, "/".join(map(quote, map(urllib.parse.unquote, path.split("/")))),
                             canonical_query(query), lines, signed, payload])
        scope = f"{day}/{region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        secret = ("AWS4" + SECRET).encode()
        for part in (day, region, "s3", "aws4_request"):
            secret = mac(secret, part)
        if mac(secret, text).hex() != signature:
            raise Refused(403, "SignatureDoesNotMatch")
        when = datetime.datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=datetime.timezone.utc).timestamp()
        if self.s3.strict_clock and abs(when - self.s3.now()) > 900:
            raise Refused(403, "RequestTimeTooSkewed")
        if hashlib.sha256(body).hexdigest() != payload:
            raise Refused(400, "XAmzContentSHA256Mismatch")

    # -- Answers -------------------------------------------------------------------------------------
    def date_time_string(self, timestamp=None):
        return email.utils.formatdate(self.s3.now() if timestamp is None else timestamp, usegmt=True)

    def answer(self, status, body=b"", headers=(), fault=None):
        self.send_response_only(status)
        if self.s3.dated:
            self.send_header("Date", self.date_time_string())
        length, sent = len(body), body
        for name, value in dict(headers).items():
            if name.lower() == "content-length":
                length = value
            else:
                self.send_header(name, value)
        if fault == "wrong" and body:
            sent = bytes([body[0] ^ 1]) + body[1:]
        if fault == "cut":
            sent = body[:len(body) // 2]
        if fault == "cut-told":  # as if it were all
            length = len(sent := body[:len(body) // 2])
        if status != 204:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            if (fault or "").startswith("drip:"):
                return self.drip(sent, *map(float, fault.split(":")[1:]))
            self.wfile.write(sent)
        if fault == "cut":
            self.close_connection = True

    def refuse(self, status, code, headers=()):
        body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>no &amp; no</Message></Error>'.encode()
        self.answer(status, b"" if self.command == "HEAD" else body, headers)

    def elsewhere(self, how):
        status, code = (301, "PermanentRedirect") if how.startswith("301") else (400, "AuthorizationHeaderMalformed")
        body = f"<Error><Code>{code}</Code>" + ("<Region>eu-west-1</Region>" if how.endswith("body") else "") + "</Error>"
        self.answer(status, body.encode(), {"x-amz-bucket-region": "eu-west-1"} if how.endswith("head") else {})

    def drip(self, data, pause, step=1):
        for at in range(0, len(data), int(step)):
            self.wfile.write(data[at:at + int(step)])
            if self.s3.stopped.wait(pause):
                break
        self.close_connection = True

    def flood(self, status):
        self.send_response(status)
        self.send_header("Content-Length", str(1 << 40))
        self.end_headers()
        self.s3.flooded = 0
        self.close_connection = True
        while self.s3.flooded < 1 << 30 and not self.s3.stopped.is_set():
            self.wfile.write(b"x" * 65536)
            self.s3.flooded += 65536

    def reset(self):
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
        self.wfile = open(os.devnull, "wb")

    def handle_one(self):
        path, _, query = self.path.partition("?")
        self.virtual = self.headers.get("host", "").startswith(BUCKET + ".")
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        fault = self.s3.take_fault(self.command, self.path)
        kind, _, detail = (fault or "").partition(":")
        if fault == "reset":
            return self.reset()
        if fault == "stall":
            self.s3.stopped.wait(60)
            return self.reset()
        if kind == "drip-head":
            return self.drip(b"HTTP/1.1 200 OK\r\nx-slow: " + b"a" * 10000000, float(detail))
        if kind in ("500", "503", "429", "403", "301", "409"):  # after ":" comes what Retry-After says
            codes = {"500": "InternalError", "503": "SlowDown", "409": "ConditionalRequestConflict"}
            return self.refuse(int(kind), codes.get(kind, "Other"), {"Retry-After": detail} if detail else {})
        if kind == "long":  # an answer that goes on and on
            return self.flood(int(detail))
        if kind == "failed-200":  # nothing is done
            return self.answer(200, FAILED_200[detail])
        if kind == "dropped":  # taken, answered as stored, and gone
            return self.answer(200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        if kind == "late":  # stored, and seen only after that many looks
            with self.s3.lock:
                self.s3.faults += [[f"HEAD {path}", "404"] for _ in range(int(detail))]
        if kind == "elsewhere":  # detail: how it is told
            return self.elsewhere(detail)
        if kind == "expired":
            return self.refuse(400, "ExpiredToken")
        if kind == "404":
            return self.refuse(404, "NoSuchKey")
        if kind == "412":
            return self.refuse(412, "PreconditionFailed")
        self.s3.wait_at("before", self.command, self.path)
        try:
            self.verify(path, query, body)
            with self.s3.lock:
                reply = self.s3.act(self.command, ("/" + BUCKET if self.virtual else "") + urllib.parse.unquote(path), urllib.parse.parse_qs(query, keep_blank_values=True),
                                    {name.lower(): value for name, value in self.headers.items()}, body)
        except Refused as refused:
            return self.refuse(refused.status, refused.code)
        self.s3.wait_at("after", self.command, self.path)
        if fault == "lost":  # done, but nobody hears of it
            return self.reset()
        if fault == "error-200":
            return self.answer(200, b"<Error><Code>InternalError</Code></Error>")
        self.answer(*reply, fault=fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    tls = None

    def finish_request(self, request, client_address):  # on the connection's own thread: handshakes hold up nobody
        if self.tls:
            request = self.tls.wrap_socket(request, server_side=True)
        super().finish_request(request, client_address)

    def handle_error(self, *_):
        pass


class S3:
    """@conditional: True, False (If-None-Match is ignored), "refused" (501, as Swift does) or "marked" (412 also
    where the newest version is a delete marker).
    @encoding of listed keys: plus, percent, none, numbers. @strict_clock=False: any signing time will do.
    @tls: (certificate, key) files. What comes for BUCKET.HOST is told from its Host header."""

    def __init__(self, conditional=True, skew=0, token=None, region="us-east-1", page=1000, port=0, encoding="plus",
                 strict_clock=True, tls=None):
        self.conditional, self.skew, self.token, self.region, self.page = conditional, skew, token, region, page
        self.encoding, self.listing_fault, self.strict_clock, self.dated = encoding, None, strict_clock, True
        self.scheme = "https" if tls else "http"
        self.objects, self.uploads, self.faults, self.log, self.connections = {}, {}, [], [], set()
        self.marked = set()  # keys whose newest version is a delete marker
        self.ranges = "told"  # "ignored": all of the object comes; "shifted": Content-Range tells another part
        self.before_delete = []  # what happens right before the next deletions
        self.holds = []
        self.times, self.flooded, self.tick, self.ticks_from = [], 0, 0, 0
        self.lock, self.stopped = threading.RLock(), threading.Event()
        self.server = Server(("127.0.0.1", port), type("Bound", (Handler,), {"s3": self}))
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self.server.tls = context
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stopped.set()
        self.server.shutdown()
        self.server.server_close()
        with self.lock:
            for connection in self.connections:  # what is kept alive ends as well
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def now(self):
        return time.time() + self.skew + self.tick * max(0, len(self.log) - self.ticks_from)

    def tick_from_now(self, seconds):
        """Each request from here on makes the server's clock jump."""
        self.tick, self.ticks_from = seconds, len(self.log)

    def uri(self, prefix="p", host="127.0.0.1", **options):
        options = {"endpoint": f"{self.scheme}://{host}:{self.port}", "timeout": 20, **options}
        return f"s3://{BUCKET}/{prefix}?" + "&".join(f"{name}={value}" for name, value in options.items())

    def fault(self, start, kind, times=1):
        """The next @times requests whose "METHOD path?query" starts with @start go wrong."""
        with self.lock:
            self.faults += [[start, kind] for _ in range(times)]

    def take_fault(self, method, path):
        with self.lock:
            self.log.append(f"{method} {path}")
            self.times.append(time.monotonic())
            for i, (start, kind) in enumerate(self.faults):
                if f"{method} {path}".startswith(start):
                    del self.faults[i]
                    return kind
        return None

    def hold(self, start, when="after"):
        """Hold the next request whose "METHOD path?query" starts with @start: before it is carried out, or after that,
        before its answer. Returns two events: the request is held; set by the caller to let it go."""
        held, go = threading.Event(), threading.Event()
        with self.lock:
            self.holds.append((start, when, held, go))
        return held, go

    def wait_at(self, when, method, path):
        with self.lock:
            found = next((hold for hold in self.holds if hold[1] == when and f"{method} {path}".startswith(hold[0])), None)
            if found:
                self.holds.remove(found)
        if found:
            found[2].set()
            found[3].wait(60)

    def requests(self, start=""):
        with self.lock:
            return [line for line in self.log if line.startswith(start)]

    def gaps(self, start):
        """Seconds between the requests that start so."""
        with self.lock:
            at = [when for line, when in zip(self.log, self.times) if line.startswith(start)]
        return [b - a for a, b in zip(at, at[1:])]

    def age(self, seconds, start=""):
        """As if what is stored had been stored so much earlier."""
        with self.lock:
            for key in self.keys(start):
                self.objects[key] = self.objects[key]._replace(modified=self.objects[key].modified - seconds)

    def keys(self, start=""):
        with self.lock:
            return sorted(key for key in self.objects if key.startswith(start))

    # -- The API -------------------------------------------------------------------------------------
    def act(self, method, path, query, headers, body):
        bucket, _, key = path.lstrip("/").partition("/")
        if bucket != BUCKET:
            raise Refused(404, "NoSuchBucket")
        if not key:
            return self.list(query)
        if "uploads" in query or "uploadId" in query:
            return self.multipart(method, key, query, headers, body)
        if method == "PUT":
            return self.copy(key, headers) if "x-amz-copy-source" in headers else self.store(key, headers, body)
        if method == "DELETE" and self.before_delete:
            self.before_delete.pop()()
        if method == "DELETE" and "if-match" in headers and self.conditional == "refused":
            raise Refused(501, "NotImplemented")
        if method == "DELETE" and self.conditional and "if-match" in headers:
            if key not in self.objects:
                raise Refused(404, "NoSuchKey")
            if self.objects[key].etag != headers["if-match"]:
                raise Refused(412, "PreconditionFailed")
        if method == "DELETE":
            self.marked.add(key)
            self.objects.pop(key, None)
            return 204, b""
        if key not in self.objects:
            raise Refused(404, "NoSuchKey")
        item = self.objects[key]
        if method == "GET" and "range" in headers and self.ranges != "ignored":
            return self.part(item, headers)
        return 200, item.body, {**item.meta, "ETag": item.etag, "Content-Length": len(item.body),
                                "Last-Modified": email.utils.formatdate(item.modified, usegmt=True)}

    def part(self, item, headers):
        first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", headers["range"]).groups())
        if headers.get("if-match", item.etag) != item.etag and self.conditional:
            raise Refused(412, "PreconditionFailed")
        if first >= len(item.body):
            raise Refused(416, "InvalidRange")
        body = item.body[first:last + 1]
        said = first + (self.ranges == "shifted")
        return 206, body, {**item.meta, "ETag": item.etag, "Content-Length": len(body),
                           "Content-Range": f"bytes {said}-{said + len(body) - 1}/{len(item.body)}"}

    def store(self, key, headers, body, etag=None):
        if self.conditional == "refused" and "if-none-match" in headers:
            raise Refused(501, "NotImplemented")
        exists = key in self.objects or (self.conditional == "marked" and key in self.marked)
        if self.conditional and headers.get("if-none-match") == "*" and exists:
            raise Refused(412, "PreconditionFailed")
        etag = etag or f'"{hashlib.md5(body).hexdigest()}"'
        meta = {name: value for name, value in headers.items() if name.startswith("x-amz-meta-")}
        self.objects[key] = Item(body, meta, etag, self.now())
        self.marked.discard(key)
        return 200, b"", {"ETag": etag}

    def copy(self, key, headers):
        source = urllib.parse.unquote(headers["x-amz-copy-source"]).lstrip("/").partition("/")[2]
        if source not in self.objects:
            raise Refused(404, "NoSuchKey")
        if source == key and headers.get("x-amz-metadata-directive") != "REPLACE":
            raise Refused(400, "InvalidRequest")
        self.store(key, {n: v for n, v in headers.items() if n != "if-none-match"}, self.objects[source].body)
        return 200, b"<CopyObjectResult><ETag>x</ETag></CopyObjectResult>"

    def multipart(self, method, key, query, headers, body):
        if method == "POST" and "uploads" in query:
            upload = f"id+/{len(self.uploads)}="
            self.uploads[upload] = (key, headers, {})
            return 200, f"<R><UploadId>{upload}</UploadId></R>".encode()
        upload = query["uploadId"][0]
        if upload not in self.uploads:
            raise Refused(404, "NoSuchUpload")
        _, first, parts = self.uploads[upload]
        if method == "PUT":
            parts[int(query["partNumber"][0])] = body
            return 200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}
        if method == "POST":
            named = re.findall(r"<PartNumber>(\d+)</PartNumber><ETag>(.*?)</ETag>", body.decode())
            if [(n, xml.sax.saxutils.unescape(tag)) for n, tag in named] != \
                    [(str(n), f'"{hashlib.md5(parts[n]).hexdigest()}"') for n in sorted(parts)]:
                raise Refused(400, "InvalidPart")
            whole = b"".join(parts[n] for n in sorted(parts))
            self.store(key, {**first, **{n: v for n, v in headers.items() if n == "if-none-match"}}, whole, '"multi-1"')
            del self.uploads[upload]
            return 200, b"<CompleteMultipartUploadResult/>"
        del self.uploads[upload]
        return 204, b""

    def list(self, query):
        prefix, token = query.get("prefix", [""])[0], query.get("continuation-token", [""])[0]
        if query.get("list-type") != ["2"] or query.get("encoding-type") != ["url"]:
            raise Refused(400, "InvalidArgument")
        # "plus" is how Amazon does it, "percent" others do, "none" is a server that doesn't know the option.
        encode = {"plus": lambda key: urllib.parse.quote_plus(key, safe="/-._~*"), "percent": quote,
                  "none": xml.sax.saxutils.escape, "numbers": lambda key: "".join(f"&#{ord(c)};" for c in key)}[self.encoding]
        limit = min(int(query.get("max-keys", ["1000"])[0]), self.page)
        keys = [key for key in self.keys(prefix) if "~" + key > token]
        rows = "".join(f"<Contents><Key>{encode(key)}</Key><LastModified>"
                       f"{datetime.datetime.utcfromtimestamp(int(self.objects[key].modified)).isoformat()}.000Z</LastModified>"
                       f"<Size>{len(self.objects[key].body)}</Size></Contents>" for key in keys[:limit])
        cut = bool(keys[limit:])
        more = f"<NextContinuationToken>~{xml.sax.saxutils.escape(keys[limit - 1])}</NextContinuationToken>" if cut else ""
        if self.listing_fault == "no token":
            more = ""
        if self.listing_fault == "token at the end" and not cut:
            more = "<NextContinuationToken>again</NextContinuationToken>"
        if self.listing_fault == "circle":  # three pages that follow each other
            cut, more = True, f"<NextContinuationToken>{len(self.log) % 3}</NextContinuationToken>"
        if self.listing_fault == "new tokens":  # without an end, and without a key
            cut, more, rows = True, f"<NextContinuationToken>{len(self.log)}</NextContinuationToken>", ""
        head = "" if self.listing_fault == "no truth" else f"<IsTruncated>{str(cut).lower()}</IsTruncated>"
        if self.encoding in ("plus", "percent"):
            head += "<EncodingType>url</EncodingType>"
        if self.listing_fault == "long":
            head += " " * (17 << 20)
        return 200, (f'<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult xmlns="x"><Prefix>{encode(prefix)}</Prefix>'
                     f"{rows}{more}{head}</ListBucketResult>").encode()


def environment(**extra):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_") and "proxy" not in name.lower()}
    return {**clean, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
            "KV_STORE_LIBRARY_PATH": str(BUILD / "lib"), **extra}


class Store:
    """The driver on one URI. opened is what kvs_open returned; ask() returns the line that answers."""

    def __init__(self, uri, expect=0, **env):
        self.process = subprocess.Popen([str(BUILD / "tests" / "store-driver"), uri], stdin=subprocess.PIPE, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(**env))
        self.err = []
        self.reader = threading.Thread(target=lambda: self.err.extend(self.process.stderr), daemon=True)
        self.reader.start()
        self.opened = int(self.process.stdout.readline() or -1)
        if (self.opened == 0) != (expect == 0):
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"open returned {self.opened}: {self.log()}")

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.close(check_exit=kind is None)

    def log(self):
        return "".join(self.err)

    def ask(self, *words):
        self.tell(*words)
        return self.answer(words[0])

    def tell(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def answer(self, what):
        line = self.process.stdout.readline()
        check(line, f"{what}: the driver ended: {self.log()}")
        return line.strip()

    def close(self, check_exit=True):
        if self.process.stdin.closed:
            return
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            code = self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.reader.join(10)
        check(code == 0 or not check_exit or self.opened != 0, f"the driver returned {code}: {self.log()}")
