// SPDX-License-Identifier: Apache-2.0
/* Endpoints and the rules that admit them. An accepted endpoint, written back, parses to the same;
 * a refusal has one of the known phrases. A rule admits only endpoints of its kind. */
#include <stdio.h>
#include <strings.h>

#include "base/core/error.h"
#include "base/net/endpoint_rule.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool ok)
{
    if (!ok)
        abort();
}

static void check_accepted(const struct kv_endpoint *e)
{
    static const char *const schemes[] = {"tcp", "ipc", "inproc"};
    struct kv_endpoint again;
    char text[300], port[8];

    require(memchr(e->host, '\0', sizeof(e->host)) != NULL && e->host[0] != '\0');
    require(e->scheme == KV_SCHEME_TCP || (!e->ipv6 && !e->wildcard && e->port == 0));
    require(!e->any_port || e->port == 0);
    snprintf(port, sizeof(port), e->any_port ? "*" : "%u", (unsigned)e->port);
    snprintf(text, sizeof(text), "%s://%s%s%s%s%s", schemes[e->scheme], e->ipv6 ? "[" : "", e->host,
             e->ipv6 ? "]" : "", e->scheme == KV_SCHEME_TCP ? ":" : "",
             e->scheme == KV_SCHEME_TCP ? port : "");
    require(kv_endpoint_parse(text, &again, NULL) == 0);
    require(again.scheme == e->scheme && again.port == e->port && again.any_port == e->any_port &&
            again.wildcard == e->wildcard && again.ipv6 == e->ipv6 &&
            strcmp(again.host, e->host) == 0);
}

static void check_refused(const char *why)
{
    static const char *const phrases[] = {
        "missing scheme",   "missing address",     "missing TCP port",
        "missing TCP host", "missing closing `]`", "invalid TCP port",
        "invalid TCP host", "unsupported scheme",  "too long"};

    for (size_t i = 0; i < KV_COUNT(phrases); i++)
        if (strcmp(why, phrases[i]) == 0)
            return;
    abort();
}

/* Require that an admitted endpoint is of the kind that @rule names. */
static void check_admitted(const struct kv_endpoint_rule *rule, const struct kv_endpoint *e)
{
    uint8_t address[16];
    size_t len = strlen(e->host);

    switch (rule->kind) {
    case KV_RULE_ALL:
        return;
    case KV_RULE_PATH:
    case KV_RULE_BELOW:
        require(e->scheme == KV_SCHEME_IPC);
        require(strncmp(e->host, rule->text, strlen(rule->text)) == 0);
        return;
    case KV_RULE_NET:
        require(kv_endpoint_address(e, address));
        require(memcmp(address, rule->net, rule->bits / 8) == 0);
        break;
    case KV_RULE_NAME:
    case KV_RULE_DOMAIN:
        require(!kv_endpoint_address(e, address) && !e->wildcard);
        len -= e->host[len - 1] == '.';
        require(len >= strlen(rule->text));
        require(strncasecmp(e->host + len - strlen(rule->text), rule->text, strlen(rule->text)) ==
                0);
        break;
    case KV_RULE_HOSTS:
        break;
    }
    require(e->scheme == KV_SCHEME_TCP && e->port >= rule->first_port &&
            e->port <= rule->last_port);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kv_endpoint_rule rule;
    struct kv_endpoint endpoint;
    const char *why = NULL;
    char text[1024], *pattern;

    if (size >= sizeof(text))
        return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    pattern = strchr(text, '\n'); /* second line: a pattern */
    if (pattern)
        *pattern++ = '\0';
    if (kv_endpoint_parse(text, &endpoint, &why) < 0) {
        check_refused(why);
        return 0;
    }
    check_accepted(&endpoint);
    if (pattern && kv_endpoint_rule_parse(pattern, &rule, NULL) == 0 &&
        kv_endpoint_rule_admits(&rule, &endpoint))
        check_admitted(&rule, &endpoint);
    return 0;
}
