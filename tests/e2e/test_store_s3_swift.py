# SPDX-License-Identifier: Apache-2.0
"""The s3 plugin against OpenStack Swift's S3 API (Debian: python3-swift): a server that somebody else wrote."""
import datetime
import getpass
import hashlib
import pathlib
import subprocess
import sys
import tempfile
import time

from kvtest import *
from s3_double import Store, environment, mac

try:
    import swift.common.wsgi  # noqa: F401
except ImportError:
    skip_all("no real S3 server to test with; Debian's is in python3-swift")

KEY, SECRET, REGION, BUCKET = "test:tester", "testing", "us-east-1", "kvasir"
SERVE = ("import sys; from swift.common import utils, wsgi; utils.set_swift_dir(sys.argv[3]); "
         "sys.exit(wsgi.run_wsgi(sys.argv[1], sys.argv[2]))")
COMMON = """[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
user = {user}
swift_dir = {dir}
devices = {dir}/devices
mount_check = false
workers = 0
log_level = ERROR
"""
PROXY = """[pipeline:main]
pipeline = catch_errors gatekeeper healthcheck memory listing_formats bulk s3api tempauth copy slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:memory]
paste.filter_factory = memory_cache:factory
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
max_bucket_listing = 50
"""
CACHE = '''
class Cache:  # in place of memcached, which tempauth insists on
    def __init__(self):
        self.values = {}

    def set(self, key, value, *_, **__):
        self.values[key] = value

    def get(self, key, *_, **__):
        return self.values.get(key)

    def delete(self, key, *_, **__):
        self.values.pop(key, None)

    def incr(self, key, delta=1, *_, **__):
        self.values[key] = self.values.get(key, 0) + delta
        return self.values[key]


def factory(*_, **__):
    cache = Cache()

    def wrap(app):
        def call(env, start_response):
            env["swift.cache"] = cache
            return app(env, start_response)
        return call
    return wrap
'''
FILTERS = ("catch_errors", "gatekeeper", "healthcheck", "listing_formats", "bulk", "copy", "slo", "dlo")


class Swift:
    """Account, container, object and proxy server, one of each, in a folder of their own."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name)
        self.processes = []

    def __enter__(self):
        try:
            self.start()
        except BaseException:
            print(self.logs(), file=sys.stderr)
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.folder.cleanup()

    def start(self):
        (self.path / "devices" / "d1").mkdir(parents=True)
        (self.path / "memory_cache.py").write_text(CACHE)
        (self.path / "swift.conf").write_text("[swift-hash]\nswift_hash_path_suffix = kvasir\n")
        for kind, storage in (("account", "account"), ("container", "container"), ("object", "mem_object")):
            port = free_port()
            self.ring(kind, port)
            self.serve(kind, port, f"[pipeline:main]\npipeline = {kind}-server\n"
                                   f"[app:{kind}-server]\nuse = egg:swift#{storage}\n")
        self.port = free_port()
        self.serve("proxy", self.port, PROXY + "".join(f"[filter:{name}]\nuse = egg:swift#{name}\n" for name in FILTERS))
        wait_until(self.is_up, 40, "Swift")
        wait_until(self.make_bucket, 20, "a bucket", 0.3)

    def ring(self, kind, port):
        code = ("from swift.common.ring import RingBuilder; import sys; b = RingBuilder(1, 1, 1); "
                "b.add_dev(dict(region=1, zone=1, ip='127.0.0.1', port=int(sys.argv[2]), replication_ip='127.0.0.1', "
                "replication_port=int(sys.argv[2]), device='d1', weight=1, meta='')); b.rebalance(); b.get_ring().save(sys.argv[1])")
        done = subprocess.run([sys.executable, "-c", code, str(self.path / f"{kind}.ring.gz"), str(port)], capture_output=True,
                              text=True, timeout=60)
        equal(done.returncode, 0, done.stderr)

    def serve(self, kind, port, rest):
        conf = self.path / f"{kind}.conf"
        conf.write_text(COMMON.format(port=port, user=getpass.getuser(), dir=self.path) + rest)
        with open(self.path / f"{kind}.log", "wb") as log:
            self.processes.append(subprocess.Popen([sys.executable, "-c", SERVE, str(conf), f"{kind}-server", str(self.path)],
                                                   stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                                   env={**environment(), "PYTHONPATH": str(self.path)}))

    def is_up(self):
        if any(process.poll() is not None for process in self.processes):
            raise RuntimeError("a server ended")
        return http_request(f"http://127.0.0.1:{self.port}", "GET", "/healthcheck").status == 200

    def logs(self):
        return "".join(f"-- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in self.path.glob("*.log"))

    def make_bucket(self):
        """Signed here, since the plugin never makes buckets."""
        now = datetime.datetime.now(datetime.timezone.utc)
        stamp, day, empty = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d"), hashlib.sha256(b"").hexdigest()
        host, names = f"127.0.0.1:{self.port}", "host;x-amz-content-sha256;x-amz-date"
        request = f"PUT\n/{BUCKET}\n\nhost:{host}\nx-amz-content-sha256:{empty}\nx-amz-date:{stamp}\n\n{names}\n{empty}"
        secret = ("AWS4" + SECRET).encode()
        for part in (day, REGION, "s3", "aws4_request"):
            secret = mac(secret, part)
        scope = f"{day}/{REGION}/s3/aws4_request"
        signature = mac(secret, f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}").hex()
        reply = http_request(f"http://{host}", "PUT", f"/{BUCKET}", headers={
            "x-amz-date": stamp, "x-amz-content-sha256": empty,
            "Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/{scope}, SignedHeaders={names}, Signature={signature}"})
        check(reply.status in (200, 409), reply)
        return True

    def uri(self, prefix="p", **options):
        options = {"endpoint": f"http://127.0.0.1:{self.port}", "timeout": 20, **options}
        return f"s3://{BUCKET}/{prefix}?" + "&".join(f"{name}={value}" for name, value in options.items())


KEYS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}


def key(n, size=16):
    return f"{n * 2654435761 % 2**32:08x}".ljust(2 * size, "0")


def check_values(server):
    with Store(server.uri(), **KEYS) as store:
        equal(store.ask("get", key(1), 100, 1), "-2 -")
        for n, size in ((1, 100), (2, 0), (3, 3 << 20)):
            equal(store.ask("put", key(n), size, n), "0")
        equal(store.ask("publish", "m", 10, 1), "0")
        equal(store.ask("publish", "m", 20, 2), "0")
    with Store(server.uri(), **KEYS) as store:
        for n, size in ((1, 100), (2, 0), (3, 3 << 20)):
            equal(store.ask("put", key(n), size, n), "1")
            equal(store.ask("get", key(n), size, n), "0 same")
        equal(store.ask("manifest", "m", 20, 2), "0 same")
        equal(store.ask("unpublish", "m"), "0")
        equal(store.ask("unpublish", "m"), "0")
        equal(store.ask("manifest", "m", 20, 2), "-2 -")


def check_parts(server):
    size = 70 << 20
    with Store(server.uri("parts", timeout=120), **KEYS) as store:
        equal(store.ask("put", key(1), size, 1), "0")
        equal(store.ask("put", key(1), size, 1), "1")
        equal(store.ask("get", key(1), size, 1), "0 same")


def check_names_and_listings(server):
    names = ["a+b", "a%2Bb", "100%", "a&b", "<a>", "é", "日本", "a/b", "..", "a=b?c#d", "*"]
    with Store(server.uri("pre fix+%&é"), **KEYS) as store:
        for i, name in enumerate(names):
            equal(store.ask("put", key(i), 10, i), "0")
            equal(store.ask("publish", name, 10 + i, i), "0", name)
        listed = store.ask("list").split()
        equal((sorted(listed[:-1]), listed[-1]), (sorted(f"{n}:{10 + i}" for i, n in enumerate(names)), "0"))
        equal(sorted(store.ask("chunks").split()[:-1]), sorted(key(i) for i in range(len(names))))
        equal(store.ask("refs", "a+b").split(), [key(0), "0"])


def check_pages(server):
    with Store(server.uri("pages"), **KEYS) as store:
        words = [w for n in range(120) for w in (key(n), 3, n)]
        equal(store.ask("putmany", *words).split()[0], "0")
        equal(store.ask("flush"), "0")
        equal(sorted(store.ask("chunks").split()[:-1]), sorted(map(key, range(120))))


def check_sweep(server):
    with Store(server.uri("sweep"), **KEYS) as store:
        for n in range(4):
            equal(store.ask("put", key(n), 10, n), "0")
        equal(store.ask("publish", "m", 10, 1), "0")
        saved = time.monotonic()
        time.sleep(6)
        used = time.monotonic()
        equal(store.ask("put", key(9), 10, 9), "0")
        equal(store.ask("flush"), "0")
        equal(store.ask("sweep", 3600), "0 kept=5 deleted=0 errors=0")
        now = time.monotonic()
        age = int(((now - saved) + (now - used)) / 2)  # of which the first four are older, and the last one is not
        equal(store.ask("sweep", age, key(0)), "0 kept=2 deleted=3 errors=0")
        equal(store.ask("exists", *map(key, (0, 1, 2, 3, 9))), "0 1 0 0 0 1")


def check_wrong_keys(server):
    with Store(server.uri(), expect=1, **{**KEYS, "AWS_SECRET_ACCESS_KEY": "wrong"}) as store:
        store.close()
        check("SignatureDoesNotMatch" in store.log(), store.log())


def test_swift():
    """All on one server, which takes seconds to start."""
    with Swift() as server:
        for what in (check_values, check_wrong_keys, check_names_and_listings, check_parts, check_pages, check_sweep):
            began = time.monotonic()
            try:
                what(server)
            except Exception:
                print(server.logs(), file=sys.stderr)
                raise
            print(f"        {what.__name__} ({time.monotonic() - began:.1f} s)", flush=True)


if __name__ == "__main__":
    run(globals())
