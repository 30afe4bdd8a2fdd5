// SPDX-License-Identifier: Apache-2.0
/* Keys that peers were told about. told.h has the drawing. */
#include "told.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lend.h"

struct kvbm_told {
    _Atomic uint32_t references; /* the lender's, and one of each key */
    pthread_mutex_t lock;
    struct kvbm_lender *lender; /* NULL: ended */
};

/* Attached to a key. */
struct told_key {
    struct kvbm_told *told;
    uint32_t set, group, len;
    uint8_t key[];
};

static void put(struct kvbm_told *told)
{
    if (atomic_fetch_sub_explicit(&told->references, 1, memory_order_acq_rel) != 1)
        return;
    pthread_mutex_destroy(&told->lock);
    free(told);
}

/* The key of an attachment is in no tier any more. */
static void gone(void *value)
{
    struct told_key *key = value;
    struct kvbm_told *told = key->told;

    pthread_mutex_lock(&told->lock);
    if (told->lender)
        kvbm_lender_gone(told->lender, key->set, key->group, key->key, 1);
    pthread_mutex_unlock(&told->lock);
    put(told);
    free(key);
}

struct kvbm_told *kvbm_told_create(struct kvbm_lender *lender)
{
    struct kvbm_told *told = calloc(1, sizeof(*told));

    if (!told)
        return NULL;
    atomic_init(&told->references, 1);
    pthread_mutex_init(&told->lock, NULL);
    told->lender = lender;
    return told;
}

void kvbm_told_end(struct kvbm_told *told)
{
    if (!told)
        return;
    pthread_mutex_lock(&told->lock);
    told->lender = NULL;
    pthread_mutex_unlock(&told->lock);
    put(told);
}

int kvbm_told_type(struct kvbm_registry *registry, uint32_t set, uint32_t *ret)
{
    char name[32];

    snprintf(name, sizeof(name), "kvbm.told.%u", set);
    return kvbm_attachment_type(registry, name, false, gone, ret);
}

void kvbm_told_key(struct kvbm_told *told, struct kvbm_registry *registry, uint32_t type,
                   uint32_t set, uint32_t group, const void *key, uint32_t key_len)
{
    struct told_key *value = malloc(sizeof(*value) + key_len);

    if (!value)
        return;
    *value = (struct told_key){.told = told, .set = set, .group = group, .len = key_len};
    memcpy(value->key, key, key_len);
    atomic_fetch_add_explicit(&told->references, 1, memory_order_relaxed);
    if (kvbm_registry_attach(registry, group, key, type, value) == 0)
        return;
    free(value); /* known already, or gone meanwhile */
    put(told);   /* not the last reference: the lender has one */
}
