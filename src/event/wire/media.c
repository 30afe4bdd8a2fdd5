// SPDX-License-Identifier: Apache-2.0
#include "event/wire/media.h"

#include <string.h>

#include "base/core/ascii.h"
#include "base/core/error.h"

static const struct kve_medium media[] = {
    {"GPU", KV_TIER_DEVICE, KVE_CLEARED_TOO},
    {"DEVICE", KV_TIER_DEVICE, KVE_CLEARED_TOO},
    {"CUDA", KV_TIER_DEVICE, KVE_CLEARED_TOO},
    {"HBM", KV_TIER_DEVICE, KVE_CLEARED_TOO},
    {"VRAM", KV_TIER_DEVICE, KVE_CLEARED_TOO},
    {"NPU", KV_TIER_DEVICE, KVE_CLEARED_TOO},
    {"XPU", KV_TIER_DEVICE, KVE_CLEARED_TOO},
    {"TPU", KV_TIER_DEVICE, KVE_CLEARED_TOO},
    {"HPU", KV_TIER_DEVICE, KVE_CLEARED_TOO},
    {"MLU", KV_TIER_DEVICE, KVE_CLEARED_TOO},
    {"G1", KV_TIER_DEVICE, KVE_CLEARED_TOO},
    /* SGLang, TensorRT-LLM, Dynamo's consolidator, libkvevent */
    {"CPU_PINNED", KV_TIER_HOST, KVE_CLEARED_TOO},
    {"CPU_TIER1", KV_TIER_HOST, KVE_CLEARED_TOO},
    {"CPU_TIER2", KV_TIER_DISK, KVE_CLEARED_TOO},
    {"DISK", KV_TIER_DISK, KVE_CLEARED_TOO},
    {"NVME", KV_TIER_DISK, KVE_CLEARED_TOO},
    {"EXTERNAL", KV_TIER_EXTERNAL, KVE_CLEARED_TOO},
    {"NETWORK", KV_TIER_EXTERNAL, KVE_CLEARED_TOO},
    {"REMOTE", KV_TIER_EXTERNAL, KVE_CLEARED_TOO},
    {"SHARED", KV_TIER_EXTERNAL, KVE_CLEARED_TOO},
    /* vLLM's connectors; Mooncake's store writes small letters. llm-d's offloading to file systems
     * and object stores. */
    {"CPU", KV_TIER_HOST, KVE_KEPT},
    {"STORAGE", KV_TIER_DISK, KVE_KEPT},
    {"FS", KV_TIER_DISK, KVE_KEPT},
    {"OBJ", KV_TIER_EXTERNAL, KVE_KEPT},
    {"SHARED_STORAGE", KV_TIER_EXTERNAL, KVE_KEPT},
    {"HOST", KV_TIER_HOST, KVE_CLEAR_UNKNOWN},
    {"HOST_PINNED", KV_TIER_HOST, KVE_CLEAR_UNKNOWN},
    {"PINNED", KV_TIER_HOST, KVE_CLEAR_UNKNOWN},
    {"DRAM", KV_TIER_HOST, KVE_CLEAR_UNKNOWN},
    {"RAM", KV_TIER_HOST, KVE_CLEAR_UNKNOWN},
    {"MEMORY", KV_TIER_HOST, KVE_CLEAR_UNKNOWN},
    {"G2", KV_TIER_HOST, KVE_CLEAR_UNKNOWN},
    {"SSD", KV_TIER_DISK, KVE_CLEAR_UNKNOWN},
    {"HDD", KV_TIER_DISK, KVE_CLEAR_UNKNOWN},
    {"FILE", KV_TIER_DISK, KVE_CLEAR_UNKNOWN},
    {"POSIX", KV_TIER_DISK, KVE_CLEAR_UNKNOWN},
    {"LOCAL_DISK", KV_TIER_DISK, KVE_CLEAR_UNKNOWN},
    {"G3", KV_TIER_DISK, KVE_CLEAR_UNKNOWN},
    {"OBJECT", KV_TIER_EXTERNAL, KVE_CLEAR_UNKNOWN},
    {"OBJECT_STORE", KV_TIER_EXTERNAL, KVE_CLEAR_UNKNOWN},
    {"OBJECT_STORAGE", KV_TIER_EXTERNAL, KVE_CLEAR_UNKNOWN},
    {"S3", KV_TIER_EXTERNAL, KVE_CLEAR_UNKNOWN},
    {"NFS", KV_TIER_EXTERNAL, KVE_CLEAR_UNKNOWN},
    {"G4", KV_TIER_EXTERNAL, KVE_CLEAR_UNKNOWN},
};

/* Return the length of a name without the number of its device: "cuda:0". */
static size_t length_of(struct kv_str name)
{
    size_t len = name.len;

    while (len && name.p[len - 1] >= '0' && name.p[len - 1] <= '9')
        len--;
    return len > 1 && len < name.len && name.p[len - 1] == ':' ? len - 1 : name.len;
}

const struct kve_medium *kve_medium_find(struct kv_str name)
{
    size_t len;

    if (KV_LIKELY(!name.len || kv_str_eq(name, "GPU")))
        return &media[0];
    len = length_of(name);
    for (size_t i = 0; i < KV_COUNT(media); i++)
        if (strlen(media[i].name) == len && kv_ncasecmp(name.p, media[i].name, len) == 0)
            return &media[i];
    return NULL;
}

bool kve_medium_is_device(struct kv_str name)
{
    const struct kve_medium *medium = kve_medium_find(name);

    return medium && medium->tier == KV_TIER_DEVICE;
}

void kve_unknown_media_count(struct kve_unknown_media *unknown, struct kv_str name, uint64_t n)
{
    char text[KVE_MAX_MEDIUM + 1] = "";
    uint32_t i = 0;

    for (size_t k = 0; k < name.len && k < KVE_MAX_MEDIUM; k++)
        text[k] = name.p[k] >= ' ' && name.p[k] <= '~' ? name.p[k] : '?';
    while (i < unknown->n_items && strcmp(unknown->items[i].name, text) != 0)
        i++;
    if (i == KVE_MAX_UNKNOWN_MEDIA) {
        unknown->n_others += n;
        return;
    }
    if (i == unknown->n_items) {
        memcpy(unknown->items[i].name, text, sizeof(text));
        unknown->n_items++;
    }
    unknown->items[i].n += n;
}
