# SPDX-License-Identifier: Apache-2.0
"""What a peer's dump leaves open: torn chains, ranks that nobody registered, equal keys, hostile sizes."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from kvtest import *
from streams import *
from test_recovery import Peer, event, recovered_and_behind, reply, chunks


def started_with(*engines, replay=True, ranks=None):
    """Arguments that register engines 1, 2, ... (or the ranks of 1) at start."""
    listed = []
    for i, engine in enumerate(engines):
        who = f"1:{ranks[i]}" if ranks else f"{i + 1}"
        listed.append(f"{who}={engine.endpoint}" + (f"+{engine.replay_endpoint}" if replay else ""))
    return ["--workers", ",".join(listed), "--block-size", BS, "--model-name", MODEL]


def dump_peer(indexer, change):
    """A peer that serves the indexer's own dump, after change(model)."""
    dump = indexer.streams()
    change(dump[f"{MODEL}:default"]["streams"])
    return Peer(reply(200, json.dumps(dump).encode()))


def lose_parents(streams):
    """As if the events began in the middle of every chain."""
    for each in streams[0]["events"]:
        stored = each["event"]["data"]["stored"]
        if len(stored["blocks"]) > 1:
            stored["parent_hash"] = 999999
            del stored["blocks"][0]


def tell_twice(streams):
    """As a peer that isn't ours may: at two batches."""
    del streams[0]["events"][1:]
    streams.append({**streams[0], "seq": 1, "events": []})


def lose_position(streams):
    """As a peer that has the blocks from elsewhere, and doesn't know of which batch."""
    del streams[0]["events"][1:]
    del streams[0]["seq"]


def test_a_torn_dump_is_made_whole_by_a_replay():
    for change in lose_parents, tell_twice, lose_position:
        with Publisher() as engine, Indexer() as a:
            register(a, 1, engine)
            store(engine, 1, 3)
            store_all(engine, range(1, 11), 3)  # two copies of the first
            holds(a, 10, 3)
            with dump_peer(a, change) as peer, Indexer(*started_with(engine), "--peers", peer.url) as b:
                holds_all(b, range(1, 11), 3)
                engine.remove(names(1, 1, 2))
                store(engine, 11, 3)
                holds(b, 11, 3)
                holds(b, 1, 3)  # the second copy
                engine.remove(names(1, 1, 2))
                holds(b, 1, 2)
                holds(b, 11, 3)
                holds(a, 1, 2)
                equal(blocks_of(b.dump()), blocks_of(a.dump()), change.__name__)
                equal(listener(b)["partial"], False, change.__name__)


def test_a_torn_dump_without_replay_is_partial():
    for change in lose_parents, tell_twice, lose_position:
        with Publisher(replay=None) as engine, Indexer(*started_with(engine, replay=False)) as a:
            engine.wait_subscriber()
            store_all(engine, range(1, 11), 3)
            holds(a, 10, 3)
            with dump_peer(a, change) as peer, Indexer(*started_with(engine, replay=False), "--peers", peer.url) as b:
                store(engine, 11, 3)
                holds(b, 11, 3)
                equal(listener(b)["partial"], True, change.__name__)
                engine.clear()
                wait_until(lambda: not listener(b)["partial"], 10, "a cleared cache to be known whole")


def test_a_dump_brings_its_doubts():
    """What the peer doubts at its last batch is in doubt here, too, though the engine says nothing more."""
    with Publisher() as engine, Indexer() as a:
        register(a, 1, engine)
        store(engine, 1, 3)
        holds(a, 1, 3)

        def doubts(streams):
            first = streams[0]["events"][0]["event"]["data"]["stored"]["blocks"][0]
            streams[0].update(facts=["has_reports"], ranges=[{"dp_rank": 0, "block_hash": first["block_hash"], "more": 1,
                                                              "tokens_hash": first["tokens_hash"], "window": 0, "open": True}])

        with dump_peer(a, doubts) as peer, Indexer(*started_with(engine), "--peers", peer.url) as b:
            wait_until(lambda: listener(b).get("partial_reasons") == ["maybe_report"], 15, "the doubt")


def test_positions_go_on_through_an_indexer_that_does_not_follow():
    """A follows, B only has A's dump, C recovers from B: C replays what is missing, not everything."""
    with recovered_and_behind() as (engine, b):
        with Indexer(*started_with(engine), "--peers", b.url) as c:
            engine.wait_subscriber(2)
            store(engine, 26, 2)
            holds_all(c, range(1, 27), 2)
            # 21 to 25; and 26, when C's request came after it
            check(stream(c, "replayed_batches_total") in (5, 6), "what was missing is replayed, not everything")
            equal(listener(c)["partial"], False)
        # once it is unregistered, nothing of it is told any more
        b.unregister(1)
        equal(b.dump(), {})


def test_ranks_that_nobody_registered_go_with_their_stream():
    """Rank 7 came over rank 0's stream. When that engine restarts, 7 must go too; 1's blocks stay."""
    for late in False, True:
        with Publisher() as zero, Publisher() as one, Indexer() as a:
            register(a, 1, zero)
            register(a, 1, one, dp_rank=1)
            store(zero, 1, 2)
            store(zero, 2, 2, rank=7)
            store(one, 3, 2, rank=1)
            for number, rank in (1, 0), (2, 7), (3, 1):
                holds(a, number, 2, rank=rank)
            with Indexer(*([] if late else started_with(zero, one, ranks=[0, 1])), "--peers", a.url) as b:
                if late:
                    register(b, 1, one, dp_rank=1)
                    register(b, 1, zero)
                for number, rank in (1, 0), (2, 7), (3, 1):
                    holds(b, number, 2, rank=rank)
                # No waiting for B to subscribe: what ZMQ loses until then B has to ask for by itself.
                zero.restart()
                store(zero, 5, 2)
                holds(b, 5, 2)
                b.wait_score(prompt(1, 2), 1, 0)
                b.wait_score(prompt(2, 2), 1, 0, rank=7)
                equal(b.score(prompt(3, 2), 1, 1), 2 * BS, "the other stream's blocks")


def test_restarts_that_were_missed_before_registering():
    """A's dump is of an engine that has restarted since, and has got behind, exactly or beyond A's position."""
    for batches in 1, 2, 3, 6:
        with Publisher() as engine, Indexer() as a:
            register(a, 1, engine)
            for number in 1, 2, 3:
                store(engine, number, 2)
                holds(a, number, 2)
            with Indexer("--peers", a.url) as b:
                holds(b, 3, 2)
                engine.restart()
                store_all(engine, range(11, 11 + batches), 2)
                register(b, 1, engine)
                if batches % 2:  # else B has to ask although it hears nothing
                    engine.wait_subscriber(2)
                    store(engine, 20, 2)
                    holds(b, 20, 2)
                holds_all(b, range(11, 11 + batches), 2)
                for number in 1, 2, 3:
                    equal(b.score(prompt(number, 2), 1), 0, f"batch {number} of the old process, {batches} of the new")
                equal(listener(b)["partial"], False)


def test_ranks_of_a_dump_without_positions():
    """The original's dump. Its worker 1 is followed here, and its rank 7 can only come from there."""
    text = {f"{MODEL}:default": {"block_size": BS, "events": [event(1, [1], [11]), event(1, [2], [12])]}}
    text[f"{MODEL}:default"]["events"][1]["event"]["dp_rank"] = 7
    with Publisher(replay=None) as engine, Peer(reply(200, json.dumps(text).encode())) as peer:
        with Indexer(*started_with(engine, replay=False), "--peers", peer.url) as b:
            engine.wait_subscriber()
            equal(b.query_by_hash([12])["scores"], {"1": {"7": BS}})
            store(engine, 1, 2)
            store(engine, 2, 2)
            holds(b, 2, 2)
            engine.restart()
            store(engine, 3, 2)
            holds(b, 3, 2)
            wait_until(lambda: b.query_by_hash([12])["scores"] == {}, what="the restart to take rank 7 along")


def test_blocks_of_unknown_age_do_not_outlive_a_registration():
    """The original's dump, and its worker registers later: another process by then."""
    text = {f"{MODEL}:default": {"block_size": BS, "events": [event(1, [1], [11]), event(2, [2], [12])]}}
    with Publisher() as engine, Peer(reply(200, json.dumps(text).encode())) as peer, Indexer("--peers", peer.url) as b:
        equal(b.query_by_hash([11])["scores"], {"1": {"0": BS}})
        register(b, 1, engine)
        store(engine, 3, 2)
        holds(b, 3, 2)
        equal(b.query_by_hash([11])["scores"], {})
        equal(b.query_by_hash([12])["scores"], {"2": {"0": BS}})


def test_an_instance_that_left_for_another_model():
    """The dump has it under MODEL; here it is registered under another, at once or later."""
    text = json.dumps({f"{MODEL}:default": {"block_size": BS, "streams": [
        {"worker_id": 1, "seq": 3, "events": [event(1, [1], [11])]}, {"worker_id": 2, "seq": 1, "events": [event(2, [2], [12])]}]}}).encode()
    with Publisher() as engine, Peer(reply(200, text)) as peer:
        with Indexer("--workers", f"1={engine.endpoint}+{engine.replay_endpoint}", "--block-size", BS, "--model-name", "other",
                     "--peers", peer.url) as b:
            equal(b.query_by_hash([11])["scores"], {})
            equal(b.query_by_hash([12])["scores"], {"2": {"0": BS}})
        with Indexer("--peers", peer.url) as b:
            equal(b.query_by_hash([11])["scores"], {"1": {"0": BS}})
            b.register(1, engine, block_size=BS, model_name="other")
            equal(b.query_by_hash([11])["scores"], {})
            b.unregister(2)
            b.query_by_hash([12], expect=404)


def test_equal_keys():
    """(a:b, c) and (a, b:c): two entries, each readable; the one that a reader of keys gets right keeps the key."""
    with Publisher() as one, Publisher() as two, Indexer() as a:
        a.register(1, one, block_size=BS, model_name="a:b", tenant_id="c")
        a.register(2, two, block_size=BS, model_name="a", tenant_id="b:c")
        store(one, 1, 2)
        store(two, 2, 2)
        a.wait_score(prompt(1, 2), 1, 2 * BS, model_name="a:b", tenant_id="c")
        a.wait_score(prompt(2, 2), 2, 2 * BS, model_name="a", tenant_id="b:c")
        dump = a.dump()
        equal({key: (m["model_name"], m["tenant_id"]) for key, m in dump.items()}, {"a:b:c": ("a", "b:c"), "a%3Ab:c": ("a:b", "c")})
        with Peer(reply(200, json.dumps(dump).encode())) as peer:
            for url in a.url, peer.url:
                with Indexer("--peers", url) as b:
                    equal(b.query(prompt(1, 2), model_name="a:b", tenant_id="c")["scores"], {"1": {"0": 2 * BS}})
                    equal(b.query(prompt(2, 2), model_name="a", tenant_id="b:c")["scores"], {"2": {"0": 2 * BS}})


# -- peers that want to hurt -----------------------------------------------------------------------------------

def endless(handler):
    """Distinct blocks for ever."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    piece = f'{{"{MODEL}:default":{{"block_size":{BS},"events":['
    number = 0
    while True:
        handler.wfile.write(f"{len(piece):x}\r\n{piece}\r\n".encode())
        number += 1000
        piece = json.dumps(event(7, range(number, number + 1000), range(number, number + 1000))) + ","


def test_a_dump_without_end_is_given_up():
    with Peer(endless) as bad, Peer(reply(200, json.dumps(
            {f"{MODEL}:default": {"block_size": BS, "events": [event(8, [1], [11])]}}).encode())) as good:
        with Indexer("--peers", f"{bad.url},{good.url}", "--recovery-memory", "8MiB", timeout=60) as indexer:
            equal(indexer.query_by_hash([11])["scores"], {"8": {"0": BS}})
            wait_until(lambda: any("--recovery-memory" in line for line in indexer.log), what="a line in the log")


def test_ranks_in_the_worst_order():
    n, each = 120, 1000
    ranks = list(range(each, 0, -1))
    streams = [{"worker_id": n - i, "seq": 1, "ranks": ranks} for i in range(n)] + [{"worker_id": 200, "seq": 1, "events": [event(200, [1], [11])]}]
    text = json.dumps({f"{MODEL}:default": {"block_size": BS, "streams": streams}}).encode()
    with Peer(reply(200, text)) as peer, Indexer("--peers", peer.url, timeout=60) as indexer:
        equal(indexer.query_by_hash([11])["scores"], {"200": {"0": BS}})
        took = indexer.cpu_seconds()
        print(f"        {n * each} ranks took {took:.1f} s")
        check(took < 4 * SLOW, "that is not n log n")


if __name__ == "__main__":
    run({name: item for name, item in globals().items() if getattr(item, "__module__", "") == "__main__"})
