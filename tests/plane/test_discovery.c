// SPDX-License-Identifier: Apache-2.0
/* Dynamo's discovery: its records byte for byte, names of files, workers from records, and a folder and an
 * etcd in which publishers appear, change, leave, die and come back. */
#include <dirent.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "base/unit.h"
#include "peer/etcd_unit.h"
#include "plane/discovery/impl.h"
#include "skip.h"
#include "support.h"

#define PUBLISHER UINT64_C(2158715499371232)
#define WORKER UINT64_C(13052285362917670345)
#define NAME "namespace/ns1/component/backend/endpoint/generate/topic/kv-events/7ab571e82dae0"
#define FILE_NAME                                                                       \
    "namespace%2Fns1%2Fcomponent%2Fbackend%2Fendpoint%2Fgenerate%2Ftopic%2Fkv%2Devents" \
    "%2F7ab571e82dae0"

/* Records as Dynamo 1.6.1 has written them. */
static const char source_json[] =
    "{\"type\":\"EventSource\",\"scope\":{\"kind\":\"endpoint\",\"endpoint\":{\"namespace\":"
    "\"ns1\","
    "\"component\":\"backend\",\"name\":\"generate\"}},\"topic\":\"kv-events\",\"publisher_id\":"
    "2158715499371232,\"metadata\":{\"kv_state_endpoint\":{\"namespace\":\"ns1\",\"component\":"
    "\"backend\",\"name\":\"generate\"},\"worker\":{\"worker_id\":13052285362917670345,\"dp_rank\":"
    "0}"
    ",\"publisher_id\":2158715499371232}}";
static const char channel_json[] =
    "{\"type\":\"EventChannel\",\"scope\":{\"kind\":\"endpoint\",\"endpoint\":{\"namespace\":"
    "\"ns1\","
    "\"component\":\"backend\",\"name\":\"generate\"}},\"topic\":\"kv-events\",\"instance_id\":"
    "2158715499371232,\"transport\":{\"kind\":\"Zmq\",\"config\":{\"endpoint\":"
    "\"tcp://192.0.2.2:41015\"}}}";

static const struct kvp_dynamo_endpoint here = {"ns1", "backend", "generate"};

/* -- records ----------------------------------------------------------------------------------- */

static void test_records(void **state)
{
    struct kvp_dynamo_source source;
    struct kvp_dynamo_channel channel;
    struct kv_buf out = KV_BUF_INIT;

    (void)state;
    assert_int_equal(kvp_dynamo_read_source(source_json, strlen(source_json), &source), 0);
    assert_true(source.publisher == PUBLISHER && source.worker == WORKER && source.rank == 0);
    assert_string_equal(source.of.ns, "ns1");
    assert_string_equal(source.of.component, "backend");
    assert_string_equal(source.of.name, "generate");
    kvp_dynamo_write_source(&out, &source);
    assert_string_equal(kv_buf_cstr(&out), source_json);
    kv_buf_clear(&out);
    assert_int_equal(kvp_dynamo_read_channel(channel_json, strlen(channel_json), &channel), 0);
    assert_true(channel.publisher == PUBLISHER);
    assert_string_equal(channel.address, "tcp://192.0.2.2:41015");
    kvp_dynamo_write_channel(&out, &channel);
    assert_string_equal(kv_buf_cstr(&out), channel_json);
    kv_buf_clear(&out);
    kvp_dynamo_put_name(&out, &here, PUBLISHER);
    assert_string_equal(kv_buf_cstr(&out), NAME);
    kv_buf_fini(&out);
}

/* A record without one of its parts, of another type, or cut short, is none. */
static void test_records_refused(void **state)
{
    static const char *const lost[] = {
        "\"type\"",      "\"scope\"",    "\"kind\"",        "\"endpoint\"",     "\"namespace\"",
        "\"component\"", "\"name\"",     "\"topic\"",       "\"publisher_id\"", "\"worker_id\"",
        "\"dp_rank\"",   "\"metadata\"", "\"EventSource\"", "\"kv-events\""};
    struct kvp_dynamo_source source = {.publisher = 9};
    struct kvp_dynamo_channel channel;
    char text[sizeof(source_json)];

    (void)state;
    for (size_t i = 0; i < KV_COUNT(lost); i++) {
        memcpy(text, source_json, sizeof(text));
        for (char *p = text; (p = strstr(p, lost[i])); p++)
            p[1] = 'X';
        assert_int_equal(kvp_dynamo_read_source(text, strlen(text), &source), -EPROTO);
    }
    for (size_t len = 0; len < strlen(source_json); len++)
        assert_int_equal(kvp_dynamo_read_source(source_json, len, &source), -EPROTO);
    assert_int_equal(kvp_dynamo_read_source(channel_json, strlen(channel_json), &source), -EPROTO);
    assert_int_equal(kvp_dynamo_read_channel(source_json, strlen(source_json), &channel), -EPROTO);
    assert_true(source.publisher == 9);
}

/* Of a broker, or on NATS: a channel that can't be followed. */
static void test_other_transports(void **state)
{
    static const char json[] =
        "{\"transport\":{\"config\":{\"subject_prefix\":\"a\"},\"kind\":\"Nats\"},\"instance_id\":"
        "7,"
        "\"topic\":\"kv-events\",\"scope\":{\"endpoint\":{\"name\":\"c\",\"namespace\":\"a\","
        "\"component\":\"b\"},\"kind\":\"endpoint\"},\"type\":\"EventChannel\",\"more\":[1]}";
    struct kvp_dynamo_channel channel;

    (void)state;
    assert_int_equal(kvp_dynamo_read_channel(json, strlen(json), &channel), 0);
    assert_string_equal(channel.address, "");
    assert_string_equal(channel.of.name, "c");
}

static void test_names(void **state)
{
    static const char *const bad[] = {"", "a", "a.b", "a.b.", "a.b.c.d", "a..c", "a.b.c ", "ä.b.c"};
    struct kvp_dynamo_endpoint of;
    struct kv_buf out = KV_BUF_INIT;

    (void)state;
    assert_int_equal(kvp_dynamo_endpoint_parse("ns-1.back_end.generate", &of), 0);
    assert_string_equal(of.component, "back_end");
    assert_int_equal(kvp_dynamo_endpoint_parse("a/b/c", &of), 0);
    for (size_t i = 0; i < KV_COUNT(bad); i++)
        assert_int_equal(kvp_dynamo_endpoint_parse(bad[i], &of), -EINVAL);
    kvp_dynamo_file_name(&out, NAME, strlen(NAME));
    assert_string_equal(kv_buf_cstr(&out), FILE_NAME);
    kv_buf_clear(&out);
    assert_int_equal(kvp_dynamo_from_file_name(&out, FILE_NAME), 0);
    assert_string_equal(kv_buf_cstr(&out), NAME);
    assert_int_equal(kvp_dynamo_from_file_name(&out, "a%2"), -EPROTO);
    assert_int_equal(kvp_dynamo_from_file_name(&out, "a%"), -EPROTO);
    assert_int_equal(kvp_dynamo_from_file_name(&out, "a%zz"), -EPROTO);
    kv_buf_fini(&out);
}

static void test_where(void **state)
{
    static const char *const good[] = {"etcd://h:1",     "etcd://h:1/",      "etcds://h:1,g:2/a",
                                       "etcd://h:1/a/b", "etcd://h:1/a/b/c", "file:///d"};
    static const char *const bad[] = {"",
                                      "h:1",
                                      "etcd://",
                                      "etcd://h",
                                      "etcd://*:1",
                                      "etcd://h:1//a",
                                      "etcd://h:1/a/b/c/d",
                                      "file://d",
                                      "http://h:1",
                                      "etcd://h:1/a//b"};
    struct kv_error error;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(good); i++)
        assert_int_equal(kvp_discovery_check(good[i], &error), 0);
    for (size_t i = 0; i < KV_COUNT(bad); i++) {
        error = (struct kv_error){0};
        assert_int_equal(kvp_discovery_check(bad[i], &error), -EINVAL);
        assert_true(*error.text);
    }
}

static void test_subjects(void **state)
{
    static const char *const pairs[][2] = {
        {"file:///d", "namespace.*.component.*.endpoint.*.kv-events"},
        {"etcd://h:1", "namespace.*.component.*.endpoint.*.kv-events"},
        {"etcd://h:1/", "namespace.*.component.*.endpoint.*.kv-events"},
        {"etcd://h:1,g:2/ns1", "namespace.ns1.component.*.endpoint.*.kv-events"},
        {"etcds://h:1/ns1/back", "namespace.ns1.component.back.endpoint.*.kv-events"},
        {"etcd://h:1/a/b/c", "namespace.a.component.b.endpoint.c.kv-events"}};
    char subject[KVP_DYNAMO_SUBJECT];

    (void)state;
    for (size_t i = 0; i < KV_COUNT(pairs); i++) {
        assert_int_equal(kvp_discovery_subject(pairs[i][0], subject), 0);
        assert_string_equal(subject, pairs[i][1]);
    }
    assert_int_equal(kvp_discovery_subject("etcd://h:1/a/b/c/d", subject), -EINVAL);
}

/* -- the table --------------------------------------------------------------------------------- */

#define MOST 16

/* The last call of a callback. */
static struct told {
    pthread_mutex_t lock;
    struct kvp_dynamo_worker workers[MOST];
    char addresses[MOST][64];
    size_t n, lone;
    unsigned calls;
} told = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void note(void *arg, const struct kvp_dynamo_worker *workers, size_t n, size_t lone)
{
    (void)arg;
    pthread_mutex_lock(&told.lock);
    assert_true(n <= MOST);
    for (size_t i = 0; i < n; i++) {
        told.workers[i] = workers[i];
        snprintf(told.addresses[i], sizeof(told.addresses[i]), "%s",
                 workers[i].address ? workers[i].address : "NATS");
    }
    told.n = n;
    told.lone = lone;
    told.calls++;
    pthread_mutex_unlock(&told.lock);
}

static size_t n_told(void)
{
    size_t n;

    pthread_mutex_lock(&told.lock);
    n = told.n;
    pthread_mutex_unlock(&told.lock);
    return n;
}

static unsigned n_calls(void)
{
    unsigned n;

    pthread_mutex_lock(&told.lock);
    n = told.calls;
    pthread_mutex_unlock(&told.lock);
    return n;
}

/* True when the told worker @i is this one. */
static bool is_told(size_t i, uint64_t worker, uint32_t rank, const char *address)
{
    bool is;

    pthread_mutex_lock(&told.lock);
    is = i < told.n && told.workers[i].worker == worker && told.workers[i].rank == rank &&
         strcmp(told.addresses[i], address) == 0;
    pthread_mutex_unlock(&told.lock);
    return is;
}

static void name_of(uint64_t publisher, char ret[256])
{
    struct kv_buf out = KV_BUF_INIT;

    kvp_dynamo_put_name(&out, &here, publisher);
    snprintf(ret, 256, "%s", kv_buf_cstr(&out));
    kv_buf_fini(&out);
}

static void put_source(struct kvp_table *t, uint64_t publisher, uint64_t worker, uint32_t rank)
{
    struct kvp_dynamo_source source = {here, publisher, worker, rank};
    struct kv_buf out = KV_BUF_INIT;
    char name[256];

    name_of(publisher, name);
    kvp_dynamo_write_source(&out, &source);
    assert_non_null(kvp_table_put(t, KVP_SOURCES, name, out.data, out.len));
    kv_buf_fini(&out);
}

static void put_channel(struct kvp_table *t, uint64_t publisher, const char *address)
{
    struct kvp_dynamo_channel channel = {.of = here, .publisher = publisher};
    struct kv_buf out = KV_BUF_INIT;
    char name[256];

    name_of(publisher, name);
    snprintf(channel.address, sizeof(channel.address), "%s", address);
    kvp_dynamo_write_channel(&out, &channel);
    assert_non_null(kvp_table_put(t, KVP_CHANNELS, name, out.data, out.len));
    kv_buf_fini(&out);
}

static void test_table(void **state)
{
    struct kvp_table t = {.n = 0};
    char name[256];

    (void)state;
    put_source(&t, 1, 100, 0);
    assert_int_equal(kvp_table_tell(&t, note, NULL), 0);
    assert_true(told.n == 0 && told.lone == 1);
    put_channel(&t, 1, "tcp://a:1");
    put_channel(&t, 2, "tcp://a:2");
    put_source(&t, 2, 100, 1);
    put_source(&t, 3, 50, 0);
    put_channel(&t, 3, "tcp://a:3");
    put_channel(&t, 9, "tcp://a:9"); /* of nobody */
    assert_true(t.changed);
    assert_int_equal(kvp_table_tell(&t, note, NULL), 0);
    assert_false(t.changed);
    assert_int_equal(told.n, 3);
    assert_true(is_told(0, 50, 0, "tcp://a:3") && is_told(1, 100, 0, "tcp://a:1") &&
                is_told(2, 100, 1, "tcp://a:2"));
    put_channel(&t, 1, "tcp://a:1"); /* the same again is no news */
    assert_false(t.changed);
    put_source(&t, 4, 100, 0); /* a new publisher of a known rank replaces the old one, ... */
    put_channel(&t, 4, "tcp://a:4");
    assert_int_equal(kvp_table_tell(&t, note, NULL), 0);
    assert_true(told.n == 3 && is_told(1, 100, 0, "tcp://a:4"));
    name_of(4, name); /* ... until it leaves */
    kvp_table_remove(&t, KVP_CHANNELS, name);
    assert_true(t.changed);
    assert_int_equal(kvp_table_tell(&t, note, NULL), 0);
    assert_true(told.n == 3 && told.lone == 1 && is_told(1, 100, 0, "tcp://a:1"));
    kvp_table_begin(&t); /* a look that sees one pair only */
    put_source(&t, 2, 100, 1);
    put_channel(&t, 2, "tcp://a:2");
    kvp_table_end(&t);
    assert_int_equal(t.n, 2);
    assert_int_equal(kvp_table_tell(&t, note, NULL), 0);
    assert_true(told.n == 1 && told.lone == 0);
    kvp_table_fini(&t);
}

/* Sources without a ZMQ channel are told where NATS is followed, whether they have a channel or none. */
static void test_table_nats(void **state)
{
    static const char channel[] =
        "{\"type\":\"EventChannel\",\"scope\":{\"kind\":\"endpoint\",\"endpoint\":{\"namespace\":"
        "\"ns1\",\"component\":\"backend\",\"name\":\"generate\"}},\"topic\":\"kv-events\","
        "\"instance_id\":3,\"transport\":{\"kind\":\"Nats\",\"config\":{\"subject_prefix\":\"a\"}}"
        "}";
    struct kvp_table t = {.nats = true};
    char name[256];

    (void)state;
    put_source(&t, 1, 100, 0);
    put_source(&t, 2, 100, 1);
    put_channel(&t, 2, "tcp://a:2");
    put_source(&t, 3, 50, 0);
    name_of(3, name);
    assert_non_null(kvp_table_put(&t, KVP_CHANNELS, name, channel, strlen(channel)));
    assert_int_equal(kvp_table_tell(&t, note, NULL), 0);
    assert_true(told.n == 3 && told.lone == 0);
    assert_true(is_told(0, 50, 0, "NATS") && is_told(1, 100, 0, "NATS") &&
                is_told(2, 100, 1, "tcp://a:2"));
    put_source(&t, 4, 100, 0); /* the latest counts */
    assert_int_equal(kvp_table_tell(&t, note, NULL), 0);
    assert_true(told.n == 3 && told.workers[1].publisher == 4);
    kvp_table_fini(&t);
}

/* Records under another's name, of another namespace, or that make no sense. */
static void test_table_refuses(void **state)
{
    struct kvp_table t = {.only = "namespace/ns1/"};

    (void)state;
    assert_null(
        kvp_table_put(&t, KVP_SOURCES, "namespace/ns1/x", source_json, strlen(source_json)));
    assert_null(kvp_table_put(&t, KVP_SOURCES, NAME, "{}", 2));
    assert_null(kvp_table_put(&t, KVP_CHANNELS, NAME, source_json, strlen(source_json)));
    assert_int_equal(t.left_out, 3);
    assert_non_null(kvp_table_put(&t, KVP_SOURCES, NAME, source_json, strlen(source_json)));
    assert_null(kvp_table_put(&t, KVP_SOURCES, NAME, "nonsense", 8)); /* removes what it was */
    assert_int_equal(t.n, 0);
    snprintf(t.only, sizeof(t.only), "namespace/ns/");
    assert_null(kvp_table_put(&t, KVP_SOURCES, NAME, source_json, strlen(source_json)));
    assert_int_equal(t.left_out, 4); /* not what isn't asked for */
    kvp_table_fini(&t);
}

/* -- a folder, and etcd ------------------------------------------------------------------------ */

static char folder[64];
static char where[128];

static struct kvp_discovery *follow(const char *path)
{
    char text[160];
    struct kvp_discovery_opts opts = {.where = text};
    struct kvp_discovery *d;
    struct kv_error error = {0};

    snprintf(text, sizeof(text), "%s%s", where, path);
    told.n = told.calls = 0;
    assert_int_equal(kvp_discovery_follow(&opts, note, NULL, &d, &error), 0);
    return d;
}

static struct kvp_discovery *announce(uint64_t publisher, uint64_t worker, const char *address)
{
    struct kvp_discovery_opts opts = {.where = where, .ttl_s = 2};
    struct kvp_dynamo_source source = {here, publisher, worker, 0};
    struct kvp_dynamo_channel channel = {.of = here, .publisher = publisher};
    struct kvp_discovery *d;
    struct kv_error error = {0};

    snprintf(channel.address, sizeof(channel.address), "%s", address);
    assert_int_equal(kvp_discovery_announce(&opts, &source, *address ? &channel : NULL, &d, &error),
                     0);
    return d;
}

static bool is_current(struct kvp_discovery *d)
{
    struct kvp_discovery_info info;

    kvp_discovery_get_info(d, &info);
    return info.current;
}

/* Publishers come, and go. */
static void come_and_go(void)
{
    struct kvp_discovery *d, *a, *b, *c;

    a = announce(1, 100, "tcp://a:1");
    wait_until(is_current(a));
    d = follow("");
    wait_until(n_told() == 1);
    assert_true(is_told(0, 100, 0, "tcp://a:1"));
    b = announce(2, 50, "tcp://a:2");
    wait_until(n_told() == 2);
    assert_true(is_told(0, 50, 0, "tcp://a:2"));
    c = announce(3, 7, ""); /* on NATS */
    wait_until(is_current(c));
    kvp_discovery_close(a);
    wait_until(n_told() == 1);
    assert_true(is_told(0, 50, 0, "tcp://a:2"));
    a = announce(4, 50, "tcp://a:4"); /* a restarted worker, whose old records haven't expired */
    wait_until(is_told(0, 50, 0, "tcp://a:4"));
    kvp_discovery_close(b);
    kvp_discovery_close(c);
    kvp_discovery_close(a);
    wait_until(n_told() == 0);
    kvp_discovery_close(d);
}

static void test_folder(void **state)
{
    (void)state;
    snprintf(where, sizeof(where), "file://%s", folder);
    come_and_go();
}

static void path_of(const char *bucket, char ret[512])
{
    snprintf(ret, 512, "%s/v1/%s/%s", folder, bucket, FILE_NAME);
}

static void write_text(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");

    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

/* Set a file's time of modification: seconds before now. */
static void age(const char *path, long s)
{
    struct timespec times[2];

    clock_gettime(CLOCK_REALTIME, &times[0]);
    times[0].tv_sec -= s;
    times[1] = times[0];
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

/* Files of Dynamo: of a process that died long ago, that lives again, that are nonsense for a time. */
static void test_folder_of_dynamo(void **state)
{
    char source[512], channel[512], temporary[576];
    struct kvp_discovery *d;

    (void)state;
    snprintf(where, sizeof(where), "file://%s", folder);
    path_of("event_sources", source);
    path_of("event_channels", channel);
    write_text(source, source_json);
    write_text(channel, channel_json);
    snprintf(temporary, sizeof(temporary), "%s/v1/event_channels/.tmp_x", folder);
    write_text(temporary, channel_json);
    age(source, 3600);
    age(channel, 3600);
    d = follow("");
    wait_until(n_calls() > 0);
    assert_int_equal(n_told(), 0);
    age(source, 3500); /* it lives: the times move on */
    age(channel, 3500);
    wait_until(n_told() == 1);
    assert_true(is_told(0, WORKER, 0, "tcp://192.0.2.2:41015"));
    write_text(channel, "{");
    wait_until(n_told() == 0);
    write_text(channel, channel_json);
    wait_until(n_told() == 1);
    wait_until(n_told() == 0); /* nobody keeps the files young */
    age(source, 0);
    age(channel, 0);
    wait_until(n_told() == 1);
    unlink(source);
    wait_until(n_told() == 0);
    kvp_discovery_close(d);
    unlink(channel);
    unlink(temporary);
}

static struct timespec mtime_of(const char *path)
{
    struct stat st = {0};

    (void)stat(path, &st); /* zero: not there yet */
    return st.st_mtim;
}

/* A record that may outlive its process by an hour is kept young all the same: followers of a folder
 * wait 10 s for that, whatever its owner was told. */
static void test_folder_and_a_long_life(void **state)
{
    struct kvp_discovery_opts opts = {.where = where, .ttl_s = 3600};
    struct kvp_dynamo_source source = {here, PUBLISHER, WORKER, 0};
    struct kv_error error = {0};
    struct kvp_discovery *d;
    struct timespec first;
    char path[512];

    (void)state;
    snprintf(where, sizeof(where), "file://%s", folder);
    path_of("event_sources", path);
    assert_int_equal(kvp_discovery_announce(&opts, &source, NULL, &d, &error), 0);
    wait_until((first = mtime_of(path)).tv_sec > 0);
    wait_until(mtime_of(path).tv_sec > first.tv_sec);
    kvp_discovery_close(d);
    opts.ttl_s = 3601;
    assert_int_equal(kvp_discovery_announce(&opts, &source, NULL, &d, &error), -EINVAL);
    assert_non_null(strstr(error.text, "3600"));
}

/* Leave this process one more descriptor. Returns the limit from before. */
static struct rlimit spare_one_descriptor(void)
{
    struct rlimit before, now;
    int next = dup(0);

    assert_true(next > 0);
    close(next);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    now = before;
    now.rlim_cur = (rlim_t)next + 1;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &now), 0);
    return before;
}

static uint64_t left_out(struct kvp_discovery *d)
{
    struct kvp_discovery_info info;

    kvp_discovery_get_info(d, &info);
    return info.left_out;
}

/* The folder can be listed, its files can't be read for a while: what was known stays. */
static void test_files_cannot_be_read(void **state)
{
    char source[512], channel[512];
    struct kvp_discovery *d;
    struct rlimit before;
    unsigned calls;

    (void)state;
    snprintf(where, sizeof(where), "file://%s", folder);
    path_of("event_sources", source);
    path_of("event_channels", channel);
    write_text(source, source_json);
    write_text(channel, channel_json);
    d = follow("");
    wait_until(n_told() == 1);
    calls = n_calls();
    before = spare_one_descriptor();
    age(source, 20);
    age(channel, 20);
    wait_until(left_out(d) == 2 || n_told() == 0);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    wait_until(left_out(d) == 0);
    assert_int_equal(n_calls(), calls);
    unlink(channel);
    wait_until(n_told() == 0);
    kvp_discovery_close(d);
    unlink(source);
}

/* Times of modification that no clock of ours reaches are a time like others. */
static void test_times_of_files(void **state)
{
    static const time_t times[] = {INT64_C(15000000000), INT64_C(-15000000000)};
    char source[512], channel[512];
    struct kvp_discovery *d;

    (void)state;
    snprintf(where, sizeof(where), "file://%s", folder);
    path_of("event_sources", source);
    path_of("event_channels", channel);
    write_text(source, source_json);
    write_text(channel, channel_json);
    for (size_t i = 0; i < KV_COUNT(times); i++) {
        struct timespec at[2] = {{.tv_sec = times[i]}, {.tv_sec = times[i]}};

        assert_int_equal(utimensat(AT_FDCWD, source, at, 0), 0);
        d = follow("");
        wait_until(n_calls() > 0);
        assert_int_equal(n_told(), times[i] > 0); /* long ago, its process died */
        age(source, 0);
        wait_until(n_told() == 1);
        kvp_discovery_close(d);
    }
    unlink(source);
    unlink(channel);
}

/* A folder that doesn't exist yet, and one that vanishes: what was known stays. */
static void test_folder_vanishes(void **state)
{
    struct kvp_discovery *d, *a;
    char aside[96];

    (void)state;
    snprintf(where, sizeof(where), "file://%s/later", folder);
    d = follow("");
    a = announce(1, 100, "tcp://a:1");
    wait_until(n_told() == 1);
    assert_true(is_current(d));
    kvp_discovery_close(a);
    wait_until(n_told() == 0);
    kvp_discovery_close(d);
    snprintf(aside, sizeof(aside), "%s/later", folder);
    assert_int_equal(remove_dir(aside), 0);
}

static void test_etcd(void **state)
{
    (void)state;
    if (!etcd.pid)
        skip_because("no etcd");
    snprintf(where, sizeof(where), "etcd://127.0.0.1:%u", etcd.ports[0]);
    come_and_go();
}

static void test_etcd_paths(void **state)
{
    struct kvp_discovery *d, *a;

    (void)state;
    if (!etcd.pid)
        skip_because("no etcd");
    a = announce(1, 100, "tcp://a:1");
    wait_until(is_current(a));
    d = follow("/ns1/backend");
    wait_until(n_told() == 1);
    kvp_discovery_close(d);
    d = follow("/ns");
    wait_until(is_current(d) && n_calls() > 0);
    assert_int_equal(n_told(), 0);
    kvp_discovery_close(d);
    kvp_discovery_close(a);
}

/* etcd is killed and comes back: with its data, and without any. */
static void test_etcd_restarts(void **state)
{
    struct kvp_discovery *d, *a;

    (void)state;
    if (!etcd.pid)
        skip_because("no etcd");
    a = announce(1, 100, "tcp://a:1");
    d = follow("");
    wait_until(n_told() == 1);
    for (int i = 0; i < 2; i++) {
        etcd_kill();
        wait_until(!is_current(d) && !is_current(a));
        assert_int_equal(n_told(), 1); /* what was known stays */
        if (i)
            etcd_forget();
        etcd_start();
        wait_until(is_current(d) && is_current(a) && n_told() == 1);
        kvp_discovery_close(d);
        d = follow(""); /* the records are there again */
        wait_until(n_told() == 1);
    }
    kvp_discovery_close(a);
    wait_until(n_told() == 0);
    kvp_discovery_close(d);
}

/* A publisher whose process dies: its lease ends. */
static void test_etcd_expiry(void **state)
{
    struct kvp_discovery *d;
    pid_t pid;

    (void)state;
    if (!etcd.pid)
        skip_because("no etcd");
    pid = fork(); /* before the follower's thread: a forked process starts threads of its own */
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)announce(1, 100, "tcp://a:1");
        pause();
        _exit(1);
    }
    d = follow("");
    wait_until(n_told() == 1);
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    wait_until(n_told() == 0);
    kvp_discovery_close(d);
}

static int start_servers(void **state)
{
    (void)state;
    if (temp_dir(folder, sizeof(folder)) < 0)
        return -1;
    if (!etcd_is_here() || !mkdtemp(etcd.folder))
        return 0;
    etcd_choose_ports();
    etcd_start();
    return 0;
}

static int stop_servers(void **state)
{
    (void)state;
    if (etcd.pid) {
        etcd_kill();
        etcd_forget();
        rmdir(etcd.folder);
    }
    return remove_dir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_records),
        cmocka_unit_test(test_records_refused),
        cmocka_unit_test(test_other_transports),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_where),
        cmocka_unit_test(test_subjects),
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_table_nats),
        cmocka_unit_test(test_table_refuses),
        cmocka_unit_test(test_folder),
        cmocka_unit_test(test_folder_of_dynamo),
        cmocka_unit_test(test_folder_and_a_long_life),
        cmocka_unit_test(test_files_cannot_be_read),
        cmocka_unit_test(test_times_of_files),
        cmocka_unit_test(test_folder_vanishes),
        cmocka_unit_test(test_etcd),
        cmocka_unit_test(test_etcd_paths),
        cmocka_unit_test(test_etcd_restarts),
        cmocka_unit_test(test_etcd_expiry),
    };

    return cmocka_run_group_tests(tests, start_servers, stop_servers);
}
