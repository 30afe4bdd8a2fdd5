// SPDX-License-Identifier: Apache-2.0
/**
 * Options of a daemon's HTTP server, access and log: rows for the table of a program (base/args/args.h)
 * whose values are a @type with fields of these names:
 *
 *     const char *host, *tls_cert, *tls_key, *auth_token_file, *access_log, *trace_id_header,
 *                *log_level, *log_format;
 *     uint64_t port, http_threads, max_connections, idle_timeout_ms;
 *     bool insecure;
 */
#ifndef KV_HTTP_ARGS_H
#define KV_HTTP_ARGS_H

#include <stddef.h>

#include "base/args/args.h"

/** The heading Serving and its rows. @port: the default port, as text. */
#define KH_ARGS_SERVING(type_, port_)                                                              \
    {.name = "Serving", .type = KV_ARG_GROUP},                                                     \
        {"host",                                                                                   \
         KV_ARG_STR,                                                                               \
         offsetof(type_, host),                                                                    \
         "ADDRESS",                                                                                \
         "Address to listen on (default 0.0.0.0). Requests from other machines are refused until " \
         "--auth-token-file or --insecure is given.",                                              \
         0,                                                                                        \
         0,                                                                                        \
         NULL,                                                                                     \
         false},                                                                                   \
        {"port",                                                                                   \
         KV_ARG_U64,                                                                               \
         offsetof(type_, port),                                                                    \
         "PORT",                                                                                   \
         "HTTP port (default " port_ "; 0 picks a free one and logs it).",                         \
         0,                                                                                        \
         65535,                                                                                    \
         NULL,                                                                                     \
         false},                                                                                   \
        {"http-threads",                                                                           \
         KV_ARG_U64,                                                                               \
         offsetof(type_, http_threads),                                                            \
         "N",                                                                                      \
         "Threads that answer HTTP requests (default 4).",                                         \
         1,                                                                                        \
         256,                                                                                      \
         NULL,                                                                                     \
         false},                                                                                   \
        {"tls-cert",                                                                               \
         KV_ARG_STR,                                                                               \
         offsetof(type_, tls_cert),                                                                \
         "FILE",                                                                                   \
         "Serve HTTPS with this PEM certificate chain; needs --tls-key.",                          \
         0,                                                                                        \
         0,                                                                                        \
         NULL,                                                                                     \
         false},                                                                                   \
    {                                                                                              \
        "tls-key", KV_ARG_STR, offsetof(type_, tls_key), "FILE",                                   \
            "The certificate's PEM private key.", 0, 0, NULL, false                                \
    }

/** The heading Protection and its rows. */
#define KH_ARGS_PROTECTION(type_)                                                                 \
    {.name = "Protection", .type = KV_ARG_GROUP},                                                 \
        {"auth-token-file",                                                                       \
         KV_ARG_STR,                                                                              \
         offsetof(type_, auth_token_file),                                                        \
         "FILE",                                                                                  \
         "Ask for a bearer token, one of the lines of FILE, on everything but /health.",          \
         0,                                                                                       \
         0,                                                                                       \
         NULL,                                                                                    \
         false},                                                                                  \
    {                                                                                             \
        "insecure", KV_ARG_FLAG, offsetof(type_, insecure), NULL,                                 \
            "Let every machine that reaches the port use it, without a token.", 0, 0, NULL, false \
    }

/** Limits of connections. */
#define KH_ARG_MAX_CONNECTIONS(type_)                                                          \
    {                                                                                          \
        "max-connections", KV_ARG_U64, offsetof(type_, max_connections), "N",                  \
            "HTTP connections at a time; the longest idle ones make room (default 4096, less " \
            "when "                                                                            \
            "the "                                                                             \
            "descriptor limit is lower).",                                                     \
            16, 1 << 20, NULL, false                                                           \
    }
#define KH_ARG_IDLE_TIMEOUT(type_)                                                              \
    {                                                                                           \
        "idle-timeout", KV_ARG_TIME, offsetof(type_, idle_timeout_ms), "TIME",                  \
            "Close connections that send no complete request for so long (default 75s).", 1000, \
            86400000, NULL, false                                                               \
    }

/** The heading Logging and its rows. */
#define KH_ARGS_LOGGING(type_)                                                                    \
    {.name = "Logging", .type = KV_ARG_GROUP},                                                    \
        {"log-level",                                                                             \
         KV_ARG_CHOICE,                                                                           \
         offsetof(type_, log_level),                                                              \
         "LEVEL",                                                                                 \
         "error, warn, info (default), debug (adds one line per request) or trace.",              \
         0,                                                                                       \
         0,                                                                                       \
         "error|warn|info|debug|trace",                                                           \
         false},                                                                                  \
        {"access-log",                                                                            \
         KV_ARG_STR,                                                                              \
         offsetof(type_, access_log),                                                             \
         "FILE",                                                                                  \
         "Append a JSON line per request to FILE. POST /reopen_logs or SIGHUP after a rotation.", \
         0,                                                                                       \
         0,                                                                                       \
         NULL,                                                                                    \
         false},                                                                                  \
        {"trace-id-header",                                                                       \
         KV_ARG_STR,                                                                              \
         offsetof(type_, trace_id_header),                                                        \
         "NAME",                                                                                  \
         "Request header whose value is the access log's trace_id (default x-trace-id).",         \
         0,                                                                                       \
         0,                                                                                       \
         NULL,                                                                                    \
         false},                                                                                  \
    {                                                                                             \
        "log-format", KV_ARG_CHOICE, offsetof(type_, log_format), "FORMAT",                       \
            "text (default) or json, to stderr.", 0, 0, "text|json", false                        \
    }

/** Check what no row can: options that go together. Returns 0; -EINVAL with @error. */
int kh_args_check(const char *tls_cert, const char *tls_key, bool insecure,
                  const char *auth_token_file, const char *trace_id_header, struct kv_error *error);

#endif
