// SPDX-License-Identifier: Apache-2.0
/* Names of instances: which are needed, and how messages, lists and dumps tell them. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "indexer/registry/tables.h"

/* -- noting ------------------------------------------------------------------------------------ */

/* Forget the names of which no registration, no removal note and no blocks of a dump are left. */
static void sweep(struct ki_registry *r)
{
    const struct ki_position *p;
    struct ki_removed *removed;
    long n_removed = ki_removals_list(&r->removals, &removed);

    if (n_removed < 0)
        return; /* it stays due */
    for (long i = 0; i < n_removed; i++)
        ki_names_mark(&r->names, removed[i].instance);
    free(removed);
    for (size_t i = 0; i < r->n_listeners; i++)
        ki_names_mark(&r->names, r->listeners[i]->instance);
    for (const struct ki_leaving *l = r->leaving; l; l = l->next)
        ki_names_mark(&r->names, l->instance);
    for (p = TAILQ_FIRST(&r->positions.with_blocks); p; p = TAILQ_NEXT(p, age))
        ki_names_mark(&r->names, p->mark.holder.worker);
    ki_names_sweep(&r->names);
}

int ki_registry_note_name(struct ki_registry *r, uint64_t instance, const char *name,
                          struct kv_error *error)
{
    char other[KI_INSTANCE_TEXT];
    size_t first;
    int rc;

    if (!name)
        return 0;
    if (ki_names_sweep_is_due(&r->names))
        sweep(r);
    rc = ki_names_note(&r->names, instance, name);
    if (rc == -EEXIST) {
        sweep(r); /* the other name may be one that nothing needs any more */
        rc = ki_names_note(&r->names, instance, name);
    }
    if (rc == -EEXIST)
        return kv_fail(error, rc, 0,
                       "instance %.60s has the number %" PRIu64 " of instance %.60s: rename one",
                       name, instance, ki_registry_instance_text(r, instance, other));
    if (rc < 0)
        return kv_fail(error, rc, 0, "%s", strerror(-rc));
    if (rc == 1 && ki_instance_range(r, instance, &first) > first)
        ki_registry_changed(r); /* peers know it by its number: one of them knew no names */
    return 0;
}

int ki_registry_name_instance(struct ki_registry *registry, uint64_t instance, const char *name,
                              struct kv_error *error)
{
    int rc;

    if (!name)
        return 0;
    pthread_mutex_lock(&registry->admin);
    rc = ki_registry_note_name(registry, instance, name, error);
    pthread_mutex_unlock(&registry->admin);
    return rc;
}

void ki_registry_adopt_name(struct ki_registry *registry, uint64_t instance, const char *name)
{
    const struct ki_position *p;
    struct kv_error error;
    size_t first;
    bool needed;

    pthread_mutex_lock(&registry->admin);
    needed = ki_instance_range(registry, instance, &first) > first;
    p = ki_positions_next(&registry->positions, instance, NULL);
    for (; p && !needed; p = ki_positions_next(&registry->positions, instance, p))
        needed = p->has_blocks;
    if (needed)
        (void)ki_registry_note_name(registry, instance, name, &error);
    pthread_mutex_unlock(&registry->admin);
}

/* -- telling ----------------------------------------------------------------------------------- */

struct ki_names *ki_registry_names(struct ki_registry *registry)
{
    return &registry->names;
}

const char *ki_registry_instance_text(struct ki_registry *registry, uint64_t instance,
                                      char text[KI_INSTANCE_TEXT])
{
    const struct ki_name *name;

    ki_names_read(&registry->names);
    name = ki_names_find(&registry->names, instance);
    if (name)
        snprintf(text, KI_INSTANCE_TEXT, "%s", name->text);
    else
        snprintf(text, KI_INSTANCE_TEXT, "%" PRIu64, instance);
    ki_names_end(&registry->names);
    return text;
}

bool ki_registry_name_infos(struct ki_registry *r, struct ki_worker_info *infos, long n)
{
    bool complete = true;

    ki_names_read(&r->names);
    for (long i = 0; i < n; i++) {
        const struct ki_name *name = ki_names_find(&r->names, infos[i].instance);

        infos[i].name = name ? strdup(name->text) : NULL;
        complete &= !name || infos[i].name;
    }
    ki_names_end(&r->names);
    return complete;
}

/* -- for dumps --------------------------------------------------------------------------------- */

static int compare_names(const void *a, const void *b)
{
    uint64_t x = ((const struct ki_instance_name *)a)->instance;
    uint64_t y = ((const struct ki_instance_name *)b)->instance;

    return (x > y) - (x < y);
}

/* Append the name of an instance, if it has one. */
static void add_name(struct ki_registry *r, uint64_t instance, struct kv_buf *ret)
{
    const struct ki_name *name = ki_names_find(&r->names, instance);
    struct ki_instance_name item = {instance, NULL};

    if (!name)
        return;
    item.name = strdup(name->text);
    if (item.name)
        kv_buf_append(ret, &item, sizeof(item));
    if (!item.name || ret->error) {
        ret->error = -ENOMEM;
        free(item.name);
    }
}

/* Sort, and drop the doubles: several ranks of an instance. Returns their number. */
static long sort_names(struct ki_instance_name *names, size_t n)
{
    size_t kept = 0;

    if (n)
        qsort(names, n, sizeof(*names), compare_names);
    for (size_t i = 0; i < n; i++) {
        if (kept && names[kept - 1].instance == names[i].instance)
            free(names[i].name);
        else
            names[kept++] = names[i];
    }
    return (long)kept;
}

long ki_registry_names_of(struct ki_registry *registry, const struct ki_model *model,
                          struct ki_instance_name **ret)
{
    struct kv_buf names = KV_BUF_INIT;
    const struct ki_position *p;
    struct ki_instance_name *items;
    size_t n;

    pthread_mutex_lock(&registry->admin);
    for (size_t i = 0; i < registry->n_listeners; i++)
        if (registry->listeners[i]->model == model)
            add_name(registry, registry->listeners[i]->instance, &names);
    for (p = TAILQ_FIRST(&registry->positions.with_blocks); p; p = TAILQ_NEXT(p, age))
        if (kvi_holder_blocks(model->index, p->mark.holder))
            add_name(registry, p->mark.holder.worker, &names);
    pthread_mutex_unlock(&registry->admin);
    items = (struct ki_instance_name *)(void *)names.data;
    n = names.len / sizeof(*items);
    if (names.error) {
        ki_instance_names_free(items, (long)n);
        return -ENOMEM;
    }
    *ret = items;
    return sort_names(items, n);
}

void ki_instance_names_free(struct ki_instance_name *names, long n)
{
    for (long i = 0; i < n; i++)
        free(names[i].name);
    free(names);
}
