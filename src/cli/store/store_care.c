// SPDX-License-Identifier: Apache-2.0
/* verify, gc, stats, conformance. */
#include <stdio.h>

#include "cli/show/format.h"
#include "cli/store/store.h"

/* -- verify ------------------------------------------------------------------------------------ */

struct verification {
    struct kc_store_call *call;
    struct kv_buf problems; /* JSON strings */
    struct kv_json_writer list;
};

static void report_problem(void *arg, const char *line)
{
    struct verification *v = arg;

    if (v->call->opts.json) {
        kv_json_put_str(&v->list, line);
        return;
    }
    kc_bar_finish(&v->call->bar);
    kc_store_put_text(stdout, line);
    putchar('\n');
}

static int verify_progress(void *arg, uint64_t done, uint64_t total)
{
    struct verification *v = arg;

    return kc_bar_progress(&v->call->bar, done, total);
}

static void put_interrupted(struct kc_store_call *call)
{
    kv_json_member_bool(&call->json, "interrupted", true);
}

static int print_verified(struct verification *v, const struct kvs_verify_result *r, int status)
{
    struct kc_store_call *call = v->call;

    if (!call->opts.json) {
        printf("%s objects (%s opaque, %s damaged); %s chunks, %s: %s missing, %s damaged",
               kc_count(r->manifests).s, kc_count(r->opaque_manifests).s,
               kc_count(r->bad_manifests).s, kc_count(r->chunks).s, kc_bytes((double)r->bytes).s,
               kc_count(r->missing_chunks).s, kc_count(r->bad_chunks).s);
        if (r->prefix_chunks)
            printf("; %s of prefix caches, %s damaged", kc_count(r->prefix_chunks).s,
                   kc_count(r->bad_prefix_chunks).s);
        putchar('\n');
        return status;
    }
    kc_store_json_begin(call);
    kc_store_json_u64(call, "manifests", r->manifests);
    kc_store_json_u64(call, "opaque_manifests", r->opaque_manifests);
    kc_store_json_u64(call, "bad_manifests", r->bad_manifests);
    kc_store_json_u64(call, "chunks", r->chunks);
    kc_store_json_u64(call, "missing_chunks", r->missing_chunks);
    kc_store_json_u64(call, "bad_chunks", r->bad_chunks);
    kc_store_json_u64(call, "bytes", r->bytes);
    kc_store_json_u64(call, "prefix_chunks", r->prefix_chunks);
    kc_store_json_u64(call, "bad_prefix_chunks", r->bad_prefix_chunks);
    if (status == KC_STORE_INTERRUPTED)
        put_interrupted(call);
    kv_json_key(&call->json, "problems");
    kv_json_put_raw(&call->json, kv_buf_cstr(&v->problems), v->problems.len);
    return kc_store_json_end(call, stdout, status);
}

int kc_store_verify(struct kc_store_call *call)
{
    struct kvs_verify_result result = {.size = sizeof(result)};
    struct verification v = {.call = call};
    int rc, status;
    bool denied;

    kv_json_writer_init(&v.list, &v.problems);
    kv_json_begin_array(&v.list);
    rc = kvs_verify(call->store, call->name, report_problem, verify_progress, &v, &result);
    kv_json_end_array(&v.list);
    kc_bar_finish(&call->bar);
    status = result.bad_manifests || result.bad_chunks || result.bad_prefix_chunks ||
                     (result.missing_chunks && !kc_store_is_limited(call))
                 ? KC_STORE_PROBLEMS
                 : KC_STORE_OK;
    if (rc == -ECANCELED)
        fprintf(stderr, "kvasir store verify: interrupted; this is what was checked until then\n");
    if (rc == -ECANCELED)
        status = KC_STORE_INTERRUPTED;
    denied = (rc == -EACCES || rc == -EPERM) && (result.manifests || result.prefix_chunks);
    if (denied) { /* damage found beside what can't be read is damage */
        fprintf(stderr, "kvasir store verify: some can't be read: %s\n", strerror(-rc));
        status = status == KC_STORE_OK ? KC_STORE_FAILED : status;
    }
    status = rc < 0 && rc != -ECANCELED && !denied
                 ? kc_store_fail(call, call->name ? call->name : call->label, rc)
                 : print_verified(&v, &result, status);
    kv_buf_fini(&v.problems);
    return status;
}

/* -- gc ---------------------------------------------------------------------------------------- */

static int gc_progress(void *arg, enum kvs_gc_phase phase, uint64_t done, uint64_t total)
{
    struct kc_bar *bar = arg;
    const char *unit = phase == KVS_GC_MARK ? "objects" : "chunks";

    if (bar->unit != unit) {
        bar->unit = unit;
        bar->start_ns = 0;
    }
    return kc_bar_progress(bar, done, total);
}

static int print_collected(struct kc_store_call *call, const struct kvs_gc_result *r, int status)
{
    bool dry_run = call->opts.dry_run;

    if (!call->opts.json) {
        printf("%s %s chunks, %s; %s stay", dry_run ? "would delete" : "deleted",
               kc_count(r->deleted_chunks).s, kc_bytes((double)r->deleted_bytes).s,
               kc_count(r->live_chunks).s);
        if (r->opaque_manifests)
            printf("; %s manifests of other programs", kc_count(r->opaque_manifests).s);
        if (r->errors)
            printf("; %s could not be deleted", kc_count(r->errors).s);
        putchar('\n');
        return status;
    }
    kc_store_json_begin(call);
    kv_json_member_bool(&call->json, "dry_run", dry_run);
    kc_store_json_u64(call, "live_chunks", r->live_chunks);
    kc_store_json_u64(call, "deleted_chunks", r->deleted_chunks);
    kc_store_json_u64(call, "deleted_bytes", r->deleted_bytes);
    kc_store_json_u64(call, "opaque_manifests", r->opaque_manifests);
    kc_store_json_u64(call, "errors", r->errors);
    if (status == KC_STORE_INTERRUPTED)
        put_interrupted(call);
    return kc_store_json_end(call, stdout, status);
}

int kc_store_gc(struct kc_store_call *call)
{
    const struct kc_store_opts *o = &call->opts;
    struct kvs_gc_opts opts = {.size = sizeof(opts),
                               .grace_s = o->no_grace ? KVS_GC_NO_GRACE : o->grace_ms / 1000,
                               .opaque_too = o->opaque_too,
                               .dry_run = o->dry_run,
                               .prefix_age_s = o->prefix_age_ms / 1000,
                               .progress = gc_progress,
                               .progress_arg = &call->bar};
    struct kvs_gc_result r = {.size = sizeof(r)};
    int rc = kvs_gc(call->store, &opts, &r);

    kc_bar_finish(&call->bar);
    if (rc < 0 && rc != -ECANCELED)
        return kc_store_fail(call, call->label, rc);
    if (rc < 0)
        fprintf(stderr, "kvasir store gc: interrupted; what is needed is all there\n");
    return print_collected(call, &r,
                           rc < 0     ? KC_STORE_INTERRUPTED
                           : r.errors ? KC_STORE_FAILED
                                      : KC_STORE_OK);
}

/* -- stats ------------------------------------------------------------------------------------- */

/* Write a figure, unless the backend doesn't know it without a listing. */
static void put_figure(struct kc_store_call *call, const char *key, uint64_t value, bool bytes)
{
    if (value == UINT64_MAX)
        return;
    if (call->opts.json)
        kc_store_json_u64(call, key, value);
    else
        printf("%-12s %s\n", key, bytes ? kc_bytes((double)value).s : kc_count(value).s);
}

int kc_store_stats(struct kc_store_call *call)
{
    kv_store_stats s = {.size = sizeof(s)};
    int rc = kvs_stats(call->store, &s);

    if (rc < 0)
        return kc_store_fail(call, call->label, rc);
    kc_store_json_begin(call);
    put_figure(call, "manifests", s.n_manifests, false);
    put_figure(call, "chunks", s.n_chunks, false);
    put_figure(call, "bytes", s.bytes, true);
    if (s.limit_bytes)
        put_figure(call, "limit_bytes", s.limit_bytes, true);
    return call->opts.json ? kc_store_json_end(call, stdout, KC_STORE_OK) : KC_STORE_OK;
}

/* -- conformance ------------------------------------------------------------------------------- */

struct table {
    struct kc_store_call *call;
    unsigned n[4];        /* number of checks by verdict */
    char not_killed[256]; /* why no process was killed, and what that leaves open; "": some were */
};

/* Drop the backend's log lines: the checks make it refuse and log much. */
static void drop_line(void *arg, int level, const char *line)
{
    (void)arg;
    (void)level;
    (void)line;
}

static int print_sums(struct table *table, int status)
{
    struct kc_store_call *call = table->call;

    if (!call->opts.json) {
        printf("\n%u passed, %u failed, %u advised, %u skipped\n", table->n[KVS_PASS],
               table->n[KVS_FAIL], table->n[KVS_ADVICE], table->n[KVS_SKIP]);
        if (table->not_killed[0]) {
            fputs("what a kill costs is not known: ", stdout);
            kc_store_put_text(stdout, table->not_killed);
            putchar('\n');
        }
        return status;
    }
    kv_json_end_array(&call->json);
    kc_store_json_u64(call, "passed", table->n[KVS_PASS]);
    kc_store_json_u64(call, "failed", table->n[KVS_FAIL]);
    kc_store_json_u64(call, "advised", table->n[KVS_ADVICE]);
    kc_store_json_u64(call, "skipped", table->n[KVS_SKIP]);
    if (status == KC_STORE_INTERRUPTED)
        put_interrupted(call);
    return kc_store_json_end(call, stdout, status);
}

/* End the program after ^C, between two checks: a check has removed its objects by then. */
static void stop(struct table *table)
{
    fprintf(stderr, "kvasir store conformance: interrupted\n");
    exit(print_sums(table, KC_STORE_INTERRUPTED));
}

static void print_check(void *arg, const char *check, enum kvs_verdict verdict, const char *detail)
{
    static const char *const WORDS[] = {"pass", "FAIL", "skip", "note"};
    static const char *const KEYS[] = {"pass", "fail", "skip", "advice"};
    struct table *table = arg;
    struct kc_store_call *call = table->call;

    /* The store is open when its first check ends: the table reports all further failures. */
    if (table->n[0] + table->n[1] + table->n[2] + table->n[3] == 0)
        kvs_set_log(drop_line, NULL);
    table->n[verdict]++;
    if (verdict == KVS_SKIP && strncmp(check, "kill: ", strlen("kill: ")) == 0)
        snprintf(table->not_killed, sizeof(table->not_killed), "%s", detail);
    if (call->opts.json) {
        kv_json_begin_object(&call->json);
        kc_store_json_str(call, "check", check);
        kc_store_json_str(call, "verdict", KEYS[verdict]);
        if (*detail)
            kc_store_json_str(call, "detail", detail);
        kv_json_end_object(&call->json);
    } else {
        printf(*detail ? "%s  %-52s " : "%s  %s", WORDS[verdict], check);
        kc_store_put_text(stdout, detail);
        putchar('\n');
        fflush(stdout);
    }
    if (kc_bar_interrupted())
        stop(table);
}

int kc_store_conformance(struct kc_store_call *call)
{
    struct table table = {.call = call};
    int rc;

    kc_store_json_begin(call);
    kv_json_key(&call->json, "checks");
    kv_json_begin_array(&call->json);
    rc = kvs_conformance(call->uri, print_check, &table);
    kvs_set_log(NULL, NULL);
    if (rc < 0)
        return kc_store_fail_open(call, rc);
    return print_sums(&table, rc > 0 ? KC_STORE_PROBLEMS : KC_STORE_OK);
}
