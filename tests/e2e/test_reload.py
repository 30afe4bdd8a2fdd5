# SPDX-License-Identifier: Apache-2.0
"""SIGHUP reads the configuration file again: workers and log level change, what needs a restart is named."""
import os
import signal
import tempfile

from kvtest import *
from dynamo import Folder, Worker
from natstest import needs_nats
import streams

TOKENS = list(range(16))


def hup(indexer, wanted="configuration read again"):
    before = len(indexer.log)
    indexer.process.send_signal(signal.SIGHUP)
    wait_until(lambda: any(wanted in line for line in indexer.log[before:]), 10, wanted)
    return "\n".join(indexer.log[before:])


def found(indexer):
    return {(worker["instance_id"], worker["model_name"], int(rank)): listener["endpoint"]
            for worker in indexer.workers() for rank, listener in worker["listeners"].items()}


def test_reload():
    with tempfile.TemporaryDirectory() as folder, Publisher() as kept, Publisher() as moved, Publisher() as other:
        path = os.path.join(folder, "conf")

        def write(text):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)

        write(f"log-level = info\n[m]\nblock-size = 16\nworkers = 1={kept.endpoint}\nworkers = 2={moved.endpoint},3={moved.endpoint}\n")
        with Indexer("--config", path, "--threads", 2) as indexer:
            kept.wait_subscriber()
            kept.store([11], TOKENS)
            indexer.wait_score(TOKENS, 1, 16)
            indexer.register(9, other)  # a client's: no file tells of it
            said = hup(indexer)
            check("registered=0" in said and "unregistered=0" in said and "restart" not in said, said)

            write(f"log-level = debug\nmax-body = 1MiB\nthreads = 7\n[m]\nblock-size = 16\nworkers = 1={kept.endpoint}\n"
                  f"workers = 2={other.endpoint}\n[n]\nblock-size = 32\nworkers = 4:1={moved.endpoint}\n")
            said = hup(indexer, "need a restart")
            check("registered=2" in said and "unregistered=2" in said and "log_level=debug" in said, said)
            check("--max-body" in said and "--threads" not in said.split("need a restart")[1], said)  # the command line has that one
            equal(found(indexer), {(1, "m", 0): kept.endpoint, (2, "m", 0): other.endpoint, (4, "n", 1): moved.endpoint, (9, "m", 0): other.endpoint})
            equal(indexer.score(TOKENS, 1), 16)  # its stream went on
            equal(streams.stream(indexer, "batches_total"), 1)
            other.wait_subscriber(2)
            other.store([12], TOKENS)
            indexer.wait_score(TOKENS, 2, 16)
            wait_until(lambda: any("level=debug" in line for line in indexer.log), 10, "a line of the new level")

            write("[m]\nblock-size = 16\nworkers = 1=nonsense\n")
            said = hup(indexer, "not read again")
            check("1=nonsense" in said, said)
            write("port = 1\nport = 2\n")
            said = hup(indexer, "not read again")
            check("given on line 1" in said, said)
            equal(len(found(indexer)), 4)
            os.unlink(path)
            hup(indexer, "not read again")

            write("")
            hup(indexer)
            equal(found(indexer), {(9, "m", 0): other.endpoint})
            equal(indexer.query(TOKENS)["scores"], {"9": {"0": 16}})


def test_what_is_refused_changes_nothing():
    """A worker listed twice, in two models, of two block sizes, or at an endpoint that isn't allowed: the old ones stay."""
    with tempfile.TemporaryDirectory() as folder, Publisher() as engine:
        path = os.path.join(folder, "conf")

        def write(text):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)

        good = f"[m]\nblock-size = 16\nworkers = 1={engine.endpoint}\n"
        write(good)
        with Indexer("--config", path, "--allow-endpoint", "tcp://127.0.0.1") as indexer:
            engine.wait_subscriber()
            engine.store([11], TOKENS)
            indexer.wait_score(TOKENS, 1, 16)
            for wrong, why in (("[m]\nblock-size = 16\nworkers = 1=tcp://10.0.0.1:5557\n", "not allowed"),
                               (good + "workers = 1=tcp://127.0.0.1:1\n", "listed twice"),
                               ("[n]\nblock-size = 16\nworkers = 1:1=tcp://127.0.0.1:1\n" + good, "model=n and model=m"),
                               ("[m]\nblock-size = 32\nworkers = 2=tcp://127.0.0.1:1\n" + good, "32 and 16")):
                write(wrong)
                said = hup(indexer, "not read again")
                check(why in said, said)
                equal(found(indexer), {(1, "m", 0): engine.endpoint})
                equal(indexer.score(TOKENS, 1), 16)
            indexer.unregister(1)
            indexer.register(1, "tcp://127.0.0.1:2")  # a client's now, of which the file tells nothing
            write("")
            check("unregistered=0" in hup(indexer))
            equal(found(indexer), {(1, "m", 0): "tcp://127.0.0.1:2"})


def test_sources():
    """Sources that stay, come, leave, or are of another block size; one that is wrong; a Dynamo deployment. Streams of the rest go on."""
    with tempfile.TemporaryDirectory() as folder, Publisher() as one, Publisher() as two, Folder() as dynamo, Worker(dynamo, worker=7) as worker:
        path, sources = f"{folder}/conf", {}

        def source(name, *lines):
            sources[name] = f"discover = file:{folder}/{name}\n"
            with open(f"{folder}/{name}", "w", encoding="utf-8") as file:
                file.write("".join(f"{instance}={engine.endpoint}\n" for instance, engine in lines))

        def write(*parts, block_size=16):
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"discover-grace = 1s\n[{MODEL}]\nblock-size = {block_size}\n{''.join(parts)}")

        def wait_workers(*wanted):
            wait_until(lambda: {name for name, _, _ in found(indexer)} == set(wanted), 30, f"{wanted}, not {found(indexer)}")

        def read_again():
            said = hup(indexer)
            check("restart" not in said and "error" not in said, said)

        source("a", (1, one))
        source("b", (1, one), (2, two))
        write("workers = 9=tcp://127.0.0.1:1\n")
        with Indexer("--config", path) as indexer:
            equal(indexer.get("/discovery").json(), [])
            write(sources["a"])  # the first source of all
            read_again()
            wait_workers(1)
            one.wait_subscriber()
            one.store([11], TOKENS)
            indexer.wait_score(TOKENS, 1, 16)
            write(sources["a"], sources["b"])
            read_again()
            wait_workers(1, 2)
            write(sources["b"], f"dynamo = {dynamo.where}\n")  # which names 1, too
            read_again()
            wait_workers(1, 2, 7)
            equal([row["source"] for row in indexer.get("/discovery").json()], [f"file:{folder}/b", dynamo.where])
            write(f"dynamo = {dynamo.where}\n", "discover = file:\n")
            check("discover" in hup(indexer, "not read again"))
            equal(indexer.query(TOKENS)["scores"], {"1": {"0": 16}})
            equal(streams.stream(indexer, "batches_total"), 1)  # the stream of 1 has gone on since its first batch
            write(sources["b"], f"dynamo = {dynamo.where}\n", block_size=8)  # workers that are told otherwise are registered anew
            read_again()
            wait_until(lambda: [w["block_size"] for w in indexer.workers()] == [8] * 3, 30, "another block size")
            write("")
            read_again()
            wait_workers()


def test_nats_needs_a_restart():
    """The server, and what its workers take from the options: the log names them, and nothing else."""
    needs_nats()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/conf"

        def write(port, block_size):
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"nats = nats://127.0.0.1:{port}\nblock-size = {block_size}\n")

        write(1, 16)
        with Indexer("--config", path) as indexer:
            check("restart" not in hup(indexer))
            write(2, 16)
            check("options=--nats" in hup(indexer, "need a restart"))
            write(1, 32)
            check("options=--block-size" in hup(indexer, "need a restart"))


def test_without_a_file():
    with Publisher() as engine, Indexer("--block-size", 16, "--model-name", MODEL, "--workers", f"1={engine.endpoint}") as indexer:
        engine.wait_subscriber()
        engine.store([11], TOKENS)
        indexer.wait_score(TOKENS, 1, 16)
        indexer.unregister(1)  # by a client: it stays so
        said = hup(indexer)
        check("registered=0" in said and "restart" not in said, said)
        equal(indexer.workers(), [])


if __name__ == "__main__":
    run(globals())
