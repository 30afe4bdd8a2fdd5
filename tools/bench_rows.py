# SPDX-License-Identifier: Apache-2.0
"""The figures that docs/benchmarks.md and `./dev bench` show: one Row each, by room."""
from typing import NamedTuple


class Row(NamedTuple):
    """A figure in the lines of JSON that one run of the benchmarks prints."""
    figure: str                    # for people
    line: dict                     # members that its line has
    value: str                     # member that is the figure
    unit: str = ""
    words: str = ""                # names the yardstick
    of: str = ""                   # member that is the yardstick, in the same unit
    of_line: dict = {}             # members in which the yardstick's line differs
    ratio: str = ""                # member that is the ratio; "": value / yardstick
    target: tuple | None = None    # ("value" or "ratio", "<=" or ">=", bound)
    scale: float = 1               # of value and yardstick, to come to the unit


def at_least(bound, which="ratio"):
    return which, ">=", bound


def at_most(bound, which="ratio"):
    return which, "<=", bound


def value_least(bound):
    return at_least(bound, "value")


def value_most(bound):
    return at_most(bound, "value")


def index(figure, what, value, unit, *, shared=29, **more):
    line = {"bench": "index", "what": what, "engine": "kvindex", "shared_percent": shared}
    return Row(figure, line, value, unit, **more)


FLAT = {"words": "a flat hash table, which answers for one holder", "of_line": {"engine": "flat table"}}
INDEX = [
    index("memory a holder-block, 12.8M of them, 30 % shared", "memory", "bytes_per_holder_block", "B", of="bytes_per_holder_block",
          target=value_most(24), **FLAT),
    index("the same, nothing shared", "memory", "bytes_per_holder_block", "B", shared=0),
    index("lookup of 64 blocks of one holder, warm, p50", "find_warm", "p50_ns", "ns", shared=0, target=value_most(300)),
    index("the same, cold, p99", "find_cold", "p99_ns", "ns", shared=0, target=value_most(5000)),
    index("lookup of 64 blocks, 19 of them held by all 256 workers", "find_warm", "p50_ns", "ns"),
    index("writes, a prompt of 64 blocks dropped and one stored", "writes", "blocks_per_s", "blocks/s", of="blocks_per_s", target=value_least(8e6),
          **FLAT),
    Row("memory a holder-block of hybrids (window and state beside)", {"bench": "hybrid", "figure": "memory", "groups": "full, window, state"},
        "bytes_per_holder_block", "B", words="full attention alone", of="bytes_per_holder_block", of_line={"groups": "full"}, target=value_most(28)),
]


def event(figure, batch, encoding, *, target=None):
    line = {"bench": "event", "figure": "decode", "batch": batch, "encoding": encoding}
    return Row(figure, line, "blocks_per_s", "blocks/s", words="walking the same bytes", of="blocks_per_s", of_line={"figure": "yardstick_skip"}, target=target)


EVENTS = [
    event("decode and hash vLLM's events, 8 × 128 blocks of 16 tokens", "prefill", "map"),
    event("the same, 256 × 1 block", "decode", "map"),
    event("decode Dynamo's envelopes, 8 × 128 blocks", "prefill", "envelope", target=at_least(0.7)),
    event("the same, 256 × 1 block", "decode", "envelope", target=at_least(0.7)),
    Row("from a ZMQ message to the index, one stream", {"bench": "ingest", "figure": "zmq_to_queryable"}, "per_cpu_second_of_event_thread",
        "blocks/s of CPU", target=value_least(3e6)),
    Row("the same beside removals of a full cache", {"bench": "ingest", "figure": "zmq_to_queryable_full_cache"}, "per_cpu_second_of_event_thread",
        "blocks/s of CPU"),
    Row("Dynamo's envelopes of 256 × 1 block, to the index", {"bench": "ingest", "figure": "dynamo_single_blocks", "events_per_message": 256},
        "per_cpu_second", "blocks/s of CPU", target=value_least(2e6)),
    Row("the same, an envelope for each block", {"bench": "ingest", "figure": "dynamo_single_blocks", "events_per_message": 1}, "per_cpu_second",
        "blocks/s of CPU"),
    Row("block events to NATS, end to end, 64 KiB messages", {"bench": "events to NATS"}, "events_per_s", "events/s",
        words="a loop of ready buffers", of="ready_buffers_events_per_s", ratio="ratio", target=at_least(0.8)),
    Row("a follower whole again by a snapshot of 1M blocks", {"bench": "snapshot of a publisher"}, "blocks_per_s", "blocks/s"),
]


def http(figure, case, tokens, bound):
    return Row(figure, {"bench": "http_query", "case": case, "tokens": tokens}, "query_per_s", "/s", words="an echo of the body", of="echo_per_s",
               ratio="of_echo", target=bound and at_least(bound))


def hybrid(figure, tokens, holders):
    return Row(figure, {"bench": "http_hybrid", "tokens": tokens, "holders": holders}, "hybrid_cpu_us", "µs of CPU", words="full attention alone",
               of="plain_cpu_us", ratio="hybrid_to_plain", target=at_most(1.3))


def beside(figure, tokens, holders):
    return Row(figure, {"bench": "indexer", "figure": "query", "tokens": tokens, "holders": holders, "indexer": "kvasir"}, "server_cpu_us", "µs of CPU")


INDEXER = [
    http("`/query`, 512 ids as JSON", "json", 512, 0.6),
    http("`/query`, 8192 ids as JSON", "json", 8192, 0.3),
    http("`/query`, 512 ids as msgpack", "msgpack_bin", 512, None),
    http("`/query`, 8192 ids as msgpack", "msgpack_bin", 8192, 0.6),
    hybrid("`/query` of hybrids (window and state beside), 512 ids, 4 holders", 512, 4),
    hybrid("the same, 1024 ids, 64 holders of the whole prompt", 1024, 64),
    hybrid("the same, 8192 ids, 64 holders", 8192, 64),
    beside("server's time a `/query`, 512 ids, 4 holders", 512, 4),
    beside("the same, 8192 ids, 64 holders", 8192, 64),
    Row("memory 1 s after a burst of 4.2M holder-blocks, of settled", {"bench": "indexer", "figure": "memory", "indexer": "kvasir"},
        "after_burst_of_settled", "×", target=value_most(1.3)),
    Row("a replica's start until its first answer, 10M blocks", {"bench": "recover", "figure": "dump_and_recover"}, "value", "s",
        words="the dump as JSON, thrown away", of="yardstick_fetched_and_thrown_away_s", target=value_most(2.5)),
    Row("reading 8192 token ids of JSON", {"bench": "json", "figure": "token_ids", "values": 8192, "separator": ","}, "gb_per_s", "GB/s",
        words="a loop of strtoul", of="strtoul_gb_per_s", target=value_least(2)),
]


def cycle(figure, workers, tokens, bound):
    return Row(figure, {"bench": "selector", "figure": "cycle", "workers": workers, "tokens": tokens, "server": "kvasir"}, "server_cpu_us", "µs of CPU",
               target=value_most(bound))


SELECTOR = [
    cycle("choose, book, first token, free: 512 ids, 4 workers", 4, 512, 30),
    cycle("the same, 64 workers", 64, 512, 30),
    cycle("8192 ids, 4 workers", 4, 8192, 80),
    cycle("the same, 64 workers", 64, 8192, 80),
]


def kvx(figure, what, threads, bound):
    return Row(figure, {"bench": "kvx", "figure": what, "threads": threads}, "gb_per_s", "GB/s", words="memcpy", of="memcpy_gb_per_s", ratio="ratio",
               target=at_least(bound))


KVX = [
    kvx("write NHD, bf16, one thread", "write NHD bf16", 1, 0.85),
    kvx("the same, scattered tokens, two threads", "write NHD bf16, scattered tokens", 2, 0.85),
    kvx("gather NHD, bf16", "gather NHD bf16", 1, 0.85),
    kvx("write HND", "write HND bf16", 1, 0.85),
    kvx("gather HND", "gather HND bf16", 1, 0.85),
    kvx("write HND_PACKED, pack 8", "write HND_PACKED 8 bf16", 1, 0.5),
    kvx("gather HND_PACKED, pack 8", "gather HND_PACKED 8 bf16", 1, 0.5),
    kvx("write F16 as E4M3, NHD", "write NHD f16 to e4m3", 1, 0.4),
    kvx("gather E4M3 as F16, NHD", "gather NHD e4m3 to f16", 1, 0.4),
]


def cycle(figure, pool, memory):
    line = {"bench": "kvbm", "figure": "kvbm_cycle", "pool": pool, "memory": memory}
    return Row(figure, line, "ns_per_block", "ns a block", words="a chained hash table with a list", of="naive_ns_per_block", target=value_most(200))


def evict(figure, policy, words, of):
    line = {"bench": "kvbm", "figure": "kvbm_evict", "eviction": policy, "blocks": 1000000}
    return Row(figure, line, "ns_per_block", "ns", words=words, of=of, target=value_most(150))


KVBM = [
    cycle("allocate, complete, register, release, match, release", "has free blocks", "in order"),
    cycle("the same, the pool full (each allocation evicts), shuffled", "full", "shuffled"),
    Row("prefix match of 1000 inactive blocks, shuffled", {"bench": "kvbm", "figure": "kvbm_match", "memory": "shuffled"}, "ns_per_block", "ns a block",
        words="the same table", of="naive_ns", target=value_most(60)),
    evict("evict from 1M blocks, LRU", "lru", "a list", "naive_list_ns"),
    evict("evict from 1M blocks, lineage", "lineage", "a heap", "naive_set_ns"),
    Row("two threads on one pool, of one", {"bench": "kvbm", "figure": "kvbm_threads", "of": "kvbm"}, "two_of_one", "×", target=value_least(0.9)),
    Row("memory a block, LFU", {"bench": "kvbm", "figure": "kvbm_memory", "eviction": "lfu"}, "bytes_per_block", "B", target=value_most(128)),
    Row("tokens to block and sequence hashes", {"bench": "kvbm", "figure": "kvbm_hash"}, "gb_per_s", "GB/s", words="reading the tokens",
        of="read_gb_per_s", target=value_least(1)),
]


def lend(figure, bench, case, value, bound, ratio, of, words):
    return Row(figure, {"bench": bench, "case": case}, value, "GB/s", words=words, of=of, ratio=ratio, target=at_least(bound))


PEERS = [
    lend("shared memory, 32 blocks of 2 MiB", "peer_shm", "2 MiB x 32", "gbs", 0.9, "ratio", "memcpy_gbs", "memcpy"),
    lend("TCP without checksums, 2 MiB", "peer_tcp", "2 MiB x 32", "gbs", 0.9, "ratio", "raw_gbs", "a raw pair of sockets"),
    lend("TCP with checksums, 2 MiB", "peer_tcp", "2 MiB x 32", "summed_gbs", 0.7, "summed_ratio", "raw_gbs", "a raw pair of sockets"),
    lend("TCP without checksums, 64 blocks of 64 KiB", "peer_tcp", "64 KiB x 64", "gbs", 0.9, "ratio", "raw_gbs", "a raw pair of sockets"),
    lend("TCP with checksums, 64 KiB", "peer_tcp", "64 KiB x 64", "summed_gbs", 0.7, "summed_ratio", "raw_gbs", "a raw pair of sockets"),
    Row("lease and release 1024 blocks", {"bench": "peer_lease"}, "us_per_block", "µs a block", target=value_most(1)),
    Row("lease and release one block, in round trips", {"bench": "peer_lease"}, "ratio", "×", target=value_most(3)),
    Row("an owner killed amid reads over TCP, known after", {"bench": "peer_ends", "by": "tcp, no UCX"}, "dead_known_ms", "ms", target=value_most(100)),
    Row("a frozen owner: a call ends after its deadline", {"bench": "peer_ends", "by": "tcp, no UCX"}, "frozen_worst_ms", "ms", target=value_most(10)),
]


def copied(figure, how, what, bound):
    return Row(figure, {"bench": "tier.copy", "figure": how, "what": what}, "gb_per_s", "GB/s", words="parallel memcpy", of="memcpy_gb_per_s",
               ratio="of_memcpy", target=at_least(bound))


def disk(figure, what, block, bound):
    line = {"bench": "tier.disk", "figure": what, "registered": False, "block_bytes": block}
    return Row(figure, line, "mb_per_s", "MB/s", words="fio, overwriting in place", of="fio_mb_per_s", ratio="ratio", target=at_least(bound))


def objects(figure, what, store, block, bound=None):
    line = {"bench": "tier.object", "figure": what, "store": store, "block_bytes": block}
    return Row(figure, line, "mb_per_s", "MB/s", words="the store alone", of="raw_mb_per_s", ratio="ratio", target=bound and at_least(bound))


TIERS = [
    copied("device's stand-in to the host tier, blocks of 2 MiB", "copy", "block to block", 0.85),
    copied("the same, heads first turned into tokens first", "convert", "heads first, block to block", 0.6),
    Row("the manager's part of a store, jobs of 256 blocks", {"bench": "tier.manager", "figure": "tier_manager", "end": "waited"}, "store_ns_per_block",
        "ns a block", target=value_most(1000)),
    Row("the manager's part of a load", {"bench": "tier.manager", "figure": "tier_manager", "end": "waited"}, "load_ns_per_block", "ns a block",
        target=value_most(1000)),
    disk("disk tier, durable writes of 256 KiB", "write", 262144, 0.95),
    disk("disk tier, reads of 256 KiB", "read", 262144, 0.95),
    disk("disk tier, durable writes of 2 MiB", "write", 2097152, 0.9),
    disk("disk tier, reads of 2 MiB", "read", 2097152, 0.9),
    Row("load from the disk beside stores that saturate it, p99", {"bench": "tier.manager", "figure": "tier_onboard"}, "busy_of_idle_p99", "× of idle",
        target=value_most(3)),
    objects("object tier over a folder, put 1 MiB", "put", "file", 1048576, 0.9),
    objects("object tier over a folder, get 1 MiB", "get", "file", 1048576, 0.9),
]


def saved(figure, what, chunks, value, unit, target, **more):
    return Row(figure, {"bench": "store", "figure": what, "chunks": chunks}, value, unit, target=target, **more)


def tiered(figure, size, bound):
    return Row(figure, {"bench": "tiered get", "call": "kvs_get_chunk", "bytes": size}, "cpu_us", "µs of CPU", words="the fast member alone",
               of="alone_cpu_us", ratio="of_alone", target=at_most(bound))


RAW = {"words": "one sequential write and fdatasync", "of": "raw_sequential_ms", "ratio": "x_raw"}
STORES = [
    saved("durable save of 96 × 1 MiB", "file: durable cold save", 96, "ms", "ms", at_most(1.3), **RAW),
    saved("durable save of 1000 × 64 KiB", "file: durable cold save", 1000, "ms", "ms", at_most(3), **RAW),
    saved("saving 96 × 1 MiB again, of the first time", "file: warm save", 96, "of_cold", "×", value_most(0.05)),
    saved("restore 96 × 1 MiB, verified, page cache", "file: restore from page cache, verified", 96, "gb_per_s", "GB/s", at_least(0.75), words="memcpy",
          of="memcpy_gb_per_s", ratio="of_memcpy"),
    saved("restore 1000 × 64 KiB, verified, page cache", "file: restore from page cache, verified", 1000, "gb_per_s", "GB/s", at_least(0.6),
          words="memcpy", of="memcpy_gb_per_s", ratio="of_memcpy"),
    Row("llama.cpp state grown by 1 %: written of the state", {"bench": "store", "figure": "llama.cpp state: grown by 1 %", "cut": "by layer and tokens"},
        "written_of_state", "×", target=value_most(0.025)),
    tiered("get of 64 KiB through a tiered store", 65536, 1.05),
    tiered("get of 1 MiB through a tiered store", 1048576, 1.05),
]

CURVE = [
    Row("hit rate over capacity, 64k samples: largest error", {"bench": "curve", "samples": 65536}, "largest_error", "", target=value_most(0.01)),
    Row("the same: time a reference", {"bench": "curve", "samples": 65536}, "ns_a_reference", "ns", target=value_most(300)),
]

# (room, the command of its figures, rows)
ROOMS = [
    ("The index", "build/bench/index_bench; build/bench/hybrid_bench", INDEX),
    ("Events", "build/bench/event_bench; build/bench/ingest_bench; build/bench/plane_bench", EVENTS),
    ("kv-indexer", "build/bench/http_bench; build/bench/indexer_bench; build/bench/recover_bench; build/bench/json_bench", INDEXER),
    ("kv-selector", "build/bench/selector_bench", SELECTOR),
    ("K/V layouts on host memory", "build/bench/kvx_bench", KVX),
    ("The block manager", "build/bench/kvbm_bench", KVBM),
    ("Tiers", "build/bench/tier_bench", TIERS),
    ("Blocks of other nodes", "build/bench/lend_bench", PEERS),
    ("Stores", "build/bench/store_bench; build/bench/tiered_bench", STORES),
    ("The advisor", "build/bench/curve_bench", CURVE),
]
