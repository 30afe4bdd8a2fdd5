# SPDX-License-Identifier: Apache-2.0
"""`kvasir peer` and `kvasir bench peers`: two processes, one lends blocks, the other looks at them, leases and reads them."""
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile

from kvtest import *

KVASIR = str(BUILD / "bin" / "kvasir")
SMALL = ["--block", "16KiB", "--layers", "2"]


def start(*options):
    return subprocess.Popen([KVASIR, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def peer(*options, timeout=120):
    return subprocess.run([KVASIR, "peer", *options], capture_output=True, text=True, timeout=timeout * SLOW, check=False)


def json_of(done, status=0):
    equal(done.returncode, status, f"{done.args} {done.stdout}{done.stderr} status")
    return json.loads(done.stdout)


class Share:
    """A `kvasir peer share`: its endpoints, and what it said at the end."""

    def __init__(self, *options, size=SMALL):
        self.process = start("peer", "share", *options, *size, "--json")

    def __enter__(self):
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"share ended: {self.process.communicate()[1]}")
        self.said = json.loads(line)
        self.endpoints = self.said["endpoints"]
        self.listening = self.sockets()
        return self

    def sockets(self):
        return sum(os.readlink(fd).startswith("socket:") for fd in pathlib.Path(f"/proc/{self.process.pid}/fd").iterdir())

    def wait_alone(self):
        """Readers don't wait for the answer to a release. An owner that has closed their connections has read it."""
        wait_until(lambda: self.sockets() == self.listening, what="sessions that have ended")

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=patience(60))
        self.status, self.errors = self.process.returncode, err
        self.end = json.loads(out) if out else None
        return self.end

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def place():
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


def write_token(path, text="a secret of the two of us"):
    path.write_text(text + "\n")
    path.chmod(0o600)
    return str(path)


# -- what works ------------------------------------------------------------------------------------------------------


def test_shared_memory_and_socket():
    with place() as folder, Share("--demo", "100", "--listen", f"unix:{folder}/s", "--listen", "tcp:127.0.0.1:0") as share:
        equal((share.said["host"], share.said["disk"], share.said["block_bytes"]), (100, 0, 16384))
        unix, tcp = share.endpoints
        seen = json_of(peer("look", unix, "--json"))
        equal(seen["keys"], {"listed": True, "host": 100, "absent": 0})
        equal((seen["set"]["block_bytes"], seen["set"]["layers"], seen["tls"]), (16384, 2, False))
        check("shared memory" in seen["set"]["ways"] and seen["trip_us"] > 0, str(seen))
        for endpoint, options, way in ((unix, [], "shared memory"), (unix, ["--no-shared"], "a socket"), (tcp, [], "a socket"),
                                       (tcp, ["--no-checksums", "--connections", "2", "--batch", "7"], "a socket")):
            done = json_of(peer("read", endpoint, *options, "--passes", "2", "--json"))
            equal((done["way"], done["blocks"], done["wrong"], done["bytes"]), (way, 200, 0, 200 * 16384), f"{endpoint} {options}")
            equal([done[name] for name in ("absent", "gone", "not_lent", "lost")], [0, 0, 0, 0], f"{endpoint} {options} misses")
        share.wait_alone()
        end = share.stop()
        equal((share.status, share.errors, end["leases_now"], end["reclaimed"]), (0, "", 0, 0))
        equal(end["sent_bytes"], 3 * 200 * 16384, "bytes through sockets")
        check(not (folder / "s").exists(), "the socket stays behind")


def test_text_for_people():
    with place() as folder, Share("--demo", "40", "--listen", f"unix:{folder}/s") as share:
        look = peer("look", share.endpoints[0])
        for words in ("agent    share-", "blocks of 16.0 KiB", "2 layers, K and V, 16 tokens", "ways     session, shared memory",
                      "40 in the host tier", "0000000000000001 host"):
            check(words in look.stdout, f"{words!r} in\n{look.stdout}")
        read = peer("read", share.endpoints[0])
        check(re.match(r"40 blocks of 16\.0 KiB from share-\d+ through shared memory: 640\.0 KiB in ", read.stdout), read.stdout)
        check("compared: every byte with the made-up blocks" in read.stdout and "missing" not in read.stdout, read.stdout)
        equal((look.stderr, read.stderr), ("", ""))


def test_keys_from_a_file():
    with place() as folder, Share("--demo", "16", "--listen", f"unix:{folder}/s") as share:
        keys = folder / "keys"
        keys.write_text("# three of sixteen\n1\n0x10\n\n 99  # nobody has it\n000000000000000a\n")
        done = json_of(peer("read", share.endpoints[0], "--keys", str(keys), "--json"), 1)
        equal((done["keys"], done["blocks"], done["absent"], done["wrong"]), (4, 3, 1, 0))
        equal(json_of(peer("look", share.endpoints[0], "--keys", str(keys), "--json"))["keys"],
              {"listed": False, "host": 3, "absent": 1})
        equal(json_of(peer("read", share.endpoints[0], "--keys", str(keys), "--blocks", "2", "--json"))["blocks"], 2)
        keys.write_text("12\nnot hexadecimal\n")
        done = peer("read", share.endpoints[0], "--keys", str(keys))
        equal(done.returncode, 2)
        check("line 2 is no key of 8 bytes" in done.stderr, done.stderr)


def test_many_keys():
    """A list of keys that takes several answers."""
    with place() as folder, Share("--demo", "20000", "--listen", f"unix:{folder}/s", size=["--block", "256", "--layers", "2"]) as share:
        equal(json_of(peer("look", share.endpoints[0], "--json"))["keys"], {"listed": True, "host": 20000, "absent": 0})
        equal(json_of(peer("look", share.endpoints[0], "--blocks", "9000", "--json"))["keys"]["host"], 9000)
        done = json_of(peer("read", share.endpoints[0], "--batch", "1024", "--json"))
        equal((done["blocks"], done["wrong"]), (20000, 0))


def test_one_large_block():
    """One block takes memory for one, and only as its bytes come."""
    block = 128 << 20
    with Share("--demo", "2", "--listen", "tcp:127.0.0.1:0", size=["--block", "128MiB", "--layers", "2"]) as share:
        reader = subprocess.Popen([KVASIR, "peer", "read", share.endpoints[0], "--blocks", "1", "--json"], stdout=subprocess.PIPE)
        done = json.loads(reader.stdout.read())
        _, status, usage = os.wait4(reader.pid, 0)
        reader.returncode = os.waitstatus_to_exitcode(status)
        equal((reader.returncode, done["blocks"], done["wrong"], done["bytes"]), (0, 1, 0, block))
        if not SANITIZED:  # a sanitizer keeps several bytes for each one
            check(usage.ru_maxrss * 1024 < 1.8 * block, f"{usage.ru_maxrss} KiB for a block of {block >> 10}")


def test_lease_holds():
    """What one reader holds, another can't have; a lease is over when its time is, and the rest comes then."""
    with place() as folder, Share("--demo", "64", "--lease-share", "50", "--listen", f"unix:{folder}/s") as share:
        holder = start("peer", "lease", share.endpoints[0], "--time", "1h")
        line = holder.stdout.readline()
        check(line.startswith("32 of 64 blocks are leased"), line)
        check("aren't lent" in holder.stdout.readline(), "the others are refused")
        done = json_of(peer("read", share.endpoints[0], "--json"), 1)
        equal((done["blocks"], done["not_lent"], done["lost"]), (0, 64, 0))
        check("not lent: readers hold as many blocks" in peer("read", share.endpoints[0]).stdout, "the reason in words")
        holder.send_signal(signal.SIGINT)
        out, err = holder.communicate(timeout=patience(60))
        equal((holder.returncode, err), (130, ""))
        check("given back" in out, out)
        equal(json_of(peer("read", share.endpoints[0], "--json"))["blocks"], 64, "after the lease")
        done = json_of(peer("lease", share.endpoints[0], "--blocks", "8", "--time", "50ms", "--json"))
        equal((done["leased"], done["not_lent"], done["ended"]), (8, False, 0))
        share.wait_alone()
        equal(share.stop()["leases_now"], 0)


# -- the disk tier of a directory ------------------------------------------------------------------------------------


def fill(folder):
    """A disk tier as an engine leaves it behind: 48 blocks of 16 KiB."""
    done = subprocess.run([KVASIR, "bench", "tiers", "--block", "16KiB", "--blocks", "48", "--disk", str(folder)],
                          capture_output=True, text=True, timeout=patience(120), check=False)
    equal(done.returncode, 0, done.stderr)


TIER = ["--fingerprint", "kvasir bench tiers"]
FORM = ["--block", "16KiB"]  # 32 layers, 16 tokens, bf16: as `kvasir bench tiers` makes them


def test_directory():
    with place() as folder:
        tier = folder / "tier"
        tier.mkdir()
        fill(tier)
        before = {file.name: file.stat().st_size for file in tier.iterdir()}
        with Share("--dir", str(tier), *TIER, "--listen", f"unix:{folder}/s", "--listen", "tcp:127.0.0.1:0", size=FORM) as share:
            equal((share.said["disk"], share.said["host"]), (48, 0))
            equal(json_of(peer("look", share.endpoints[0], *TIER, "--json"))["keys"], {"listed": True, "disk": 48, "absent": 0})
            for endpoint in share.endpoints:
                done = json_of(peer("read", endpoint, *TIER, "--json"))
                equal((done["blocks"], done["lost"], done["gone"], done["absent"]), (48, 0, 0, 0), endpoint)
            equal(json_of(peer("look", share.endpoints[0], *TIER, "--json"))["keys"], {"listed": True, "host": 48, "absent": 0},
                  "read into the host tier, and told once")
            busy = peer("share", "--dir", str(tier), *TIER, *FORM, "--listen", f"unix:{folder}/t")
            equal((busy.returncode, busy.stdout), (5, ""))
            check("another process uses it" in busy.stderr, busy.stderr)
            share.wait_alone()
            equal((share.stop()["leases_now"], share.status), (0, 0))
        equal({file.name: file.stat().st_size for file in tier.iterdir()}, before, "the tier's files")
        with Share("--dir", str(tier), *TIER, "--listen", f"unix:{folder}/s", size=FORM) as share:
            equal(share.said["disk"], 48, "blocks after they were shared")


def test_directory_refused():
    with place() as folder:
        tier = folder / "tier"
        tier.mkdir()
        for options, status, words in (
                (["--dir", str(tier), *TIER], 5, "no disk tier (kvbm-cache.slots) there"),
                (["--dir", str(folder / "absent"), *TIER], 5, "No such file or directory"),
                (["--dir", str(tier)], 2, "--dir needs --fingerprint"),
                (["--dir", str(tier), "--demo", "3", *TIER], 2, "--dir or --demo, not both")):
            done = peer("share", *options, "--listen", f"unix:{folder}/s")
            equal((done.returncode, done.stdout), (status, ""), f"{options} {done.stderr}")
            check(words in done.stderr, f"{options}: {done.stderr}")
        fill(tier)
        names = sorted(file.name for file in tier.iterdir())
        for options in (["--fingerprint", "another model", *FORM], [*TIER, "--block", "32KiB"], [*TIER, *FORM, "--dtype", "f16"]):
            done = peer("share", "--dir", str(tier), *options, "--listen", f"unix:{folder}/s")
            equal((done.returncode, done.stdout), (5, ""), f"{options} {done.stderr}")
            check("16.0 KiB with keys of 8 bytes, have another fingerprint or form" in done.stderr, done.stderr)
        equal(sorted(file.name for file in tier.iterdir()), names, "nothing was made beside files of another fingerprint")


# -- who may come in -------------------------------------------------------------------------------------------------


def test_token():
    with place() as folder:
        ours, theirs = write_token(folder / "ours"), write_token(folder / "theirs", "another secret, as long")
        with Share("--demo", "8", "--token-file", ours, "--listen", "tcp:127.0.0.1:0") as share:
            at = share.endpoints[0]
            equal(json_of(peer("read", at, "--token-file", ours, "--json"))["blocks"], 8)
            for options, words in ((["--token-file", theirs], "token"), ([], "The peer wants a token (--token-file)")):
                done = peer("read", at, *options)
                equal((done.returncode, done.stdout), (3, ""), done.stderr)
                check(words in done.stderr and "no session with" in done.stderr, done.stderr)
            os.chmod(theirs, 0o644)
            done = peer("read", at, "--token-file", theirs)
            equal(done.returncode, 5)
            check("other users may" in done.stderr, done.stderr)
            share.stop()
            check(share.errors.count("a session is refused") == 2, "the owner's log: " + share.errors)


def test_tls():
    with place() as folder:
        cert, key = make_certificate(str(folder))
        token = write_token(folder / "token")
        other = folder / "other"
        other.mkdir()
        other_cert, other_key = make_certificate(str(other))
        mine = ["--tls-cert", cert, "--tls-key", key]
        with Share("--demo", "8", *mine, "--tls-ca", cert, "--listen", "tcp:127.0.0.1:0") as share:
            at = share.endpoints[0]
            done = json_of(peer("read", at, *mine, "--tls-ca", cert, "--json"))
            equal((done["blocks"], done["way"], done["wrong"]), (8, "a TLS socket", 0))
            check(json_of(peer("look", at, *mine, "--tls-ca", cert, "--json"))["tls"], "TLS")
            for options in (["--tls-cert", other_cert, "--tls-key", other_key, "--tls-ca", cert],
                            [*mine, "--tls-ca", other_cert], []):
                done = peer("read", at, *options)
                equal((done.returncode, done.stdout), (3, ""), f"{options} {done.stderr}")
                check("no session with" in done.stderr, done.stderr)
            equal(peer("read", at, *mine, "--tls-ca", cert, "--tls-name", "elsewhere.example").returncode, 3, "another name")
        with Share("--demo", "8", *mine, "--token-file", token, "--listen", "tcp:127.0.0.1:0") as share:
            done = json_of(peer("read", share.endpoints[0], "--tls-cert", other_cert, "--tls-key", other_key, "--token-file", token,
                                "--json"))
            equal((done["blocks"], done["way"]), (8, "a TLS socket"), "certificates of anybody, and the token")


def test_another_model():
    with place() as folder, Share("--demo", "8", "--fingerprint", "llama-3.1-8b@1a2b tp0of1", "--listen", f"unix:{folder}/s") as share:
        done = peer("look", share.endpoints[0], "--fingerprint", "qwen3-8b@9f tp0of1")
        equal((done.returncode, done.stdout), (3, ""))
        for words in ("another model", '"llama-3.1-8b@1a2b tp0of1"', '"qwen3-8b@9f tp0of1"', "--fingerprint"):
            check(words in done.stderr, f"{words!r} in {done.stderr}")
        done = peer("look", share.endpoints[0], "--fingerprint", "llama-3.1-8b@1a2b tp0of1", "--key-bytes", "32")
        equal(done.returncode, 3)
        check("keys of 32 bytes by" in done.stderr and "of 8 by share-" in done.stderr, done.stderr)


def test_refused():
    with place() as folder:
        for options, status, words in (
                (["look", f"unix:{folder}/nobody"], 3, "Nobody listens there"),
                (["read", f"tcp:127.0.0.1:{free_port()}"], 3, "Nobody listens there"),
                (["read", "nowhere"], 2, "no endpoint"),
                (["read"], 2, "wants ENDPOINT"),
                (["share", "--listen", "tcp:0.0.0.0:0", "--demo", "1", *SMALL], 2, "needs --token-file"),
                (["share", "--demo", "1", "--block", "1000"], 2, "--block must be a multiple"),
                (["raed"], 2, 'did you mean "read"')):
            done = peer(*options)
            equal((done.returncode, done.stdout), (status, ""), f"{options} {done.stderr}")
            check(words in done.stderr, f"{options}: {done.stderr}")
        with Share("--demo", "8", "--listen", f"unix:{folder}/s") as share:
            done = peer("read", share.endpoints[0], "--set", "7")
            equal(done.returncode, 1)
            check("exports no block set 7" in done.stderr, done.stderr)
            done = peer("share", "--demo", "8", *SMALL, "--listen", share.endpoints[0])
            check(done.returncode == 5 and "another program listens there" in done.stderr, done.stderr)


# -- peers that die or freeze ----------------------------------------------------------------------------------------


def read_until_busy(share, *options):
    """Begin to read for longer than any test lasts, and return once blocks have come."""
    reader = start("peer", "read", *options, "--passes", "100000000", "--json")
    fields = pathlib.Path(f"/proc/{reader.pid}/stat")

    def cpu():
        return sum(map(int, fields.read_text().rsplit(")", 1)[1].split()[11:13]))

    wait_until(lambda: reader.poll() is not None or cpu() > 20, what="the reader's work")
    equal(reader.poll(), None, "the reader ended")
    return reader


def test_killed_in_the_middle():
    """The owner is killed while a reader reads: right bytes before, misses after, no wrong one, and an end at once."""
    for kind in ("unix", "tcp"):
        with place() as folder:
            at = f"unix:{folder}/s" if kind == "unix" else "tcp:127.0.0.1:0"
            with Share("--demo", "64", "--listen", at) as share:
                reader = read_until_busy(share, share.endpoints[0])
                share.process.kill()
                out, err = reader.communicate(timeout=patience(60))
                done = json.loads(out)
                equal((reader.returncode, done["wrong"]), (1, 0), f"{kind}: {err}")
                check(done["blocks"] > 0 and done["lost"] > 0 and done["error"], f"{kind}: {done}")
                equal(done["blocks"] + done["lost"] + done["gone"] + done["absent"] + done["not_lent"], 64 * 100000000, kind)
                check("has ended" in err, err)


def test_frozen_in_the_middle():
    """A frozen owner costs no more than the time that the reader gives; what comes is right."""
    with Share("--demo", "64", "--listen", "tcp:127.0.0.1:0") as share:
        reader = read_until_busy(share, share.endpoints[0], "--timeout", "700ms")
        share.process.send_signal(signal.SIGSTOP)
        out, err = reader.communicate(timeout=patience(60))
        done = json.loads(out)
        equal((reader.returncode, done["wrong"]), (1, 0), err)
        check(done["blocks"] > 0 and done["lost"] > 0, str(done))
        share.process.send_signal(signal.SIGCONT)
        equal(json_of(peer("read", share.endpoints[0], "--json"))["blocks"], 64, "thawed")
        share.wait_alone()
        equal(share.stop()["leases_now"], 0, "leases of the reader that went away")


def test_reader_killed():
    """A reader that is killed with leases gives them back."""
    with place() as folder, Share("--demo", "32", "--lease-share", "50", "--listen", f"unix:{folder}/s") as share:
        holder = start("peer", "lease", share.endpoints[0], "--time", "1h")
        check(holder.stdout.readline().startswith("16 of 32"), "as many as are lent")
        equal(json_of(peer("read", share.endpoints[0], "--json"), 1)["not_lent"], 32)
        holder.kill()
        holder.communicate()
        wait_until(lambda: json_of(peer("read", share.endpoints[0], "--json"))["blocks"] == 32, what="the blocks back")


# -- the benchmark, and the program's manners ------------------------------------------------------------------------


def test_bench_peers():
    done = subprocess.run([KVASIR, "bench", "peers", "--block", "64KiB", "--blocks", "48", "--passes", "2", "--json"],
                          capture_output=True, text=True, timeout=patience(120), check=False)
    figures = json_of(done)
    equal((figures["blocks"], figures["wrong"], figures["missing"]), (48, 0, 0))
    for name in ("memcpy", "shared_memory", "unix", "unix_no_checksums", "tcp", "tcp_no_checksums"):
        check(figures[name]["gb_per_s"] > 0, name)
    equal([figures[name]["shared"] for name in ("shared_memory", "unix", "tcp")], [True, False, False])
    done = subprocess.run([KVASIR, "bench", "peers", "--block", "64KiB", "--blocks", "8"], capture_output=True, text=True,
                          timeout=patience(120), check=False)
    check(done.returncode == 0 and "times memcpy's speed" in done.stdout and "didn't come" not in done.stdout, done.stdout + done.stderr)
    for options in (["--block", "1000"], ["--blocks", "0"], ["--nosuch"]):
        equal(subprocess.run([KVASIR, "bench", "peers", *options], capture_output=True, timeout=60, check=False).returncode, 2, options)


def test_help():
    for words in (["peer", "--help"], ["peer", "share", "--help"], ["peer", "read", "--help"], ["help", "peer", "lease"],
                  ["peer", "look", "--help-man"], ["bench", "peers", "--help-man"]):
        done = subprocess.run([KVASIR, *words], capture_output=True, text=True, timeout=60, check=False)
        check(done.returncode == 0 and len(done.stdout) > 200 and not done.stderr, f"{words}: {done}")
    words = subprocess.run([KVASIR, "peer", "--help-options"], capture_output=True, text=True, timeout=60, check=False).stdout.split()
    equal(words, ["share", "look", "lease", "read"])


if __name__ == "__main__":
    run(globals())
