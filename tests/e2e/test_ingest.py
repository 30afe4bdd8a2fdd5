# SPDX-License-Identifier: Apache-2.0
"""Event streams from ZMQ to /query: gaps, replays, restarts, ranks, registrations."""
import contextlib
import socket
import struct
import threading

from kvtest import *
from streams import *


def test_map_and_array_events():
    for encoding, threads in ("map", 4), ("array", 1):
        with Indexer("--threads", threads) as indexer, Publisher(encoding=encoding) as engine:
            register(indexer, 1, engine)
            store(engine, 1, 5)
            store(engine, 1, 5, first=5)
            holds(indexer, 1, 10)
            engine.remove(names(1, 2, 8))
            holds(indexer, 1, 8)
            engine.clear()
            indexer.wait_score(prompt(1, 10), 1, 0)
            equal(listener(indexer)["status"], "active")
            equal(listener(indexer)["last_seq"], 3)


def test_topics_are_all_followed():
    with Indexer() as indexer, Publisher(topic=b"kv@pod-1@m") as engine:
        register(indexer, 1, engine)
        store(engine, 1, 3)
        holds(indexer, 1, 3)


def test_gap_with_replay_in_both_framings():
    for framing in "topic", "plain":
        with Indexer() as indexer, Publisher(replay=framing) as engine:
            register(indexer, 1, engine)
            store(engine, 1, 2)
            holds(indexer, 1, 2)
            for first in 2, 4, 6:
                store(engine, 1, 2, first=first, lose=True)
            for first in range(8, 40, 2):
                store(engine, 1, 2, first=first)
            holds(indexer, 1, 40)
            equal(stream(indexer, "gaps_total"), 1, "gaps")
            # The first may have come with the answer to the question that a new connection asks.
            check(stream(indexer, "replayed_batches_total") in (3, 4), "replayed")
            equal(stream(indexer, "missed_batches_total"), 0, "missed")
            equal(stream(indexer, "batches_total"), 20, "each batch once")
            check(1 <= engine.replays <= 2)
            equal(listener(indexer)["partial"], False)


def test_gap_without_replay_is_told():
    with Indexer() as indexer, Publisher(replay=None) as engine:
        register(indexer, 1, engine)
        store(engine, 1, 2)
        store(engine, 2, 2, lose=True)
        store(engine, 3, 2)
        holds(indexer, 3, 2)
        equal(indexer.score(prompt(2, 2), 1), 0)
        equal(stream(indexer, "missed_batches_total"), 1)
        equal(listener(indexer)["partial"], True)
        wait_until(lambda: any("missing" in line for line in indexer.log), what="a warning in the log")
        engine.clear()  # an empty cache is known completely
        wait_until(lambda: not listener(indexer)["partial"], what="whole again")


def test_a_clear_does_not_tell_of_lower_tiers():
    """vLLM's clear empties the device. Lost batches may have been about a tier below."""
    def after(event):
        engine.send(event)
        wait_until(lambda: last_seq(indexer) == engine.seq - 1, what="the batch")
        return listener(indexer)["partial"]

    def below(number, **extra):
        return engine.stored(names(number, 2), prompt(number, 2), block_size=BS, medium="CPU", **extra)

    for extra in {}, {"ownership": "mooncake"}:
        with Indexer() as indexer, Publisher(replay=None) as engine:
            register(indexer, 1, engine)
            equal(after(engine.stored(names(1, 2), prompt(1, 2), block_size=BS)), False)
            engine.send(below(1, **extra), lose=True)
            equal(after(engine.stored(names(2, 2), prompt(2, 2), block_size=BS)), True)
            equal(after(engine.cleared()), False, "partial, of an engine without lower tiers")
            equal(after(below(3, **extra)), True, "partial, of one that may have had them before")
            equal(after(engine.cleared()), True)
            engine.restart()
            equal(after(below(1, **extra)), False)
            engine.send(below(2, **extra), lose=True)
            equal(after(engine.cleared()), True)


def test_initial_gap():
    with Indexer() as indexer, Publisher() as whole, Publisher(replay=None) as rest:
        for engine in whole, rest:
            store(engine, 1, 2)
            store(engine, 1, 2, first=2)
        register(indexer, 1, whole)
        register(indexer, 2, rest)
        for engine in whole, rest:
            store(engine, 1, 2, first=4)
            store(engine, 2, 2)
        holds(indexer, 1, 6, instance=1)
        holds(indexer, 2, 2, instance=2)
        equal(indexer.score(prompt(1, 6), 2), 0, "blocks whose beginning was never seen")
        equal(listener(indexer, 1)["partial"], False)
        equal(listener(indexer, 2)["partial"], True)
        equal(stream(indexer, "orphans_total", 2), 1)


def test_numbering_from_one():
    """As the Mooncake master and llm-d's simulator number. The first batch is whole once something shows that there was no 0."""
    with Indexer() as indexer, Publisher(first=1, replay=None) as silent, Publisher(first=1, replay=None, milliseconds=True) as master, \
            Publisher(first=1) as late, Publisher() as lossy, Publisher(ring=3) as moved:
        for instance, engine in enumerate((silent, master), 1):
            register(indexer, instance, engine)
            store(engine, 1, 2)
            holds(indexer, 1, 2, instance=instance)
        equal(listener(indexer, 1)["partial"], True, "without a replay service nobody knows")
        equal(listener(indexer, 2)["partial"], False, "only the Mooncake master counts milliseconds")
        silent.send(silent.cleared())
        wait_until(lambda: not listener(indexer, 1)["partial"], 10, "a cleared cache to be whole")
        store(late, 1, 2)
        register(indexer, 3, late)
        store(late, 1, 2, first=2)
        holds(indexer, 1, 4, instance=3)
        store(lossy, 1, 2)
        register(indexer, 4, lossy)
        store(lossy, 1, 2, first=2)
        holds(indexer, 1, 4, instance=4)
        equal(listener(indexer, 4)["partial"], False)
        for number in range(4):
            store(moved, 10 + number, 2)
        register(indexer, 5, moved)
        holds(indexer, 13, 2, instance=5)
        equal(indexer.score(prompt(10, 2), 5), 0, "batch 0, which the ring has lost")
        grows = iter(range(100, 10000))

        def proved():
            store(late, next(grows), 1)
            return not listener(indexer, 3)["partial"]

        wait_until(proved, 20, "a ring that still begins with 1 to prove it")
        asked = moved.replays
        store(moved, 20, 2)
        wait_until(lambda: moved.replays > asked, 20, "the ring to be asked what it begins with now")
        store(moved, 21, 2)
        holds(indexer, 21, 2, instance=5)
        equal(listener(indexer, 5)["partial"], True, "a full ring proves nothing")


def test_silent_engine_is_asked():
    """What an idle engine has cached is known before it says anything."""
    with Indexer() as indexer, Publisher() as engine:
        store_all(engine, range(1, 20), 2)
        register(indexer, 1, engine)
        holds_all(indexer, range(1, 20), 2)


def test_overrun_of_the_ring():
    with Indexer() as indexer, Publisher(ring=3) as engine:
        register(indexer, 1, engine)
        store(engine, 1, 2)
        holds(indexer, 1, 2)
        for number in range(2, 10):
            store(engine, number, 2, lose=True)
        store(engine, 10, 2)
        holds(indexer, 10, 2)
        holds(indexer, 9, 2)
        equal(indexer.score(prompt(1, 2), 1), 0, "the state before the hole is unknown")
        equal(stream(indexer, "overruns_total"), 1)
        equal(stream(indexer, "missed_batches_total"), 6)
        equal(listener(indexer)["partial"], True)


def test_dead_replay_service():
    with Indexer("--replay-timeout", "300ms") as indexer, Publisher(replay=None) as engine:
        indexer.register(1, engine.endpoint, block_size=BS, replay_endpoint=f"tcp://127.0.0.1:{free_port()}")
        engine.wait_subscriber()
        store(engine, 1, 2)
        store(engine, 2, 2, lose=True)
        store(engine, 3, 2)
        holds(indexer, 3, 2)
        failed = time.monotonic()
        equal(stream(indexer, "failed_replays_total"), 1)
        check(3 <= stream(indexer, "replays_total") <= 5)  # the gap's, and those of the new connection
        store(engine, 4, 2, lose=True)
        asked = stream(indexer, "replays_total")
        store(engine, 5, 2)  # at once: it isn't asked again so soon
        holds(indexer, 5, 2)
        if time.monotonic() - failed < 25:  # seconds, of 30
            equal(stream(indexer, "replays_total"), asked)
        equal(listener(indexer)["partial"], True)


def test_message_over_the_limit():
    """libzmq ends such a connection for good. It is made anew, each time, and the gap is told."""
    with Indexer("--replay-timeout", "300ms") as indexer, Publisher(replay=None) as engine, Publisher() as other:
        register(indexer, 1, engine)
        register(indexer, 2, other)
        store(engine, 1, 2)
        store(other, 1, 2)
        holds(indexer, 1, 2)
        for number in 2, 3:
            engine.send_raw(b"\xc0" * (70 << 20), keep=False)
            engine.wait_no_subscriber(30)
            engine.wait_subscriber(timeout=30)
            store(engine, number, 2)
            holds(indexer, number, 2)
            equal(stream(indexer, "reopened_total"), number - 1)
            equal(stream(indexer, "missed_batches_total"), number - 1)
        state = listener(indexer)
        equal((state["status"], state["connected"], state["partial"]), ("active", True, True))
        check("last_error" not in state, state)
        other.send_raw(b"\xc0" * (70 << 20), keep=False)  # with a replay service, which has not kept it
        other.wait_no_subscriber(30)
        store(other, 2, 2, lose=True)
        other.wait_subscriber(timeout=30)
        store(other, 3, 2)
        for number in 2, 3:
            holds(indexer, number, 2, instance=2)


def greet_wrongly(server):
    """ZMTP 3 with a security mechanism that nobody has, for everybody who connects."""
    peers = []
    while True:
        try:
            peer, _ = server.accept()
            peer.sendall(b"\xff" + b"\0" * 8 + b"\x7f\3\0" + b"BOGUS".ljust(20, b"\0") + b"\0" * 32)
            peers.append(peer)
        except OSError:
            if server.fileno() < 0:
                return


def test_what_is_known_of_connections():
    """Nobody there, a name that is none, peers that say nothing or nonsense; and one that comes and goes."""
    silent, wrong = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=greet_wrongly, args=(wrong,), daemon=True).start()
    port = free_port()
    with Indexer() as indexer:
        indexer.register(1, f"tcp://127.0.0.1:{port}", block_size=BS)
        indexer.register(2, "tcp://no-such-host.invalid:5557", block_size=BS)
        indexer.register(3, f"tcp://127.0.0.1:{silent.getsockname()[1]}", block_size=BS)
        indexer.register(4, f"tcp://127.0.0.1:{wrong.getsockname()[1]}", block_size=BS)
        wait_until(lambda: "no answer" in listener(indexer, 1)["last_error"], what="nobody there")
        wait_until(lambda: "resolve" in listener(indexer, 2)["last_error"], 30, "a wrong name")
        for instance in 1, 2:
            equal(listener(indexer, instance)["status"], "failed")
        equal(listener(indexer, 3)["status"], "pending", "it listens, but says nothing")
        for instance in range(1, 5):
            equal(listener(indexer, instance)["connected"], False)
        wait_until(lambda: stream(indexer, "reopened_total", 4) >= 2, 30, "another try where nonsense is spoken")
        with Publisher(endpoint=f"tcp://127.0.0.1:{port}") as engine:
            store(engine, 1, 2)
            wait_until(lambda: listener(indexer, 1)["connected"], 30, "a connection")
            equal(listener(indexer, 1)["status"], "active")
            check("last_error" not in listener(indexer, 1))
        wait_until(lambda: listener(indexer, 1)["status"] == "failed", 30, "the end of it")
        equal(listener(indexer, 1)["connected"], False)
    silent.close()
    wrong.shutdown(socket.SHUT_RDWR)
    wrong.close()


def told(indexer, text):
    return sum(text in line for line in list(indexer.log))


def test_connections_are_logged_once():
    """A line when a worker is registered, connects, is lost, never answers, is unregistered; and no second one."""
    engine = Publisher()
    with Indexer() as indexer:
        indexer.register(1, engine, block_size=4)
        indexer.register(2, f"tcp://127.0.0.1:{free_port()}", block_size=4)
        wait_until(lambda: told(indexer, "connected to a worker") == 1, what="a line about the connection")
        wait_until(lambda: told(indexer, "does not answer") == 1, 30, "a line about the dead worker")
        engine.close()
        wait_until(lambda: told(indexer, "lost a worker's connection") == 1, 30, "a line about the loss")
        indexer.unregister(1)
        wait_until(lambda: told(indexer, "worker unregistered") == 1, what="a line about the end")
        time.sleep(1)
        equal(told(indexer, "worker registered"), 2)
        equal(told(indexer, "does not answer"), 1)
        equal(told(indexer, "lost a worker's connection"), 1)


def test_replies_that_make_no_sense():
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        with Indexer("--replay-timeout", "500ms") as indexer, Publisher(replay=None) as engine:
            indexer.register(1, engine.endpoint, block_size=BS, replay_endpoint=f"tcp://127.0.0.1:{port}")
            engine.wait_subscriber()
            router.recv_multipart()  # by the new connection
            store(engine, 1, 2)
            holds(indexer, 1, 2)
            store(engine, 2, 2, lose=True)
            store(engine, 3, 2)
            for reply in [b""], [b"", b"short", b"x"], [b""] * 9:
                check(router.poll(10000 * SLOW), "no request")
                peer, empty, start = router.recv_multipart()
                check(len(empty) == 0 and len(start) == 8, "a request of another shape")
                router.send_multipart([peer, *reply])
            holds(indexer, 3, 2)
            check(stream(indexer, "malformed_total") >= 3)
    finally:
        router.close()
        context.term()


def test_restart_of_an_idle_engine():
    """Killed and back on the same ports, it publishes nothing: what the old process had is forgotten all the same."""
    with Indexer() as indexer:
        with Publisher() as engine, Publisher(replay=None) as bare:
            register(indexer, 1, engine)
            register(indexer, 2, bare)
            for instance, publisher in (1, engine), (2, bare):
                store_all(publisher, range(1, 30), 2)
                holds(indexer, 29, 2, instance=instance)
                equal(listener(indexer, instance)["partial"], False)
        with Publisher(endpoint=engine.endpoint, replay_endpoint=engine.replay_endpoint), \
                Publisher(replay=None, endpoint=bare.endpoint) as bare:
            indexer.wait_score(prompt(29, 2), 1, 0, timeout=20)
            equal(stream(indexer, "restarts_total"), 1)
            # A connection that breaks once more while the new process starts is asked about anew.
            wait_until(lambda: not listener(indexer, 1)["partial"], 20, "a whole view")
            # Nobody can be asked here: what is known is partial until the stream speaks.
            wait_until(lambda: listener(indexer, 2)["partial"], 20, "a partial view")
            bare.wait_subscriber()
            store(bare, 100, 2)
            holds(indexer, 100, 2, instance=2)
            equal(indexer.score(prompt(29, 2), 2), 0)
            equal(listener(indexer, 2)["partial"], False)


def test_indexer_first():
    """Nobody is asked before the engine is there; then its lost beginning is asked for at once."""
    endpoint, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    with Indexer("--replay-timeout", "200ms") as indexer:
        indexer.register(1, endpoint, block_size=BS, replay_endpoint=replay)
        time.sleep(7)  # longer than a silent stream's patience
        equal(stream(indexer, "replays_total"), 0)
        equal(stream(indexer, "failed_replays_total"), 0)
        with Publisher(endpoint=endpoint, replay_endpoint=replay) as engine:
            store(engine, 1, 2, lose=True)
            holds(indexer, 1, 2, timeout=12)
            equal(listener(indexer)["partial"], False)


def test_restart_forgets_what_the_old_process_had():
    with Indexer() as indexer, Publisher() as engine:
        register(indexer, 1, engine)
        store_all(engine, range(1, 30), 2)
        holds(indexer, 29, 2)
        engine.restart()
        store_all(engine, range(101, 111), 2)
        holds(indexer, 110, 2)
        for number in range(1, 30):
            equal(indexer.score(prompt(number, 2), 1), 0)
        engine.restart()
        for number in range(201, 206):
            store(engine, number, 2, lose=number < 204)  # the first three lost to slow joining
        holds_all(indexer, range(201, 206), 2)
        equal(indexer.score(prompt(101, 2), 1), 0)
        equal(stream(indexer, "restarts_total"), 2)
        equal(listener(indexer)["partial"], False)


def test_duplicates_and_old_batches_change_nothing():
    with Indexer() as indexer, Publisher(replay=None) as engine:
        register(indexer, 1, engine)
        payloads = [engine.batch([engine.stored(names(n, 2), prompt(n, 2), block_size=BS)]) for n in range(1, 400)]
        for payload in payloads:
            engine.send_raw(payload)
        holds(indexer, 399, 2)
        engine.remove(names(5, 2))
        indexer.wait_score(prompt(5, 2), 1, 0)
        for seq in 4, 390:  # long gone, and a moment ago
            engine.send_frames(b"", struct.pack(">Q", seq), payloads[seq])
        store(engine, 500, 2)
        holds(indexer, 500, 2)
        equal(indexer.score(prompt(5, 2), 1), 0, "a replayed store")
        equal(stream(indexer, "duplicates_total"), 2)
        equal(stream(indexer, "restarts_total"), 0)


def test_junk_on_the_socket():
    with Indexer() as indexer, Publisher(replay=None) as engine:
        register(indexer, 1, engine)
        store(engine, 1, 2)
        engine.send_frames(b"one frame")
        engine.send_frames(b"", b"no sequence", b"x")
        engine.send_frames(*[b"f"] * 20)
        engine.send_raw(b"\xc1\xc1\xc1")
        engine.send_raw(b"")
        engine.send_raw(b"\xdd\xff\xff\xff\xff")
        store(engine, 2, 2)
        holds(indexer, 2, 2)
        equal(stream(indexer, "malformed_total"), 6)
        equal(stream(indexer, "gaps_total"), 0)


def test_ranks_multiplexed_on_one_port():
    with Indexer() as indexer, Publisher() as engine:
        register(indexer, 1, engine)
        for number, rank in (1, None), (2, 0), (3, 1), (4, 7):
            store(engine, number, 2, rank=rank)
        for number, rank in (1, 0), (2, 0), (3, 1), (4, 7):
            holds(indexer, number, 2, rank=rank)
        engine.clear(rank=1)
        indexer.wait_score(prompt(3, 2), 1, 0, rank=1)
        equal(indexer.score(prompt(4, 2), 1, 7), 8, "another rank's blocks")
        indexer.unregister(1, expect=404, dp_rank=7, tenant_id="default")  # never registered
        indexer.unregister(1)
        indexer.query(prompt(4, 2), expect=404)


def test_a_registration_per_rank():
    with Indexer() as indexer, Publisher() as zero, Publisher() as one:
        register(indexer, 1, zero, dp_rank=0)
        register(indexer, 1, one, dp_rank=1)
        store(zero, 1, 3)
        store(one, 1, 2)
        holds(indexer, 1, 3, rank=0)
        indexer.wait_score(prompt(1, 3), 1, 2 * BS, rank=1)
        indexer.unregister(1, dp_rank=1, tenant_id="default")
        indexer.wait_score(prompt(1, 3), 1, 0, rank=1)
        equal(indexer.score(prompt(1, 3), 1, 0), 3 * BS)


def test_a_restart_or_clear_takes_a_siblings_blocks_of_the_same_rank():
    """Two streams of an instance name rank 5. When one's engine starts over or clears it, the other's blocks leave, too, and its view says so."""
    for what in "restart", "clear":
        with Indexer() as indexer, Publisher() as zero, Publisher() as one, Publisher() as two:
            for rank, engine in enumerate((zero, one, two)):
                register(indexer, 1, engine, dp_rank=rank)
            for number, engine, rank in (1, zero, 5), (2, one, 5), (3, two, 2):
                store(engine, number, 2, rank=rank)
                holds(indexer, number, 2, rank=rank)
            equal([listener(indexer, 1, rank)["partial"] for rank in range(3)], [False] * 3)
            if what == "restart":
                zero.restart()
            else:
                zero.clear(rank=5)
            store(zero, 4, 2, rank=5)
            holds(indexer, 4, 2, rank=5)
            equal(indexer.score(prompt(2, 2), 1, 5), 0)
            wait_until(lambda: listener(indexer, 1, 1)["partial"], what="a view that lost blocks to be partial")
            equal([listener(indexer, 1, rank)["partial"] for rank in (0, 2)], [False] * 2)


def test_two_registrations_of_one_endpoint():
    """Both streams get the same events: when the engine starts over, nothing is missing behind it."""
    with Indexer() as indexer, Publisher() as engine:
        for rank in range(2):
            register(indexer, 1, engine, dp_rank=rank)
        for rank in range(2):
            store(engine, 1 + rank, 2, rank=rank)
        engine.restart()
        for rank in range(2):
            store(engine, 11 + rank, 2, rank=rank)
        for rank in range(2):
            holds(indexer, 11 + rank, 2, rank=rank)
        wait_until(lambda: [stream(indexer, "last_seq", 1, rank) for rank in range(2)] == [1, 1], what="both to have read all")
        equal([listener(indexer, 1, rank)["partial"] for rank in range(2)], [False] * 2)


def partial_behind(indexer, engine):
    wait_until(lambda: last_seq(indexer) == engine.seq - 1, what="the last batch")
    return listener(indexer)["partial"]


def test_a_clear_of_the_only_rank_that_events_name():
    """A batch was lost, which may have been another rank's. Where batches name no rank, there is one."""
    for rank in None, 0, 3:
        with Indexer() as indexer, Publisher(replay=None) as engine:
            register(indexer, 1, engine)
            store(engine, 1, 2, rank=rank)
            holds(indexer, 1, 2, rank=rank or 0)
            store(engine, 2, 2, rank=1 if rank == 0 else rank, lose=True)
            store(engine, 3, 2, rank=rank)
            equal(partial_behind(indexer, engine), True)
            engine.clear(rank=rank)
            equal(partial_behind(indexer, engine), rank is not None, f"partial behind a clear, rank {rank}")


def test_clears_of_all_ranks():
    """They end a loss when each rank was cleared behind it. A rank that shows up later may have lost batches before."""
    with Indexer() as indexer, Publisher(replay=None) as engine:
        register(indexer, 1, engine)
        for rank in range(2):
            store(engine, 1 + rank, 2, rank=rank)
            holds(indexer, 1 + rank, 2, rank=rank)
        engine.clear(rank=1)
        equal(partial_behind(indexer, engine), False)
        store(engine, 3, 2, rank=1, lose=True)
        engine.clear(rank=0)
        equal(partial_behind(indexer, engine), True, "rank 1 was cleared before the loss")
        store(engine, 4, 2, rank=0)
        equal(partial_behind(indexer, engine), True)
        engine.clear(rank=1)
        equal(partial_behind(indexer, engine), False)
        holds(indexer, 4, 2, rank=0)
        store(engine, 5, 2, rank=2)
        holds(indexer, 5, 2, rank=2)
        equal(partial_behind(indexer, engine), True, "a third rank")
        for rank in range(3):
            equal(partial_behind(indexer, engine), True)
            engine.clear(rank=rank)
        equal(partial_behind(indexer, engine), False)
        for rank in range(3):
            store(engine, 6 + rank, 2, rank=rank)
            equal(partial_behind(indexer, engine), False)


def test_position_survives_registering_again():
    with Indexer() as indexer, Publisher() as engine, Publisher(replay=None) as bare:
        for instance, publisher in (1, engine), (2, bare):
            register(indexer, instance, publisher)
            store_all(publisher, range(1, 6), 2)
            holds(indexer, 5, 2, instance=instance)
            indexer.unregister(instance)
            publisher.wait_no_subscriber()
            for number in range(6, 9):
                store(publisher, number, 2, lose=True)
            register(indexer, instance, publisher)
            store(publisher, 9, 2)
            holds(indexer, 9, 2, instance=instance)
        holds_all(indexer, range(1, 10), 2, instance=1)
        equal(stream(indexer, "missed_batches_total", 2), 3, "counted from the old position")
        equal(listener(indexer, 1)["partial"], False)
        equal(listener(indexer, 2)["partial"], True)


def test_models_and_tenants_are_apart():
    with Indexer() as indexer, Publisher() as a, Publisher() as b:
        register(indexer, 1, a, tenant_id="a")
        register(indexer, 2, b, tenant_id="b")
        store(a, 1, 2)
        store(b, 2, 2)
        indexer.wait_score(prompt(1, 2), 1, 8, tenant_id="a")
        indexer.wait_score(prompt(2, 2), 2, 8, tenant_id="b")
        equal(indexer.query(prompt(2, 2), tenant_id="a")["scores"], {})
        reply = indexer.register(1, a.endpoint, block_size=BS, tenant_id="b", dp_rank=1, expect=409)
        check("already registered for model=m tenant=a" in reply.json()["error"], reply)
        indexer.unregister(1, tenant_id="b", expect=404)
        indexer.unregister(1, tenant_id="a")
        indexer.query(prompt(1, 2), tenant_id="a", expect=404)


def test_block_size_conflicts():
    with Indexer() as indexer, Publisher() as engine:
        register(indexer, 1, engine)
        reply = indexer.register(2, engine.endpoint, block_size=BS * 2, expect=409)
        equal(reply.json()["error"],
              f"block_size mismatch for model=m tenant=default: existing={BS}, requested={BS * 2}")
        engine.store([1], range(8), block_size=8)  # an event that contradicts the registration
        store(engine, 1, 2)
        holds(indexer, 1, 2)
        equal(stream(indexer, "skipped_events_total"), 1)


def test_endpoint_conflicts_and_patterns():
    with Indexer("--allow-endpoint", "tcp://127.0.0.1:*") as indexer, Publisher() as engine:
        for endpoint in "127.0.0.1:1", "udp://h:1", "tcp://h", "tcp://:1", "tcp://[::1:5", "tcp://h:99999", "":
            reply = indexer.register(1, endpoint, block_size=BS, expect=400)
            check(reply.json()["error"].startswith(f"invalid ZMQ endpoint `{endpoint}`"), reply)
        reply = indexer.register(1, engine.endpoint, block_size=BS, replay_endpoint="tcp://h", expect=400)
        check(reply.json()["error"].startswith("invalid replay endpoint"), reply)
        check(indexer.post("/register", {"instance_id": 1, "model_name": MODEL, "block_size": BS,
                                         "endpoint": "tcp://10.1.2.3:5557"}).status in (400, 403, 409))
        check(indexer.post("/register", {"instance_id": 1, "model_name": MODEL, "block_size": BS, "endpoint": engine.endpoint,
                                         "replay_endpoint": "tcp://10.1.2.3:1"}).status in (400, 403, 409))
        equal(indexer.workers(), [])
        register(indexer, 1, engine)
        indexer.register(1, engine.endpoint, block_size=BS, expect=409)


def test_messages_wait_for_a_moment():
    """A listener that is behind loses nothing: more at once than it can have applied meanwhile."""
    with Indexer() as indexer, Publisher() as engine:
        register(indexer, 1, engine)
        store_all(engine, range(1, 3001), 2)
        holds(indexer, 3000, 2)
        equal(stream(indexer, "gaps_total"), 0)
        equal(stream(indexer, "batches_total"), 3000)


@contextlib.contextmanager
def answers_nothing(router):
    """A thread that answers each replay request with the end marker alone, whenever the indexer asks. The router is its own meanwhile."""
    over = threading.Event()

    def answer():
        while not over.is_set():
            if router.poll(50):
                peer, *_ = router.recv_multipart()
                router.send_multipart([peer, b"", b"\xff" * 8, b""])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_large_batches_behind_a_hanging_replay():
    """One engine can't take the memory: what waits is bounded in bytes, and what is dropped shows as a gap."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        with Indexer("--replay-timeout", "60s", "--backlog-memory", "64MiB") as indexer, Publisher(replay=None) as engine:
            indexer.register(1, engine.endpoint, block_size=BS, replay_endpoint=f"tcp://127.0.0.1:{port}")
            engine.wait_subscriber()
            peer, *_ = router.recv_multipart()
            router.send_multipart([peer, b"", b"\xff" * 8, b""])
            store(engine, 1, 2)
            holds(indexer, 1, 2)
            before = indexer.rss()
            store(engine, 2, 2, lose=True)
            store(engine, 3, 2)  # held: nobody answers
            wait_until(lambda: listener(indexer)["status"] == "replaying", what="a replay")
            equal(listener(indexer)["partial"], True, "partial: a batch is missing")
            payload, most = engine.batch([]) + b"\0" * (10 << 20), 0
            for _ in range(16 if SANITIZED else 60):  # a sanitizer reads slowly
                engine.send_raw(payload, keep=False)
                time.sleep(0.02)
                most = max(most, indexer.rss() - before)
            wait_until(lambda: any("replay backlog is full" in line for line in indexer.log), 60, "a line in the log")
            check(most < 200 << 20 or SANITIZED, f"{most >> 20} MiB more for 600 MiB of batches")
            with answers_nothing(router):  # an answer at last: what was dropped is a gap
                wait_until(lambda: listener(indexer)["status"] != "replaying" or stream(indexer, "failed_replays_total"), 60, "the replay's end")
                store(engine, 4, 2)
                holds(indexer, 4, 2, timeout=60)
                # How many depends on what the indexer had read by the time of the answer.
                check(stream(indexer, "missed_batches_total") > 0, "the dropped batches are counted")
                equal(listener(indexer)["partial"], True)
    finally:
        router.close()
        context.term()


def test_losses_without_replay_leave_no_phantoms():
    """Every 47th batch is lost, and nobody can be asked: the index stays near what the engine has room for."""
    capacity = 400
    with Indexer() as indexer, Publisher(replay=None) as told, Publisher(replay=None) as untold:
        register(indexer, 1, told, num_blocks=capacity)
        register(indexer, 2, untold)
        cached = []
        for number in range(1, 4001):
            events = []
            while len(cached) * 8 >= capacity:
                events.append(untold.removed(names(cached.pop(0), 8)))
            cached.append(number)
            events.append(untold.stored(names(number, 8), prompt(number, 8), block_size=BS))
            for engine in told, untold:
                engine.send(*events, lose=number % 47 == 7)
        for instance, engine in (1, told), (2, untold):
            wait_until(lambda instance=instance, engine=engine: last_seq(indexer, instance) == engine.seq - 1, 30, "all batches")
            check(stream(indexer, "resyncs_total", instance) > 0, "nothing was forgotten")
            equal(listener(indexer, instance)["partial"], True)
        held = indexer.metrics()['kv_indexer_index_holder_blocks{model="m",tenant="default"}']
        check(held <= 2 * capacity * 1.35, f"{held} blocks of two engines with room for {capacity} each")
        holds(indexer, 4000, 8, instance=1)
        told.clear()
        store(told, 5000, 2)
        holds(indexer, 5000, 2)
        equal(listener(indexer, 1)["partial"], False)


def test_max_blocks():
    with Indexer("--max-blocks", 100) as indexer, Publisher(replay=None) as engine:
        register(indexer, 1, engine)
        for number in range(1, 101):
            store(engine, number, 2)
        wait_until(lambda: last_seq(indexer) == 99, 30, "all batches")
        check(stream(indexer, "rejected_total") > 0)
        equal(listener(indexer)["partial"], True)
        check(indexer.metrics()['kv_indexer_index_blocks{model="m",tenant="default"}'] <= 100, "more than allowed")


def test_groups_that_are_not_followed_leave_the_view_partial():
    """A window with blocks of no whole part of the registered size, and a group of an unknown kind."""
    uneven = {"block_size": 6, "group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 17}
    unknown = {"block_size": 16, "group_idx": 1, "kv_cache_spec_kind": "something_new"}
    with Indexer() as indexer, Publisher() as plain, Publisher() as small, Publisher() as odd:
        for instance, (engine, group) in enumerate(((plain, None), (small, uneven), (odd, unknown)), 1):
            indexer.register(instance, engine)
            engine.wait_subscriber()
            engine.store([1, 2], range(32), group_idx=0, kv_cache_spec_kind="full_attention")
            if group:
                engine.store([11, 1, 12, 2], range(32), **group)
            engine.store([3], range(32, 48), parent=2, group_idx=0, kv_cache_spec_kind="full_attention")
            indexer.wait_score(range(48), instance, 48)
            wait_until(lambda i=instance: listener(indexer, i)["partial"] == (i > 1), what="a partial view")


def test_events_that_are_left_out_leave_the_view_partial():
    """Until a clear of the tiers that they may have been about. Not those that no query can ask for."""
    device = [["BlockStored", [50], None, list(range(8)), 8, None, "GPU"], ["BlockStored", [51, 51], None, list(range(4)), 4, None, "GPU"],
              ["BlockStored", [52, 53], None, list(range(4)), 4, None, "GPU"]]
    lower = [{"type": "BlockSplit", "block_hashes": [1]}, {"type": "BlockStored", "block_hashes": "1"},
             {"type": "BlockStored", "block_hashes": [60], "parent_block_hash": None, "token_ids": [], "block_size": 0, "medium": "CPU"}]
    none = [["BlockRemoved", [1], "TAPE"], {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "locality": "REMOTE"},
            {"type": "BlockStored", "block_hashes": [70], "parent_block_hash": None, "token_ids": list(range(4)), "block_size": 4,
             "medium": "GPU", "extra_keys": [[{"type": "scent", "value": 1}]]}]
    with Indexer() as indexer, Publisher(replay=None) as engine:
        def is_partial(event):
            engine.send(event)
            wait_until(lambda: last_seq(indexer) == engine.seq - 1, what="the batch")
            return listener(indexer)["partial"]

        register(indexer, 1, engine)
        for event in device + lower + none:
            equal(is_partial(event), event not in none, f"partial behind {event}")
            equal(is_partial(engine.cleared()), event in lower, f"partial behind {event} and a clear, which leaves lower tiers alone")
            engine.restart()
            store(engine, 1, 1)  # numbered 0, which its last process's batches behind an event weren't
            wait_until(lambda: last_seq(indexer) == 0 and not listener(indexer)["partial"], what="a new process")


def test_a_new_process_ends_doubts_without_a_batch():
    """Its replay service has nothing, so its cache is empty."""
    where = {"endpoint": f"tcp://127.0.0.1:{free_port()}", "replay_endpoint": f"tcp://127.0.0.1:{free_port()}"}
    with Indexer() as indexer:
        with Publisher(**where) as engine:
            register(indexer, 1, engine)
            store(engine, 1, 1)
            engine.send({"type": "BlockSplit", "block_hashes": [1]})
            wait_until(lambda: listener(indexer)["partial"] and last_seq(indexer) == 1, what="a partial view")
        with Publisher(**where) as engine:
            engine.wait_subscriber()
            wait_until(lambda: not listener(indexer)["partial"], what="a whole view")
            equal(indexer.score(prompt(1, 1), 1), 0)


def test_parts_of_blocks_serve_no_prompt():
    """vLLM announces them beside windows of smaller blocks. Where nothing else comes, the registered size is wrong."""
    with Indexer() as indexer, Publisher() as engine:
        register(indexer, 1, engine)
        engine.store([1], prompt(1, 1)[:2], block_size=2)
        wait_until(lambda: listener(indexer)["partial"], what="a partial view")
        store(engine, 1, 1)
        wait_until(lambda: not listener(indexer)["partial"], what="a whole view")
        engine.store([2], prompt(2, 1)[:2], block_size=2)
        store(engine, 3, 1)
        holds(indexer, 3, 1)
        equal(listener(indexer)["partial"], False)


def test_windows_of_half_blocks_are_followed():
    """A match needs the last two halves. Blocks that contradict earlier ones leave the view partial until a clear."""
    half = {"block_size": 8, "group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 17}
    full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    with Indexer() as indexer, Publisher() as engine:
        indexer.register(1, engine)
        engine.wait_subscriber()
        engine.store([1, 2], range(32), **full)
        engine.store([11, 1, 12, 2], range(32), **half)
        indexer.wait_score(range(48), 1, 32)
        engine.store([3], range(32, 48), parent=2, **full)
        engine.store([13, 3], range(32, 48), parent=2, **half)
        indexer.wait_score(range(48), 1, 48)
        engine.remove([13], group_idx=1)
        indexer.wait_score(range(48), 1, 32)
        equal(listener(indexer)["partial"], False)
        engine.store([21, 13], range(100, 116), **half)
        engine.store([22, 1], range(200, 216), parent=21, **half)
        wait_until(lambda: listener(indexer)["partial"], what="a partial view")
        for hash in (1, 2, 3, 13, 21):
            engine.remove([hash], group_idx=1)
        engine.clear()
        wait_until(lambda: not listener(indexer)["partial"], what="a whole view")
        engine.store([1, 2], range(32), **full)
        engine.store([11, 1, 12, 2], range(32), **half)
        indexer.wait_score(range(48), 1, 32)
        equal(indexer.get("/health").status, 200)


def test_pause_and_resume_replays_what_was_missed():
    """The replay cycle of the original's own end-to-end test."""
    with Indexer(env={"KV_INDEXER_TEST_ENDPOINTS": "1"}) as indexer, Publisher() as engine:
        register(indexer, 1, engine)
        store(engine, 1, 2)
        holds(indexer, 1, 2)
        equal(indexer.post("/test/pause_listener", {"instance_id": 1}).status, 200)
        wait_until(lambda: listener(indexer)["status"] == "paused", what="paused")
        engine.wait_no_subscriber()
        store_all(engine, range(2, 12), 2)
        equal(indexer.post("/test/resume_listener", {"instance_id": 1}).status, 200)
        wait_until(lambda: listener(indexer)["status"] == "active", what="active")
        engine.wait_subscriber()
        store(engine, 12, 2)
        holds_all(indexer, range(1, 13), 2)
        equal(listener(indexer)["partial"], False)
        equal(stream(indexer, "restarts_total"), 0)
        equal(told(indexer, "lost a worker's connection"), 0, "closed by the pause, not lost")


def test_many_streams_share_few_threads():
    engines = [Publisher(replay=None) for _ in range(40)]
    try:
        with Indexer("--threads", "2") as indexer:
            for i, engine in enumerate(engines):
                indexer.register(i + 1, engine.endpoint, block_size=BS)
            for engine in engines:
                engine.wait_subscriber()
            for number in range(1, 51):
                for engine in engines:
                    store(engine, number, 2)
            for i in range(len(engines)):
                holds(indexer, 50, 2, instance=i + 1)
            equal(len(indexer.query(prompt(50, 2))["scores"]), len(engines))
    finally:
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    run(globals())
