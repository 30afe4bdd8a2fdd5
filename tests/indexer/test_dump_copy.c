// SPDX-License-Identifier: Apache-2.0
/* Copies of streams while engines publish: each is of exactly one batch, and no batch is lost. */
#include "support.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <zmq.h>

#include "base/core/clock.h"
#include "base/json/msgpack.h"
#include "event/wire/frames.h"
#include "http/pipe.h"
#include "indexer/model/lookup.h"
#include "indexer/registry/tables.h"
#include "indexer/replica/dump_copy.h"
#include "indexer/replica/dump_reader.h"
#include "indexer/replica/dump_writer.h"
#include "starve.h"

#define ENGINES 3
#define KEPT 20u /* batch i stores a block, and removes that of batch i - KEPT */
#define BLOCK_SIZE 4

/* An engine whose blocks follow from the number of its last batch. */
struct engine {
    void *zmq, *pub;
    char endpoint[128];
    uint64_t instance, sequence;
    struct world *world;
    pthread_t thread;
};

struct world {
    struct ki_registry *r;
    struct engine engines[ENGINES];
    atomic_bool stop;
    size_t copies, blocks;
    uint64_t last[ENGINES]; /* batch of the last copy */
};

static void put_batch(struct kv_buf *out, uint64_t i)
{
    kv_msgpack_put_array(out, 3);
    kv_msgpack_put_double(out, 1000 + (double)i);
    kv_msgpack_put_array(out, i < KEPT ? 1 : 2);
    kv_msgpack_put_array(out, 7);
    kv_msgpack_put_str(out, "BlockStored");
    kv_msgpack_put_array(out, 1);
    kv_msgpack_put_u64(out, i + 1);
    kv_msgpack_put_nil(out);
    kv_msgpack_put_array(out, BLOCK_SIZE);
    for (uint64_t k = 0; k < BLOCK_SIZE; k++)
        kv_msgpack_put_u64(out, (i * 7 + k) & 0xffffff);
    kv_msgpack_put_u64(out, BLOCK_SIZE);
    kv_msgpack_put_nil(out);
    kv_msgpack_put_str(out, "GPU");
    if (i >= KEPT) {
        kv_msgpack_put_array(out, 3);
        kv_msgpack_put_str(out, "BlockRemoved");
        kv_msgpack_put_array(out, 1);
        kv_msgpack_put_u64(out, i + 1 - KEPT);
        kv_msgpack_put_str(out, "GPU");
    }
    kv_msgpack_put_nil(out);
}

static void publish(struct engine *e)
{
    uint8_t bytes[KVE_SEQUENCE_BYTES];
    struct kv_buf batch = KV_BUF_INIT;

    put_batch(&batch, e->sequence);
    kve_sequence_put(bytes, e->sequence++);
    assert_int_equal(batch.error, 0);
    zmq_send(e->pub, "", 0, ZMQ_SNDMORE);
    zmq_send(e->pub, bytes, sizeof(bytes), ZMQ_SNDMORE);
    zmq_send(e->pub, batch.data, batch.len, 0);
    kv_buf_fini(&batch);
}

static void *run(void *arg)
{
    struct engine *e = arg;

    while (!atomic_load(&e->world->stop)) {
        publish(e);
        if (e->sequence % 16 == 0)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return NULL;
}

/* Instance 1 has one rank that is registered, instance 2 has two. */
static void follow(struct world *w, size_t at)
{
    struct engine *e = &w->engines[at];
    struct ki_registration reg = {.instance = at ? 2 : 1,
                                  .rank = at == 2,
                                  .block_size = BLOCK_SIZE,
                                  .endpoint = e->endpoint,
                                  .model = "m",
                                  .tenant = "default"};
    size_t size = sizeof(e->endpoint);
    char byte = 0;

    *e = (struct engine){.instance = reg.instance, .world = w};
    e->zmq = zmq_ctx_new();
    e->pub = zmq_socket(e->zmq, ZMQ_XPUB);
    zmq_setsockopt(e->pub, ZMQ_SNDHWM, &(int){0}, sizeof(int));
    zmq_setsockopt(e->pub, ZMQ_LINGER, &(int){0}, sizeof(int));
    zmq_setsockopt(e->pub, ZMQ_RCVTIMEO, &(int){60000}, sizeof(int));
    assert_int_equal(zmq_bind(e->pub, "tcp://127.0.0.1:*"), 0);
    assert_int_equal(zmq_getsockopt(e->pub, ZMQ_LAST_ENDPOINT, e->endpoint, &size), 0);
    assert_int_equal(ki_registry_register(w->r, &reg, NULL), 0);
    assert_int_equal(zmq_recv(e->pub, &byte, 1, 0), 1);
}

/* Adopt a block of instance 3, which isn't registered, from a dump. */
static void adopt_block(struct ki_registry *r)
{
    struct ki_mark mark = {.holder = {3, 0}, .has_position = true, .sequence = 5};
    const struct kv_block block = {1, 2};
    struct ki_snapshot *snapshot;
    struct kvi_index *index;
    struct kv_error error;

    assert_int_equal(kvi_create(NULL, &index), 0);
    assert_int_equal(kvi_store(index, mark.holder, KV_TIER_DEVICE, NULL, &block, 1, NULL), 0);
    assert_int_equal(ki_snapshot_create(&snapshot), 0);
    snapshot->instance = 3;
    snapshot->has_position = true;
    snapshot->state.sequence = 5;
    assert_int_equal(
        ki_registry_adopt(r, "m", "default", BLOCK_SIZE, index, &mark, 1, &snapshot, 1, &error), 0);
    ki_snapshot_free(snapshot);
}

static void open_world_with(struct world *w, bool dumped, uint64_t backlog_bytes)
{
    struct ki_registry_opts opts = {
        .threads = 2, .start_held = dumped, .backlog_bytes = backlog_bytes};

    memset(w, 0, sizeof(*w));
    assert_int_equal(ki_registry_create(&opts, &w->r), 0);
    if (dumped) {
        adopt_block(w->r);
        ki_registry_go(w->r);
    }
    for (size_t i = 0; i < ENGINES; i++)
        follow(w, i);
}

static void open_world(struct world *w)
{
    open_world_with(w, false, 0);
}

static void close_world(struct world *w)
{
    ki_registry_destroy(w->r);
    for (size_t i = 0; i < ENGINES; i++) {
        zmq_close(w->engines[i].pub);
        zmq_ctx_term(w->engines[i].zmq);
    }
}

/* The copy has the blocks of the batches up to its own, and no other. */
static int check_copy(void *arg, const struct ki_copied *c)
{
    const struct ki_snapshot *s = c->snapshot;
    struct world *w = arg;
    size_t engine = s->instance == 1 ? 0 : 1 + s->rank;
    uint64_t last = s->state.sequence, n = 0, sum = 0, wanted = 0, n_wanted;
    struct kvi_dump_run told;
    size_t at = 0;

    assert_true(s->has_position);
    n_wanted = KV_MIN(last + 1, (uint64_t)KEPT);
    for (uint64_t i = last + 1; i > last + 1 - n_wanted; i--)
        wanted += i * i;
    while (ki_copied_run(c, &at, &told)) {
        assert_int_equal(told.holder.worker, s->instance);
        assert_int_equal(told.holder.rank, s->rank);
        for (size_t i = 0; i < told.n; i++, n++)
            sum += told.blocks[i].hash * told.blocks[i].hash;
    }
    if (n != n_wanted || sum != wanted)
        fail_msg("batch %" PRIu64 ": %" PRIu64 " blocks", last, n);
    assert_true(last >= w->last[engine]);
    w->last[engine] = last;
    w->copies++;
    w->blocks += n;
    return 0;
}

static struct ki_worker_info info_of(struct ki_registry *r, size_t at)
{
    struct ki_worker_info *infos, one;
    long n = ki_registry_workers(r, &infos);

    assert_int_equal(n, ENGINES);
    one = infos[at];
    ki_worker_infos_free(infos, n);
    return one;
}

static void wait_for(struct world *w, size_t at, uint64_t batches)
{
    uint64_t until_ns = kv_now_ns() + 60 * KV_NS_PER_S;

    while (info_of(w->r, at).batches < batches) {
        if (kv_now_ns() >= until_ns)
            fail_msg("engine %zu: %" PRIu64 " of %" PRIu64 " batches, status %d, %" PRIu64 " gaps",
                     at, info_of(w->r, at).batches, batches, info_of(w->r, at).status,
                     info_of(w->r, at).gaps);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

static void wait_for_all(struct world *w, size_t at)
{
    wait_for(w, at, w->engines[at].sequence);
}

static void copies_are_of_one_batch(void **state)
{
    struct ki_model *model;
    struct world w;

    (void)state;
    open_world(&w);
    model = ki_registry_model(w.r, "m", "default");
    for (size_t i = 0; i < ENGINES; i++)
        assert_int_equal(pthread_create(&w.engines[i].thread, NULL, run, &w.engines[i]), 0);
    for (size_t i = 0; i < ENGINES; i++)
        wait_for(&w, i, KEPT);
    for (size_t i = unit_rounds(100); i > 0; i--) {
        assert_int_equal(ki_dump_copy(w.r, model, check_copy, &w), 0);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL); /* some batches later */
    }
    atomic_store(&w.stop, true);
    for (size_t i = 0; i < ENGINES; i++)
        pthread_join(w.engines[i].thread, NULL);
    for (size_t i = 0; i < ENGINES; i++) {
        wait_for_all(&w, i);
        assert_int_equal(info_of(w.r, i).batches, w.engines[i].sequence);
        assert_int_equal(info_of(w.r, i).gaps, 0);
        assert_false(info_of(w.r, i).reasons);
        assert_true(w.last[i] > KEPT);
    }
    assert_int_equal(w.copies, ENGINES * unit_rounds(100));
    print_message("%zu copies, %zu blocks, of %" PRIu64 " batches\n", w.copies, w.blocks,
                  w.engines[0].sequence);
    ki_model_release(model);
    close_world(&w);
}

/* While a stream is held, its batches wait; then they are applied, and none is lost. */
static void batches_wait(void **state)
{
    struct ki_snapshot *snapshot;
    struct ki_listener *l;
    uint64_t generation;
    struct world w;

    (void)state;
    open_world(&w);
    for (int i = 0; i < 30; i++)
        publish(&w.engines[0]);
    wait_for_all(&w, 0);
    l = ki_listener_find(w.r, 1, 0);
    for (int times = 1; times <= 2; times++) { /* dumps that hold it at the same time */
        assert_int_equal(ki_listener_hold(l, &snapshot, &generation), 0);
        assert_int_equal(snapshot->state.sequence, 29);
        ki_snapshot_free(snapshot);
        for (int i = 0; i < 50; i++)
            publish(&w.engines[0]);
        publish(&w.engines[1]);
        wait_for_all(&w, 1);
    }
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    assert_int_equal(info_of(w.r, 0).batches, 30);
    assert_true(ki_listener_let_go(l, generation));
    ki_registry_wake(w.r);
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    assert_int_equal(info_of(w.r, 0).batches, 30);
    assert_true(ki_listener_let_go(l, generation));
    ki_registry_wake(w.r);
    wait_for_all(&w, 0);
    assert_int_equal(info_of(w.r, 0).batches, 130);
    assert_int_equal(info_of(w.r, 0).gaps, 0);
    close_world(&w);
}

static uint64_t dropped_next(struct ki_listener *l)
{
    uint64_t next;

    ki_listener_begin_turn(l);
    next = l->backlog.dropped_next;
    pthread_mutex_unlock(&l->turn);
    return next;
}

/* Beyond its bound batches are dropped. An engine that is idle afterwards shows no gap. */
static void batches_without_room(void **state)
{
    struct ki_snapshot *snapshot;
    struct ki_listener *l;
    uint64_t generation;
    struct world w;

    (void)state;
    open_world_with(&w, false, 4 * 4096);
    publish(&w.engines[0]);
    wait_for_all(&w, 0);
    assert_false(info_of(w.r, 0).reasons);
    l = ki_listener_find(w.r, 1, 0);
    assert_int_equal(ki_listener_hold(l, &snapshot, &generation), 0);
    ki_snapshot_free(snapshot);
    for (int i = 0; i < 100; i++)
        publish(&w.engines[0]);
    wait_until(dropped_next(l) == 101);
    assert_true(ki_listener_let_go(l, generation));
    ki_registry_wake(w.r);
    wait_until(info_of(w.r, 0).reasons == KI_BECAUSE(MISSED));
    assert_true(info_of(w.r, 0).batches < 101);
    close_world(&w);
}

static int count(void *arg, const struct ki_copied *c)
{
    *(uint64_t *)arg += c->snapshot->instance;
    return 0;
}

/* Unregistered streams are left out; others of the instance aren't. */
static void streams_that_leave(void **state)
{
    struct kv_error error;
    struct ki_model *model;
    struct world w;
    uint64_t told = 0;

    (void)state;
    open_world(&w);
    for (size_t i = 0; i < ENGINES; i++) {
        publish(&w.engines[i]);
        wait_for_all(&w, i);
    }
    model = ki_registry_model(w.r, "m", "default");
    assert_int_equal(ki_dump_copy(w.r, model, count, &told), 0);
    assert_int_equal(told, 1 + 2 + 2);
    assert_int_equal(ki_registry_unregister(w.r, 2, "m", NULL, &(uint32_t){1}, &error), 0);
    told = 0;
    assert_int_equal(ki_dump_copy(w.r, model, count, &told), 0);
    assert_int_equal(told, 1 + 2);
    ki_model_release(model);
    close_world(&w);
}

/* Blocks that are leaving are some of a batch's: no copy tells that others are gone. */
static void kept_blocks_that_leave(void **state)
{
    struct ki_leaving leaving = {.instance = 3};
    struct ki_model *model;
    struct world w;
    uint64_t told = 0;

    (void)state;
    open_world_with(&w, true, 0);
    model = ki_registry_model(w.r, "m", "default");
    assert_int_equal(ki_dump_copy(w.r, model, count, &told), 0);
    assert_int_equal(told, 3);
    pthread_mutex_lock(&w.r->admin);
    w.r->leaving = &leaving;
    pthread_mutex_unlock(&w.r->admin);
    told = 0;
    assert_int_equal(ki_dump_copy(w.r, model, count, &told), 0);
    assert_int_equal(told, 0);
    pthread_mutex_lock(&w.r->admin);
    w.r->leaving = NULL;
    pthread_mutex_unlock(&w.r->admin);
    ki_model_release(model);
    close_world(&w);
}

/* Without memory no copy is made, and no stream stays held. */
static void streams_go_on_without_memory(void **state)
{
    struct ki_model *model;
    struct world w;
    uint64_t told;
    bool enough = false;

    (void)state;
    open_world_with(&w, true, 0);
    for (size_t i = 0; i < ENGINES; i++) {
        publish(&w.engines[i]);
        wait_for_all(&w, i);
    }
    model = ki_registry_model(w.r, "m", "default");
    for (long n = 1; !enough; n++) {
        int rc;

        told = 0;
        starve_at(n);
        rc = ki_dump_copy(w.r, model, count, &told);
        enough = !starved();
        starve_at(0);
        assert_true(rc == 0 || rc == -ENOMEM);
        for (size_t i = 0; i < w.r->n_listeners; i++)
            assert_int_equal(w.r->listeners[i]->copying, 0);
        if (rc == 0)
            assert_int_equal(told, 1 + 2 + 2 + 3);
    }
    ki_model_release(model);
    close_world(&w);
}

/* -- written while engines go on --------------------------------------------------------------- */

#define LONG_PROMPT 8192u /* blocks: more than the pipe, and what the writer keeps, have room for */
#define PIPE_BYTES 4096u

struct writing {
    struct world *w;
    const struct ki_model *model;
    struct kh_pipe *pipe;
    int rc;
};

static void *write_dump(void *arg)
{
    struct writing *to = arg;
    struct ki_dump_writer d = {.pipe = to->pipe, .form = KI_DUMP_JSON};

    kv_json_writer_init(&d.w, &d.buf);
    kv_json_begin_object(&d.w);
    to->rc = ki_dump_write_model(to->w->r, &d, to->model, false);
    kv_json_end_object(&d.w);
    to->rc = to->rc ? to->rc : ki_dump_flush(&d, 0);
    kv_buf_fini(&d.buf);
    kh_pipe_end(to->pipe, true);
    return NULL;
}

static void nothing(void *arg)
{
    (void)arg;
}

/* Read until @text has @min bytes, or all. */
static void read_dump(struct kh_pipe *pipe, struct kv_buf *text, size_t min)
{
    char bytes[PIPE_BYTES];

    while (text->len < min) {
        long n = kh_pipe_read(pipe, bytes, sizeof(bytes));

        assert_int_not_equal(n, -EIO);
        if (n == 0)
            return;
        if (n > 0)
            kv_buf_append(text, bytes, (size_t)n);
        else
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

static void store_long_prompt(struct kvi_index *index, uint64_t instance)
{
    struct kv_holder holder = {.worker = instance};

    for (uint64_t i = 0; i < LONG_PROMPT; i++) {
        struct kv_block block = {1000000 + i, 2000000 + i};
        uint64_t parent = block.hash - 1;

        assert_int_equal(
            kvi_store(index, holder, KV_TIER_DEVICE, i ? &parent : NULL, &block, 1, NULL), 0);
    }
}

/*
 * A later group of streams may have blocks in a form that was unknown when the dump began. A reader that
 * doesn't learn of it never finds them.
 */
static void forms_that_come_meanwhile(void **state)
{
    const struct kh_pipe_reader reader = {.park = nothing, .wake = nothing};
    struct ki_dump_reader dump = {.n = 0};
    struct kv_buf text = KV_BUF_INIT;
    struct writing to;
    struct world w;
    struct kv_json json;
    struct ki_model *model;
    pthread_t thread;

    (void)state;
    open_world(&w);
    publish(&w.engines[0]);
    wait_for_all(&w, 0);
    model = ki_registry_model(w.r, "m", "default");
    store_long_prompt(model->index, 1);
    to = (struct writing){.w = &w, .model = model};
    assert_int_equal(kh_pipe_create(PIPE_BYTES, &reader, &to.pipe), 0);
    assert_int_equal(pthread_create(&thread, NULL, write_dump, &to), 0);
    read_dump(to.pipe, &text, 1);
    ki_model_note_forms(model, KI_FORM(1, false) | KI_FORM(0, true));
    read_dump(to.pipe, &text, SIZE_MAX);
    pthread_join(thread, NULL);
    assert_int_equal(to.rc, 0);
    kv_json_init(&json, text.data, text.len);
    assert_int_equal(ki_dump_read(&dump, &json), 0);
    assert_int_equal(dump.models[0].forms & (KI_FORM(1, false) | KI_FORM(0, true)),
                     KI_FORM(1, false) | KI_FORM(0, true));
    ki_dump_reader_fini(&dump);
    kv_buf_fini(&text);
    kh_pipe_destroy(to.pipe);
    ki_model_release(model);
    close_world(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(copies_are_of_one_batch),   cmocka_unit_test(batches_wait),
        cmocka_unit_test(batches_without_room),      cmocka_unit_test(streams_that_leave),
        cmocka_unit_test(kept_blocks_that_leave),    cmocka_unit_test(streams_go_on_without_memory),
        cmocka_unit_test(forms_that_come_meanwhile),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
