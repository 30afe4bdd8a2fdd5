// SPDX-License-Identifier: Apache-2.0
#include "http/budget.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/mix.h"
#include "base/core/xxh.h"

#define BUCKETS 256u

struct kh_budget {
    pthread_mutex_t lock;
    size_t bytes, used;
    uint32_t n_clients;
    uint64_t secret; /* so that nobody can choose networks that collide */
    struct kh_client *buckets[BUCKETS];
};

int kh_budget_create(size_t bytes, struct kh_budget **ret)
{
    struct kh_budget *budget = calloc(1, sizeof(*budget));

    if (!budget)
        return -ENOMEM;
    pthread_mutex_init(&budget->lock, NULL);
    budget->bytes = bytes;
    budget->secret = kv_secret();
    *ret = budget;
    return 0;
}

void kh_budget_destroy(struct kh_budget *budget)
{
    if (!budget)
        return;
    pthread_mutex_destroy(&budget->lock);
    free(budget);
}

/*
 * Return the network of a client: the upper half of an IPv6 address, or a whole IPv4 address. This
 * machine's addresses stay whole, too.
 */
static void client_address(const uint8_t address[16], uint8_t ret[16])
{
    static const uint8_t local[10];

    memcpy(ret, address, 16);
    if (memcmp(address, local, sizeof(local)) != 0)
        memset(ret + 8, 0, 8);
}

static struct kh_client **find(struct kh_budget *budget, const uint8_t address[16])
{
    struct kh_client **link = &budget->buckets[kv_xxh64(address, 16, budget->secret) % BUCKETS];

    while (*link && memcmp((*link)->address, address, 16) != 0)
        link = &(*link)->next;
    return link;
}

struct kh_client *kh_budget_join(struct kh_budget *budget, const uint8_t address[16])
{
    struct kh_client **link, *client;
    uint8_t key[16];

    client_address(address, key);
    pthread_mutex_lock(&budget->lock);
    link = find(budget, key);
    client = *link;
    if (!client) {
        client = calloc(1, sizeof(*client));
        if (client) {
            memcpy(client->address, key, sizeof(key));
            *link = client;
            budget->n_clients++;
        }
    }
    if (client)
        atomic_fetch_add_explicit(&client->connections, 1, memory_order_relaxed);
    pthread_mutex_unlock(&budget->lock);
    return client;
}

void kh_budget_leave(struct kh_budget *budget, struct kh_client *client)
{
    struct kh_client **link;

    pthread_mutex_lock(&budget->lock);
    if (atomic_fetch_sub_explicit(&client->connections, 1, memory_order_relaxed) == 1) {
        link = find(budget, client->address);
        *link = client->next;
        budget->n_clients--;
        free(client);
    }
    pthread_mutex_unlock(&budget->lock);
}

bool kh_budget_take(struct kh_budget *budget, struct kh_client *client, size_t n)
{
    bool ok;

    pthread_mutex_lock(&budget->lock);
    ok = n <= budget->bytes - budget->used && client->bytes + n <= budget->bytes - budget->used - n;
    if (ok) {
        budget->used += n;
        client->bytes += n;
    }
    pthread_mutex_unlock(&budget->lock);
    return ok;
}

void kh_budget_give(struct kh_budget *budget, struct kh_client *client, size_t n)
{
    if (!n)
        return;
    pthread_mutex_lock(&budget->lock);
    budget->used -= n;
    client->bytes -= n;
    pthread_mutex_unlock(&budget->lock);
}

size_t kh_budget_used(struct kh_budget *budget)
{
    size_t used;

    pthread_mutex_lock(&budget->lock);
    used = budget->used;
    pthread_mutex_unlock(&budget->lock);
    return used;
}

uint32_t kh_budget_clients(struct kh_budget *budget)
{
    uint32_t n;

    pthread_mutex_lock(&budget->lock);
    n = budget->n_clients;
    pthread_mutex_unlock(&budget->lock);
    return n;
}
