// SPDX-License-Identifier: Apache-2.0
/* The conformance kit: the memory backend passes every check. Replacing one of its functions by a
 * broken one makes a check fail, and each check is made to fail by one such replacement. */
#include "store/broken_functions.h"
#include "support.h"

/* -- The table of mutations -------------------------------------------------------------------- */

#define SET(what) static void mutate_##what(void)

SET(version_0)
{
    vt.version = 0;
}
SET(no_function)
{
    vt.get_manifest = NULL;
}
SET(version_9)
{
    vt.version = 9;
}
SET(no_prefetch)
{
    vt.prefetch_chunks = NULL;
}
SET(loud)
{
    Dl_info info;

    assert_int_not_equal(dladdr((void *)(uintptr_t)_assert_true, &info), 0);
    library = info.dli_fname; /* cmocka exports a lot */
}
SET(own_puts)
{
    vt.put_chunk = put_marks_dirty, vt.get_chunk = get_half_written;
}
SET(put_lazy)
{
    vt.put_chunk = put_lazy, vt.get_chunk = get_lazy, vt.put_manifest = manifest_lazy;
}
SET(own_late)
{
    vt.put_chunk = put_lazy, vt.get_chunk = get_late, vt.put_manifest = manifest_lazy;
}
SET(short_keys)
{
    vt.put_chunk = put_short_keys, vt.get_chunk = get_short_keys;
}
SET(text_keys)
{
    vt.put_chunk = put_text_keys, vt.get_chunk = get_text_keys;
}
SET(keeps_input)
{
    vt.put_chunk = put_keeps_input, vt.get_chunk = get_kept_input;
}
SET(own_only)
{
    vt.put_chunk = put_notes_owner, vt.get_chunk = get_own_only;
}
SET(negative_cache)
{
    vt.prefetch_chunks = prefetch_notes, vt.put_chunk = put_after_prefetch_is_lost;
}
SET(lower_case)
{
    vt.put_manifest = put_lower, vt.get_manifest = get_lower;
}
SET(cut_names)
{
    vt.put_manifest = put_255, vt.get_manifest = get_255;
}
SET(ext_size)
{
    ext.size = 4;
}
SET(ext_version)
{
    ext.version = 9;
}

/* The file store in a folder of its own. */
SET(file)
{
    static char folder[64];

    assert_int_equal(temp_dir(folder, sizeof(folder)), 0);
    where = folder;
    vt = *kvs_file_vtable();
    ext = *kvs_file_ext();
}
SET(loses_manifests)
{
    mutate_file();
    vt.put_manifest = file_manifest_late, vt.close = file_close_publishes;
}
SET(loses_flushed)
{
    mutate_file();
    ext.flush = file_flush_nothing;
}
SET(leaves_halves)
{
    mutate_file();
    vt.put_chunk = file_put_half, vt.put_manifest = file_manifest_mends;
}

/* One function of a table replaced. */
#define ONE(table, field, fn)     \
    static void mutate_##fn(void) \
    {                             \
        table.field = fn;         \
    }
ONE(vt, open, open_leaks)
ONE(vt, open, open_takes_signals)
ONE(vt, close, close_loses_all)
ONE(vt, close, close_takes_puts)
ONE(vt, get_chunk, get_cuts)
ONE(vt, get_chunk, get_fears_zeros)
ONE(vt, get_chunk, get_empty_is_null)
ONE(vt, get_chunk, get_finds_all)
ONE(vt, get_chunk, get_spoils_outputs)
ONE(vt, get_chunk, get_keeps_output)
ONE(vt, put_chunk, put_never_hits)
ONE(vt, put_chunk, put_wants_bytes)
ONE(vt, put_chunk, put_replaces)
ONE(vt, put_chunk, put_forgets_after_500)
ONE(vt, put_chunk, put_one_thread)
ONE(vt, put_manifest, manifest_cuts)
ONE(vt, put_manifest, manifest_leaves_tail)
ONE(vt, put_manifest, names_without_dots)
ONE(vt, put_manifest, refuses_most_names)
ONE(vt, put_manifest, manifest_gone_between)
ONE(vt, put_manifest, manifest_torn)
ONE(vt, put_manifest, manifest_not_empty)
ONE(vt, get_manifest, manifest_found_always)
ONE(vt, get_manifest, get_no_slash)
ONE(vt, get_manifest, get_manifest_fails)
ONE(vt, delete_manifest, delete_wants_one)
ONE(vt, delete_manifest, delete_does_nothing)
ONE(vt, delete_manifest, delete_by_prefix)
ONE(vt, delete_manifest, delete_takes_chunks)
ONE(vt, delete_manifest, delete_chunk_of_name)
ONE(vt, prefetch_chunks, prefetch_returns_count)
ONE(vt, prefetch_chunks, prefetch_drops)
ONE(ext, exists_chunks, exists_all)
ONE(ext, get_chunks, get_many_counts_all)
ONE(ext, put_chunks, put_many_no_hits)
ONE(ext, get_parts, get_parts_short)
ONE(ext, put_parts, put_parts_first)
ONE(ext, get_ranges, ranges_of_any_version)
ONE(ext, get_ranges, ranges_beyond_the_end)
ONE(ext, stream_chunk, stream_goes_on)
ONE(ext, stream_chunk, stream_nothing_of_empty)
ONE(ext, delete_chunk, delete_nothing)
ONE(ext, delete_chunk_if, delete_anyway)
ONE(ext, new_chunks, new_none)
ONE(ext, list_manifests, list_twice)
ONE(ext, list_chunks, list_stubborn)
ONE(ext, list_refs, refs_none)
ONE(ext, touch_chunks, touch_all)
ONE(ext, flush, flush_fails)
ONE(ext, sweep_chunks, sweep_ageless)
ONE(ext, sweep_chunks, sweep_merciless)
ONE(ext, stats, stats_none)

#define CLOSE_NULL "close: NULL is a no-op"
#define KILLED "kill: what was published or flushed is there"
#define KILLED_BEFORE "kill: chunks that nobody published can be put again"
static const struct mutation {
    void (*mutate)(void);
    const char *caught_by;
    enum kvs_verdict verdict; /* advice: the specification allows it */
} MUTATIONS[] = {
    {mutate_version_0, "table: version 1 or more, no function NULL", KVS_FAIL},
    {mutate_no_function, "table: version 1 or more, no function NULL", KVS_FAIL},
    {mutate_version_9, "table: the version says what there is", KVS_ADVICE},
    {mutate_no_prefetch, "table: the version says what there is", KVS_FAIL},
    {mutate_loud, "library: exports nothing but its tables", KVS_ADVICE},
    {mutate_open_leaks, "open, close: leave no descriptors open", KVS_FAIL},
    {mutate_open_takes_signals, "open: leaves the host's signals alone", KVS_ADVICE},
    {mutate_get_cuts, "chunks: 0 B to 16 MiB come back as put", KVS_FAIL},
    {mutate_get_fears_zeros, "chunks: zeros, text and noise come back", KVS_FAIL},
    {mutate_get_empty_is_null, "chunks, manifests: empty ones exist", KVS_ADVICE},
    {mutate_put_wants_bytes, "chunks, manifests: empty ones exist", KVS_FAIL},
    {mutate_put_never_hits, "chunks: a duplicate returns 1", KVS_FAIL},
    {mutate_put_never_hits, "chunks: a buffered duplicate returns 1", KVS_FAIL},
    {mutate_put_lazy, "chunks: a buffered duplicate returns 1", KVS_ADVICE},
    {mutate_own_late, "chunks: a handle sees its own puts", KVS_ADVICE},
    {mutate_put_replaces, "chunks: never change", KVS_FAIL},
    {mutate_short_keys, "chunks: 8- to 32-byte keys coexist", KVS_FAIL},
    {mutate_text_keys, "chunks: keys are bytes, not text", KVS_FAIL},
    {mutate_get_finds_all, "chunks: a missing one is an error", KVS_FAIL},
    {mutate_get_spoils_outputs, "chunks: a missing one is an error", KVS_ADVICE},
    {mutate_own_puts, "chunks: a handle sees its own puts", KVS_FAIL},
    {mutate_put_forgets_after_500, "chunks: 1000 in one save", KVS_FAIL},
    {mutate_get_keeps_output, "outputs: malloc'd, the caller's own", KVS_FAIL},
    {mutate_keeps_input, "inputs: borrowed for the call only", KVS_FAIL},
    {mutate_manifest_cuts, "manifests: up to 4 MiB come back", KVS_FAIL},
    {mutate_manifest_leaves_tail, "manifests: replaced whole, on a second handle, too", KVS_FAIL},
    {mutate_manifest_found_always, "manifests: a missing one is an error", KVS_FAIL},
    {mutate_delete_wants_one, "delete: gone on a second handle; missing is fine", KVS_FAIL},
    {mutate_delete_does_nothing, "delete: gone on a second handle; missing is fine", KVS_FAIL},
    {mutate_delete_by_prefix, "delete: gone on a second handle; missing is fine", KVS_FAIL},
    {mutate_delete_takes_chunks, "delete: takes no chunk of another object", KVS_ADVICE},
    {mutate_own_only, "publish: all chunks there on a second handle", KVS_FAIL},
    {mutate_close_loses_all, "publish: everything is there after re-open", KVS_FAIL},
    {mutate_prefetch_returns_count, "prefetch: a hint that changes nothing", KVS_FAIL},
    {mutate_prefetch_drops, "prefetch: a hint that changes nothing", KVS_FAIL},
    {mutate_negative_cache, "prefetch: a hint that changes nothing", KVS_FAIL},
    {mutate_names_without_dots, "names: plain ones are taken", KVS_FAIL},
    {mutate_lower_case, "names: odd ones refused or kept, never mixed up", KVS_FAIL},
    {mutate_cut_names, "names: odd ones refused or kept, never mixed up", KVS_FAIL},
    {mutate_get_no_slash, "names: odd ones refused or kept, never mixed up", KVS_FAIL},
    {mutate_delete_chunk_of_name, "names: no clash with keys of chunks", KVS_FAIL},
    {mutate_put_one_thread, "threads: savers on one handle", KVS_FAIL},
    {mutate_manifest_gone_between, "threads: a manifest is the old or the new one", KVS_FAIL},
    {mutate_manifest_torn, "threads: a manifest is the old or the new one", KVS_FAIL},
    {mutate_manifest_not_empty, "threads: gets beside a writer, 32-byte keys, empty sentinel",
     KVS_FAIL},
    {mutate_close_takes_puts, "handles: the same chunks saved twice", KVS_FAIL},
    {mutate_loses_manifests, KILLED, KVS_FAIL},
    {mutate_loses_flushed, KILLED, KVS_FAIL},
    {mutate_get_manifest_fails, KILLED, KVS_FAIL},
    {mutate_leaves_halves, KILLED_BEFORE, KVS_FAIL},
    {mutate_ext_size, "ext: table has a size and version 1", KVS_FAIL},
    {mutate_ext_version, "ext: table has a size and version 1", KVS_FAIL},
    {mutate_exists_all, "ext: exists_chunks", KVS_FAIL},
    {mutate_get_many_counts_all, "ext: get_chunks", KVS_FAIL},
    {mutate_put_many_no_hits, "ext: put_chunks", KVS_FAIL},
    {mutate_stream_goes_on, "ext: stream_chunk", KVS_FAIL},
    {mutate_stream_nothing_of_empty, "ext: stream_chunk", KVS_FAIL},
    {mutate_get_parts_short, "ext: get_parts", KVS_FAIL},
    {mutate_put_parts_first, "ext: put_parts", KVS_FAIL},
    {mutate_ranges_of_any_version, "ext: get_ranges", KVS_FAIL},
    {mutate_ranges_beyond_the_end, "ext: get_ranges", KVS_FAIL},
    {mutate_delete_nothing, "ext: delete_chunk", KVS_FAIL},
    {mutate_delete_anyway, "ext: delete_chunk_if", KVS_FAIL},
    {mutate_new_none, "ext: new_chunks", KVS_FAIL},
    {mutate_list_twice, "ext: list_manifests", KVS_FAIL},
    {mutate_list_stubborn, "ext: list_chunks", KVS_FAIL},
    {mutate_refs_none, "ext: list_refs", KVS_FAIL},
    {mutate_touch_all, "ext: touch_chunks", KVS_FAIL},
    {mutate_flush_fails, "ext: flush", KVS_FAIL},
    {mutate_sweep_ageless, "ext: sweep_chunks", KVS_FAIL},
    {mutate_sweep_merciless, "ext: sweep_chunks", KVS_FAIL},
    {mutate_stats_none, "ext: stats", KVS_ADVICE},
};

/* -- Tests ------------------------------------------------------------------------------------- */

struct seen {
    const char *check; /* the one that we wait for; NULL: print all that don't pass */
    enum kvs_verdict verdict;
    char detail[256];
    unsigned n, n_pass, n_skip;
};

static void note(void *arg, const char *check, enum kvs_verdict verdict, const char *detail)
{
    struct seen *seen = arg;

    seen->n++;
    seen->n_pass += verdict == KVS_PASS;
    seen->n_skip += verdict == KVS_SKIP;
    if (!seen->check && verdict != KVS_PASS)
        print_message("%s %s: %s\n", verdict == KVS_FAIL ? "FAIL" : "skip", check, detail);
    if (seen->check && strcmp(seen->check, check) == 0) {
        seen->verdict = verdict;
        snprintf(seen->detail, sizeof(seen->detail), "%s", detail);
    }
}

static void reset(void)
{
    if (where && strcmp(where, URI) != 0)
        assert_int_equal(remove_dir(where), 0);
    where = URI;
    forget_later();
    vt = *memory_vtable();
    ext = *memory_ext();
    library = NULL;
    for (unsigned i = 0; i < m.n_fds; i++)
        close(m.fds[i]);
    free(m.kept);
    memset(&m, 0, sizeof(m));
    memory_forget_all();
    signal(SIGPIPE, SIG_DFL);
}

static void test_right_backend_passes(void **state)
{
    struct seen seen = {0};

    (void)state;
    reset();
    assert_int_equal(kvs_conf_run(&vt, &ext, URI, NULL, NULL, note, &seen), 0);
    assert_in_range(seen.n, 40, 100);
    assert_int_equal(seen.n_skip, 3); /* no library to look at; another process has other memory */
    assert_int_equal(seen.n_pass, seen.n - 3);
    assert_null(memory_space(URI)->manifests); /* nothing is left behind */
    assert_null(memory_space(URI)->chunks);
    assert_int_equal(memory_space(URI)->opens, 0);
}

static void test_version_1_passes(void **state)
{
    struct seen seen = {0};

    (void)state;
    reset();
    vt.version = 1;
    vt.prefetch_chunks = NULL;
    assert_int_equal(kvs_conf_run(&vt, NULL, URI, NULL, NULL, note, &seen), 0);
    assert_in_range(seen.n_skip, 14, 22); /* prefetch, the library, the extensions */
}

static void test_every_mutation_is_caught(void **state)
{
    (void)state;
    for (size_t i = 0; i < KV_COUNT(MUTATIONS); i++) {
        struct seen seen = {.check = MUTATIONS[i].caught_by, .verdict = KVS_SKIP};
        int rc;

        reset();
        MUTATIONS[i].mutate();
        rc = kvs_conf_run(&vt, &ext, where, library, MUTATIONS[i].caught_by, note, &seen);
        if (rc != (MUTATIONS[i].verdict == KVS_FAIL) || !seen.detail[0] ||
            seen.verdict != MUTATIONS[i].verdict)
            fail_msg("mutation %zu wasn't caught by \"%s\": %d, verdict %d %s", i,
                     MUTATIONS[i].caught_by, rc, seen.verdict, seen.detail);
    }
    reset();
}

/* A store in memory is skipped, with what that costs; the file store passes. */
static void test_killed_processes(void **state)
{
    static const char *const CHECKS[] = {KILLED, KILLED_BEFORE};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(CHECKS); i++) {
        struct seen seen = {.check = CHECKS[i], .verdict = KVS_FAIL};

        reset();
        assert_int_equal(kvs_conf_run(&vt, &ext, where, NULL, seen.check, note, &seen), 0);
        assert_int_equal(seen.verdict, KVS_SKIP);
        assert_non_null(strstr(seen.detail, "may be lost"));
        mutate_file();
        assert_int_equal(kvs_conf_run(&vt, &ext, where, NULL, seen.check, note, &seen), 0);
        assert_int_equal(seen.verdict, KVS_PASS);
    }
    reset();
}

/* A backend that takes only some names is right, too. */
static void test_refusing_names_is_right(void **state)
{
    struct seen seen = {0};

    (void)state;
    reset();
    mutate_refuses_most_names();
    assert_int_equal(kvs_conf_run(&vt, &ext, URI, NULL,
                                  "names: odd ones refused or kept, never mixed up", note, &seen),
                     0);
}

/* A backend that buffers passes, too: put_chunk can't know what put_manifest will find. */
static void test_buffering_is_right(void **state)
{
    struct seen seen = {.check = "chunks: a duplicate returns 1", .verdict = KVS_PASS};

    (void)state;
    reset();
    vt.put_chunk = put_lazy;
    vt.get_chunk = get_lazy;
    vt.put_manifest = manifest_lazy;
    assert_int_equal(kvs_conf_run(&vt, &ext, URI, NULL, seen.check, note, &seen), 0);
    assert_int_equal(seen.verdict, KVS_SKIP);
}

static void *wait_for_end(void *end)
{
    char byte;

    while (read(*(int *)end, &byte, 1) < 0)
        ;
    return NULL;
}

/* With another thread in the process no child is made, and the check says so. */
static void test_threads_skip_children(void **state)
{
    struct seen seen = {.check = KILLED, .verdict = KVS_PASS};
    pthread_t thread;
    int fds[2];

    (void)state;
    reset();
    assert_int_equal(pipe(fds), 0);
    assert_int_equal(pthread_create(&thread, NULL, wait_for_end, &fds[0]), 0);
    assert_int_equal(kvs_conf_run(&vt, &ext, where, NULL, KILLED, note, &seen), 0);
    close(fds[1]);
    pthread_join(thread, NULL);
    close(fds[0]);
    assert_int_equal(seen.verdict, KVS_SKIP);
    assert_non_null(strstr(seen.detail, "threads"));
}

/* A crash in close(NULL) fails that check, not the others. */
static void test_crash_at_close_null(void **state)
{
    struct seen seen = {.check = CLOSE_NULL, .verdict = KVS_PASS};

    (void)state;
    reset();
    vt.close = close_null_crashes;
    assert_int_equal(kvs_conf_run(&vt, &ext, URI, NULL, CLOSE_NULL, note, &seen), 1);
    assert_int_equal(seen.verdict, KVS_FAIL);
    assert_non_null(strstr(seen.detail, "signal"));
    vt.close = close_null_ends_all;
    assert_int_equal(kvs_conf_run(&vt, &ext, URI, NULL, CLOSE_NULL, note, &seen), 1);
    assert_int_equal(seen.verdict, KVS_FAIL);
}

/* No check is without a mutation, so that none can't fail. */
static void test_every_check_has_a_mutation(void **state)
{

    (void)state;
    for (size_t l = 0; l < KVS_CONF_N_LISTS; l++)
        for (const struct kvs_conf_check *check = KVS_CONF_LISTS[l]; check->name; check++) {
            bool found = strcmp(check->name, CLOSE_NULL) == 0; /* the test above */

            for (size_t i = 0; i < KV_COUNT(MUTATIONS); i++)
                found = found || strcmp(check->name, MUTATIONS[i].caught_by) == 0;
            if (!found)
                fail_msg("no mutation fails \"%s\"", check->name);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_right_backend_passes),
        cmocka_unit_test(test_version_1_passes),
        cmocka_unit_test(test_every_mutation_is_caught),
        cmocka_unit_test(test_killed_processes),
        cmocka_unit_test(test_threads_skip_children),
        cmocka_unit_test(test_refusing_names_is_right),
        cmocka_unit_test(test_buffering_is_right),
        cmocka_unit_test(test_crash_at_close_null),
        cmocka_unit_test(test_every_check_has_a_mutation),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
