# SPDX-License-Identifier: Apache-2.0
"""HTTPS: what is served, certificates that are read again, authorities of one's own."""
import http.client
import re
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time

from kvtest import *


def test_tls():
    with tempfile.TemporaryDirectory() as folder:
        cert, key = make_certificate(folder)
        trusting = ssl.create_default_context(cafile=cert)
        with Indexer("--tls-cert", cert, "--tls-key", key, context=trusting) as indexer:
            check(indexer.url.startswith("https://"))
            equal(indexer.get("/health").status, 200)
            indexer.register(1, f"tcp://127.0.0.1:{free_port()}", block_size=4)
            equal(indexer.post("/query", {"model_name": "m", "token_ids": list(range(100000))}).status, 200)
            equal(list(indexer.dump()), ["m:default"])
            try:
                http_request(indexer.url, "GET", "/health", context=ssl.create_default_context())
                check(False, "a client that doesn't trust the certificate connects")
            except ssl.SSLError:
                pass
            with indexer.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as sock:
                said = b""
                while more := sock.recv(4096):
                    said += more
                check(said.startswith(b"HTTP/1.1 400 ") and b"use https://" in said, f"plain HTTP to the TLS port: {said}")
                equal(len(said.partition(b"\r\n\r\n")[2]), int(re.search(rb"Content-Length: (\d+)", said).group(1)), "its length")
            old = ssl.create_default_context(cafile=cert)
            old.maximum_version = ssl.TLSVersion.TLSv1_2
            equal(indexer.get("/health").status, 200)
            stalled = [indexer.raw() for _ in range(20)]  # no handshake
            equal(indexer.get("/health").status, 200)
            for sock in stalled:
                sock.close()
        for arguments in (("--tls-cert", cert, "--tls-key", cert), ("--tls-cert", cert, "--tls-key", "/nonexistent")):
            indexer = Indexer(*arguments, wait=False)
            equal(indexer.process.wait(20), 1, f"{arguments}: exit status")
            indexer.kill()


def shown_certificate(indexer):
    """What a new connection is shown, in DER."""
    context = ssl._create_unverified_context()
    with socket.create_connection(("127.0.0.1", indexer.port), timeout=30) as sock, context.wrap_socket(sock) as tls:
        return tls.getpeercert(binary_form=True)


def test_certificate_is_read_again():
    """SIGHUP: new connections are shown the new one, old ones go on; a broken file changes nothing."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        cert, key = make_certificate(folder)
        new_cert, new_key = make_certificate(other)
        old_context = ssl.create_default_context(cafile=cert)
        new_context = ssl.create_default_context(cafile=new_cert)
        with Indexer("--tls-cert", cert, "--tls-key", key, context=old_context) as indexer:
            first = shown_certificate(indexer)
            kept = http.client.HTTPSConnection("127.0.0.1", indexer.port, context=old_context, timeout=30)
            equal(http_request(indexer.url, "GET", "/health", connection=kept).status, 200)
            shutil.copy(new_cert, cert)  # without its key
            indexer.process.send_signal(signal.SIGHUP)
            wait_until(lambda: any("the old one stays" in line for line in indexer.log), what="a line in the log")
            equal(shown_certificate(indexer), first, "after half a rotation")
            shutil.copy(new_key, key)
            indexer.process.send_signal(signal.SIGHUP)
            wait_until(lambda: any("certificate read again" in line for line in indexer.log), what="a line in the log")
            check(shown_certificate(indexer) != first, "the new certificate is shown")
            equal(http_request(indexer.url, "GET", "/health", connection=kept).status, 200, "the old connection")
            kept.close()
            indexer.context = new_context
            equal(indexer.get("/health").status, 200)


def test_own_authorities():
    """--cacert: peers and kvasir top over HTTPS, with a certificate that the system doesn't know."""
    with tempfile.TemporaryDirectory() as folder:
        cert, key = make_certificate(folder)
        context = ssl.create_default_context(cafile=cert)
        with Indexer("--tls-cert", cert, "--tls-key", key, context=context) as one:
            one.register(1, f"tcp://127.0.0.1:{free_port()}", block_size=4)
            with Indexer("--peers", one.url, "--cacert", cert) as two:
                wait_until(lambda: len(two.workers()) == 1, what="the peer's registration")
            with Indexer("--peers", one.url) as three:
                time.sleep(0.3)
                equal(three.workers(), [], "without trust")
            for arguments, code in (["--cacert", cert], 0), ([], 1):
                done = subprocess.run([BUILD / "bin" / "kvasir", "top", "--once", "--url", one.url, *arguments], capture_output=True, check=False, timeout=60)
                equal(done.returncode, code, f"kvasir top {arguments}: {done.stderr}")


if __name__ == "__main__":
    run(globals())
