// SPDX-License-Identifier: Apache-2.0
#include "indexer/model/model.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "indexer/model/chunks.h"

struct model {
    struct ki_model shown; /* first: the public part */
    struct ki_chunks chunks;
    _Atomic uint32_t refs;
    char text[]; /* name and tenant */
};

int ki_model_create(const char *name, const char *tenant, uint32_t block_size,
                    struct kvi_index *index, struct ki_model **ret)
{
    size_t name_bytes = strlen(name) + 1, tenant_bytes = strlen(tenant) + 1;
    struct model *m = malloc(sizeof(*m) + name_bytes + tenant_bytes);
    int rc;

    if (!m)
        return -ENOMEM;
    if (!index) {
        rc = kvi_create(NULL, &index);
        if (rc < 0) {
            free(m);
            return rc;
        }
    }
    memcpy(m->text, name, name_bytes);
    memcpy(m->text + name_bytes, tenant, tenant_bytes);
    m->shown.name = m->text;
    m->shown.tenant = m->text + name_bytes;
    m->shown.block_size = block_size;
    m->shown.index = index;
    m->shown.chunks = &m->chunks;
    ki_chunks_init(&m->chunks);
    atomic_init(&m->shown.forms, 0);
    atomic_init(&m->shown.n_odd, 0);
    atomic_init(&m->refs, 1);
    *ret = &m->shown;
    return 0;
}

struct ki_model *ki_model_acquire(struct ki_model *model)
{
    struct model *m = (struct model *)model;

    atomic_fetch_add_explicit(&m->refs, 1, memory_order_relaxed);
    return model;
}

void ki_model_release(struct ki_model *model)
{
    struct model *m = (struct model *)model;

    /*
     * Release pairs with the acquire of the thread that drops the last reference: all uses come
     * before the end.
     */
    if (!m || atomic_fetch_sub_explicit(&m->refs, 1, memory_order_acq_rel) != 1)
        return;
    kvi_destroy(m->shown.index);
    ki_chunks_fini(&m->chunks);
    free(m);
}

void ki_model_note_forms(struct ki_model *model, uint64_t forms)
{
    if (forms & ~atomic_load_explicit(&model->forms, memory_order_relaxed))
        atomic_fetch_or_explicit(&model->forms, forms, memory_order_relaxed);
}

uint64_t ki_model_forms(const struct ki_model *model)
{
    return atomic_load_explicit(&model->forms, memory_order_relaxed);
}

int ki_model_compare(const struct ki_model *model, const char *name, const char *tenant)
{
    int order = strcmp(model->name, name);

    return order ? order : strcmp(model->tenant, tenant);
}
