# SPDX-License-Identifier: Apache-2.0
"""kv-indexer --dynamo: workers of a Dynamo deployment appear, publish, lose messages, restart and leave, with discovery in a
folder and in etcd."""
import itertools
import subprocess
import sys
import tempfile
import time

from kvtest import *
from dynamo import Engine, Etcd, Folder, NatsWorker, Worker
from natstest import NatsServer, needs_nats

TOKENS = list(range(1, 17))
MODEL = "m"


def follow(discovery, *args, path=""):
    return Indexer("--dynamo", discovery.where + path, "--block-size", 4, "--model-name", MODEL, *args)


def followed(indexer):
    return sorted((worker["instance_id"], rank) for worker in indexer.workers() for rank in map(int, worker["listeners"]))


def view(indexer, worker, tokens=TOKENS):
    """(tokens in device memory, whole) of a worker; None where the index doesn't know it."""
    answer = indexer.query(tokens, model_name=MODEL, explain=True)
    return answer["scores"].get(str(worker.worker), {}).get(str(worker.dp_rank), 0), answer["explain"]["partial_ranks"] == 0


def connect(indexer, *workers):
    wait_until(lambda: {(w.worker, w.dp_rank) for w in workers} <= set(followed(indexer)), 30, "registrations")
    for worker in workers:
        worker.wait_subscriber()


def wait_view(indexer, worker, wanted, tokens=TOKENS):
    wait_until(lambda: view(indexer, worker, tokens) == wanted, 30,
               lambda: f"{wanted}, not {view(indexer, worker, tokens)}: {indexer.workers()}")


def come_and_go(discovery):
    """Workers before and after the indexer's start; two ranks of one; one leaves."""
    with Worker(discovery) as first, follow(discovery) as indexer:
        connect(indexer, first)
        first.store([1, 2, 3], TOKENS[:12])
        wait_view(indexer, first, (12, True))
        with Worker(discovery, worker=7, number=70) as second, Worker(discovery, worker=7, number=71, rank=1) as other:
            connect(indexer, second, other)
            second.store([-1, -2], TOKENS[:8])
            other.store([5], TOKENS[:4])
            wait_view(indexer, second, (8, True))
            wait_view(indexer, other, (4, True))
            second.remove([-2 & (2**64 - 1)])
            wait_view(indexer, second, (4, True))
            wait_view(indexer, first, (12, True))
        wait_until(lambda: followed(indexer) == [(first.worker, 0)], 30, "two ranks to leave")
        # A registration leaves the list first, its blocks the index next.
        left = {str(first.worker): {"0": 12}}
        wait_until(lambda: indexer.query(TOKENS, model_name=MODEL)["scores"] == left, 30, "the blocks of two ranks to go")


def tiers_and_clears(discovery):
    with Worker(discovery) as worker, follow(discovery) as indexer:
        connect(indexer, worker)
        worker.store([1, 2], TOKENS[:8])
        worker.store([1, 2, 3], TOKENS[:12], tier="host_pinned")
        worker.store([4], TOKENS[12:16], parent=3, tier="disk")
        worker.store([9], [5] * 4, tier="external")

        def reach():
            row = indexer.query(TOKENS, model_name=MODEL)["instances"].get(str(worker.worker), {})
            return row.get("gpu"), row.get("cpu"), row.get("disk")

        wait_until(lambda: reach() == (8, 12, 16), 30, lambda: f"tiers, not {reach()}")
        worker.clear()
        wait_view(indexer, worker, (0, True))
        equal(indexer.query(TOKENS, model_name=MODEL)["scores"], {})


def losses(discovery):
    """A lost message, a gap of event_id alone, and events of others."""
    with Worker(discovery) as worker, follow(discovery) as indexer:
        connect(indexer, worker)
        worker.store([1], TOKENS[:4])
        wait_view(indexer, worker, (4, True))
        worker.store([2], TOKENS[4:8], parent=1, lose=True)
        worker.store([8], [9] * 4)
        wait_view(indexer, worker, (4, False))
        worker.clear()
        wait_view(indexer, worker, (0, True))
        worker.store([1], TOKENS[:4])
        wait_view(indexer, worker, (4, True))
        worker.events += 3  # three events that no message brought
        worker.store([2], TOKENS[4:8], parent=1)
        wait_view(indexer, worker, (8, False))
        worker.clear()
        worker.store([1, 2], TOKENS[:8])
        wait_view(indexer, worker, (8, True))
        other = worker.stored_data([7, 7], TOKENS[:8])
        worker.send_events(worker.event(other, worker=worker.worker + 1, event_id=worker.events))
        worker.send_events(worker.event(other, rank=5, event_id=worker.events))
        worker.store([3], TOKENS[8:12], parent=2)
        wait_view(indexer, worker, (12, True))
        equal(list(indexer.query(TOKENS, model_name=MODEL)["scores"]), [str(worker.worker)])


def stolen_numbers(discovery):
    """Messages of a publisher without a record, at an address of one that has one."""
    with Worker(discovery) as worker, follow(discovery) as indexer:
        connect(indexer, worker)
        worker.send_events(worker.event(worker.stored_data([1, 2], TOKENS[:8])), number=worker.number + 1)
        worker.seq = worker.events = 0
        worker.store([1], TOKENS[:4])
        wait_view(indexer, worker, (4, True))
        check(any("another publisher" in line for line in indexer.log), "the log says so")


def restarts(discovery):
    """A worker that restarts has another publisher, and nothing of what it had; so has one at the same address."""
    with follow(discovery) as indexer, Worker(discovery, worker=7) as before:
        connect(indexer, before)
        before.store([1, 2], TOKENS[:8])
        wait_view(indexer, before, (8, True))
        with Worker(discovery, worker=7) as after:
            after.wait_subscriber(timeout=30)
            after.store([1], TOKENS[:4])
            wait_view(indexer, after, (4, True))
            before.leave()
            wait_view(indexer, after, (4, True))
            after.seq = after.events = 0  # the same publisher begins again
            after.store([1, 2, 3], TOKENS[:12])
            wait_view(indexer, after, (12, True))
            equal(followed(indexer), [(7, 0)])


def late(discovery):
    """An indexer that comes late doesn't know the whole: it says so until a clear."""
    with Worker(discovery) as worker:
        worker.store([1], TOKENS[:4])
        with follow(discovery) as indexer:
            connect(indexer, worker)
            worker.store([2], TOKENS[4:8], parent=1)
            wait_until(lambda: not view(indexer, worker)[1], 30, "a partial view")
            worker.clear()
            worker.store([1, 2], TOKENS[:8])
            wait_view(indexer, worker, (8, True))


def namespaces(etcd):
    with Worker(etcd, namespace="ns1") as here, Worker(etcd, namespace="ns10") as there, follow(etcd, path="/ns1") as indexer:
        connect(indexer, here)
        equal(followed(indexer), [(here.worker, 0)])
        there.announce()
        here.store([1], TOKENS[:4])
        wait_view(indexer, here, (4, True))
        equal(followed(indexer), [(here.worker, 0)])


def etcd_restarts(etcd):
    """Neither a killed etcd nor one that comes back with its data, or with none, loses a block of a live worker."""
    with Worker(etcd, worker=7) as worker, follow(etcd) as indexer:
        connect(indexer, worker)
        worker.store([1, 2], TOKENS[:8])
        wait_view(indexer, worker, (8, True))
        etcd.kill()
        wait_until(lambda: any("discovery can't be reached" in line for line in indexer.log), 30, "the log")
        worker.store([3], TOKENS[8:12], parent=2)
        wait_view(indexer, worker, (12, True))
        etcd.start()
        with Worker(etcd, worker=8) as second:
            connect(indexer, second)
            second.store([1], TOKENS[:4])
            wait_view(indexer, second, (4, True))
            wait_view(indexer, worker, (12, True))
        etcd.kill()
        etcd.forget()
        etcd.start()
        worker.lease = etcd.grant()
        wait_until(lambda: followed(indexer) == [], 30, "a worker without a record to leave")
        worker.announce()
        worker.seen_emptied = worker.emptied
        wait_until(lambda: followed(indexer) == [(7, 0)], 30, "the worker")


def dead_owners(folder):
    """Files that nobody keeps young any more."""
    with Worker(folder) as worker, follow(folder) as indexer:
        connect(indexer, worker)
        folder.abandon()
        wait_until(lambda: followed(indexer) == [], 60, "the worker to leave")
        worker.announce()
        wait_until(lambda: followed(indexer) == [(worker.worker, 0)], 30, "the worker to be back")


def compare(indexer, engine, never_more=False):
    """The indexer's scores are the block manager's own; with @never_more: none is above."""
    wrong = []
    for blocks, tokens in engine.prompts():
        got = indexer.score(tokens, engine.worker, engine.dp_rank, model_name=MODEL)
        if got > 4 * blocks or (got < 4 * blocks and not never_more):
            wrong.append((got, 4 * blocks))
    return wrong


def wait_heard(indexer, engine):
    """Until events of a block manager arrive: what its socket sent before it knew of the subscription is lost for good."""
    marks = itertools.count(1)

    def heard():
        tokens = list(map(int, engine.ask(f"mark {next(marks)}")[0].split()))
        engine.ask("flush")
        time.sleep(0.05)
        return indexer.score(tokens, engine.worker, engine.dp_rank, model_name=MODEL) == 4

    wait_until(heard, 30, "events")


def block_manager(discovery, plane="zmq", *args):
    """A block manager's sink beside kv-indexer: equal through stores, evictions and resets; after losses never more."""
    with follow(discovery, *args) as indexer, Engine(discovery, 77, rank=2, plane=plane) as engine:
        wait_until(lambda: followed(indexer) == [(77, 2)], 30, "the block manager")
        wait_heard(indexer, engine)
        for seed in range(4):
            engine.ask(f"run {seed} 400")
            engine.ask("flush")
            wait_until(lambda: compare(indexer, engine) == [], 30, "equal scores")
        engine.ask("reset")
        engine.ask("flush")
        wait_until(lambda: compare(indexer, engine) == [], 30, "nothing")
        equal(engine.sink()["losses"], 0)
    with follow(discovery, *args) as indexer, Engine(discovery, 78, queue=4096, plane=plane) as engine:
        wait_until(lambda: followed(indexer) == [(78, 0)], 30, "the block manager")
        wait_heard(indexer, engine)
        for seed in range(4):
            engine.ask(f"run {seed} 4000")
            engine.ask("flush")
            wait_until(lambda: compare(indexer, engine, never_more=True) == [], 30, "no score above the block manager's")
        check(engine.sink()["losses"] > 0, "the queue had no room for all")
        if plane == "zmq":
            engine.kill()
            wait_until(lambda: followed(indexer) == [], 60, "a killed block manager to leave")


def test_folder():
    for case in (come_and_go, tiers_and_clears, losses, stolen_numbers, restarts, late, dead_owners, block_manager):
        with Folder() as folder:
            case(folder)


def test_etcd():
    with Etcd() as etcd:
        for case in (come_and_go, restarts, namespaces, block_manager, etcd_restarts):
            case(etcd)


def listener(indexer, worker):
    return next(w for w in indexer.workers() if w["instance_id"] == worker.worker)["listeners"][str(worker.dp_rank)]


def nats_come_and_go(discovery, server, *args):
    """Two ranks on NATS and one worker on ZMQ; a publisher without a record, and events that its record doesn't cover."""
    with follow(discovery, *args) as indexer, NatsWorker(discovery, server, worker=7, number=70) as first, \
            NatsWorker(discovery, server, worker=7, number=71, rank=1) as second, Worker(discovery) as other:
        connect(indexer, other)
        wait_until(lambda: len(followed(indexer)) == 3, 30, "registrations")
        server.wait_subscribed("namespace.")
        first.store([1, 2, 3], TOKENS[:12])
        second.store([5], TOKENS[:4])
        other.store([1], TOKENS[:4])
        wait_view(indexer, other, (4, True))
        wait_view(indexer, first, (12, True))
        wait_view(indexer, second, (4, True))
        first.send_events(first.event(first.stored_data([8], [9] * 4)), number=99)
        first.seq, first.events = first.seq - 1, first.events - 1
        first.send_events(first.event(first.stored_data([9], TOKENS[12:]), worker=8, event_id=first.events))
        first.remove([3])
        wait_view(indexer, first, (8, True))
        metrics = {name: indexer.metrics()[f'kv_indexer_dynamo_nats_{name}{{source="{discovery.where}"}}']
                   for name in ("up", "messages_total", "strangers_total", "bad_messages_total", "connections_total")}
        equal(list(metrics.values()), [1, 4, 1, 0, 1], str(metrics))
        second.leave()
        wait_until(lambda: followed(indexer) == sorted([(7, 0), (other.worker, 0)]), 30, "a rank to leave")


def nats_losses(discovery, server, *args):
    """A lost message; a server that is away while messages are, or aren't, published; a worker that restarts."""
    with follow(discovery, *args, "--stale-after", "300ms") as indexer, NatsWorker(discovery, server, worker=7) as worker:
        wait_until(lambda: followed(indexer) == [(7, 0)], 30, "the worker")
        server.wait_subscribed("namespace.")
        worker.store([1], TOKENS[:4])
        wait_view(indexer, worker, (4, True))
        worker.store([2], TOKENS[4:8], parent=1, lose=True)
        worker.store([8], [9] * 4)
        wait_view(indexer, worker, (4, False))
        worker.clear()
        worker.store([1], TOKENS[:4])
        wait_view(indexer, worker, (4, True))
        for lost in False, True:
            server.stop()
            wait_until(lambda: "stale" in listener(indexer, worker).get("partial_reasons", []), 30, "a stale view")
            if lost:
                worker.store([3], TOKENS[8:12], parent=2, lose=True)
            server.start()
            worker.reconnect(server)
            wait_until(lambda: listener(indexer, worker)["status"] == "active", 30, "the connection")
            server.wait_subscribed("namespace.")
            wait_view(indexer, worker, (4, False))  # nobody knows yet whether a message was lost

            def heard():
                worker.store([50], [9] * 4)
                reasons = listener(indexer, worker).get("partial_reasons", [])
                return "reconnected" not in reasons and ("missed_batches" in reasons) == lost

            wait_until(heard, 30, "the next message to tell", interval=0.1)
        with NatsWorker(discovery, server, worker=7) as after:
            wait_until(lambda: view(indexer, after) == (0, False), 30, "the registration of another process")
            after.store([1, 2], TOKENS[:8])
            wait_view(indexer, after, (8, True))


def test_nats():
    needs_nats()
    with Folder() as folder, tempfile.NamedTemporaryFile("w") as password:
        password.write("secret\n")
        password.flush()

        def follows(server):
            return "--dynamo-nats", server.url, "--nats-user", "dynamo", "--nats-password-file", password.name

        for case in nats_come_and_go, nats_losses:  # a server each: none has subscriptions of an indexer before
            with NatsServer(login=("dynamo", "secret")) as server:
                case(folder, server, *follows(server))
        with NatsServer(login=("dynamo", "secret")) as server:
            block_manager(folder, server.url.replace("//", "//dynamo:secret@"), *follows(server))
            with follow(folder) as indexer, NatsWorker(folder, server):
                wait_until(lambda: any("--dynamo-nats" in line for line in indexer.log), 30, "the log to tell what is missing")
                equal(followed(indexer), [])


def refuses_strangers(password):
    with Etcd() as etcd:
        etcd.protect("secret")
        with Worker(etcd) as worker, follow(etcd, path=f"/ns1?user=root&password-file={password}") as indexer:
            connect(indexer, worker)
        with Worker(etcd) as worker, follow(etcd) as indexer:
            wait_until(lambda: any("discovery can't be reached" in line for line in indexer.log), 30, "a refusal")
            equal(followed(indexer), [])


def test_etcd_credentials():
    """User and password; certificates of both sides."""
    folder = tempfile.TemporaryDirectory(prefix="kvasir-etcd-")
    password = f"{folder.name}/password"
    with open(password, "w", encoding="utf-8") as file:
        file.write("secret\n")
    with folder:
        refuses_strangers(password)
        cert, key = make_certificate(folder.name)
        with Etcd((cert, key)) as etcd, Worker(etcd) as worker, follow(etcd, path=f"?ca={cert}&cert={cert}&key={key}") as indexer:
            connect(indexer, worker)


def test_options():
    def refused(wanted, *args):
        done = subprocess.run([str(BUILD / "bin" / "kv-indexer"), "--port", "0", *args], capture_output=True, text=True, timeout=60)
        equal(done.returncode != 0 and wanted in done.stderr, True, f"{args}: {done.stderr!r}")

    refused("--block-size is required when --dynamo is specified", "--dynamo", "file:///tmp")
    refused("neither etcd://HOST:PORT[/NAMESPACE] nor file:///FOLDER", "--dynamo", "consul://a:1", "--block-size", "4")
    refused("--dynamo-nats needs --dynamo", "--dynamo-nats", "nats://a:1", "--block-size", "4")
    refused("user and password-file go together", "--dynamo", "etcd://a:1?user=root", "--block-size", "4")
    refused("expected user=NAME", "--dynamo", "etcd://a:1?users=root", "--block-size", "4")
    refused("the path is not", "--dynamo", "etcd://a:1/a/b/c/d", "--block-size", "4")


if __name__ == "__main__":
    sys.exit(run(globals()))
