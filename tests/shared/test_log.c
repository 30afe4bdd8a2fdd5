// SPDX-License-Identifier: Apache-2.0
/* One log hook of one signature in every library, set once each by a program that links all of
 * them. From then on each library's lines go to its own hook, and stderr stays silent. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kv_event.h"
#include "kv_index.h"
#include "kv_store.h"
#include "kvbm.h"
#include "kvx_ext.h"

struct heard {
    int n, level;
    char line[512];
};

static struct heard event, indexed, store, bm, kvx;

static void hear(void *arg, int level, const char *line)
{
    struct heard *heard = arg;

    heard->n++;
    heard->level = level;
    snprintf(heard->line, sizeof(heard->line), "%s", line);
}

/* One mistake in each library: a struct whose size was forgotten. */
static void make_mistakes(void)
{
    struct kve_reader_opts reader = {.block_size = 16};
    struct kvbm_registry_opts registry = {.key_len = 8};
    struct kvi_opts opts = {.max_blocks = 1};
    struct kvs_gc_opts gc = {.dry_run = true};
    struct kvbm_registry *made_registry;
    struct kve_reader *made_reader;
    struct kvi_index *made_index;
    struct kvs_store *opened;
    char dir[] = "/tmp/kvasir-log-XXXXXX", command[64];

    assert_int_equal(kve_reader_create(&reader, &made_reader), -EINVAL);
    assert_int_equal(kvi_create(&opts, &made_index), -EINVAL);
    assert_int_equal(kvbm_registry_create(&registry, &made_registry), -EINVAL);
    assert_non_null(mkdtemp(dir));
    assert_int_equal(kvs_open(dir, &opened), 0);
    store = (struct heard){0}; /* opening may have told of the file system */
    assert_int_equal(kvs_gc(opened, &gc, NULL), -EINVAL);
    kvs_close(opened);
    snprintf(command, sizeof(command), "rm -r %s", dir);
    assert_int_equal(system(command), 0);
}

static void expect(const struct heard *heard, const char *name)
{
    assert_int_equal(heard->n, 1);
    assert_int_equal(heard->level, 0);
    assert_non_null(strstr(heard->line, name));
    assert_null(strchr(heard->line, '\n'));
}

static void test_hooks(void **state)
{
    FILE *apart = tmpfile();
    int standard = dup(STDERR_FILENO);
    char line[256];

    (void)state;
    assert_true(apart && standard >= 0 && dup2(fileno(apart), STDERR_FILENO) >= 0);
    kve_set_log(hear, &event);
    kvi_set_log(hear, &indexed);
    kvs_set_log(hear, &store);
    kvbm_set_log(hear, &bm);
    kvx_set_log(hear, &kvx);
    make_mistakes();
    expect(&event, "struct=kve_reader_opts ");
    expect(&indexed, "struct=kvi_opts ");
    expect(&store, "struct=kvs_gc_opts ");
    expect(&bm, "struct=kvbm_registry_opts ");
    assert_int_equal(lseek(fileno(apart), 0, SEEK_END), 0); /* stderr got nothing */
    kve_set_log(NULL, NULL);
    kvi_set_log(NULL, NULL);
    kvs_set_log(NULL, NULL);
    kvbm_set_log(NULL, NULL);
    kvx_set_log(NULL, NULL);
    make_mistakes();
    dup2(standard, STDERR_FILENO);
    close(standard);
    assert_true(event.n == 1 && indexed.n == 1 && bm.n == 1 && store.n == 0);
    rewind(apart);
    assert_non_null(fgets(line, sizeof(line), apart));
    assert_non_null(strstr(line, "kve_reader_opts"));
    fclose(apart);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_hooks)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
