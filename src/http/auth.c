// SPDX-License-Identifier: Apache-2.0
#include "http/auth.h"

#include <pthread.h>
#include <stdio.h>
#include <strings.h>
#include <sys/stat.h>

#include "base/core/log.h"
#include "base/net/endpoint.h"

/* Tokens lie padded to one size, so that comparing takes the same time whatever was presented. */
struct token {
    unsigned char bytes[KH_TOKEN_MAX];
    size_t len;
};

struct tokens {
    size_t n;
    struct token items[];
};

struct kh_auth {
    char *file;
    bool insecure;
    pthread_mutex_t lock; /* tokens: replaced by a reload */
    struct tokens *tokens;
};

/* Add one line, without its end. Blank lines and #comments are no tokens. */
static int add_token(struct tokens **tokens, char *line, size_t number, struct kv_error *error)
{
    struct tokens *grown;
    size_t len;

    line += strspn(line, " \t");
    len = strcspn(line, "\r\n");
    while (len && (line[len - 1] == ' ' || line[len - 1] == '\t'))
        len--;
    if (len == 0 || line[0] == '#')
        return 0;
    if (memchr(line, ' ', len) || memchr(line, '\t', len)) /* RFC 6750; and a comment may follow */
        return kv_fail(error, -EINVAL, 0,
                       "line %zu: a token has no blanks, and a comment is a line of its own",
                       number);
    if (len > KH_TOKEN_MAX)
        return kv_fail(error, -EMSGSIZE, 0, "line %zu: a token has at most %d bytes", number,
                       KH_TOKEN_MAX);
    if ((*tokens)->n == KH_TOKENS_MAX)
        return kv_fail(error, -E2BIG, 0, "more than %d tokens", KH_TOKENS_MAX);
    grown = realloc(*tokens, sizeof(*grown) + ((*tokens)->n + 1) * sizeof(grown->items[0]));
    if (!grown)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    *tokens = grown;
    memset(&grown->items[grown->n], 0, sizeof(grown->items[0]));
    memcpy(grown->items[grown->n].bytes, line, len);
    grown->items[grown->n++].len = len;
    return 0;
}

static void warn_if_readable(FILE *f, const char *file)
{
    struct stat st;
    char quoted[300];

    if (fstat(fileno(f), &st) == 0 && S_ISREG(st.st_mode) && (st.st_mode & S_IROTH))
        kv_log_warn("auth", "the token file is readable by everybody", "file=%s",
                    kv_log_quote(quoted, sizeof(quoted), file));
}

static int read_lines(FILE *f, struct tokens **tokens, struct kv_error *error)
{
    char line[4096];
    size_t number = 0;
    int rc = 0;

    while (rc == 0 && fgets(line, sizeof(line), f)) {
        number++;
        /* The rest of a long comment, or what follows a NUL, must not pass for a token. */
        if (!strchr(line, '\n') && !feof(f))
            rc = kv_fail(error, -EMSGSIZE, 0, "line %zu is too long or has a NUL byte", number);
        else
            rc = add_token(tokens, line, number, error);
    }
    explicit_bzero(line, sizeof(line));
    if (rc < 0)
        return rc;
    if (ferror(f))
        return kv_fail(error, -EIO, 0, "can't read");
    if ((*tokens)->n == 0)
        return kv_fail(error, -ENOENT, 0, "no token in it");
    return 0;
}

static int read_tokens(const char *file, struct tokens **ret, struct kv_error *error)
{
    struct tokens *tokens = calloc(1, sizeof(*tokens));
    FILE *f;
    int rc;

    if (!tokens)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    f = fopen(file, "re");
    if (!f) {
        rc = kv_fail(error, -errno, 0, "can't open: %s", strerror(errno));
        free(tokens);
        return rc;
    }
    rc = read_lines(f, &tokens, error);
    if (rc == 0)
        warn_if_readable(f, file);
    fclose(f);
    if (rc < 0) {
        free(tokens);
        return rc;
    }
    *ret = tokens;
    return 0;
}

static void free_tokens(struct tokens *tokens)
{
    if (tokens)
        explicit_bzero(tokens->items, tokens->n * sizeof(tokens->items[0]));
    free(tokens);
}

int kh_auth_create(const char *token_file, bool insecure, struct kh_auth **ret,
                   struct kv_error *error)
{
    struct kh_auth *auth = calloc(1, sizeof(*auth));
    int rc;

    if (!auth)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    pthread_mutex_init(&auth->lock, NULL);
    auth->insecure = insecure;
    if (token_file) {
        auth->file = strdup(token_file);
        rc = auth->file ? kh_auth_reload(auth, error) : kv_fail(error, -ENOMEM, 0, "out of memory");
        if (rc < 0) {
            kh_auth_destroy(auth);
            return rc;
        }
    }
    *ret = auth;
    return 0;
}

void kh_auth_destroy(struct kh_auth *auth)
{
    if (!auth)
        return;
    free_tokens(auth->tokens);
    pthread_mutex_destroy(&auth->lock);
    free(auth->file);
    free(auth);
}

int kh_auth_reload(struct kh_auth *auth, struct kv_error *error)
{
    struct tokens *fresh = NULL, *old;
    struct kv_error why = {0};
    int rc;

    if (!auth->file)
        return 0;
    rc = read_tokens(auth->file, &fresh, &why);
    if (rc < 0)
        return kv_fail(error, rc, 0, "token file %.100s: %.90s", auth->file, why.text);
    pthread_mutex_lock(&auth->lock);
    old = auth->tokens;
    auth->tokens = fresh;
    pthread_mutex_unlock(&auth->lock);
    free_tokens(old);
    return 0;
}

/* No early exit anywhere: neither the token that matched nor where one differed shows in the time.
 */
static bool is_known(const struct tokens *tokens, const char *presented, size_t len)
{
    unsigned char padded[KH_TOKEN_MAX] = {0};
    unsigned found = 0;

    memcpy(padded, presented, len);
    for (size_t i = 0; i < tokens->n; i++) {
        const struct token *token = &tokens->items[i];
        unsigned long differs = token->len ^ len;

        for (size_t k = 0; k < KH_TOKEN_MAX; k++)
            differs |= (unsigned long)(token->bytes[k] ^ padded[k]);
        found |= differs == 0;
    }
    explicit_bzero(padded, sizeof(padded));
    return found;
}

static bool has_valid_token(struct kh_auth *auth, const char *authorization)
{
    static const char scheme[] = "Bearer";
    size_t len;
    bool ok;

    if (!authorization || strncasecmp(authorization, scheme, sizeof(scheme) - 1) != 0)
        return false;
    authorization += sizeof(scheme) - 1;
    if (*authorization != ' ')
        return false;
    authorization += strspn(authorization, " ");
    len = strlen(authorization);
    while (len && (authorization[len - 1] == ' ' || authorization[len - 1] == '\t'))
        len--;
    if (len == 0 || len > KH_TOKEN_MAX)
        return false;
    pthread_mutex_lock(&auth->lock);
    ok = is_known(auth->tokens, authorization, len);
    pthread_mutex_unlock(&auth->lock);
    return ok;
}

/* Return true when a port begins at @text: ":" and digits to the end. */
static bool is_port(const char *text)
{
    return !*text || (*text == ':' && text[1 + strspn(text + 1, "0123456789")] == '\0');
}

/*
 * Return true for "localhost", 127.0.0.0/8, [::1], and 0.0.0.0 and [::], which connect to this
 * machine, too. Each may have a port.
 */
static bool names_this_machine(const char *text)
{
    struct kv_endpoint endpoint = {.scheme = KV_SCHEME_TCP, .ipv6 = *text == '['};
    static const uint8_t v4[13] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127},
                         v6[16] = {[15] = 1}, none4[16] = {[10] = 0xff, 0xff}, none6[16] = {0};
    const char *host = text + endpoint.ipv6, *end = host + strcspn(host, endpoint.ipv6 ? "]" : ":");
    uint8_t address[16];

    if ((endpoint.ipv6 && *end != ']') || (size_t)(end - host) >= sizeof(endpoint.host) ||
        !is_port(end + endpoint.ipv6))
        return false;
    memcpy(endpoint.host, host, (size_t)(end - host));
    if (!endpoint.ipv6 && (strcasecmp(endpoint.host, "localhost") == 0 ||
                           strcasecmp(endpoint.host, "localhost.") == 0))
        return true;
    return !strchr(endpoint.host, '%') && kv_endpoint_address(&endpoint, address) &&
           (memcmp(address, v4, sizeof(v4)) == 0 || memcmp(address, v6, sizeof(v6)) == 0 ||
            memcmp(address, none4, sizeof(none4)) == 0 ||
            memcmp(address, none6, sizeof(none6)) == 0);
}

static bool comes_from_this_machine(const char *origin)
{
    if (strncasecmp(origin, "http://", 7) == 0)
        return names_this_machine(origin + 7);
    return strncasecmp(origin, "https://", 8) == 0 && names_this_machine(origin + 8);
}

/* Admit a request without tokens: the client is on this machine, and Host and Origin name it. */
static bool admit_local(const struct kh_request *request, struct kh_reply *reply)
{
    if (!request->loopback)
        kh_reply_error(reply, 403,
                       "requests from other machines are refused by default; start kv-indexer with "
                       "--auth-token-file FILE (bearer tokens) or with --insecure");
    else if (request->host && !names_this_machine(request->host))
        kh_reply_error(
            reply, 403,
            "the Host header must be localhost or a loopback address, it is '%.100s'; to "
            "be reached under other names, start kv-indexer with --auth-token-file FILE "
            "(bearer tokens) or with --insecure",
            request->host);
    else if (request->origin && !comes_from_this_machine(request->origin))
        kh_reply_error(reply, 403,
                       "pages of other sites are refused, this one has the Origin '%.100s'; to be "
                       "used by them, start kv-indexer with --auth-token-file FILE (bearer tokens) "
                       "or with --insecure",
                       request->origin);
    else
        return true;
    return false;
}

bool kh_auth_admit(struct kh_auth *auth, const struct kh_request *request, struct kh_reply *reply)
{
    if (auth->insecure || (request->route && request->route->flags & KH_ROUTE_OPEN))
        return true;
    if (!auth->file)
        return admit_local(request, reply);
    if (request->route && request->route->flags & KH_ROUTE_TOKENLESS)
        return true;
    if (has_valid_token(auth, request->authorization))
        return true;
    kh_reply_header(reply, "WWW-Authenticate",
                    request->authorization ? "Bearer realm=\"kv-indexer\", error=\"invalid_token\""
                                           : "Bearer realm=\"kv-indexer\"");
    kh_reply_error(reply, 401,
                   request->authorization
                       ? "unknown token"
                       : "a token is needed: send the header Authorization: Bearer TOKEN");
    return false;
}

char *kh_auth_first_token(struct kh_auth *auth)
{
    char *token;

    if (!auth->file)
        return NULL;
    pthread_mutex_lock(&auth->lock);
    token = strndup((const char *)auth->tokens->items[0].bytes, auth->tokens->items[0].len);
    pthread_mutex_unlock(&auth->lock);
    return token;
}
