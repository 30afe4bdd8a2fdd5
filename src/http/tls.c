// SPDX-License-Identifier: Apache-2.0
#include "http/tls.h"

#include <gnutls/abstract.h>
#include <gnutls/gnutls.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"

#define MAX_CHAIN 16
#define KEY_ID_BYTES 32

/*
 * A chain and its key. GnuTLS uses them without copying during a handshake, so none is freed before
 * the end; each reload adds one.
 */
struct pair {
    struct pair *older;
    gnutls_pcert_st chain[MAX_CHAIN];
    unsigned n;
    gnutls_privkey_t key;
};

struct kh_tls {
    char *cert_file, *key_file;
    struct pair *newest;
};

static _Atomic(struct pair *) shown;

static int show(gnutls_session_t session, const gnutls_datum_t *authorities, int n_authorities,
                const gnutls_pk_algorithm_t *algorithms, int n_algorithms, gnutls_pcert_st **ret,
                unsigned *ret_n, gnutls_privkey_t *ret_key)
{
    struct pair *pair = atomic_load_explicit(&shown, memory_order_acquire);

    (void)session, (void)authorities, (void)n_authorities, (void)algorithms, (void)n_algorithms;
    if (!pair)
        return -1;
    *ret = pair->chain;
    *ret_n = pair->n;
    *ret_key = pair->key;
    return 0;
}

void *kh_tls_callback(void)
{
    gnutls_certificate_retrieve_function2 *callback = show;

    return (void *)callback;
}

static void free_pair(struct pair *pair)
{
    for (unsigned i = 0; i < pair->n; i++)
        gnutls_pcert_deinit(&pair->chain[i]);
    if (pair->key)
        gnutls_privkey_deinit(pair->key);
    free(pair);
}

static bool key_id(gnutls_pubkey_t key, unsigned char *ret)
{
    size_t len = KEY_ID_BYTES;

    return gnutls_pubkey_get_key_id(key, GNUTLS_KEYID_USE_SHA256, ret, &len) == 0 &&
           len == KEY_ID_BYTES;
}

/* Return true when the key belongs to the chain's first certificate. */
static bool belong(const struct pair *pair)
{
    unsigned char of_cert[KEY_ID_BYTES], of_key[KEY_ID_BYTES];
    gnutls_pubkey_t public;
    bool ok;

    if (gnutls_pubkey_init(&public) < 0)
        return false;
    ok = gnutls_pubkey_import_privkey(public, pair->key, 0, 0) == 0 && key_id(public, of_key) &&
         key_id(pair->chain[0].pubkey, of_cert) && memcmp(of_cert, of_key, KEY_ID_BYTES) == 0;
    gnutls_pubkey_deinit(public);
    return ok;
}

static int load_file(const char *file, gnutls_datum_t *ret, struct kv_error *error)
{
    int rc = gnutls_load_file(file, ret);

    if (rc < 0) /* only errno has the reason */
        return kv_fail(error, errno ? -errno : -EIO, 0, "can't read %.150s: %s", file,
                       errno ? strerror(errno) : gnutls_strerror(rc));
    return 0;
}

static int read_chain(const char *file, struct pair *pair, struct kv_error *error)
{
    gnutls_datum_t pem;
    unsigned n = MAX_CHAIN;
    int rc = load_file(file, &pem, error);

    if (rc < 0)
        return rc;
    rc = gnutls_pcert_list_import_x509_raw(pair->chain, &n, &pem, GNUTLS_X509_FMT_PEM, 0);
    gnutls_free(pem.data);
    if (rc < 0)
        return kv_fail(error, -EINVAL, 0, "%.150s is no PEM certificate chain: %s", file,
                       gnutls_strerror(rc));
    pair->n = n;
    return 0;
}

static int read_key(const char *file, struct pair *pair, struct kv_error *error)
{
    gnutls_datum_t pem;
    int rc = load_file(file, &pem, error);

    if (rc < 0)
        return rc;
    rc = gnutls_privkey_init(&pair->key);
    if (rc == 0)
        rc = gnutls_privkey_import_x509_raw(pair->key, &pem, GNUTLS_X509_FMT_PEM, NULL, 0);
    gnutls_memset(pem.data, 0, pem.size);
    gnutls_free(pem.data);
    if (rc < 0)
        return kv_fail(error, -EINVAL, 0, "%.150s is no PEM private key: %s", file,
                       gnutls_strerror(rc));
    return 0;
}

int kh_tls_reload(struct kh_tls *tls, struct kv_error *error)
{
    struct pair *pair = calloc(1, sizeof(*pair));
    int rc;

    if (!pair)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    rc = read_chain(tls->cert_file, pair, error);
    if (rc == 0)
        rc = read_key(tls->key_file, pair, error);
    if (rc == 0 && !belong(pair))
        rc = kv_fail(error, -EINVAL, 0, "%.150s is not the key of the certificate", tls->key_file);
    if (rc < 0) {
        free_pair(pair);
        return rc;
    }
    pair->older = tls->newest;
    tls->newest = pair;
    atomic_store_explicit(&shown, pair, memory_order_release);
    return 0;
}

int kh_tls_create(const char *cert_file, const char *key_file, struct kh_tls **ret,
                  struct kv_error *error)
{
    struct kh_tls *tls;
    int rc;

    if (atomic_load_explicit(&shown, memory_order_acquire))
        return kv_fail(error, -EBUSY, 0, "this process has a certificate");
    tls = calloc(1, sizeof(*tls));
    if (tls) {
        tls->cert_file = strdup(cert_file);
        tls->key_file = strdup(key_file);
    }
    if (!tls || !tls->cert_file || !tls->key_file)
        rc = kv_fail(error, -ENOMEM, 0, "out of memory");
    else
        rc = kh_tls_reload(tls, error);
    if (rc < 0) {
        kh_tls_destroy(tls);
        return rc;
    }
    *ret = tls;
    return 0;
}

void kh_tls_destroy(struct kh_tls *tls)
{
    if (!tls)
        return;
    if (tls->newest)
        atomic_store_explicit(&shown, NULL, memory_order_release);
    while (tls->newest) {
        struct pair *pair = tls->newest;

        tls->newest = pair->older;
        free_pair(pair);
    }
    free(tls->cert_file);
    free(tls->key_file);
    free(tls);
}
