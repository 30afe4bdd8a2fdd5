# Unit tests that start no thread, nor does the code that they call: the thread sanitizer, which looks for races alone,
# has nothing to find in them, and takes ten times as long. Its build has neither the programs nor their runs. Builds
# without a sanitizer hold this list to its word: they preload no_threads.c into these tests, which ends them at the
# first thread. A test that isn't named here runs under every sanitizer.
set(KV_SINGLE_THREADED
    base.args base.beneath base.buf base.endpoint base.error base.hash base.instance base.json base.json_array
    base.json_writer base.le base.log_bound base.mix base.module base.msgpack base.room
    kvx.cuda_arithmetic kvx.inner kvx.validate
    event.clears event.envelope event.forms event.frames event.groups event.hash event.namespace event.reader
    event.reader_state event.router_event event.salts event.told event.wire
    plane.record
    store.batch store.cut store.llama store.manifest store.open store.plugin store.range store.save
    llama.care llama.layouts llama.windows
    index.arena index.array_ends index.dump index.exact index.inside index.memory index.model index.named
    index.semantics index.starved index.steps index.stops index.table index.windows
    select.books select.policies select.quality select.soon select.speed
    bm.array_ends bm.chains bm.hash bm.layout bm.layout_kvx bm.layout_wire bm.memory bm.pool_starved bm.retain
    bm.sequence bm.stats
    peer.blockset peer.hint peer.lease peer.nixl_tags
    http.auth http.budget http.framing
    indexer.apply indexer.backlog indexer.body indexer.chunks indexer.dns_ttl indexer.doubts indexer.dump_reader
    indexer.engine_sglang indexer.engine_starved indexer.engine_vllm indexer.found indexer.hybrids indexer.listener
    indexer.listener_losses indexer.options indexer.place indexer.pod indexer.positions indexer.ranges
    indexer.reasons indexer.removals indexer.replica indexer.sizes indexer.small indexer.snapshot indexer.store_run
    indexer.stream indexer.stream_absence indexer.stream_first indexer.stream_phantoms indexer.stream_recovered
    indexer.stream_worlds indexer.unplaced indexer.why indexer.zmtp
    selector.cache selector.decision_log
    advisor.advice advisor.curve advisor.index advisor.state
    cli.cache cli.content cli.doctor cli.follow_records cli.generate cli.hits cli.plain cli.prompt cli.route cli.top
    cli.trace
    grpc.frames
    extproc.prompt
    redis.parts redis.resp
    s3.config s3.sign s3.xml
    tiered.config tiered.places)
