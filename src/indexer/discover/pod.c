// SPDX-License-Identifier: Apache-2.0
#include "indexer/discover/pod.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/args/instance.h"
#include "base/core/xxh.h"

#define PREFIX "kvasir/" /* of annotations */

void ki_pod_fini(struct ki_pod *pod)
{
    kv_buf_fini(&pod->worker);
    kv_buf_fini(&pod->scratch);
}

/* -- reading ----------------------------------------------------------------------------------- */

/* Read a text, or nothing for a null. */
static void read_text(struct ki_pod *pod, struct kv_json *json, char *ret, size_t size)
{
    if (!kv_json_null(json))
        kv_json_copy_str(json, &pod->scratch, ret, size);
}

static void read_worker(struct ki_pod *pod, struct kv_json *json)
{
    struct kv_str text = kv_json_str(json, &pod->scratch);

    kv_buf_clear(&pod->worker);
    pod->worker.limit = KI_POD_WORKER;
    kv_buf_append(&pod->worker, text.p, text.len);
    if (pod->worker.error)
        kv_json_fail(json, -EMSGSIZE, "an annotation that is too long");
}

static void read_annotation(struct ki_pod *pod, struct kv_json *json, struct kv_str key)
{
    const struct {
        const char *name;
        char *ret;
        size_t size;
    } texts[] = {{PREFIX "event-port", pod->event_port, sizeof(pod->event_port)},
                 {PREFIX "replay-port", pod->replay_port, sizeof(pod->replay_port)},
                 {PREFIX "dp-rank", pod->dp_rank, sizeof(pod->dp_rank)},
                 {PREFIX "dp-size", pod->dp_size, sizeof(pod->dp_size)}};

    for (size_t i = 0; i < KV_COUNT(texts); i++)
        if (kv_str_eq(key, texts[i].name)) {
            read_text(pod, json, texts[i].ret, texts[i].size);
            return;
        }
    if (kv_str_eq(key, PREFIX "worker"))
        read_worker(pod, json);
    else
        kv_json_skip(json);
}

/* Enter an object, or pass over a null. */
static bool enter(struct kv_json *json)
{
    return !kv_json_null(json) && kv_json_object(json);
}

static void read_metadata(struct ki_pod *pod, struct kv_json *json)
{
    struct kv_str key;

    if (!enter(json))
        return;
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "name")) {
            read_text(pod, json, pod->name, sizeof(pod->name));
        } else if (kv_str_eq(key, "namespace")) {
            read_text(pod, json, pod->space, sizeof(pod->space));
        } else if (kv_str_eq(key, "uid")) {
            read_text(pod, json, pod->uid, sizeof(pod->uid));
        } else if (kv_str_eq(key, "resourceVersion")) {
            read_text(pod, json, pod->version, sizeof(pod->version));
        } else if (kv_str_eq(key, "deletionTimestamp")) {
            pod->deleting = !kv_json_null(json);
            if (pod->deleting)
                kv_json_skip(json);
        } else if (kv_str_eq(key, "annotations")) {
            if (enter(json))
                while (kv_json_next_key(json, &key))
                    read_annotation(pod, json, key);
        } else {
            kv_json_skip(json);
        }
    }
}

/* Read a container port. Those without a name can't be asked for: their numbers are as good. */
static void read_port(struct ki_pod *pod, struct kv_json *json)
{
    struct ki_pod_port port = {0};
    struct kv_str key;

    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "name"))
            read_text(pod, json, port.name, sizeof(port.name));
        else if (kv_str_eq(key, "containerPort"))
            port.number = (uint32_t)kv_json_u64(json, UINT16_MAX);
        else
            kv_json_skip(json);
    }
    if (*port.name && port.number && pod->n_ports < KI_POD_PORTS)
        pod->ports[pod->n_ports++] = port;
}

static void read_containers(struct ki_pod *pod, struct kv_json *json)
{
    struct kv_str key;

    if (kv_json_null(json))
        return;
    kv_json_array(json);
    while (kv_json_next_item(json)) {
        kv_json_object(json);
        while (kv_json_next_key(json, &key)) {
            if (!kv_str_eq(key, "ports") || kv_json_null(json)) {
                if (!kv_str_eq(key, "ports"))
                    kv_json_skip(json);
                continue;
            }
            kv_json_array(json);
            while (kv_json_next_item(json))
                read_port(pod, json);
        }
    }
}

static void read_spec(struct ki_pod *pod, struct kv_json *json)
{
    struct kv_str key;

    if (!enter(json))
        return;
    while (kv_json_next_key(json, &key)) {
        /* Of init containers some go on beside the others: sidecars. */
        if (kv_str_eq(key, "containers") || kv_str_eq(key, "initContainers"))
            read_containers(pod, json);
        else
            kv_json_skip(json);
    }
}

static void read_condition(struct ki_pod *pod, struct kv_json *json)
{
    char type[64] = "", status[16] = "";
    struct kv_str key;

    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        struct kv_str text;

        if (!kv_str_eq(key, "type") && !kv_str_eq(key, "status")) {
            kv_json_skip(json);
            continue;
        }
        if (kv_str_eq(key, "status")) {
            read_text(pod, json, status, sizeof(status));
            continue;
        }
        text = kv_json_str(json, &pod->scratch); /* of anybody's making, and of any length */
        snprintf(type, sizeof(type), "%.*s", (int)KV_MIN(text.len, sizeof(type) - 1), text.p);
    }
    if (strcmp(type, "Ready") == 0)
        pod->ready = strcmp(status, "True") == 0;
}

/* Read the status of a pod: an object. (A Status object has a word there.) */
static void read_status(struct ki_pod *pod, struct kv_json *json)
{
    struct kv_str key;

    if (kv_json_peek(json) != KV_JSON_OBJECT) {
        kv_json_skip(json);
        return;
    }
    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "phase")) {
            read_text(pod, json, pod->phase, sizeof(pod->phase));
        } else if (kv_str_eq(key, "podIP")) {
            read_text(pod, json, pod->ip, sizeof(pod->ip));
        } else if (kv_str_eq(key, "conditions") && !kv_json_null(json)) {
            kv_json_array(json);
            while (kv_json_next_item(json))
                read_condition(pod, json);
        } else if (!kv_str_eq(key, "conditions")) {
            kv_json_skip(json);
        }
    }
}

static void read_message(struct ki_pod *pod, struct kv_json *json)
{
    struct kv_str text = {"", 0};

    if (!kv_json_null(json))
        text = kv_json_str(json, &pod->scratch);
    snprintf(pod->message, sizeof(pod->message), "%.*s",
             (int)KV_MIN(text.len, sizeof(pod->message) - 1), text.len ? text.p : "");
}

static void clear(struct ki_pod *pod)
{
    struct kv_buf worker = pod->worker, scratch = pod->scratch;

    kv_buf_clear(&worker);
    memset(pod, 0, sizeof(*pod));
    pod->worker = worker;
    pod->scratch = scratch;
}

void ki_pod_read(struct ki_pod *pod, struct kv_json *json)
{
    struct kv_str key;

    clear(pod);
    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "metadata"))
            read_metadata(pod, json);
        else if (kv_str_eq(key, "spec"))
            read_spec(pod, json);
        else if (kv_str_eq(key, "status"))
            read_status(pod, json);
        else if (kv_str_eq(key, "code"))
            pod->code = (uint32_t)kv_json_u64(json, UINT32_MAX);
        else if (kv_str_eq(key, "message"))
            read_message(pod, json);
        else
            kv_json_skip(json);
    }
}

/* -- workers ----------------------------------------------------------------------------------- */

const char *ki_pod_absence(const struct ki_pod *pod)
{
    if (pod->deleting)
        return "it is being deleted";
    if (strcmp(pod->phase, "Running") != 0)
        return "it isn't running";
    if (!*pod->ip)
        return "it has no address";
    return pod->ready ? NULL : "it isn't ready";
}

/* Find the port that @text names or numbers. Returns 0 when there is none. */
static uint32_t find_port(const struct ki_pod *pod, const char *text)
{
    uint64_t number;

    if (kv_parse_u64(text, &number) == 0)
        return number <= UINT16_MAX ? (uint32_t)number : 0;
    for (size_t i = 0; i < pod->n_ports; i++)
        if (strcmp(pod->ports[i].name, text) == 0)
            return pod->ports[i].number;
    return 0;
}

/* Ports and ranks of a pod. */
struct layout {
    uint32_t event_port, replay_port; /* of the first rank; replay_port 0: none */
    uint64_t rank, n;
};

static int read_layout(const struct ki_pod *pod, const struct ki_pod_rules *rules,
                       struct layout *ret, struct kv_error *error)
{
    const char *event = *pod->event_port ? pod->event_port : rules->event_port;
    const char *replay = *pod->replay_port ? pod->replay_port : rules->replay_port;
    struct layout l = {
        .event_port = find_port(pod, event), .replay_port = find_port(pod, replay), .n = 1};

    if (!l.event_port)
        return kv_fail(error, -EINVAL, 0, "no container port is called %s", event);
    if (!l.replay_port && *pod->replay_port)
        return kv_fail(error, -EINVAL, 0, "no container port is called %s", replay);
    if (*pod->dp_rank && (kv_parse_u64(pod->dp_rank, &l.rank) < 0 || l.rank > UINT32_MAX))
        return kv_fail(error, -EINVAL, 0, PREFIX "dp-rank is no number below 2^32");
    if (*pod->dp_size && (kv_parse_u64(pod->dp_size, &l.n) < 0 || l.n < 1 || l.n > KI_POD_RANKS))
        return kv_fail(error, -EINVAL, 0, PREFIX "dp-size is no number from 1 to %d", KI_POD_RANKS);
    if (l.rank + l.n - 1 > UINT32_MAX || KV_MAX(l.event_port, l.replay_port) + l.n - 1 > UINT16_MAX)
        return kv_fail(error, -EINVAL, 0,
                       "ranks or ports of " PREFIX "dp-size beyond the last one");
    *ret = l;
    return 0;
}

static void print_endpoint(char *ret, size_t size, const char *ip, uint32_t port)
{
    bool v6 = strchr(ip, ':') != NULL;

    snprintf(ret, size, "tcp://%s%s%s:%" PRIu32, v6 ? "[" : "", ip, v6 ? "]" : "", port);
}

static int add_rank(const struct ki_pod *pod, const struct layout *layout, uint32_t at,
                    const struct ki_found *base, struct ki_body *body, struct ki_found_set *set,
                    struct kv_error *error)
{
    struct ki_found found = *base;
    char event[96], replay[96];

    print_endpoint(event, sizeof(event), pod->ip, layout->event_port + at);
    found.registration.endpoint = event;
    found.registration.rank = (uint32_t)layout->rank + at;
    if (layout->replay_port) {
        print_endpoint(replay, sizeof(replay), pod->ip, layout->replay_port + at);
        found.registration.replay_endpoint = replay;
    }
    if (!pod->worker.len)
        return ki_found_add(set, &found, error);
    return ki_found_add_json(set, (struct kv_str){pod->worker.data, pod->worker.len}, 0, &found,
                             body, error);
}

int ki_pod_workers(const struct ki_pod *pod, const struct ki_pod_rules *rules,
                   const struct ki_found *base, struct ki_body *body, struct ki_found_set *set,
                   struct kv_error *error)
{
    struct ki_found found = *base;
    char name[sizeof(pod->space) + sizeof(pod->name)];
    const char *why = "";
    struct layout layout = {0};
    int rc = read_layout(pod, rules, &layout, error), kind;

    if (rc < 0)
        return rc;
    snprintf(name, sizeof(name), "%s%s%s", rules->qualified ? pod->space : "",
             rules->qualified ? "/" : "", pod->name);
    kind = kv_instance_parse(name, strlen(name), &found.registration.instance, &why);
    if (kind < 0)
        return kv_fail(error, -EINVAL, 0, "its name: %s", why);
    found.registration.name = kind == KV_INSTANCE_NAME ? name : NULL;
    found.incarnation = XXH3_64bits(pod->uid, strlen(pod->uid));
    for (uint32_t i = 0; i < layout.n && rc == 0; i++)
        rc = add_rank(pod, &layout, i, &found, body, set, error);
    return rc;
}
