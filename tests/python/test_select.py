# SPDX-License-Identifier: Apache-2.0
"""kvasir.select: choices, their explanation, bookings, predictions, constraints and the queue, over the library."""
import errno
import math

from kvpython import check, equal, raises, run  # first: it finds the package
from kvasir import Error, NotFound
from kvasir.index import PrefixIndex, hash_tokens, sequence_hashes
from kvasir.select import POLICIES, SHORTEST, Request, Selector

S = 10**9


def make(workers=3, **opts):
    selector = Selector(seed=1, **opts)
    for worker in range(1, workers + 1):
        selector.set_worker(worker)
    return selector


def test_over_an_index():
    prompt = list(range(160))
    local = hash_tokens(prompt, 16)
    names, index = sequence_hashes(local), PrefixIndex()
    index.store(2, names[:6], local[:6])
    request = Request(len(prompt), names, index.find(local))
    with make() as selector:
        choice = selector.select(request, now_ns=S)
        equal((choice.worker, choice.rank, choice.prefill, choice.held, choice.uncovered), (2, 0, None, (96,) * 4, 64), "the holder")
        equal((choice.why, choice.policy, choice.candidates, choice.left_out), ("cost", "adaptive", 3, 0), "why")
        selector.book("one", request, choice, now_ns=S)
        load = selector.load(2)
        equal((load.waiting, load.context, load.requests, load.queued, load.known), (64, 160, 1, 1, True), "booked")
        equal(raises(Error, selector.book, "one", request, choice, now_ns=S).errno, errno.EEXIST, "twice")
        selector.first_token("one", now_ns=2 * S)
        selector.output("one", 5, now_ns=2 * S)
        equal((selector.load(2).waiting, selector.load(2).context), (0, 165), "after the first token")
        selector.free("one", now_ns=3 * S)
        raises(NotFound, selector.free, "one", now_ns=3 * S)
        raises(NotFound, selector.first_token, b"\0", now_ns=3 * S)
        equal([each.requests for each in selector.loads()], [0, 0, 0], "loads")
        stats = selector.stats()
        equal((stats["workers"], stats["booked"], stats["freed"], stats["duplicates"], stats["unknown"]), (3, 1, 1, 1, 2), "stats")
        check("workers=3 bookings=0" in repr(selector), repr(selector))


def test_explain():
    with make(policy="least") as selector:
        selector.remove_worker(1)
        selector.set_worker(3, draining=True)
        choice, candidates = selector.explain(Request(32, matches={2: 16, (3, 0): 32}), now_ns=S)
        equal(choice.worker, 2, "the one that fits")
        equal([(each.worker, each.reason, each.held) for each in candidates], [(2, "fits", 16), (3, "draining", 32)], "workers")
        check(math.isinf(candidates[1].cost), "left out")
        choice, candidates = selector.explain(Request(32, allowed=[]), now_ns=S)
        equal((choice, [each.reason for each in candidates]), (None, ["denied", "draining"]), "nobody")
        equal(raises(Error, selector.select, Request(32, pinned=(7, 0)), now_ns=S).errno, errno.EHOSTUNREACH, "pinned")
        for policy in POLICIES:
            equal(selector.select(Request(32, policy=policy), now_ns=S).policy, policy, "policy of a request")
        raises(ValueError, Request, 32, policy="best")
        raises(ValueError, Selector, "best")


def test_constraints():
    with make() as selector:
        selector.set_worker(2, labels=["gpu=h100", "zone=a"], loras=["sql"])
        for request in (Request(8, required=["gpu=h100"]), Request(8, preferred={"zone=a": 1.0}), Request(8, lora="sql"),
                        Request(8, pinned=(2, 0)), Request(8, allowed=(2, 9)), Request(8, avoided=[(1, 0), (3, 0)])):
            equal(selector.select(request, now_ns=S).worker, 2, "the one")
        selector.set_lora(2, "sql", False)
        selector.set_lora(3, "sql")
        equal(selector.select(Request(8, lora="sql"), now_ns=S).worker, 3, "the adapter moved")
        selector.fail_worker(3, seconds=1, now_ns=S)
        check(selector.select(Request(8, lora="sql"), now_ns=S).worker != 3, "it failed")
        equal(selector.select(Request(8, lora="sql"), now_ns=3 * S).worker, 3, "it is well again")
        selector.trust_worker(1, trust=.5)
        equal(selector.explain(Request(100, matches={1: 96}), now_ns=S)[1][0].uncovered, 52, "half of what it claims")
        selector.set_worker(1, prefill=False)
        selector.set_worker(2, decode=False)
        choice = selector.select(Request(1000, pair=True, avoided=[(3, 0)]), now_ns=3 * S)
        equal((choice.worker, choice.prefill), (1, (2, 0)), "a pair")


def test_predictions_and_ends():
    names = sequence_hashes(hash_tokens(list(range(256)), 16))
    with make(workers=2, expiry_s=10) as selector:
        request = Request(256, names)
        selector.book("a", request, selector.reckon(request, 1, now_ns=S), now_ns=S)
        equal(selector.reckon(request, 1, now_ns=S).predicted, 256, "sent just now")
        equal(selector.announced(1, names[-1]), 1, "its event")
        equal(selector.reckon(request, 1, now_ns=S).predicted, 0, "the index tells from here on")
        equal((selector.expire(now_ns=5 * S), selector.expire(now_ns=11 * S)), (0, 1), "without progress")
        selector.book("b", request, selector.reckon(request, 2, now_ns=S), now_ns=S)
        selector.free("b", lost=True, now_ns=S)
        equal(selector.reckon(request, 2, now_ns=S).predicted, 0, "lost")


def test_queue():
    with make(workers=1, queue_waiting=100, queue_order=SHORTEST, queue_max=2, queue_max_wait_s=5) as selector:
        busy = Request(100)
        selector.book("busy", busy, selector.select(busy, now_ns=S), now_ns=S)
        for ticket, tokens in ((1, 50), (2, 40)):
            request = Request(tokens)
            equal(raises(Error, selector.select, request, now_ns=S).errno, errno.EAGAIN, "held")
            selector.hold(ticket, request, now_ns=S)
        equal(raises(Error, selector.hold, 3, Request(9), now_ns=S).errno, errno.ENOBUFS, "full")
        equal(selector.next(now_ns=S), None, "no room")
        selector.first_token("busy", now_ns=2 * S)
        equal(selector.next(now_ns=2 * S), 2, "the shorter one")
        equal(selector.select(Request(40, released=True), now_ns=2 * S).worker, 1, "released")
        equal((selector.late(now_ns=5 * S), selector.late(now_ns=6 * S)), (None, 1), "late")
        raises(NotFound, selector.drop, 1)


def test_numbers_of_policies():
    with make(workers=2, params={"own_weight": 3, "context_weight": 0, "tier_cost": [0, .5]}) as selector:
        selector.book("a", Request(100), selector.reckon(Request(100), 1, now_ns=S), now_ns=S)
        equal([each.cost for each in selector.explain(Request(10), now_ns=S)[1]], [130, 30], "costs")
        raises(ValueError, Request, 10, params={"weight": 1})


def test_numbers_below_zero_and_no_numbers():
    with make() as selector:
        selector.book("a", Request(100), selector.reckon(Request(100), 1, now_ns=S), now_ns=S)
        raises(ValueError, selector.output, "a", -1)
        raises(ValueError, Request, 10, matches={1: -1})
        raises(Error, selector.select, Request(10, preferred={"zone=a": math.nan}), now_ns=S)
        raises(Error, selector.set_worker, 1, speed=math.inf)


if __name__ == "__main__":
    run(globals())
