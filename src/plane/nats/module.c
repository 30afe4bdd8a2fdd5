// SPDX-License-Identifier: Apache-2.0
/* libkv_nats: connections to NATS by libnats. */
#include <errno.h>
#include <limits.h>
#include <nats/nats.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "plane/nats/nkey.h"
#include "plane/nats_abi.h"

#define PING_MS 5000
#define MAX_PINGS 2 /* unanswered: a silent server is given up after 15 s */
#define READ_BYTES (256 << 10)
#define MIN_MESSAGE 128 /* bytes that a waiting message counts at least */
#define MAX_UNTAKEN 1   /* messages of a durable consumer on their way: order needs one at a time */
/* Of a durable consumer; two missed ones: the server has it no more, or the stream. */
#define HEARTBEAT_NS (3 * KV_NS_PER_S)
#define MAX_ENDED 64 /* subscriptions that are destroyed together */

struct kvp_link_sub {
    SLIST_ENTRY(kvp_link_sub) next; /* of the ended ones */
    struct kvp_link *link;
    natsSubscription *nats;
    kvp_nats_fn fn;
    void *arg;
    bool durable; /* its messages are acknowledged */
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool over; /* its thread has ended */
};
SLIST_HEAD(ended, kvp_link_sub);

struct kvp_link {
    natsConnection *connection;
    jsCtx *jetstream; /* made at the first message with an id */
    struct kvp_link_hooks hooks;
    int64_t timeout_ms;
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool closed; /* the last hook of the connection has run */
    /*
     * Ended subscriptions. libnats before 3.6 may be about to hand a message to one that is no longer
     * known (nats.c issue 637), so they outlive an answer of the server, or the connection.
     */
    struct ended ended;
    unsigned n_ended;
};

static const struct {
    natsStatus status;
    int err;
} errors[] = {
    {NATS_OK, 0},
    {NATS_CONNECTION_AUTH_FAILED, -EACCES},
    {NATS_NOT_PERMITTED, -EACCES},
    {NATS_NO_SERVER, -EHOSTDOWN},
    {NATS_IO_ERROR, -EHOSTDOWN},
    {NATS_STALE_CONNECTION, -EHOSTDOWN},
    {NATS_CONNECTION_CLOSED, -EAGAIN},
    {NATS_CONNECTION_DISCONNECTED, -EAGAIN},
    {NATS_INSUFFICIENT_BUFFER, -EAGAIN},
    {NATS_DRAINING, -EAGAIN},
    {NATS_MAX_PAYLOAD, -EMSGSIZE},
    {NATS_INVALID_SUBJECT, -EINVAL},
    {NATS_INVALID_ARG, -EINVAL},
    {NATS_ADDRESS_MISSING, -EINVAL},
    {NATS_SSL_ERROR, -EPROTO},
    {NATS_SECURE_CONNECTION_REQUIRED, -EPROTO},
    {NATS_SECURE_CONNECTION_WANTED, -EPROTO},
    {NATS_TIMEOUT, -ETIMEDOUT},
    {NATS_NO_RESPONDERS, -ENOENT},
    {NATS_NO_MEMORY, -ENOMEM},
};

static int error_of(natsStatus status)
{
    for (size_t i = 0; i < KV_COUNT(errors); i++) {
        if (errors[i].status == status)
            return errors[i].err;
    }
    return -EIO;
}

static int fail(natsStatus status, char *why, size_t why_size)
{
    const char *last = nats_GetLastError(NULL);

    snprintf(why, why_size, "%s%s%s", natsStatus_GetText(status), last && *last ? ": " : "",
             last ? last : "");
    return error_of(status);
}

/* ---- the library ---- */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static natsStatus ready;

/* libnats ignores SIGPIPE for the whole process. Its threads here have all signals blocked. */
static void initialise(void)
{
    struct kv_signals signals;

    kv_signals_note(&signals);
    ready = nats_Open(-1);
    kv_signals_restore(&signals);
}

/* ---- hooks ---- */

static void on_down(natsConnection *connection, void *arg)
{
    struct kvp_link *link = arg;

    (void)connection;
    link->hooks.state(link->hooks.arg, KVP_LINK_DOWN);
}

static void on_up(natsConnection *connection, void *arg)
{
    struct kvp_link *link = arg;

    (void)connection;
    link->hooks.state(link->hooks.arg, KVP_LINK_UP);
}

/* libnats' last call for a connection. */
static void on_closed(natsConnection *connection, void *arg)
{
    struct kvp_link *link = arg;

    (void)connection;
    link->hooks.state(link->hooks.arg, KVP_LINK_CLOSED);
    pthread_mutex_lock(&link->lock);
    link->closed = true;
    pthread_cond_signal(&link->cond);
    pthread_mutex_unlock(&link->lock);
}

static void on_error(natsConnection *connection, natsSubscription *sub, natsStatus status,
                     void *arg)
{
    struct kvp_link *link = arg;
    const char *last = NULL;
    char text[160];

    if (status ==
        NATS_MISMATCH) /* behind a break: what a durable consumer didn't take comes again */
        return;
    if (natsConnection_GetLastError(connection, &last) != NATS_OK || !last || !*last)
        last = natsStatus_GetText(status);
    /* without its subject: @sub may be gone (nats.c pull request 659) */
    if (status == NATS_MISSED_HEARTBEAT)
        last = "the durable consumer is gone";
    else if (sub && status == NATS_SLOW_CONSUMER)
        last = natsStatus_GetText(status);
    snprintf(text, sizeof(text), "%s", last);
    link->hooks.error(link->hooks.arg, text);
    if (status == NATS_MISSED_HEARTBEAT) /* a new connection subscribes again, until it is there */
        natsConnection_Close(connection);
}

/* ---- connections ---- */

static natsStatus set_servers(natsOptions *options, const char *url)
{
    char *copy = strdup(url), *rest = copy, *server;
    const char *servers[64];
    int n = 0;
    natsStatus status;

    if (!copy)
        return NATS_NO_MEMORY;
    while ((server = strsep(&rest, ",")) != NULL && n < (int)KV_COUNT(servers)) {
        if (*server)
            servers[n++] = server;
    }
    status = natsOptions_SetServers(options, servers, n);
    free(copy);
    return status;
}

static natsStatus set_credentials(natsOptions *options, const struct kvp_nats_opts *opts)
{
    char public[KVP_NKEY];

    if (opts->user)
        return natsOptions_SetUserInfo(options, opts->user, opts->password);
    if (opts->token)
        return natsOptions_SetToken(options, opts->token);
    if (opts->creds_file)
        return natsOptions_SetUserCredentialsFromFiles(options, opts->creds_file, NULL);
    if (!opts->nkey_file)
        return NATS_OK;
    if (kvp_nkey_public(opts->nkey_file, public) < 0)
        return NATS_INVALID_ARG;
    return natsOptions_SetNKeyFromSeed(options, public, opts->nkey_file);
}

static natsStatus set_tls(natsOptions *options, const struct kvp_nats_opts *opts)
{
    natsStatus status = NATS_OK;

    if (opts->tls_ca || opts->tls_cert)
        status = natsOptions_SetSecure(options, true);
    if (status == NATS_OK && opts->tls_ca)
        status = natsOptions_LoadCATrustedCertificates(options, opts->tls_ca);
    if (status == NATS_OK && opts->tls_cert)
        status = natsOptions_LoadCertificatesChain(options, opts->tls_cert, opts->tls_key);
    return status;
}

#define TRY(call)              \
    do {                       \
        if (status == NATS_OK) \
            status = call;     \
    } while (0)

static natsStatus set_behaviour(natsOptions *options, struct kvp_link *link,
                                const struct kvp_nats_opts *opts)
{
    natsStatus status = natsOptions_SetName(options, opts->name);

    TRY(natsOptions_SetTimeout(options, opts->timeout_ms));
    TRY(natsOptions_SetWriteDeadline(options, opts->timeout_ms));
    TRY(natsOptions_SetPingInterval(options, PING_MS));
    TRY(natsOptions_SetMaxPingsOut(options, MAX_PINGS));
    TRY(natsOptions_SetMaxReconnect(options, INT_MAX));
    TRY(natsOptions_SetReconnectWait(options, opts->reconnect_ms));
    TRY(natsOptions_SetReconnectJitter(options, opts->reconnect_ms / 4, opts->reconnect_ms / 4));
    TRY(natsOptions_SetIOBufSize(options, READ_BYTES));
    TRY(natsOptions_SetDisconnectedCB(options, on_down, link));
    TRY(natsOptions_SetReconnectedCB(options, on_up, link));
    TRY(natsOptions_SetClosedCB(options, on_closed, link));
    TRY(natsOptions_SetErrorHandler(options, on_error, link));
    return status;
}

static void sub_free(struct kvp_link_sub *sub)
{
    natsSubscription_Destroy(sub->nats);
    pthread_mutex_destroy(&sub->lock);
    pthread_cond_destroy(&sub->cond);
    free(sub);
}

static void destroy_ended(struct kvp_link *link)
{
    struct kvp_link_sub *sub;

    while ((sub = SLIST_FIRST(&link->ended))) {
        SLIST_REMOVE_HEAD(&link->ended, next);
        sub_free(sub);
    }
    link->n_ended = 0;
}

static void link_free(struct kvp_link *link)
{
    destroy_ended(link);
    jsCtx_Destroy(link->jetstream);
    natsConnection_Destroy(link->connection);
    pthread_mutex_destroy(&link->lock);
    pthread_cond_destroy(&link->cond);
    free(link);
}

static int link_open(const struct kvp_nats_opts *opts, const struct kvp_link_hooks *hooks,
                     struct kvp_link **ret, char *why, size_t why_size)
{
    struct kvp_link *link = calloc(1, sizeof(*link));
    natsOptions *options = NULL;
    natsStatus status;
    int err = 0;

    if (!link)
        return -ENOMEM;
    pthread_once(&once, initialise);
    pthread_mutex_init(&link->lock, NULL);
    pthread_cond_init(&link->cond, NULL);
    link->hooks = *hooks;
    link->timeout_ms = opts->timeout_ms;
    status = ready;
    TRY(natsOptions_Create(&options));
    TRY(set_servers(options, opts->url));
    TRY(set_credentials(options, opts));
    TRY(set_tls(options, opts));
    TRY(set_behaviour(options, link, opts));
    TRY(natsConnection_Connect(&link->connection, options));
    if (status != NATS_OK)
        err = fail(status, why, why_size);
    natsOptions_Destroy(options);
    if (err < 0)
        link_free(link);
    else
        *ret = link;
    return err;
}

static void link_close(struct kvp_link *link)
{
    natsConnection_Close(link->connection);
    pthread_mutex_lock(&link->lock);
    while (!link->closed)
        pthread_cond_wait(&link->cond, &link->lock);
    pthread_mutex_unlock(&link->lock);
    link_free(link);
}

static uint64_t link_server(struct kvp_link *link, char *url, size_t size)
{
    char text[512];
    const char *host = text, *at;

    *url = '\0';
    if (natsConnection_GetConnectedUrl(link->connection, text, sizeof(text)) == NATS_OK) {
        at = strrchr(text, '@'); /* without a password */
        if (!at)
            at = strstr(text, "//") ? strstr(text, "//") + 1 : NULL;
        if (at)
            host = at + 1;
        snprintf(url, size, "%s", host);
    }
    return (uint64_t)KV_MAX(natsConnection_GetMaxPayload(link->connection), 0);
}

/* ---- messages ---- */

static natsStatus open_jetstream(struct kvp_link *link)
{
    jsOptions options;
    natsStatus status = NATS_OK;

    if (link->jetstream)
        return NATS_OK;
    TRY(jsOptions_Init(&options));
    options.Wait = link->timeout_ms;
    TRY(natsConnection_JetStream(&link->jetstream, link->connection, &options));
    return status;
}

static natsStatus publish_to_stream(struct kvp_link *link, const struct kvp_nats_msg *msg,
                                    jsErrCode *code)
{
    natsStatus status = open_jetstream(link);
    jsPubOptions options;

    TRY(jsPubOptions_Init(&options));
    if (status != NATS_OK)
        return status;
    options.MaxWait = link->timeout_ms;
    options.MsgId = msg->id;
    return js_Publish(NULL, link->jetstream, msg->subject, msg->data, (int)msg->len, &options,
                      code);
}

static int link_publish(struct kvp_link *link, const struct kvp_nats_msg *msg)
{
    jsErrCode code = 0;
    natsStatus status;

    if (msg->len > INT_MAX)
        return -EMSGSIZE;
    if (msg->id)
        status = publish_to_stream(link, msg, &code);
    else if (msg->reply)
        status = natsConnection_PublishRequest(link->connection, msg->subject, msg->reply,
                                               msg->data, (int)msg->len);
    else
        status = natsConnection_Publish(link->connection, msg->subject, msg->data, (int)msg->len);
    if (status == NATS_ERR && code) /* the stream's answer: the connection is well */
        return code == JSStreamMessageExceedsMaximumErr ? -EMSGSIZE : -EBUSY;
    /* libnats doesn't say how much of its buffer a write that met its deadline has sent */
    return !msg->id && status == NATS_TIMEOUT ? -EPIPE : error_of(status);
}

static int link_flush(struct kvp_link *link, uint32_t timeout_ms)
{
    int err = error_of(natsConnection_FlushTimeout(link->connection, KV_MAX(timeout_ms, 1u)));

    return err == 0 || err == -ETIMEDOUT ? err : -EAGAIN;
}

/* ---- subscriptions ---- */

static void on_message(natsConnection *connection, natsSubscription *nats, natsMsg *message,
                       void *arg)
{
    struct kvp_link_sub *sub = arg;
    bool again = false;
    struct kvp_nats_msg msg = {
        .subject = natsMsg_GetSubject(message),
        .reply = sub->durable ? NULL : natsMsg_GetReply(message),
        .data = natsMsg_GetData(message),
        .len = (size_t)natsMsg_GetDataLength(message),
        .nobody = natsMsg_IsNoResponders(message),
        .again = sub->durable ? &again : NULL,
    };

    (void)connection, (void)nats;
    if (sub->fn)
        sub->fn(sub->arg, &msg);
    if (sub->durable) /* an acknowledgement that is lost: the message comes again */
        (void)(sub->fn && !again ? natsMsg_Ack : natsMsg_Nak)(message, NULL);
    natsMsg_Destroy(message);
}

static void on_over(void *arg)
{
    struct kvp_link_sub *sub = arg;

    pthread_mutex_lock(&sub->lock);
    sub->over = true;
    pthread_cond_signal(&sub->cond);
    pthread_mutex_unlock(&sub->lock);
}

static void link_unsubscribe(struct kvp_link_sub *sub)
{
    struct kvp_link *link = sub->link;

    (void)natsSubscription_Unsubscribe(sub->nats); /* fails when the connection has closed it */
    pthread_mutex_lock(&sub->lock);
    while (!sub->over)
        pthread_cond_wait(&sub->cond, &sub->lock);
    pthread_mutex_unlock(&sub->lock);
    if (sub->durable) /* closing the connection wouldn't wait for acknowledgements */
        (void)natsConnection_FlushTimeout(link->connection, link->timeout_ms);
    SLIST_INSERT_HEAD(&link->ended, sub, next);
    /* The answer comes on the thread that reads: it has handed over all messages before. */
    if (++link->n_ended >= MAX_ENDED &&
        natsConnection_FlushTimeout(link->connection, link->timeout_ms) == NATS_OK)
        destroy_ended(link);
}

static int durable_error(natsStatus status, jsErrCode code)
{
    if (code == JSStreamNotFoundErr || code == JSNotEnabledErr || code == JSNotEnabledForAccountErr)
        return -ENOENT;
    if (code == JSConsumerExistingActiveErr || code == JSConsumerNameExistErr)
        return -EBUSY;
    if (code == JSConsumerFilterNotSubsetErr || code == JSConsumerBadDurableNameErr)
        return -EINVAL;
    if (status == NATS_NO_RESPONDERS)
        return -ENOENT;
    return status == NATS_CONNECTION_CLOSED ? -EAGAIN : error_of(status);
}

/*
 * Bind to a durable consumer, and make it first where it isn't there: libnats deletes consumers that it
 * has made itself with their subscription. All subscribers name the same subject for its messages, so
 * that the consumer's configuration is the same for each.
 */
static int subscribe_durable(struct kvp_link_sub *sub, const char *subject,
                             const struct kvp_nats_durable *durable)
{
    natsStatus status = open_jetstream(sub->link);
    jsConsumerInfo *info = NULL;
    jsConsumerConfig config;
    jsSubOptions options;
    jsErrCode code = 0;
    char deliver[600];
    bool busy;

    TRY(jsConsumerConfig_Init(&config));
    TRY(jsSubOptions_Init(&options));
    if (snprintf(deliver, sizeof(deliver), "_INBOX.kvasir.%s.%s", durable->stream, durable->name) >=
        (int)sizeof(deliver))
        return -EINVAL;
    config.Durable = durable->name;
    config.DeliverSubject = deliver;
    config.AckPolicy = js_AckExplicit;
    config.FilterSubject = subject;
    config.MaxAckPending = MAX_UNTAKEN;
    config.Heartbeat = HEARTBEAT_NS;
    options.Stream = durable->stream;
    options.Consumer = durable->name;
    options.ManualAck = true;
    TRY(js_AddConsumer(&info, sub->link->jetstream, durable->stream, &config, NULL, &code));
    busy = info && info->PushBound;
    jsConsumerInfo_Destroy(info);
    if (busy)
        return -EBUSY;
    TRY(js_Subscribe(&sub->nats, sub->link->jetstream, subject, on_message, sub, NULL, &options,
                     &code));
    return status == NATS_OK ? 0 : durable_error(status, code);
}

static int subscribe_plain(struct kvp_link_sub *sub, const char *subject)
{
    natsStatus status =
        natsConnection_Subscribe(&sub->nats, sub->link->connection, subject, on_message, sub);

    return status == NATS_CONNECTION_CLOSED ? -EAGAIN : error_of(status);
}

static int link_subscribe(struct kvp_link *link, const char *subject,
                          const struct kvp_nats_durable *durable, size_t pending_bytes,
                          kvp_nats_fn fn, void *arg, struct kvp_link_sub **ret)
{
    struct kvp_link_sub *sub = calloc(1, sizeof(*sub));
    int err;

    if (!sub)
        return -ENOMEM;
    sub->link = link;
    sub->fn = fn;
    sub->arg = arg;
    pthread_mutex_init(&sub->lock, NULL);
    pthread_cond_init(&sub->cond, NULL);
    sub->durable = durable != NULL;
    err = durable ? subscribe_durable(sub, subject, durable) : subscribe_plain(sub, subject);
    if (err < 0) {
        sub_free(sub);
        return err;
    }
    /* libnats counts the bytes of the data only: without a number, empty messages have no limit */
    (void)natsSubscription_SetPendingLimits(
        sub->nats, (int)KV_MAX(KV_MIN(pending_bytes, (size_t)INT_MAX) / MIN_MESSAGE, (size_t)1),
        (int)KV_MIN(pending_bytes, (size_t)INT_MAX));
    if (natsSubscription_SetOnCompleteCB(sub->nats, on_over, sub) != NATS_OK) {
        /* The connection was closed meanwhile. @sub isn't freed: nothing tells when its thread ends. */
        sub->fn = NULL;
        natsSubscription_Destroy(sub->nats);
        return -EAGAIN;
    }
    *ret = sub;
    return 0;
}

static uint64_t link_missed(struct kvp_link_sub *sub)
{
    int64_t n = 0;

    return natsSubscription_GetDropped(sub->nats, &n) == NATS_OK && n > 0 ? (uint64_t)n : 0;
}

KV_API const struct kv_module_head *kv_nats_get_abi(void);

const struct kv_module_head *kv_nats_get_abi(void)
{
    static const struct kvp_nats_abi abi = {.head = {sizeof(abi), KVP_NATS_ABI},
                                            .open = link_open,
                                            .close = link_close,
                                            .publish = link_publish,
                                            .flush = link_flush,
                                            .subscribe = link_subscribe,
                                            .unsubscribe = link_unsubscribe,
                                            .missed = link_missed,
                                            .server = link_server};

    return &abi.head;
}
